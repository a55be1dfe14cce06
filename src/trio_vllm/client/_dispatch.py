"""What the engines send, handed to whoever it concerns."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trio_vllm._errors import DecodeError
from trio_vllm.client._inflight import Inflight
from trio_vllm.client._lives import EngineLives
from trio_vllm.client._utility_calls import UtilityCalls
from trio_vllm.protocol import (
    Balancer,
    DpControlOutput,
    EngineDead,
    Frames,
    RowBatch,
    SchedulerStats,
    UtilityCallOutput,
    open_outputs,
)

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
        self._stats: dict[int, RowBatch] = {}
        self._garblers: set[int] = set()
        # Which engine has sent something readable by a connection; by the connection's descriptor.
        self._senders: dict[int | None, int] = {}
        self.stats_listener: StatsListener | None = None

    def take(self, frames: Frames, descriptor: int | None = None) -> None:
        """Hand out a message; ``descriptor`` is that of its connection, if it is known."""
        try:
            message = open_outputs(frames)
            if descriptor is not None and not isinstance(message, EngineDead):
                self._senders[descriptor] = message.engine_index
            match message:
                case RowBatch():
                    self._take_batch(message)
                case UtilityCallOutput():
                    self._utility_calls.take(message)
                case DpControlOutput():
                    _log.warning("engine %d sent a wave notice here", message.engine_index)
                case EngineDead():
                    self._lives.take_farewell(self._senders.get(descriptor))
        except DecodeError as error:
            self._lives.take_unreadable(error, self._senders.get(descriptor))

    def _take_batch(self, batch: RowBatch) -> None:
        if batch.engine_index in self._lives.dead:
            return
        self._inflight.take(batch)
        if batch.has_stats and batch.engine_index in self._lives.living:
            self._stats[batch.engine_index] = batch
            if self._has_choice or self.stats_listener is not None:
                self._take_stats(batch)

    def _take_stats(self, batch: RowBatch) -> None:
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
