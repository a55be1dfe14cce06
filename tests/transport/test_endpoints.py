"""Binding and connecting, for real: every kind of address, and what goes wrong with them."""

from __future__ import annotations

import socket as stdlib_socket
import stat
from pathlib import Path

import pytest
import trio
from tests.transport.peers import ANY_PORT, LIMIT

from trio_vllm.endpoint import LONGEST_PATH
from trio_vllm.errors import AddressInUseError, ConfigurationError
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context


def has_ipv6() -> bool:
    with stdlib_socket.socket(stdlib_socket.AF_INET6) as socket:
        try:
            socket.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:"),
        ("tcp://localhost:0", "tcp://127.0.0.1:"),
        pytest.param(
            "tcp://[::1]:0",
            "tcp://[::1]:",
            marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"),
        ),
        ("ipc://{folder}/socket", "ipc://{folder}/socket"),
    ],
)
async def test_messages_pass(context: ZmqContext, tmp_path: Path, asked: str, given: str) -> None:
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)

    address = pull.bind(asked.format(folder=tmp_path))
    push.connect(address)
    push.send_nowait([b"message"])

    assert address.startswith(given.format(folder=tmp_path))
    assert not address.endswith(":0")
    assert address == pull.address == push.address
    with trio.fail_after(LIMIT):
        assert await pull.receive() == [b"message"]


async def test_connecting_resolves_names(context: ZmqContext) -> None:
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    port = pull.bind(ANY_PORT).rpartition(":")[2]

    push.connect(f"tcp://localhost:{port}")
    push.send_nowait([b"message"])

    with trio.fail_after(LIMIT):
        assert await pull.receive() == [b"message"]


async def test_address_in_use_is_named() -> None:
    async with open_context() as context:
        address = context.socket(SocketType.PULL).bind(ANY_PORT)

        with pytest.raises(AddressInUseError) as caught:
            context.socket(SocketType.ROUTER).bind(address)

    assert caught.value.address == address
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no-such-host:0", "ipc:///no/such"])
async def test_foreign_address_is_named(address: str) -> None:
    async with open_context() as context:
        with pytest.raises(ConfigurationError, match=f"^cannot listen on {address}: ."):
            context.socket(SocketType.PULL).bind(address)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no-such-host:0"])
async def test_an_address_of_another_host_is_explained(address: str) -> None:
    """The address is ours, and engines dial it; newcomers give that of the engine's host, or a name."""
    async with open_context() as context:
        with pytest.raises(ConfigurationError, match="must be an IP address of this host, which"):
            context.socket(SocketType.PULL).bind(address)


async def test_longest_path_works_and_a_longer_one_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_context() as context:
        pull = context.socket(SocketType.PULL)

        pull.bind("ipc://" + "p" * LONGEST_PATH)

        for method in (pull.bind, pull.connect):
            with pytest.raises(ConfigurationError, match="108 bytes"):
                method("ipc://" + "p" * (LONGEST_PATH + 1))


async def test_bad_address_is_refused_before_zmq_sees_it() -> None:
    async with open_context() as context:
        pull = context.socket(SocketType.PULL)

        with pytest.raises(ConfigurationError, match=r"write it as tcp://\[::1\]:5555"):
            pull.bind("tcp://::1:0")
        with pytest.raises(ConfigurationError, match="has port 0"):
            pull.connect(ANY_PORT)


async def test_file_is_not_replaced(context: ZmqContext, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes")

    with pytest.raises(ConfigurationError, match="no socket"):
        context.socket(SocketType.PULL).bind(f"ipc://{path}")

    assert path.read_text() == "notes"


async def test_path_in_use(context: ZmqContext, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    pull = context.socket(SocketType.PULL)
    pull.bind(address)

    with pytest.raises(AddressInUseError, match=address):
        context.socket(SocketType.PULL).bind(address)

    push = context.socket(SocketType.PUSH)
    push.connect(address)
    push.send_nowait([b"message"])
    with trio.fail_after(LIMIT):
        assert await pull.receive() == [b"message"]


async def test_path_of_a_killed_process_is_used_again(context: ZmqContext, tmp_path: Path) -> None:
    path = f"{tmp_path}/socket"
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as killed:
        killed.bind(path)
        killed.listen()

    assert context.socket(SocketType.PULL).bind(f"ipc://{path}") == f"ipc://{path}"


async def test_path_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with open_context() as context:
        pull = context.socket(SocketType.PULL)
        context.open_monitor(pull)
        pull.bind(f"ipc://{path}")
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0

    assert not path.exists()


@pytest.mark.parametrize("backlog", [0, 1], ids=["connects later", "has connected before"])
async def test_inherited_listener_is_adopted(context: ZmqContext, backlog: int) -> None:
    """Its port counts, not the one that is asked for; peers may be in its queue already."""
    listener = stdlib_socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    if backlog:
        push.connect(address)

    assert pull.bind(ANY_PORT, listener=listener.detach()) == address

    if not backlog:
        push.connect(address)
    push.send_nowait([b"message"])
    with trio.fail_after(LIMIT):
        assert await pull.receive() == [b"message"]


async def test_adopted_listener_is_closed_with_the_socket() -> None:
    listener = stdlib_socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    async with open_context() as context:
        context.socket(SocketType.PULL).bind(ANY_PORT, listener=listener.detach())

    with stdlib_socket.socket() as connection:
        assert connection.connect_ex(address) != 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "*", "[::1]", "[::]"])
async def test_listening_on_all_interfaces_is_warned_about(
    context: ZmqContext, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """The protocol has no passwords: whoever can connect is believed."""
    address = context.socket(SocketType.PULL).bind(f"tcp://{host}:0")

    expected = f"whoever reaches this machine can connect to {address}"
    assert (expected in caplog.messages) == (host in {"0.0.0.0", "*", "[::]"})
