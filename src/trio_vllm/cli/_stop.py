"""Stopping on request: SIGINT (Ctrl-C), SIGTERM, SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from trio_vllm.concurrency import running

T = TypeVar("T")


async def until_stopped(work: Callable[[], Awaitable[T]]) -> T | signal.Signals:
    """Do ``work``; a signal cancels it and is given instead of its result.

    SIGINT counts even where it is ignored, which a shell without job control passes on to what it
    starts in the background. SIGHUP does not: ``nohup`` means it.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    stopped_by: signal.Signals | None = None
    with trio.open_signal_receiver(*numbers) as received, trio.CancelScope() as scope:

        async def watch() -> None:
            nonlocal stopped_by
            async for number in received:
                stopped_by = stopped_by or signal.Signals(number)
                scope.cancel(reason=f"stopped by {stopped_by.name}")

        async with running(watch):
            return await work()
    assert stopped_by is not None
    return stopped_by
