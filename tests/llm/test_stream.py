"""`Llm.stream`: what is new, merged if the caller is slower than the engine."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from tests.client.world import make_output
from tests.llm.logprobs import make_logprobs
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.errors import (
    ClientClosedError,
    ConfigurationError,
    DecodeError,
    EngineDeadError,
    InvalidFieldError,
)
from trio_vllm.llm import CompletionDelta, GenerateStream, Llm
from trio_vllm.protocol import FinishReason


async def enter(
    world: LlmWorld, stack: AsyncExitStack, **params: Any
) -> tuple[GenerateStream, str]:
    """Start a stream; gives it and the id that the engine knows."""
    stream = await stack.enter_async_context(world.llm.stream(make_prompt(**params)))
    (request,) = world.engine.requests()
    return stream, request.request_id


async def deliveries(world: LlmWorld, stream: GenerateStream) -> list[list[int]]:
    """The token ids of all that can be delivered now."""
    got: list[list[int]] = []
    with trio.CancelScope() as scope:

        async def cancel() -> None:
            await wait_all_tasks_blocked()
            scope.cancel()

        world.nursery.start_soon(cancel)
        async for delta in stream:
            got += [delta.token_ids]
    return got


async def test_a_delivery_per_output() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        deltas: list[CompletionDelta] = []

        async def read() -> list[CompletionDelta]:
            deltas.extend([delta async for delta in stream])
            return deltas

        outcome = await world.start(read)
        for token_ids in ([7], [8, 9], [10]):
            await world.engine.emit(request_id, token_ids)
        await world.finish(request_id, [2])

        assert [delta.token_ids for delta in outcome.get()] == [[7], [8, 9], [10], [2]]
        assert [delta.finished for delta in deltas] == [False, False, False, True]
        assert stream.request_id == "x"
        world.world.assert_tidy()


async def test_usage_and_timings_come_with_each_delivery() -> None:
    """Each is what was known then, and later deliveries do not change it."""
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        deltas: list[CompletionDelta] = []
        for timestamp, token_ids in ((50.0, [7]), (52.0, [8, 9])):
            world.pass_time(1)
            await world.engine.send(make_output(token_ids, request_id), timestamp=timestamp)
            deltas += [await anext(stream)]
        world.pass_time(1)
        last = make_output([2], request_id, finish_reason=FinishReason.STOP)
        await world.engine.send(last, timestamp=55.0)
        deltas += [await anext(stream)]

    assert [
        (
            delta.usage.output_tokens,
            delta.timings.e2e_latency,
            delta.timings.time_to_first_token,
            delta.timings.inter_token_latencies,
            delta.timings.decode_time,
        )
        for delta in deltas
    ] == [
        (1, 1.0, 1.0, (), 0.0),
        (3, 2.0, 1.0, (2.0,), 2.0),
        (4, 3.0, 1.0, (2.0, 3.0), 5.0),
    ]


async def test_a_stop_string_finishes_a_stream() -> None:
    """The engine is told to abort; the caller gets the tokens so far, and STOP."""
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        await world.engine.emit(request_id, [7])
        await anext(stream)
        await world.engine.emit(request_id, [8])
        stream.stop("###")
        stream.stop("not this one")

        last = await anext(stream)
        assert (last.token_ids, last.finish_reason, last.stop_reason) == (
            [8],
            FinishReason.STOP,
            "###",
        )
        assert last.usage.output_tokens == 2
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [[request_id]]
        world.world.assert_tidy()


async def test_one_of_several_completions_is_stopped() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream = await stack.enter_async_context(world.llm.stream(make_prompt(n=2)))
        await wait_all_tasks_blocked()
        first, second = world.engine.requests()
        stream.stop("###", index=1)
        await world.finish(first.request_id)

        ends = {delta.index: delta.finish_reason async for delta in stream}
        assert ends == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
        assert world.engine.aborts() == [[second.request_id]]


async def test_what_has_ended_is_not_stopped() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        await world.finish(request_id)
        stream.stop("###")

        assert (await anext(stream)).finish_reason == FinishReason.LENGTH
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == []


async def test_a_slow_caller_gets_all_that_came_at_once() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack, logprobs=0)
        for token in range(5):
            logprobs = make_logprobs([token], 2)
            await world.engine.emit(request_id, [token], new_logprobs=logprobs)

        delta = await anext(stream)
        assert delta.token_ids == [0, 1, 2, 3, 4]
        assert delta.logprobs is not None
        assert [position.token.token_id for position in delta.logprobs] == [0, 1, 2, 3, 4]

        await world.engine.emit(request_id, [5], new_logprobs=make_logprobs([5], 2))
        await world.finish(request_id, [6], new_logprobs=make_logprobs([6], 2))
        last = await anext(stream)
        assert (last.token_ids, last.finish_reason) == ([5, 6], FinishReason.LENGTH)
        assert last.logprobs is not None
        assert last.logprobs.token_ids.shape == (2, 1)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_the_stream_interval() -> None:
    """The first token comes at once, then every third, and the end at once."""
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack, stream_interval=3)
        expected: list[list[list[int]]] = [
            [[0]],
            [],
            [],
            [[1, 2, 3]],
            [],
            [],
            [[4, 5, 6]],
            [],
        ]
        for token, due in enumerate(expected):
            await world.engine.emit(request_id, [token])
            assert due == await deliveries(world, stream)
        await world.engine.emit(request_id, [8, 9, 10, 11])
        assert await deliveries(world, stream) == [[7, 8, 9, 10, 11]]
        await world.finish(request_id, [12])
        assert await deliveries(world, stream) == [[12]]


@pytest.mark.parametrize(
    ("ours", "requests", "interval"), [(3, None, 3), (3, 2, 3), (2, 3, 3), (1, None, 1)]
)
async def test_a_request_can_only_raise_the_interval(
    ours: int, requests: int | None, interval: int
) -> None:
    async with open_llm_world(stream_interval=ours) as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack, stream_interval=requests)
        await world.engine.emit(request_id, [0])
        await anext(stream)
        await world.engine.emit(request_id, range(1, interval))
        assert await deliveries(world, stream) == []
        await world.engine.emit(request_id, [interval])
        assert await deliveries(world, stream) == [list(range(1, interval + 1))]


@pytest.mark.parametrize("interval", [0, -1, "x"])
async def test_an_interval_that_makes_no_sense_is_refused(interval: Any) -> None:
    async with open_llm_world() as world:
        with pytest.raises(InvalidFieldError, match="stream_interval"):
            async with world.llm.stream(make_prompt(stream_interval=interval)):
                raise AssertionError("it was sent")
        with pytest.raises((ConfigurationError, TypeError)):
            Llm(world.llm.client, stream_interval=interval)


async def test_prompt_logprobs_come_with_the_first_delivery() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack, prompt_logprobs=1)
        for token_ids in ([2], [3]):
            chunk = make_logprobs(token_ids, 2)
            await world.engine.emit(request_id, new_prompt_logprobs_tensors=chunk)
        assert await deliveries(world, stream) == []
        await world.engine.emit(request_id, [7])
        first = await anext(stream)
        await world.finish(request_id, [8])
        last = await anext(stream)

        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == 2
        assert last.prompt_logprobs is None


async def test_an_end_without_tokens_is_a_delivery() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        await world.engine.emit(request_id, [7])
        await anext(stream)
        await world.finish(request_id, [], finish_reason=FinishReason.STOP)

        last = await anext(stream)
        assert (last.token_ids, last.finish_reason) == ([], FinishReason.STOP)


async def test_leaving_early_aborts() -> None:
    async with open_llm_world() as world:
        async with AsyncExitStack() as stack:
            stream, request_id = await enter(world, stack)
            await world.engine.emit(request_id, [7])
            async for _ in stream:
                break
        await wait_all_tasks_blocked()

        assert world.engine.aborts() == [[request_id]]
        world.assert_tidy()


async def test_a_finished_stream_is_not_aborted() -> None:
    async with open_llm_world() as world:
        async with AsyncExitStack() as stack:
            _, request_id = await enter(world, stack)
            await world.finish(request_id)
        await wait_all_tasks_blocked()

        assert world.engine.aborts() == []
        world.assert_tidy()


async def test_what_came_before_an_error_is_delivered_first(autojump_clock: MockClock) -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack, stream_interval=10)
        await world.engine.emit(request_id, [7])
        assert (await anext(stream)).token_ids == [7]
        await world.engine.emit(request_id, [8])
        await world.engine.die()
        await trio.sleep(1)

        assert (await anext(stream)).token_ids == [8]
        for _ in range(2):
            with assert_checkpoints(), pytest.raises(EngineDeadError):
                await anext(stream)


async def test_an_output_that_cannot_be_read() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        await world.engine.send(
            make_output([7, 8], request_id, new_logprobs=make_logprobs([7], 1)),
        )

        with pytest.raises(DecodeError):
            await anext(stream)
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [[request_id]]


async def test_the_client_is_closed() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, _ = await enter(world, stack)
        world.llm.client.close()

        with pytest.raises(ClientClosedError):
            await anext(stream)


async def test_one_reader_at_a_time() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        outcome = await world.start(stream.__anext__)
        with pytest.raises(trio.BusyResourceError):
            await anext(stream)
        await world.engine.emit(request_id, [7])

        assert outcome.get().token_ids == [7]


async def test_a_reader_who_was_overtaken_waits_for_the_next_delivery() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        await world.engine.emit(request_id, [7])
        first = await world.start(stream.__anext__)
        second = await world.start(stream.__anext__)
        assert first.is_over
        await world.engine.emit(request_id, [8])

        assert (first.get().token_ids, second.get().token_ids) == ([7], [8])


async def test_iterating_always_checkpoints() -> None:
    async with open_llm_world() as world, AsyncExitStack() as stack:
        stream, request_id = await enter(world, stack)
        world.nursery.start_soon(world.engine.emit, request_id, [7])
        with assert_checkpoints():
            await anext(stream)
        await world.finish(request_id)
        with assert_checkpoints():
            await anext(stream)
        with assert_checkpoints(), pytest.raises(StopAsyncIteration):
            await anext(stream)
