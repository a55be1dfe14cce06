"""Cancel a coroutine at its first checkpoint, at its second, and so on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio


@attrs.define(eq=False)
class _CancelAt(trio.abc.Instrument):
    """Cancels ``scope`` when its task stops to wait for the ``number``-th time."""

    scope: trio.CancelScope
    number: int
    task: trio.lowlevel.Task
    count: int = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.count += 1
            if self.count == self.number:
                self.scope.cancel(reason=f"checkpoint {self.number}")


async def was_cancelled_at(number: int, function: Callable[[], Awaitable[object]]) -> bool:
    """Run ``function``, cancelled at its checkpoint of this number (from 1).

    False if it returned without being cancelled, because it has not so many.
    """
    instrument = _CancelAt(trio.CancelScope(), number, trio.lowlevel.current_task())
    trio.lowlevel.add_instrument(instrument)
    try:
        with instrument.scope:
            await function()
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return instrument.scope.cancelled_caught
