"""Prometheus metrics under vLLM's names; needs the extra ``trio-vllm[metrics]``.

    from trio_vllm.llm.metrics import LlmMetrics

    async with open_llm(mode, observers=[LlmMetrics(model_name="m")]) as llm: ...

Names, labels and buckets are those of ``vllm/v1/metrics/loggers.py`` (``PrometheusStatLogger``), so
dashboards made for vLLM work. Not here is what only an HTTP frontend or an engine can know: admission,
multimodal-cache, sleep-state, adapter, step and connector metrics.

Requests that their caller leaves count as aborted; those that fail with their engine do not count as
finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from trio_vllm.llm.observers import FinishedCompletion, Observer, waiting_count
from trio_vllm.protocol import FinishReason, PrefillStats, SchedulerStats

# Buckets ----------------------------------------------------------------------------------------

# fmt: off
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)
_NEXT_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
# fmt: on
_COMPLETIONS = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def _up_to(longest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, … as far as a request can be long."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > longest:
                return
            yield digit * scale
        scale *= 10


# Names ------------------------------------------------------------------------------------------

_GAUGES = {
    "num_requests_running": "Requests that take part in the engine's steps.",
    "num_requests_waiting": "Requests that wait in the engine.",
    "kv_cache_usage_perc": "Used part of the KV cache; 1 is all of it.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of prefilled requests.",
    "prompt_tokens_cached": "Prompt tokens that came out of a cache.",
    "generation_tokens": "Output tokens.",
    "num_preemptions": "Times that a running request went back into the queue.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Tokens looked up in the cache behind a KV connector.",
    "external_prefix_cache_hits": "Tokens found in the cache behind a KV connector.",
    "spec_decode_num_drafts": "Drafts of speculative decoding.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
_LABELLED = {
    "num_requests_waiting_by_reason": (Gauge, "reason", "Waiting requests by what they wait for."),
    "request_success": (Counter, "finished_reason", "Requests that ended, by their end."),
    "prompt_tokens_by_source": (Counter, "source", "Prompt tokens by where they came from."),
    "spec_decode_num_accepted_tokens_per_pos": (
        Counter,
        "position",
        "Accepted tokens by their place in the draft.",
    ),
}
_HISTOGRAMS: dict[str, tuple[Sequence[float] | None, str]] = {
    "time_to_first_token_seconds": (_FIRST_TOKEN, "From arrival to the first token."),
    "inter_token_latency_seconds": (_NEXT_TOKEN, "Between two outputs of a request."),
    "request_time_per_output_token_seconds": (_NEXT_TOKEN, "Mean over a request's tokens."),
    "e2e_request_latency_seconds": (_LATENCY, "From arrival to the end."),
    "request_queue_time_seconds": (_LATENCY, "From arrival in the engine to the first step."),
    "request_prefill_time_seconds": (_LATENCY, "From the first step to the first token."),
    "request_decode_time_seconds": (_LATENCY, "From the first to the last token."),
    "request_inference_time_seconds": (_LATENCY, "From the first step to the last token."),
    "request_num_preemptions": (_PREEMPTIONS, "Preemptions of a request."),
    "request_params_n": (_COMPLETIONS, "Completions that a prompt was to get."),
    # The buckets of these end with the model's context.
    "request_prompt_tokens": (None, "Prompt tokens of a request."),
    "request_generation_tokens": (None, "Output tokens of a request."),
    "request_prefill_kv_computed_tokens": (None, "Prompt tokens that had to be computed."),
    "request_max_num_generation_tokens": (None, "Output tokens of a prompt's longest completion."),
    "request_params_max_tokens": (None, "The request's max_tokens."),
}


class LlmMetrics(Observer):
    """The metrics of one `open_llm`, or of one after the other, in one registry.

    Serving them over HTTP is the caller's.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, model_name: str = "") -> None:
        """``model_name`` is the label of that name on all metrics."""
        self._registry = registry
        self._model_name = model_name
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}

    def start(self, engine_indices: Iterable[int], max_model_len: int) -> None:
        """Register the metrics, so that all stand at zero from here on."""
        if not self._metrics:
            self._register_all(tuple(_up_to(max_model_len)))
        for engine_index in engine_indices:
            for name in (*_GAUGES, *_COUNTERS, *_HISTOGRAMS):
                self._child(engine_index, name)
            for reason in FinishReason:
                self._child(engine_index, "request_success", str(reason))

    def _register_all(self, lengths: Sequence[float]) -> None:
        for name, text in _GAUGES.items():
            self._register(Gauge, name, text)
        for name, text in _COUNTERS.items():
            self._register(Counter, name, text)
        for name, (kind, label, text) in _LABELLED.items():
            self._register(kind, name, text, label)
        for name, (buckets, text) in _HISTOGRAMS.items():
            self._register(Histogram, name, text, buckets=lengths if buckets is None else buckets)

    def _register(self, kind: Any, name: str, text: str, *label: str, **options: Any) -> None:
        labels = ("model_name", "engine", *label)
        self._metrics[name] = kind(f"vllm:{name}", text, labels, registry=self._registry, **options)

    def _child(self, engine_index: int, name: str, *label: str) -> Any:
        key = (str(engine_index), name, *label)
        if (child := self._children.get(key)) is None:
            labels = (self._model_name, str(engine_index), *label)
            child = self._children[key] = self._metrics[name].labels(*labels)
        return child

    def _count(self, engine_index: int, name: str, number: int, *label: str) -> None:
        if number:
            self._child(engine_index, name, *label).inc(number)

    def _observe(self, engine_index: int, name: str, number: float | None) -> None:
        if number is not None:
            # The wall clock may go backwards.
            self._child(engine_index, name).observe(max(number, 0))

    # Observer -----------------------------------------------------------------------------------

    def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        self._child(engine_index, "num_requests_running").set(stats.num_running_reqs)
        self._child(engine_index, "num_requests_waiting").set(waiting_count(stats))
        for reason, number in (
            ("capacity", stats.num_waiting_reqs),
            ("deferred", stats.num_skipped_waiting_reqs),
        ):
            self._child(engine_index, "num_requests_waiting_by_reason", reason).set(number)
        self._child(engine_index, "kv_cache_usage_perc").set(stats.kv_cache_usage)
        self._count(engine_index, "prefix_cache_queries", stats.prefix_cache_stats.queries)
        self._count(engine_index, "prefix_cache_hits", stats.prefix_cache_stats.hits)
        if (external := stats.connector_prefix_cache_stats) is not None:
            self._count(engine_index, "external_prefix_cache_queries", external.queries)
            self._count(engine_index, "external_prefix_cache_hits", external.hits)
        if (drafts := stats.spec_decoding_stats) is not None:
            self._count(engine_index, "spec_decode_num_drafts", drafts.num_drafts)
            self._count(engine_index, "spec_decode_num_draft_tokens", drafts.num_draft_tokens)
            self._count(engine_index, "spec_decode_num_accepted_tokens", drafts.num_accepted_tokens)
            for position, number in enumerate(drafts.num_accepted_tokens_per_pos):
                name = "spec_decode_num_accepted_tokens_per_pos"
                self._count(engine_index, name, number, str(position))

    def prefilled(self, engine_index: int, stats: PrefillStats) -> None:
        self._count(engine_index, "prompt_tokens", stats.num_prompt_tokens)
        self._count(engine_index, "prompt_tokens_cached", stats.num_cached_tokens)
        for source, number in (
            ("local_compute", stats.num_computed_tokens),
            ("local_cache_hit", stats.num_local_cached_tokens),
            ("external_kv_transfer", stats.num_external_cached_tokens),
        ):
            self._count(engine_index, "prompt_tokens_by_source", number, source)

    def first_tokens(self, engine_index: int, seconds: float) -> None:
        self._observe(engine_index, "time_to_first_token_seconds", seconds)

    def tokens(self, engine_index: int, count: int, seconds: float | None) -> None:
        self._count(engine_index, "generation_tokens", count)
        self._observe(engine_index, "inter_token_latency_seconds", seconds)

    def preempted(self, engine_index: int) -> None:
        self._count(engine_index, "num_preemptions", 1)

    def finished(self, engine_index: int, completion: FinishedCompletion) -> None:
        usage, timings = completion.usage, completion.timings
        self._count(engine_index, "request_success", 1, str(completion.finish_reason))
        computed = usage.prompt_tokens - (usage.cached_tokens or 0)
        for name, number in (
            ("e2e_request_latency_seconds", timings.e2e_latency),
            ("request_queue_time_seconds", timings.queued_time),
            ("request_prefill_time_seconds", timings.prefill_time),
            ("request_decode_time_seconds", timings.decode_time),
            ("request_inference_time_seconds", timings.inference_time),
            # As upstream: 0 for a single token, which the prefill made.
            (
                "request_time_per_output_token_seconds",
                timings.mean_time_per_output_token or 0.0,
            ),
            ("request_num_preemptions", completion.preemption_count),
            ("request_prompt_tokens", usage.prompt_tokens),
            ("request_generation_tokens", usage.output_tokens),
            ("request_prefill_kv_computed_tokens", computed),
            ("request_params_max_tokens", completion.max_tokens),
        ):
            self._observe(engine_index, name, number)

    def request_over(self, engine_index: int, completion_count: int, longest: int) -> None:
        self._observe(engine_index, "request_params_n", completion_count)
        self._observe(engine_index, "request_max_num_generation_tokens", longest)
