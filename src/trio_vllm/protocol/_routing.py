"""Which engine gets a request: the pinned one, else the least loaded.

The load of an engine is what this client has in flight there. Once the engine has reported
statistics, it is what the engine said it had plus what was admitted since, if that is more: other
clients may use it too. Ties go to the lowest index. Mirrors
``engine-core-client/src/client/state.rs``.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trio_vllm._errors import InvalidDataParallelRankError


@attrs.define
class _Load:
    in_flight: int = 0
    reported: int | None = None
    """What the engine has, running or waiting, as it said last."""
    admitted_since_report: int = 0

    @property
    def score(self) -> int:
        if self.reported is None:
            return self.in_flight
        return max(self.in_flight, self.reported + self.admitted_since_report)


class Balancer:
    """Counts what each engine has to do and chooses one."""

    def __init__(self, engine_indices: Iterable[int]) -> None:
        self._loads = {index: _Load() for index in sorted(engine_indices)}

    @property
    def engine_indices(self) -> list[int]:
        """The engines that can be chosen."""
        return list(self._loads)

    def choose(self, request_id: str, data_parallel_rank: int | None) -> int:
        """The engine for a request; there must be one. Nothing is counted yet.

        Raises `InvalidDataParallelRankError` if the pinned engine is not there.
        """
        loads = self._loads
        if data_parallel_rank is None:
            if len(loads) == 1:
                return next(iter(loads))
            return min(loads, key=lambda engine_index: loads[engine_index].score)
        if data_parallel_rank not in loads:
            raise InvalidDataParallelRankError(request_id, data_parallel_rank, self.engine_indices)
        return data_parallel_rank

    def admit(self, engine_index: int) -> None:
        """Count a request that is sent to this engine."""
        load = self._loads[engine_index]
        load.in_flight += 1
        load.admitted_since_report += 1

    def release(self, engine_index: int) -> None:
        """Count a request that this engine is done with; unknown engines are ignored."""
        if load := self._loads.get(engine_index):
            load.in_flight -= 1

    def report(self, engine_index: int, running: int, waiting: int) -> None:
        """Take in what an engine says of itself; unknown engines are ignored."""
        if load := self._loads.get(engine_index):
            load.reported = running + waiting
            load.admitted_since_report = 0

    def in_flight(self, engine_index: int) -> int:
        """How many requests of this client the engine has."""
        return self._loads[engine_index].in_flight

    def remove(self, engine_index: int) -> None:
        """Choose this engine no more."""
        self._loads.pop(engine_index, None)
