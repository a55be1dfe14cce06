"""What processes use, as Linux counts it."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROC = Path("/proc")
NANOSECONDS = 1e9
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU time that live threads of these processes have used, to the nanosecond.

    The times of threads that have ended are not in it.
    """
    total = 0
    for pid in pids:
        for schedstat in PROC.glob(f"{pid}/task/*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                total += int(schedstat.read_text().split()[0])
    return total / NANOSECONDS


def resident_bytes(pids: Iterable[int]) -> int:
    """The memory of these processes that is in RAM, shared pages counted in each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int((PROC / str(pid) / "statm").read_text().split()[1])
    return pages * PAGE_SIZE


def cpu_time_of(work: Callable[[], object], times: int = 1) -> float:
    """CPU seconds of this process for so many calls."""
    begin = time.process_time()
    for _ in range(times):
        work()
    return time.process_time() - begin
