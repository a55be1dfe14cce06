"""What the tests of both startups need: an engine and a frontend in single messages, and traps."""

from __future__ import annotations

import socket as stdlib_socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.lowlevel
from tests.proc import own_threads
from tests.ready import ready_response

from trio_vllm.protocol import (
    SUBSCRIBE,
    EngineAddresses,
    EngineId,
    HandshakeInit,
    HandshakeReport,
    HandshakeStatus,
    decode_init,
    encode_ready_response,
    encode_report,
)
from trio_vllm.transport.zmq_context import SocketType, ZmqContext
from trio_vllm.transport.zmq_socket import ZmqSocket

(HELLO,) = encode_report(HandshakeReport(status=HandshakeStatus.HELLO))
(READY,) = encode_report(HandshakeReport(status=HandshakeStatus.READY))

TICK = 0.3
"""Seconds until a startup gives up that must give up. Where something has to happen before, a test
asks for the `patient_clock`, by which they pass only once nothing happens any more."""


class RawEngine:
    """An engine that sends each message of its startup when it is told to."""

    def __init__(self, context: ZmqContext, handshake_address: str, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self.engine_id = EngineId.of(engine_index)
        self._handshake_address = handshake_address
        self.handshake = context.socket(SocketType.DEALER, identity=self.engine_id, linger=1)
        self.input = context.socket(SocketType.DEALER, identity=self.engine_id, linger=1)
        self.output = context.socket(SocketType.PUSH, linger=1)
        self.broadcasts = context.socket(SocketType.XSUB, identity=self.engine_id)
        self.notices = context.socket(SocketType.PUSH, linger=1)

    def say(self, *payload: bytes) -> None:
        """Send something on the handshake socket."""
        if not self.handshake.address:
            self.handshake.connect(self._handshake_address)
        self.handshake.send_nowait(payload)

    async def receive_init(self) -> EngineAddresses:
        """Wait for the answer to HELLO."""
        (payload,) = await self.handshake.receive()
        return decode_init([payload]).addresses

    async def say_hello(self) -> EngineAddresses:
        """Say HELLO and wait for the answer."""
        self.say(HELLO)
        return await self.receive_init()

    def register(self, addresses: EngineAddresses, *payload: bytes) -> None:
        """Connect to the input and output socket, and register."""
        self.connect(addresses)
        self.input.send_nowait(payload or encode_ready_response(ready_response(self.engine_index)))

    def connect(self, addresses: EngineAddresses) -> None:
        """Connect to the input and output socket."""
        self.input.connect(addresses.inputs[0])
        self.output.connect(addresses.outputs[0])

    def subscribe(self, addresses: EngineAddresses) -> None:
        """Connect to the coordinator, and subscribe to what it says."""
        assert addresses.coordinator_input is not None
        assert addresses.coordinator_output is not None
        self.broadcasts.connect(addresses.coordinator_input)
        self.broadcasts.send_nowait([SUBSCRIBE])
        self.notices.connect(addresses.coordinator_output)

    def say_ready(self) -> None:
        """Say READY and leave the handshake."""
        self.say(READY)
        self.handshake.close()

    def die(self) -> None:
        """Close all connections."""
        for socket in (self.handshake, self.input, self.output, self.broadcasts, self.notices):
            socket.close()

    async def start(self) -> RawEngine:
        """The whole startup."""
        self.register(await self.say_hello())
        self.say_ready()
        return self


@attrs.define
class RawFrontend:
    """A frontend that sends each message of the startup when it is told to."""

    context: ZmqContext
    handshake: ZmqSocket
    inputs: list[ZmqSocket]
    outputs: list[ZmqSocket]

    @classmethod
    def bind(cls, context: ZmqContext, folder: Path, clients: int = 1) -> RawFrontend:
        """Bind everything below ``folder``."""
        handshake = context.socket(SocketType.ROUTER)
        handshake.bind(f"ipc://{folder}/handshake")
        inputs = [context.socket(SocketType.ROUTER) for _ in range(clients)]
        outputs = [context.socket(SocketType.PULL) for _ in range(clients)]
        for number in range(clients):
            inputs[number].bind(f"ipc://{folder}/input{number}")
            outputs[number].bind(f"ipc://{folder}/output{number}")
        return cls(context, handshake, inputs, outputs)

    @property
    def addresses(self) -> EngineAddresses:
        """What belongs into INIT."""
        return EngineAddresses(
            inputs=[socket.address for socket in self.inputs],
            outputs=[socket.address for socket in self.outputs],
        )

    def init(self, **addresses: Any) -> HandshakeInit:
        """The answer to HELLO."""
        return HandshakeInit(addresses=attrs.evolve(self.addresses, **addresses))

    def close(self) -> None:
        """Close everything."""
        for socket in (self.handshake, *self.inputs, *self.outputs):
            socket.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until ``condition`` holds."""
    while True:
        await trio.lowlevel.checkpoint()
        if condition():
            return


@asynccontextmanager
async def beside(task: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run ``task`` once everything else waits, while the block runs."""

    async def run() -> None:
        await trio.testing.wait_all_tasks_blocked()
        await task()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield
        nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class _CancelAt(trio.abc.Instrument):
    """Cancels ``scope`` when ``task`` is about to take its step with this number."""

    task: trio.lowlevel.Task
    scope: trio.CancelScope
    steps_left: int

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps_left -= 1
            if self.steps_left == 0:
                self.scope.cancel()


async def cancel_everywhere(run: Callable[[], Awaitable[object]], limit: float = 60) -> int:
    """Run something again and again, each time cancelled one step of its task later.

    Checks that nothing of it is left behind. Returns how many steps there were.
    """
    step = 0
    with trio.fail_after(limit):
        while True:
            step += 1
            before = footprint()
            with trio.CancelScope() as scope:
                instrument = _CancelAt(trio.lowlevel.current_task(), scope, step)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await run()
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            with trio.move_on_after(1):  # a thread that was joined may still be listed
                while is_more(footprint(), before):  # noqa: ASYNC110  (nobody tells)
                    await trio.sleep(0.001)
            assert not is_more(footprint(), before), f"step {step} left something behind"
            if instrument.steps_left > 0:
                return step - 1


def footprint() -> tuple[int, int, int]:
    """Open descriptors, ØMQ's threads, and tasks."""
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    threads = sum(name.startswith("ZMQbg") for name in own_threads())
    return descriptors, threads, task_count()


def is_more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    """Whether there is more of anything."""
    return any(a > b for a, b in zip(now, before, strict=True))


def task_count() -> int:
    """How many tasks there are."""
    return trio.lowlevel.current_statistics().tasks_living


@contextmanager
def listening_socket(family: int, address: object) -> Iterator[stdlib_socket.socket]:
    """A socket of the operating system that listens."""
    with stdlib_socket.socket(family) as listener:
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen()
        yield listener
