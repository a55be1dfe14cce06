"""`ZmqSocket` as a channel: what goes in comes out, and everything else is a clear error."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from tests.transport.peers import ANY_PORT, LIMIT, Pair, receive_frames, wait_until_readable
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.errors import ConfigurationError, PeerGoneError
from trio_vllm.protocol import Frames
from trio_vllm.transport import Received
from trio_vllm.transport import zmq_socket as _socket
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context
from trio_vllm.transport.zmq_socket import LARGE_ARRAY, ZERO_COPY_SIZE, ZmqSocket


@pytest.mark.parametrize(
    "frames",
    [
        [b"one"],
        [b""],
        [b"\x00", b"payload", b"", b"aux"],
        [b"x" * ZERO_COPY_SIZE, b"small", b"y" * (5 * ZERO_COPY_SIZE)],
    ],
    ids=["one", "empty", "several", "large"],
)
async def test_frames_arrive_as_they_were_sent(pull_and_push: Pair, frames: list[bytes]) -> None:
    pull, push = pull_and_push

    push.send_nowait(frames)
    await push.send(frames)

    assert frames == await pull.receive()
    assert frames == await pull.receive()


async def test_memory_of_a_view_may_be_reused_at_once(context: ZmqContext, tmp_path: Path) -> None:
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    push.connect(address := f"ipc://{tmp_path}/socket")
    memory = bytearray(b"x" * ZERO_COPY_SIZE)

    push.send_nowait([b"head", memoryview(memory)])
    memory[:] = bytes(len(memory))
    pull.bind(address)

    assert await pull.receive() == [b"head", b"x" * ZERO_COPY_SIZE]


@pytest.mark.parametrize(("size", "is_view"), [(LARGE_ARRAY - 1, False), (LARGE_ARRAY, True)])
async def test_large_arrays_are_not_copied_as_they_come(
    pull_and_push: Pair, size: int, is_view: bool
) -> None:
    """Which would hold up everything else. A payload, which is the first frame, is bytes."""
    pull, push = pull_and_push
    push.send_nowait([bytes(size), b"a" * size])

    payload, array = await pull.receive()

    assert type(payload) is bytes
    assert type(array) is (memoryview if is_view else bytes)
    assert memoryview(array).readonly
    assert array == b"a" * size


@pytest.mark.parametrize(("size", "lent"), [(ZERO_COPY_SIZE - 1, False), (ZERO_COPY_SIZE, True)])
async def test_large_bytes_are_lent_not_copied(
    context: ZmqContext, tmp_path: Path, size: int, lent: bool
) -> None:
    push = context.socket(SocketType.PUSH)
    push.connect(f"ipc://{tmp_path}/nobody")
    frame = bytes(size)
    before = sys.getrefcount(frame)

    await push.send([frame])

    assert lent == (sys.getrefcount(frame) > before)


@pytest.mark.parametrize("readonly", [True, False])
async def test_large_views_are_lent_if_they_are_readonly(
    context: ZmqContext, tmp_path: Path, readonly: bool
) -> None:
    """Others may be written as soon as they are sent."""
    push = context.socket(SocketType.PUSH)
    push.connect(f"ipc://{tmp_path}/nobody")
    view = memoryview(bytearray(ZERO_COPY_SIZE))
    frame = view.toreadonly() if readonly else view
    before = sys.getrefcount(frame)

    await push.send([frame])

    assert readonly == (sys.getrefcount(frame) > before)


async def test_batch_takes_what_is_there_up_to_the_limit(pull_and_push: Pair) -> None:
    pull, push = pull_and_push
    numbers = [[b"%d" % number] for number in range(5)]
    for frames in numbers:
        push.send_nowait(frames)
    received: list[Frames] = []

    while len(received) < 5:
        batch = await receive_frames(pull, 2)
        assert 1 <= len(batch) <= 2
        received += batch

    assert numbers == received
    with pytest.raises(trio.WouldBlock):
        pull.receive_batch_nowait(2)


async def test_full_batch_is_taken_at_once(pull_and_push: Pair) -> None:
    pull, push = pull_and_push
    for _ in range(3):
        push.send_nowait([b"message"])
    push.send_nowait([b"last"])
    await wait_until_readable(pull)

    assert len(await pull.receive_batch(3)) == 3
    assert pull.receive_batch_nowait(3) == [([b"last"], None)]


async def test_waiting_operations_are_checkpoints(pull_and_push: Pair) -> None:
    pull, push = pull_and_push

    with assert_checkpoints():
        await push.send([b"1"])
    with assert_checkpoints():  # waits
        await pull.receive_batch(10)
    push.send_nowait([b"2"])
    await wait_until_readable(pull)
    with assert_checkpoints():  # does not need to wait
        await pull.receive_batch(10)


async def test_busy_receiver_lets_other_tasks_run(pull_and_push: Pair) -> None:
    """Between two batches that are there already, everybody else has a turn."""
    pull, push = pull_and_push
    for _ in range(100):
        push.send_nowait([b"message"])
    await wait_until_readable(pull)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        for _ in range(100):
            await pull.receive_batch(1)
        nursery.cancel_scope.cancel()

    assert turns >= 90


async def test_second_receiver_is_refused(pull_and_push: Pair) -> None:
    pull, push = pull_and_push

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull.receive)
        await wait_all_tasks_blocked()

        with trio.fail_after(LIMIT), pytest.raises(trio.BusyResourceError):
            await pull.receive()

        push.send_nowait([b"for the first one"])


async def test_second_waiting_sender_is_refused(context: ZmqContext, tmp_path: Path) -> None:
    push = context.socket(SocketType.PUSH, send_high_water_mark=1)
    push.connect(f"ipc://{tmp_path}/nobody")
    push.send_nowait([b"fills it"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(push.send, [b"waits"])
        await wait_all_tasks_blocked()

        with trio.fail_after(LIMIT), pytest.raises(trio.BusyResourceError):
            await push.send([b"refused"])

        nursery.cancel_scope.cancel()


async def test_close_ends_the_waits_of_both_directions(context: ZmqContext, tmp_path: Path) -> None:
    dealer = context.socket(SocketType.DEALER, send_high_water_mark=1)
    dealer.connect(f"ipc://{tmp_path}/nobody")
    dealer.send_nowait([b"fills it"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, dealer)
        nursery.start_soon(expect_closed, dealer, [b"waits"])
        await wait_all_tasks_blocked()
        dealer.close()


async def expect_closed(socket: ZmqSocket, to_send: list[bytes] | None = None) -> None:
    with trio.fail_after(LIMIT), pytest.raises(trio.ClosedResourceError):
        await (socket.send(to_send) if to_send else socket.receive())


async def test_closed_socket_says_so(pull_and_push: Pair) -> None:
    pull, push = pull_and_push

    for socket in pull_and_push:
        socket.close()
        socket.close()

    for refused in (
        lambda: pull.receive_batch_nowait(1),
        lambda: push.send_nowait([b"late"]),
        lambda: pull.bind(ANY_PORT),
        lambda: push.connect("tcp://127.0.0.1:1"),
    ):
        with pytest.raises(trio.ClosedResourceError):
            refused()
    await expect_closed(pull)
    await expect_closed(push, [b"late"])


async def test_router_says_that_a_peer_is_unknown(router_and_dealer: Pair) -> None:
    router, _ = router_and_dealer

    with pytest.raises(PeerGoneError) as caught:
        await router.send([b"stranger", b"payload"])

    assert caught.value.engine_id == b"stranger"


async def test_router_is_whole_after_an_unknown_peer(router_and_dealer: Pair) -> None:
    router, dealer = router_and_dealer
    with pytest.raises(PeerGoneError):
        router.send_nowait([memoryview(b"stranger"), b"lost"])

    await router.send([b"peer", b"arrives"])

    assert await dealer.receive() == [b"arrives"]


async def test_router_says_that_a_peer_has_left(router_and_dealer: Pair) -> None:
    router, dealer = router_and_dealer
    dealer.close()

    async def send_for_ever() -> None:
        while True:
            await router.send([b"peer", b"payload"])

    with trio.fail_after(LIMIT), pytest.raises(PeerGoneError):
        await send_for_ever()


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], ValueError),
        ([b"begun", "text"], TypeError),
        ([b"begun", memoryview(b"strided")[::2]], ValueError),
    ],
    ids=["none", "text", "strided"],
)
async def test_unsendable_message_leaves_nothing_behind(
    pull_and_push: Pair, frames: list[bytes], error: type[Exception]
) -> None:
    pull, push = pull_and_push

    with pytest.raises(error):
        push.send_nowait(frames)
    push.send_nowait([b"whole"])

    assert await pull.receive() == [b"whole"]


async def test_wrong_direction_is_a_typed_error(pull_and_push: Pair) -> None:
    pull, push = pull_and_push

    with pytest.raises(ConfigurationError, match="cannot send: "):
        pull.send_nowait([b"no"])
    with pytest.raises(ConfigurationError, match="cannot receive: "):
        await push.receive()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_number_tells_connections_apart(
    context: ZmqContext, nursery: trio.Nursery, tmp_path: Path, scheme: str
) -> None:
    router = context.socket(SocketType.ROUTER)
    context.track_connections(router)
    address = router.bind(ANY_PORT if scheme == "tcp" else f"ipc://{tmp_path}/socket")
    numbers: dict[bytes, set[int | None]] = {b"a": set(), b"b": set()}
    for identity in numbers:
        dealer = context.socket(SocketType.DEALER, identity=identity)
        dealer.connect(address)
        dealer.send_nowait([b"1"])
        dealer.send_nowait([b"2", b"more"])

    for _ in range(4):
        ((frames, number),) = await router.receive_batch(1)
        numbers[bytes(frames[0])].add(number)

    assert [len(found) for found in numbers.values()] == [1, 1]
    assert set.union(*numbers.values()) == {0, 1}


async def test_number_of_a_connection_is_not_used_again(context: ZmqContext) -> None:
    """Though the system gives its descriptor to the next one."""
    pull = context.socket(SocketType.PULL)
    context.track_connections(pull)
    address = pull.bind(ANY_PORT)
    numbers = []

    with trio.fail_after(LIMIT):
        for _ in range(20):
            push = context.socket(SocketType.PUSH, linger=1)
            push.connect(address)
            push.send_nowait([b"message"])
            ((_, number),) = await pull.receive_batch(5)
            numbers.append(number)
            push.close()

    assert numbers == list(range(20))


async def test_numbers_in_a_batch(context: ZmqContext) -> None:
    pull = context.socket(SocketType.PULL)
    context.track_connections(pull)
    address = pull.bind(ANY_PORT)
    pushes = [context.socket(SocketType.PUSH) for _ in range(2)]
    for push in pushes:
        push.connect(address)
        for number in range(3):
            push.send_nowait([b"%d" % pushes.index(push), b"%d" % number])
    received: list[Received] = []

    with trio.fail_after(LIMIT):
        while len(received) < 6:
            batch = await pull.receive_batch(4)
            assert 1 <= len(batch) <= 4
            received += batch

    numbers = {(frames[0], number) for frames, number in received}
    assert len(numbers) == len({number for _, number in numbers}) == 2
    for name in (b"0", b"1"):
        assert [frames[1] for frames, _ in received if frames[0] == name] == [b"0", b"1", b"2"]


async def test_what_zeromq_says_itself_came_by_no_connection(context: ZmqContext) -> None:
    """An XPUB is told of the end of a subscription whose connection broke."""
    publisher, subscriber = context.socket(SocketType.XPUB), context.socket(SocketType.XSUB)
    context.track_connections(publisher)
    subscriber.connect(publisher.bind(ANY_PORT))
    subscriber.send_nowait([b"\x01"])
    with trio.fail_after(LIMIT):
        ((frames, connection),) = await publisher.receive_batch(1)
        assert (frames, connection is None) == ([b"\x01"], False)
        subscriber.close()

        assert await publisher.receive_batch(1) == [([b"\x00"], None)]


@pytest.mark.parametrize("kind", [SocketType.ROUTER, SocketType.PULL, SocketType.XPUB])
@pytest.mark.parametrize("junk", [b"\x02\x00a" + b"\x06\x00hello", b"\x01\x00" + b"\x02\x00\x01"])
async def test_junk_does_not_pass_for_a_message(
    context: ZmqContext, kind: SocketType, junk: bytes
) -> None:
    """As it would by ZMTP 1.0: a peer's name, or none, and what it says."""
    socket = context.socket(kind)
    host, port = socket.bind(ANY_PORT).removeprefix("tcp://").split(":")
    with trio.fail_after(LIMIT):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(junk)
            with suppress(trio.BrokenResourceError):
                while await stream.receive_some():  # until it hangs up
                    pass

        with pytest.raises(trio.WouldBlock):
            socket.receive_batch_nowait(1)


def test_ctrl_c_in_the_middle_of_a_message_does_not_split_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a message would be glued to the next one, which the engine might die of."""
    received = []

    def interrupt(frame: bytes) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    async def main() -> None:
        async with open_context() as context:
            pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
            push.connect(pull.bind(ANY_PORT))
            monkeypatch.setattr(_socket, "_must_copy", interrupt)
            with suppress(KeyboardInterrupt):
                push.send_nowait([b"first", b"second"])
                monkeypatch.undo()
                await trio.sleep_forever()
            with trio.fail_after(LIMIT):
                received.append(await pull.receive())

    trio.run(main)

    assert received == [[b"first", b"second"]]
