"""`EngineTable` keeps an `Engine` for each engine and detects dead ones; a `LoadBalancer` chooses one."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from trio_vllm.client.columns import TokenColumns
from trio_vllm.client.input_processing import RequestLimits
from trio_vllm.client.streams import Sink
from trio_vllm.client.versions import oldest_release
from trio_vllm.errors import DecodeError, EngineDeadError
from trio_vllm.protocol import (
    Buffer,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineId,
    KvEventsConfig,
    LogprobsPattern,
    SchedulerStats,
    UndecodedBatch,
    encode_abort,
)
from trio_vllm.values import define, frozen


class EngineState(enum.Enum):
    """How far an engine is from its end."""

    ALIVE = enum.auto()
    """It takes requests."""
    DISCONNECTED = enum.auto()
    """A connection of it broke. It is sent no more requests; its outputs still count."""
    DEAD = enum.auto()
    """It is given up, and its requests have failed."""


@define(eq=False)
class QueuedMessage:
    """A message to one engine, without the engine id that leads it on the wire."""

    engine: Engine
    frames: Sequence[Buffer]
    movable: tuple[EngineCoreRequest, Sink] | None = None
    """The request that this is, if another engine may have it as well should this one be gone."""


@frozen(kw_only=True)
class EngineSnapshot:
    """What was known of one engine at a time."""

    is_alive: bool
    """Whether it takes requests."""
    is_stalled: bool
    """See `EngineCoreClient.stalled_engines`."""
    in_flight: int
    """Our requests that have not ended there."""
    stats: SchedulerStats | None
    """Its newest statistics; None if it is dead, or has sent none that can be read."""
    stats_time: float | None
    """When they came, by trio's clock."""


@define(eq=False)
class Engine:
    """One engine core: its state, its requests, its load, and what it is to be sent.

    A `LoadBalancer` may read ``index``, ``ready_response``, ``len(engine.requests)`` and `snapshot`. All
    else is the client's own and may change, and nothing may be written.
    """

    index: int
    ready_response: EngineCoreReadyResponse
    """What it told of itself when it registered."""
    engine_id: EngineId = attrs.field(init=False)
    """The first frame of messages to it."""
    state: EngineState = EngineState.ALIVE
    error: EngineDeadError | None = None
    """Why it is dead; the first reason is kept."""
    requests: dict[str, Sink] = attrs.field(factory=dict)
    """Those in flight there, oldest first."""
    columns: TokenColumns = attrs.field(init=False)
    """Those of them that only collect tokens."""
    added_since_stats: set[str] = attrs.field(factory=set)
    """The ids of those that its newest statistics cannot have counted."""
    stats: SchedulerStats | None = None
    """Its newest statistics; None unless a choice between engines, or a listener, needed them."""
    stats_message: UndecodedBatch | None = None
    """The message that its newest statistics came with."""
    stats_time: float | None = None
    """When that came."""
    has_bad_stats: bool = False
    """Whether statistics came that cannot be read."""
    sessions: set[str] = attrs.field(factory=set)
    """The ids of streaming-input sessions that are open there, between two chunks or not."""
    has_moved: bool = True
    """Whether it has sent outputs, or was idle, since the last look for a stall."""
    silent_since: float | None = None
    """The time of the look that found its last sign of progress."""
    is_marked_stalled: bool = False
    logprobs_pattern: LogprobsPattern | None = None
    """Of rows with log probabilities that it has sent lately."""
    messages: list[QueuedMessage] = attrs.field(factory=list)
    """What it is to be sent, in this order."""
    aborts: dict[str, None] = attrs.field(factory=dict)
    """Ids of requests that it is to be told are over; they come after ``messages``."""

    @engine_id.default
    def _id_of_index(self) -> EngineId:
        return EngineId.of(self.index)

    @columns.default
    def _columns_of_requests(self) -> TokenColumns:
        return TokenColumns(self.requests)

    # Requests -----------------------------------------------------------------------------------

    def add(self, sink: Sink) -> None:
        """Count a request of this engine's."""
        sink.engine_index = self.index
        self.requests[sink.request_id] = sink
        self.added_since_stats.add(sink.request_id)
        self.columns.add(sink)

    def remove(self, request_id: str) -> Sink:
        """Forget a request that is over, or another engine's now; gives its sink."""
        self.added_since_stats.discard(request_id)
        sink = self.requests.pop(request_id)
        self.columns.remove(sink)
        if not self.requests:
            self.has_moved = True
        return sink

    def receive_stats(self, stats: SchedulerStats) -> None:
        """Take in newer statistics. They count whatever was added before they came."""
        self.stats = stats
        self.added_since_stats.clear()

    def snapshot(self) -> EngineSnapshot:
        """What is known of it now."""
        stats = self._newest_stats()
        return EngineSnapshot(
            is_alive=self.state is EngineState.ALIVE,
            is_stalled=self.is_stalled,
            in_flight=len(self.requests),
            stats=stats,
            stats_time=None if stats is None else self.stats_time,
        )

    # Stalls -------------------------------------------------------------------------------------

    @property
    def is_stalled(self) -> bool:
        """Whether it has requests, runs none of them, and has sent nothing for some time."""
        return self.is_marked_stalled and not self.has_moved

    def check_stall(self, now: float, stall_time: float) -> bool:
        """Look for progress, from time to time; whether the engine is found stalled for the first time.

        It may well be that it is paused, asleep, or has a request that it can never schedule.
        """
        if self.has_moved or not self.requests:
            self.has_moved, self.silent_since, self.is_marked_stalled = False, now, False
            return False
        assert self.silent_since is not None
        if self.is_marked_stalled or now - self.silent_since < stall_time or self._is_running:
            return False
        self.is_marked_stalled = True
        return True

    @property
    def _is_running(self) -> bool:
        """Whether its newest statistics say that requests run."""
        stats = self._newest_stats()
        return stats is not None and stats.num_running_reqs > 0

    def _newest_stats(self) -> SchedulerStats | None:
        try:
            return None if self.stats_message is None else self.stats_message.decode_stats()
        except DecodeError:
            return None

    def describe_stall(self, stall_time: float) -> str:
        """Tell of the stall, for the log."""
        stats = self._newest_stats()
        reported = (
            "it has sent no statistics"
            if stats is None
            else f"its last statistics: {stats.num_running_reqs} running,"
            f" {stats.num_waiting_reqs} waiting"
        )
        return (
            f"engine {self.index} has sent no output for {stall_time:g} s, though it has"
            f" {len(self.requests)} requests of this client ({reported}); it may be paused or asleep,"
            " or wait for something that never comes"
        )

    # Messages -----------------------------------------------------------------------------------

    def send(
        self,
        frames: Sequence[Buffer],
        movable: tuple[EngineCoreRequest, Sink] | None = None,
    ) -> None:
        """Put a message in line."""
        self.messages.append(QueuedMessage(self, frames, movable))

    def send_aborts(self) -> None:
        """Put the pending aborts in line as one message: what comes next must come after them."""
        if self.aborts:
            self.send(encode_abort(list(self.aborts)))
            self.aborts.clear()

    def take_messages(self) -> list[QueuedMessage]:
        """Give the messages in line, and forget them."""
        messages, self.messages = self.messages, []
        return messages


# Life and death -------------------------------------------------------------------------------------

DISCONNECT_GRACE = 0.2
"""Seconds from the break of a connection to the engine's death. On one host, what it had sent before
over another connection arrives within milliseconds."""

CONNECTION_LOST = "its connection was lost"
REPORTED_DEATH = "it reported ENGINE_CORE_DEAD"
UNREADABLE = "it sent a message that cannot be read"


class EngineTable:
    """The engines by index; detects dead ones.

    Theory of operation. An engine ends in one of three ways:

    * One of its connections breaks, or turns out to be broken when a message is sent: `disconnect`.
      It is sent nothing from then on. What it sent before, over another connection, may still be on
      its way, so it has a deadline, and is dead when that has passed: `expired`.
    * It sends ENGINE_CORE_DEAD: `mark_dead`, at once.
    * It sends a message that cannot be read: `mark_dead`, at once. The message may have had a part
      of any request, so no later output of this engine can be trusted to continue one.

    Whichever comes first is the reason that is kept.
    """

    def __init__(self, ready_responses: Mapping[int, EngineCoreReadyResponse]) -> None:
        self.by_index = {i: Engine(i, response) for i, response in sorted(ready_responses.items())}
        """All engines of the startup, in index order."""
        self.alive = list(self.by_index.values())
        """Those that take requests, in index order."""
        self.dead: list[Engine] = []
        """Those that are dead, in the order of their deaths."""
        self._deadlines: dict[Engine, tuple[float, Exception | None]] = {}  # and why disconnected
        self.next_deadline = math.inf
        """When the next disconnected engine will be dead; infinity if there is none."""

    def _find_next_deadline(self) -> None:
        deadlines = (deadline for deadline, _ in self._deadlines.values())
        self.next_deadline = min(deadlines, default=math.inf)

    def engine_with(self, request_id: str) -> Engine | None:
        """The engine that has a request, if it is in flight."""
        for engine in self.by_index.values():
            if request_id in engine.requests:
                return engine
        return None

    def sinks_of(self, request_ids: Sequence[str]) -> list[Sink]:
        """The sinks of those of these requests that are in flight, in this order; they may be very many."""
        found = [map(engine.requests.get, request_ids) for engine in self.by_index.values()]
        return [sink for sinks in zip(*found, strict=True) for sink in sinks if sink is not None]

    def engine_with_session(self, request_id: str) -> Engine | None:
        """The engine where a session is open, if it is."""
        for engine in self.by_index.values():
            if request_id in engine.sessions:
                return engine
        return None

    def disconnect(self, engine: Engine, now: float, cause: Exception | None = None) -> None:
        """Note that a connection of an engine broke, unless it is disconnected or dead already."""
        if engine.state is EngineState.ALIVE:
            engine.state = EngineState.DISCONNECTED
            self.alive.remove(engine)
            self._deadlines[engine] = (now + DISCONNECT_GRACE, cause)
            self._find_next_deadline()

    def expired(self, now: float) -> list[tuple[Engine, Exception | None]]:
        """The disconnected engines whose deadline has passed, and why they were disconnected."""
        return [
            (engine, cause)
            for engine, (deadline, cause) in self._deadlines.items()
            if deadline <= now
        ]

    def mark_dead(self, engine: Engine, reason: str, cause: Exception | None) -> EngineDeadError:
        """Note that an engine, which was not dead yet, is dead."""
        error = EngineDeadError(engine.index, reason)
        error.__cause__ = cause
        if engine.state is EngineState.ALIVE:
            self.alive.remove(engine)
        self._deadlines.pop(engine, None)
        self._find_next_deadline()
        engine.state, engine.error = EngineState.DEAD, error
        self.dead.append(engine)
        return error


class EngineConnections:
    """Which engine is at the other end of each connection of a bound socket.

    Anybody can connect to such a socket, so a message counts only if it comes from an engine. A
    connection becomes an engine's with its first well-formed message that names the engine, which
    has no other connection to this socket. It stays the engine's, since an engine whose connection
    breaks is lost; unless all that has come by it was a name, and then an output comes of a request
    that another engine has, one without a connection: that is proof, the name was a mistake. So no
    more connections are kept than there are engines, however many come and go.

    A transport that does not tell connections apart gives None for each: then a message is taken
    for the engine's that it names.
    """

    def __init__(self, engine_indices: Iterable[int]) -> None:
        self._connection_of: dict[int, int | None] = dict.fromkeys(engine_indices)
        self._engine_of: dict[int | None, int] = {}
        self._proved: dict[int | None, int] = {}

    def __len__(self) -> int:
        """How many connections are known to be an engine's."""
        return len(self._engine_of)

    def engine_of(self, connection: int | None) -> int | None:
        """The index of the engine that a connection is known to belong to."""
        return self._engine_of.get(connection)

    def is_proved(self, connection: int | None) -> bool:
        """Whether an output of a request of its engine has come by a connection."""
        return connection in self._proved

    def proved_engine(self, connection: int | None) -> int | None:
        """The index of the engine of which that is so."""
        return self._proved.get(connection)

    def claim(self, connection: int | None, engine_index: int, *, has_output: bool = False) -> bool:
        """Whether a well-formed message that names this engine, and came so, is the engine's.

        ``has_output`` says whether it has an output of a request that the engine has.
        """
        if engine_index not in self._connection_of:
            return False
        if connection is None:
            return True
        known = self._engine_of.get(connection)
        if known != engine_index:
            may_change = known is None or (has_output and connection not in self._proved)
            if not may_change or self._connection_of[engine_index] is not None:
                return False
            if known is not None:
                self._connection_of[known] = None
            self._connection_of[engine_index] = connection
            self._engine_of[connection] = engine_index
        if has_output:
            self._proved[connection] = engine_index
        return True


# Load balancing -------------------------------------------------------------------------------------


class LoadBalancer(Protocol):
    """A rule that says which engine gets a request that may go to any: ``open_llm(load_balancer=…)``."""

    def choose(self, engines: Sequence[Engine]) -> Engine:
        """Choose one of several engines, which are all alive and in index order.

        What it may read of them `Engine` says. It must not wait or raise.
        """
        ...


class LeastLoaded:
    """The rule of upstream's Rust frontend: the engine that has the fewest requests.

    These are the ones that this client has in flight there; or, if they are more, those that the
    engine has reported, which may be other clients' too, and what it was sent since. Ties go to the
    lowest index. Mirrors ``engine-core-client/src/client/state.rs``, except that a request which the
    engine has never reported and which is over counts no more.
    """

    def choose(self, engines: Sequence[Engine]) -> Engine:
        """Choose the engine with the fewest requests."""
        return min(engines, key=_load)


def _load(engine: Engine) -> int:
    in_flight, stats = len(engine.requests), engine.stats
    if stats is None:
        return in_flight
    reported = stats.num_running_reqs + stats.num_waiting_reqs
    return max(in_flight, reported + len(engine.added_since_stats))


class LeastWaiting:
    """The rule of upstream's Python frontend: few requests, few of them waiting, and ties in turn.

    Waiting requests weigh up to four times as much on an engine whose KV cache fills up, since its
    queue will be slow. Mirrors ``DPLBAsyncMPClient.get_core_engine_for_request`` in
    ``vllm/v1/engine/core_client.py``.
    """

    def __init__(self, *, client_index: int = 0, client_count: int = 1) -> None:
        """``client_count`` clients share the engines; each begins with another one."""
        self._client_index = client_index
        self._client_count = client_count
        self._turn = 0

    def choose(self, engines: Sequence[Engine]) -> Engine:
        """Choose the engine with the least score; of equal ones, one after the other."""
        count = len(engines)
        first = count * self._client_index // self._client_count + self._turn
        self._turn += 1
        in_turn = (engines[(first + number) % count] for number in range(count))
        return min(in_turn, key=self._score)

    def _score(self, engine: Engine) -> float:
        running = waiting = usage = 0.0
        if (stats := engine.stats) is not None:
            running, waiting, usage = (
                stats.num_running_reqs,
                stats.num_waiting_reqs + self._client_count * len(engine.added_since_stats),
                stats.kv_cache_usage,
            )
        load = max(self._client_count * len(engine.requests), running + waiting)
        return load + waiting * 6 * max(0.0, usage - 0.5)


# What they told of themselves -----------------------------------------------------------------------


@frozen(kw_only=True)
class EngineInfo:
    """What all engines together told of themselves when they registered.

    Which figure is the least, the sum or the first is upstream's choice: see
    ``MPClient._apply_ready_response`` in ``vllm/v1/engine/core_client.py`` and
    ``engine-core-client/src/client.rs``.
    """

    ready_responses: Mapping[int, EngineCoreReadyResponse]
    """What each told, by engine index."""
    max_model_len: int
    """Prompt and output tokens that fit every engine."""
    model_dtype: str
    """The model's number type, such as ``bfloat16``."""
    vllm_version: str
    """The version that the first engine reports."""
    block_size: int
    """Tokens per KV-cache block."""
    num_gpu_blocks: int
    """KV-cache blocks of all engines together."""
    world_size: int
    """Accelerators of one engine."""
    data_parallel_size: int
    """Engines that run in lockstep; 1 if each runs for itself."""
    max_num_seqs: int
    """Requests that all engines together run at once."""
    supports_lora: bool
    """Whether every engine takes adapters."""
    max_loras: int
    """Adapters that fit into one batch of every engine."""
    enable_sleep_mode: bool
    """Whether every engine can give its memory back."""
    supports_draft_weight_updates: bool
    """Whether every engine takes new weights for its draft model."""
    kv_cache_size_tokens: int | None
    """Tokens that the KV cache of one engine holds, if an engine says."""
    kv_cache_max_concurrency: float | None
    """Requests of full length that the KV cache of one engine holds, if an engine says."""
    kv_events_config: KvEventsConfig | None
    """Where KV-cache events are published, if they are."""
    weight_transfer_backend: str | None
    """How new weights reach the engines, if they can."""
    effective_attention_block_size: int | None
    """The block size of attention, if all engines agree."""

    @classmethod
    def of(cls, ready_responses: Mapping[int, EngineCoreReadyResponse]) -> EngineInfo:
        """What follows from the ready responses, by engine index, for the whole."""
        every = list(ready_responses.values())
        attention_sizes = {response.effective_attention_block_size for response in every}
        return cls(
            ready_responses=ready_responses,
            max_model_len=min(response.max_model_len for response in every),
            model_dtype=every[0].dtype,
            vllm_version=every[0].vllm_version,
            block_size=every[0].block_size,
            num_gpu_blocks=sum(response.num_gpu_blocks for response in every),
            world_size=every[0].world_size,
            data_parallel_size=every[0].data_parallel_size,
            max_num_seqs=sum(response.max_num_seqs for response in every),
            supports_lora=all(response.supports_lora for response in every),
            max_loras=min(response.max_loras for response in every),
            enable_sleep_mode=all(response.enable_sleep_mode for response in every),
            supports_draft_weight_updates=all(
                response.supports_draft_weight_updates for response in every
            ),
            kv_cache_size_tokens=_first_told(every, "kv_cache_size_tokens"),
            kv_cache_max_concurrency=_first_told(every, "kv_cache_max_concurrency"),
            kv_events_config=_first_told(every, "kv_events_config"),
            weight_transfer_backend=_first_told(every, "weight_transfer_backend"),
            effective_attention_block_size=(
                attention_sizes.pop() if len(attention_sizes) == 1 else None
            ),
        )

    def is_older_than(self, release: tuple[int, int]) -> bool:
        """Whether an engine is known to lack what came with a release of vLLM."""
        responses = self.ready_responses.values()
        oldest = oldest_release([response.vllm_version for response in responses])
        return oldest is not None and oldest < release

    def limits(self, **stated: Any) -> RequestLimits:
        """What a request must keep to, with what the engines do not tell."""
        return RequestLimits.of(self.ready_responses.values(), **stated)


def _first_told(responses: Iterable[EngineCoreReadyResponse], name: str) -> Any:
    values = (getattr(response, name) for response in responses)
    return next((value for value in values if value is not None), None)
