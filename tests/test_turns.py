"""`Turns`: tasks that come all at once go on some at a time."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import assert_no_checkpoints, wait_all_tasks_blocked

from trio_vllm.concurrency import Turns


@attrs.define
class Clock:
    """Each look at it takes a while."""

    step: float
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


async def test_many_at_once_go_on_some_at_a_time_in_their_order() -> None:
    turns = Turns(0.01, Clock(0.001), gap=0.002, width=8)
    done: list[int] = []
    at_once: list[int] = []

    async def come(number: int) -> None:
        await turns.wait()
        done.append(number)

    async def watch() -> None:
        while len(done) < 500:
            before = len(done)
            await trio.lowlevel.checkpoint()
            at_once.append(len(done) - before)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.lowlevel.checkpoint()
        for number in range(500):
            nursery.start_soon(come, number)

    assert sorted(done) == list(range(500))
    assert max(at_once) <= 2 * 8 + 10  # others may be run before or after, and the first slice
    assert len(at_once) > 20


async def test_those_that_come_one_by_one_go_on_at_once() -> None:
    turns = Turns(0.01, Clock(0.003), gap=0.002)
    for _ in range(50):
        with assert_no_checkpoints():
            await turns.wait()


async def test_within_a_slice_all_go_on_at_once() -> None:
    turns = Turns(0.01, Clock(0.001), gap=0.002)
    for _ in range(10):
        with assert_no_checkpoints():
            await turns.wait()


@pytest.mark.parametrize("doomed", [0, 1, 7, 30])
async def test_who_is_cancelled_holds_up_nobody(doomed: int) -> None:
    """Neither the one that others wait for, nor one in the line."""
    turns = Turns(0.0, Clock(0.001), gap=1.0, width=2)
    await turns.wait()
    done: list[int] = []
    scopes = [trio.CancelScope() for _ in range(40)]

    async def come(number: int) -> None:
        with scopes[number]:
            await turns.wait()
            done.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(come, number)
        scopes[doomed].cancel()
        await wait_all_tasks_blocked()

    assert set(done) >= set(range(40)) - {doomed}
