"""Child processes of the smoke checks, waited for with a limit and certain to end."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL = 0.05
"""Seconds between two looks at what a process has done."""

KILL_TIMEOUT = 10.0
"""Seconds a process may take to vanish after SIGKILL."""

END_GROUP = 'cat; kill -s KILL -- "-$0"'
"""For a shell whose input ends with the process that writes to it, which never does."""

PROC = Path("/proc")
"""Where there is none (not on Linux), only process groups are ended, not strays that left them."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local URLs; a proxy of the environment must not see them."""


class ProcessError(Exception):
    """A child process ended, or took too long, before it did what was waited for."""


class Process:
    """A child process that leads its own session and writes to a log file.

    Made by `running`. Everything here blocks; from trio, call it in a thread.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._popen = popen
        self._is_over = False

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group and of its session."""
        return self._popen.pid

    def log(self) -> str:
        """All that it has printed so far, both streams."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def exit_code(self) -> int | None:
        """How it ended (minus the signal's number), or None while it runs."""
        return self._popen.poll()

    def members(self) -> list[int]:
        """The ids of the live processes of its session: itself and its children."""
        return session_members(self.pid)

    def send_signal(self, signal_number: int) -> None:
        """Signal the whole group; nothing happens if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal_number)

    def wait_until(self, what: str, look: Callable[[], T | None], timeout: float) -> T:
        """Call ``look`` until it returns something true, and return that.

        Raises:
          ProcessError: the process ended, or ``timeout`` seconds passed, before that.
        """
        deadline = time.monotonic() + timeout
        while True:
            exit_code = self.exit_code()  # before the look: what it did last still counts
            if found := look():
                return found
            if exit_code is not None:
                raise ProcessError(f"{self.name} ended with {exit_code} before {what}")
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name}: not {what} after {timeout:g} s")
            time.sleep(POLL_INTERVAL)

    def wait_for_line(self, pattern: str, timeout: float = 120.0) -> str:
        """Wait for a line of the log in which ``pattern`` (a regular expression) is found."""
        compiled = re.compile(f"^.*(?:{pattern}).*$", re.MULTILINE)

        def look() -> str | None:
            found = compiled.search(self.log())
            return found and found[0]

        return self.wait_until(f"printing {pattern!r}", look, timeout)

    def wait_for_port(self, port: int, timeout: float = 120.0) -> None:
        """Wait until something accepts TCP connections on ``port`` of the loopback address."""

        def look() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    return True
            except OSError:
                return False

        self.wait_until(f"listening on port {port}", look, timeout)

    def wait_for_http(self, url: str, timeout: float = 120.0) -> None:
        """Wait until ``url`` answers with success."""

        def look() -> bool:
            try:
                with _direct.open(url, timeout=2):
                    return True
            except (urllib.error.URLError, OSError):
                return False

        self.wait_until(f"answering {url}", look, timeout)

    def wait_for_exit(self, timeout: float = 60.0) -> int:
        """Wait for its end and return the exit code."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.name}: not ended after {timeout:g} s") from None

    def end(self, grace: float) -> None:
        """Terminate the group, then after ``grace`` seconds kill what is left of the session.

        Once is enough: a second call does nothing.
        """
        if self._is_over:
            return
        if self.exit_code() is None:
            self.send_signal(signal.SIGTERM)
            self.send_signal(signal.SIGCONT)  # a frozen process would not see the other one
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace)
        self.send_signal(signal.SIGKILL)
        self._popen.wait(KILL_TIMEOUT)
        kill_all(self.members)
        self._is_over = True


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 10.0,
) -> Iterator[Process]:
    """Run ``command`` while the block runs, and end it with all its children after that.

    Args:
      name: What to call it in messages.
      command: The program and its arguments.
      environment: Variables to add to ours.
      grace: Seconds between SIGTERM and SIGKILL when the block is left.

    If the block raises, the end of the log is printed to standard error. If we are killed before
    it is left, the process and its group are killed too.
    """
    with (
        tempfile.TemporaryDirectory(prefix="trio-vllm-smoke-") as directory,
        contextlib.ExitStack() as until_its_end,
    ):
        log_path = Path(directory) / "log"
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(name, popen, log_path)
        try:
            until_its_end.enter_context(guarding(process.pid))
            yield process
        except BaseException:
            print(f"--- the last lines of {name}:", tail(process.log()), sep="\n", file=sys.stderr)
            raise
        finally:
            process.end(grace)


@contextlib.contextmanager
def guarding(group: int) -> Iterator[None]:
    """Let a shell kill a process group if we are killed in the block, however that happens."""
    with subprocess.Popen(
        ["/bin/sh", "-c", END_GROUP, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:
        try:
            yield
        finally:
            guard.kill()  # before its input ends


def tail(text: str, lines: int = 40) -> str:
    """The last ``lines`` lines of ``text``."""
    return "\n".join(text.splitlines()[-lines:])


def kill_all(find: Callable[[], list[int]]) -> list[int]:
    """Kill the processes that ``find`` finds until it finds none; return those of the first look.

    Raises:
      ProcessError: some were still there after `KILL_TIMEOUT`.
    """
    first = left = find()
    deadline = time.monotonic() + KILL_TIMEOUT
    while left:
        if time.monotonic() > deadline:
            raise ProcessError(f"processes {left} do not die")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL)
        left = find()
    return first


def session_members(session: int) -> list[int]:
    """The ids of the live processes of a session."""
    found: list[int] = []
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name, which may hold anything) state parent group session ...
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX" and int(its_session) == session:
                found.append(int(stat.parent.name))
    return found


def marked_processes(variable: str, value: str) -> list[int]:
    """The ids of the live processes that were started with this environment variable."""
    mark = f"{variable}={value}".encode()
    found: list[int] = []
    for environ in PROC.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # a zombie's is empty, a stranger's unreadable
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found
