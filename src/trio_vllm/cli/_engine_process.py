"""An engine that is started by a command, watched, and certain to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress

import trio

from trio_vllm.cli._guard import guarding
from trio_vllm.cli._own_engines import EnginesEndedError
from trio_vllm.cli._process_end import end_in_words
from trio_vllm.concurrency import running

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL: what an engine takes for its own cleanup."""

HURRIED_GRACE = 0.3
"""The same if the user wants us to stop, which shall take a second at most."""

VANISHING_TIME = 0.3
"""Seconds that we wait for processes to vanish after SIGKILL, which they cannot escape."""

POLL_INTERVAL = 0.01
"""Seconds between two looks whether they have."""

LOG_DELAY = 0.5
"""Seconds in which the last words of an ended process must have come."""

LONGEST_LINE = 65_536
"""Bytes that are kept of what it prints without a line break."""


@asynccontextmanager
async def engine_process(
    command: Sequence[str], on_end: Callable[[str], None], *, verbose: bool
) -> AsyncIterator[None]:
    """Run ``command`` while the block runs, then end it and all of its group.

    That is so even if this process is killed.

    Args:
      command: The program and its arguments. It gets a session of its own: Ctrl-C does not reach
        it, and all that it starts can be ended with it.
      on_end: Is told, in words, if it ends by itself.
      verbose: Pass on to standard error what it prints.

    Raises:
      EnginesEndedError: It cannot be started.
    """
    try:
        raw = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise EnginesEndedError(f"cannot start {command[0]}: {error.strerror}") from error
    process = _EngineProcess(raw, verbose=verbose)

    async def watch() -> None:
        on_end(await process.wait())

    with ExitStack() as until_its_end:
        async with running(process.pump_log, watch):
            grace = GRACE
            try:
                until_its_end.enter_context(guarding(raw.pid))
                yield
            except trio.Cancelled:
                grace = HURRIED_GRACE
                raise
            finally:
                with trio.move_on_after(grace + VANISHING_TIME, shield=True):
                    await process.end(grace)


class _EngineProcess:
    def __init__(self, process: trio.Process, *, verbose: bool) -> None:
        self._process = process
        self._verbose = verbose
        self._last_line = ""
        self._log_ended = trio.Event()

    async def pump_log(self) -> None:
        """Task: read what it prints; it would have to stop otherwise."""
        assert self._process.stdout is not None
        rest = b""
        async for chunk in self._process.stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take_line(line)
            rest = rest[-LONGEST_LINE:]
        self._take_line(rest)
        self._log_ended.set()

    def _take_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if not line:
            return
        self._last_line = line
        if self._verbose:
            with suppress(OSError):  # whoever read it has gone
                print(f"engine: {line}", file=sys.stderr, flush=True)

    async def wait(self) -> str:
        """Wait for its end; tells of it in words."""
        exit_code = await self._process.wait()
        with trio.move_on_after(LOG_DELAY):
            await self._log_ended.wait()
        how = end_in_words(exit_code)
        return f"the engine command {how}" + (f": {self._last_line}" if self._last_line else "")

    async def end(self, grace: float) -> None:
        """Terminate its group, and after ``grace`` seconds kill what is left of it, until it is gone."""
        self._signal_group(signal.SIGTERM)
        with trio.move_on_after(grace):
            await self._process.wait()
        while self._signal_group(signal.SIGKILL):  # noqa: ASYNC110  (nobody tells)
            await trio.sleep(POLL_INTERVAL)

    def _signal_group(self, number: int) -> bool:
        """Say whether there is anybody left in the group."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True
