"""`FrontendCore`: drives engine cores without IO: requests and frames in, messages to send out.

Theory of operation. The driver passes in requests and utility calls (`submit`, `call_utility`), each
message that is received (`receive`) and each connection that breaks (`disconnected`), and calls
`tick` when `next_deadline` has come. Nothing here waits, reads a clock or sends. After any of these
calls the driver looks at

* `urgent_sends`: messages to send at once, because an idle engine waits for them;
* `sends`: all messages, to send when every task that is due has run, and `send_time` has come. So
  all that is submitted or aborted in one go costs one wake-up, and reaches an engine before its next
  step. A message that finds its engine gone is given back with `undeliverable`;
* `coordination_sends`: messages of the data-parallel waves;
* `has_endings`: whether more requests have to end than others can wait for; `end_some` ends the next;
* `failure`: if it is set, no request is served any more.

The rows of a message take the first of these ways that is theirs: the requests that only collect tokens
get these by columns, without any Python per row (`TokenColumns`); rows that hold but tokens, or a token with
log probabilities, are handed over as they were unpacked; of all others an `EngineCoreOutput` is made, and
checked against what was asked. Whichever it is, a sink gets the same.

What takes longer than others can wait is done in slices: large messages in `receive_in_pieces`, and the
ends of many requests, as by the death of an engine, in `end_some`. A request that waits for its end is in
flight until then.

Outputs and results go to the object that the caller passed in with the request or the call, which
also wakes the caller's task (`Sink`, `Wakeable`).

What an engine does never raises here. The first cause of its death is kept, and every waiter and
every later call gets a fresh error made of it.

A message counts only if it comes from an engine, by the connection that is known to be this engine's
(see `EngineConnections`). Others are dropped, counted in `ClientStatistics`, and logged once. So an
engine whose very first message cannot be read is a stranger, even if it is the only engine: that
message harms no request, and does not mark the engine dead. In practice each engine's connection is
known before a request is sent, since `open_client` asks every engine for the supported tasks.

Mirrors ``rust/src/engine-core-client/src/client.rs`` and ``vllm/v1/engine/core_client.py``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from trio_vllm.client.answers import answer_checks
from trio_vllm.client.engines import (
    CONNECTION_LOST,
    REPORTED_DEATH,
    UNREADABLE,
    Engine,
    EngineConnections,
    EngineInfo,
    EngineSnapshot,
    EngineState,
    EngineTable,
    LeastLoaded,
    LoadBalancer,
    QueuedMessage,
)
from trio_vllm.client.facts import EngineFacts
from trio_vllm.client.input_processing import callers_id, fill_defaults, validate_and_encode
from trio_vllm.client.late_interaction import late_interaction_of
from trio_vllm.client.streams import Sink, check_answer
from trio_vllm.client.utility_calls import (
    UtilityCall,
    UtilityCallTable,
    Wakeable,
    check_utility_call,
)
from trio_vllm.client.waves import WaveFollower, WaveLeader
from trio_vllm.errors import (
    DecodeError,
    DuplicateRequestIdError,
    EngineCoreError,
    EngineDeadError,
    InvalidDataParallelRankError,
    InvalidFieldError,
    UnsupportedFieldError,
    copy_error,
)
from trio_vllm.protocol import (
    Buffer,
    CodecError,
    DpControlOutput,
    EngineCoreOutput,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineDead,
    FinishReason,
    Frames,
    SchedulerStats,
    UndecodedBatch,
    UtilityCallOutput,
    UtilityRequest,
    bare_token_ids,
    decode_outputs_in_pieces,
    decode_outputs_lazily,
    encode_utility,
    find_logprob_rows,
    logprobs_pattern,
    raw_logprobs_of,
    rest_of,
    row_request_id,
    unpacked_row,
)
from trio_vllm.values import frozen

_log = logging.getLogger("trio_vllm.client")

StatsListener = Callable[[int, SchedulerStats], None]
"""Is called with an engine's index and its statistics."""

ResultsListener = Callable[[str, Sequence[Any], Mapping[int, Any]], None]
"""Is called with the method and the arguments of a utility call, and its results by engine index."""

SMALL = 8 * 1024
"""Bytes of a message that takes no longer than others can wait: less than a millisecond."""

FEW_BYTES = 512
"""Bytes of a message up to which it cannot have rows enough for `TokenColumns`."""

COLUMNS_AT_ONCE = 128 * 1024
"""Bytes of a message that takes `TokenColumns` no longer than others can wait."""

ENDED_AT_ONCE = 512
"""Requests that are ended without a turn for others: some 2 ms, and ten times that in their callers."""

FRAMES_WITHOUT_ARRAYS = 2
"""Those of an ADD: its type and its payload. Others are arrays."""

# An enumeration member costs as much to look up as three calls.
_ALIVE = EngineState.ALIVE
_ERROR = FinishReason.ERROR
_SESSION_ENDS = (FinishReason.ABORT, FinishReason.ERROR)

FROM_STRANGER = "a message from a connection that is not known to be an engine's"
FOR_OTHER_ENGINE = "a message that names an engine which its connection does not belong to"
FOR_OTHERS_REQUEST = "an output for a request of another engine"


@frozen(kw_only=True)
class ClientStatistics:
    """What a client has in its tables, for tests and for the curious."""

    requests_in_flight: Mapping[int, int]
    """Requests that have not ended, by engine index; without the dead."""
    utility_calls: int
    """Calls that are waited for."""
    unsent_messages: int
    """Messages to engines that will be sent in a moment."""
    unsent_aborts: int
    """Requests that are over, and whose engines will be told in a moment."""
    dropped: Mapping[str, int]
    """Messages and outputs that did not count, by the reason, such as `FROM_STRANGER`."""
    tasks_waiting_for_failure: int = 0
    """Tasks in `EngineCoreClient.wait_failed`."""


def _unchanging(frame: Buffer) -> Buffer:
    """A frame that its owner cannot change: an array is the caller's to change soon.

    What is read-only is not copied: 200 MB would take that many milliseconds.
    """
    return frame if type(frame) is memoryview and frame.readonly else bytes(frame)


class FrontendCore:
    """Drives engine cores: requests in, outputs out, sans IO."""

    def __init__(
        self,
        ready_responses: Mapping[int, EngineCoreReadyResponse],
        *,
        waves: WaveLeader | WaveFollower | None = None,
        client_index: int = 0,
        structured_outputs_backend: str = "xgrammar",
        load_balancer: LoadBalancer | None = None,
        hold_time: float = 0.005,
        stall_time: float = 10.0,
        **stated: Any,
    ) -> None:
        """
        Args:
          ready_responses: What the engines registered with, by engine index.
          waves: Our part in the data-parallel waves, if there is a coordinator.
          client_index: Which of the engines' clients we are.
          structured_outputs_backend: For requests that name none.
          load_balancer: Chooses the engine of a request; `LeastLoaded` if None.
          hold_time: Seconds for which `pause_sending` may keep messages back at most.
          stall_time: Seconds without an output after which an engine is stalled that has requests
            and runs none.
          stated: What the engines do not tell of themselves: fields of `RequestLimits`, such as
            ``vocab_size``.
        """
        self.info = EngineInfo.of(ready_responses)
        """What the engines told of themselves."""
        self.facts = EngineFacts(self.info.limits(**stated))
        """What is known of them besides, which a request must keep to."""
        self.failure: EngineCoreError | None = None
        """Why no request is served any more; the first reason is kept."""
        self.ended_count = 0
        """Requests that had a last output so far: for each a task may have been woken."""
        self.ended_at_once = ENDED_AT_ONCE
        self._engines = EngineTable(ready_responses)
        self._connections = EngineConnections(ready_responses)
        self._utility_calls = UtilityCallTable()
        self._waves = waves
        self._client_index = client_index
        self._backend = structured_outputs_backend
        self._load_balancer = LeastLoaded() if load_balancer is None else load_balancer
        self._hold_time = hold_time
        self._hold_end = -math.inf
        self._stall_time = stall_time
        self._stall_check = math.inf
        self._urgent: list[Engine] = []
        self._unsent: dict[Engine, None] = {}  # engines that may have messages which are not urgent
        self._coordination_sends: list[Sequence[Buffer]] = []
        self._endings: deque[Iterator[None]] = deque()
        self._dropped: Counter[str] = Counter()
        self._stats_listeners: dict[object, StatsListener] = {}
        self._results_listeners: dict[object, ResultsListener] = {}

    # What is known ------------------------------------------------------------------------------

    @property
    def engine_indices(self) -> list[int]:
        """The engines that take requests."""
        return [engine.index for engine in self._engines.alive]

    @property
    def dead_engines(self) -> dict[int, EngineDeadError]:
        """Why each dead engine died, in the order of their deaths."""
        return {e.index: e.error for e in self._engines.dead if e.error is not None}

    @property
    def stalled_engines(self) -> list[int]:
        """The living engines that have requests, run none of them and send nothing."""
        return [engine.index for engine in self._engines.alive if engine.is_stalled]

    @property
    def in_flight_count(self) -> int:
        """Requests that have not ended."""
        return sum(len(engine.requests) for engine in self._engines.by_index.values())

    def engine_snapshots(self) -> dict[int, EngineSnapshot]:
        """What is known of each engine now, the dead too, by index."""
        return {i: self._engines.by_index[i].snapshot() for i in sorted(self._engines.by_index)}

    def scheduler_stats(self) -> dict[int, SchedulerStats]:
        """The newest statistics of each living engine that sent any; `DecodeError` if garbled."""
        messages = {i: engine.stats_message for i, engine in self._engines.by_index.items()}
        decoded = {i: message.decode_stats() for i, message in messages.items() if message}
        return {index: stats for index, stats in decoded.items() if stats is not None}

    def statistics(self) -> ClientStatistics:
        """What is in the tables now."""
        engines = self._engines.by_index.values()
        return ClientStatistics(
            requests_in_flight={e.index: len(e.requests) for e in engines if e.error is None},
            utility_calls=len(self._utility_calls),
            unsent_messages=sum(len(engine.messages) for engine in engines),
            unsent_aborts=sum(len(engine.aborts) for engine in engines),
            dropped=dict(self._dropped),
        )

    def add_stats_listener(self, listener: StatsListener) -> Callable[[], None]:
        """Call ``listener`` with each engine's statistics as they come; gives its removal.

        It must not wait or raise.
        """
        key = object()
        self._stats_listeners[key] = listener

        def remove() -> None:
            self._stats_listeners.pop(key, None)

        return remove

    def add_results_listener(self, listener: ResultsListener) -> Callable[[], None]:
        """Call ``listener`` with the results of each utility call that succeeds; gives its removal.

        It must not wait or raise.
        """
        key = object()
        self._results_listeners[key] = listener

        def remove() -> None:
            self._results_listeners.pop(key, None)

        return remove

    def raise_if_failed(self) -> None:
        """Raise the reason, if no request is served any more."""
        if self.failure is not None:
            raise copy_error(self.failure)
        if not self._engines.alive:
            # They are disconnected, but not dead yet.
            index = next(i for i, e in self._engines.by_index.items() if e.error is None)
            raise EngineDeadError(index, CONNECTION_LOST)

    # Requests -----------------------------------------------------------------------------------

    def submit(self, request: EngineCoreRequest, sink: Sink) -> None:
        """Queue a request for the pinned or else the least loaded engine; its outputs go to ``sink``.

        If the engine is idle the message is urgent. Raises as `EngineCoreClient.call`; then nothing
        was queued.
        """
        if self.failure is not None or not self._engines.alive:
            self.raise_if_failed()
        request_id = request.request_id
        if self._engines.engine_with(request_id) is not None:
            raise DuplicateRequestIdError(request_id)
        request = fill_defaults(request, self._client_index, self._backend)
        if self._waves is not None:
            request = attrs.evolve(request, current_wave=self._waves.current_wave)
        facts = self.facts
        frames = validate_and_encode(request, facts.limits)
        if request.lora_request is not None:
            facts.check_adapter(request)
        engine = fixed = self._engine_for(request)
        if engine is None:
            able = facts.able(request, self._engines.alive)
            engine = able[0] if len(able) == 1 else self._load_balancer.choose(able)
        else:
            facts.able(request, [engine])
        sink.answer_checks = answer_checks(request, facts.limits)
        self._queue_request(engine, sink, frames, request if fixed is None else None)
        self._note_submitted(engine, request, sink)
        if self._waves is not None:
            self._coordination_sends += self._waves.send_request(engine.index)

    def _engine_for(self, request: EngineCoreRequest) -> Engine | None:
        """The engine that has to get a request; None if any will do."""
        if (session := self._engines.engine_with_session(request.request_id)) is not None:
            return self._engine_of_session(session, request)
        rank, late = request.data_parallel_rank, late_interaction_of(request)
        if rank is None and late is None:
            return None
        if rank is None:
            assert late is not None
            indices = list(self._engines.by_index)
            rank = self.facts.engine_of_query(late, indices, self.engine_indices)
        self.facts.check_engine_of_query(request, rank)
        engine = self._engines.by_index.get(rank)
        if engine is None or engine.state is not EngineState.ALIVE:
            raise InvalidDataParallelRankError(callers_id(request), rank, self.engine_indices)
        return engine

    def _engine_of_session(self, engine: Engine, request: EngineCoreRequest) -> Engine:
        """The engine that has the chunks before; no other has their context."""
        if request.data_parallel_rank not in (None, engine.index):
            reason = f"must be {engine.index} or nil: there are the chunks before"
            raise InvalidFieldError(callers_id(request), "data_parallel_rank", reason)
        if engine.state is not EngineState.ALIVE:
            raise EngineDeadError(engine.index, CONNECTION_LOST)
        return engine

    def _note_submitted(self, engine: Engine, request: EngineCoreRequest, sink: Sink) -> None:
        """Note what a request leaves at its engine; end it if no engine answers such a one."""
        self.facts.submitted(request, engine.index)
        if self._stall_check == math.inf:
            self._stall_check = -math.inf
        if request.resumable:
            engine.sessions.add(request.request_id)
        elif request.abort_immediately:
            self._end_unanswered(engine, sink, FinishReason.ABORT)
        elif request.request_id in engine.sessions:
            self._end_unanswered(engine, sink, FinishReason.STOP)

    def _end_unanswered(self, engine: Engine, sink: Sink, reason: FinishReason) -> None:
        """Give the last output of a request that ends a session, or that is aborted as it comes."""
        engine.sessions.discard(sink.request_id)
        engine.remove(sink.request_id)
        sink.add_output(EngineCoreOutput(sink.request_id, finish_reason=reason), 0.0, None)

    def _queue_request(
        self,
        engine: Engine,
        sink: Sink,
        frames: Sequence[Buffer],
        movable: EngineCoreRequest | None,
    ) -> None:
        """Put a request in line; a ``movable`` one may go to another engine should this be gone."""
        request_id = sink.request_id
        if request_id in engine.aborts:
            engine.send_aborts()  # it would die of an id that it still has
        if engine.requests:
            if len(frames) > FRAMES_WITHOUT_ARRAYS:
                frames = [_unchanging(frame) for frame in frames]
            self._unsent[engine] = None
        else:
            self._urgent.append(engine)
        engine.add(sink)
        engine.send(frames, None if movable is None else (movable, sink))

    def confirm(self, sink: Sink) -> None:
        """Raise, and forget a request just submitted, if no engine is left that could be sent it."""
        engine = self._engines.by_index[sink.engine_index]
        if engine.state is _ALIVE:
            return
        is_in_flight = engine.requests.get(sink.request_id) is sink
        if not is_in_flight:
            return
        engine.remove(sink.request_id)
        engine.sessions.discard(sink.request_id)
        self.facts.ended(sink.request_id, engine.index)
        self.raise_if_failed()
        raise InvalidDataParallelRankError(sink.request_id, engine.index, self.engine_indices)

    def drop(self, sink: Sink) -> bool:
        """Forget a request and abort it, if it is still in flight; its sink hears nothing more.

        Gives whether it was.
        """
        engine = self._engines.by_index.get(sink.engine_index)
        # Another request may have got the id since.
        if engine is None or engine.requests.get(sink.request_id) is not sink:
            return False
        self._abort(engine, sink.request_id)
        return True

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with a last output of ours, since an engine answers no abort.

        Ids that are not in flight are ignored. Of very many, all but the first wait for `end_some`.
        """
        ids = list(request_ids)
        for engine in self._engines.by_index.values():
            # Between two chunks a session has no request.
            if engine.sessions:
                for request_id in ids:
                    if request_id in engine.sessions and request_id not in engine.requests:
                        self._abort_session(engine, request_id)
        self.abort_sinks(self._engines.sinks_of(ids))

    def abort_sinks(self, sinks: Iterable[Sink]) -> None:
        """End the requests of these sinks like `abort`; ``sinks`` may be gone through in pieces."""
        self._end(sinks, self._abort_sink)

    def _abort_sink(self, engine: Engine, sink: Sink) -> None:
        self._abort(engine, sink.request_id)
        output = EngineCoreOutput(sink.request_id, finish_reason=FinishReason.ABORT)
        sink.add_output(output, 0.0, None)

    def _abort_session(self, engine: Engine, request_id: str) -> None:
        """Let an engine forget a session that is between two chunks."""
        engine.sessions.discard(request_id)
        engine.aborts[request_id] = None
        self._unsent[engine] = None

    def abort_all(self) -> None:
        """Abort every request in flight, and every session."""
        for engine in self._engines.by_index.values():
            self.abort([*engine.requests, *engine.sessions])

    def _end(self, sinks: Iterable[Sink], end: Callable[[Engine, Sink], None]) -> None:
        """End requests, or the first of them if they are many."""
        rest = self._end_each(sinks, end)
        for _ in rest:
            self._endings.append(rest)
            return

    def _end_each(
        self, sinks: Iterable[Sink], end: Callable[[Engine, Sink], None]
    ) -> Iterator[None]:
        """End those that are still in flight; yields whenever others should have a turn."""
        for number, sink in enumerate(sinks):
            if number and not number % self.ended_at_once:
                yield
            engine = self._engines.by_index[sink.engine_index]
            if engine.requests.get(sink.request_id) is sink:
                end(engine, sink)

    @property
    def has_endings(self) -> bool:
        """Whether there are requests left for `end_some`."""
        return bool(self._endings)

    def end_some(self) -> None:
        """End some of the requests that have to end, after which others should have a turn."""
        for _ in self._endings[0]:
            return
        self._endings.popleft()

    def _abort(self, engine: Engine, request_id: str) -> Sink:
        """Forget a request, and tell its engine soon; what is held is sent along."""
        sink = engine.remove(request_id)
        engine.sessions.discard(request_id)
        self.facts.ended(request_id, engine.index)
        engine.aborts[request_id] = None
        self._unsent[engine] = None
        self._hold_end = -math.inf
        return sink

    def _fail_request(self, engine: Engine, request_id: str, error: EngineCoreError) -> None:
        self._abort(engine, request_id).fail(error)

    def _fail_requests(self, engine: Engine, error: EngineCoreError) -> None:
        def fail(engine: Engine, sink: Sink) -> None:
            self._fail_request(engine, sink.request_id, error)

        self._end(list(engine.requests.values()), fail)

    # Utility calls ------------------------------------------------------------------------------

    def call_utility(self, method: str, args: Sequence[Any], waiter: Wakeable) -> UtilityCall:
        """Queue a call of a method of the engine core for every living engine; it is urgent.

        ``waiter`` is woken when the call is settled; `close_call` must follow in any case.

        Raises:
          UtilityRefusedError: Engines are known not to survive this call.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
          TypeError: An argument has no MessagePack form.
        """
        self.raise_if_failed()
        check_utility_call(method, args)
        self.facts.note_call(method, list(args))
        call = self._utility_calls.open(method, self.engine_indices, waiter)
        try:
            frames = encode_utility(
                UtilityRequest(self._client_index, call.call_id, method, list(args))
            )
        except CodecError as error:
            self._utility_calls.close(call)
            raise TypeError(f"utility call {method!r}: {error}") from error
        for engine in self._engines.alive:
            engine.send_aborts()
            engine.send(frames)
            self._urgent.append(engine)
        return call

    def note_results(self, method: str, args: Sequence[Any], results: Mapping[int, Any]) -> None:
        """Learn from a call that every engine has answered, and tell the listeners."""
        self.facts.note_results(method, args, results)
        for listener in list(self._results_listeners.values()):
            listener(method, args, results)

    def close_call(self, call: UtilityCall) -> None:
        """Forget a call, settled or not; late answers are dropped."""
        self._utility_calls.close(call)

    # Messages to send ---------------------------------------------------------------------------

    def urgent_sends(self) -> list[QueuedMessage]:
        """Give, and forget, the messages to engines that should not wait for them."""
        if not self._urgent:
            return []
        engines, self._urgent = self._urgent, []
        return [message for engine in engines for message in engine.take_messages()]

    def sends(self) -> list[QueuedMessage]:
        """Give, and forget, all messages to engines.

        All requests of an engine that were aborted since the last time share one message.
        """
        self._hold_end = -math.inf
        engines = dict.fromkeys([*self._urgent, *self._unsent])
        self._unsent, self._urgent = {}, []
        for engine in engines:
            engine.send_aborts()
        return [message for engine in engines for message in engine.take_messages()]

    def coordination_sends(self) -> list[Sequence[Buffer]]:
        """Give, and forget, what goes to the coordinator, or from ours to the engines."""
        if not self._coordination_sends:
            return []
        messages, self._coordination_sends = self._coordination_sends, []
        return messages

    @property
    def has_sends(self) -> bool:
        """Whether `sends` may give something."""
        return bool(self._unsent or self._urgent)

    @property
    def send_time(self) -> float:
        """From when on `sends` should be called, if there are any."""
        return self._hold_end

    def pause_sending(self, now: float) -> None:
        """Keep messages back until `resume_sending`, but no longer than the hold time.

        For while received messages are waiting to be handed out, of which requests could only bring
        more. An abort brings less: it ends a pause.
        """
        # A pause that could be prolonged would be without end for a client that is always behind.
        if self._hold_end == -math.inf and not any(engine.aborts for engine in self._unsent):
            self._hold_end = now + self._hold_time

    def resume_sending(self) -> None:
        """End a pause."""
        self._hold_end = -math.inf

    def undeliverable(self, message: QueuedMessage, cause: Exception, now: float) -> None:
        """Take back a message that could not be sent, and disconnect its engine."""
        self._disconnect(message.engine, now, cause)
        self._move(message)

    def _move(self, message: QueuedMessage) -> None:
        """Give a request that its engine cannot be sent to another one, if any will do."""
        if message.movable is None:
            return  # it is no request, or is meant for this engine
        engine, (request, sink) = message.engine, message.movable
        if engine.requests.get(sink.request_id) is not sink:
            return  # it is over
        if engine.state is EngineState.DEAD:
            return  # it is about to be: they end some at a time
        try:
            able = self.facts.able(request, self._engines.alive)
        except UnsupportedFieldError:
            able = []
        if able:  # else it fails with its engine
            engine.remove(sink.request_id)
            # There is no wave to tell of: engines that have them are lost together.
            other = self._load_balancer.choose(able)
            self._queue_request(other, sink, message.frames, request)
            self.facts.submitted(request, other.index)
            if request.resumable:
                engine.sessions.discard(sink.request_id)
                other.sessions.add(sink.request_id)

    # Messages that come -------------------------------------------------------------------------

    def receive(self, frames: Frames, connection: int | None, now: float) -> None:
        """Handle a message of the output socket; ``connection`` is the number of its connection."""
        if not self.receive_small(frames, connection, now):
            for _ in self.receive_in_pieces(frames, connection, now):
                pass

    def receive_small(self, frames: Frames, connection: int | None, now: float) -> bool:
        """Handle a message like `receive` if it is small, and a batch as most are; whether it was."""
        index = self._connections.proved_engine(connection)
        if index is None or len(frames) != 1:
            return False
        engine, size = self._engines.by_index[index], len(frames[0])
        if size > FEW_BYTES and self._receive_columns(engine, frames, now):
            return True
        if size > SMALL:
            return False
        try:
            batch = self._find_logprobs(engine, frames) or decode_outputs_lazily(frames)
            if not isinstance(batch, UndecodedBatch) or batch.engine_index != index:
                return False
            if engine.state is not EngineState.DEAD:
                self._receive_one_by_one(engine, batch.rows, batch)
                self._receive_rest(engine, batch, now)
        except DecodeError as error:
            self._receive_undecodable(index, error)
        return True

    def _receive_columns(self, engine: Engine, frames: Frames, now: float) -> bool:
        """Handle a message whose rows are mostly those of `TokenColumns`; False if it is another one."""
        found = engine.columns.find(frames) if len(frames[0]) <= COLUMNS_AT_ONCE else None
        if (
            found is None
            or found.others.engine_index != engine.index
            or engine.state is EngineState.DEAD
            or not engine.columns.append(found)
        ):
            return False
        batch = found.others
        engine.has_moved = True
        self._receive_rows(engine, batch.rows, batch)
        engine.columns.admit(batch.rows)
        self._receive_rest(engine, batch, now)
        return True

    def _find_logprobs(self, engine: Engine, frames: Frames) -> UndecodedBatch | None:
        """Decode a message with rows like those with log probabilities before; None if it has none."""
        if engine.logprobs_pattern is None:
            return None
        batch = find_logprob_rows(frames, engine.logprobs_pattern)
        if batch is None:
            engine.logprobs_pattern = None
        return batch

    def receive_in_pieces(
        self, frames: Frames, connection: int | None, now: float
    ) -> Iterator[None]:
        """Handle a message like `receive`; yields whenever others may have a turn.

        Anything may be called in between, except for another message of the output socket.
        """
        sender = self._connections.engine_of(connection)
        try:
            index = self._connections.proved_engine(connection)
            found = (
                None
                if index is None
                else self._find_logprobs(self._engines.by_index[index], frames)
            )
            message = found or (yield from decode_outputs_in_pieces(frames))
            if isinstance(message, EngineDead):
                self._receive_sentinel(sender)
            elif (yield from self._claim(connection, message)):
                sender = message.engine_index
                yield from self._receive_from(self._engines.by_index[sender], message, now)
            else:
                self._drop(FOR_OTHER_ENGINE)
        except DecodeError as error:
            self._receive_undecodable(sender, error)

    def _claim(
        self,
        connection: int | None,
        message: UndecodedBatch | UtilityCallOutput | DpControlOutput,
    ) -> Generator[None, None, bool]:
        """Whether a message is of the engine that it names."""
        connections, index = self._connections, message.engine_index
        if connections.is_proved(connection):
            return connections.engine_of(connection) == index
        has_output = False
        if isinstance(message, UndecodedBatch) and (engine := self._engines.by_index.get(index)):
            for rows in message.row_pieces():
                if has_output := any(row_request_id(row) in engine.requests for row in rows):
                    break
                yield
        return connections.claim(connection, index, has_output=has_output)

    def _receive_from(
        self,
        engine: Engine,
        message: UndecodedBatch | UtilityCallOutput | DpControlOutput,
        now: float,
    ) -> Iterator[None]:
        if engine.state is EngineState.DEAD:
            return
        if isinstance(message, UndecodedBatch):
            yield from self._receive_batch(engine, message, now)
        elif isinstance(message, UtilityCallOutput):
            self._utility_calls.receive(engine.index, message.output)
        else:
            _log.warning("engine %d sent a wave notice here", engine.index)

    def _receive_batch(self, engine: Engine, batch: UndecodedBatch, now: float) -> Iterator[None]:
        for rows in batch.row_pieces():
            self._receive_one_by_one(engine, rows, batch)
            yield
            if engine.state is EngineState.DEAD:
                return
        self._receive_rest(engine, batch, now)

    # Rows ---------------------------------------------------------------------------------------

    def _receive_one_by_one(self, engine: Engine, rows: list[Any], batch: UndecodedBatch) -> None:
        """Hand over rows that are not taken by columns."""
        columns = engine.columns
        is_worth = len(rows) >= columns.fewest_rows
        if is_worth or columns.places:
            columns.interrupt(batch.weight_version)
        if batch.has_logprob_rows:
            self._receive_logprob_rows(engine, rows, batch)
        else:
            self._receive_rows(engine, rows, batch)
        if is_worth:
            columns.admit(rows)

    def _receive_rows(self, engine: Engine, rows: list[Any], batch: UndecodedBatch) -> None:
        """Hand each row to its sink: the hot path of the whole client."""
        sinks, timestamp, version = engine.requests, batch.timestamp, batch.weight_version
        if rows:
            engine.has_moved = True
        for row in rows:
            token_ids = bare_token_ids(row)
            if token_ids is not None:
                request_id = row[0]
                sink = sinks.get(request_id) if type(request_id) is str else None
                if sink is not None:
                    try:
                        sink.add_tokens(token_ids, timestamp, version)
                    except OverflowError:
                        pass  # the slow path says what is wrong
                    except DecodeError as error:
                        self._fail_request(engine, request_id, error)
                        continue
                    else:
                        continue
            elif self._receive_logprobs(engine, row, batch):
                continue
            self._receive_row(engine, row, batch)

    def _receive_logprob_rows(self, engine: Engine, rows: list[Any], batch: UndecodedBatch) -> None:
        """Hand over rows of which most are a `LogprobRow`."""
        sinks, frames, timestamp = engine.requests, batch.frames, batch.timestamp
        version = batch.weight_version
        engine.has_moved = True
        for row in rows:
            if type(row) is not tuple:
                self._receive_rows(engine, [row], batch)
                continue
            request_id, token_ids, logprobs = row
            sink = sinks.get(request_id)
            try:
                if sink is None or not sink.add_raw_logprobs(
                    token_ids, logprobs, frames, timestamp, version
                ):
                    self._receive_row(engine, unpacked_row(row), batch)
            except DecodeError as error:
                self._fail_request(engine, request_id, error)

    def _receive_logprobs(self, engine: Engine, row: Any, batch: UndecodedBatch) -> bool:
        """Hand over a row of one token with its log probabilities; False if it is another one."""
        logprobs = raw_logprobs_of(row)
        if logprobs is None or (request_id := row_request_id(row)) is None:
            return False
        if not self._add_logprobs(engine, request_id, row[1], logprobs, batch):
            return False
        if (rest := rest_of(row)) is not None:
            self._receive_row(engine, rest, batch)
        elif engine.logprobs_pattern is None:
            engine.logprobs_pattern = logprobs_pattern(row)
        return True

    def _add_logprobs(
        self,
        engine: Engine,
        request_id: str,
        token_ids: list[int],
        logprobs: Any,
        batch: UndecodedBatch,
    ) -> bool:
        sink = engine.requests.get(request_id)
        if sink is None:
            return False
        try:
            return sink.add_raw_logprobs(
                token_ids, logprobs, batch.frames, batch.timestamp, batch.weight_version
            )
        except OverflowError:
            return False
        except DecodeError as error:
            self._fail_request(engine, request_id, error)
            return True

    def _receive_row(self, engine: Engine, row: object, batch: UndecodedBatch) -> None:
        request_id = row_request_id(row)
        if request_id is not None and request_id not in engine.requests:
            if self._engines.engine_with(request_id) is not None:
                self._drop(FOR_OTHERS_REQUEST)
            return
        try:
            output = batch.decode_row(row)
        except DecodeError as error:
            if request_id is None:
                raise  # it may have been a part of any request
            self._fail_request(engine, request_id, error)
            return
        sink = engine.requests[output.request_id]
        if output.finished:
            self._note_finished(engine, output)
        try:
            check_answer(sink, output)
            sink.add_output(output, batch.timestamp, batch.weight_version)
        except DecodeError as error:
            self.drop(sink)
            sink.fail(error)

    def _note_finished(self, engine: Engine, output: EngineCoreOutput) -> None:
        self.ended_count += 1
        engine.remove(output.request_id)
        self.facts.ended(
            output.request_id,
            engine.index,
            answered=output.pooling_output is not None,
            has_failed=output.finish_reason is _ERROR,
        )
        if output.finish_reason in _SESSION_ENDS:
            engine.sessions.discard(output.request_id)

    # What comes besides rows --------------------------------------------------------------------

    def _receive_rest(self, engine: Engine, batch: UndecodedBatch, now: float) -> None:
        """Take in what a batch has besides rows."""
        if batch.finished_requests:
            self._receive_finished(engine, batch.finished_requests)
        if batch.has_stats:
            self._receive_stats(engine, batch, now)

    def _receive_finished(self, engine: Engine, request_ids: list[str]) -> None:
        """Fail requests that are over without a last output; of very many all but the first wait."""
        found = map(engine.requests.get, request_ids)
        sinks = [sink for sink in found if sink is not None]
        if sinks:
            self._end(sinks, self._fail_unfinished)

    def _fail_unfinished(self, engine: Engine, sink: Sink) -> None:
        reason = "lists the request, but it had no last output"
        error = DecodeError("outputs", "finished_requests", reason, engine.index, sink.request_id)
        self._fail_request(engine, sink.request_id, error)

    def _receive_stats(self, engine: Engine, batch: UndecodedBatch, now: float) -> None:
        engine.stats_message, engine.stats_time = batch, now
        if len(self._engines.alive) < 2 and not self._stats_listeners:
            return  # they are needed for nothing yet
        try:
            stats = batch.decode_stats()
        except DecodeError as error:
            # They are for information only: not worth an engine and its requests.
            if not engine.has_bad_stats:
                engine.has_bad_stats = True
                _log.warning("%s", error)
            return
        if stats is not None:
            engine.receive_stats(stats)
            for listener in list(self._stats_listeners.values()):
                listener(engine.index, stats)

    def _receive_sentinel(self, sender: int | None) -> None:
        if sender is None:
            self._drop(FROM_STRANGER, "ENGINE_CORE_DEAD")
        else:
            self._mark_dead(self._engines.by_index[sender], REPORTED_DEATH)

    def _receive_undecodable(self, sender: int | None, error: DecodeError) -> None:
        if sender is None:
            self._drop(FROM_STRANGER, error)
        else:
            engine = self._engines.by_index[sender]
            self._mark_dead(engine, f"{UNREADABLE}: {error}", error)

    def _drop(self, what: str, details: object = "there may be more") -> None:
        """Count a dropped message; log the first of a kind only, or a stranger could fill the log."""
        self._dropped[what] += 1
        if self._dropped[what] == 1:
            _log.warning("dropped %s: %s", what, details)

    # Waves --------------------------------------------------------------------------------------

    def receive_notice(self, frames: Frames, connection: int | None) -> None:
        """Handle a message to the coordinator, which we are."""
        assert isinstance(self._waves, WaveLeader)
        try:
            self._coordination_sends += self._waves.receive_notice(frames, connection)
        except DecodeError as error:
            self._receive_undecodable(error.engine_index, error)

    def receive_subscription(self, frames: Frames, connection: int | None = None) -> None:
        """Handle a new connection to the broadcasts of the coordinator, which we are."""
        assert isinstance(self._waves, WaveLeader)
        self._coordination_sends += self._waves.receive_subscription(frames, connection)

    def receive_publication(self, frames: Frames, _: int | None = None) -> None:
        """Handle a message from the coordinator in another process."""
        assert isinstance(self._waves, WaveFollower)
        try:
            self._waves.receive_publication(frames)
        except DecodeError as error:
            self.fail(error)

    def coordinator_changed(self, now: float, *, is_open: bool) -> None:
        """Note that the connection to the coordinator in another process broke, or is back."""
        assert isinstance(self._waves, WaveFollower)
        if is_open:
            self._waves.regain_coordinator()
        else:
            self._waves.lose_coordinator(now)

    # Engines that are lost ----------------------------------------------------------------------

    def disconnected(
        self, now: float, *, engine_index: int | None = None, connection: int | None = None
    ) -> None:
        """Note that a connection broke: this engine's to the input socket, or that of a number.

        A connection that is not known to be an engine's is ignored.
        """
        if engine_index is None:
            engine_index = self._connections.engine_of(connection)
        if engine_index is None and isinstance(self._waves, WaveLeader):
            engine_index = self._waves.engine_of(connection)
            self._waves.lose_connection(connection, now)
        if engine_index is not None:
            self._disconnect(self._engines.by_index[engine_index], now)

    def _disconnect(self, engine: Engine, now: float, cause: Exception | None = None) -> None:
        self._engines.disconnect(engine, now, cause)
        for message in engine.take_messages():
            self._move(message)

    @property
    def next_deadline(self) -> float:
        """When `tick` should be called next; may be infinity."""
        waves = math.inf if self._waves is None else self._waves.next_deadline
        return min(self._engines.next_deadline, waves, self._stall_check)

    def tick(self, now: float) -> None:
        """Mark those engines dead whose deadline has passed, and look for stalled ones."""
        for engine, cause in self._engines.expired(now):
            self._mark_dead(engine, CONNECTION_LOST, cause)
        if self._waves is not None and (error := self._waves.expire(now)):
            _log.error("%s", error)
            self.fail(error)
        if self._stall_check <= now:
            self._check_stalls(now)

    def _check_stalls(self, now: float) -> None:
        """Warn of engines that have begun to stall; look again while there are requests."""
        for engine in self._engines.alive:
            if engine.check_stall(now, self._stall_time):
                _log.warning("%s", engine.describe_stall(self._stall_time))
        self._stall_check = now + self._stall_time / 4 if self.in_flight_count else math.inf

    def _mark_dead(self, engine: Engine, reason: str, cause: Exception | None = None) -> None:
        """Give an engine up, unless it is dead already, and all that is waited for from it."""
        if engine.state is EngineState.DEAD:
            return
        error = self._engines.mark_dead(engine, reason, cause)
        _log.error("%s", error)
        engine.stats_message = None
        engine.sessions.clear()
        self.facts.lost_engine(engine.index)
        self._fail_requests(engine, error)
        self._utility_calls.fail_engine(engine.index, error)
        is_last = len(self._engines.dead) == len(self._engines.by_index)
        if is_last or self.info.data_parallel_size > 1:  # in lockstep, none goes on alone
            self.fail(error)

    def fail(self, error: EngineCoreError) -> None:
        """Serve no request any more, and end those in flight; the first reason is kept."""
        if self.failure is not None:
            return
        self.failure = error
        for engine in self._engines.by_index.values():
            self._fail_requests(engine, error)
            for request_id in list(engine.sessions):
                self._abort_session(engine, request_id)
        self._utility_calls.fail_all(error)
