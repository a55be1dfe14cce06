"""Cancelled at any checkpoint, nothing is left behind, and nothing is lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable

import pytest
import trio
from tests.cancelling import was_cancelled_at
from tests.client.pair import open_pair
from tests.client.world import World, make_request, open_world
from trio.testing import wait_all_tasks_blocked

from trio_vllm.client import OutputStream


async def stream(world: World) -> None:
    async with world.client.call(make_request(max_tokens=5)) as outputs:
        assert len([output async for output in outputs]) == 5


async def two_streams(world: World) -> None:
    async with (
        world.client.call(make_request("a", 3)) as first,
        world.client.call(make_request("b", 3)) as second,
    ):
        async for _ in first:
            await anext(second)


async def utility(world: World) -> None:
    assert await world.client.call_utility("is_sleeping", timeout=math.inf) == {0: False, 1: False}


@pytest.mark.parametrize("play", [stream, two_streams, utility])
async def test_nothing_is_left_behind(play: Callable[[World], Awaitable[None]]) -> None:
    async with open_pair(2) as (world, mocks):
        for number in itertools.count(1):
            cancelled = await was_cancelled_at(number, lambda: play(world))
            await wait_all_tasks_blocked()

            world.assert_tidy()
            assert not any(mock.has_unfinished for mock in mocks)
            if not cancelled:
                break
        assert number > 1
        assert world.client.is_healthy


async def test_waiting_for_the_failure_leaves_nothing_behind() -> None:
    async with open_world() as world:
        assert await was_cancelled_at(1, world.client.wait_failed)

        assert world.client.statistics().tasks_waiting_for_failure == 0


async def test_a_cancelled_reader_loses_no_output() -> None:
    async with open_pair() as (world, _):
        sink, got = OutputStream("r"), []
        world.client.driver.submit(make_request(max_tokens=50), sink)

        async def read() -> None:
            got.append((await anext(sink)).output.new_token_ids)

        for number in itertools.cycle((1, 2)):
            await was_cancelled_at(number, read)
            if len(got) == 50:
                break
            with trio.move_on_after(0):
                await read()
        reference = OutputStream("r")
        world.client.driver.submit(make_request(max_tokens=50), reference)

        assert got == [item.output.new_token_ids async for item in reference]


async def test_the_client_itself_can_be_cancelled_anywhere() -> None:
    world: World | None = None

    async def live() -> None:
        nonlocal world
        async with open_pair(2) as (world, _):
            await stream(world)

    for number in itertools.count(1):
        cancelled = await was_cancelled_at(number, live)
        if world is not None:
            world.assert_tidy()
            assert not world.client.is_healthy
        if not cancelled:
            break
    assert number > 5
