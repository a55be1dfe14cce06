"""`HandshakeOwner` and `Bootstrapped`: two ways for a frontend to connect to its engines.

Mirrors ``vllm/v1/engine/core_client.py`` (``MPClient.__init__``) and
``engine-core-client/src/transport.rs``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from numbers import Integral, Real
from typing import Any

import attrs
import trio
import zmq

from trio_vllm.concurrency import running
from trio_vllm.endpoint import is_wildcard
from trio_vllm.errors import ConfigurationError, StartupError
from trio_vllm.limits import MAX_ENGINES
from trio_vllm.protocol import (
    SUBSCRIBE,
    CodecError,
    EngineAddresses,
    EngineCoreReadyResponse,
    HandshakeInit,
    encode_init,
)
from trio_vllm.transport.channels import (
    Disconnect,
    EngineChannels,
    FollowerChannels,
    LeaderChannels,
)
from trio_vllm.transport.descriptors import PER_CONTEXT, PER_SOCKET, require_descriptors
from trio_vllm.transport.frontend_startup import Handshake, StartupLimits, StartupRun
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, heartbeat_options, open_context
from trio_vllm.transport.zmq_monitor import ConnectionTable, OutgoingConnection
from trio_vllm.transport.zmq_socket import ZmqSocket
from trio_vllm.values import define, frozen

_log = logging.getLogger("trio_vllm.transport")

REQUEST_LINGER = 0.5
"""Seconds for the last aborts to get out; an engine whose frontend is gone works on otherwise."""


def _by_name_after_first(
    _class: type, fields: list[attrs.Attribute[Any]]
) -> list[attrs.Attribute[Any]]:
    """Let all fields but the first be given by name only."""
    first, *others = fields
    return [first, *(field.evolve(kw_only=True) for field in others)]


@frozen(field_transformer=_by_name_after_first)
class HandshakeOwner:
    """We own the startup handshake and choose the addresses."""

    handshake_address: str
    """Where engines report, such as ``tcp://127.0.0.1:29550``; bound by us."""
    engine_count: int = 1
    """Engines 0 to ``engine_count - 1`` are expected."""
    host: str = "127.0.0.1"
    """The interface for requests and outputs, as engines can reach it."""
    bind_host: str | None = None
    """Where to listen for them, if not at ``host``: ``"0.0.0.0"`` is all interfaces."""
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
    startup_timeout: float = math.inf
    """Seconds that the whole startup may take."""
    restart_grace: float = 2.0
    """Seconds that an engine which leaves during the startup, or registers with what cannot be
    used, has to come again. For a supervisor that starts engines anew: what that takes."""
    heartbeat_timeout: float = math.inf
    """Seconds after which an engine that does not answer ZeroMQ's heartbeats counts as lost.

    A real engine answers them even while it computes, and no longer when its process or its host
    is frozen. A host that vanishes is noticed without this after `VANISHED_HOST_TIMEOUT`. Leave it
    off for engines that use the zmq.rs library (upstream's Rust mock engine): it breaks the
    connection when it sees a heartbeat.
    """

    def __attrs_post_init__(self) -> None:
        _check_types(self)
        _check_engines(0, self.engine_count, MAX_ENGINES)
        _check_settings(self.parallel_config)
        _check_times(self)
        if is_wildcard(self.host):
            raise ConfigurationError(
                f"host {self.host!r} is no address that engines could connect to: say there how"
                " they reach this machine, and in bind_host on which interfaces to listen"
            )
        for address in (self.input_address, self.output_address):
            if address is not None and is_wildcard(_host_of(address)):
                raise ConfigurationError(
                    f"address {address!r} is none that engines could connect to: name the interface"
                )

    @property
    def engine_indices(self) -> range:
        """The expected engines."""
        return range(self.engine_count)

    @property
    def is_for_one_client(self) -> bool:
        """Whether the engines are told one output address: that of client 0."""
        return True

    @asynccontextmanager
    async def connect(self, *, linger: float = REQUEST_LINGER) -> AsyncIterator[EngineChannels]:
        """Bind, wait for the engines to start, and give the channels to them.

        Args:
          linger: Seconds that leaving the block gives the last aborts to get out.

        Raises:
          ConfigurationError: An address is unusable; `AddressInUseError` if another process has it.
            Or the engines run in lockstep, and there is no coordinator.
          StartupError: An expected engine has not come as far as it must in ``ready_timeout``
            seconds.
        """
        async with _open_sockets(self.engine_count, self.heartbeat_timeout, linger) as sockets:
            coordination, handshake = self._bind(sockets)
            run = StartupRun(
                self.engine_indices,
                _limits_of(self),
                requests=sockets.requests,
                connections=sockets.engines,
                handshake=handshake,
            )
            async with sockets.watch():
                responses = await run.wait()
                handshake.socket.close()
                sockets.tables.remove(handshake.connections)
                if coordination is None:
                    self._check_need_of_coordinator(responses)
                else:
                    subscribers = frozenset(run.subscribers)
                    coordination = attrs.evolve(coordination, subscribers=subscribers)
                async with (
                    sockets.disconnects() as disconnects,
                    running(partial(_drop_all, sockets.requests)),
                ):
                    yield sockets.channels(responses, disconnects, coordination)

    def _bind(self, sockets: _Sockets) -> tuple[LeaderChannels | None, Handshake]:
        """Bind all sockets; last the one that engines dial first."""
        addresses = EngineAddresses(
            inputs=[self._bind_and_name(sockets.requests, self.input_address)],
            outputs=[self._bind_and_name(sockets.outputs, self.output_address)],
        )
        broadcasts: ZmqSocket | None = None
        subscribers: ConnectionTable | None = None
        coordination: LeaderChannels | None = None
        if self.coordinator:
            broadcasts, subscribers = sockets.open(SocketType.XPUB, SMALL_MESSAGES_ONLY)
            notices, _ = sockets.open(SocketType.PULL, OUTPUTS_BOUNDED)
            coordination = LeaderChannels(broadcasts, broadcasts, notices)
            addresses = attrs.evolve(
                addresses,
                coordinator_input=self._bind_and_name(broadcasts),
                coordinator_output=self._bind_and_name(notices),
            )
        socket, connections = sockets.open(SocketType.ROUTER, SMALL_MESSAGES_ONLY, of_engines=True)
        init = HandshakeInit(addresses=addresses, parallel_config=dict(self.parallel_config))
        encoded = encode_init(init)
        socket.bind(self.handshake_address)
        return coordination, Handshake(socket, connections, encoded, broadcasts, subscribers)

    def _bind_and_name(self, socket: ZmqSocket, address: str | None = None) -> str:
        """Bind a socket, to any port if no address is given; gives the address to tell engines."""
        if address is not None:
            return socket.bind(address)
        bound = socket.bind(_any_port(self.bind_host or self.host))
        if self.bind_host is not None:
            socket.address = _any_port(self.host)[:-1] + bound.rpartition(":")[2]
        return socket.address

    def _check_need_of_coordinator(self, responses: Mapping[int, EngineCoreReadyResponse]) -> None:
        if _is_lockstep(responses) and self.engine_count > 1:
            raise ConfigurationError(
                "these engines run in lockstep, so that one would wait for the others for ever:"
                " HandshakeOwner needs coordinator=True"
            )


@frozen(kw_only=True)
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
    startup_timeout: float = math.inf
    """Seconds that all registrations may take."""
    restart_grace: float = 2.0
    """See `HandshakeOwner.restart_grace`."""
    heartbeat_timeout: float = math.inf
    """See `HandshakeOwner.heartbeat_timeout`."""

    def __attrs_post_init__(self) -> None:
        _check_types(self)
        size = MAX_ENGINES if self.data_parallel_size is None else self.data_parallel_size
        _check_engines(self.engine_start_index, self.engine_count, min(size, MAX_ENGINES))
        _check_times(self)

    @property
    def engine_indices(self) -> range:
        """The expected engines."""
        return range(self.engine_start_index, self.engine_start_index + self.engine_count)

    @property
    def is_for_one_client(self) -> bool:
        """Whether the engines are told one output address: that of client 0."""
        return False

    @asynccontextmanager
    async def connect(self, *, linger: float = REQUEST_LINGER) -> AsyncIterator[EngineChannels]:
        """Bind, wait for the engines to register, and give the channels to them.

        Args:
          linger: Seconds that leaving the block gives the last aborts to get out.

        Raises:
          ConfigurationError: An address is unusable; `AddressInUseError` if another process has it.
          StartupError: An expected engine has not registered in ``ready_timeout`` seconds, or the
            coordinator does not listen.
        """
        async with _open_sockets(self.engine_count, self.heartbeat_timeout, linger) as sockets:
            sockets.requests.bind(self.input_address, listener=self.input_listener)
            sockets.outputs.bind(self.output_address, listener=self.output_listener)
            run = StartupRun(
                self.engine_indices,
                _limits_of(self),
                requests=sockets.requests,
                connections=sockets.engines,
            )
            async with sockets.watch():
                responses = await run.wait()
                coordination = await self._follow(sockets, responses)
                async with (
                    sockets.disconnects() as disconnects,
                    running(partial(_drop_all, sockets.requests)),
                ):
                    yield sockets.channels(responses, disconnects, coordination)

    async def _follow(
        self, sockets: _Sockets, responses: Mapping[int, EngineCoreReadyResponse]
    ) -> FollowerChannels | None:
        """Subscribe to the coordinator's publications, if there is one."""
        await trio.lowlevel.checkpoint()
        published = (response.dp_stats_address for response in responses.values())
        told = (address for address in published if address is not None)
        address = next(told, self.coordinator_address)
        if address is None:
            return None
        socket, connection = sockets.subscribe(address)
        if not _is_lockstep(responses):  # for information only
            return FollowerChannels(socket, socket, connection)
        with trio.move_on_after(self.ready_timeout) as patience:
            await connection.wait_open()
        if patience.cancelled_caught:
            phase = "the connection to the coordinator"
            raise StartupError(phase, seconds=self.ready_timeout, notes=[connection.state])
        return FollowerChannels(socket, socket, connection)


KINDS: Mapping[str, tuple[Any, str]] = {
    "str": (str, "a string"),
    "str | None": (str | None, "a string"),
    "int": (Integral, "an integer"),
    "int | None": (Integral | None, "an integer"),
    "float": (Real, "a number of seconds"),
    "bool": (bool, "True or False"),
    "Mapping[str, int | str | list[int]]": (Mapping, "a mapping"),
}
"""What the fields of a mode must be, and what is said if they are not, by their annotations."""


def _check_types(mode: HandshakeOwner | Bootstrapped) -> None:
    for field in attrs.fields(type(mode)):
        kind, wanted = KINDS[str(field.type)]
        value = getattr(mode, field.name)
        if not isinstance(value, kind):
            if field.name.endswith("_address"):
                wanted += " such as 'tcp://127.0.0.1:29550'"
            raise TypeError(f"{field.name} must be {wanted}, not {value!r}")


def _check_engines(start: int, count: int, limit: int) -> None:
    if start < 0 or count < 1 or start + count > limit:
        raise ConfigurationError(
            f"{count} engines from index {start} do not fit: there must be one at least, and the"
            f" indices must lie between 0 and {limit - 1}"
        )


def _is_lockstep(responses: Mapping[int, EngineCoreReadyResponse]) -> bool:
    return any(response.data_parallel_size > 1 for response in responses.values())


def _check_settings(settings: Mapping[str, Any]) -> None:
    addresses = EngineAddresses(inputs=[], outputs=[])
    try:
        encode_init(HandshakeInit(addresses=addresses, parallel_config=dict(settings)))
    except CodecError as error:
        raise ConfigurationError(str(error)) from error


def _check_times(mode: HandshakeOwner | Bootstrapped) -> None:
    for name in ("ready_timeout", "startup_timeout", "restart_grace", "heartbeat_timeout"):
        seconds = getattr(mode, name)
        if not seconds > 0:
            raise ConfigurationError(f"{name} must be a positive number of seconds, not {seconds}")


def _limits_of(mode: HandshakeOwner | Bootstrapped) -> StartupLimits:
    return StartupLimits(
        message=mode.ready_timeout,
        total=mode.startup_timeout,
        restart_grace=mode.restart_grace,
    )


VANISHED_HOST_TIMEOUT = 30
"""Seconds within which the connection to a host counts as broken that answers TCP no more."""

KEEPALIVE: dict[int, int | bytes] = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: VANISHED_HOST_TIMEOUT // 3,
    zmq.TCP_KEEPALIVE_INTVL: VANISHED_HOST_TIMEOUT // 6,
    zmq.TCP_KEEPALIVE_CNT: 3,
    # The same while something is under way, when keepalive is silent. Linux also ends a silent connection at
    # the first probe after this time, whatever the number above: at the third one, 25 s after the last answer.
    zmq.TCP_MAXRT: VANISHED_HOST_TIMEOUT * 800,
}

SMALL_MESSAGES_ONLY: dict[int, int | bytes] = {zmq.RCVHWM: 10, zmq.MAXMSGSIZE: 1 << 16}
"""For sockets where an engine sends a few hundred bytes, once or twice. Any process can connect to
them, and ØMQ counts messages, not their bytes, nor those of a message with many frames that never
ends: the connection of a peer that sends a larger frame is closed."""

OUTPUTS_BOUNDED: dict[int, int | bytes] = {zmq.RCVHWM: 64, zmq.RCVBUF: 1 << 17}
"""Messages of each engine that may wait to be received, and bytes of them in the operating system,
which would take megabytes. What an engine sends beyond waits there, as it must: a client that is behind
would otherwise be ever more so, and handle what it does not want any more before what it wants. With
256 requests a message takes some milliseconds, if each of its readers is waiting."""


@define
class _Sockets:
    """The sockets of a frontend, and their connections."""

    context: ZmqContext
    options: Mapping[int, int | bytes]
    """For all of them."""
    linger: float
    """Seconds from closing in which requests may still get out."""
    tables: list[ConnectionTable] = attrs.field(factory=list, init=False)
    requests: ZmqSocket = attrs.field(init=False)
    engines: ConnectionTable = attrs.field(init=False)
    """The connections of ``requests``."""
    outputs: ZmqSocket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.requests, self.engines = self.open(
            SocketType.ROUTER, SMALL_MESSAGES_ONLY, linger=self.linger, of_engines=True
        )
        self.outputs, _ = self.open(SocketType.PULL, OUTPUTS_BOUNDED)

    def open(
        self,
        socket_type: SocketType,
        options: Mapping[int, int | bytes] | None = None,
        *,
        linger: float = 0.0,
        of_engines: bool = False,
    ) -> tuple[ZmqSocket, ConnectionTable]:
        """Make a socket to be bound, whose connections are watched."""
        socket = self.context.socket(socket_type, linger=linger)
        socket.set_options({**self.options, **(options or {})})
        table = self.context.track_connections(socket, of_engines=of_engines)
        self.tables.append(table)
        return socket, table

    def subscribe(self, address: str) -> tuple[ZmqSocket, OutgoingConnection]:
        """Make a socket that receives what is published there."""
        socket = self.context.socket(SocketType.XSUB)
        socket.set_options(self.options)
        connection = OutgoingConnection(address, self.context.open_monitor(socket))
        socket.connect(address)
        socket.send_nowait([SUBSCRIBE])
        return socket, connection

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Keep the tables of connections up to date while the block runs."""
        async with running(*(table.run for table in self.tables)):
            yield

    @asynccontextmanager
    async def disconnects(self) -> AsyncIterator[trio.abc.ReceiveChannel[Disconnect]]:
        """Give the disconnects of all sockets in one channel."""
        send, receive = trio.open_memory_channel[Disconnect](math.inf)

        async def forward(table: ConnectionTable) -> None:
            async for disconnect in table:
                send.send_nowait(disconnect)

        async with running(*(partial(forward, table) for table in self.tables)):
            yield receive

    def channels(
        self,
        responses: Mapping[int, EngineCoreReadyResponse],
        disconnects: trio.abc.ReceiveChannel[Disconnect],
        coordination: LeaderChannels | FollowerChannels | None,
    ) -> EngineChannels:
        """What the client gets."""
        return EngineChannels(
            input_address=self.requests.address,
            output_address=self.outputs.address,
            ready_responses=responses,
            requests=self.requests,
            outputs=self.outputs,
            disconnects=disconnects,
            coordination=coordination,
        )


@asynccontextmanager
async def _open_sockets(
    engine_count: int, heartbeat_timeout: float, linger: float
) -> AsyncIterator[_Sockets]:
    # Each engine connects to five sockets at most: the handshake's, input, output, and two of the
    # coordinator.
    need = PER_CONTEXT + 5 * (PER_SOCKET + engine_count)
    require_descriptors(need, f"connections to {engine_count} engines")
    async with open_context() as context:
        yield _Sockets(context, {**KEEPALIVE, **heartbeat_options(heartbeat_timeout)}, linger)


async def _drop_all(socket: ZmqSocket) -> None:
    """Task: receive what comes where nothing is expected, so that it is not kept."""
    is_logged = False
    while True:
        await socket.receive_batch(10)
        if not is_logged:
            is_logged = True
            _log.warning("what came to %s after the startup was dropped", socket.address)


def _host_of(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return rest.rpartition(":")[0] if scheme == "tcp" else scheme


def _any_port(host: str) -> str:
    return f"tcp://[{host}]:0" if ":" in host and not host.startswith("[") else f"tcp://{host}:0"
