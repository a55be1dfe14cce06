"""The loads that a bare frontend puts on engines, and what they show."""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from bench.frontend import Frontend, finish_reason, unpack_rows
from bench.meters import cpu_seconds
from processes import ProcessError

LENGTH = 1
"""The finish reason."""

SILENCE = 50
"""Milliseconds without a message, after which it is time to look whether all are there."""

PATIENCE = 10_000
"""Milliseconds that the first message may take."""


@dataclasses.dataclass(frozen=True)
class Burst:
    """What came of one."""

    tokens_per_second: float
    """From the first message to the last."""
    cpu_seconds_per_million: float
    """Of the engine's processes, for a million tokens."""


Params = Callable[[int], dict[str, Any]]
"""The sampling parameters of a request, by its number."""


def burst(
    frontend: Frontend, concurrency: int, tokens: int, params: Params = lambda _: {}
) -> Burst:
    """Send so many requests at once, and only keep what comes while the time counts.

    Raises:
      ProcessError: a request got fewer or more tokens than it shall have, or another end.
    """
    max_tokens = max(1, tokens // concurrency)
    pids = frontend.pids()
    cpu = cpu_seconds(pids)
    added = [frontend.add(max_tokens, **params(number)) for number in range(concurrency)]
    missing = dict.fromkeys(added, max_tokens)
    first = last = 0.0
    with no_garbage_collection():
        while missing:
            begin, end, frames = keep(frontend.outputs)
            first, last = first or begin, end
            count_down(missing, frames)
    cpu = cpu_seconds(pids) - cpu
    total = max_tokens * concurrency
    return Burst(total / max(last - first, 1e-9), cpu / total * 1e6)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """It would look through all the messages kept, again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep(outputs: "zmq.Socket[bytes]") -> tuple[float, float, list[zmq.Frame]]:
    """The messages until there is a pause; when the first and the last came."""
    if not outputs.poll(PATIENCE):
        raise ProcessError(f"no output for {PATIENCE / 1000:g} s")
    first = last = time.perf_counter()
    frames: list[zmq.Frame] = []
    while outputs.poll(SILENCE):
        with contextlib.suppress(zmq.Again):
            while True:
                frames.append(outputs.recv(zmq.DONTWAIT, copy=False))
                last = time.perf_counter()
    return first, last, frames


def count_down(missing: dict[str, int], frames: list[zmq.Frame]) -> None:
    """Take from each request what it got, and the request itself if it has ended as it should."""
    for frame in frames:
        for row in unpack_rows(frame.buffer):
            missing[row[0]] -= len(row[1])
            reason = finish_reason(row)
            if reason is not None and (reason != LENGTH or missing.pop(row[0])):
                raise ProcessError(f"{row[0]} ended with {reason}, or not after its last token")


@dataclasses.dataclass(frozen=True)
class Churn:
    """What came of it."""

    requests_per_second: float
    cpu_milliseconds_per_request: float
    """Of the engine's processes."""


def churn(frontend: Frontend, concurrency: int, max_tokens: int, seconds: float) -> Churn:
    """Replace each request that ends by a new one, for so long."""
    pids = frontend.pids()
    cpu, begin = cpu_seconds(pids), time.perf_counter()
    done, live = 0, concurrency
    for _ in range(concurrency):
        frontend.add(max_tokens)
    while live:
        ended = 0
        for row in frontend.rows():
            reason = finish_reason(row)
            if reason is not None:
                if reason != LENGTH:
                    raise ProcessError(f"{row[0]} ended with {reason}")
                ended += 1
        done += ended
        if time.perf_counter() - begin < seconds:
            for _ in range(ended):
                frontend.add(max_tokens)
        else:
            live -= ended
    elapsed = time.perf_counter() - begin
    cpu = cpu_seconds(pids) - cpu
    return Churn(done / elapsed, cpu / done * 1e3)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How regularly tokens came."""

    gaps: list[float]
    """Seconds between two tokens of a request, of all requests, sorted."""
    cpu_share: float
    """Of a core, for the engine's processes."""

    @property
    def mean(self) -> float:
        """Of the gaps."""
        return statistics.fmean(self.gaps)

    @property
    def p99(self) -> float:
        """99 % of the gaps are not longer."""
        return self.gaps[len(self.gaps) * 99 // 100]


def pace(frontend: Frontend, concurrency: int, max_tokens: int) -> Pace:
    """Send so many requests at once, and note when each token comes."""
    pids = frontend.pids()
    missing = {frontend.add(max_tokens) for _ in range(concurrency)}
    last: dict[str, float] = {}
    gaps: list[float] = []
    cpu = begin = 0.0
    while missing:
        rows = frontend.rows()
        now = time.perf_counter()
        for row in rows:
            if row[0] in last:
                gaps.append(now - last[row[0]])
            last[row[0]] = now
            if finish_reason(row) is not None:
                missing.discard(row[0])
        if not begin and len(last) == concurrency:  # the prompts are over
            cpu, begin = cpu_seconds(pids), now
    share = (cpu_seconds(pids) - cpu) / (time.perf_counter() - begin)
    return Pace(sorted(gaps), share)


def ping(frontend: Frontend, count: int) -> list[float]:
    """Send a request and wait for a message, so many times; gives the seconds of each."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        frontend.add(1)
        frontend.outputs.recv()
        times.append(time.perf_counter() - begin)
    return times
