"""`prepare_path` and `check_listener` check what ØMQ is to listen on; `SocketFile` is what that leaves behind."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

from trio_vllm.errors import AddressInUseError, ConfigurationError
from trio_vllm.values import frozen


@frozen
class SocketFile:
    """The file of a socket that listens on an ``ipc://`` address."""

    path: str
    inode: int

    @classmethod
    def at(cls, address: str) -> SocketFile | None:
        """The file that was made for an address, if any was."""
        path = os.path.abspath(address.removeprefix("ipc://"))
        with suppress(OSError):
            return cls(path, os.lstat(path).st_ino)
        return None

    def remove(self) -> None:
        """Remove it, unless it has been replaced."""
        with suppress(OSError):
            if os.lstat(self.path).st_ino == self.inode:
                os.unlink(self.path)


def prepare_path(address: str) -> None:
    """See that ØMQ can listen on an ``ipc://`` address; it would replace whatever is there.

    Raises:
      AddressInUseError: Another socket listens there.
      ConfigurationError: There is a file that is no socket.
    """
    path = address.removeprefix("ipc://")
    if path.startswith("@"):  # an abstract name, of no file
        return
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # there is nothing, or ØMQ will say what is wrong
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"address {address!r} names a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:  # left behind by a process that was killed
            return
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error
    raise AddressInUseError(address)


def check_listener(descriptor: int, address: str) -> None:
    """Refuse what ØMQ would abort on: a descriptor that is no listening socket.

    Raises:
      ConfigurationError: It is none; says what it is.
    """
    failure = f"descriptor {descriptor}, to listen on {address}, is"
    try:
        is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"{failure} not open") from error
    if not is_socket:
        raise ConfigurationError(f"{failure} no socket")
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigurationError(f"{failure} a socket that does not listen")
        if (copy.family == socket.AF_UNIX) != address.startswith("ipc://"):
            raise ConfigurationError(f"{failure} a socket of another family")
