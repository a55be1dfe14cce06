"""An engine's part in data-parallel waves.

Mirrors ``DPEngineCoreProc`` in upstream ``vllm/v1/engine/core.py`` (0.33): an idle engine that gets
a request tells the coordinator, which wakes the others; when all are out of work, the wave is over.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.mock.content import TokenSource
from trio_vllm.mock.encoding import COORDINATOR, NIL, Draft, Envelope, Outgoing, StatsTemplate
from trio_vllm.mock.events import Journal, Summary
from trio_vllm.mock.request import Admission, Refusal
from trio_vllm.mock.scheduler import Scheduler
from trio_vllm.mock.utilities import Utilities
from trio_vllm.protocol import (
    AbortRequests,
    DpControlOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Frames,
    RequestBatchOutputs,
    RequestErrorInfo,
    SchedulerStats,
    StartDpWave,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_engine_message,
    encode_outputs,
)

if TYPE_CHECKING:
    from trio_vllm.mock.config import MockEngineConfig
    from trio_vllm.mock.request import Request
    from trio_vllm.mock.utilities import Pause

# MERGED mock/_engine/_load: When an engine tells how busy it is, and to whom.
#
# Clients get the statistics with the next message after the counts have changed, not with every
# message: nothing else in them ever changes. The coordinator gets them in messages of their own, but
# not after every step: a mock makes a hundred times as many steps a second as the engines that the
# coordinator was made for.
# MERGED mock/_engine/_answers: What an engine answers outside of steps: ends, refusals, and results of utility calls.
# MERGED mock/_engine/_sessions: Streaming-input sessions: one request id whose prompt comes in chunks.
#
# Each chunk is an ADD with ``resumable`` set; it is decoded and ended like a request of its own, and
# its tokens go on where those of the last chunk ended. A final ADD without ``resumable`` carries no
# input; it says that no chunk will follow.
# MERGED mock/_engine/_intake: Requests coming and going: what an ADD and an ABORT do.
# MERGED mock/_engine/_core: One mock engine core, sans IO: messages in, messages out.
#
# Theory of operation. The caller hands over what arrives (`MockEngine.handle`) and, while there is work
# (`MockEngine.has_work`), lets the engine make steps (`MockEngine.step`); both return what to send. In
# a step every running request gets its next tokens, and each client that has such requests gets one
# message. Whoever joins, leaves or wants more than tokens makes a step an eventful one; all other steps
# are copies of the last with other tokens.
#
# The engine follows vLLM's (``vllm/v1/engine/core.py``), except that nothing kills it: what a real one
# dies of is refused or ignored, and noted in the journal.


@attrs.define
class Wave:
    """The wave that an engine is in, or waits for."""

    engine_index: int
    current: int = 0
    is_running: bool = False

    def request_came(self, wave: int, *, paused: bool) -> int | None:
        """A request came from a frontend that believes in ``wave``; the wave to announce, if any."""
        self.current = max(self.current, wave)
        if self.is_running or paused:
            return None
        self.is_running = True
        return self.current

    def start(self, notice: StartDpWave) -> None:
        """The coordinator starts a wave."""
        if notice.exclude_engine_index != self.engine_index and notice.wave >= self.current:
            self.current = notice.wave
            self.is_running = True

    def complete(self) -> int:
        """All engines are out of work; the wave that is over."""
        self.is_running = False
        self.current += 1
        return self.current - 1


COORDINATOR_INTERVAL = 0.02
"""Seconds between two messages to the coordinator while requests run."""

Counts = tuple[int, int]
"""Requests running and waiting."""


@attrs.define
class LoadReporter:
    """What was told last, and what has changed since."""

    _template: StatsTemplate = attrs.field(factory=StatsTemplate, init=False)
    _told: Counts = (0, 0)
    _told_coordinator: Counts = (0, 0)
    _next_for_coordinator: float = 0.0
    _prefills: int = 0
    _prefilled_tokens: int = 0

    def prefilled(self, prompt_len: int) -> None:
        """The prompt of a request was looked up in the prefix cache, in vain."""
        self._prefills += 1
        self._prefilled_tokens += prompt_len

    def is_news(self, counts: Counts) -> bool:
        """Whether clients do not know of these counts yet."""
        return counts != self._told or self._prefills > 0

    def tell(self, counts: Counts, step: int = 0, wave: int = 0) -> bytes:
        """The encoded statistics for a client, who knows them from now on."""
        stats = self._template.fill(*counts, step, wave, self._prefills, self._prefilled_tokens)
        self._told = counts
        self._prefills = self._prefilled_tokens = 0
        return stats

    def is_news_to_coordinator(self, counts: Counts) -> bool:
        """Whether the coordinator does not know of these counts yet."""
        return counts != self._told_coordinator

    def is_due_to_coordinator(self, counts: Counts, now: float) -> bool:
        """Whether the coordinator should be told now: not too often, but at once when idle."""
        is_time = now >= self._next_for_coordinator or not counts[0]
        return is_time and self.is_news_to_coordinator(counts)

    def told_coordinator(self, counts: Counts, now: float) -> None:
        """The coordinator was told."""
        self._told_coordinator = counts
        self._next_for_coordinator = now + COORDINATOR_INTERVAL


@attrs.define
class Answers:
    """Messages to send, in order."""

    _engine_index: int
    now: float = 0.0
    """The time that they carry, that of the message or step in hand."""
    _messages: list[Outgoing] = attrs.field(factory=list, init=False)

    def take(self) -> list[Outgoing]:
        """Give up all messages."""
        messages = self._messages
        if messages:
            self._messages = []
        return messages

    def finish(
        self,
        client_index: int,
        request_ids: list[str],
        reason: FinishReason,
        error: RequestErrorInfo | None = None,
    ) -> None:
        """End requests that get no token any more."""
        outputs = RequestBatchOutputs(
            engine_index=self._engine_index,
            outputs=[
                EngineCoreOutput(request_id, finish_reason=reason, error=error)
                for request_id in request_ids
            ],
            timestamp=self.now,
            finished_requests=request_ids,
        )
        self._messages.append((client_index, encode_outputs(outputs)))

    def refuse(self, client_index: int, request_id: str, refusal: Refusal) -> None:
        """End a request with an error."""
        error = RequestErrorInfo(
            code=refusal.code, message=refusal.message, retryable=refusal.retryable
        )
        self.finish(client_index, [request_id], FinishReason.ERROR, error)

    def utility(self, client_index: int, output: UtilityOutput) -> None:
        """Answer a utility call."""
        message = UtilityCallOutput(
            engine_index=self._engine_index, output=output, timestamp=self.now
        )
        self._messages.append((client_index, encode_outputs(message)))

    def load(self, counts: Counts, step: int, wave: int) -> None:
        """Tell the coordinator how many requests run and wait."""
        running, waiting = counts
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            step_counter=step,
            current_wave=wave,
        )
        outputs = RequestBatchOutputs(
            engine_index=self._engine_index, scheduler_stats=stats, timestamp=self.now
        )
        self._messages.append((COORDINATOR, encode_outputs(outputs)))

    def wave(self, *, start_wave: int | None = None, wave_complete: int | None = None) -> None:
        """Tell the coordinator that a wave starts or is over."""
        notice = DpControlOutput(
            engine_index=self._engine_index,
            start_wave=start_wave,
            wave_complete=wave_complete,
            timestamp=self.now,
        )
        self._messages.append((COORDINATOR, encode_outputs(notice)))


@attrs.define
class Session:
    """One session that is open."""

    client_index: int
    emitted: int = 0
    """Tokens of the chunks that have ended."""
    queue: deque[EngineCoreRequest] = attrs.field(factory=deque)
    """Chunks to come, and the ADD that ends the session, if that has come."""


@attrs.define
class Sessions:
    """The open sessions of one engine, by request id."""

    _open: dict[str, Session] = attrs.field(factory=dict, init=False)

    def get(self, request_id: str) -> Session | None:
        """The session with this id, if it is open."""
        return self._open.get(request_id)

    def open(self, wire: EngineCoreRequest) -> None:
        """The first chunk of a session has come."""
        self._open[wire.request_id] = Session(wire.client_index)

    def close(self, request_id: str) -> Session | None:
        """End a session, if it is open."""
        return self._open.pop(request_id, None)

    def close_all(self) -> list[tuple[str, Session]]:
        """End all sessions; which they were."""
        closed = list(self._open.items())
        self._open.clear()
        return closed

    def chunk_ended(self, request_id: str, emitted: int) -> None:
        """A chunk has ended, if that was one, after ``emitted`` tokens in all."""
        session = self._open.get(request_id)
        if session is not None:
            session.emitted = emitted


PAUSED = Refusal("the engine is paused", "engine_paused", retryable=True)
DUPLICATE = Refusal("a request with this id is in flight")


@attrs.define(kw_only=True)
class Intake:
    """Decides on each request that comes, and accounts for each that is over."""

    _admission: Admission
    _scheduler: Scheduler
    _sessions: Sessions
    _answers: Answers
    _journal: Journal
    _pause: Pause
    _chunk_size: int
    _tells_ends: bool
    """Whether ``finished_requests`` is to name also requests that end without an output.

    As upstream, only where a coordinator is: a client that balances its load by the counts of one
    also counts by these ids what it has in flight.
    """
    _untold: dict[int, list[str]] = attrs.field(factory=dict, init=False)

    def add(self, wire: EngineCoreRequest) -> bool:
        """A request has come; whether it was taken."""
        session = self._sessions.get(wire.request_id)
        running = self._scheduler.get(wire.request_id)
        if session is not None and running is not None:
            session.queue.append(wire)
            return True
        if running is not None:
            self._refuse_duplicate(wire, running)
            return False
        if session is None:
            if self._pause.refuses and not wire.abort_immediately:
                self._refuse(wire, PAUSED)
                return False
            if wire.resumable:
                self._sessions.open(wire)
        elif not wire.resumable:
            self._sessions.close(wire.request_id)
            self._end_untold(wire.client_index, wire.request_id)
            return True
        return self._start(wire, session.emitted if session is not None else 0)

    def _refuse_duplicate(self, wire: EngineCoreRequest, running: Request) -> None:
        # An answer to the same client would be taken for one to the request that is running, and
        # end that.
        is_elsewhere = wire.client_index != running.client_index
        self._journal.refused(wire.request_id, DUPLICATE.message, answered=is_elsewhere)
        if is_elsewhere:
            self._answers.refuse(wire.client_index, wire.request_id, DUPLICATE)

    def _refuse(self, wire: EngineCoreRequest, refusal: Refusal) -> None:
        self._journal.refused(wire.request_id, refusal.message)
        self._answers.refuse(wire.client_index, wire.request_id, refusal)

    def _start(self, wire: EngineCoreRequest, emitted: int) -> bool:
        request = self._admission.admit(wire, emitted)
        if isinstance(request, Refusal):
            self._sessions.close(wire.request_id)
            self._refuse(wire, request)
            return False
        self._journal.started(request, self._chunk_size, self._answers.now)
        if wire.abort_immediately:
            self._account_for(request, FinishReason.ABORT)
            self._end_untold(request.client_index, request.request_id)
        elif request.end == emitted and not request.is_pooling:
            self._answers.finish(request.client_index, [request.request_id], request.finish_reason)
            self._account_for(request, request.finish_reason)
        else:
            self._scheduler.add(request, self._answers.now)
        return True

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request is over that the scheduler has forgotten; its session may go on."""
        session = self._sessions.get(request.request_id)
        self._account_for(request, reason)
        if session is None or reason is FinishReason.ABORT:
            return
        # Chunks may end as soon as they start. What follows the end of the session is no chunk.
        while session.queue and not self._is_busy(session, request.request_id):
            self.add(session.queue.popleft())

    def _account_for(self, request: Request, reason: FinishReason) -> None:
        self._journal.ended(request, reason)
        if reason is FinishReason.ABORT:
            self._sessions.close(request.request_id)
        else:
            self._sessions.chunk_ended(request.request_id, request.emitted)

    def _is_busy(self, session: Session, request_id: str) -> bool:
        is_open = self._sessions.get(request_id) is session
        return is_open and self._scheduler.get(request_id) is not None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop these requests without an answer; unknown ids do not matter."""
        for request_id in request_ids:
            request = self._scheduler.get(request_id)
            if request is not None:
                self._scheduler.remove(request)
                self.ended(request, FinishReason.ABORT)
                self._end_untold(request.client_index, request_id)
            elif (session := self._sessions.close(request_id)) is not None:
                self._end_untold(session.client_index, request_id)

    def abort_all(self) -> None:
        """Drop all requests and sessions, and tell their clients."""
        ended: dict[int, list[str]] = {}
        for request in self._scheduler.unfinished():
            self._scheduler.remove(request)
            self.ended(request, FinishReason.ABORT)
            ended.setdefault(request.client_index, []).append(request.request_id)
        for request_id, session in self._sessions.close_all():
            ended.setdefault(session.client_index, []).append(request_id)
        for client_index, request_ids in ended.items():
            self._answers.finish(client_index, request_ids, FinishReason.ABORT)

    def _end_untold(self, client_index: int, request_id: str) -> None:
        if self._tells_ends:
            self._untold.setdefault(client_index, []).append(request_id)

    def take_untold(self) -> dict[int, list[str]]:
        """Give up the ids, by client, of requests that ended without an output."""
        untold = self._untold
        if untold:
            self._untold = {}
        return untold


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
