"""What goes to the engines, and when."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import trio
from tests.client.world import World, make_output, make_request, open_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.errors import EngineDeadError
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    RequestBatchOutputs,
    Tensor,
    encode_outputs,
)

HOLD = 0.005


def submit(world: World, *request_ids: str) -> list[OutputStream]:
    sinks = [OutputStream(request_id) for request_id in request_ids]
    for sink in sinks:
        world.client.driver.submit(make_request(sink.request_id), sink)
    return sinks


def received(world: World) -> list[str | list[str]]:
    """The ids of the requests that came since the last call, and of the aborted in lists."""
    ids: list[str | list[str]] = []
    for message in world.engine.received():
        if isinstance(message, EngineCoreRequest):
            ids.append(message.request_id)
        elif isinstance(message, AbortRequests):
            ids.append(message.request_ids)
    return ids


async def test_what_is_queued_goes_when_others_have_had_their_turn() -> None:
    """In one go, what was aborted meanwhile included; only an idle engine is sent it at once."""
    async with open_world() as world:
        submit(world, "first", "a", "b")
        world.client.abort(["a"])
        submit(world, "c")
        world.client.abort(["b"])
        assert received(world) == ["first"]
        await wait_all_tasks_blocked()

        assert received(world) == ["a", "b", "c", ["a", "b"]]
        world.client.abort(["first", "c"])
        await wait_all_tasks_blocked()
        world.assert_tidy()


async def test_a_pause_ends_when_sending_is_resumed(autojump_clock: MockClock) -> None:
    async with open_world(client_options={"hold_time": 5}) as world:
        core = world.client.driver.core
        submit(world, "first")
        core.pause_sending(trio.current_time())
        submit(world, "a")
        await wait_all_tasks_blocked()
        submit(world, "b")
        await wait_all_tasks_blocked()
        assert received(world) == ["first"]

        core.resume_sending()
        submit(world, "c")
        await wait_all_tasks_blocked()
        assert received(world) == ["a", "b", "c"]
        assert trio.current_time() == 0


async def test_a_pause_has_an_end_although_others_follow(autojump_clock: MockClock) -> None:
    """A client that is always behind sends all the same."""
    async with open_world() as world:
        submit(world, "first")
        for number in range(10):
            world.client.driver.core.pause_sending(trio.current_time())
            submit(world, str(number))
            await trio.sleep(HOLD * 0.3)
        assert len(received(world)) == 9


async def test_an_abort_ends_a_pause(autojump_clock: MockClock) -> None:
    """An engine should not work for nobody."""
    async with open_world() as world:
        core = world.client.driver.core
        submit(world, "first", "b")
        await wait_all_tasks_blocked()
        core.pause_sending(trio.current_time())
        submit(world, "a")
        world.client.abort(["b"])
        core.pause_sending(trio.current_time())
        await wait_all_tasks_blocked()

        assert received(world) == ["first", "b", "a", ["b"]]
        assert trio.current_time() == 0


async def test_an_old_pause_holds_nothing_back(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        submit(world, "first")
        world.client.driver.core.pause_sending(trio.current_time())
        await trio.sleep(2 * HOLD)
        submit(world, "a")
        await wait_all_tasks_blocked()
        assert received(world) == ["first", "a"]
        assert trio.current_time() == 2 * HOLD


async def test_an_abort_is_told_before_its_id_comes_again() -> None:
    async with open_world() as world:
        submit(world, "first", "a", "b")
        world.client.abort(["a"])
        submit(world, "a")
        await wait_all_tasks_blocked()

        assert received(world) == ["first", "a", "b", ["a"], "a"]


class Resubmitting(OutputStream):
    """Sends another request with its first tokens."""

    world: World
    received_before_the_last: list[EngineMessage]

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        super().add_tokens(token_ids, timestamp, version)
        if token_ids == [0]:
            submit(self.world, "second")
        elif token_ids == [LAST]:
            self.received_before_the_last = self.world.engine.received()


LAST = 20


@pytest.mark.parametrize("batch_size", [1, 5, 7])
async def test_a_client_that_is_behind_lets_requests_wait(
    batch_size: int, autojump_clock: MockClock
) -> None:
    """Until it has caught up, however many messages that takes."""
    options = {"batch_size": batch_size, "slice_time": math.inf}  # however slow this machine is
    async with open_world(driver_options=options) as world:
        stream = Resubmitting("first")
        stream.world = world
        world.client.driver.submit(make_request("first", 100), stream)
        world.engine.received()
        for token in range(LAST + 1):
            outputs = RequestBatchOutputs(outputs=[make_output([token], "first")], timestamp=1.0)
            world.engine.outputs.send_nowait(encode_outputs(outputs))
        await wait_all_tasks_blocked()

        assert stream.received_before_the_last == []
        assert len(world.engine.received()) == 1
        assert trio.current_time() == 0


@attrs.define
class TurnCounter:
    """Counts the turns that other tasks have."""

    count: int = 0

    async def run(self) -> None:
        """Task: take every turn there is."""
        while True:
            await trio.lowlevel.checkpoint()
            self.count += 1


async def test_outputs_are_handed_out_in_slices() -> None:
    """However long that takes, other tasks have their turns in between."""
    async with (
        open_world(driver_options={"slice_time": 0.0}) as world,
        trio.open_nursery() as nursery,
    ):
        turns = TurnCounter()
        nursery.start_soon(turns.run)
        (stream,) = submit(world, "first")
        for token in range(16):
            outputs = RequestBatchOutputs(outputs=[make_output([token], "first")], timestamp=1.0)
            world.engine.outputs.send_nowait(encode_outputs(outputs))
        tokens = [(await anext(stream)).output.new_token_ids[0] for _ in range(16)]

        assert tokens == [*range(16)]
        assert turns.count >= 15
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("known", [True, False])
async def test_one_large_message_is_handed_out_in_slices(known: bool) -> None:
    """Also one of an engine that has not proved itself, and of rows that nobody waits for."""
    async with (
        open_world(connections_are_known=known, driver_options={"slice_time": 0.0}) as world,
        trio.open_nursery() as nursery,
    ):
        turns = TurnCounter()
        nursery.start_soon(turns.run)
        (stream,) = submit(world, "first")
        others = [make_output([1], f"unknown-{number:06}") for number in range(6400)]
        rows = [*others, make_output([2], "first"), make_output([3], "first")]
        batch = RequestBatchOutputs(outputs=rows, timestamp=1.0)
        world.engine.outputs.send_nowait(encode_outputs(batch))
        tokens = [(await anext(stream)).output.new_token_ids for _ in range(2)]

        assert tokens == [[2], [3]]
        assert turns.count >= 100
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("most_ends", "least", "most"), [(5, 3, 9), (100, 0, 2)])
async def test_the_end_of_many_requests_ends_a_slice(most_ends: int, least: int, most: int) -> None:
    """The tasks that waited for them have work before more are woken."""
    options = {"slice_time": math.inf, "most_ends": most_ends}
    async with open_world(driver_options=options) as world, trio.open_nursery() as nursery:
        turns = TurnCounter()
        streams = submit(world, *(f"r{number}" for number in range(20)))
        for stream in streams:
            row = make_output([7], stream.request_id, finish_reason=FinishReason.LENGTH)
            outputs = RequestBatchOutputs(outputs=[row], timestamp=1.0)
            world.engine.outputs.send_nowait(encode_outputs(outputs))
        nursery.start_soon(turns.run)
        await anext(streams[-1])

        assert least <= turns.count <= most
        nursery.cancel_scope.cancel()


async def test_an_engine_that_dies_within_a_message_is_dead_for_the_rest_of_it() -> None:
    async with open_world() as world:
        core = world.client.driver.core
        (stream,) = submit(world, "first")
        rows = [make_output([number], "first") for number in range(400)]
        frames = encode_outputs(RequestBatchOutputs(outputs=rows, timestamp=1.0))
        padded = [bytes(frame) for frame in frames]
        assert len(padded[0]) > 8192
        pieces = core.receive_in_pieces(
            padded, world.engine.outputs.connection, trio.current_time()
        )
        next(pieces)
        await world.engine.send_sentinel()
        for _ in pieces:
            pass

        assert (await anext(stream)).output.new_token_ids == [0]
        with pytest.raises(EngineDeadError):
            for _ in range(400):
                await anext(stream)


@pytest.mark.parametrize("readonly", [True, False])
async def test_arrays_are_copied_unless_they_are_readonly(readonly: bool) -> None:
    """A caller may change one as soon as the request is submitted, though it waits to be sent."""
    embeds = np.ones((99, 2), np.float32)
    embeds.flags.writeable = not readonly
    options = {"accepts_prompt_embeds": True, "hidden_size": 2}
    async with open_world(client_options=options) as world:
        submit(world, "first")
        request = make_request(
            "second", prompt_token_ids=None, prompt_embeds=Tensor.from_numpy(embeds)
        )
        core = world.client.driver.core
        core.submit(request, OutputStream("second"))
        (message,) = core.sends()
        embeds.flags.writeable = True
        embeds[:] = 0

        (sent,) = message.frames[2:]
        assert np.frombuffer(sent, np.float32).any() != readonly
