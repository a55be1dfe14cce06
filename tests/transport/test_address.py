"""Addresses that are understood, and what is said about those that are not."""

from __future__ import annotations

import pytest

from trio_vllm.endpoint import LONGEST_PATH, Endpoint, parse_endpoint
from trio_vllm.errors import ConfigurationError


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("tcp://127.0.0.1:5555", Endpoint("tcp://127.0.0.1:5555")),
        ("tcp://localhost:5555", Endpoint("tcp://127.0.0.1:5555")),
        ("tcp://host.example:1", Endpoint("tcp://host.example:1")),
        ("tcp://*:65535", Endpoint("tcp://*:65535")),
        ("tcp://[::1]:5555", Endpoint("tcp://[::1]:5555", is_ipv6=True)),
        ("tcp://[::]:5555", Endpoint("tcp://[::]:5555", is_ipv6=True)),
        ("tcp://[fe80::1%eth0]:5555", Endpoint("tcp://[fe80::1%eth0]:5555", is_ipv6=True)),
        ("ipc:///run/engine", Endpoint("ipc:///run/engine")),
        ("ipc://@abstract", Endpoint("ipc://@abstract")),
        ("ipc://" + "p" * LONGEST_PATH, Endpoint("ipc://" + "p" * LONGEST_PATH)),
    ],
)
def test_good_addresses(address: str, endpoint: Endpoint) -> None:
    assert endpoint == parse_endpoint(address, port_required=True)


def test_port_zero_is_for_listening_only() -> None:
    assert parse_endpoint("tcp://127.0.0.1:0", port_required=False) == Endpoint("tcp://127.0.0.1:0")
    with pytest.raises(ConfigurationError, match="has port 0"):
        parse_endpoint("tcp://127.0.0.1:0", port_required=True)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("", "is not tcp://HOST:PORT or ipc://PATH"),
        ("127.0.0.1:5555", "is not tcp://HOST:PORT or ipc://PATH"),
        ("http://127.0.0.1:5555", "is not tcp://HOST:PORT or ipc://PATH"),
        ("inproc://engine", "is not tcp://HOST:PORT or ipc://PATH"),
        ("tcp://127.0.0.1", "has no port between 0 and 65535"),
        ("tcp://127.0.0.1:", "has no port between 0 and 65535"),
        ("tcp://127.0.0.1:65536", "has no port between 0 and 65535"),
        ("tcp://127.0.0.1:-1", "has no port between 0 and 65535"),
        ("tcp://127.0.0.1:٣", "has no port between 0 and 65535"),
        ("tcp://127.0.0.1:80/path", "has no port between 0 and 65535"),
        ("tcp://[::1]", "has no port between 0 and 65535"),
        ("tcp://:5555", "has no usable host"),
        ("tcp://[]:5555", "has no usable host"),
        ("tcp://[127.0.0.1]:5555", "has no usable host"),
        ("tcp://::1:5555", "write it as tcp://[::1]:5555"),
        ("tcp://host:80:5555", "write it as tcp://[::1]:5555"),
        ("ipc://", "has no usable path"),
        ("ipc:///tmp/a\0b", "has no usable path"),
        ("ipc://" + "p" * (LONGEST_PATH + 1), "has a path of 108 bytes"),
        ("ipc://" + "ø" * 54, "has a path of 108 bytes"),
    ],
)
def test_bad_addresses_say_what_is_wrong(address: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_endpoint(address, port_required=False)

    assert repr(address) in str(caught.value)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_address_that_is_too_long_for_a_line() -> None:
    """A peer told it; who reads the error needs its beginning."""
    with pytest.raises(ConfigurationError) as caught:
        parse_endpoint("tcp://" + "h" * 100_000 + ":5555", port_required=True)

    assert str(caught.value) == f"address 'tcp://{'h' * 34}'… has 100011 characters"
