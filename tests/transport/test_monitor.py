"""The monitor says what happened to which connection, and at once."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from tests.transport.peers import ANY_PORT, BARE_PEER, LIMIT, ZMQ_PEER, peer_process
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.errors import PeerGoneError
from trio_vllm.transport import Disconnect
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context
from trio_vllm.transport.zmq_monitor import PeerEvent, PeerEventKind, PeerMonitor


async def next_of_kind(monitor: PeerMonitor, kind: PeerEventKind) -> PeerEvent:
    with trio.fail_after(LIMIT):
        while (event := await monitor.receive()).kind is not kind:
            pass
    return event


async def test_killed_peer_is_named(context: ZmqContext, nursery: trio.Nursery) -> None:
    """Of three processes one is killed: its connection is reported, and no other."""
    router = context.socket(SocketType.ROUTER)
    connections = context.track_connections(router)
    nursery.start_soon(connections.run)
    address = router.bind(ANY_PORT)
    processes, numbers = {}, {}
    async with AsyncExitStack() as stack:
        for name in ("a", "b", "c"):
            peer = peer_process(ZMQ_PEER, address, name)
            processes[name.encode()] = await stack.enter_async_context(peer)
        for _ in processes:
            (((identity, _), number),) = await router.receive_batch(1)
            numbers[identity] = number

        processes[b"b"].kill()

        with trio.fail_after(LIMIT):
            assert await connections.receive() == Disconnect(connection=numbers[b"b"])
        with trio.move_on_after(0.1):
            raise AssertionError(await connections.receive())
        router.send_nowait([b"a", b"still here"])


async def test_peer_is_killed_and_restarted_fifty_times(
    context: ZmqContext, nursery: trio.Nursery
) -> None:
    """Each time it is reported lost, and the next one of its name is heard."""
    router = context.socket(SocketType.ROUTER)
    connections = context.track_connections(router)
    nursery.start_soon(connections.run)
    address = router.bind(ANY_PORT)
    for count in range(50):
        async with peer_process(BARE_PEER, address, "engine") as process:
            with trio.fail_after(LIMIT):
                received = await router.receive_batch(1)
            assert received == [([b"engine", b"hello"], count)]

            process.kill()

            with trio.fail_after(LIMIT):
                assert await connections.receive() == Disconnect(connection=count)
            with pytest.raises(PeerGoneError), trio.fail_after(LIMIT):
                while True:  # the socket itself hears of it a moment later than the monitor
                    await router.send([b"engine", b"too late"])


async def test_course_of_a_connection_on_both_sides(context: ZmqContext) -> None:
    router, dealer = context.socket(SocketType.ROUTER), context.socket(SocketType.DEALER)
    router_monitor, dealer_monitor = context.open_monitor(router), context.open_monitor(dealer)
    address = router.bind(ANY_PORT)
    dealer.connect(address)
    dealer.send_nowait([b"hello"])
    await router.receive()

    dealer.close()

    accepted = await router_monitor.receive()
    assert (accepted.kind, accepted.address) == (PeerEventKind.ACCEPTED, address)
    assert [await router_monitor.receive() for _ in range(2)] == [
        PeerEvent(PeerEventKind.HANDSHAKE_SUCCEEDED, None, address),
        PeerEvent(PeerEventKind.DISCONNECTED, accepted.descriptor, address),
    ]
    events = [event async for event in dealer_monitor]
    assert [event.kind for event in events] == [
        PeerEventKind.CONNECTED,
        PeerEventKind.HANDSHAKE_SUCCEEDED,
    ]


async def test_what_was_delivered_survives_the_connection(context: ZmqContext) -> None:
    router, dealer = context.socket(SocketType.ROUTER), context.socket(SocketType.DEALER, linger=5)
    monitor = context.open_monitor(router)
    dealer.connect(router.bind(ANY_PORT))
    dealer.send_nowait([b"last words"])
    dealer.close()

    await next_of_kind(monitor, PeerEventKind.DISCONNECTED)

    assert (await router.receive())[1] == b"last words"


async def test_nobody_listens(context: ZmqContext, tmp_path: Path) -> None:
    dealer = context.socket(SocketType.DEALER)
    monitor = context.open_monitor(dealer)
    address = f"ipc://{tmp_path}/nobody"

    dealer.connect(address)

    event = await next_of_kind(monitor, PeerEventKind.CONNECT_RETRIED)
    assert event == PeerEvent(PeerEventKind.CONNECT_RETRIED, None, address)


GREETINGS = {
    "silent": b"",
    "wants a password": b"\xff" + bytes(8) + b"\x7f\x03\0" + b"PLAIN".ljust(20, b"\0") + bytes(32),
}


@pytest.mark.parametrize("greeting", list(GREETINGS.values()), ids=list(GREETINGS))
async def test_stranger_fails_the_handshake(context: ZmqContext, greeting: bytes) -> None:
    """It connects, says something else or nothing, and leaves."""
    router = context.socket(SocketType.ROUTER)
    monitor = context.open_monitor(router)
    port = int(router.bind(ANY_PORT).rpartition(":")[2])

    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(greeting)

    event = await next_of_kind(monitor, PeerEventKind.HANDSHAKE_FAILED)
    assert event.descriptor is None


async def test_stranger_with_another_protocol(context: ZmqContext) -> None:
    """ØMQ ends the connection without a word on the handshake."""
    router = context.socket(SocketType.ROUTER)
    monitor = context.open_monitor(router)
    port = int(router.bind(ANY_PORT).rpartition(":")[2])

    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        accepted = await next_of_kind(monitor, PeerEventKind.ACCEPTED)
        event = await next_of_kind(monitor, PeerEventKind.DISCONNECTED)

    assert event.descriptor == accepted.descriptor


async def test_events_end_with_the_socket(context: ZmqContext) -> None:
    router = context.socket(SocketType.ROUTER)
    monitor = context.open_monitor(router)
    router.bind(ANY_PORT)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect, trio.EndOfChannel, monitor)
        await wait_all_tasks_blocked()
        router.close()

    await expect(trio.ClosedResourceError, monitor)


async def expect(error: type[Exception], monitor: PeerMonitor) -> None:
    with trio.fail_after(LIMIT), pytest.raises(error):
        await monitor.receive()


async def test_closing_the_monitor_ends_a_wait(context: ZmqContext) -> None:
    router = context.socket(SocketType.ROUTER)
    monitor = context.open_monitor(router)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect, trio.ClosedResourceError, monitor)
        await wait_all_tasks_blocked()
        with assert_checkpoints():
            await monitor.aclose()

    monitor.close()
    await expect(trio.ClosedResourceError, monitor)


async def test_second_receiver_is_refused(context: ZmqContext) -> None:
    monitor = context.open_monitor(context.socket(SocketType.ROUTER))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.receive)
        await wait_all_tasks_blocked()
        await expect(trio.BusyResourceError, monitor)
        nursery.cancel_scope.cancel()


async def test_socket_works_on_without_its_monitor(context: ZmqContext) -> None:
    """ØMQ's own thread sends the events, and would wait for ever for room to send one more."""
    router = context.socket(SocketType.ROUTER)
    monitor = context.open_monitor(router)
    address = router.bind(ANY_PORT)
    monitor.close()

    dealer = context.socket(SocketType.DEALER)
    dealer.connect(address)
    dealer.send_nowait([b"hello"])

    with trio.fail_after(LIMIT):
        assert (await router.receive())[1] == b"hello"


async def test_unread_events_do_not_hold_up_the_end() -> None:
    async with open_context(termination_grace=LIMIT) as context:
        router = context.socket(SocketType.ROUTER)
        context.open_monitor(router)
        address = router.bind(ANY_PORT)
        for _ in range(5):
            dealer = context.socket(SocketType.DEALER)
            dealer.connect(address)
            await dealer.send([b"hello"])
            await router.receive()
        begin = trio.current_time()

    assert trio.current_time() - begin < LIMIT / 2
