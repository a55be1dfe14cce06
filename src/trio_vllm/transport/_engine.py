"""The engine's end: join a frontend that owns the handshake.

Mirrors ``vllm/v1/engine/core.py`` (``startup_handshake``, ``process_input_sockets``) and
``engine-core-client/src/mock_engine.rs``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import attrs
import trio

from trio_vllm._errors import DecodeError, StartupError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    SUBSCRIBE,
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineId,
    HandshakeInit,
    HandshakeReport,
    HandshakeStatus,
    decode_init,
    encode_ready_response,
    encode_report,
)
from trio_vllm.transport._channels import FrameReceiver, FrameSender
from trio_vllm.transport._context import SocketType, ZmqContext, open_context
from trio_vllm.transport._monitor import PeerEventKind, PeerMonitor
from trio_vllm.transport._socket import ZmqSocket

T = TypeVar("T")

HANDSHAKE_LINGER = 5.0
OUTPUT_LINGER = 4.0
"""Seconds for the last messages to get out, upstream's own."""


@attrs.frozen
class FrontendLoss:
    """Tells that a client of the frontend, or its whole process, is gone."""

    address: str
    _monitor: PeerMonitor

    async def wait(self) -> None:
        """Wait for the connection to break."""
        await _disconnected(self._monitor)


@attrs.frozen
class CoordinatorLinks:
    """The connections to a data-parallel coordinator."""

    broadcasts: FrameReceiver
    notices: FrameSender


@attrs.frozen
class FrontendLinks:
    """What an engine needs of the frontend it has joined."""

    inputs: Sequence[FrameReceiver]
    """One per client of the frontend."""
    outputs: Sequence[FrameSender]
    """One per client; a message goes to the one with the request's ``client_index``."""
    losses: Sequence[FrontendLoss]
    """One per client."""
    coordinator: CoordinatorLinks | None


@asynccontextmanager
async def join_frontend(
    handshake_address: str,
    *,
    engine_index: int,
    ready_response: Callable[[HandshakeInit], EngineCoreReadyResponse],
    timeout: float = math.inf,
    output_high_water_mark: int = 0,
) -> AsyncIterator[FrontendLinks]:
    """Report to a frontend as one engine; the block's value is the way to it.

    Args:
      handshake_address: Where the frontend waits, or will wait, for engines.
      engine_index: Which engine we are.
      ready_response: What to tell of ourselves, given the frontend's INIT.
      timeout: Seconds that each answer of the frontend may take.
      output_high_water_mark: Outputs that a client may be behind before sending waits; 0 is any
        number, as upstream has it.

    Raises:
      StartupError: The frontend has not answered in time, has left, or sent what cannot be used.
      ConfigurationError: An address is unusable.
    """
    engine_id = EngineId.of(engine_index)
    async with open_context() as context:
        handshake = context.socket(SocketType.DEALER, identity=engine_id, linger=HANDSHAKE_LINGER)
        monitor = context.open_monitor(handshake)
        handshake.connect(handshake_address)
        handshake.send_nowait([encode_report(HandshakeReport(status=HandshakeStatus.HELLO))])
        phase = f"INIT from the frontend at {handshake_address}"
        init = _read_init(await _answer(phase, timeout, monitor, handshake.receive), phase)
        response = encode_ready_response(ready_response(init))
        connections = _Connections(context, engine_id)
        inputs, losses = connections.register(init.addresses.inputs, response)
        outputs = connections.open_outputs(init.addresses.outputs, output_high_water_mark)
        coordinator = await connections.pass_gate(init.addresses, timeout, monitor)
        handshake.send_nowait([encode_report(HandshakeReport(status=HandshakeStatus.READY))])
        handshake.close()
        yield FrontendLinks(inputs, outputs, losses, coordinator)


def _read_init(frames: list[bytes], phase: str) -> HandshakeInit:
    try:
        init = decode_init(frames[0])
    except DecodeError as error:
        raise StartupError(phase, notes=[str(error)]) from error
    addresses = init.addresses
    if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
        counts = f"{len(addresses.inputs)} input and {len(addresses.outputs)} output addresses"
        raise StartupError(phase, notes=[f"it has {counts}"])
    if (addresses.coordinator_input is None) != (addresses.coordinator_output is None):
        raise StartupError(phase, notes=["it has one coordinator address only"])
    return init


@attrs.frozen
class _Connections:
    """Connects an engine to the addresses of an INIT."""

    _context: ZmqContext
    _engine_id: EngineId

    def register(
        self, addresses: Sequence[str], response: bytes
    ) -> tuple[list[ZmqSocket], list[FrontendLoss]]:
        """Connect to each client's input address, and say there who we are."""
        inputs, losses = [], []
        for address in addresses:
            socket = self._context.socket(SocketType.DEALER, identity=self._engine_id)
            losses.append(FrontendLoss(address, self._context.open_monitor(socket)))
            socket.connect(address)
            socket.send_nowait([response])
            inputs.append(socket)
        return inputs, losses

    def open_outputs(self, addresses: Sequence[str], high_water_mark: int) -> list[ZmqSocket]:
        """Connect to each client's output address."""
        return [self._push(address, high_water_mark) for address in addresses]

    def _push(self, address: str, high_water_mark: int = 0) -> ZmqSocket:
        socket = self._context.socket(
            SocketType.PUSH, linger=OUTPUT_LINGER, send_high_water_mark=high_water_mark
        )
        socket.connect(address)
        return socket

    async def pass_gate(
        self, addresses: EngineAddresses, timeout: float, monitor: PeerMonitor
    ) -> CoordinatorLinks | None:
        """Subscribe at the coordinator, if there is one, and wait until every engine has."""
        if addresses.coordinator_input is None or addresses.coordinator_output is None:
            return None
        broadcasts = self._context.socket(SocketType.XSUB, identity=self._engine_id)
        broadcasts.connect(addresses.coordinator_input)
        broadcasts.send_nowait([SUBSCRIBE])

        async def ready() -> None:
            while await broadcasts.receive() != [COORDINATOR_READY]:
                pass

        await _answer("READY from the coordinator", timeout, monitor, ready)
        return CoordinatorLinks(broadcasts, self._push(addresses.coordinator_output))


async def _answer(
    phase: str, timeout: float, monitor: PeerMonitor, receive: Callable[[], Awaitable[T]]
) -> T:
    """What ``receive`` gives; it may not take too long, nor the frontend leave meanwhile."""
    answers: list[T] = []
    lost = False

    async def watch() -> None:
        nonlocal lost
        await _disconnected(monitor)
        lost = True
        nursery.cancel_scope.cancel(reason="the frontend left")

    with trio.move_on_after(timeout):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            answers.append(await receive())
            nursery.cancel_scope.cancel(reason="the frontend answered")
    if answers:
        return answers[0]
    raise StartupError(
        phase, seconds=0 if lost else timeout, notes=["the frontend left"] if lost else []
    )


async def _disconnected(monitor: PeerMonitor) -> None:
    while (await monitor.receive()).kind is not PeerEventKind.DISCONNECTED:
        pass
