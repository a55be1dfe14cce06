"""`LlmMetrics`: Prometheus metrics under vLLM's names; needs the extra ``trio-vllm[metrics]``.

    from trio_vllm.llm.metrics import LlmMetrics

    async with open_llm(mode, observers=[LlmMetrics(model_name="m")]) as llm: ...

Names, labels and default buckets are those of ``vllm/v1/metrics/loggers.py`` (``PrometheusStatLogger``)
and of ``rust/src/metrics``, so dashboards made for vLLM work. Not here is what only an HTTP frontend
can know (admission, multimodal cache), and what only an engine's configuration tells (cache); that
engines have a watermark is to be stated.

What engines do not measure has no series: gauges begin with an engine's first statistics, preemptions
with its first event, transfers with the first statistics of the connector. All other counters stand at
zero from the start, with each known value of their labels.

Requests that their caller leaves count as aborted; those that fail with their engine do not count as
finished, and those that an engine refuses before they run do not count at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from trio_vllm.errors import ConfigurationError, how_to_install
from trio_vllm.values import frozen

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"metrics need prometheus_client: {how_to_install('metrics')}", name=error.name
    ) from error

from trio_vllm.llm.connectors import (
    MOONCAKE,
    NIXL,
    StoreOperation,
    Transfers,
    read_connector_stats,
)
from trio_vllm.llm.observers import AdapterState, FinishedCompletion, Observer, waiting_count
from trio_vllm.protocol import (
    EngineCoreEvent,
    EngineCoreSamplingParams,
    EventType,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)

# Buckets ----------------------------------------------------------------------------------------

REQUEST_TOKENS = "request_tokens"

# fmt: off
BUCKETS: dict[str, tuple[float, ...]] = {
    "request_latency": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
        240.0, 480.0, 960.0, 1920.0, 7680.0,
    ),
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0,
    ),
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "kv_cache_residency": (
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300,
        600, 1200, 1800,
    ),
}
"""Default upper bounds by family; those of `REQUEST_TOKENS` end with the model's context."""

_TRANSFER_TIME = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_TRANSFER_BYTES = tuple(2.0**exponent for exponent in range(11, 35, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_STORE_TIME = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0,
)
# fmt: on


def _up_to(longest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, … as far as a request can be long."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > longest:
                return
            yield digit * scale
        scale *= 10


def _check_buckets(buckets: Mapping[str, Sequence[float]]) -> None:
    """Check the buckets as upstream checks ``custom_histogram_buckets``."""
    for family, bounds in buckets.items():
        if family not in {*BUCKETS, REQUEST_TOKENS}:
            raise ConfigurationError(f"there is no bucket family {family!r}")
        if not bounds:
            raise ConfigurationError(f"buckets of {family!r}: there must be a bound")
        if not all(type(bound) in (int, float) and 0 < bound < math.inf for bound in bounds):
            raise ConfigurationError(f"buckets of {family!r}: bounds must be finite and above 0")
        if any(lower >= upper for lower, upper in pairwise(bounds)):
            raise ConfigurationError(f"buckets of {family!r}: bounds must increase")


# Metrics ----------------------------------------------------------------------------------------

START = "start"
"""The series are there from the start; other such words: from the first statistics, event, ..."""
STATS = "stats"
EVENTS = "events"
LATER = "later"
"""Each series is there from its first value on: its labels are not known before."""


@frozen
class _Metric:
    """A metric by engine, with one further label or two; `values` are those known of the first."""

    kind: Any
    text: str
    labels: tuple[str, ...] = ()
    values: Sequence[str] = ()
    since: str = START
    buckets: str | tuple[float, ...] = ()
    """A family, or bounds that are fixed."""


def _gauge(text: str, label: str = "", values: Sequence[str] = (), since: str = STATS) -> _Metric:
    return _Metric(Gauge, text, (label,) if label else (), values, since)


def _counter(text: str, since: str = START) -> _Metric:
    return _Metric(Counter, text, since=since)


def _labelled(text: str, label: str, values: Sequence[str] = ()) -> _Metric:
    return _Metric(Counter, text, (label,), values, START if values else LATER)


def _histogram(
    buckets: str | tuple[float, ...], text: str, since: str = START, labels: tuple[str, ...] = ()
) -> _Metric:
    return _Metric(Histogram, text, labels, since=since, buckets=buckets)


def _operation_counter(text: str) -> _Metric:
    return _Metric(Counter, text, _OPERATION, since=LATER)


_OPERATION = ("operation", "status")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
_REASONS = ("capacity", "deferred")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_WATERMARKS = ("watermarked", "skipped", "not_watermarked")

_METRICS = {
    # The state of an engine
    "num_requests_running": _gauge("Requests that take part in the engine's steps."),
    "num_requests_waiting": _gauge("Requests that wait in the engine."),
    "num_requests_waiting_by_reason": _gauge(
        "Waiting requests by what they wait for.", "reason", _REASONS
    ),
    "num_requests_kv_fetch_by_stage": _gauge(
        "Waiting requests by the stage of their KV transfer.", "stage", _STAGES, LATER
    ),
    "engine_sleep_state": _gauge(
        "1 for the state that this client has put the engine into; engines begin awake.",
        "sleep_state",
        _SLEEP_STATES,
        START,
    ),
    "kv_cache_usage_perc": _gauge("Used part of the KV cache; 1 is all of it."),
    # Caches
    "prefix_cache_queries": _counter("Tokens looked up in the prefix cache."),
    "prefix_cache_hits": _counter("Tokens found in the prefix cache."),
    "external_prefix_cache_queries": _counter("Tokens looked up behind a KV connector."),
    "external_prefix_cache_hits": _counter("Tokens found behind a KV connector."),
    "prompt_tokens_cached_by_source": _labelled(
        "Tokens found in a cache, by where that is.", "source", _CACHE_SOURCES
    ),
    "kv_block_lifetime_seconds": _histogram(
        "kv_cache_residency", "From allocation to eviction of a sampled block of the KV cache."
    ),
    "kv_block_idle_before_evict_seconds": _histogram(
        "kv_cache_residency", "From the last use to the eviction of a sampled block."
    ),
    "kv_block_reuse_gap_seconds": _histogram(
        "kv_cache_residency", "Between two uses of a sampled block."
    ),
    # Speculative decoding and utilisation
    "spec_decode_num_drafts": _counter("Drafts of speculative decoding."),
    "spec_decode_num_draft_tokens": _counter("Drafted tokens."),
    "spec_decode_num_accepted_tokens": _counter("Drafted tokens that were accepted."),
    "spec_decode_num_accepted_tokens_per_pos": _labelled(
        "Accepted tokens by their place in the draft.", "position"
    ),
    "estimated_flops_per_gpu": _counter("Estimated floating-point operations of each GPU."),
    "estimated_read_bytes_per_gpu": _counter("Estimated bytes that each GPU read from memory."),
    "estimated_write_bytes_per_gpu": _counter("Estimated bytes that each GPU wrote to memory."),
    # Tokens
    "prompt_tokens": _counter("Prompt tokens of prefilled requests."),
    "prompt_tokens_by_source": _labelled(
        "Prompt tokens by where they came from.", "source", _SOURCES
    ),
    "prompt_tokens_cached": _counter("Prompt tokens that came out of a cache."),
    "generation_tokens": _counter("Output tokens."),
    "iteration_tokens_total": _histogram(
        "iteration_tokens", "Tokens of a message of an engine: computed in prefills, and new ones."
    ),
    # Requests
    "request_success": _labelled(
        "Requests that ended, by their end.", "finished_reason", [str(r) for r in FinishReason]
    ),
    "corrupted_requests": _counter("Finished requests that had NaNs in their logits."),
    "num_preemptions": _counter(
        "Times that a running request was put back into the queue.", EVENTS
    ),
    "time_to_first_token_seconds": _histogram(
        "time_to_first_token", "From arrival to the first token."
    ),
    "inter_token_latency_seconds": _histogram(
        "inter_token_latency", "Between two outputs of a request."
    ),
    "request_time_per_output_token_seconds": _histogram(
        "inter_token_latency", "Mean over a request's tokens."
    ),
    "e2e_request_latency_seconds": _histogram("request_latency", "From arrival to the end."),
    "request_queue_time_seconds": _histogram(
        "request_latency", "From arrival in the engine to the first step."
    ),
    "request_prefill_time_seconds": _histogram(
        "request_latency", "From the first step to the first token."
    ),
    "request_decode_time_seconds": _histogram(
        "request_latency", "From the first to the last token."
    ),
    "request_inference_time_seconds": _histogram(
        "request_latency", "From the first step to the last token."
    ),
    "request_num_preemptions": _histogram(
        "request_num_preemptions", "Preemptions of a request.", EVENTS
    ),
    "request_params_n": _histogram("request_params_n", "Completions that a prompt was to get."),
    "request_params_max_tokens": _histogram(REQUEST_TOKENS, "The request's max_tokens."),
    "request_prompt_tokens": _histogram(REQUEST_TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": _histogram(REQUEST_TOKENS, "Output tokens of a request."),
    "request_prefill_kv_computed_tokens": _histogram(
        REQUEST_TOKENS, "Prompt tokens that the engine had to compute."
    ),
    "request_max_num_generation_tokens": _histogram(
        REQUEST_TOKENS, "Output tokens of a prompt's longest completion."
    ),
    # KV transfers
    "nixl_xfer_time_seconds": _histogram(_TRANSFER_TIME, "Duration of a transfer.", NIXL),
    "nixl_post_time_seconds": _histogram(
        (0.001, *_TRANSFER_TIME), "Duration of posting a transfer.", NIXL
    ),
    "nixl_bytes_transferred": _histogram(_TRANSFER_BYTES, "Bytes of a transfer.", NIXL),
    "nixl_num_descriptors": _histogram(_DESCRIPTORS, "Descriptors of a transfer.", NIXL),
    "nixl_num_failed_transfers": _counter("Failed transfers, handshakes, notifications.", NIXL),
    "nixl_num_failed_notifications": _counter("Failed notifications.", NIXL),
    "nixl_num_kv_expired_reqs": _counter("Requests whose KV blocks expired.", NIXL),
    "nixl_num_notifications_after_expiry": _counter(
        "Notifications of requests that were no longer known.", NIXL
    ),
    "mooncake_xfer_time_seconds": _histogram(_TRANSFER_TIME, "Duration of a transfer.", MOONCAKE),
    "mooncake_bytes_transferred": _histogram(_TRANSFER_BYTES, "Bytes of a transfer.", MOONCAKE),
    "mooncake_num_descriptors": _histogram(_DESCRIPTORS, "Descriptors of a transfer.", MOONCAKE),
    "mooncake_num_failed_transfers": _counter("Failed transfers.", MOONCAKE),
    "mooncake_num_failed_recvs": _counter("Failed receives.", MOONCAKE),
    "mooncake_num_kv_expired_reqs": _counter("Requests whose KV blocks expired.", MOONCAKE),
    "mooncake_store_operation_time_seconds": _histogram(
        _STORE_TIME, "Duration of an operation on the store.", LATER, _OPERATION
    ),
    "mooncake_store_operation": _operation_counter("Operations on the store."),
    "mooncake_store_operation_keys": _operation_counter("Keys of the operations."),
    "mooncake_store_operation_bytes": _operation_counter("Bytes of the operations."),
    "mooncake_store_operation_failed_keys": _operation_counter("Keys that failed."),
}

_WATERMARK_METRICS = {
    "watermark_requests": _labelled(
        "Finished requests by whether the engine marked them.", "status", _WATERMARKS
    )
}

_ADAPTERS = "lora_requests_info"
_ADAPTER_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class LlmMetrics(Observer):
    """Observer that keeps the metrics of one `open_llm`, or of one after the other, in one registry.

    Serving them over HTTP is the caller's.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        model_name: str = "",
        buckets: Mapping[str, Sequence[float]] | None = None,
        watermarking: bool = False,
    ) -> None:
        """Keep the arguments; `start` registers.

        Args:
          registry: Where the metrics go.
          model_name: The label of that name on all metrics.
          buckets: Upper bounds for all histograms of a family, instead of `BUCKETS`.
          watermarking: Whether the engines run with a ``watermark_config``, which they do not tell;
            then there is ``watermark_requests``.

        Raises:
          ConfigurationError: Buckets that upstream would not take either.
        """
        _check_buckets(buckets or {})
        self._registry = registry
        self._model_name = model_name
        self._buckets = {**BUCKETS, **(buckets or {})}
        self._table = {**_METRICS, **(_WATERMARK_METRICS if watermarking else {})}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._begun: set[tuple[int, str]] = set()
        self._token_children: dict[int, tuple[Any, Any]] = {}
        self._adapters = _Adapters()

    def start(self, engine_indices: Iterable[int], max_model_len: int, max_loras: int) -> None:
        """Register the metrics, and begin the series that are there from the start."""
        if not self._metrics:
            lengths = self._buckets.get(REQUEST_TOKENS, tuple(_up_to(max_model_len)))
            self._register_all(lengths)
        self._adapters = _Adapters(self._metrics[_ADAPTERS], str(max_loras))
        for engine_index in engine_indices:
            self._begin(engine_index, START)
            self.sleep_level(engine_index, None)

    def _register_all(self, lengths: Sequence[float]) -> None:
        families = {**self._buckets, REQUEST_TOKENS: lengths}
        for name, metric in self._table.items():
            options = {}
            if metric.kind is Histogram:
                bounds = metric.buckets
                options["buckets"] = families[bounds] if isinstance(bounds, str) else bounds
            labels = ("model_name", "engine", *metric.labels)
            self._metrics[name] = metric.kind(
                f"vllm:{name}", metric.text, labels, registry=self._registry, **options
            )
        text = "Adapters of the requests that run and wait; the value is the UNIX time."
        self._metrics[_ADAPTERS] = Gauge(
            f"vllm:{_ADAPTERS}", text, _ADAPTER_LABELS, registry=self._registry
        )

    def _begin(self, engine_index: int, since: str) -> None:
        """Let the series of an engine that wait for this stand at zero."""
        if (engine_index, since) in self._begun:
            return
        self._begun.add((engine_index, since))
        for name, metric in self._table.items():
            if metric.since == since:
                for value in metric.values:
                    self._child(engine_index, name, value)
                if not metric.labels:
                    self._child(engine_index, name)

    def _child(self, engine_index: int, name: str, *label: str) -> Any:
        key = (str(engine_index), name, *label)
        if (child := self._children.get(key)) is None:
            labels = (self._model_name, str(engine_index), *label)
            child = self._children[key] = self._metrics[name].labels(*labels)
        return child

    def _count(self, engine_index: int, name: str, number: float, *label: str) -> None:
        if number:
            self._child(engine_index, name, *label).inc(number)

    def _observe(self, engine_index: int, name: str, number: float | None, *label: str) -> None:
        if number is not None:
            # The wall clock may go backwards.
            self._child(engine_index, name, *label).observe(max(number, 0))

    # What engines say of themselves -------------------------------------------------------------

    def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        self._begin(engine_index, STATS)
        self._set_gauges(engine_index, stats)
        self._count_cache(engine_index, "", stats.prefix_cache_stats)
        self._count_source(engine_index, "device", stats.prefix_cache_stats.hits)
        if (external := stats.connector_prefix_cache_stats) is not None:
            self._count_cache(engine_index, "external_", external)
            for source, hits in external.hits_by_source.items():
                self._count_source(engine_index, source, hits)
        if stats.spec_decoding_stats is not None:
            self._count_drafts(engine_index, stats.spec_decoding_stats)
        if (perf := stats.perf_stats) is not None:
            self._count(engine_index, "estimated_flops_per_gpu", perf.num_flops_per_gpu)
            self._count(engine_index, "estimated_read_bytes_per_gpu", perf.num_read_bytes_per_gpu)
            self._count(engine_index, "estimated_write_bytes_per_gpu", perf.num_write_bytes_per_gpu)
        self._observe_evictions(engine_index, stats)
        for part in read_connector_stats(stats.kv_connector_stats or {}):
            if isinstance(part, Transfers):
                self._observe_transfers(engine_index, part)
            else:
                self._observe_operation(engine_index, part)
        self._adapters.receive(engine_index, stats)

    def _set_gauges(self, engine_index: int, stats: SchedulerStats) -> None:
        self._child(engine_index, "num_requests_running").set(stats.num_running_reqs)
        self._child(engine_index, "num_requests_waiting").set(waiting_count(stats))
        counts = (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs)
        for reason, number in zip(_REASONS, counts, strict=True):
            self._child(engine_index, "num_requests_waiting_by_reason", reason).set(number)
        for stage in _STAGES if stats.num_kv_fetch_reqs_by_stage else ():
            number = stats.num_kv_fetch_reqs_by_stage.get(stage, 0)
            self._child(engine_index, "num_requests_kv_fetch_by_stage", stage).set(number)
        self._child(engine_index, "kv_cache_usage_perc").set(stats.kv_cache_usage)

    def _count_cache(self, engine_index: int, prefix: str, stats: PrefixCacheStats) -> None:
        self._count(engine_index, f"{prefix}prefix_cache_queries", stats.queries)
        self._count(engine_index, f"{prefix}prefix_cache_hits", stats.hits)

    def _count_source(self, engine_index: int, source: str, hits: int) -> None:
        # A tier that is not known yet is one more label value.
        self._count(engine_index, "prompt_tokens_cached_by_source", hits, source)

    def _count_drafts(self, engine_index: int, stats: SpecDecodingStats) -> None:
        self._count(engine_index, "spec_decode_num_drafts", stats.num_drafts)
        self._count(engine_index, "spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self._count(engine_index, "spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
        for position, number in enumerate(stats.num_accepted_tokens_per_pos):
            name = "spec_decode_num_accepted_tokens_per_pos"
            self._count(engine_index, name, number, str(position))

    def _observe_evictions(self, engine_index: int, stats: SchedulerStats) -> None:
        for block in stats.kv_cache_eviction_events:
            self._observe(engine_index, "kv_block_lifetime_seconds", block.lifetime_seconds)
            self._observe(engine_index, "kv_block_idle_before_evict_seconds", block.idle_seconds)
            for gap in block.reuse_gaps_seconds:
                self._observe(engine_index, "kv_block_reuse_gap_seconds", gap)

    def _observe_transfers(self, engine_index: int, transfers: Transfers) -> None:
        self._begin(engine_index, transfers.connector)
        for name, numbers in transfers.samples.items():
            for number in numbers:
                self._observe(engine_index, name, number)
        for name, count in transfers.counts.items():
            self._count(engine_index, name, count)

    def _observe_operation(self, engine_index: int, operation: StoreOperation) -> None:
        labels = (operation.operation, operation.status)
        name = "mooncake_store_operation"
        self._observe(engine_index, f"{name}_time_seconds", operation.seconds, *labels)
        for suffix, number in (
            ("", 1),
            ("_keys", operation.keys),
            ("_bytes", operation.bytes),
            ("_failed_keys", operation.failed_keys),
        ):
            self._child(engine_index, name + suffix, *labels).inc(number)

    def sleep_level(self, engine_index: int, level: int | None) -> None:
        names: dict[int | None, str] = {None: "awake", 1: "weights_offloaded", 2: "discard_all"}
        for state in _SLEEP_STATES:
            child = self._child(engine_index, "engine_sleep_state", state)
            child.set(state == names.get(level))

    # What becomes of requests -------------------------------------------------------------------

    def batch(self, engine_index: int, prompt_tokens: int, output_tokens: int) -> None:
        self._observe(engine_index, "iteration_tokens_total", prompt_tokens + output_tokens)

    def event(self, engine_index: int, event: EngineCoreEvent) -> None:
        self._begin(engine_index, EVENTS)
        if event.type is EventType.PREEMPTED:
            self._count(engine_index, "num_preemptions", 1)

    def adapter(self, request_id: str, lora_name: str, state: AdapterState) -> None:
        self._adapters.set_state(request_id, lora_name, state)

    def prefilled(self, engine_index: int, stats: PrefillStats) -> None:
        self._count(engine_index, "prompt_tokens", stats.num_prompt_tokens)
        self._count(engine_index, "prompt_tokens_cached", stats.num_cached_tokens)
        numbers = (
            stats.num_computed_tokens,
            stats.num_local_cached_tokens,
            stats.num_external_cached_tokens,
        )
        for source, number in zip(_SOURCES, numbers, strict=True):
            self._count(engine_index, "prompt_tokens_by_source", number, source)

    def first_tokens(self, engine_index: int, seconds: float) -> None:
        self._observe(engine_index, "time_to_first_token_seconds", seconds)

    def tokens(self, engine_index: int, count: int, seconds: float | None) -> None:
        # Called for every token of every request, so these two are at hand.
        if (children := self._token_children.get(engine_index)) is None:
            names = ("generation_tokens", "inter_token_latency_seconds")
            tokens, latencies = (self._child(engine_index, name) for name in names)
            children = self._token_children[engine_index] = tokens, latencies
        children[0].inc(count)
        if seconds is not None:
            children[1].observe(max(seconds, 0.0))

    def finished(self, engine_index: int, completion: FinishedCompletion) -> None:
        usage, timings, params = completion.usage, completion.timings, completion.sampling_params
        self._count(engine_index, "request_success", 1, str(completion.finish_reason))
        self._count(engine_index, "corrupted_requests", completion.is_corrupted)
        if "watermark_requests" in self._table:
            status = _watermark_status(completion.sampling_params)
            self._count(engine_index, "watermark_requests", 1, status)
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
            ("request_prefill_kv_computed_tokens", completion.computed_prompt_tokens),
            ("request_params_max_tokens", None if params is None else params.max_tokens),
        ):
            self._observe(engine_index, name, number)

    def request_over(self, engine_index: int, completion_count: int, longest: int) -> None:
        self._observe(engine_index, "request_params_n", completion_count)
        self._observe(engine_index, "request_max_num_generation_tokens", longest)


def _watermark_status(params: EngineCoreSamplingParams | None) -> str:
    """What the engine does with a request; it takes no word for no, which upstream's frontend fills in."""
    if params is None or not params.watermarking:
        return "not_watermarked"
    is_possible = params.temperature != 0 and params.trace_decode_token_ids is None
    return "watermarked" if is_possible else "skipped"


class _Adapters:
    """The one series of ``lora_requests_info``: adapters that requests wait for or run with.

    From the events of our requests, and from what engines say in their statistics, if they do. The
    value is the time of the last change or statistics, as upstream has it.
    """

    def __init__(self, gauge: Any = None, max_loras: str = "") -> None:
        self._gauge = gauge
        self._max_loras = max_loras
        self._requests: dict[str, tuple[str, AdapterState]] = {}
        self._told: dict[int, tuple[list[str], list[str]]] = {}
        self._labels: tuple[str, str, str] | None = None

    def set_state(self, request_id: str, lora_name: str, state: AdapterState) -> None:
        if state is AdapterState.OVER:
            self._requests.pop(request_id, None)
        else:
            self._requests[request_id] = (lora_name, state)
        self._update()

    def receive(self, engine_index: int, stats: SchedulerStats) -> None:
        self._told[engine_index] = (
            [name for name, count in stats.waiting_lora_adapters.items() if count],
            [name for name, count in stats.running_lora_adapters.items() if count],
        )
        self._update()

    def _update(self) -> None:
        waiting = self._names(AdapterState.WAITING, 0)
        running = self._names(AdapterState.RUNNING, 1)
        labels = (self._max_loras, waiting, running) if waiting or running else None
        if self._labels not in (None, labels):
            self._gauge.remove(*self._labels)
        self._labels = labels
        if labels is not None:
            self._gauge.labels(*labels).set_to_current_time()

    def _names(self, state: AdapterState, told: int) -> str:
        ours = {name for name, its_state in self._requests.values() if its_state is state}
        return ",".join(sorted(ours.union(*(names[told] for names in self._told.values()))))
