"""The frontend's end: bind the sockets, see the engines through their startup, hand out channels.

Mirrors ``vllm/v1/engine/core_client.py`` (``MPClient.__init__``) and
``engine-core-client/src/transport.rs``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import attrs
import trio
import zmq

from trio_vllm.protocol import (
    EngineAddresses,
    EngineCoreReadyResponse,
    HandshakeInit,
    encode_init,
)
from trio_vllm.transport._channels import FrameReceiver, FrameSender
from trio_vllm.transport._connections import EngineConnections
from trio_vllm.transport._context import SocketType, ZmqContext, open_context
from trio_vllm.transport._frontend_startup import StartupRun
from trio_vllm.transport._modes import Bootstrapped, HandshakeOwner
from trio_vllm.transport._socket import ZmqSocket

REQUEST_LINGER = 0.5
"""Seconds for the last aborts to get out; an engine whose frontend is gone works on otherwise."""

VANISHED_HOST_TIMEOUT = 30
"""Seconds after which the connection to a host counts as broken that answers TCP no more."""

KEEPALIVE: dict[int, int | bytes] = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: VANISHED_HOST_TIMEOUT // 3,
    zmq.TCP_KEEPALIVE_INTVL: VANISHED_HOST_TIMEOUT // 6,
    zmq.TCP_KEEPALIVE_CNT: 4,
    # The same while something is under way, when keepalive is silent.
    zmq.TCP_MAXRT: VANISHED_HOST_TIMEOUT * 1000,
}


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
        requests.set_options({**KEEPALIVE, **_heartbeats(mode.heartbeat_timeout)})
        connections = EngineConnections(context.open_monitor(requests))
        outputs = context.socket(SocketType.PULL)
        outputs.set_options(KEEPALIVE)
        handshake = _bind(mode, context, requests, outputs)
        run = StartupRun(
            mode.engine_indices,
            timeout=mode.ready_timeout,
            requests=requests,
            connections=connections,
            handshake=handshake,
        )
        responses = await run.wait()
        if handshake is not None:
            handshake[0].close()
        yield EngineLinks(
            requests.address, outputs.address, responses, requests, outputs, connections
        )


def _bind(
    mode: HandshakeOwner | Bootstrapped,
    context: ZmqContext,
    requests: ZmqSocket,
    outputs: ZmqSocket,
) -> tuple[ZmqSocket, EngineConnections, bytes] | None:
    """Bind what belongs to us; give what `StartupRun` must know of the handshake, if it is ours."""
    if isinstance(mode, Bootstrapped):
        requests.bind(mode.input_address, listener=mode.input_listener)
        outputs.bind(mode.output_address, listener=mode.output_listener)
        return None
    any_port = f"tcp://{_bracketed(mode.host)}:0"
    addresses = EngineAddresses(
        inputs=[requests.bind(mode.input_address or any_port)],
        outputs=[outputs.bind(mode.output_address or any_port)],
    )
    handshake = context.socket(SocketType.ROUTER)
    handshake.set_options(KEEPALIVE)
    connections = EngineConnections(context.open_monitor(handshake))
    handshake.bind(mode.handshake_address)
    return handshake, connections, encode_init(HandshakeInit(addresses=addresses))


def _heartbeats(timeout: float) -> dict[int, int | bytes]:
    """Options that break the connection to who has been silent for so many seconds."""
    if timeout == math.inf:
        return {}
    half = max(round(timeout * 500), 1)  # milliseconds: of sending one, and of waiting for it
    return {zmq.HEARTBEAT_IVL: half, zmq.HEARTBEAT_TIMEOUT: half}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
