"""What processes hold over time, and whether that grows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import numpy as np
import trio

PROC = Path("/proc")
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

INTERVAL = 0.5
"""Seconds between two samples."""
WARM_UP = 0.25
"""Part of a series that is left out: caches, pools and the loads themselves fill up."""
LEAST_SAMPLES = 40
"""A shorter series says nothing."""

MEMORY_TOLERANCE = 12 * 2**20
"""Bytes by which memory may seem to grow over a series: it goes up and down by as much."""
DESCRIPTOR_TOLERANCE = 8.0
"""Connections come and go; one that stayed for good in each session would be more in three minutes."""


@attrs.define
class Series:
    """The samples of one process."""

    name: str
    times: list[float] = attrs.field(factory=list)
    resident: list[int] = attrs.field(factory=list)
    descriptors: list[int] = attrs.field(factory=list)

    def growth(self, values: list[int]) -> float | None:
        """How much more it is at the end than after the warm-up, by the line that fits best."""
        start = int(len(values) * WARM_UP)
        times, kept = np.array(self.times[start:]), np.array(values[start:], float)
        if len(kept) < LEAST_SAMPLES:
            return None
        slope = np.polyfit(times - times[0], kept, 1)[0]
        return float(slope * (times[-1] - times[0]))

    def faults(self) -> list[str]:
        """What of it grows."""
        found = []
        memory, descriptors = self.growth(self.resident), self.growth(self.descriptors)
        if memory is not None and memory > MEMORY_TOLERANCE:
            found.append(f"{self.name}: memory grew by {memory / 2**20:.1f} MiB")
        if descriptors is not None and descriptors > DESCRIPTOR_TOLERANCE:
            found.append(f"{self.name}: descriptors grew by {descriptors:.1f}")
        return found


@attrs.define
class Sampler:
    """Looks at processes again and again."""

    pids: Callable[[], Mapping[str, int]]
    """The processes that there are at present, by name."""
    series: dict[tuple[str, int], Series] = attrs.field(factory=dict)
    begin: float = attrs.field(factory=time.monotonic)

    async def run(self) -> None:
        """Task: take samples until cancelled."""
        while True:
            for name, pid in self.pids().items():
                with contextlib.suppress(OSError):  # it has ended
                    self._sample(name, pid)
            await trio.sleep(INTERVAL)

    def _sample(self, name: str, pid: int) -> None:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
        descriptors = len(os.listdir(PROC / str(pid) / "fd"))
        series = self.series.setdefault((name, pid), Series(name))
        series.times.append(time.monotonic() - self.begin)
        series.resident.append(pages * PAGE_SIZE)
        series.descriptors.append(descriptors)
