"""The aborts that engines have not been told of yet."""

from __future__ import annotations


class PendingAborts:
    """Request ids by engine, in the order of their aborts.

    All that are aborted before the task that sends them gets its turn share one message per engine.
    """

    def __init__(self) -> None:
        self._ids: dict[int, dict[str, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in ids for ids in self._ids.values())

    def add(self, engine_index: int, request_id: str) -> None:
        """This engine is to be told."""
        self._ids.setdefault(engine_index, {})[request_id] = None

    def take(self) -> dict[int, list[str]]:
        """What is to be sent now, by engine; it is pending no longer."""
        pending, self._ids = self._ids, {}
        return {engine_index: list(ids) for engine_index, ids in pending.items()}
