"""Who wants to know what happens to requests: the metrics, the line of statistics."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trio_vllm.llm._output import RequestTimings, Usage
from trio_vllm.protocol import FinishReason, PrefillStats, SchedulerStats


@attrs.frozen(kw_only=True)
class FinishedCompletion:
    """One engine request that is over."""

    finish_reason: FinishReason
    usage: Usage
    timings: RequestTimings
    max_tokens: int | None
    preemption_count: int


class Observer:
    """Is told of each event, by engine; does nothing. Times are seconds.

    Called in the task that hands out outputs, so it must not wait or raise.
    """

    def start(self, engine_indices: Iterable[int], max_model_len: int) -> None:
        """These engines are connected; called once, before everything else."""

    def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """An engine tells its state."""

    def prefilled(self, engine_index: int, stats: PrefillStats) -> None:
        """A prompt is in the cache."""

    def first_tokens(self, engine_index: int, seconds: float) -> None:
        """The first tokens came this long after the request."""

    def tokens(self, engine_index: int, count: int, seconds: float | None) -> None:
        """Tokens came, this long after the ones before them; None with the first."""

    def preempted(self, engine_index: int) -> None:
        """A request went back into the queue."""

    def finished(self, engine_index: int, completion: FinishedCompletion) -> None:
        """An engine request is over; not called for one that failed with its engine."""

    def request_over(self, engine_index: int, completion_count: int, longest: int) -> None:
        """All completions of a prompt are over; the longest has this many tokens."""
