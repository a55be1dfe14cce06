"""Engines that die: by a lost connection, a sentinel, or a message that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
import trio
from tests.client.world import World, make_output, make_request, open_world
from tests.ready import ready_response
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import FrontendCore, OutputStream
from trio_vllm.client import core as core_module
from trio_vllm.client.engines import (
    CONNECTION_LOST,
    DISCONNECT_GRACE,
    REPORTED_DEATH,
    UNREADABLE,
)
from trio_vllm.errors import DecodeError, EngineDeadError, PeerGoneError
from trio_vllm.protocol import (
    ENGINE_CORE_DEAD,
    FinishReason,
    RequestBatchOutputs,
    SchedulerStats,
    encode_outputs,
)


async def open_streams(stack: AsyncExitStack, world: World) -> list[OutputStream]:
    """A request on each engine."""
    return [
        await stack.enter_async_context(
            world.client.call(make_request(f"r{engine.index}", data_parallel_rank=engine.index))
        )
        for engine in world.engines
    ]


async def fate(stream: OutputStream) -> EngineDeadError:
    """The death that a stream reports."""
    with pytest.raises(EngineDeadError) as caught:
        await anext(stream)
    return caught.value


# A lost connection --------------------------------------------------------------------------------


async def test_a_lost_engine_fails_its_requests_within_the_promised_time_and_no_others(
    autojump_clock: MockClock,
) -> None:
    async with open_world(2) as world, AsyncExitStack() as stack:
        lost, other = await open_streams(stack, world)
        start = trio.current_time()
        await world.engines[0].die()

        error = await fate(lost)

        assert trio.current_time() - start <= 2
        assert (error.engine_index, error.reason) == (0, CONNECTION_LOST)
        assert not world.client.is_healthy
        assert list(world.client.dead_engines) == [0]
        assert world.client.failure is None
        await world.engines[1].emit("r1", [7], FinishReason.LENGTH)
        assert (await anext(other)).output.new_token_ids == [7]
        await world.round_trip()
        world.assert_tidy()


async def test_outputs_that_were_under_way_still_arrive(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        stream, finishing = OutputStream("r"), OutputStream("finishing")
        world.client.driver.submit(make_request(), stream)
        world.client.driver.submit(make_request("finishing"), finishing)
        await world.engine.die()
        await trio.sleep(DISCONNECT_GRACE / 2)
        await world.engine.send(
            make_output([7]),
            make_output([8], "finishing", finish_reason=FinishReason.LENGTH),
        )

        assert (await anext(stream)).output.new_token_ids == [7]
        assert (await fate(stream)).reason == CONNECTION_LOST
        assert (await anext(finishing)).output.new_token_ids == [8]
        with pytest.raises(StopAsyncIteration):
            await anext(finishing)


async def test_a_client_that_stood_still_goes_on(autojump_clock: MockClock) -> None:
    """Its clock has jumped by an hour; nothing that came meanwhile is lost, nor is an engine."""
    async with open_world() as world:
        stream = OutputStream("r")
        world.client.driver.submit(make_request(), stream)
        await world.engine.send(make_output([7]))
        autojump_clock.jump(3600)
        await world.engine.send(make_output([8], finish_reason=FinishReason.LENGTH))

        assert [item.output.new_token_ids async for item in stream] == [[7], [8]]
        assert world.client.is_healthy
        world.assert_tidy()


async def test_nothing_can_be_asked_of_the_only_engine_while_its_outputs_trickle_in(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        await world.engine.die()

        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            world.client.driver.submit(make_request(), OutputStream("r"))
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            await world.client.call_utility("is_sleeping")
        assert world.client.engine_indices == []
        world.assert_tidy()


async def test_a_failed_send_is_a_loss_and_its_cause_is_kept(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        stream, second = OutputStream("r"), OutputStream("second")
        world.client.driver.submit(make_request(), stream)
        world.engine.vanish()
        world.client.driver.submit(make_request("second"), second)
        await world.engine.emit("r", [7])

        assert (await anext(stream)).output.new_token_ids == [7]
        error = await fate(stream)
        assert isinstance(error.__cause__, PeerGoneError)
        assert error.__cause__ is (await fate(stream)).__cause__
        assert error.__cause__ is (await fate(second)).__cause__


async def test_an_idle_engine_that_is_gone_gets_nothing(autojump_clock: MockClock) -> None:
    """The caller hears of it at once."""
    async with open_world() as world:
        world.engine.vanish()
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            world.client.driver.submit(make_request(), OutputStream("r"))
        world.assert_tidy()


async def test_a_call_may_find_that_the_only_engine_is_gone(autojump_clock: MockClock) -> None:
    """By sending first what was submitted before it; then nobody is left to be asked."""
    async with open_world() as world:
        sinks = [OutputStream("a"), OutputStream("b")]
        for sink in sinks:
            world.client.driver.submit(make_request(sink.request_id), sink)
        world.engine.vanish()

        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            await world.client.call_utility("is_sleeping")
        assert trio.current_time() == 0
        assert [(await fate(sink)).reason for sink in sinks] == [CONNECTION_LOST] * 2


async def test_a_used_id_may_show_that_the_only_engine_is_gone(autojump_clock: MockClock) -> None:
    """Its abort is sent first."""
    async with open_world() as world:
        sink = OutputStream("r")
        world.client.driver.submit(make_request(), sink)
        world.client.driver.drop(sink)
        world.engine.vanish()

        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            world.client.driver.submit(make_request(), sink)
        world.assert_tidy()


async def test_late_rows_of_the_dead_are_dropped(autojump_clock: MockClock) -> None:
    async with open_world(2) as world, AsyncExitStack() as stack:
        lost, _ = await open_streams(stack, world)
        await world.engines[0].die()
        await fate(lost)
        again = OutputStream("r0")
        world.client.driver.submit(make_request("r0"), again)
        await world.engines[0].emit("r0", [1])
        await world.engines[0].report(running=3)
        await world.engines[1].emit("r0", [2])

        assert (await anext(again)).output.new_token_ids == [2]
        assert world.client.scheduler_stats() == {}


async def test_engines_in_lockstep_fail_together(autojump_clock: MockClock) -> None:
    async with open_world(2, data_parallel_size=2) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        await world.engines[1].die()

        assert [(await fate(stream)).engine_index for stream in streams] == [1, 1]
        assert (await _failure(world)).engine_index == 1
        with pytest.raises(EngineDeadError):
            world.client.driver.submit(make_request(), OutputStream("r"))
        await wait_all_tasks_blocked()
        assert world.engines[0].aborts() == [["r0"]]
        world.assert_tidy()


async def test_the_client_fails_with_its_last_engine(autojump_clock: MockClock) -> None:
    async with open_world(2) as world:
        await world.engines[1].die()
        await trio.sleep(1)
        await world.engines[0].die()

        error = await _failure(world)

        assert error.engine_index == 0
        assert list(world.client.dead_engines) == [1, 0]


async def test_each_waiter_gets_an_error_of_its_own(autojump_clock: MockClock) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.die()
        errors = [await fate(stream), await fate(stream)]
        for _ in range(2):
            with pytest.raises(EngineDeadError) as caught:
                world.client.driver.core.raise_if_failed()
            errors.append(caught.value)
        first = world.client.dead_engines[0]

        assert len({id(error) for error in errors}) == 4
        assert all(str(error) == str(first) for error in errors)
        assert [error.__cause__ for error in errors] == [None] * 4  # it would say the same again
        assert first.__traceback__ is None
        assert first is await world.client.wait_failed()


# A sentinel ---------------------------------------------------------------------------------------


async def test_the_sentinel_of_an_engine_counts_at_once(autojump_clock: MockClock) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.emit("r0", [7])
        start = trio.current_time()
        await world.engine.send_sentinel()

        assert (await anext(stream)).output.new_token_ids == [7]
        assert (await fate(stream)).reason == REPORTED_DEATH
        assert start == trio.current_time()
        await world.engine.die()
        assert (await _failure(world)).reason == REPORTED_DEATH


async def test_a_sentinel_may_be_read_after_the_loss(autojump_clock: MockClock) -> None:
    async with open_world(3) as world:
        for delay, reason in (
            (DISCONNECT_GRACE / 2, REPORTED_DEATH),
            (DISCONNECT_GRACE * 2, CONNECTION_LOST),
        ):
            engine = world.engines[world.client.engine_indices[0]]
            await engine.die()
            await trio.sleep(delay)
            await engine.send_sentinel()
            await trio.sleep(2 * DISCONNECT_GRACE)

            assert reason == world.client.dead_engines[engine.index].reason
        assert world.client.failure is None


@pytest.mark.parametrize("data_parallel_size", [1, 3])
async def test_a_sentinel_ends_only_the_engine_that_sent_it_unless_in_lockstep(
    data_parallel_size: int, autojump_clock: MockClock
) -> None:
    async with (
        open_world(3, data_parallel_size=data_parallel_size) as world,
        AsyncExitStack() as stack,
    ):
        streams = await open_streams(stack, world)
        await world.engines[1].emit("r1", [7])
        await anext(streams[1])
        start = trio.current_time()
        await world.engines[1].send_sentinel()

        error = await fate(streams[1])

        assert start == trio.current_time()
        assert (error.engine_index, error.reason) == (1, REPORTED_DEATH)
        for _ in range(2):
            await world.engines[1].send_sentinel()
        await world.engines[1].die()
        await trio.sleep(10)
        assert list(world.client.dead_engines) == [1]
        assert (data_parallel_size == 1) == (world.client.failure is None)


async def test_an_answer_makes_the_connection_known_too(autojump_clock: MockClock) -> None:
    async with open_world(2, connections_are_known=False) as world:
        for engine in world.engines:
            await engine.answer(123)
        await world.engines[0].send_sentinel()

        assert list(world.client.dead_engines) == [0]


# Who is not known ---------------------------------------------------------------------------------

FROM_STRANGERS = {
    "sentinel": b"ENGINE_CORE_DEAD",
    "garbage": b"\xc1",
    "unreadable-outputs": b"\x92\x00\xa7no rows",
    "index-of-nobody": b"\x92\x09\x90",
    "taken-index": b"\x92\x00\x91\x92\xa2r0\x91\x07",
}


@pytest.mark.parametrize("frame", FROM_STRANGERS.values(), ids=FROM_STRANGERS)
@pytest.mark.parametrize("engine_count", [1, 2])
async def test_a_stranger_hurts_nobody(
    frame: bytes, engine_count: int, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, and logged once."""
    async with open_world(engine_count) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        for _ in range(100):
            world.stranger.send_nowait([frame])
        await trio.sleep(20)

        assert world.client.is_healthy
        assert sum(world.client.statistics().dropped.values()) == 100
        assert caplog.text.count("dropped a message") == 1
        await world.engines[0].emit("r0", [8], FinishReason.LENGTH)
        assert [item.output.new_token_ids async for item in streams[0]] == [[8]]


async def test_an_engine_whose_first_message_cannot_be_read_is_a_stranger(
    autojump_clock: MockClock,
) -> None:
    """Nothing tells it from one, even if it is the only engine."""
    async with open_world(connections_are_known=False) as world:
        await world.engine.say(b"\xc1")
        assert world.client.is_healthy
        await world.engine.send()
        await world.engine.say(b"\xc1")

        assert not world.client.is_healthy


async def test_an_engine_speaks_for_no_other(autojump_clock: MockClock) -> None:
    """Neither under the other's index, nor for its requests."""
    async with open_world(2) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        await world.engines[1].send(make_output([6], "r0"), engine_index=0)
        await world.engines[1].send(make_output([6], "r0"), make_output([7], "r1"))
        await world.engines[0].emit("r0", [8])

        assert (await anext(streams[0])).output.new_token_ids == [8]
        assert (await anext(streams[1])).output.new_token_ids == [7]
        assert list(world.client.statistics().dropped.values()) == [1, 1]
        assert world.client.is_healthy


async def test_a_second_connection_of_an_engine_does_not_count(autojump_clock: MockClock) -> None:
    """After the loss of the first one there would be a hole."""
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.emit("r0", [7])
        await world.engine.break_output()
        world.stranger.send_nowait([b"\x92\x00\x91\x92\xa2r0\x91\x09"])
        await wait_all_tasks_blocked()

        assert (await anext(stream)).output.new_token_ids == [7]
        assert (await fate(stream)).reason == CONNECTION_LOST


async def test_the_loss_of_the_output_connection_is_the_loss_of_the_engine(
    autojump_clock: MockClock,
) -> None:
    async with open_world(2) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        await world.engines[0].emit("r0", [7])
        start = trio.current_time()
        await world.engines[0].break_output()

        assert (await anext(streams[0])).output.new_token_ids == [7]
        assert (await fate(streams[0])).reason == CONNECTION_LOST
        assert trio.current_time() - start <= 2
        assert list(world.client.dead_engines) == [0]
        await world.round_trip()


async def test_requests_not_sent_yet_leave_an_engine_whose_output_connection_broke() -> None:
    async with open_world(2) as world:
        sinks = [OutputStream(request_id) for request_id in "abcd"]
        for sink in sinks:
            world.client.driver.submit(make_request(sink.request_id), sink)
        world.client.driver.core.disconnected(0.0, connection=world.engines[0].outputs.connection)
        await wait_all_tasks_blocked()

        assert [sink.engine_index for sink in sinks] == [0, 1, 1, 1]


async def test_the_loss_of_a_strangers_connection_is_nobodys(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.client.driver.core.disconnected(0.0, connection=world.stranger.connection)
        await trio.sleep(1)

        assert world.client.is_healthy


# What cannot be read ------------------------------------------------------------------------------

GARBAGE = {
    "empty-frame": b"",
    "reserved": b"\xc1",
    "truncated": b"\x99\x01\x91",
    "trailing-byte": b"\x91\x01\x00",
    "huge-array": b"\xdd\xff\xff\xff\xff",
    "not-an-array": b"\xa3abc",
    "almost-a-sentinel": b"ENGINE_CORE_DEAD!",
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
async def test_what_cannot_be_read_ends_its_engine(frame: bytes, autojump_clock: MockClock) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.say(frame)

        error = await fate(stream)

        assert error.engine_index == 0
        assert isinstance(error.__cause__, DecodeError)
        assert str(error) == f"engine 0 is dead: {UNREADABLE}: {error.__cause__}"
        world.assert_tidy()


async def test_a_message_that_names_its_engine_ends_no_other(autojump_clock: MockClock) -> None:
    async with open_world(2) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        await world.engines[1].say(b"\x92\x01\xa7no rows")

        error = await fate(streams[1])

        assert error.engine_index == 1
        assert "cannot decode outputs from engine 1 at outputs" in str(error.__cause__)
        await world.engines[1].say(b"\x92\x01\xa7no rows")
        await world.engines[0].emit("r0", [7], FinishReason.LENGTH)
        assert (await anext(streams[0])).output.new_token_ids == [7]
        assert world.client.engine_indices == [0]


@pytest.mark.parametrize("frame", [b"\xc1", b"\x92\x01\xa7no rows"], ids=["nobody", "other"])
async def test_the_connection_tells_who_sent_what_cannot_be_read(
    frame: bytes, autojump_clock: MockClock
) -> None:
    async with open_world(2) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        await world.engines[0].say(frame)

        error = await fate(streams[0])

        assert error.engine_index == 0
        await world.engines[1].emit("r1", [7], FinishReason.LENGTH)
        assert (await anext(streams[1])).output.new_token_ids == [7]
        assert world.client.failure is None


async def test_an_index_that_is_nobodys_does_not_count(autojump_clock: MockClock) -> None:
    """Nor is it remembered."""
    async with open_world(2) as world, AsyncExitStack() as stack:
        streams = await open_streams(stack, world)
        for index in range(100, 200):
            await world.engines[0].send(
                make_output([6], "r0"), engine_index=index, scheduler_stats=SchedulerStats()
            )
        await world.engines[0].emit("r0", [7])

        assert (await anext(streams[0])).output.new_token_ids == [7]
        assert world.client.scheduler_stats() == {}
        assert world.client.is_healthy
        assert list(world.client.statistics().dropped.values()) == [100]


# What can end one request -------------------------------------------------------------------------


async def test_a_row_that_cannot_be_read_hurts_only_its_request(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        good, bad = OutputStream("good"), OutputStream("bad")
        for stream in (bad, good):
            world.client.driver.submit(make_request(stream.request_id), stream)
        world.engine.received()
        # [0, [["bad", [7, "x"]], ["good", [8]]]]
        await world.engine.say(b"\x92\x00\x92\x92\xa3bad\x92\x07\xa1x\x92\xa4good\x91\x08")

        with pytest.raises(DecodeError) as caught:
            await anext(bad)

        assert (caught.value.request_id, caught.value.engine_index) == ("bad", 0)
        assert "new_token_ids[1]" in caught.value.where
        assert (await anext(good)).output.new_token_ids == [8]
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [["bad"]]
        assert world.client.is_healthy


@pytest.mark.parametrize(
    "token_ids",
    [
        b"\x91\xff",  # -1
        b"\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00",  # 2**32
        b"\x91\xc3",  # true
        b"\x92\xc2\x07",  # false, 7
        b"\x91\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",  # 1.0
        b"\x91\xc0",  # nil
        b"\x07",
        b"\xa1x",
    ],
    ids=["negative", "too-big", "true", "false", "float", "nil", "no-list", "text"],
)
async def test_what_is_no_token_id(token_ids: bytes, autojump_clock: MockClock) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.say(b"\x92\x00\x91\x92\xa2r0" + token_ids)

        with pytest.raises(DecodeError, match="new_token_ids"):
            await anext(stream)
        assert world.client.is_healthy


async def test_token_ids_0_and_1_are_token_ids(autojump_clock: MockClock) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.emit("r0", [0, 1])

        assert (await anext(stream)).output.new_token_ids == [0, 1]


@pytest.mark.parametrize(
    "row", [b"\x92\xc0\x91\x07", b"\x92\x91\x01\x91\x07", b"\x90", b"\xc0", b"\x92\x05\x91\x07"]
)
async def test_a_row_without_an_id_ends_the_engine(row: bytes, autojump_clock: MockClock) -> None:
    """Whose request it is cannot be told, so somebody's outputs are incomplete now."""
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.say(b"\x92\x00\x91" + row)

        assert (await fate(stream)).reason.startswith(UNREADABLE)


async def test_a_request_that_is_called_finished_without_a_last_output_has_failed(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        await world.engine.send(make_output([7], "r0"), finished_requests=["r0", "stranger"])

        assert (await anext(stream)).output.new_token_ids == [7]
        with pytest.raises(DecodeError, match="no last output") as caught:
            await anext(stream)
        assert (caught.value.request_id, caught.value.engine_index) == ("r0", 0)
        world.assert_tidy()


async def test_one_that_has_finished_in_the_same_message_has_not_failed(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world, AsyncExitStack() as stack:
        (stream,) = await open_streams(stack, world)
        last = make_output([7], "r0", finish_reason=FinishReason.LENGTH)
        await world.engine.send(last, finished_requests=["r0"])

        assert [item.output.new_token_ids async for item in stream] == [[7]]


async def test_an_engine_dies_once(autojump_clock: MockClock) -> None:
    """It talks rubbish, and then its connection breaks."""
    async with open_world(2) as world:
        await world.engines[0].say(b"\x92\x00\xa1x")
        first = world.client.dead_engines[0]
        await world.engines[0].die()
        await world.engines[0].break_connection()
        await trio.sleep(1)

        assert first is world.client.dead_engines[0]
        assert world.client.failure is None


# Health -------------------------------------------------------------------------------------------


async def test_health(autojump_clock: MockClock) -> None:
    async with open_world(2) as world:
        client = world.client
        assert client.is_healthy
        assert client.failure is None
        assert client.dead_engines == {}
        with trio.move_on_after(math.inf) as scope:
            scope.deadline = trio.current_time() + 100
            await client.wait_failed()
        assert scope.cancelled_caught
        client.driver.core.raise_if_failed()


async def _failure(world: World) -> EngineDeadError:
    """Why the client has failed."""
    error = await world.client.wait_failed()
    assert isinstance(error, EngineDeadError)
    return error


async def test_an_engine_that_goes_on_after_max_tokens_fails_the_request(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        for last in ({}, {"finish_reason": FinishReason.LENGTH}, {"num_nans_in_logits": 1}):
            async with world.client.call(make_request(max_tokens=2)) as stream:
                await world.engine.emit("r", [7, 8])
                await world.engine.emit("r", [9], **last)

                assert (await anext(stream)).output.new_token_ids == [7, 8]
                with pytest.raises(DecodeError, match="goes on after 2 tokens"):
                    await anext(stream)
            await wait_all_tasks_blocked()
            assert len(world.engine.aborts()) == (0 if "finish_reason" in last else 1)
        assert world.client.is_healthy
        world.assert_tidy()


@pytest.mark.parametrize("is_sent", [True, False])
def test_no_request_of_a_dead_engine_goes_to_another(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many fail some at a time; those whose turn has not come are not saved by not being sent."""
    monkeypatch.setattr(core_module, "ENDED_AT_ONCE", 4)
    core = FrontendCore({index: ready_response(index) for index in range(2)})
    streams = [OutputStream(f"r{number}") for number in range(20)]
    for stream in streams:
        core.submit(make_request(stream.request_id), stream)
    messages = core.sends() if is_sent else []
    core._connections.claim(7, 0)
    core.receive([ENGINE_CORE_DEAD], 7, 1.0)
    assert core.in_flight_count == 16
    for message in [*messages, *core.sends()]:
        if message.engine.index == 0:
            core.undeliverable(message, OSError("gone"), 2.0)
    while core.has_endings:
        core.end_some()

    assert [stream.engine_index for stream in streams] == [0, 1] * 10
    assert core.statistics().requests_in_flight == {1: 10}
    assert [message.engine.index for message in core.sends()] == [0]  # aborts, which nobody takes


def core_with_ten_requests() -> tuple[FrontendCore, list[OutputStream]]:
    """One that ends four at a time, and their streams."""
    core = FrontendCore({0: ready_response()})
    core.ended_at_once = 4
    streams = [OutputStream(f"r{number}") for number in range(10)]
    for stream in streams:
        core.submit(make_request(stream.request_id), stream)
    return core, streams


def test_many_requests_that_are_called_finished_fail_some_at_a_time() -> None:
    core, _ = core_with_ten_requests()
    named = [f"r{number}" for number in range(9)]
    frames = encode_outputs(RequestBatchOutputs(finished_requests=["unknown", *named]))
    core.receive([bytes(frame) for frame in frames], None, 1.0)

    left = [core.in_flight_count]
    while core.has_endings:
        core.end_some()
        left.append(core.in_flight_count)
    assert left == [6, 2, 1]
    assert list(core.sends()[-1].engine.requests) == ["r9"]


def test_of_many_requests_to_abort_some_are_looked_at_at_a_time() -> None:
    core, streams = core_with_ten_requests()
    looked_at: list[str] = []

    def gone_through() -> Iterator[OutputStream]:
        for stream in streams:
            looked_at.append(stream.request_id)
            yield stream

    core.abort_sinks(gone_through())
    assert (len(looked_at), core.in_flight_count) == (5, 6)
    while core.has_endings:
        core.end_some()
    assert (len(looked_at), core.in_flight_count) == (10, 0)
