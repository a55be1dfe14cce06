"""Processes that end with a block; what Linux tells of them, and of threads, that may end meanwhile."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROC = Path("/proc")


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process, and kill it if it still runs when the block is left."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def read(path: Path) -> str:
    """A file of a process or thread; nothing if that has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or after
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs (and is not only waiting to be collected)."""
    state = read(PROC / str(pid) / "stat").rpartition(")")[2].split()[:1]
    return state not in ([], ["Z"], ["X"])


def children_of(pid: int) -> list[int]:
    """The processes that it has started and that have not been collected."""
    lists = (PROC / str(pid) / "task").glob("*/children")
    return sorted(int(child) for path in lists for child in read(path).split())


def own_threads() -> list[str]:
    """The names of the threads of this process."""
    return [read(path).strip() for path in (PROC / "self/task").glob("*/comm")]
