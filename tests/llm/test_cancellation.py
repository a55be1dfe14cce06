"""Cancelled at any checkpoint, the facade leaves nothing behind, and streams lose nothing."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import pytest
from tests.cancelling import was_cancelled_at
from tests.client.pair import open_pair
from tests.llm.world import make_prompt
from trio.testing import wait_all_tasks_blocked

from trio_vllm.llm import EncodeRequest, Llm
from trio_vllm.protocol import PoolingParams


async def generate(llm: Llm) -> None:
    output = await llm.generate(make_prompt(max_tokens=4, n=2))
    assert output.usage.output_tokens == 8


async def stream(llm: Llm) -> None:
    async with llm.stream(make_prompt(max_tokens=4, n=2)) as deltas:
        assert sum([len(delta.token_ids) async for delta in deltas]) == 8


async def encode(llm: Llm) -> None:
    request = EncodeRequest(prompt_token_ids=[1], pooling_params=PoolingParams(task="embed"))
    assert (await llm.encode(request)).data is not None


@pytest.mark.parametrize("play", [generate, stream, encode])
async def test_nothing_is_left_behind(play: Callable[[Llm], Awaitable[None]]) -> None:
    async with open_pair(2, supported_tasks=("generate", "embed")) as (world, mocks):
        llm = Llm(world.client)
        for number in itertools.count(1):
            cancelled = await was_cancelled_at(number, lambda: play(llm))
            await wait_all_tasks_blocked()

            world.assert_tidy()
            assert llm.in_flight_count == 0
            assert not any(mock.has_unfinished for mock in mocks)
            if not cancelled:
                break
        assert number > 1


async def test_a_cancelled_shutdown_is_a_shutdown() -> None:
    async with open_pair() as (world, _):
        llm = Llm(world.client)
        assert await was_cancelled_at(1, llm.shutdown)

        assert not world.client.is_healthy


async def test_a_cancelled_reader_loses_nothing() -> None:
    async with open_pair() as (world, _):
        llm = Llm(world.client, randomize_request_ids=False)
        request = make_prompt(max_tokens=50)
        got: list[int] = []
        async with llm.stream(request) as deltas:

            async def read() -> None:
                got.extend((await anext(deltas)).token_ids)

            for number in itertools.cycle((1, 2)):
                await was_cancelled_at(number, read)
                if len(got) == 50:
                    break

        assert got == (await llm.generate(request)).token_ids
