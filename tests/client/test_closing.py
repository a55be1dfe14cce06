"""After its block nothing of a client runs; until then each waiter learns why it waits no longer."""

from __future__ import annotations

import pytest
import trio
from tests.client.world import make_output, make_request, open_world
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.errors import ClientClosedError, EngineDeadError, InternalError
from trio_vllm.protocol import ENGINE_CORE_DEAD, FinishReason


async def test_leaving_the_block_aborts_what_is_in_flight_at_once() -> None:
    streams = [OutputStream(f"r{number}") for number in range(3)]
    async with open_world(2) as world:
        for stream in streams:
            world.client.driver.submit(make_request(stream.request_id), stream)
        for engine in world.engines:
            engine.received()

    assert [engine.aborts() for engine in world.engines] == [[["r0", "r2"]], [["r1"]]]
    world.assert_tidy()
    for stream in streams:
        with pytest.raises(ClientClosedError):
            await anext(stream)


async def test_what_came_before_the_end_is_delivered_first() -> None:
    async with open_world() as world:
        stream = OutputStream("r")
        world.client.driver.submit(make_request(), stream)
        await world.engine.emit("r", [7])

    assert (await anext(stream)).output.new_token_ids == [7]
    with pytest.raises(ClientClosedError):
        await anext(stream)


async def test_a_finished_stream_ends_as_ever() -> None:
    async with open_world() as world:
        stream = OutputStream("r")
        world.client.driver.submit(make_request(), stream)
        await world.engine.emit("r", [7], FinishReason.LENGTH)

    assert [item.output.new_token_ids async for item in stream] == [[7]]


async def test_use_after_the_block() -> None:
    async with open_world() as world:
        pass
    client = world.client

    with pytest.raises(ClientClosedError, match="the client is closed"):
        client.driver.submit(make_request(), OutputStream("r"))
    with pytest.raises(ClientClosedError):
        async with client.call(make_request()):
            raise AssertionError("it was sent")
    with pytest.raises(ClientClosedError):
        await client.call_utility("is_sleeping")
    with pytest.raises(ClientClosedError):
        client.driver.core.raise_if_failed()
    assert world.engine.received() == []


async def test_what_can_still_be_asked_after_the_block() -> None:
    async with open_world() as world:
        await world.engine.report(running=3)
    client = world.client

    assert client.scheduler_stats()[0].num_running_reqs == 3
    assert not client.is_healthy
    assert isinstance(client.failure, ClientClosedError)
    assert isinstance(await client.wait_failed(), ClientClosedError)
    client.abort(["r"])
    client.abort_all()
    client.driver.drop(OutputStream("r"))
    client.close()


async def test_closing_twice_is_closing_once() -> None:
    async with open_world() as world:
        world.client.close()
        first = world.client.failure
        world.client.close()

        assert first is world.client.failure


async def test_a_close_inside_the_block_ends_waiters() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def wait_for_output() -> None:
                    with pytest.raises(ClientClosedError):
                        await anext(stream)

                @nursery.start_soon
                async def wait_for_failure() -> None:
                    with assert_checkpoints():
                        assert isinstance(await world.client.wait_failed(), ClientClosedError)

                await wait_all_tasks_blocked()
                world.client.close()
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [["r"]]


async def test_the_first_cause_is_kept(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await world.engine.die()
        await trio.sleep(1)
        world.client.close()

        assert isinstance(world.client.failure, EngineDeadError)
        with pytest.raises(EngineDeadError):
            world.client.driver.core.raise_if_failed()


async def test_what_the_block_raises_comes_out_as_it_is() -> None:
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught:
        async with open_world() as world:
            world.client.driver.submit(make_request(), OutputStream("r"))
            raise error

    assert caught.value is error
    assert len(world.engine.requests()) == 1


async def test_a_dead_engine_does_not_disturb_the_block(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await world.engine.die()
        await trio.sleep(10)
        reached = True

    assert reached


async def test_a_bug_in_a_task_surfaces_once_as_such() -> None:
    class Broken(OutputStream):
        def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
            raise LookupError("a bug")

    with pytest.raises(InternalError) as caught:
        async with open_world() as world:
            world.client.driver.submit(make_request(), Broken("r"))
            await world.engine.send(make_output([7]))
            await trio.sleep_forever()

    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("how", ["abort", "abort all", "death", "close", "leave"])
async def test_many_requests_end_some_at_a_time(how: str) -> None:
    """Others have their turns meanwhile; the engine is told of all, and who was left meanwhile hears nothing."""
    streams = [OutputStream(f"r{number}") for number in range(100)]
    counts = list[int]()
    async with trio.open_nursery() as nursery:
        async with open_world() as world:
            core = world.client.driver.core
            core.ended_at_once = 4
            for stream in streams:
                world.client.driver.submit(make_request(stream.request_id), stream)
            await wait_all_tasks_blocked()
            world.engine.received()

            @nursery.start_soon
            async def watch() -> None:
                while core.in_flight_count:
                    counts.append(core.in_flight_count)
                    await trio.lowlevel.checkpoint()

            if how == "abort":
                world.client.abort([stream.request_id for stream in streams])
            elif how == "abort all":
                world.client.abort_all()
            elif how == "close":
                world.client.close()
            elif how == "death":
                world.engine.outputs.send_nowait([ENGINE_CORE_DEAD])
                while not core.has_endings:  # noqa: ASYNC110 (nobody tells)
                    await trio.lowlevel.checkpoint()
            if how != "leave":
                world.client.driver.drop(streams[-1])
                await wait_all_tasks_blocked()

        told = [id_ for ids in world.engine.aborts() for id_ in ids]

    assert len(set(counts)) >= 5  # tasks run in any order
    assert set(told) == {stream.request_id for stream in streams}
    world.assert_tidy()
    errors = {"death": EngineDeadError, "close": ClientClosedError, "leave": ClientClosedError}
    *others, dropped = streams
    for stream in others:
        if how in errors:
            with pytest.raises(errors[how]):
                await anext(stream)
        else:
            assert (await anext(stream)).output.finish_reason is FinishReason.ABORT
    if how != "leave":
        with trio.move_on_after(0) as scope:
            await anext(dropped)
        assert scope.cancelled_caught
