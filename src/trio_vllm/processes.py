"""`child_process`: runs a process beside a block, and ends it for certain with the block.

`trio_vllm.spawn` uses it for an engine of which it knows nothing, and ``mock-engine --processes`` for
parts of itself. What a child prints is read line by line, since it would have to
stop otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import trio

from trio_vllm.concurrency import running
from trio_vllm.values import frozen

VANISHING_TIME = 1.0
"""Seconds that we wait for processes to vanish after SIGKILL, which they cannot escape."""

POLL_INTERVAL = 0.01
"""Seconds between two looks whether they have."""

LOG_DELAY = 0.5
"""Seconds in which the last words of an ended process must have come."""

LONGEST_LINE = 65_536
"""Bytes that are kept of what it prints without a line break."""

END_GROUP = 'cat; kill -s TERM -- "-$0"; sleep 5; kill -s KILL -- "-$0"'
"""For a shell. Nothing is written to its input, which the system closes when we are gone."""


class ProcessFailedError(Exception):
    """A process of ours could not be started, or has ended otherwise than it should."""


@frozen
class EndTimes:
    """Seconds between SIGTERM and SIGKILL for a child; with 0 it is killed at once."""

    normal: float
    """When the block has ended: what a child takes for its own cleanup."""
    hurried: float
    """When the block is cancelled."""


@asynccontextmanager
async def child_process(
    name: str,
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    own_session: bool,
    times: EndTimes,
    **options: Any,
) -> AsyncIterator[ChildProcess]:
    """Run ``command`` while the block runs, then end it.

    Args:
      name: What to call it if it cannot be started.
      command: The program and its arguments.
      on_line: Is handed each line that it prints to standard output.
      own_session: Ctrl-C does not reach it, all that it starts is ended with it, and that is so even
        if this process is killed. Otherwise it has to care for that itself.
      times: How long its end may take.
      options: More of `subprocess.Popen`.

    Raises:
      ProcessFailedError: It cannot be started.
    """
    try:
        process = await trio.lowlevel.open_process(
            command, stdout=subprocess.PIPE, start_new_session=own_session, **options
        )
    except OSError as error:
        raise ProcessFailedError(f"cannot start {name}: {error.strerror}") from error
    child = ChildProcess(process, on_line, own_session=own_session)
    grace = times.normal
    with ExitStack() as until_its_end:
        async with running(child.read_lines):
            try:
                if own_session:
                    until_its_end.enter_context(ending_group_if_killed(child.pid))
                yield child
            except trio.Cancelled:
                grace = times.hurried
                raise
            finally:
                with trio.move_on_after(grace + VANISHING_TIME, shield=True):
                    await child.end(grace)


class ChildProcess:
    """A process that runs beside a block; made by `child_process`."""

    def __init__(
        self, process: trio.Process, on_line: Callable[[str], None], *, own_session: bool
    ) -> None:
        self._process = process
        self._on_line = on_line
        self._own_session = own_session
        self._has_said_all = trio.Event()

    @property
    def pid(self) -> int:
        """Its process id, and that of its group if it has a session of its own."""
        return self._process.pid

    async def read_lines(self) -> None:
        """Task: hand on what it prints."""
        await trio.lowlevel.checkpoint()
        assert self._process.stdout is not None
        rest = b""
        async with self._process.stdout as stdout:
            async for chunk in stdout:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._hand_on(line)
                rest = rest[-LONGEST_LINE:]
            self._hand_on(rest)
        self._has_said_all.set()

    def _hand_on(self, raw: bytes) -> None:
        if line := raw.decode(errors="replace").rstrip():
            self._on_line(line)

    async def wait(self) -> int:
        """Wait for its end and, for a moment, for its last words; gives the exit code."""
        exit_code = await self._process.wait()
        with trio.move_on_after(LOG_DELAY):
            await self._has_said_all.wait()
        return exit_code

    async def close_stdin(self, last: bytes) -> None:
        """End its input with some last words, which it need not read."""
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):
            await self._process.stdin.send_all(last)
        await self._process.stdin.aclose()

    async def end(self, grace: float) -> None:
        """Terminate it, and kill after ``grace`` seconds what is left of it, until that is gone."""
        await trio.lowlevel.checkpoint()
        if grace:
            self._signal(signal.SIGTERM)
            with trio.move_on_after(grace):
                await self._process.wait()
        while self._signal(signal.SIGKILL):  # noqa: ASYNC110  (nothing tells of the end of a group)
            await trio.sleep(POLL_INTERVAL)

    def _signal(self, number: int) -> bool:
        """Send a signal to it, or to its group; False if nothing is left of that."""
        if self._process.poll() is not None and not self._own_session:
            return False
        try:
            if self._own_session:
                os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)
        except ProcessLookupError:
            return False
        return True


def end_in_words(exit_code: int) -> str:
    """Tell of an exit code as `subprocess` gives it: that of a signal is negative."""
    if exit_code >= 0:
        return f"ended with {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    return f"died of {name}"


@contextmanager
def ending_group_if_killed(group: int) -> Iterator[None]:
    """Let a shell watch over the block, and end a process group should we die in it.

    It has a session of its own: what is sent to ours, to the last SIGKILL, does not reach it.
    """
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
            guard.kill()  # before its input is closed
