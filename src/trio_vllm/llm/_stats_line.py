"""A log line about throughput and load, every so many seconds.

Mirrors ``LoggingStatLogger`` of ``vllm/v1/metrics/loggers.py``, summed over all engines.
"""

from __future__ import annotations

import logging
import math

import attrs
import trio

from trio_vllm.llm._observer import Observer
from trio_vllm.protocol import PrefillStats, SchedulerStats

_log = logging.getLogger("trio_vllm.llm")


@attrs.define
class _Counts:
    """What happened since the last line."""

    prompt_tokens: int = 0
    """Computed ones; those from a cache cost no time."""
    generation_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.prompt_tokens and not self.generation_tokens


class StatsLine(Observer):
    """Counts, and writes the line: as information while there is something to tell, else to debug."""

    def __init__(self, interval: float) -> None:
        """``interval`` is in seconds."""
        if not 0 < interval < math.inf:
            raise ValueError("stats_interval must be above 0")
        self._interval = interval
        self._counts = _Counts()
        self._was_idle = True
        self._newest: dict[int, SchedulerStats] = {}

    async def run(self) -> None:
        """Task: write lines, for ever."""
        while True:
            await trio.sleep(self._interval)
            self._write()

    def _write(self) -> None:
        counts, self._counts = self._counts, _Counts()
        # One line of zeros shows that the work is done.
        level = logging.DEBUG if counts.is_idle and self._was_idle else logging.INFO
        self._was_idle = counts.is_idle
        stats = list(self._newest.values())
        usage = sum(s.kv_cache_usage for s in stats) / max(len(stats), 1)
        parts = [
            f"prompt throughput {counts.prompt_tokens / self._interval:.1f} tokens/s",
            f"generation throughput {counts.generation_tokens / self._interval:.1f} tokens/s",
            f"running {sum(s.num_running_reqs for s in stats)}",
            f"waiting {sum(waiting_count(s) for s in stats)}",
            f"KV cache usage {usage:.1%}",
        ]
        if counts.preemptions:
            parts.append(f"preemptions {counts.preemptions}")
        if counts.cache_queries:
            parts.append(f"prefix cache hit rate {counts.cache_hits / counts.cache_queries:.1%}")
        _log.log(level, "%s", ", ".join(parts))

    # Observer -----------------------------------------------------------------------------------

    def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """See `Observer`."""
        self._newest[engine_index] = stats
        self._counts.cache_queries += stats.prefix_cache_stats.queries
        self._counts.cache_hits += stats.prefix_cache_stats.hits

    def prefilled(self, engine_index: int, stats: PrefillStats) -> None:
        """See `Observer`."""
        self._counts.prompt_tokens += stats.num_computed_tokens

    def tokens(self, engine_index: int, count: int, seconds: float | None) -> None:
        """See `Observer`."""
        self._counts.generation_tokens += count

    def preempted(self, engine_index: int) -> None:
        """See `Observer`."""
        self._counts.preemptions += 1


def waiting_count(stats: SchedulerStats) -> int:
    """Requests that do not run, whatever they wait for."""
    return stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
