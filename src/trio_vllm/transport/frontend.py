"""How a frontend comes by its engines: what there is to choose, checked before a socket opens."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import zmq

from trio_vllm.errors import ConfigurationError
from trio_vllm.protocol import (
    MAX_ENGINES,
    SUBSCRIBE,
    CodecError,
    EngineAddresses,
    EngineCoreReadyResponse,
    HandshakeInit,
    encode_init,
)
from trio_vllm.transport.channels import FrameReceiver, FrameSender, LabelledFrameReceiver
from trio_vllm.transport.frontend_startup import Handshake, StartupRun
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context
from trio_vllm.transport.zmq_monitor import EngineConnections
from trio_vllm.transport.zmq_socket import ZmqSocket

# MERGED transport/_frontend: The frontend's end: bind the sockets, see the engines through their startup, hand out channels.
#
# Mirrors ``vllm/v1/engine/core_client.py`` (``MPClient.__init__``) and
# ``engine-core-client/src/transport.rs``.


@attrs.frozen(kw_only=True)
class HandshakeOwner:
    """We own the startup handshake and choose the addresses."""

    handshake_address: str
    """Where engines report, such as ``tcp://127.0.0.1:29550``; bound by us."""
    engine_count: int = 1
    """Engines 0 to ``engine_count - 1`` are expected."""
    host: str = "127.0.0.1"
    """The interface for requests and outputs, as engines can reach it."""
    input_address: str | None = None
    output_address: str | None = None
    """Where to bind for requests and outputs, instead of any port of ``host``; ``ipc://`` maybe."""
    coordinator: bool = False
    """Whether to lead the engines through their waves. Engines that run in lockstep, as those of
    mixture-of-experts models do, need it."""
    parallel_config: Mapping[str, int | str | list[int]] = attrs.field(factory=dict)
    """Settings that the engines take over from us. Needed if engines in lockstep are started by
    several commands: they must meet somewhere, see `HandshakeInit`."""
    ready_timeout: float = 600.0
    """Seconds that the next message of the startup may take; loading weights counts."""
    heartbeat_timeout: float = math.inf
    """Seconds after which an engine that does not answer ZeroMQ's heartbeats counts as lost.

    A real engine answers them even while it computes, and no longer when its process or its host
    is frozen. A host that vanishes is noticed without this after `VANISHED_HOST_TIMEOUT`. Leave it
    off for engines that use the zmq.rs library (upstream's Rust mock engine): it breaks the
    connection when it sees a heartbeat.
    """

    def __attrs_post_init__(self) -> None:
        _check_engines(0, self.engine_count, MAX_ENGINES)
        _check_settings(self.parallel_config)
        _check_seconds("ready_timeout", self.ready_timeout)
        _check_seconds("heartbeat_timeout", self.heartbeat_timeout)

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
    coordinator_address: str | None = None
    """Where the supervisor's coordinator publishes; an address that the engines tell comes first."""
    ready_timeout: float = 600.0
    """Seconds that the next registration may take."""
    heartbeat_timeout: float = math.inf
    """See `HandshakeOwner.heartbeat_timeout`."""

    def __attrs_post_init__(self) -> None:
        size = MAX_ENGINES if self.data_parallel_size is None else self.data_parallel_size
        _check_engines(self.engine_start_index, self.engine_count, min(size, MAX_ENGINES))
        _check_seconds("ready_timeout", self.ready_timeout)
        _check_seconds("heartbeat_timeout", self.heartbeat_timeout)

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


def _check_settings(settings: Mapping[str, Any]) -> None:
    addresses = EngineAddresses(inputs=[], outputs=[])
    try:
        encode_init(HandshakeInit(addresses=addresses, parallel_config=dict(settings)))
    except CodecError as error:
        raise ConfigurationError(str(error)) from error


def _check_seconds(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise ConfigurationError(f"{name} must be a positive number of seconds, not {seconds}")


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

REPORTS_ONLY: dict[int, int | bytes] = {zmq.RCVHWM: 10, zmq.MAXMSGSIZE: 1 << 20}
"""For sockets where an engine has but a few hundred bytes to say, once or twice. Nobody reads the
input socket after the startup, and anybody can connect to it."""


@attrs.frozen
class LeaderChannels:
    """What the coordinator in our process needs of the engines."""

    broadcasts: FrameSender
    subscriptions: FrameReceiver
    """Tells of engines whose connection to the broadcasts is new."""
    notices: FrameReceiver


@attrs.frozen
class FollowerChannels:
    """What there is to know of a coordinator in another process."""

    publications: FrameReceiver
    notices: FrameSender


@attrs.frozen
class EngineChannels:
    """What a client needs of its connected engines."""

    input_address: str
    output_address: str
    ready_responses: Mapping[int, EngineCoreReadyResponse]
    """What each engine told of itself, by engine index."""
    requests: FrameSender
    """Messages to engines; the first frame is the engine id. Never blocks."""
    outputs: LabelledFrameReceiver
    """Messages of all engines."""
    losses: trio.abc.ReceiveChannel[int]
    """The index of each engine whose connection breaks."""
    coordination: LeaderChannels | FollowerChannels | None = None


@asynccontextmanager
async def open_frontend(mode: HandshakeOwner | Bootstrapped) -> AsyncIterator[EngineChannels]:
    """Bind, wait for the engines to start, and give the channels to them.

    Raises:
      ConfigurationError: An address is unusable; `AddressInUseError` if somebody else has it. Or
        the engines run in lockstep, and there is no coordinator.
      StartupError: An expected engine has not come as far as it must in ``ready_timeout`` seconds.
    """
    async with open_context(io_threads=2) as context:
        requests = context.socket(SocketType.ROUTER, linger=REQUEST_LINGER)
        heartbeats = _heartbeats(mode.heartbeat_timeout)
        requests.set_options({**KEEPALIVE, **REPORTS_ONLY, **heartbeats})
        connections = EngineConnections(context.open_monitor(requests))
        outputs = context.socket(SocketType.PULL)
        outputs.set_options(KEEPALIVE)
        handshake: Handshake | None = None
        coordination: LeaderChannels | FollowerChannels | None = None
        if isinstance(mode, HandshakeOwner):
            addresses = _bind(mode, requests, outputs)
            broadcasts: ZmqSocket | None = None
            if mode.coordinator:
                broadcasts, notices = (
                    context.socket(SocketType.XPUB),
                    context.socket(SocketType.PULL),
                )
                addresses = _bind_coordinator(mode, addresses, broadcasts, notices)
                coordination = LeaderChannels(broadcasts, broadcasts, notices)
            handshake = _bind_handshake(mode, context, addresses, broadcasts)
        else:
            requests.bind(mode.input_address, listener=mode.input_listener)
            outputs.bind(mode.output_address, listener=mode.output_listener)
        run = StartupRun(
            mode.engine_indices,
            timeout=mode.ready_timeout,
            requests=requests,
            connections=connections,
            handshake=handshake,
        )
        responses = await run.wait()
        if handshake is not None:
            handshake.socket.close()
        if isinstance(mode, Bootstrapped):
            coordination = _follow(mode, context, responses)
        elif coordination is None:
            _check_need_of_coordinator(mode, responses)
        links = (requests.address, outputs.address, responses, requests, outputs, connections)
        yield EngineChannels(*links, coordination)


def _bind(mode: HandshakeOwner, requests: ZmqSocket, outputs: ZmqSocket) -> EngineAddresses:
    """Bind the two sockets that every frontend has."""
    return EngineAddresses(
        inputs=[requests.bind(mode.input_address or _any_port(mode.host))],
        outputs=[outputs.bind(mode.output_address or _any_port(mode.host))],
    )


def _bind_coordinator(
    mode: HandshakeOwner, addresses: EngineAddresses, broadcasts: ZmqSocket, notices: ZmqSocket
) -> EngineAddresses:
    """Bind the coordinator's sockets, and add their addresses."""
    for socket in (broadcasts, notices):
        socket.set_options(KEEPALIVE)
    return attrs.evolve(
        addresses,
        coordinator_input=broadcasts.bind(_any_port(mode.host)),
        coordinator_output=notices.bind(_any_port(mode.host)),
    )


def _bind_handshake(
    mode: HandshakeOwner,
    context: ZmqContext,
    addresses: EngineAddresses,
    broadcasts: ZmqSocket | None,
) -> Handshake:
    """Bind what engines dial; the last, for then they come."""
    socket = context.socket(SocketType.ROUTER)
    socket.set_options({**KEEPALIVE, **REPORTS_ONLY})
    connections = EngineConnections(context.open_monitor(socket))
    init = HandshakeInit(addresses=addresses, parallel_config=dict(mode.parallel_config))
    encoded = encode_init(init)
    socket.bind(mode.handshake_address)
    return Handshake(socket, connections, encoded, broadcasts)


def _follow(
    mode: Bootstrapped, context: ZmqContext, responses: Mapping[int, EngineCoreReadyResponse]
) -> FollowerChannels | None:
    """Subscribe to the coordinator's publications, if there is one."""
    told = (response.dp_stats_address for response in responses.values())
    address = next((address for address in told if address is not None), mode.coordinator_address)
    if address is None:
        return None
    socket = context.socket(SocketType.XSUB)
    socket.set_options(KEEPALIVE)
    socket.connect(address)
    socket.send_nowait([SUBSCRIBE])
    return FollowerChannels(socket, socket)


def _check_need_of_coordinator(
    mode: HandshakeOwner, responses: Mapping[int, EngineCoreReadyResponse]
) -> None:
    in_lockstep = any(response.data_parallel_size > 1 for response in responses.values())
    if in_lockstep and mode.engine_count > 1:
        raise ConfigurationError(
            "these engines run in lockstep, so that one would wait for the others for ever:"
            " HandshakeOwner needs coordinator=True"
        )


def _any_port(host: str) -> str:
    return f"tcp://[{host}]:0" if ":" in host and not host.startswith("[") else f"tcp://{host}:0"


def _heartbeats(timeout: float) -> dict[int, int | bytes]:
    """Options that break the connection to who has been silent for so many seconds."""
    if timeout == math.inf:
        return {}
    half = max(round(timeout * 500), 1)  # milliseconds: of sending one, and of waiting for it
    return {zmq.HEARTBEAT_IVL: half, zmq.HEARTBEAT_TIMEOUT: half}
