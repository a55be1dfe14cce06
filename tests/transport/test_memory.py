"""Connections in memory behave like ØMQ's, where the client and the mock engine rely on it."""

from __future__ import annotations

import pytest
import trio
from tests.memory import MemoryRouter, open_memory_connection
from tests.transport.peers import ANY_PORT, LIMIT, receive_frames

from trio_vllm.errors import PeerGoneError
from trio_vllm.protocol import Frames
from trio_vllm.transport.channels import FrameReceiver, FrameSender
from trio_vllm.transport.zmq_context import SocketType, ZmqContext

Ends = tuple[FrameSender, FrameReceiver]


@pytest.fixture(params=["memory", "ØMQ"])
def ends(request: pytest.FixtureRequest, context: ZmqContext) -> Ends:
    if request.param == "memory":
        return open_memory_connection()
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    push.connect(pull.bind(ANY_PORT))
    return push, pull


@pytest.fixture(params=["memory", "ØMQ"])
async def routed_ends(request: pytest.FixtureRequest, context: ZmqContext) -> Ends:
    """A router that knows "peer", and what that peer receives from."""
    if request.param == "memory":
        memory_router = MemoryRouter()
        return memory_router, memory_router.connect(b"peer")
    router, dealer = (
        context.socket(SocketType.ROUTER),
        context.socket(SocketType.DEALER, identity=b"peer"),
    )
    dealer.connect(router.bind(ANY_PORT))
    await dealer.send([b"hello"])
    await router.receive()
    return router, dealer


async def test_messages_arrive_in_order_and_in_batches(ends: Ends) -> None:
    sender, receiver = ends
    memory = bytearray(b"2")
    sender.send_nowait([b"1"])
    await sender.send([memoryview(memory), b"more"])
    memory[:] = b"x"
    sender.send_nowait([b"3"])
    received: list[Frames] = []

    with trio.fail_after(LIMIT):
        while len(received) < 3:
            batch = await receive_frames(receiver, 2)
            assert 1 <= len(batch) <= 2
            received += batch

    assert received == [[b"1"], [b"2", b"more"], [b"3"]]
    with pytest.raises(trio.WouldBlock):
        receiver.receive_batch_nowait(2)


async def test_batch_without_waiting(ends: Ends) -> None:
    sender, receiver = ends
    for number in range(3):
        await sender.send([b"%d" % number])
    received: list[Frames] = []

    with trio.fail_after(LIMIT):
        while len(received) < 3:
            await trio.lowlevel.checkpoint()
            try:
                received += [frames for frames, _ in receiver.receive_batch_nowait(2)]
            except trio.WouldBlock:
                continue

    assert received == [[b"0"], [b"1"], [b"2"]]


async def test_router_sends_to_whom_it_knows(routed_ends: Ends) -> None:
    router, receiver = routed_ends

    router.send_nowait([b"peer", b"1"])
    await router.send([b"peer", b"2"])
    with pytest.raises(PeerGoneError):
        router.send_nowait([b"stranger", b"3"])
    with pytest.raises(PeerGoneError):
        await router.send([b"stranger", b"3"])

    with trio.fail_after(LIMIT):
        assert await receive_frames(receiver, 1) == [[b"1"]]
        assert await receive_frames(receiver) == [[b"2"]]


async def test_disconnected_peer_is_gone() -> None:
    router = MemoryRouter()
    receiver = router.connect(b"peer")
    router.send_nowait([b"peer", b"last words"])

    router.disconnect(b"peer")

    with pytest.raises(PeerGoneError):
        router.send_nowait([b"peer", b"too late"])
    assert await receiver.receive() == [b"last words"]
    with pytest.raises(trio.EndOfChannel):
        await receiver.receive()


async def test_bounded_connection_makes_the_sender_wait() -> None:
    sender, receiver = open_memory_connection(high_water_mark=1)
    await sender.send([b"1"])

    with pytest.raises(trio.WouldBlock):
        sender.send_nowait([b"2"])

    assert await receive_frames(receiver, 1) == [[b"1"]]
    sender.close()
    receiver.close()
