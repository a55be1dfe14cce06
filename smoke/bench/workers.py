"""Child processes that measure something when told to: an order a line, an answer a line, JSON.

A process of its own keeps what is measured apart from the garbage and the memory of what was
measured before, and lets us and a yardstick take turns although each takes long to start.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.frontend import ENVIRONMENT
from processes import KILL_TIMEOUT, ProcessError, guarding, tail

ANSWER_TIMEOUT = 180.0
"""Seconds for an answer; the first one includes what it imports."""

Answer = dict[str, Any]


class Worker:
    """A child that answers; made by `working`."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._popen = popen
        self._log = log
        self._rest = b""

    def ask(self, **order: Any) -> Answer:
        """Give an order and wait for the answer."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(order).encode() + b"\n")
            self._popen.stdin.flush()
        return self.receive()

    def receive(self) -> Answer:
        """Wait for an answer."""
        assert self._popen.stdout is not None
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._popen.stdout], [], [], left)[0]:
                raise self._failure(f"no answer after {ANSWER_TIMEOUT:g} s")
            chunk = os.read(self._popen.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._failure("ended without an answer")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def _failure(self, what: str) -> ProcessError:
        log = tail(self._log.read_text(encoding="utf-8", errors="replace"))
        return ProcessError(f"{self.name}: {what}\n{log}")

    def end(self) -> None:
        """Let it leave, or kill its group."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILL_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(KILL_TIMEOUT)


@contextlib.contextmanager
def working(
    name: str, command: Sequence[str | Path], environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[Worker]:
    """Run a worker while the block runs. If we are killed before it is left, it is killed too."""
    with (
        tempfile.TemporaryDirectory(prefix="trio-vllm-bench-") as directory,
        contextlib.ExitStack() as until_its_end,
    ):
        log_path = Path(directory) / "log"
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        worker = Worker(name, popen, log_path)
        try:
            until_its_end.enter_context(guarding(popen.pid))
            yield worker
        finally:
            worker.end()


# The child's side -------------------------------------------------------------------------------


def read_order() -> Answer | None:
    """Wait for an order; None if there will be no more."""
    line = sys.stdin.readline()
    order: Answer | None = json.loads(line) if line else None
    return order


def reply(**answer: Any) -> None:
    """Answer an order."""
    print(json.dumps(answer), flush=True)


def answer_orders(tasks: Mapping[str, Callable[..., Answer]]) -> None:
    """Serve for ever: each order names a task and gives its arguments."""
    while (order := read_order()) is not None:
        reply(**tasks[order.pop("task")](**order))
