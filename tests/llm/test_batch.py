"""`Llm.map`: many requests, a limited number at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
from tests.client.pair import open_pair
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.errors import (
    ClientClosedError,
    ConfigurationError,
    EngineCoreError,
    EngineDeadError,
    InvalidFieldError,
)
from trio_vllm.llm import GenerateOutput, GenerateRequest, Llm
from trio_vllm.llm.batch import BatchResults

Pair = tuple[GenerateRequest, GenerateOutput | EngineCoreError]


async def in_flight(world: LlmWorld) -> int:
    """How many requests are in flight, once nothing moves."""
    await wait_all_tasks_blocked()
    return world.llm.client.in_flight_count


def prompts(count: int) -> Iterator[GenerateRequest]:
    """Requests "0", "1", …"""
    return (make_prompt(str(number)) for number in range(count))


async def test_all_are_answered() -> None:
    """Each request comes back with its own output."""
    async with open_pair(2) as (world, _):
        llm = Llm(world.client)
        requests = [make_prompt(str(n), max_tokens=n % 7 + 1) for n in range(100)]
        async with llm.map(requests, limit=9) as results:
            pairs = [pair async for pair in results]

    assert {request.request_id for request, _ in pairs} == {str(n) for n in range(100)}
    for request, output in pairs:
        assert isinstance(output, GenerateOutput)
        assert len(output.token_ids) == int(request.request_id or "") % 7 + 1


async def test_as_they_end() -> None:
    """Whoever ends first comes first."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(2)) as results:
            await wait_all_tasks_blocked()
            await world.finish("1")
            first, _ = await anext(results)
            await world.finish("0")
            second, _ = await anext(results)
            with pytest.raises(StopAsyncIteration):
                await anext(results)

    assert (first.request_id, second.request_id) == ("1", "0")


async def test_in_order() -> None:
    """On wish they come as they were given."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(3), ordered=True) as results:
            await wait_all_tasks_blocked()
            for request_id in "210":
                await world.finish(request_id)
            order = [request.request_id async for request, _ in results]

    assert order == ["0", "1", "2"]


async def test_no_more_than_the_limit() -> None:
    """What has ended counts until it is taken, so that a slow caller slows the sending."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(10), limit=3) as results:
            assert await in_flight(world) == 3
            await world.finish("0")
            assert await in_flight(world) == 2
            await anext(results)
            assert await in_flight(world) == 3


async def test_requests_are_taken_as_there_is_room() -> None:
    """They may be endless."""
    taken: list[int] = []

    def endless() -> Iterator[GenerateRequest]:
        while True:
            taken.append(len(taken))
            yield make_prompt(str(len(taken)))

    async with open_llm_world() as world:
        async with world.llm.map(endless(), limit=2):
            assert await in_flight(world) == 2
        await wait_all_tasks_blocked()
        world.assert_tidy()

    assert taken == [0, 1]


async def test_asynchronous_requests() -> None:
    """They may come from where one has to wait."""

    async def arriving() -> AsyncIterator[GenerateRequest]:
        for request in prompts(3):
            await trio.lowlevel.checkpoint()
            yield request

    async with open_pair() as (world, _):
        async with Llm(world.client).map(arriving()) as results:
            pairs = [pair async for pair in results]

    assert len(pairs) == 3


async def test_an_error_of_one_does_not_end_the_others() -> None:
    """It stands in the place of its output."""
    async with open_pair() as (world, _):
        requests = [make_prompt("a"), make_prompt("b", max_tokens=-1), make_prompt("c")]
        async with Llm(world.client).map(requests, ordered=True) as results:
            outcomes = [outcome async for _, outcome in results]

    assert isinstance(outcomes[0], GenerateOutput)
    assert isinstance(outcomes[1], InvalidFieldError)
    assert isinstance(outcomes[2], GenerateOutput)


@pytest.mark.parametrize("retries", [0, 1])
async def test_retries_when_the_engine_dies(retries: int) -> None:
    """With one the other engine gets the request, without it comes back with the error."""
    async with open_llm_world(2, randomize_request_ids=False) as world:
        async with world.llm.map([make_prompt("a")], retries=retries) as results:
            await wait_all_tasks_blocked()
            await world.world.engines[0].die()
            await wait_all_tasks_blocked()
            if retries:
                assert await in_flight(world) == 1
                world.llm.abort()
            (pair,) = [pair async for pair in results]

    assert isinstance(pair[1], GenerateOutput if retries else EngineDeadError)


async def test_no_request_is_taken_when_no_engine_is_left() -> None:
    """What has ended comes first, then the error; the rest is still to be done."""
    requests = prompts(10)
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(requests, limit=3, retries=5) as results:
            await wait_all_tasks_blocked()
            await world.finish("1")
            await world.engine.die()
            await wait_all_tasks_blocked()
            answered, output = await anext(results)
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="engine 0 is dead"):
                    await anext(results)
            left = [*results.unanswered, *requests]

    assert answered.request_id == "1"
    assert isinstance(output, GenerateOutput)
    assert [request.request_id for request in left] == ["0", "2", *"3456789"]


async def test_in_order_when_no_engine_is_left() -> None:
    """Answers behind one that will not come are not delivered: what has come can be counted."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(5), ordered=True) as results:
            await wait_all_tasks_blocked()
            for request_id in "310":
                await world.finish(request_id)
            await world.engine.die()
            pairs: list[Pair] = []
            with pytest.raises(EngineDeadError):
                async for pair in results:
                    pairs.append(pair)  # noqa: PERF401
            left = [request.request_id for request in results.unanswered]

    assert [request.request_id for request, _ in pairs] == ["0", "1"]
    assert left == ["2", "3", "4"]


async def test_in_order_behind_a_mistake() -> None:
    """What is no request is a gap, too; what it raised comes there, and no answer behind it."""
    requests: list[Any] = [make_prompt("0"), [1], make_prompt("2")]
    pairs: list[Pair] = []
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(requests, ordered=True) as results:
            await wait_all_tasks_blocked()
            world.llm.abort()
            with pytest.raises(TypeError, match="not a list"):
                async for pair in results:
                    pairs.append(pair)  # noqa: PERF401
            left = results.unanswered

    assert [request.request_id for request, _ in pairs] == ["0"]
    assert left == requests[1:]


async def test_two_engines_die_one_after_the_other() -> None:
    """The first one's requests go to the other; when that dies too, they are unanswered."""
    async with open_llm_world(2, randomize_request_ids=False) as world:
        async with world.llm.map(prompts(4), retries=1, limit=2) as results:
            await wait_all_tasks_blocked()
            await world.world.engines[0].die()
            assert await in_flight(world) == 2
            await world.world.engines[1].die()
            with pytest.raises(EngineDeadError):
                await anext(results)
            assert [request.request_id for request in results.unanswered] == ["0", "1"]


async def test_an_engine_that_dies_while_no_request_is_there(autojump_clock: MockClock) -> None:
    """Who waits for the next pair learns it at once."""
    send, receive = trio.open_memory_channel[GenerateRequest](0)
    async with open_llm_world() as world:
        async with world.llm.map(receive) as results:
            outcome = await world.start(results.__anext__)
            await world.engine.die()
            await trio.sleep(2)
            assert isinstance(outcome.error, EngineDeadError)
            assert results.unanswered == []
    await send.aclose()


async def test_a_death_after_the_last_answer() -> None:
    """Is no error: all was done."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(1)) as results:
            await wait_all_tasks_blocked()
            await world.finish("0")
            await world.engine.die()
            pairs = [pair async for pair in results]

    assert isinstance(pairs[0][1], GenerateOutput)


async def test_the_client_is_closed() -> None:
    """It is as if no engine were left, but for the error; what was in flight has been aborted."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(5), limit=2) as results:
            await wait_all_tasks_blocked()
            await world.llm.shutdown()
            aborted = [await anext(results), await anext(results)]
            with pytest.raises(ClientClosedError):
                await anext(results)

    assert {request.request_id for request, _ in aborted} == {"0", "1"}


async def test_what_is_no_request() -> None:
    """It is said when its turn comes, after the pairs of the others."""
    requests: list[Any] = [make_prompt("a"), [1], make_prompt("b")]
    pairs: list[Pair] = []
    async with open_pair() as (world, _):
        async with Llm(world.client).map(requests, limit=1, ordered=True) as results:
            with pytest.raises(
                TypeError, match=r"^map takes a GenerateRequest\(\.\.\.\), not a list"
            ):
                async for pair in results:
                    pairs.append(pair)  # noqa: PERF401

    assert [request.request_id for request, _ in pairs] == ["a"]


async def test_one_request_instead_of_many() -> None:
    """It is said how to give it."""
    one: Any = make_prompt("a")
    async with open_llm_world() as world:
        with pytest.raises(TypeError, match=r"not a GenerateRequest: write map\(\[request\]\)"):
            async with world.llm.map(one):
                pytest.fail("it was opened")


async def test_unanswered_when_the_block_is_left_early() -> None:
    """What has come is not among them."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(3)) as results:
            await wait_all_tasks_blocked()
            await world.finish("1")
            await world.finish("2")
            await anext(results)

    assert [request.request_id for request in results.unanswered] == ["0", "2"]


async def test_an_error_of_the_requests() -> None:
    """It comes out of the iterator, after what was there before it."""

    def broken() -> Iterator[GenerateRequest]:
        yield make_prompt("a")
        raise ZeroDivisionError

    pairs: list[Pair] = []
    async with open_pair() as (world, _):
        async with Llm(world.client).map(broken()) as results:
            with pytest.raises(ZeroDivisionError):
                async for pair in results:
                    pairs.append(pair)  # noqa: PERF401

    assert len(pairs) == 1


async def test_leaving_early_aborts() -> None:
    """Nothing runs after the block, and its error comes out bare."""
    async with open_llm_world() as world:
        with pytest.raises(ZeroDivisionError):
            async with world.llm.map(prompts(5)):
                await wait_all_tasks_blocked()
                raise ZeroDivisionError
        world.assert_tidy()


async def test_cancelling_the_wait_loses_nothing() -> None:
    """The next wait gets the pair."""
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.map(prompts(1)) as results:
            with trio.move_on_after(0) as scope:
                await anext(results)
            assert scope.cancelled_caught
            await wait_all_tasks_blocked()
            await world.finish("0")
            request, _ = await anext(results)

    assert request.request_id == "0"


async def test_one_task_at_a_time() -> None:
    """A second one is refused."""
    async with open_llm_world() as world:
        async with world.llm.map(prompts(1)) as results:
            outcome = await world.start(results.__anext__)
            with pytest.raises(trio.BusyResourceError):
                await anext(results)
            assert not outcome.is_over
            world.llm.abort()


@pytest.mark.parametrize(("limit", "retries"), [(0, 0), (1, -1)])
async def test_bad_options(limit: int, retries: int) -> None:
    """They are refused before anything is sent."""
    async with open_llm_world() as world:
        with pytest.raises(ConfigurationError):
            async with world.llm.map(prompts(1), limit=limit, retries=retries):
                pytest.fail("it was opened")


async def test_nothing_to_do() -> None:
    """No requests, no pairs."""
    async with open_llm_world() as world:
        async with world.llm.map([]) as results:
            assert isinstance(results, BatchResults)
            assert [pair async for pair in results] == []
