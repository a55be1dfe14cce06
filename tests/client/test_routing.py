"""Which engine gets a request."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest
import trio
from tests.client.world import Engine, World, make_request, open_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.errors import InvalidDataParallelRankError
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    UtilityRequest,
)


async def submit(world: World, request_id: str, data_parallel_rank: int | None = None) -> int:
    """Send a request; gives the engine that gets it."""
    sink = OutputStream(request_id)
    request = make_request(request_id, data_parallel_rank=data_parallel_rank)
    world.client.driver.submit(request, sink)
    await wait_all_tasks_blocked()
    assert [r.request_id for r in world.engines[sink.engine_index].requests()] == [request_id]
    return sink.engine_index


def request_ids(engine: Engine) -> list[str]:
    """The requests that came since the last call; an abort may have come besides."""
    messages = engine.received()
    return [message.request_id for message in messages if isinstance(message, EngineCoreRequest)]


async def test_the_engine_with_the_fewest_requests_gets_the_next_and_ties_go_to_the_lowest() -> (
    None
):
    async with open_world(3) as world:
        assert [await submit(world, request_id) for request_id in "abcd"] == [0, 1, 2, 0]

        await world.engines[1].emit("b", [7], FinishReason.LENGTH)
        world.client.abort(["c"])
        assert [await submit(world, request_id) for request_id in "efg"] == [1, 2, 1]


async def test_what_engines_report_counts_and_what_was_admitted_since() -> None:
    async with open_world(2) as world:
        await world.engines[0].report(running=2, waiting=1)
        await world.engines[1].report(running=1)

        assert [await submit(world, request_id) for request_id in "abcd"] == [1, 1, 0, 1]


async def test_a_request_can_be_pinned() -> None:
    async with open_world(2) as world:
        assert [await submit(world, request_id, 1) for request_id in "ab"] == [1, 1]
        assert [await submit(world, request_id) for request_id in "cd"] == [0, 0]


@pytest.mark.parametrize("rank", [2, 99])
async def test_a_pin_to_an_unknown_engine_is_refused(rank: int) -> None:
    async with open_world(2) as world:
        with pytest.raises(InvalidDataParallelRankError) as caught:
            await submit(world, "a", rank)

        assert (rank, [0, 1]) == (caught.value.data_parallel_rank, caught.value.engine_indices)


async def test_a_lost_engine_gets_nothing_from_its_loss_on(autojump_clock: MockClock) -> None:
    async with open_world(2) as world:
        await world.engines[0].die()

        assert [await submit(world, request_id) for request_id in "ab"] == [1, 1]
        assert world.client.engine_indices == [1]
        with pytest.raises(InvalidDataParallelRankError) as caught:
            await submit(world, "c", 0)
        assert caught.value.engine_indices == [1]


async def test_an_engine_that_turns_out_to_be_gone_is_passed_over() -> None:
    """Nobody has told the client yet."""
    async with open_world(3) as world:
        world.engines[0].vanish()

        assert [await submit(world, request_id) for request_id in "ab"] == [1, 2]


async def test_what_is_submitted_to_busy_engines_goes_together() -> None:
    """The first request of each goes at once, the rest when others have had their turn."""
    async with open_world(2) as world:
        for request_id in "abcdef":
            world.client.driver.submit(make_request(request_id), OutputStream(request_id))
        assert [request_ids(engine) for engine in world.engines] == [["a"], ["b"]]

        await wait_all_tasks_blocked()
        assert [request_ids(engine) for engine in world.engines] == [["c", "e"], ["d", "f"]]


async def test_an_array_may_be_changed_once_its_request_is_submitted() -> None:
    """Whether that is sent already or not."""
    async with open_world() as world:
        values = np.zeros((4, 1024), np.int32)
        params = SamplingParams(prompt_logprob_token_ids=values)
        for number, request_id in enumerate("abc"):
            values[:] = number
            request = make_request(request_id, prompt_token_ids=[1] * 5, sampling_params=params)
            world.client.driver.submit(request, OutputStream(request_id))
        await wait_all_tasks_blocked()

        sent = [request.sampling_params for request in world.engine.requests()]
        arrays = [params.prompt_logprob_token_ids for params in sent if params is not None]
        assert [array[0, 0] for array in arrays if array is not None] == [0, 1, 2]


async def test_what_was_submitted_comes_before_a_call_and_its_own_abort() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        for request_id in "abc":
            world.client.driver.submit(make_request(request_id), OutputStream(request_id))
        world.client.abort(["b"])
        nursery.start_soon(world.client.call_utility, "is_sleeping")
        await wait_all_tasks_blocked()

        messages = world.engine.received()
        kinds = [EngineCoreRequest] * 3 + [AbortRequests, UtilityRequest]
        assert kinds == list(map(type, messages))
        nursery.cancel_scope.cancel()


async def test_requests_for_an_engine_that_turns_out_to_be_gone_go_to_another() -> None:
    """Except those that were meant for it, and those that are over."""
    async with open_world(2) as world:
        sinks = {request_id: OutputStream(request_id) for request_id in "abcdefg"}
        for request_id, sink in sinks.items():
            rank = 0 if request_id == "g" else None
            world.client.driver.submit(make_request(request_id, data_parallel_rank=rank), sink)
        assert request_ids(world.engines[0]) == ["a"]
        world.engines[0].vanish()
        world.client.abort(["e"])
        await wait_all_tasks_blocked()

        assert request_ids(world.engines[1]) == ["b", "d", "f", "c"]
        assert [sinks[request_id].engine_index for request_id in "abcd"] == [0, 1, 1, 1]
        assert world.client.statistics().requests_in_flight[1] == 4
        await world.engines[1].emit("c", [7], FinishReason.LENGTH)
        assert [item.output.new_token_ids async for item in sinks["c"]] == [[7]]


async def test_garbled_statistics_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world(2) as world:
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(world.client.call(make_request()))
            await world.engines[0].say(b"\x94\x00\x91\x92\xa1r\x91\x07\xa5stats\x00")

            assert (await anext(stream)).output.new_token_ids == [7]
            assert "scheduler_stats" in caplog.text
            assert world.client.is_healthy


async def test_requests_of_a_busy_engine_that_is_gone_reach_an_idle_one() -> None:
    """They are found when all is sent, and are urgent for the other."""
    async with open_world(2) as world:
        sinks = [OutputStream(request_id) for request_id in "abc"]
        for sink in sinks[:2]:
            world.client.driver.submit(make_request(sink.request_id), sink)
        await world.engines[1].emit("b", [7], FinishReason.LENGTH)
        await world.engines[0].report(running=0)
        await world.engines[1].report(running=5)
        world.client.driver.submit(make_request("c"), sinks[2])
        assert [sink.engine_index for sink in sinks] == [0, 1, 0]
        world.engines[0].vanish()
        await wait_all_tasks_blocked()

        assert request_ids(world.engines[1]) == ["b", "c"]
