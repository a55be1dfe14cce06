"""`LlmStatistics`: what is known of the engines and of the requests at them, in one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from trio_vllm.client import EngineSnapshot
from trio_vllm.llm.collector import Collector
from trio_vllm.llm.observers import waiting_count
from trio_vllm.values import define, frozen


@define(kw_only=True)
class TokenTotals:
    """Tokens of this `Llm`'s requests at one engine, since it was opened."""

    prompt_tokens: int = 0
    """Those of requests whose prefill has ended, if the engine says."""
    computed_prompt_tokens: int = 0
    """Those of them that came out of no cache."""
    external_cached_tokens: int = 0
    """Those of them that came from behind a KV connector."""
    output_tokens: int = 0

    def add(self, collector: Collector) -> None:
        """Count the tokens of one engine request so far."""
        self.output_tokens += collector.token_count
        if (stats := collector.prefill_stats) is not None:
            self.prompt_tokens += stats.num_prompt_tokens
            self.computed_prompt_tokens += stats.num_computed_tokens
            self.external_cached_tokens += stats.num_external_cached_tokens

    def since(self, earlier: TokenTotals) -> TokenTotals:
        """Count what has come since then."""
        return TokenTotals(
            prompt_tokens=self.prompt_tokens - earlier.prompt_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens - earlier.computed_prompt_tokens,
            external_cached_tokens=self.external_cached_tokens - earlier.external_cached_tokens,
            output_tokens=self.output_tokens - earlier.output_tokens,
        )


@frozen(kw_only=True)
class EngineStatistics:
    """One engine; None is what is not known, so if it has sent no statistics that can be read.

    Rates are over the time since the earlier statistics that were given, else since the `Llm` was
    opened, and of this client's requests only.
    """

    is_alive: bool
    """Whether it takes requests."""
    is_stalled: bool
    """Whether it has requests and runs none; see `EngineCoreClient.stalled_engines`."""
    in_flight: int
    """This client's engine requests that have not ended there."""
    running: int | None
    waiting: int | None
    """Requests that do not run, whatever they wait for; other clients' too."""
    kv_cache_usage: float | None
    """0 to 1."""
    totals: TokenTotals
    prompt_throughput: float
    """Prompt tokens per second that came out of no cache."""
    generation_throughput: float
    """Output tokens per second."""
    prefix_cache_hit_rate: float | None
    """Part of the prompt tokens that came out of the engine's own cache; 0 to 1."""
    external_cache_hit_rate: float | None
    """Part of the prompt tokens that came from behind a KV connector; 0 to 1."""
    oldest_request_age: float | None
    """Seconds since the arrival of the oldest request that has not ended; None if there is none."""
    statistics_age: float | None
    """Seconds since its newest statistics came."""


@frozen(kw_only=True)
class LlmStatistics:
    """All engines by index, the dead too, and the requests of this `Llm`'s callers."""

    time: float
    """When it was made, by trio's clock."""
    engines: Mapping[int, EngineStatistics]
    in_flight: int
    """Callers' requests that have not ended; each may be several engine requests."""


@define
class TokenCounter:
    """Counts the tokens of requests by engine; what is in flight is looked at only when asked."""

    since: float
    """The opening, by trio's clock."""
    _ended: dict[int, TokenTotals] = attrs.field(factory=dict, init=False)

    def add_ended(self, collectors: Iterable[Collector]) -> None:
        """Count requests that are over."""
        for collector in collectors:
            self._add(self._ended, collector)

    def totals(self, in_flight: Iterable[Collector]) -> dict[int, TokenTotals]:
        """Count all requests, these too, by engine."""
        totals = {index: attrs.evolve(counted) for index, counted in self._ended.items()}
        for collector in in_flight:
            self._add(totals, collector)
        return totals

    def _add(self, totals: dict[int, TokenTotals], collector: Collector) -> None:
        counted = totals.get(collector.engine_index)
        if counted is None:
            counted = totals[collector.engine_index] = TokenTotals()
        counted.add(collector)


def describe_engine(
    snapshot: EngineSnapshot,
    totals: TokenTotals,
    oldest_age: float | None,
    *,
    now: float,
    earlier: EngineStatistics | None,
    since: float,
) -> EngineStatistics:
    """Put together what is known of one engine; rates are those from ``since``, and ``earlier``, on."""
    recent = totals if earlier is None else totals.since(earlier.totals)
    seconds = now - since
    prompt = recent.prompt_tokens
    local = prompt - recent.computed_prompt_tokens - recent.external_cached_tokens
    stats, time = snapshot.stats, snapshot.stats_time
    return EngineStatistics(
        is_alive=snapshot.is_alive,
        is_stalled=snapshot.is_stalled,
        in_flight=snapshot.in_flight,
        running=None if stats is None else stats.num_running_reqs,
        waiting=None if stats is None else waiting_count(stats),
        kv_cache_usage=None if stats is None else stats.kv_cache_usage,
        totals=totals,
        prompt_throughput=recent.computed_prompt_tokens / seconds if seconds > 0 else 0.0,
        generation_throughput=recent.output_tokens / seconds if seconds > 0 else 0.0,
        prefix_cache_hit_rate=local / prompt if prompt else None,
        external_cache_hit_rate=recent.external_cached_tokens / prompt if prompt else None,
        oldest_request_age=oldest_age,
        statistics_age=None if time is None else now - time,
    )
