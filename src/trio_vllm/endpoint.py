"""`parse_endpoint` checks an address before ØMQ sees it, whose own errors do not say what is wrong.

It stands outside of `transport` so that the commands check their options by it without importing zmq.
"""

from __future__ import annotations

import ipaddress
import os

from trio_vllm.errors import ConfigurationError
from trio_vllm.values import frozen

ADDRESS_FORMS = "tcp://HOST:PORT or ipc://PATH"
"""The addresses that there are, for messages."""

LONGEST_PATH = 107
"""What ``sockaddr_un.sun_path`` holds on Linux, less the closing NUL."""


@frozen
class Endpoint:
    """An address in ØMQ's form, and the option that it needs."""

    text: str
    is_ipv6: bool = False

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all interfaces of this machine."""
        scheme, _, rest = self.text.partition("://")
        return scheme == "tcp" and is_wildcard(rest.rpartition(":")[0])


MAX_LENGTH = 400
"""Characters of an address: names of hosts and paths of sockets are shorter, and a peer may tell us any."""


def parse_endpoint(address: str, *, port_required: bool) -> Endpoint:
    """Check an address of one of the `ADDRESS_FORMS`.

    Args:
      address: An IPv6 host stands in brackets. ``localhost`` means 127.0.0.1: ØMQ resolves no name
        when it binds, and both sides must mean the same.
      port_required: Port 0 ("choose one") is refused, as it must be for connecting.

    Raises:
      ConfigurationError: The address has another form; says which part is wrong.
    """
    if len(address) > MAX_LENGTH:
        raise ConfigurationError(f"address {address[:40]!r}… has {len(address)} characters")
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in {"tcp", "ipc"}:
        raise ConfigurationError(f"address {address!r} is not {ADDRESS_FORMS}")
    if scheme == "ipc":
        _check_path(address, rest)
        return Endpoint(address)
    host, separator, port = rest.rpartition(":")
    _check_port(address, port if separator else "", port_required=port_required)
    is_ipv6 = _check_host(address, host)
    return Endpoint(f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}", is_ipv6)


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all interfaces, so that no peer can connect to it."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*" or not host.strip("0.")


def _check_path(address: str, path: str) -> None:
    length = len(os.fsencode(path))
    if length > LONGEST_PATH:
        raise ConfigurationError(
            f"address {address!r} has a path of {length} bytes; a socket's path has at most"
            f" {LONGEST_PATH}, so use a shorter folder"
        )
    if not path or "\0" in path:
        raise ConfigurationError(f"address {address!r} has no usable path")


def _check_port(address: str, port: str, *, port_required: bool) -> None:
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ConfigurationError(f"address {address!r} has no port between 0 and 65535")
    if port_required and int(port) == 0:
        raise ConfigurationError(f"address {address!r} has port 0, which nobody can listen on")


def _check_host(address: str, host: str) -> bool:
    """Say whether the host is an IPv6 address."""
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed and _is_ipv6(host[1:-1]):
        return True
    if bracketed or not host:
        raise ConfigurationError(f"address {address!r} has no usable host")
    if ":" in host:
        raise ConfigurationError(
            f"address {address!r} has an IPv6 host (or a stray colon): write it as tcp://[::1]:5555"
        )
    return False


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
