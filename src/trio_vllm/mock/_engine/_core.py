"""One mock engine core, sans IO: messages in, messages out.

Theory of operation. The caller hands over what arrives (`MockEngine.handle`) and, while there is work
(`MockEngine.has_work`), lets the engine make steps (`MockEngine.step`); both return what to send. In
a step every running request gets its next tokens, and each client that has such requests gets one
message. Whoever joins, leaves or wants more than tokens makes a step an eventful one; all other steps
are copies of the last with other tokens.

The engine follows vLLM's (``vllm/v1/engine/core.py``), except that nothing kills it: what a real one
dies of is refused or ignored, and noted in the journal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from trio_vllm._errors import DecodeError
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreRequest,
    FinishReason,
    Frames,
    StartDpWave,
    UtilityRequest,
    decode_engine_message,
)

from ._admission import Admission, Refusal
from ._answers import Answers
from ._intake import Intake
from ._journal import Journal, Summary
from ._load import LoadReporter
from ._messages import Draft, Envelope, Outgoing
from ._rows import NIL
from ._scheduler import Scheduler
from ._sessions import Sessions
from ._tokens import TokenSource
from ._utilities import Utilities
from ._wave import Wave

if TYPE_CHECKING:
    from ._config import MockEngineConfig


class MockEngine:
    """An engine core without a model; inert, driven by its caller.

    Args:
      config: How it behaves.
      engine_index: Its number, which its tokens depend on.
      client_count: How many output sockets the frontend has.
      has_coordinator: Whether the frontend named a data-parallel coordinator.
      fast_path: False sends all requests along the plain path, for comparison.

    All times are seconds of one monotonic clock.
    """

    def __init__(
        self,
        config: MockEngineConfig,
        engine_index: int = 0,
        *,
        client_count: int = 1,
        has_coordinator: bool = False,
        fast_path: bool = True,
    ) -> None:
        self.config = config
        self.engine_index = engine_index
        self.has_work = False
        """Whether to call `step`. It may turn out that nothing was to be done."""
        self.journal = Journal(config.log_requests)
        self._client_count = client_count
        self._has_coordinator = has_coordinator
        source = TokenSource(config.vocab_size)
        self._scheduler = Scheduler(config, source, client_count, fast_path=fast_path)
        self._answers = Answers(engine_index)
        self._utilities = Utilities(self, config)
        self._pause = self._utilities.pause
        self._sessions = Sessions()
        self._intake = Intake(
            admission=Admission(engine_index, config, source),
            scheduler=self._scheduler,
            sessions=self._sessions,
            answers=self._answers,
            journal=self.journal,
            pause=self._pause,
            chunk_size=config.output_token_chunk_size,
            tells_ends=has_coordinator,
        )
        self._load = LoadReporter()
        self._wave = Wave(engine_index) if config.lockstep and has_coordinator else None
        self._is_steady = False  # until a message comes, steps make tokens and nothing else
        self._is_shutting_down = False
        self._step_count = 0
        self._stepped_at = -math.inf
        self.weight_version = "default"

    # Messages -----------------------------------------------------------------------------------

    def handle(self, frames: Frames, now: float) -> list[Outgoing]:
        """Take one message from an input socket; give what to send at once, often nothing."""
        self._begin(now)
        try:
            message = decode_engine_message(frames)
        except DecodeError as error:
            self._undecodable(error)
        else:
            match message:
                case EngineCoreRequest():
                    self._add(message)
                case AbortRequests():
                    self._intake.abort(message.request_ids)
                case UtilityRequest():
                    self._call(message)
                case StartDpWave():
                    self._start_wave(message)
        return self._answers.take()

    def _begin(self, now: float) -> None:
        self._answers.now = now
        self._is_steady, self.has_work = False, True

    def _undecodable(self, error: DecodeError) -> None:
        request_id = error.request_id
        if request_id is None:
            self.journal.ignored(str(error))
            return
        is_new = self._scheduler.get(request_id) is None and self._sessions.get(request_id) is None
        self.journal.refused(request_id, str(error), answered=is_new)
        if is_new:
            # Whose request it is stands in a field that may be broken too. To the other clients
            # the id is unknown, so that they ignore the answer.
            refusal = Refusal(f"the request cannot be read: {error.where} {error.reason}")
            for client_index in range(self._client_count):
                self._answers.refuse(client_index, request_id, refusal)

    def _is_reachable(self, client_index: int, what: str) -> bool:
        if client_index < self._client_count:
            return True
        clients = f"there are {self._client_count} clients"
        self.journal.ignored(f"{what} is for client {client_index}, but {clients}")
        return False

    def _add(self, wire: EngineCoreRequest) -> None:
        if not self._is_reachable(wire.client_index, f"request {wire.request_id!r}"):
            return
        if self._is_shutting_down:
            self._answers.finish(wire.client_index, [wire.request_id], FinishReason.ABORT)
        elif self._intake.add(wire):
            if wire.lora_request is not None:
                self._utilities.use_adapter(wire.lora_request.lora_int_id)
            if self._wave is not None:
                wave = self._wave.request_came(wire.current_wave, paused=self._pause.is_paused)
                if wave is not None:
                    self._answers.wave(start_wave=wave)

    def _call(self, request: UtilityRequest) -> None:
        if not self._is_reachable(request.client_index, f"utility call {request.method!r}"):
            return
        if self._is_shutting_down:
            output = Utilities.refuse(request, "Server shutting down")
            self._answers.utility(request.client_index, output)
        elif (answer := self._utilities.call(request)) is not None:
            self._answers.utility(request.client_index, answer)

    def shut_down(self, now: float, *, drain: bool) -> list[Outgoing]:
        """From now on refuse everything; abort what there is, unless it may ``drain``."""
        self._begin(now)
        self._is_shutting_down = True
        if not drain:
            self.abort_all()
        return self._answers.take()

    # What utility calls see and do --------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """Which weights the tokens come from; stands in every message of a step."""
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self._weight_version = version
        self._envelope = Envelope(self.engine_index, version)
        self._scheduler.forget_messages()

    @property
    def has_unfinished(self) -> bool:
        """Whether requests are running or waiting."""
        return any(self._scheduler.counts)

    @property
    def has_running(self) -> bool:
        """Whether requests are running."""
        return self._scheduler.counts[0] > 0

    def abort_all(self) -> None:
        """End all requests and tell their clients."""
        self._intake.abort_all()

    def preempt_all(self) -> None:
        """Put all running requests back into the queue."""
        self._scheduler.preempt_all(self._answers.now)

    # Steps --------------------------------------------------------------------------------------

    @property
    def summary(self) -> Summary:
        """Counts since the start."""
        self.journal.summary.tokens = self._scheduler.tokens_made
        self.journal.summary.end = self._stepped_at
        return self.journal.summary

    def step(self, now: float) -> list[Outgoing]:
        """Make a step, if there is something to step; give what to send."""
        self._step_count += 1
        self._stepped_at = now
        if self._is_steady:
            messages = self._scheduler.steady_step(self._envelope, now)
            if messages is not None:
                return messages
        self._answers.now = now
        drafts: defaultdict[int, Draft] = defaultdict(Draft)
        if self._pause.is_stepping:
            self._step_requests(drafts, now)
        for client_index, request_ids in self._intake.take_untold().items():
            drafts[client_index].finished += request_ids
        messages = self._seal(drafts, now)
        if self._utilities.has_deferred and not self.has_running:
            for client_index, output in self._utilities.overdue():
                self._answers.utility(client_index, output)
        self._report_to_coordinator(now)
        self._settle()
        return messages + self._answers.take()

    def steps(self, now: float, limit: int) -> list[Outgoing]:
        """Make several steps, ``limit`` at most, or just one if that is eventful."""
        if self._is_steady and limit > 1:
            made = self._scheduler.steady_steps(self._envelope, now, limit)
            if made is not None:
                count, messages = made
                self._step_count += count
                self._stepped_at = now
                return messages
        return self.step(now)

    def _step_requests(self, drafts: defaultdict[int, Draft], now: float) -> None:
        joined, finished = self._scheduler.step(
            now, drafts.__getitem__, admit=not self._pause.is_paused
        )
        for request in joined:
            self._load.prefilled(request.prompt_len)
        for request in finished:
            self._intake.ended(request, request.finish_reason)

    def _seal(self, drafts: dict[int, Draft], now: float) -> list[Outgoing]:
        counts = self._scheduler.counts
        stats = NIL
        if self._load.is_news(counts):
            stats = self._load.tell(counts, *self._wave_progress())
            if not drafts:
                drafts[0] = Draft()
        messages: list[Outgoing] = []
        for client_index, draft in sorted(drafts.items()):
            messages.append((client_index, self._envelope.seal(draft, stats, now)))
            stats = NIL  # once is enough
        return messages

    def _settle(self) -> None:
        """Work out whether there is more to do, and whether that is tokens and nothing else."""
        running, waiting = counts = self._scheduler.counts
        can_run = self._pause.is_stepping and running > 0
        can_start = not self._pause.is_paused and waiting > 0
        is_untold = self._has_coordinator and self._load.is_news_to_coordinator(counts)
        self._is_steady = can_run and not (can_start or is_untold) and self._scheduler.is_all_fast
        self.has_work = can_run or can_start or is_untold

    # Data parallelism ---------------------------------------------------------------------------

    def _wave_progress(self) -> tuple[int, int]:
        """The step and the wave, which mean something only in lockstep."""
        return (self._step_count, self._wave.current) if self._wave is not None else (0, 0)

    def _report_to_coordinator(self, now: float) -> None:
        counts = self._scheduler.counts
        if self._has_coordinator and self._load.is_due_to_coordinator(counts, now):
            self._answers.load(counts, *self._wave_progress())
            self._load.told_coordinator(counts, now)

    def start_wave(self, notice: StartDpWave, now: float) -> None:
        """The coordinator starts a wave; engines of a dense model have none."""
        self._begin(now)
        self._start_wave(notice)

    def _start_wave(self, notice: StartDpWave) -> None:
        if self._wave is None:
            self.journal.ignored("START_DP_WAVE is for engines that run in lockstep")
        elif not self._pause.is_paused:
            self._wave.start(notice)

    @property
    def is_in_wave(self) -> bool:
        """Whether this engine runs in step with others; always false without lockstep."""
        return self._wave is not None and self._wave.is_running

    def complete_wave(self, now: float) -> list[Outgoing]:
        """All engines are out of work; the first one tells the coordinator."""
        if self._wave is None:
            return []
        self._answers.now = now
        wave = self._wave.complete()
        if self.engine_index == 0:
            self._answers.wave(wave_complete=wave)
        return self._answers.take()
