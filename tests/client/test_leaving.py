"""Leaving is aborting: the engine is told, in grouped messages, and nothing stays in any table."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack

import pytest
import trio
from tests.client.world import make_output, make_request, open_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.protocol import AbortRequests, EngineCoreRequest, FinishReason


async def test_breaking_out_aborts() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.emit("r", [7])
            async for _ in stream:
                break
        await wait_all_tasks_blocked()

        assert world.engine.aborts() == [["r"]]
        world.assert_tidy()


async def test_an_error_in_the_block_aborts_and_comes_out_as_it_is() -> None:
    async with open_world() as world:
        with pytest.raises(ZeroDivisionError):
            async with world.client.call(make_request()):
                raise ZeroDivisionError
        await wait_all_tasks_blocked()

        assert world.engine.aborts() == [["r"]]
        world.assert_tidy()


async def test_a_timeout_aborts(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        with trio.move_on_after(5) as scope:
            async with world.client.call(make_request()) as stream:
                await anext(stream)
        await wait_all_tasks_blocked()

        assert scope.cancelled_caught
        assert world.engine.aborts() == [["r"]]
        world.assert_tidy()


async def test_those_who_leave_together_share_one_message_per_engine() -> None:
    async with open_world(2) as world:
        async with trio.open_nursery() as nursery:

            async def call(number: int) -> None:
                async with world.client.call(make_request(f"r{number}")) as stream:
                    await anext(stream)

            for number in range(100):
                nursery.start_soon(call, number)
            await wait_all_tasks_blocked()
            assert [len(engine.requests()) for engine in world.engines] == [50, 50]
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()

        aborts = [engine.aborts() for engine in world.engines]
        assert [len(messages) for messages in aborts] == [1, 1]
        assert {f"r{number}" for number in range(100)} == {
            request_id for messages in aborts for ids in messages for request_id in ids
        }
        world.assert_tidy()


async def test_the_outputs_of_a_request_that_was_left_are_dropped() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            pass
        await world.engine.emit("r", [7])
        await world.engine.emit("r", [8], FinishReason.LENGTH)

        with trio.move_on_after(0) as scope:
            await anext(stream)
        assert scope.cancelled_caught
        await world.round_trip()


async def test_an_abort_is_a_last_output_and_told_to_the_engine() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.emit("r", [7])
            world.client.abort(["unknown", "r", "r"])
            await world.engine.emit("r", [8])

            outputs = [item.output async for item in stream]

            assert [(output.new_token_ids, output.finish_reason) for output in outputs] == [
                ([7], None),
                ([], FinishReason.ABORT),
            ]
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [["r"]]
        world.assert_tidy()


async def test_abort_all() -> None:
    async with open_world(2) as world:
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(world.client.call(make_request(f"r{n}")))
                for n in range(4)
            ]
            world.client.abort_all()

            for stream in streams:
                assert (await anext(stream)).output.finish_reason is FinishReason.ABORT
        await wait_all_tasks_blocked()
        assert [engine.aborts() for engine in world.engines] == [[["r0", "r2"]], [["r1", "r3"]]]
        world.assert_tidy()


async def test_aborting_nothing_sends_nothing() -> None:
    async with open_world() as world:
        world.client.abort_all()
        world.client.abort([])
        world.client.abort(["unknown"])
        await wait_all_tasks_blocked()

        assert world.engine.received() == []


async def test_a_string_is_not_a_list_of_ids() -> None:
    async with open_world() as world:
        with pytest.raises(TypeError, match="not a string"):
            world.client.abort("r")


async def test_the_engine_hears_of_an_abort_before_the_id_comes_again() -> None:
    """An engine dies of an id that it still has."""
    async with open_world() as world:
        first, second = OutputStream("r"), OutputStream("r")
        world.client.driver.submit(make_request(), first)
        world.client.abort(["r"])
        world.client.driver.submit(make_request(), second)
        await wait_all_tasks_blocked()

        assert [type(message) for message in world.engine.received()] == [
            EngineCoreRequest,
            AbortRequests,
            EngineCoreRequest,
        ]
        await world.engine.emit("r", [7], FinishReason.LENGTH)
        assert (await anext(first)).output.finish_reason is FinishReason.ABORT
        assert (await anext(second)).output.new_token_ids == [7]


async def test_an_abort_that_crosses_the_last_token_changes_nothing() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.emit("r", [7], FinishReason.LENGTH)
            world.client.abort(["r"])

            assert (await anext(stream)).output.finish_reason is FinishReason.LENGTH
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == []


async def test_nothing_grows_with_the_number_of_requests() -> None:
    ends = ("finished", "left", "aborted", "unreadable")
    async with open_world(2) as world:
        for batch in range(25):
            streams = {
                end: [OutputStream(f"{batch}/{number}/{end}") for number in range(100)]
                for end in ends
            }
            for stream in itertools.chain(*streams.values()):
                world.client.driver.submit(make_request(stream.request_id), stream)
            await wait_all_tasks_blocked()
            assert [len(engine.requests()) for engine in world.engines] == [200, 200]
            for engine in world.engines:
                await engine.send(
                    *[
                        make_output([7], stream.request_id, finish_reason=FinishReason.LENGTH)
                        for stream in streams["finished"]
                        if stream.engine_index == engine.index
                    ],
                    finished_requests=[stream.request_id for stream in streams["unreadable"]],
                )
            for stream in streams["left"]:
                world.client.driver.drop(stream)
            world.client.abort([stream.request_id for stream in streams["aborted"]])
            await wait_all_tasks_blocked()
            aborts = [engine.aborts() for engine in world.engines]
            assert sum(len(ids) for messages in aborts for ids in messages) == 300

        world.assert_tidy()
