"""One task sleeps, another wakes it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.concurrency import Waker


async def test_a_wake_ends_the_sleep() -> None:
    waker = Waker()
    async with trio.open_nursery() as nursery:

        async def sleep() -> None:
            with assert_checkpoints():
                await waker.wait()

        nursery.start_soon(sleep)
        await wait_all_tasks_blocked()
        assert waker.is_waiting
        waker.wake()
        waker.wake()
        assert not waker.is_waiting


async def test_a_wake_without_a_sleeper_is_forgotten() -> None:
    waker = Waker()
    waker.wake()
    with trio.move_on_after(0) as scope:
        await waker.wait()

    assert scope.cancelled_caught
    assert not waker.is_waiting


async def test_one_task_waits_at_a_time() -> None:
    waker = Waker()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waker.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await waker.wait()
        waker.wake()


async def test_a_wake_wins_over_a_cancellation_that_comes_later() -> None:
    waker = Waker()
    woken = False
    async with trio.open_nursery() as nursery:

        async def sleep() -> None:
            nonlocal woken
            await waker.wait()
            woken = True

        nursery.start_soon(sleep)
        await wait_all_tasks_blocked()
        waker.wake()
        nursery.cancel_scope.cancel()

    assert woken
