"""No wake-up is lost, though both directions share a descriptor that any call may silence.

Most of this runs between two sockets inside the process: there each call has its effect on the
other socket at once, so that the order of events is ours to choose.
"""

from __future__ import annotations

from itertools import product

import pytest
import trio
import zmq
from tests.transport.peers import ANY_PORT, LIMIT, Pair, receive_frames
from trio.testing import wait_all_tasks_blocked

from trio_vllm.transport.zmq_context import SocketType, ZmqContext
from trio_vllm.transport.zmq_socket import ZmqSocket


@pytest.fixture
async def inner_pair(context: ZmqContext) -> Pair:
    """A ROUTER and the DEALER "peer", which may be two messages ahead: one at each end."""
    router = context.socket(SocketType.ROUTER)
    router.set_options({zmq.RCVHWM: 1})
    router._raw.bind("inproc://router")
    dealer = context.socket(SocketType.DEALER, identity=b"peer", send_high_water_mark=1)
    dealer._raw.connect("inproc://router")
    await dealer.send([b"hello"])
    assert await router.receive() == [b"peer", b"hello"]
    return router, dealer


def fill(dealer: ZmqSocket) -> None:
    dealer.send_nowait([b"1"])
    dealer.send_nowait([b"2"])
    refuse(dealer)


def refuse(dealer: ZmqSocket) -> None:
    with pytest.raises(trio.WouldBlock):
        dealer.send_nowait([b"3"])


def empty(router: ZmqSocket) -> None:
    assert [frames for frames, _ in router.receive_batch_nowait(10)] == [
        [b"peer", b"1"],
        [b"peer", b"2"],
    ]


@pytest.mark.parametrize("in_vain", [True, False])
async def test_sending_does_not_swallow_a_message(inner_pair: Pair, in_vain: bool) -> None:
    """A message comes while one task waits for it, and another one uses the socket first."""
    router, dealer = inner_pair
    if in_vain:
        fill(dealer)
    with trio.fail_after(LIMIT):
        for number in range(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect, dealer, [b"%d" % number])
                await wait_all_tasks_blocked(0.002)  # from then on a send looks for news, too
                router.send_nowait([b"peer", b"%d" % number])
                if in_vain:
                    refuse(dealer)
                else:
                    await dealer.send([b"1"])
                    router.receive_batch_nowait(1)


async def expect(socket: ZmqSocket, frames: list[bytes]) -> None:
    assert frames == await socket.receive()


async def test_receiving_does_not_swallow_room(inner_pair: Pair) -> None:
    """Room comes while one task waits for it, and another one uses the socket first."""
    router, dealer = inner_pair
    with trio.fail_after(LIMIT):
        for _ in range(20):
            fill(dealer)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dealer.send, [b"3"])
                await wait_all_tasks_blocked()
                empty(router)
                with pytest.raises(trio.WouldBlock):
                    dealer.receive_batch_nowait(1)
            assert await router.receive() == [b"peer", b"3"]


NEWS = [{"send"}, {"receive"}, {"send", "receive"}]


@pytest.mark.parametrize(
    ("order", "news", "cancelled"),
    list(product([("send", "receive"), ("receive", "send")], NEWS, [None, "send", "receive"])),
)
async def test_both_directions_wait_at_once(
    inner_pair: Pair, order: tuple[str, str], news: set[str], cancelled: str | None
) -> None:
    """Whoever came first, and whether or not one of them gave up: who can go on does."""
    router, dealer = inner_pair
    fill(dealer)
    scopes = {name: trio.CancelScope() for name in order}
    finished = set()

    async def run(name: str) -> None:
        with scopes[name]:
            await (dealer.send([b"3"]) if name == "send" else dealer.receive())
            finished.add(name)

    async with trio.open_nursery() as nursery:
        for name in order:
            nursery.start_soon(run, name)
            await wait_all_tasks_blocked()
        if cancelled:
            scopes[cancelled].cancel()
        if "send" in news:
            empty(router)
        if "receive" in news:
            router.send_nowait([b"peer", b"message"])
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert news - {cancelled} == finished


async def test_full_rate_in_both_directions_with_a_pausing_reader(context: ZmqContext) -> None:
    """Bounded sends over a real connection: nothing stops for good, is lost or comes twice."""
    router = context.socket(SocketType.ROUTER)
    router.set_options({zmq.RCVHWM: 2})
    dealer = context.socket(SocketType.DEALER, identity=b"peer", send_high_water_mark=2)
    dealer.connect(router.bind(ANY_PORT))
    numbers = [b"%09d" % number for number in range(4000)]
    padding = bytes(20_000)
    pauses = 0
    replies: list[bytes] = []

    async def send() -> None:
        for number in numbers:
            await dealer.send([number, padding])

    async def echo() -> None:
        nonlocal pauses
        while True:
            for identity, number, _ in await receive_frames(router, 500):
                router.send_nowait([identity, number])
                if bytes(number).endswith(b"000"):
                    await wait_all_tasks_blocked(0.01)  # the sender has run into the bound
                    pauses += 1

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(echo)
            while len(replies) < len(numbers):
                replies += [bytes(number) for (number,) in await receive_frames(dealer, 100)]
            nursery.cancel_scope.cancel()

    assert numbers == replies
    assert pauses == 4
