"""The frontend's end: bind the sockets, see the engines through their startup, hand out channels.

Mirrors ``vllm/v1/engine/utils.py::wait_for_engine_startup`` and
``engine-core-client/src/transport.rs``; what has to happen in which order is in
`trio_vllm.protocol.FrontendStartup`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import attrs
import trio

from trio_vllm._background import running
from trio_vllm._errors import ConfigurationError, PeerGoneError, StartupError
from trio_vllm.protocol import (
    MAX_ENGINES,
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineId,
    FrontendStartup,
    HandshakeInit,
    encode_init,
)
from trio_vllm.transport._channels import FrameReceiver, FrameSender
from trio_vllm.transport._context import SocketType, open_context
from trio_vllm.transport._monitor import PeerEventKind, PeerMonitor
from trio_vllm.transport._socket import ZmqSocket

_log = logging.getLogger("trio_vllm.transport")

REQUEST_LINGER = 0.5
"""Seconds for the last aborts to get out; an engine whose frontend is gone works on otherwise."""

SETTLING_TIME = 0.1
"""Seconds from the end of a handshake connection until an engine counts as lost: its READY, sent
just before, may not have been read yet."""


@attrs.frozen(kw_only=True)
class HandshakeOwner:
    """We own the startup handshake and choose the addresses."""

    handshake_address: str
    """Where engines report, such as ``tcp://127.0.0.1:29550``; bound by us."""
    engine_count: int = 1
    """Engines 0 to ``engine_count - 1`` are expected."""
    host: str = "127.0.0.1"
    """The interface for requests and outputs, as engines can reach it."""
    ready_timeout: float = 600.0
    """Seconds that the next message of the startup may take; loading weights counts."""

    def __attrs_post_init__(self) -> None:
        _check_engines(0, self.engine_count, MAX_ENGINES)

    @property
    def engine_indices(self) -> range:
        """The expected engines."""
        return range(self.engine_count)


@attrs.frozen(kw_only=True)
class Bootstrapped:
    """A supervisor does the handshake, chose the addresses and starts the engines.

    The addresses are bound by us, or by the supervisor, who then passes on the descriptors of its
    listening sockets (their ownership too).
    """

    input_address: str
    output_address: str
    input_listener: int | None = None
    output_listener: int | None = None
    engine_start_index: int = 0
    engine_count: int = 1
    data_parallel_size: int | None = None
    """Engines of the whole deployment, if this frontend has only some of them."""
    ready_timeout: float = 600.0
    """Seconds that the next registration may take."""

    def __attrs_post_init__(self) -> None:
        size = MAX_ENGINES if self.data_parallel_size is None else self.data_parallel_size
        _check_engines(self.engine_start_index, self.engine_count, min(size, MAX_ENGINES))

    @property
    def engine_indices(self) -> range:
        """The expected engines."""
        return range(self.engine_start_index, self.engine_start_index + self.engine_count)


def _check_engines(start: int, count: int, limit: int) -> None:
    if start < 0 or count < 1 or start + count > limit:
        raise ConfigurationError(
            f"{count} engines from index {start} do not fit: there must be one at least, and the"
            f" indices must lie between 0 and {limit - 1}"
        )


@attrs.frozen
class EngineLinks:
    """What a client needs of its connected engines."""

    input_address: str
    output_address: str
    ready_responses: Mapping[int, EngineCoreReadyResponse]
    """What each engine told of itself, by engine index."""
    requests: FrameSender
    """Messages to engines; the first frame is the engine id. Never blocks."""
    outputs: FrameReceiver
    """Messages of all engines."""
    losses: trio.abc.ReceiveChannel[int]
    """The index of each engine whose connection breaks."""


@asynccontextmanager
async def open_frontend(mode: HandshakeOwner | Bootstrapped) -> AsyncIterator[EngineLinks]:
    """Bind, wait for the engines to start, and give the channels to them.

    Raises:
      ConfigurationError: An address is unusable; `AddressInUseError` if somebody else has it.
      StartupError: An expected engine has not come as far as it must in ``ready_timeout`` seconds.
    """
    async with open_context(io_threads=2) as context:
        requests = context.socket(SocketType.ROUTER, linger=REQUEST_LINGER)
        outputs = context.socket(SocketType.PULL)
        losses = _Losses(context.open_monitor(requests))
        startup = _Startup(mode, requests, losses)
        if isinstance(mode, HandshakeOwner):
            requests.bind(f"tcp://{_bracketed(mode.host)}:0")
            outputs.bind(f"tcp://{_bracketed(mode.host)}:0")
            handshake = context.socket(SocketType.ROUTER)
            monitor = context.open_monitor(handshake)
            handshake.bind(mode.handshake_address)
            await startup.run_handshake(handshake, monitor, outputs.address)
            handshake.close()
        else:
            requests.bind(mode.input_address, listener=mode.input_listener)
            outputs.bind(mode.output_address, listener=mode.output_listener)
            await startup.run()
        responses = startup.machine.ready_responses
        yield EngineLinks(requests.address, outputs.address, responses, requests, outputs, losses)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class _Losses(trio.abc.ReceiveChannel[int]):
    """The engines whose connection to the input socket breaks.

    ØMQ tells only the descriptor of a broken connection, so each engine's is kept from the message
    by which it registered. The number may be given to another connection afterwards, so it is
    forgotten with the loss.
    """

    def __init__(self, monitor: PeerMonitor) -> None:
        self._monitor = monitor
        self._engine_of: dict[int, int] = {}

    def watch(self, engine_index: int, descriptor: int) -> None:
        """This engine's connection has this descriptor."""
        self._engine_of[descriptor] = engine_index

    async def receive(self) -> int:
        """Wait for the next loss; gives the engine's index. Cancelling loses none."""
        while True:
            event = await self._monitor.receive()
            if event.kind is PeerEventKind.DISCONNECTED and event.descriptor in self._engine_of:
                return self._engine_of.pop(event.descriptor)

    async def aclose(self) -> None:
        """Watch no longer."""
        await self._monitor.aclose()


class _Startup:
    """Runs the state machine: carries messages to it and its answers back, and keeps the time."""

    def __init__(
        self, mode: HandshakeOwner | Bootstrapped, requests: ZmqSocket, losses: _Losses
    ) -> None:
        handshake = isinstance(mode, HandshakeOwner)
        self.machine = FrontendStartup(mode.engine_indices, handshake=handshake)
        self._timeout = mode.ready_timeout
        self._requests = requests
        self._losses = losses
        self._patience = trio.CancelScope()
        self._done = trio.Event()
        self._notes_logged = 0
        self._steps_missing = math.inf

    async def run(self, *pumps: Callable[[], Awaitable[None]]) -> None:
        """Wait for the registrations, and for what ``pumps`` bring."""
        self._log_progress()
        with self._patience:
            async with running(self._take_registrations, self._take_losses, *pumps):
                await self._done.wait()
        phase = self.machine.phase
        if phase is not None:
            missing = self.machine.missing(phase)
            raise StartupError(phase.value, missing, self._timeout, list(self.machine.notes))

    async def run_handshake(
        self, handshake: ZmqSocket, monitor: PeerMonitor, output_address: str
    ) -> None:
        """Wait for the whole startup."""
        addresses = EngineAddresses(inputs=[self._requests.address], outputs=[output_address])
        init = encode_init(HandshakeInit(addresses=addresses))
        reported: dict[int, EngineId] = {}

        async def take_reports() -> None:
            while True:
                frames, descriptor = await handshake.receive_with_descriptor()
                if engine_id := self.machine.receive_report(frames):
                    reported[descriptor] = engine_id
                    # An engine that left in the meantime is news of the monitor.
                    with suppress(PeerGoneError):
                        handshake.send_nowait([engine_id, init])
                self._log_progress()

        async def watch_peers() -> None:
            while True:
                event = await monitor.receive()
                if event.kind is PeerEventKind.HANDSHAKE_FAILED:
                    self.machine.note("a peer on the handshake socket does not speak ZeroMQ")
                elif event.kind is PeerEventKind.DISCONNECTED and event.descriptor in reported:
                    await trio.sleep(SETTLING_TIME)
                    self.machine.lose_handshake(reported.pop(event.descriptor).engine_index)
                self._log_progress()

        await self.run(take_reports, watch_peers)

    async def _take_registrations(self) -> None:
        while True:
            frames, descriptor = await self._requests.receive_with_descriptor()
            engine_index = self.machine.receive_registration(frames)
            if engine_index is not None:
                self._losses.watch(engine_index, descriptor)
            self._log_progress()

    async def _take_losses(self) -> None:
        while True:
            self.machine.lose(await self._losses.receive())
            self._log_progress()

    def _log_progress(self) -> None:
        """Note where the startup stands; what brought it forward gives the next message its time."""
        for note in self.machine.notes[self._notes_logged :]:
            _log.warning("%s", note)
        self._notes_logged = len(self.machine.notes)
        phase = self.machine.phase
        if phase is None:
            self._done.set()
            return
        steps = self.machine.steps_missing
        if steps < self._steps_missing:
            self._patience.deadline = trio.current_time() + self._timeout
            _log.info("waiting for %s of engines %s", phase.value, self.machine.missing(phase))
        self._steps_missing = steps
