"""What goes to the engines: at once where one waits for it, else together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import trio

from trio_vllm.client.engines import Balancer, EngineLives
from trio_vllm.client.requests import Inflight
from trio_vllm.client.utility_calls import UtilityCalls
from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, PeerGoneError
from trio_vllm.protocol import (
    Buffer,
    DpControlOutput,
    EngineDead,
    EngineId,
    Frames,
    SchedulerStats,
    UndecodedBatch,
    UtilityCallOutput,
    decode_outputs_lazily,
    encode_abort,
)
from trio_vllm.transport import EngineChannels, FrameSender, Received

# MERGED client/_dispatch: What the engines send, handed to whoever it concerns.
# MERGED client/_pump: The task that hands out what the engines send.


HOLD = 0.005
"""Seconds that what is posted may wait at most, beyond the turns of other tasks."""


class Outbox:
    """Sends at once, or when `run` gets its turn, that is after all tasks that are due now.

    What is sent in one go costs ØMQ one wake-up, and reaches the engine before its next step. All
    requests that are aborted until then share one message per engine.
    """

    def __init__(
        self,
        requests: FrameSender,
        *,
        on_gone: Callable[[int, PeerGoneError], None],
        on_unsent: Callable[[str, list[Buffer]], None],
    ) -> None:
        """
        Args:
          requests: The way to all engines.
          on_gone: Called with an engine that turns out to be gone.
          on_unsent: Called after that with each request, id and message, that was posted to it and
            may go elsewhere.
        """
        self._requests = requests
        self._on_gone = on_gone
        self._on_unsent = on_unsent
        self._posted: list[tuple[int, list[Buffer], str | None]] = []
        self._aborts: dict[int, dict[str, None]] = {}  # request ids by engine
        self._waker = Waker()
        self._hold_end: float | None = None

    def __bool__(self) -> bool:
        """Whether something is waiting."""
        return bool(self._posted or self._aborts)

    def send(self, engine_index: int, message: list[Buffer]) -> bool:
        """Send to an engine; False if it is not there any more."""
        try:
            self._requests.send_nowait([EngineId.of(engine_index), *message])
        except PeerGoneError as error:
            self._on_gone(engine_index, error)
            return False
        return True

    def post(self, engine_index: int, message: list[Buffer], movable_id: str | None) -> None:
        """Send a request soon; its id, if another engine will do as well."""
        # Copied, for it may have views of arrays that are the caller's to change once we return.
        self._posted.append((engine_index, [*map(bytes, message)], movable_id))
        self._waker.wake()

    def abort(self, engine_index: int, request_id: str) -> None:
        """Tell an engine soon that a request is over; a hold ends with this."""
        self._hold_end = None
        self._aborts.setdefault(engine_index, {})[request_id] = None
        self._waker.wake()

    def prepare_id(self, request_id: str) -> None:
        """See to it that no engine still has this id: it would die of getting it again."""
        if self._aborts and any(request_id in ids for ids in self._aborts.values()):
            self.flush()

    def hold(self) -> None:
        """Let `run` wait until `release`, but for `HOLD` seconds at most.

        For while outputs are waiting to be handed out, of which requests could only bring more.
        An abort brings less, and is not held.
        """
        # Else a hold without end would grow out of several.
        if self._hold_end is None and not self._aborts:
            self._hold_end = trio.current_time() + HOLD

    def release(self) -> None:
        """End a hold."""
        self._hold_end = None
        if self:
            self._waker.wake()

    def flush(self) -> None:
        """Send what is waiting: requests first, for they may have been aborted since."""
        self._hold_end = None
        while self._posted:
            posted, self._posted = self._posted, []
            for engine_index, message, movable_id in posted:
                if not self.send(engine_index, message) and movable_id is not None:
                    self._on_unsent(movable_id, message)
        aborts, self._aborts = self._aborts, {}
        for engine_index, request_ids in aborts.items():
            self.send(engine_index, encode_abort(list(request_ids)))

    async def run(self) -> None:
        """Task: send what is waiting, for ever."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self:
                await self._waker.wait()
            while self._hold_end is not None and trio.current_time() < self._hold_end:
                with trio.move_on_at(self._hold_end):
                    await self._waker.wait()
            self.flush()


_log = logging.getLogger("trio_vllm.client")

StatsListener = Callable[[int, SchedulerStats], None]
"""Is called with an engine's index and its statistics."""


class Dispatcher:
    """Takes one message at a time; keeps the newest statistics of each engine."""

    def __init__(
        self,
        inflight: Inflight,
        utility_calls: UtilityCalls,
        balancer: Balancer,
        lives: EngineLives,
    ) -> None:
        self._inflight = inflight
        self._utility_calls = utility_calls
        self._balancer = balancer
        self._lives = lives
        self._has_choice = len(lives.living) > 1
        self._stats: dict[int, UndecodedBatch] = {}
        self._garblers: set[int] = set()
        # Which engine has sent something readable by a connection; by the connection's number.
        self._senders: dict[int | None, int] = {}
        self.stats_listener: StatsListener | None = None

    def take(self, frames: Frames, connection: int | None = None) -> None:
        """Hand out a message; ``connection`` is the number of its connection, if it is known."""
        try:
            message = decode_outputs_lazily(frames)
            if connection is not None and not isinstance(message, EngineDead):
                self._senders[connection] = message.engine_index
            match message:
                case UndecodedBatch():
                    self._take_batch(message)
                case UtilityCallOutput():
                    self._utility_calls.take(message)
                case DpControlOutput():
                    _log.warning("engine %d sent a wave notice here", message.engine_index)
                case EngineDead():
                    self._lives.take_farewell(self._senders.get(connection))
        except DecodeError as error:
            self._lives.take_unreadable(error, self._senders.get(connection))

    def _take_batch(self, batch: UndecodedBatch) -> None:
        if batch.engine_index in self._lives.dead:
            return
        self._inflight.take(batch)
        if batch.has_stats and batch.engine_index in self._lives.living:
            self._stats[batch.engine_index] = batch
            if self._has_choice or self.stats_listener is not None:
                self._take_stats(batch)

    def _take_stats(self, batch: UndecodedBatch) -> None:
        index = batch.engine_index
        try:
            stats = batch.decode_stats()
        except DecodeError as error:
            # They are for information only: not worth an engine and its requests.
            if index not in self._garblers:
                self._garblers.add(index)
                _log.warning("%s", error)
            return
        if stats is not None:
            self._balancer.report(index, stats.num_running_reqs, stats.num_waiting_reqs)
            if self.stats_listener is not None:
                self.stats_listener(index, stats)

    def scheduler_stats(self) -> dict[int, SchedulerStats]:
        """The newest statistics of each engine that sent any; `DecodeError` if they are garbled."""
        stats = {index: batch.decode_stats() for index, batch in sorted(self._stats.items())}
        return {index: value for index, value in stats.items() if value is not None}

    def forget(self, engine_index: int) -> None:
        """This engine's statistics are of no interest any more."""
        self._stats.pop(engine_index, None)


BATCH = 64
"""Messages received at once."""

SLICE = 0.002
"""Seconds of handing out outputs between two checkpoints; a message of 1,000 takes about 1 ms."""


class OutputPump:
    """Gives the outputs of all engines to the dispatcher."""

    def __init__(self, links: EngineChannels, dispatcher: Dispatcher, outbox: Outbox) -> None:
        """While it is behind with that, ``outbox`` is held."""
        self._outputs = links.outputs
        self._dispatcher = dispatcher
        self._outbox = outbox

    async def run(self) -> None:
        """Task: hand out what comes, for ever."""
        while True:
            batch = await self._outputs.receive_batch(BATCH)
            while batch:
                await self._hand_out(batch)
                batch = await self._receive_more(len(batch))

    async def _receive_more(self, last_count: int) -> list[Received]:
        """Take what is waiting behind a full batch; requests are held back meanwhile."""
        if last_count == BATCH:
            try:
                batch = self._outputs.receive_batch_nowait(BATCH)
            except trio.WouldBlock:
                pass
            else:
                self._outbox.hold()
                await trio.lowlevel.checkpoint()
                return batch
        self._outbox.release()
        return []

    async def _hand_out(self, batch: list[Received]) -> None:
        end = perf_counter() + SLICE
        for frames, connection in batch:
            if perf_counter() > end:
                await trio.lowlevel.checkpoint()
                end = perf_counter() + SLICE
            self._dispatcher.take(frames, connection)
