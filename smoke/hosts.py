"""Hosts on one machine: network namespaces, each with an address of its own, which a bridge joins.

Needs no root where a user may have namespaces: `isolated` gives a command a network of its own, in which it
may make what it likes, and which ends with its last process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from processes import running

NETWORK = "10.77.0"
"""The first numbers of all addresses; nothing outside the namespaces sees them."""

OURS = f"{NETWORK}.254"
"""The address of the process that makes the hosts."""

TOOLS = ("unshare", "nsenter", "ip")


class HostsUnavailableError(Exception):
    """There can be no such hosts here; the text says what was tried."""


@attrs.frozen
class Host:
    """One of them; made by `joined_hosts`."""

    name: str
    address: str
    _pid: int
    """Of a process that is in its namespace."""
    _cable: str
    """The end at the bridge."""

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command there."""
        return ["nsenter", "--target", str(self._pid), "--net", "--", *command]

    def unplug(self) -> None:
        """Let nothing more come from it or to it; no connection is closed by that."""
        ip("link", "set", self._cable, "down")

    def plug_in(self) -> None:
        """Undo that."""
        ip("link", "set", self._cable, "up")


def isolated(command: Sequence[str]) -> list[str]:
    """What runs a command in a network of its own."""
    return ["unshare", "--user", "--map-root-user", "--net", "--", *command]


def require() -> None:
    """Try whether this machine permits them.

    Raises:
      HostsUnavailableError: It does not.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise HostsUnavailableError(f"there is no {', '.join(missing)} (util-linux and iproute2)")
    trial = "import hosts\nwith hosts.joined_hosts(['a', 'b']): pass"
    command = isolated([sys.executable, "-c", trial])
    folder = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise HostsUnavailableError(
            f"{' '.join(command[:5])} … ended with {done.returncode}: {reason}"
        )


@contextmanager
def joined_hosts(names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts that reach each other and us, while the block runs; in an `isolated` command."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("link", "set", "bridge", "up")
    ip("address", "add", f"{OURS}/24", "dev", "bridge")
    with ExitStack() as stack:
        yield [
            stack.enter_context(_host(name, f"{NETWORK}.{number}", f"cable{number}"))
            for number, name in enumerate(names, 1)
        ]
    ip("link", "delete", "bridge")


@contextmanager
def _host(name: str, address: str, cable: str) -> Iterator[Host]:
    keeper = ["unshare", "--net", "--", "sh", "-c", "echo ready; exec sleep infinity"]
    with running(name, keeper) as process:
        process.wait_for_line("ready", 20)
        host = Host(name, address, process.pid, cable)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        ip("link", "set", cable, "master", "bridge", "up")
        run(host.command(["ip", "address", "add", f"{address}/24", "dev", "eth0"]))
        run(host.command(["ip", "link", "set", "eth0", "up"]))
        run(host.command(["ip", "link", "set", "lo", "up"]))
        yield host


def ip(*arguments: str) -> None:
    """Change the network."""
    run(["ip", *arguments])


def run(command: Sequence[str]) -> None:
    """Run a command; what it says against it is part of the error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
