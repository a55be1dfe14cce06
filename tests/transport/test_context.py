"""What a context does with its sockets: their options, their last messages, their end."""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import pytest
import trio
from tests.transport.peers import ANY_PORT, LIMIT
from tests.transport.startup import until
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.errors import ConfigurationError
from trio_vllm.transport.zmq_context import (
    PLACES,
    ContextPool,
    SocketType,
    ZmqContext,
    open_context,
)
from trio_vllm.transport.zmq_socket import BUDGETED_SIZE, ZERO_COPY_SIZE, SendBudget, ZmqSocket


async def test_late_listener_gets_the_last_message_within_the_linger(tmp_path: Path) -> None:
    """Closing comes before anybody listens; the message is delivered, and then nothing waits."""
    address = f"ipc://{tmp_path}/late"
    closed = trio.Event()

    async def send_and_leave() -> None:
        async with open_context() as context:
            push = context.socket(SocketType.PUSH, linger=30)
            push.connect(address)
            push.send_nowait([b"last words"])
        closed.set()

    with trio.fail_after(LIMIT):
        async with open_context() as context, trio.open_nursery() as nursery:
            nursery.start_soon(send_and_leave)
            await wait_all_tasks_blocked()
            pull = context.socket(SocketType.PULL)
            pull.bind(address)

            assert await pull.receive() == [b"last words"]
            await closed.wait()


@pytest.mark.parametrize("linger", [0.0, 0.3])
async def test_leaving_waits_no_longer_than_the_linger(tmp_path: Path, linger: float) -> None:
    begin = trio.current_time()

    async with open_context(termination_grace=LIMIT) as context:
        push = context.socket(SocketType.PUSH, linger=linger)
        push.connect(f"ipc://{tmp_path}/nobody")
        push.send_nowait([b"last words"])

    assert linger <= trio.current_time() - begin < LIMIT / 2


async def test_one_context_for_all(context: ZmqContext) -> None:
    """Two more places for sockets bring no thread; what is bound in one is free when it is left."""
    socket = context.socket(SocketType.PULL)
    address = socket.bind(ANY_PORT)
    threads = set(os.listdir("/proc/self/task"))
    async with open_context() as first, open_context() as second:
        push = second.socket(SocketType.PUSH)
        push.connect(address)
        push.send_nowait([b"message"])
        assert await socket.receive() == [b"message"]
        bound = first.socket(SocketType.PULL)
        first.open_monitor(bound)
        address = bound.bind(ANY_PORT)
        assert set(os.listdir("/proc/self/task")) <= threads

    async with open_context() as again:
        assert again.socket(SocketType.PULL).bind(address) == address


def test_pool_makes_another_context_when_the_places_of_the_others_are_taken() -> None:
    pool = ContextPool(places=2)
    first, same, other = pool.acquire(), pool.acquire(), pool.acquire()
    assert first is same
    assert other.raw is not first.raw

    assert not pool.release(first)
    assert pool.acquire() is first  # there is room again
    assert pool.release(other)
    other.raw.term()
    assert not pool.release(first)
    assert pool.release(first)
    first.raw.term()

    last = pool.acquire()
    assert last.raw is not first.raw  # which is ended
    assert pool.release(last)
    last.raw.term()


async def test_hundreds_share_a_few_contexts() -> None:
    """As many as there are places bring the two threads of one context, one more those of another."""

    def thread_count() -> int:
        return len(os.listdir("/proc/self/task"))

    async with AsyncExitStack() as stack:
        contexts = [await stack.enter_async_context(open_context()) for _ in range(PLACES + 1)]
        before = thread_count()
        contexts[0].socket(SocketType.PULL)
        contexts[PLACES - 1].socket(SocketType.PULL)
        assert thread_count() == before + 2
        contexts[PLACES].socket(SocketType.PULL)
        assert thread_count() == before + 4


async def test_leaving_waits_for_the_linger_though_others_stay(
    context: ZmqContext, tmp_path: Path
) -> None:
    context.socket(SocketType.PULL)
    begin = trio.current_time()

    async with open_context() as other:
        push = other.socket(SocketType.PUSH, linger=0.2)
        other.open_monitor(push)
        push.connect(f"ipc://{tmp_path}/nobody")
        push.send_nowait([b"last words"])

    assert 0.2 <= trio.current_time() - begin < LIMIT


FORK = """
import os, trio
from trio_vllm.transport.zmq_context import SocketType, open_context

async def talk():
    async with open_context() as context:
        pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
        push.connect(pull.bind("tcp://127.0.0.1:0"))
        await push.send([b"message"])
        with trio.fail_after(20):
            assert await pull.receive() == [b"message"]

async def main():
    async with open_context() as context:
        context.socket(SocketType.PULL)
        if (child := os.fork()) == 0:
            # The loop of the parent is of no use in the child, which makes its own.
            from multiprocessing import util
            code = 1
            try:
                import threading
                failed = []
                def run():
                    try:
                        trio.run(talk)
                    except BaseException as error:
                        failed.append(error)
                        print(repr(error))
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
                code = len(failed)
            finally:
                os._exit(code)
        print("status", os.waitpid(child, 0)[1])

trio.run(main)
"""


async def test_forked_process_has_a_context_of_its_own() -> None:
    """Threads do not survive a fork, so that of the parent would be silent."""
    with trio.fail_after(2 * LIMIT):
        ended = await trio.run_process([sys.executable, "-c", FORK], capture_stdout=True)

    assert ended.stdout == b"status 0\n"


STARVED = """
import os, resource, sys, trio
from trio_vllm import ConfigurationError, HandshakeOwner, open_llm

taken = []

async def main(free):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            taken.append(open("/dev/null"))
    except OSError:
        pass
    for file in taken[:free]:
        file.close()
    try:
        async with open_llm(HandshakeOwner(handshake_address="tcp://127.0.0.1:0", ready_timeout=0.1)):
            pass
    except ConfigurationError as error:
        print(error, flush=True)

for free in map(int, sys.argv[1:]):
    child = os.fork()
    if not child:
        trio.run(main, free)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("status", status, flush=True)
"""


async def test_too_few_descriptors_are_told() -> None:
    """Whether some are left or none; ØMQ itself would abort the process."""
    free = ["0", "1", "5", "16", "30"]
    with trio.fail_after(2 * LIMIT):
        ended = await trio.run_process([sys.executable, "-c", STARVED, *free], capture_stdout=True)

    lines = ended.stdout.decode().splitlines()
    assert lines[1::2] == ["status 0"] * len(free)
    assert len(lines) == 2 * len(free)
    for line in lines[::2]:
        assert "file descriptors" in line
        assert "ulimit -n" in line


async def test_leaving_cannot_be_cancelled(tmp_path: Path) -> None:
    begin = trio.current_time()

    with trio.CancelScope() as scope:
        async with open_context() as context:
            push = context.socket(SocketType.PUSH, linger=0.2)
            push.connect(f"ipc://{tmp_path}/nobody")
            push.send_nowait([b"last words"])
            scope.cancel()

    assert trio.current_time() - begin >= 0.2


async def test_leaving_does_not_hang() -> None:
    """A socket that we know nothing of keeps the context from ending: it is left behind."""
    with trio.fail_after(LIMIT):
        async with open_context(termination_grace=0.1) as context:
            raw = context._shared.raw.socket(SocketType.PUSH)

    raw.close()


def leave_last_words(context: ZmqContext, folder: Path, *, linger: float) -> None:
    """Have a watched socket that takes as long to end, in seconds of ØMQ's and no clock of a test's."""
    push = context.socket(SocketType.PUSH, linger=linger)
    context.open_monitor(push)
    push.connect(f"ipc://{folder}/nobody")
    push.send_nowait([b"last words"])


async def test_a_monitor_whose_socket_does_not_end_in_time_is_closed_later(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """With the context that it shares: garbage of it would warn."""
    async with open_context() as other:
        shared = other._shared
        async with open_context() as context:
            leave_last_words(context, tmp_path, linger=0.2)
        (monitor,) = shared.overdue
        assert not monitor.has_ended()
    assert monitor.has_ended()


async def test_those_that_have_ended_by_the_next_end_are_forgotten(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_context() as other:
        shared = other._shared
        async with open_context() as context:
            leave_last_words(context, tmp_path, linger=0.1)
        assert len(shared.overdue) == 1
        time.sleep(0.5)  # noqa: ASYNC251 (what ends it are threads of ØMQ's)
        async with open_context():
            pass
        assert shared.overdue == []


async def test_leaving_does_not_need_the_default_limiter(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    monkeypatch.setattr(limiter, "total_tokens", 1)
    async with limiter:
        begin = trio.current_time()
        async with open_context(termination_grace=LIMIT) as context:
            context.socket(SocketType.PULL)

    assert trio.current_time() - begin < LIMIT / 2


async def test_closed_context_makes_no_socket() -> None:
    async with open_context() as context:
        pull = context.socket(SocketType.PULL)

    with pytest.raises(trio.ClosedResourceError):
        context.socket(SocketType.PULL)
    with pytest.raises(trio.ClosedResourceError):
        await pull.receive()


@pytest.mark.parametrize("linger", [-1, float("inf")])
async def test_linger_is_finite(linger: float) -> None:
    async with open_context() as context:
        with pytest.raises(ValueError, match="finite"):
            context.socket(SocketType.PUSH, linger=linger)


async def test_impossible_option_is_named() -> None:
    async with open_context() as context:
        with pytest.raises(ConfigurationError, match="option ROUTING_ID cannot be b'xxx"):
            context.socket(SocketType.DEALER, identity=b"x" * 256)


async def test_send_high_water_mark_bounds_what_waits(context: ZmqContext, tmp_path: Path) -> None:
    push = context.socket(SocketType.PUSH, send_high_water_mark=3)
    push.connect(f"ipc://{tmp_path}/nobody")

    for _ in range(3):
        await push.send([b"message"])

    with pytest.raises(trio.WouldBlock):
        push.send_nowait([b"one too many"])


@pytest.mark.parametrize("size", [BUDGETED_SIZE, ZERO_COPY_SIZE])
async def test_of_large_messages_fewer_wait_for_a_late_peer(
    context: ZmqContext, tmp_path: Path, size: int
) -> None:
    """And a sender that waits goes on when the peer has taken some."""
    push = context.socket(SocketType.PUSH, send_high_water_mark=1000, send_budget=4 * size)
    push.connect(address := f"ipc://{tmp_path}/socket")
    large: list[bytes | memoryview] = [bytes(size), memoryview(b"in two frames")]
    for _ in range(4):
        push.send_nowait(large)
    await trio.sleep(0.1)  # no peer has taken anything in this time

    waiting = 4 + send_until_full(push, large)
    assert waiting <= 5  # room is asked for once in half a budget
    assert send_until_full(push, [b"small"]) == 1000 - waiting

    pull = context.socket(SocketType.PULL)
    pull.bind(address)
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_many, push, large, 50)
            received = [await pull.receive() for _ in range(1050)]
    assert received == [large] * waiting + [[b"small"]] * (1000 - waiting) + [large] * 50


@attrs.define
class Lent:
    """A message that is out when the test says so."""

    done: bool = False


def test_a_budget_is_what_the_peer_takes_in_time() -> None:
    now = 0.0
    budget = SendBudget(1_000_000, 10_000_000, delay=0.02, clock=lambda: now)
    lent = [Lent() for _ in range(11)]
    full = []
    for tracker in lent:
        full.append(budget.is_full)
        budget.add_lent(tracker, 990_000)
    full.append(budget.is_full)
    assert full == [False] * 11 + [True]  # 10.9 MB are more than may ever wait

    lent[0].done = True
    full = [budget.is_full]
    now = 0.03
    full.append(budget.is_full)
    for tracker in lent[:10]:
        tracker.done = True
    full.append(budget.is_full)
    # What was sent at 0 should be out by now; the last one alone may wait for any time.
    assert full == [False, True, False]


def test_the_longer_a_peer_keeps_up_the_less_is_lent() -> None:
    now = 0.0
    budget = SendBudget(100_000, 16_000_000, delay=0.02, clock=lambda: now)
    copied = []
    for _ in range(6):
        copied.append(copy_until_lent(budget))
        tracker = Lent()
        budget.add_lent(tracker, 10_000)
        tracker.done = True
    assert copied == [4, 9, 19, 39, 79, 99]

    budget.add_lent(Lent(), 100_000)
    now = 0.03
    assert budget.is_full
    assert copy_until_lent(budget) == 2
    assert budget.may_copy(BUDGETED_SIZE - 1)


def copy_until_lent(budget: SendBudget) -> int:
    """How many messages of 10 kB may be copied."""
    for count in itertools.count():
        if not budget.may_copy(10_000):
            return count
        budget.add_copied(10_000)
    raise AssertionError


async def send_many(socket: ZmqSocket, message: list[bytes | memoryview], count: int) -> None:
    for _ in range(count):
        await socket.send(message)


def send_until_full(socket: ZmqSocket, message: Sequence[bytes | memoryview]) -> int:
    """How many messages it takes."""
    for count in itertools.count():
        try:
            socket.send_nowait(message)
        except trio.WouldBlock:
            return count
    raise AssertionError


async def test_there_is_no_bound_otherwise(context: ZmqContext, tmp_path: Path) -> None:
    """Neither for what waits to be sent nor for what was received; ØMQ's own bounds are 1000."""
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    push.connect(address := f"ipc://{tmp_path}/socket")
    for _ in range(3000):
        push.send_nowait([b"message"])
    pull.bind(address)

    received = 0
    while received < 3000:
        received += len(await pull.receive_batch(3000))

    assert received == 3000


async def test_xpub_reports_repeated_subscriptions(context: ZmqContext) -> None:
    publisher = context.socket(SocketType.XPUB)
    address = publisher.bind(ANY_PORT)
    for _ in range(2):
        subscriber = context.socket(SocketType.XSUB)
        subscriber.connect(address)
        await subscriber.send([b"\x01"])

    with trio.fail_after(LIMIT):
        assert await publisher.receive() == [b"\x01"]
        assert await publisher.receive() == [b"\x01"]

    publisher.send_nowait([b"news"])
    with trio.fail_after(LIMIT):
        assert await subscriber.receive() == [b"news"]


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_000:
        pytest.skip("the system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_two_thousand_idle_sockets(many_descriptors: None, context: ZmqContext) -> None:
    """All of them wait and cost no time; each gets its message."""
    received = 0

    async def wait_for_message(pull: ZmqSocket, address: str) -> None:
        nonlocal received
        assert await pull.receive() == [address.encode()]
        received += 1

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            addresses = []
            for _ in range(2000):
                pull = context.socket(SocketType.PULL)
                addresses.append(pull.bind(ANY_PORT))
                nursery.start_soon(wait_for_message, pull, addresses[-1])
            await wait_all_tasks_blocked()
            cpu_time = time.thread_time()
            await trio.sleep(0.2)
            assert time.thread_time() - cpu_time < 0.1
            for address in addresses[::100]:
                push = context.socket(SocketType.PUSH)
                push.connect(address)
                push.send_nowait([address.encode()])
            await until(lambda: received == 20)
            nursery.cancel_scope.cancel()
