"""`join_frontend`: connects an engine to a frontend, by the startup handshake.

Mirrors ``vllm/v1/engine/core.py`` (``startup_handshake``, ``process_input_sockets``) and
``engine-core-client/src/mock_engine.rs``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import trio
import zmq

from trio_vllm.concurrency import running
from trio_vllm.errors import ConfigurationError, DecodeError, StartupError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    SUBSCRIBE,
    Buffer,
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineId,
    Frames,
    HandshakeInit,
    HandshakeReport,
    HandshakeStatus,
    decode_init,
    encode_ready_response,
    encode_report,
)
from trio_vllm.transport.channels import (
    CoordinatorChannels,
    FrontendChannels,
    FrontendDisconnect,
)
from trio_vllm.transport.descriptors import PER_SOCKET
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, heartbeat_options, open_context
from trio_vllm.transport.zmq_monitor import OutgoingConnection, set_linger
from trio_vllm.transport.zmq_socket import ZmqSocket
from trio_vllm.values import frozen

T = TypeVar("T")

OUTPUT_BYTES = 1 << 18
"""Bytes of outputs, if their number is bounded, that may wait in ØMQ for a client that is slow. It may
take milliseconds for a few kilobytes, and what is new comes behind them."""
BUFFERED_BYTES = 1 << 19
"""Bytes of them that may wait in the operating system, which would take megabytes."""

DESCRIPTORS_PER_ENGINE = 2 * (PER_SOCKET + 1)
"""File descriptors of an engine that has joined a frontend of one client: two connections, and the
sockets that they belong to."""


def descriptors_per_engine(addresses: EngineAddresses) -> int:
    """File descriptors that an engine takes which joins a frontend with these addresses.

    For each client, and for the coordinator, they are those of `DESCRIPTORS_PER_ENGINE`.
    """
    has_coordinator = addresses.coordinator_input is not None
    return DESCRIPTORS_PER_ENGINE * (len(addresses.inputs) + has_coordinator)


@frozen(kw_only=True)
class EngineLingers:
    """Seconds that last messages get to go out when an engine leaves."""

    ready: float = 1.0
    """For READY, the last one of the handshake."""
    outputs: float = 4.0
    """For outputs, as upstream has it; none for those of a client that is gone."""


@asynccontextmanager
async def join_frontend(
    handshake_address: str,
    *,
    engine_index: int,
    ready_response: Callable[[HandshakeInit], EngineCoreReadyResponse],
    loading_time: float = 0.0,
    timeout: float = math.inf,
    heartbeat_timeout: float = math.inf,
    output_high_water_mark: int = 0,
    lingers: EngineLingers | None = None,
) -> AsyncIterator[FrontendChannels]:
    """Report to a frontend as one engine; the block's value is the way to it.

    Args:
      handshake_address: Where the frontend waits, or will wait, for engines.
      engine_index: Which engine we are.
      ready_response: What to tell of ourselves, given the frontend's INIT.
      loading_time: Seconds from INIT to the registration, in which a real engine loads its model.
      timeout: Seconds that each answer of the frontend may take.
      heartbeat_timeout: Seconds after which a client or a coordinator that does not answer ZeroMQ's
        heartbeats counts as gone.
      output_high_water_mark: Outputs that a client may be behind before sending waits; 0 is any
        number, as upstream has it.
      lingers: How long leaving the block may wait for last messages to get out.

    Raises:
      StartupError: The frontend has not answered in time, has left, or sent what cannot be used.
      ConfigurationError: ``handshake_address`` is unusable.
    """
    async with open_context() as context:
        heartbeats = heartbeat_options(heartbeat_timeout)
        lingers = lingers or EngineLingers()
        joining = _Joining(context, EngineId.of(engine_index), timeout, heartbeats, lingers)
        handshake = joining.report_to(handshake_address)
        init = await joining.receive_init()
        await joining.load(loading_time)
        async with _registering(init.addresses):
            joining.register(init.addresses.inputs, encode_ready_response(ready_response(init)))
            joining.open_outputs(init.addresses.outputs, output_high_water_mark)
            coordinator = await joining.wait_coordinator_ready(init.addresses)
            set_linger(handshake, lingers.ready)
            handshake.send_nowait(encode_report(HandshakeReport(status=HandshakeStatus.READY)))
            await joining.wait_registered()
            joining.leave_handshake()
        try:
            async with joining.disconnects() as disconnects:
                yield FrontendChannels(
                    joining.inputs,
                    joining.outputs,
                    disconnects,
                    coordinator,
                    joining.close_inputs,
                    joining.close_outputs,
                )
        finally:
            joining.skip_linger_of_lost_clients()


REGISTERING_AT_ONCE = 256
"""Engines of one process that may have the connections of the handshake and the others at a time."""

_slots: trio.lowlevel.RunVar[trio.Semaphore] = trio.lowlevel.RunVar("registration slots")


@asynccontextmanager
async def _registering(addresses: EngineAddresses) -> AsyncIterator[None]:
    """Let only some engines register at a time: each needs more descriptors meanwhile than after.

    Not if there is a coordinator, where each waits for all others.
    """
    if addresses.coordinator_input is not None:
        await trio.lowlevel.checkpoint()
        yield
        return
    try:
        slots = _slots.get()
    except LookupError:
        _slots.set(slots := trio.Semaphore(REGISTERING_AT_ONCE))
    async with slots:
        yield


class _Joining:
    """The steps of an engine's startup, in order."""

    def __init__(
        self,
        context: ZmqContext,
        engine_id: EngineId,
        timeout: float,
        options: Mapping[int, int | bytes],
        lingers: EngineLingers,
    ) -> None:
        self._lingers = lingers
        self._options = options
        self._context = context
        self._engine_id = engine_id
        self._timeout = timeout
        self.inputs: list[ZmqSocket] = []
        self.outputs: list[ZmqSocket] = []
        self._input_connections: list[OutgoingConnection] = []
        self._output_connections: list[OutgoingConnection] = []
        self._coordinator_connections: list[OutgoingConnection] = []

    def report_to(self, address: str) -> ZmqSocket:
        """Say HELLO."""
        handshake = self._context.socket(
            SocketType.DEALER, identity=self._engine_id, linger=self._lingers.ready
        )
        handshake.set_options(self._options)
        # Until READY is sent, leaving has nothing to wait for; the frontend may not even exist yet.
        set_linger(handshake, 0)
        self._handshake = handshake
        self._frontend = OutgoingConnection(address, self._context.open_monitor(handshake))
        handshake.connect(address)
        handshake.send_nowait(encode_report(HandshakeReport(status=HandshakeStatus.HELLO)))
        return handshake

    async def receive_init(self) -> HandshakeInit:
        """Wait for the answer to HELLO."""
        phase = f"INIT from the frontend at {self._frontend.address}"
        return read_init(await self._answer(phase, self._handshake.receive), phase)

    async def load(self, seconds: float) -> None:
        """Let time pass, unless the frontend leaves meanwhile."""
        await trio.lowlevel.checkpoint()
        if not seconds:
            return
        with trio.move_on_after(seconds):
            await self._frontend.wait_lost()
            raise StartupError("its model to load", notes=[self._frontend.state])

    def register(self, addresses: Sequence[str], response: Sequence[Buffer]) -> None:
        """Connect to each client's input address, and say there who we are."""
        for address in addresses:
            socket = self._context.socket(SocketType.DEALER, identity=self._engine_id)
            self._input_connections.append(self._connect(socket, address))
            socket.send_nowait(response)
            self.inputs.append(socket)

    def open_outputs(self, addresses: Sequence[str], high_water_mark: int) -> None:
        """Connect to each client's output address."""
        for address in addresses:
            socket, connection = self._push(address, high_water_mark)
            self.outputs.append(socket)
            self._output_connections.append(connection)

    def _push(self, address: str, high_water_mark: int = 0) -> tuple[ZmqSocket, OutgoingConnection]:
        socket = self._context.socket(
            SocketType.PUSH,
            linger=self._lingers.outputs,
            send_high_water_mark=high_water_mark,
            send_budget=OUTPUT_BYTES if high_water_mark else None,
        )
        if high_water_mark:
            socket.set_options({zmq.SNDBUF: BUFFERED_BYTES})
        return socket, self._connect(socket, address)

    def _connect(self, socket: ZmqSocket, address: str) -> OutgoingConnection:
        connection = OutgoingConnection(address, self._context.open_monitor(socket))
        socket.set_options(self._options)
        try:
            socket.connect(address)
        except ConfigurationError as error:
            raise StartupError("the connection to the frontend", notes=[str(error)]) from error
        return connection

    async def wait_coordinator_ready(
        self, addresses: EngineAddresses
    ) -> CoordinatorChannels | None:
        """Subscribe at the coordinator, if there is one, and wait until every engine has."""
        await trio.lowlevel.checkpoint()
        if addresses.coordinator_input is None or addresses.coordinator_output is None:
            return None
        broadcasts = self._context.socket(SocketType.XSUB, identity=self._engine_id)
        connection = self._connect(broadcasts, addresses.coordinator_input)
        broadcasts.send_nowait([SUBSCRIBE])

        async def ready() -> None:
            while await broadcasts.receive() != [COORDINATOR_READY]:
                pass

        await self._answer(f"READY from the coordinator at {connection.address}", ready)
        notices, notice_connection = self._push(addresses.coordinator_output)
        self._coordinator_connections = [connection, notice_connection]
        return CoordinatorChannels(broadcasts, notices)

    async def wait_registered(self) -> None:
        """Wait until the connections for the registrations are open.

        Upstream's engines do not wait; but a connection that never was open cannot be seen to break.
        The handshake may well be closed by now. If it opens again, that is another frontend, and the
        one that we wait for is gone.
        """
        await trio.lowlevel.checkpoint()
        for connection in self._input_connections:
            await self._answer(
                "the connection to the frontend's input socket",
                connection.wait_open,
                awaited=connection,
                departure=self._frontend.wait_reopened,
            )

    @asynccontextmanager
    async def disconnects(self) -> AsyncIterator[trio.abc.ReceiveChannel[FrontendDisconnect]]:
        """Give the connections that break while the block runs."""
        send, receive = trio.open_memory_channel[FrontendDisconnect](math.inf)

        async def watch(client_index: int | None, connection: OutgoingConnection) -> None:
            try:
                await connection.wait_lost()
            except trio.EndOfChannel:  # closed by us
                return  # noqa: ASYNC910
            send.send_nowait(FrontendDisconnect(connection.address, client_index))

        watched: list[tuple[int | None, OutgoingConnection]] = [
            *enumerate(self._input_connections),
            *enumerate(self._output_connections),
            *((None, connection) for connection in self._coordinator_connections),
        ]
        async with running(*(partial(watch, *one) for one in watched)):
            yield receive

    def leave_handshake(self) -> None:
        """Close the handshake's connection, and what watches it; READY still gets out."""
        self._frontend.close()
        self._handshake.close()

    def close_inputs(self) -> None:
        """Hang up on all clients where requests come from."""
        for socket in self.inputs:
            socket.close()

    def close_outputs(self) -> None:
        """Hang up on all clients where outputs go; what was sent still gets out."""
        for socket in self.outputs:
            socket.close()

    def skip_linger_of_lost_clients(self) -> None:
        """Do not wait for last outputs to reach clients that are gone."""
        # ØMQ tells of the breaks one by one, so a client may have lost but one of two so far.
        of_clients = zip(self._input_connections, self._output_connections, strict=True)
        for output, connections in zip(self.outputs, of_clients, strict=True):
            # Once closed, a socket takes no options any more.
            if not output.is_closed and any(connection.is_lost for connection in connections):
                set_linger(output, 0)

    async def _answer(
        self,
        phase: str,
        receive: Callable[[], Awaitable[T]],
        *,
        awaited: OutgoingConnection | None = None,
        departure: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """What ``receive`` gives; it may not take too long, nor the frontend leave meanwhile.

        Args:
          phase: What to call it.
          receive: Waits for it.
          awaited: The connection that it comes by, if not that of the handshake.
          departure: Waits for the frontend to leave; by default until the handshake's breaks.
        """
        frontend = self._frontend
        wait_left = departure or frontend.wait_lost
        answers: list[T] = []

        async def watch() -> None:
            await wait_left()
            nursery.cancel_scope.cancel(reason="the frontend left")

        with trio.move_on_after(self._timeout) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                answers.append(await receive())
                nursery.cancel_scope.cancel(reason="the frontend answered")
        if answers:
            return answers[0]
        if patience.cancelled_caught:
            notes = [(awaited or frontend).state]
            raise StartupError(phase, seconds=self._timeout, notes=notes)
        raise StartupError(phase, notes=[frontend.state])


def read_init(frames: Frames, phase: str) -> HandshakeInit:
    """Read the answer to HELLO; `StartupError` if it cannot be used."""
    if len(frames) != 1:
        raise StartupError(phase, notes=[f"it has {len(frames)} frames"])
    try:
        init = decode_init(frames)
    except DecodeError as error:
        raise StartupError(phase, notes=[str(error)]) from error
    addresses = init.addresses
    if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
        counts = f"{len(addresses.inputs)} input and {len(addresses.outputs)} output addresses"
        raise StartupError(phase, notes=[f"it has {counts}"])
    if (addresses.coordinator_input is None) != (addresses.coordinator_output is None):
        raise StartupError(phase, notes=["it has one coordinator address only"])
    return init
