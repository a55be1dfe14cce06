"""Cancelling at any moment neither loses a message nor sends one twice."""

from __future__ import annotations

import random

import pytest
import trio
from tests.transport.peers import ANY_PORT, LIMIT, Pair, receive_frames

from trio_vllm.protocol import Frames
from trio_vllm.transport.zmq_context import SocketType, ZmqContext

RECEIVES = [("receive_batch", 10_000), ("receive", 2_000)]


def numbered(count: int) -> list[list[bytes]]:
    return [[b"%d" % number] for number in range(count)]


@pytest.mark.parametrize(("method", "count"), RECEIVES)
async def test_cancelled_receives_lose_no_message(
    pull_and_push: Pair, method: str, count: int
) -> None:
    pull, push = pull_and_push
    messages = numbered(count)
    received: list[Frames] = []
    cancels = Cancels(random.Random(method))

    async def receive() -> None:
        if method == "receive_batch":
            received.extend(await receive_frames(pull, 5))
        else:
            received.append(await pull.receive())

    async def send() -> None:
        for frames in messages:
            await push.send(frames)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(cancels.run)
            while len(received) < len(messages):
                with cancels.scope():
                    await receive()
            nursery.cancel_scope.cancel()

    assert messages == received
    assert cancels.caught > 100


async def test_cancelled_sends_were_not_sent(context: ZmqContext) -> None:
    pull = context.socket(SocketType.PULL)
    push = context.socket(SocketType.PUSH, send_high_water_mark=3)
    push.connect(pull.bind(ANY_PORT))
    messages = numbered(3_000)
    received: list[Frames] = []
    cancels = Cancels(random.Random(1))

    async def send_all() -> None:
        for frames in messages:
            sent = False
            while not sent:
                with cancels.scope():
                    await push.send(frames)
                    sent = True

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            nursery.start_soon(cancels.run)
            while len(received) < len(messages):
                received += await receive_frames(pull, 100)
            nursery.cancel_scope.cancel()

    assert messages == received
    assert cancels.caught > 100


class Cancels:
    """Cancels whatever runs in its scopes, at moments that a seed chooses: one in four turns."""

    def __init__(self, seed: random.Random) -> None:
        self._random = seed
        self._scope = trio.CancelScope()
        self._scopes: list[trio.CancelScope] = []

    def scope(self) -> trio.CancelScope:
        self._scope = trio.CancelScope()
        self._scopes.append(self._scope)
        if self._random.random() < 0.1:
            self._scope.cancel()
        return self._scope

    async def run(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            if self._random.random() < 0.25:
                self._scope.cancel()

    @property
    def caught(self) -> int:
        return sum(scope.cancelled_caught for scope in self._scopes)
