"""One task waiting for another's news, at the lowest price trio has."""

from __future__ import annotations

import trio


class Waker:
    """Lets one task sleep until `wake`; a wake without a sleeper is forgotten.

    A `trio.Event` can be set only once, and a new one for every output would cost more than the
    output itself.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a task sleeps here."""
        return self._task is not None

    def wake(self) -> None:
        """Let the sleeper go on, if there is one."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Sleep until the next `wake`; `trio.BusyResourceError` if a task sleeps here already."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is already waiting for this")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
