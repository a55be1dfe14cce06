"""`MockEngine`: one engine core without a model, sans IO.

Theory of operation. The caller hands over each message that arrives (`MockEngine.take`) and makes
steps (`MockEngine.step`) when they are due (`MockEngine.next_step_time`); all of these return what to
send. In a step every running request gets its next tokens, and each client that has such requests
gets one message. A step in which a request joins, leaves or gets more than tokens is *eventful*; all
others are copies of the last one with other tokens.

The engine follows vLLM's (``vllm/v1/engine/core.py``), except that nothing kills it unless that is asked
for: what a real one dies of is refused or ignored, and noted in the event log.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.limits import MAX_ENGINES
from trio_vllm.mock.answers import Answers, EchoAnswers, PromptAnswers, RandomAnswers
from trio_vllm.mock.config import OUTPUTS, MockEngineConfig
from trio_vllm.mock.connector import Connector, Fetched
from trio_vllm.mock.content import TokenSource
from trio_vllm.mock.deaths import Death, Deaths, Situation, Thread
from trio_vllm.mock.encoding import (
    COORDINATOR,
    NIL,
    MessageBuilder,
    MessageTemplate,
    Outgoing,
)
from trio_vllm.mock.events import EventLog, Summary
from trio_vllm.mock.kv_events import KvCacheEvent
from trio_vllm.mock.request import Refusal, Request, RequestFactory
from trio_vllm.mock.spread import Spread
from trio_vllm.mock.unlimited import Counts, UnlimitedScheduler
from trio_vllm.mock.utilities import EngineControl, Outcome, RequestAction
from trio_vllm.protocol import (
    AbortRequests,
    AddDecoder,
    DpControlOutput,
    EngineCoreOutput,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    Frames,
    HandshakeInit,
    RequestBatchOutputs,
    RequestErrorInfo,
    SchedulerStats,
    StartDpWave,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    encode_outputs,
    in_one_go,
)
from trio_vllm.values import define, frozen

if TYPE_CHECKING:
    from trio_vllm.mock.simulated import SimulatedScheduler


def ready_response(
    config: MockEngineConfig,
    engine_index: int,
    *,
    data_parallel_size: int = 1,
    dp_stats_address: str | None = None,
) -> EngineCoreReadyResponse:
    """The registration of an engine with this index."""
    return EngineCoreReadyResponse(
        max_model_len=config.max_model_len,
        num_gpu_blocks=config.num_blocks,
        block_size=config.block_size,
        dp_stats_address=dp_stats_address,
        dtype=config.dtype,
        vllm_version=config.vllm_version,
        world_size=1,
        data_parallel_size=data_parallel_size,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=engine_index,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        instance_id=config.instance_id,
        supports_lora=config.max_loras > 0,
        max_loras=config.max_loras,
        kv_cache_size_tokens=config.kv_cache_size_tokens,
        enable_sleep_mode=config.enable_sleep_mode,
    )


def answers_of(config: MockEngineConfig, engine_index: int) -> Answers:
    """The answers that the options ask for.

    Raises:
      ConfigurationError: A file that they name cannot be read.
    """
    if config.tokenizer is None:
        return _answers_of(config, engine_index, None)
    # An extra package that it imports takes its time.
    from trio_vllm.mock.structured import StructuredAnswers, load_vocabulary  # noqa: PLC0415

    vocabulary = load_vocabulary(config.tokenizer)
    answers = _answers_of(config, engine_index, vocabulary.encode)
    return StructuredAnswers(vocabulary, answers, keeps_given=config.output not in OUTPUTS)


def _answers_of(
    config: MockEngineConfig, engine_index: int, encode: Callable[[str], Sequence[int]] | None
) -> Answers:
    lengths = Spread(config.output_tokens_mean, config.output_tokens_std_dev)
    kind = PromptAnswers if config.output == "prompt" else RandomAnswers
    drawn = kind(config.seed, engine_index, lengths)
    if config.output in {"random", "prompt"}:
        return drawn
    if config.output == "echo":
        return EchoAnswers(drawn)
    from trio_vllm.mock.answer_file import (  # noqa: PLC0415
        FileAnswers,
        read_answer_file,
        tokenized,
    )

    lines = read_answer_file(config.output)
    return FileAnswers(lines if encode is None else tokenized(lines, encode), drawn)


def data_parallel_size(init: HandshakeInit, default: int) -> int:
    """How many engines are in lockstep, as a frontend says, unless it says nothing that could be."""
    said = init.parallel_config.get("data_parallel_size")
    return said if isinstance(said, int) and 1 <= said <= MAX_ENGINES else default


@define
class Wave:
    """The data-parallel wave that an engine is in, or waits for.

    Mirrors ``DPEngineCoreProc`` in upstream ``vllm/v1/engine/core.py`` (0.33): an idle engine that gets
    a request tells the coordinator, which wakes the others; when all are out of work, the wave is over.
    """

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


@define
class LoadReporter:
    """Decides when the coordinator is told how busy an engine is.

    That is not after every step: a mock makes a hundred times as many steps a second as the engines
    that the coordinator was made for.
    """

    _told: Counts = (0, 0)
    _next: float = 0.0

    def has_changed(self, counts: Counts) -> bool:
        """Whether the coordinator does not know these counts yet."""
        return counts != self._told

    def is_due(self, counts: Counts, now: float) -> bool:
        """Whether the coordinator should be told now: not too often, but at once when idle."""
        is_time = now >= self._next or not counts[0]
        return is_time and self.has_changed(counts)

    def told(self, counts: Counts, now: float) -> None:
        """The coordinator was told."""
        self._told = counts
        self._next = now + COORDINATOR_INTERVAL


@frozen
class Replies:
    """Encodes the messages that an engine sends outside of steps."""

    _engine_index: int

    def ended(
        self,
        client_index: int,
        request_ids: list[str],
        reason: FinishReason,
        now: float,
        error: RequestErrorInfo | None = None,
    ) -> Outgoing:
        """Requests are over that get no further token."""
        outputs = RequestBatchOutputs(
            engine_index=self._engine_index,
            outputs=[
                EngineCoreOutput(request_id, finish_reason=reason, error=error)
                for request_id in request_ids
            ],
            timestamp=now,
            finished_requests=request_ids,
        )
        return client_index, encode_outputs(outputs)

    def refused(self, client_index: int, request_id: str, refusal: Refusal, now: float) -> Outgoing:
        """A request ends with an error."""
        error = None
        if refusal.code is not None:
            error = RequestErrorInfo(
                code=refusal.code, message=refusal.message, retryable=refusal.retryable
            )
        return self.ended(client_index, [request_id], FinishReason.ERROR, now, error)

    def utility(self, client_index: int, output: UtilityOutput, now: float) -> Outgoing:
        """The answer to a utility call."""
        message = UtilityCallOutput(engine_index=self._engine_index, output=output, timestamp=now)
        return client_index, encode_outputs(message)

    def load(self, counts: Counts, step: int, wave: int, now: float) -> Outgoing:
        """How many requests run and wait, for the coordinator."""
        running, waiting = counts
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            step_counter=step,
            current_wave=wave,
        )
        outputs = RequestBatchOutputs(
            engine_index=self._engine_index, scheduler_stats=stats, timestamp=now
        )
        return COORDINATOR, encode_outputs(outputs)

    def wave(
        self, now: float, *, start_wave: int | None = None, wave_complete: int | None = None
    ) -> Outgoing:
        """A wave starts or is over, for the coordinator."""
        notice = DpControlOutput(
            engine_index=self._engine_index,
            start_wave=start_wave,
            wave_complete=wave_complete,
            timestamp=now,
        )
        return COORDINATOR, encode_outputs(notice)


@define
class Session:
    """A streaming-input session: one request id whose prompt comes in chunks.

    Each chunk is an ADD with ``resumable`` set; it is decoded and ended like a request of its own,
    and its tokens go on where those of the last chunk ended. A final ADD without ``resumable``
    carries no input; it says that no chunk will follow.
    """

    client_index: int
    emitted: int = 0
    """Tokens of the chunks that have ended."""
    queue: deque[EngineCoreRequest] = attrs.field(factory=deque)
    """Chunks to come, and the ADD that ends the session, if that has come."""


ABORTS_AT_ONCE = 64
"""Requests aborted without a turn for others: less than 1 ms, with long contexts in a schedule some 10."""

TAKEN_AT_ONCE = 256
"""Messages taken without a turn for others, of those that had to wait: some 5 ms."""

ENDED_AT_ONCE = 512
"""Requests that ended in a step accounted for without a turn for others: some 3 ms."""

Chore: TypeAlias = Generator[list[Outgoing] | None, None, list[Outgoing]]
"""Work on many requests, in slices; each of these gives what to send, the last one as its result.

Steps are chores, too, most of a single slice.
"""

PAUSED = Refusal("the engine is paused", "engine_paused", retryable=True)
DUPLICATE = Refusal("a request with this id is in flight")


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
        self.events = EventLog(config.log_requests)
        self.step_count = 0
        """Steps made since the start."""
        self.death: Death | None = None
        """What this engine has died of, if it dies like a real one."""
        self._client_count = client_count
        self._has_coordinator = has_coordinator
        source = TokenSource(config.vocab_size)
        self._connector = Connector.of(config, engine_index)
        answers = answers_of(config, engine_index)
        self._factory = RequestFactory(config, source, answers, self._connector)
        self._scheduler = self._make_scheduler(source, fast_path=fast_path)
        self._control = EngineControl(config)
        self._decoder = AddDecoder()
        self._deaths = self._make_deaths() if config.die_like_an_engine else None
        self._template = MessageTemplate(engine_index, self._control.weight_version)
        self._replies = Replies(engine_index)
        self._sessions: dict[str, Session] = {}
        # By client, requests that ended without an output. As upstream, ``finished_requests`` names
        # them only where there is a coordinator: a client that balances its load by the counts of
        # one also counts by these ids what it has in flight.
        self._silently_finished: dict[int, list[str]] = {}
        self._load = LoadReporter()
        self._wave = Wave(engine_index) if config.lockstep and has_coordinator else None
        self._held: frozenset[int] = frozenset()
        self._chores: deque[Chore] = deque()
        """Under way or waiting, oldest first; a slice takes the place of a step."""
        self._arrivals: deque[Callable[[float], list[Outgoing]]] = deque()
        """Take what came meanwhile: what came before has to be done before that."""
        self._has_work = False  # it may turn out that nothing is to be done
        self._is_steady = False  # until a message comes, steps make tokens and nothing else
        self._is_shutting_down = False
        self._stepped_at = -math.inf

    def _make_scheduler(
        self, source: TokenSource, *, fast_path: bool
    ) -> UnlimitedScheduler | SimulatedScheduler:
        if not self.config.is_scheduled:
            return UnlimitedScheduler(
                self.config,
                source,
                self._client_count,
                fast_path=fast_path,
                connector=self._connector,
            )
        # A twentieth of the time in which an engine without a schedule starts.
        from trio_vllm.mock.simulated import simulated_scheduler  # noqa: PLC0415

        return simulated_scheduler(
            self.config, source, fast_path=fast_path, connector=self._connector
        )

    # Messages -----------------------------------------------------------------------------------

    def handle(self, frames: Frames, now: float) -> list[Outgoing]:
        """Take one message from an input socket; give what to send at once, often nothing."""
        try:
            message = self._decoder.decode(frames)
        except DecodeError as error:
            return self.refuse_undecodable(frames, error, now)
        return self.take(message, now)

    def hash_prompt(self, message: EngineMessage) -> Generator[None, None, list[bytes]]:
        """Compute what `take` may be given with a message; yields whenever others should have a turn.

        For a request that is the block hashes of its prompt. Otherwise they are computed as it is
        scheduled, which may take a fraction of a second.
        """
        if not isinstance(message, EngineCoreRequest):
            return []
        return (yield from self._scheduler.hash_prompt(message))

    def take(
        self, message: EngineMessage, now: float, hashes: list[bytes] | None = None
    ) -> list[Outgoing]:
        """Take a message like `handle` that is decoded; see `hash_prompt` for the ``hashes``."""
        if self.is_deaf:
            return []
        self._begin(now)
        if self._has_chores:
            self._arrivals.append(partial(self._take, message, hashes))
            return []
        return self._take(message, hashes, now)

    def _take(
        self, message: EngineMessage, hashes: list[bytes] | None, now: float
    ) -> list[Outgoing]:
        if self.is_deaf:  # since a message that had to wait, too
            return []
        if self._deaths is not None and (death := self._death_of(message, self._deaths)):
            return self._die(death)
        match message:
            case EngineCoreRequest():
                return self._add(message, now, hashes)
            case AbortRequests():
                return self._abort(message.request_ids, now)
            case UtilityRequest():
                return self._call(message, now)
            case StartDpWave():
                self._start_wave(message)
        return []

    # Dying --------------------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Whether nothing goes on any more."""
        return self.death is not None and self.death.thread is Thread.MAIN

    @property
    def is_deaf(self) -> bool:
        """Whether no message is taken any more."""
        return self.death is not None and self.death.thread is not Thread.OUTPUT

    @property
    def is_mute(self) -> bool:
        """Whether nothing that it makes can be sent any more."""
        return self.death is not None and self.death.thread is Thread.OUTPUT

    def _make_deaths(self) -> Deaths:
        def is_in_flight(request_id: str) -> bool:
            return self._scheduler.get(request_id) is not None and request_id not in self._sessions

        adapters = self._control.adapters
        return Deaths(
            Situation(
                self.config,
                self._client_count,
                is_in_flight,
                adapters.fault_of,
                self._control.queries,
            )
        )

    def _death_of(self, message: EngineMessage, deaths: Deaths) -> Death | None:
        if self.death is not None:
            return None
        if isinstance(message, EngineCoreRequest):
            return deaths.of_request(message, is_refused=self._takes_no(message))
        return deaths.of_call(message) if isinstance(message, UtilityRequest) else None

    def _takes_no(self, wire: EngineCoreRequest) -> bool:
        """Whether a request is turned away before anything else is done with it."""
        if self._is_shutting_down:
            return True
        is_new = wire.request_id not in self._sessions and not wire.abort_immediately
        return self._control.pause.refuses and is_new

    def _die(self, death: Death) -> list[Outgoing]:
        if self.death is None:
            self.death = death
            self.events.died(death)
        return []

    def _begin(self, now: float) -> None:
        if not self._has_work:
            self._scheduler.begin(now)
        self._is_steady, self._has_work = False, True

    def refuse_undecodable(self, frames: Frames, error: DecodeError, now: float) -> list[Outgoing]:
        """Take a message like `handle` that cannot be decoded."""
        if self.is_deaf:
            return []
        self._begin(now)
        if self._has_chores:
            self._arrivals.append(partial(self._refuse_undecodable, frames, error))
            return []
        return self._refuse_undecodable(frames, error, now)

    def _refuse_undecodable(self, frames: Frames, error: DecodeError, now: float) -> list[Outgoing]:
        if self.is_deaf:
            return []
        if self._deaths is not None:
            return self._die(self._deaths.of_bytes(frames, str(error)))
        request_id = error.request_id
        if request_id is None:
            self.events.ignored(str(error))
            return []
        is_new = self._scheduler.get(request_id) is None and request_id not in self._sessions
        self.events.refused(request_id, str(error), answered=is_new)
        if not is_new:
            return []
        # Whose request it is stands in a field that may be broken too. To the other clients the id
        # is unknown, so that they ignore the answer.
        refusal = Refusal(f"the request cannot be read: {error.where} {error.reason}")
        return [
            self._replies.refused(client_index, request_id, refusal, now)
            for client_index in range(self._client_count)
        ]

    def _ignore_unreachable(self, client_index: int, what: str) -> list[Outgoing]:
        clients = f"there are {self._client_count} clients"
        self.events.ignored(f"{what} is for client {client_index}, but {clients}")
        return []

    def shut_down(self, now: float, *, drain: bool) -> list[Outgoing]:
        """From now on refuse everything; abort what there is, unless it may ``drain``."""
        self._begin(now)
        self._is_shutting_down = True
        if drain:
            return []
        return self._begin_chore(self._drop_all(now))

    def _drop_all(self, now: float) -> Chore:
        """Abort what there is, and keep no blocks for other engines."""
        self._scheduler.release_all()
        return (yield from self._abort_all(now))

    # Requests coming ----------------------------------------------------------------------------

    def _add(
        self, wire: EngineCoreRequest, now: float, hashes: list[bytes] | None
    ) -> list[Outgoing]:
        if wire.client_index >= self._client_count:
            return self._ignore_unreachable(wire.client_index, f"request {wire.request_id!r}")
        if self._is_shutting_down:
            return [
                self._replies.ended(wire.client_index, [wire.request_id], FinishReason.ABORT, now)
            ]
        replies: list[Outgoing] = []
        if not self._take_in(wire, now, replies, hashes):
            return replies
        if wire.lora_request is not None:
            self._control.use_adapter(wire.lora_request)
        if self._wave is not None:
            is_paused = self._control.pause.is_paused
            wave = self._wave.request_came(wire.current_wave, paused=is_paused)
            if wave is not None:
                replies.append(self._replies.wave(now, start_wave=wave))
        return replies

    def _take_in(
        self,
        wire: EngineCoreRequest,
        now: float,
        replies: list[Outgoing],
        hashes: list[bytes] | None = None,
    ) -> bool:
        """Start, queue or refuse a request; whether it was taken.

        A chunk that is queued behind an earlier one will be hashed when its turn comes.
        """
        session = self._sessions.get(wire.request_id)
        running = self._scheduler.get(wire.request_id)
        if running is not None:
            if session is None:
                self._refuse_duplicate(wire, running, now, replies)
                return False
            session.queue.append(wire)
            return True
        if session is None:
            if self._control.pause.refuses and not wire.abort_immediately:
                self._refuse(wire, PAUSED, now, replies)
                return False
            if wire.resumable:
                session = self._sessions[wire.request_id] = Session(wire.client_index)
        elif not wire.resumable:
            del self._sessions[wire.request_id]
            self._finish_silently(wire.client_index, wire.request_id)
            return True
        request = self._make(wire, session.emitted if session is not None else 0)
        if isinstance(request, Refusal):
            self._sessions.pop(wire.request_id, None)
            self._refuse(wire, request, now, replies)
            return False
        if hashes and request.scheduled is not None:
            request.scheduled.table.hashes = hashes
        if request.search is None:
            replies += self._start(request, wire, now)
        elif self._chores:  # a step is under way that has ended the chunk before: there is no later
            replies += in_one_go(self._search_and_start(request, wire, now))
        else:
            replies += self._begin_chore(self._search_and_start(request, wire, now))
        return True

    def _refuse_duplicate(
        self, wire: EngineCoreRequest, running: Request, now: float, replies: list[Outgoing]
    ) -> None:
        # An answer to the same client would be taken for one to the request that is running, and
        # end that.
        is_elsewhere = wire.client_index != running.client_index
        self.events.refused(wire.request_id, DUPLICATE.message, answered=is_elsewhere)
        if is_elsewhere:
            replies.append(
                self._replies.refused(wire.client_index, wire.request_id, DUPLICATE, now)
            )

    def _refuse(
        self, wire: EngineCoreRequest, refusal: Refusal, now: float, replies: list[Outgoing]
    ) -> None:
        self.events.refused(wire.request_id, refusal.message)
        replies.append(self._replies.refused(wire.client_index, wire.request_id, refusal, now))

    def _search_and_start(self, request: Request, wire: EngineCoreRequest, now: float) -> Chore:
        """Start a request once its end is found."""
        for _ in request.search or ():
            yield None
        return self._start(request, wire, now)

    def _start(self, request: Request, wire: EngineCoreRequest, now: float) -> list[Outgoing]:
        client_index, request_id = request.client_index, request.request_id
        self.events.started(request, self.config.output_token_chunk_size, now)
        if wire.abort_immediately:
            self._leave_blocks(request)
            self._account_for(request, FinishReason.ABORT)
            self._finish_silently(client_index, request_id)
        elif request.end == request.emitted and not request.is_pooling:
            reason = request.finish_reason
            self._account_for(request, reason)
            return [self._replies.ended(client_index, [request_id], reason, now)]
        else:
            self._scheduler.add(request, now)
        return []

    def _leave_blocks(self, request: Request) -> None:
        """Let another engine know that what it keeps for a request is not needed."""
        transfer = request.transfer
        if self._connector is not None and transfer is not None and transfer.fetches:
            self._connector.note_fetched(transfer)

    def _make(self, wire: EngineCoreRequest, emitted: int) -> Request | Refusal:
        request = self._factory.make(wire, emitted)
        if isinstance(request, Refusal):
            return request
        fault = None
        if wire.pooling_params is not None:
            fault = self._control.queries.fault_of(wire)
        if fault is None and wire.lora_request is not None:
            fault = self._control.adapters.fault_of(wire.lora_request)
        if fault is not None:
            return Refusal(fault)
        if request.is_pooling and not wire.abort_immediately:
            request.query = self._control.queries.take(wire, request.key, request.prompt_len)
        return request

    # Requests going -----------------------------------------------------------------------------

    def _ended(self, request: Request, reason: FinishReason, now: float) -> list[Outgoing]:
        """Account for a request that the scheduler has forgotten; its session may go on."""
        session = self._sessions.get(request.request_id)
        self._account_for(request, reason)
        replies: list[Outgoing] = []
        if session is None or reason is FinishReason.ABORT:
            return replies
        # Chunks may end as soon as they start. What follows the end of the session is no chunk.
        while session.queue and not self._is_busy(session, request.request_id):
            self._take_in(session.queue.popleft(), now, replies)
        return replies

    def _account_for(self, request: Request, reason: FinishReason) -> None:
        self.events.ended(request, reason)
        if reason is FinishReason.ABORT:
            self._sessions.pop(request.request_id, None)
        elif (session := self._sessions.get(request.request_id)) is not None:
            session.emitted = request.emitted

    def _is_busy(self, session: Session, request_id: str) -> bool:
        is_open = self._sessions.get(request_id) is session
        return is_open and self._scheduler.get(request_id) is not None

    def _abort(self, request_ids: Iterable[str], now: float) -> list[Outgoing]:
        """Drop these requests without an answer; unknown ids do not matter."""
        found = {request_id: self._scheduler.get(request_id) for request_id in request_ids}
        requests = [request for request in found.values() if request is not None]
        self._drop(requests)
        for request in requests:
            self._finish_silently(request.client_index, request.request_id)
        for request_id in found:
            if (session := self._sessions.pop(request_id, None)) is not None:
                self._finish_silently(session.client_index, request_id)
        return []

    def _drop(self, requests: Sequence[Request]) -> None:
        """Forget unfinished requests, and their sessions."""
        self._scheduler.remove(requests)
        for request in requests:
            self._account_for(request, FinishReason.ABORT)

    def _abort_all(self, now: float) -> Chore:
        """Drop the requests and sessions that there are now, and tell their clients, some at a time."""
        requests, sessions = self._scheduler.unfinished(), self._sessions.copy()
        aborted: defaultdict[int, list[str]] = defaultdict(list)
        for start in range(0, len(requests), ABORTS_AT_ONCE):
            if start:
                yield self._tell_aborted(aborted, now)
                aborted.clear()
            some = requests[start : start + ABORTS_AT_ONCE]
            some = [one for one in some if self._scheduler.get(one.request_id) is one]
            self._drop(some)
            for request in some:
                aborted[request.client_index].append(request.request_id)
        for request_id, session in sessions.items():
            if self._sessions.get(request_id) is session:
                del self._sessions[request_id]
                aborted[session.client_index].append(request_id)
        return self._tell_aborted(aborted, now)

    def _tell_aborted(self, aborted: Mapping[int, list[str]], now: float) -> list[Outgoing]:
        return [
            self._replies.ended(client_index, request_ids, FinishReason.ABORT, now)
            for client_index, request_ids in aborted.items()
        ]

    def _finish_silently(self, client_index: int, request_id: str) -> None:
        if self._has_coordinator:
            self._silently_finished.setdefault(client_index, []).append(request_id)

    # Utility calls ------------------------------------------------------------------------------

    def _call(self, request: UtilityRequest, now: float) -> list[Outgoing]:
        if request.client_index >= self._client_count:
            what = f"utility call {request.method!r}"
            return self._ignore_unreachable(request.client_index, what)
        if self._is_shutting_down:
            output = self._control.refuse(request, "Server shutting down")
            return [self._replies.utility(request.client_index, output, now)]
        counts, holds_blocks = self.counts, self._scheduler.holds_blocks
        if self._scheduler.is_preempting:  # which was asked for before, and goes on in slices
            counts = 0, sum(counts)
        outcome = self._control.call(request, counts, holds_blocks=holds_blocks)
        self._scheduler.paused = self._control.pause.scheduler
        replies = self._begin_chore(self._carry_out(outcome, request.client_index, now))
        if self._template.weight_version != self._control.weight_version:
            self._template = MessageTemplate(self.engine_index, self._control.weight_version)
            self._scheduler.forget_messages()
        return replies

    def _carry_out(self, outcome: Outcome, client_index: int, now: float) -> Chore:
        """Do what a call does to requests, and then answer it, if that is due."""
        replies: list[Outgoing] = []
        match outcome.action:
            case RequestAction.ABORT_ALL:
                replies += yield from self._abort_all(now)
            case RequestAction.ABORT_ALL_AND_RESET:
                replies += yield from self._abort_all(now)
                self._scheduler.reset_cache(now)
            case RequestAction.PREEMPT_ALL:
                self._scheduler.preempt_all(now)
            case RequestAction.RESET_CACHE:
                self._scheduler.reset_cache(now)
        if outcome.output is not None:
            replies.append(self._replies.utility(client_index, outcome.output, now))
        return replies

    # What takes long ----------------------------------------------------------------------------

    def _begin_chore(self, chore: Chore) -> list[Outgoing]:
        """Do the first slice, unless another chore is under way; steps do the others."""
        self._chores.append(chore)
        return self._do_slice() if len(self._chores) == 1 else []

    @property
    def _has_chores(self) -> bool:
        """Whether something is under way, or has to wait behind what was."""
        return bool(self._chores or self._arrivals)

    def _go_on(self, now: float) -> list[Outgoing]:
        """Do a slice of a chore; after the last one take what has come meanwhile."""
        messages = self._do_slice() if self._chores else []
        if self._has_chores:
            self._begin(now)  # a step that has ended did not see what is behind it
        for _ in range(min(len(self._arrivals), TAKEN_AT_ONCE)):
            if self._chores or self.is_dead:
                break
            messages += self._arrivals.popleft()(now)
        return messages

    def _do_slice(self) -> list[Outgoing]:
        """Do the next slice of the oldest chore."""
        try:
            return next(self._chores[0]) or []
        except StopIteration as end:
            self._chores.popleft()
            messages: list[Outgoing] = end.value
            return messages

    # Steps --------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """Requests running and waiting."""
        return self._scheduler.counts

    @property
    def kv_cache_usage(self) -> float:
        """The part of the KV cache that requests hold, 0 to 1; without a schedule there is none."""
        return self._scheduler.kv_cache_usage

    @property
    def has_unfinished(self) -> bool:
        """Whether requests are running or waiting, or what comes of a message or a step is being made."""
        return any(self._scheduler.counts) or self._has_chores

    @property
    def summary(self) -> Summary:
        """Counts since the start."""
        self.events.summary.tokens = self._scheduler.tokens_made
        self.events.summary.end = self._stepped_at
        self.events.summary.take_schedule(self._scheduler.schedule_counts)
        return self.events.summary

    def pop_kv_events(self) -> list[list[KvCacheEvent]]:
        """KV-cache events of each step since this was last called, if they are to be published."""
        return self._scheduler.pop_kv_events()

    def pop_fetched(self) -> list[Fetched]:
        """Which blocks of other engines were fetched since this was last called."""
        return [] if self._connector is None else self._connector.pop_fetched()

    def release(self, request_id: str, now: float) -> None:
        """Another engine has fetched the blocks that were kept of a request."""
        self._begin(now)
        if self._has_chores:
            self._arrivals.append(partial(self._release, request_id))
        else:
            self._scheduler.release(request_id)

    def _release(self, request_id: str, _: float) -> list[Outgoing]:
        self._scheduler.release(request_id)
        return []

    def next_step_time(self, now: float) -> float | None:
        """When the next step is due, which may be before ``now``; None until a message comes."""
        if self._has_chores and not self.is_dead:
            return now
        return self._scheduler.due(now) if self._has_work and not self.is_dead else None

    def hold_clients(self, held: frozenset[int], now: float) -> None:
        """Make no output for these clients, or for `COORDINATOR`, until the next call.

        Their requests stand still, and what they ask for is answered all the same.
        """
        self._begin(now)
        self._held = held
        self._scheduler.hold(held)

    def step(self, now: float) -> list[Outgoing]:
        """Make a step, or do a slice of a chore; give what to send."""
        if self._has_chores:
            return self._go_on(now)
        self.step_count += 1
        self._stepped_at = now
        if self._is_steady:
            messages = self._scheduler.steady_step(self._template, now)
            if messages is not None:
                return messages
            self._is_steady = False
        return self._begin_chore(self._step(now))

    def _step(self, now: float) -> Chore:
        """Make a step in which something happens besides tokens, in slices if that takes long."""
        builders: defaultdict[int, MessageBuilder] = defaultdict(MessageBuilder)
        replies = yield from self._step_requests(builders, now)
        if self._silently_finished:
            self._name_silently_finished(builders)
        for builder in builders.values():
            yield from builder.pack_in_slices()
        messages = self._messages_of(builders, now)
        messages += replies
        if self._control.has_deferred and not self.counts[0]:
            if self._control.resets_when_idle:
                self._scheduler.reset_cache(now)
            messages += [
                self._replies.utility(client_index, output, now)
                for client_index, output in self._control.pop_overdue()
            ]
        if self._has_coordinator:
            messages += self._report_to_coordinator(now)
        if lost := self._scheduler.pop_lost_time():
            self.events.lost_time(lost, now)
        self._settle()
        return messages

    def steps(self, now: float, limit: int) -> list[Outgoing]:
        """Make several steps, ``limit`` at most, or just one if that is eventful or others wait."""
        if self._is_steady and limit > 1:
            made = self._scheduler.steady_steps(self._template, now, limit)
            if made is not None:
                count, messages = made
                self.step_count += count
                self._stepped_at = now
                return messages
        return self.step(now)

    def _step_requests(self, builders: defaultdict[int, MessageBuilder], now: float) -> Chore:
        replies: list[Outgoing] = []
        finished = yield from self._scheduler.step(now, builders.__getitem__)
        for number, request in enumerate(finished):
            if number and not number % ENDED_AT_ONCE:
                yield None
            replies += self._ended(request, request.finish_reason, now)
        return replies

    def _name_silently_finished(self, builders: defaultdict[int, MessageBuilder]) -> None:
        for client_index in self._silently_finished.keys() - self._held:
            builders[client_index].finished += self._silently_finished.pop(client_index)

    def _messages_of(
        self, builders: defaultdict[int, MessageBuilder], now: float
    ) -> list[Outgoing]:
        stats = NIL
        if self._scheduler.has_stats:
            reachable = set(range(self._client_count)) - self._held
            if builders or reachable:
                stats = self._scheduler.pop_stats(*self._wave_progress())
                if not builders:
                    builders[min(reachable)] = MessageBuilder()
        messages: list[Outgoing] = []
        for client_index, builder in sorted(builders.items()):
            messages.append((client_index, self._template.build(builder, stats, now)))
            stats = NIL  # once is enough
        return messages

    def _settle(self) -> None:
        """Work out whether there is more to do, and whether that is tokens and nothing else."""
        is_untold = self._has_news_for_coordinator
        self._is_steady = self._scheduler.is_steady and not is_untold
        self._has_work = self._scheduler.has_work or is_untold

    # Data parallelism ---------------------------------------------------------------------------

    def _wave_progress(self) -> tuple[int, int]:
        """The step and the wave, which mean something only in lockstep."""
        return (self.step_count, self._wave.current) if self._wave is not None else (0, 0)

    @property
    def _has_news_for_coordinator(self) -> bool:
        is_reachable = self._has_coordinator and COORDINATOR not in self._held
        return is_reachable and self._load.has_changed(self.counts)

    def _report_to_coordinator(self, now: float) -> list[Outgoing]:
        counts = self.counts
        if not (self._has_news_for_coordinator and self._load.is_due(counts, now)):
            return []
        self._load.told(counts, now)
        return [self._replies.load(counts, *self._wave_progress(), now)]

    def start_wave(self, notice: StartDpWave, now: float) -> None:
        """The coordinator starts a wave; engines of a dense model have none."""
        if not self.is_deaf:
            self._begin(now)
            self._start_wave(notice)

    def _start_wave(self, notice: StartDpWave) -> None:
        if self._wave is None:
            self.events.ignored("START_DP_WAVE is for engines that run in lockstep")
        elif not self._control.pause.is_paused:
            self._wave.start(notice)

    @property
    def is_in_wave(self) -> bool:
        """Whether this engine runs in step with others; always false without lockstep."""
        return self._wave is not None and self._wave.is_running

    def complete_wave(self, now: float) -> list[Outgoing]:
        """All engines are out of work; the first one tells the coordinator."""
        if self._wave is None:
            return []
        wave = self._wave.complete()
        return [self._replies.wave(now, wave_complete=wave)] if self.engine_index == 0 else []
