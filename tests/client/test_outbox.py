"""What goes to the engines, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.client.world import World, make_output, make_request, open_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import OutputStream, core as _pump
from trio_vllm.client.core import HOLD, Outbox
from trio_vllm.concurrency import running
from trio_vllm.errors import PeerGoneError
from trio_vllm.protocol import (
    Buffer,
    EngineId,
    EngineMessage,
    RequestBatchOutputs,
    encode_abort,
    encode_outputs,
)


class Engines:
    """Take what is sent; some are gone."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.gone: set[int] = set()
        self.found_gone: list[int] = []
        self.unsent: list[str] = []

    def send_nowait(self, frames: list[bytes | memoryview]) -> None:
        engine_id, *_, payload = map(bytes, frames)
        index = EngineId(engine_id).engine_index
        if index in self.gone:
            raise PeerGoneError(engine_id)
        self.sent.append((index, payload))

    async def send(self, frames: list[bytes | memoryview]) -> None:
        raise AssertionError("nobody waits")

    def take(self) -> list[tuple[int, bytes]]:
        """What came since the last call."""
        sent, self.sent = self.sent, []
        return sent


@asynccontextmanager
async def open_outbox() -> AsyncIterator[tuple[Outbox, Engines]]:
    engines = Engines()

    def take_unsent(request_id: str, message: list[Buffer]) -> None:
        engines.unsent.append(request_id)

    outbox = Outbox(
        engines,  # type: ignore[arg-type]
        on_gone=lambda index, _: engines.found_gone.append(index),
        on_unsent=take_unsent,
    )
    async with running(outbox.run):
        await wait_all_tasks_blocked()
        yield outbox, engines


def post(outbox: Outbox, *names: bytes, engine_index: int = 0) -> None:
    for name in names:
        outbox.post(engine_index, [b"type", name], name.decode())


def payload_of_abort(*request_ids: str) -> bytes:
    return bytes(encode_abort(request_ids)[-1])


async def test_what_is_posted_goes_when_others_have_had_their_turn() -> None:
    """In one go, what was aborted meanwhile included."""
    async with open_outbox() as (outbox, engines):
        post(outbox, b"a", b"b")
        outbox.abort(0, "a")
        post(outbox, b"c", engine_index=1)
        assert engines.take() == []
        await wait_all_tasks_blocked()

        assert engines.take() == [(0, b"a"), (0, b"b"), (1, b"c"), (0, payload_of_abort("a"))]
        assert not outbox


async def test_a_hold_ends_when_it_is_released(autojump_clock: MockClock) -> None:
    async with open_outbox() as (outbox, engines):
        outbox.hold()
        post(outbox, b"a")
        await wait_all_tasks_blocked()
        post(outbox, b"b")
        await wait_all_tasks_blocked()
        assert engines.take() == []

        outbox.release()
        await wait_all_tasks_blocked()
        assert engines.take() == [(0, b"a"), (0, b"b")]
        assert trio.current_time() == 0


async def test_a_hold_has_an_end_although_others_follow(autojump_clock: MockClock) -> None:
    """Whoever is always behind sends all the same."""
    async with open_outbox() as (outbox, engines):
        for _ in range(10):
            outbox.hold()
            post(outbox, b"a")
            await trio.sleep(HOLD * 0.3)
        assert len(engines.take()) == 8


async def test_an_abort_ends_a_hold(autojump_clock: MockClock) -> None:
    """An engine should not work for nobody."""
    async with open_outbox() as (outbox, engines):
        outbox.hold()
        post(outbox, b"a")
        outbox.abort(0, "b")
        outbox.hold()
        await wait_all_tasks_blocked()
        assert engines.take() == [(0, b"a"), (0, payload_of_abort("b"))]
        assert trio.current_time() == 0


async def test_an_old_hold_holds_nothing(autojump_clock: MockClock) -> None:
    async with open_outbox() as (outbox, engines):
        outbox.hold()
        await trio.sleep(2 * HOLD)
        post(outbox, b"a")
        await wait_all_tasks_blocked()
        assert engines.take() == [(0, b"a")]


async def test_a_used_id_goes_out_before_it_is_used_again(autojump_clock: MockClock) -> None:
    async with open_outbox() as (outbox, engines):
        post(outbox, b"a", b"b")
        outbox.abort(0, "a")
        outbox.prepare_id("b")
        assert engines.take() == []
        outbox.prepare_id("a")
        assert engines.take() == [(0, b"a"), (0, b"b"), (0, payload_of_abort("a"))]


async def test_what_was_posted_to_an_engine_that_is_gone_is_given_back() -> None:
    """Unless no other one will do."""
    async with open_outbox() as (outbox, engines):
        engines.gone.add(1)
        post(outbox, b"a", engine_index=1)
        outbox.post(1, [b"type", b"pinned"], None)
        post(outbox, b"b")
        await wait_all_tasks_blocked()

        assert engines.take() == [(0, b"b")]
        assert (engines.unsent, engines.found_gone) == (["a"], [1, 1])


class Resubmitting(OutputStream):
    """Sends another request with its first tokens."""

    world: World
    received_before_the_last: list[EngineMessage]

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        super().add_tokens(token_ids, timestamp, version)
        if token_ids == [0]:
            self.world.client.submit(make_request("second"), OutputStream("second"))
        elif token_ids == [LAST]:
            self.received_before_the_last = self.world.engine.received()


LAST = 20


@pytest.mark.parametrize("batch", [1, 5, 7])
async def test_a_client_that_is_behind_lets_requests_wait(
    batch: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has caught up, however many messages that takes."""
    monkeypatch.setattr(_pump, "BATCH", batch)
    async with open_world() as world:
        stream = Resubmitting("first")
        stream.world = world
        world.client.submit(make_request("first"), stream)
        world.engine.received()
        for token in range(LAST + 1):
            outputs = RequestBatchOutputs(outputs=[make_output([token], "first")], timestamp=1.0)
            world.engine.outputs.send_nowait(encode_outputs(outputs))
        await wait_all_tasks_blocked()

        assert stream.received_before_the_last == []
        assert len(world.engine.received()) == 1
        assert trio.current_time() == 0
