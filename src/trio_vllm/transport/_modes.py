"""How a frontend comes by its engines: what there is to choose, checked before a socket opens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from trio_vllm._errors import ConfigurationError
from trio_vllm.protocol import (
    MAX_ENGINES,
    EngineAddresses,
    FormError,
    HandshakeInit,
    encode_init,
)


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
    except FormError as error:
        raise ConfigurationError(str(error)) from error


def _check_seconds(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise ConfigurationError(f"{name} must be a positive number of seconds, not {seconds}")
