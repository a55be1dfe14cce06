"""Which engine gets a request."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from tests.client.world import World, make_request, open_world
from trio.testing import MockClock

from trio_vllm._errors import InvalidDataParallelRankError
from trio_vllm.client import OutputStream
from trio_vllm.protocol import FinishReason


def submit(world: World, request_id: str, data_parallel_rank: int | None = None) -> int:
    """Send a request; gives the engine that gets it."""
    sink = OutputStream(request_id)
    request = make_request(request_id, data_parallel_rank=data_parallel_rank)
    world.client.submit(request, sink)
    assert [request_id] == [r.request_id for r in world.engines[sink.engine_index].requests()]
    return sink.engine_index


async def test_the_engine_with_the_fewest_requests_gets_the_next_and_ties_go_to_the_lowest() -> (
    None
):
    async with open_world(3) as world:
        assert [0, 1, 2, 0] == [submit(world, request_id) for request_id in "abcd"]

        await world.engines[1].emit("b", [7], FinishReason.LENGTH)
        world.client.abort(["c"])
        assert [1, 2, 1] == [submit(world, request_id) for request_id in "efg"]


async def test_what_engines_report_counts_and_what_was_admitted_since() -> None:
    async with open_world(2) as world:
        await world.engines[0].report(running=2, waiting=1)
        await world.engines[1].report(running=1)

        assert [1, 1, 0, 1] == [submit(world, request_id) for request_id in "abcd"]


async def test_a_request_can_be_pinned() -> None:
    async with open_world(2) as world:
        assert [1, 1] == [submit(world, request_id, 1) for request_id in "ab"]
        assert [0, 0] == [submit(world, request_id) for request_id in "cd"]


@pytest.mark.parametrize("rank", [2, 99])
async def test_a_pin_to_an_unknown_engine_is_refused(rank: int) -> None:
    async with open_world(2) as world:
        with pytest.raises(InvalidDataParallelRankError) as caught:
            submit(world, "a", rank)

        assert (rank, [0, 1]) == (caught.value.data_parallel_rank, caught.value.engine_indices)


async def test_a_lost_engine_gets_nothing_from_its_loss_on(autojump_clock: MockClock) -> None:
    async with open_world(2) as world:
        await world.engines[0].die()

        assert [1, 1] == [submit(world, request_id) for request_id in "ab"]
        assert [1] == world.client.engine_indices
        with pytest.raises(InvalidDataParallelRankError) as caught:
            submit(world, "c", 0)
        assert [1] == caught.value.engine_indices


async def test_an_engine_that_turns_out_to_be_gone_is_passed_over() -> None:
    """Nobody has told the client yet."""
    async with open_world(3) as world:
        world.engines[0].vanish()

        assert [1, 2] == [submit(world, request_id) for request_id in "ab"]


async def test_garbled_statistics_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world(2) as world:
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(world.client.call(make_request()))
            await world.engines[0].say(b"\x94\x00\x91\x92\xa1r\x91\x07\xa5stats\x00")

            assert [7] == (await anext(stream)).output.new_token_ids
            assert "scheduler_stats" in caplog.text
            assert world.client.is_healthy
