"""Statistics that engines attach to outputs; mirrors upstream ``vllm/v1/metrics/stats.py``.

Writers always write every key: upstream's Rust client fails for good on a partial map.
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm.protocol.codec import (
    ANY_MAP,
    BOOL,
    FLOAT,
    STR,
    U64,
    U64S,
    Codec,
    list_of,
    map_of,
    optional,
)
from trio_vllm.protocol.structs import map_struct

_COUNTS = map_of(STR, U64)
_FLOATS = list_of(FLOAT)


@attrs.define(kw_only=True)
class PrefillStats:
    """Where the prompt tokens of a request came from; on the first output of its prefill.

    computed + cached = prompt, and cached = local + external.
    """

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


@attrs.define(kw_only=True)
class RequestSpecDecodeMetrics:
    """Speculative decoding of one request; on its final output."""

    num_spec_tokens: int
    histogram: list[int] = attrs.field(factory=list)
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = attrs.field(factory=list)
    per_step_drafted: list[int] = attrs.field(factory=list)


@attrs.define(kw_only=True)
class IterationDetails:
    """What one step of the engine worked on."""

    iteration_index: int = 0
    num_ctx_requests: int = 0
    num_ctx_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    elapsed_ms: float = 0.0
    num_encoder_inputs: int = 0
    num_encoder_output_tokens: int = 0
    is_dummy: bool = False


@attrs.define(kw_only=True)
class PrefixCacheStats:
    """Prefix-cache queries since the last message, in tokens."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = attrs.field(factory=dict)


@attrs.define(kw_only=True)
class KvCacheEvictionEvent:
    """The life of one evicted cache block, in seconds."""

    lifetime_seconds: float = 0.0
    idle_seconds: float = 0.0
    reuse_gaps_seconds: list[float] = attrs.field(factory=list)


@attrs.define(kw_only=True)
class SpecDecodingStats:
    """Speculative decoding of one step."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = attrs.field(factory=list)
    num_draft_tokens_per_pos: list[int] = attrs.field(factory=list)


@attrs.define(kw_only=True)
class CudagraphStats:
    """The padding of one step's CUDA graph."""

    num_unpadded_tokens: int = 0
    num_padded_tokens: int = 0
    num_paddings: int = 0
    runtime_mode: str = ""


@attrs.define(kw_only=True)
class PerfStats:
    """An estimate of one step's work on each GPU."""

    num_flops_per_gpu: int = 0
    num_read_bytes_per_gpu: int = 0
    num_write_bytes_per_gpu: int = 0
    debug_stats: dict[str, Any] | None = None


@attrs.define(kw_only=True)
class SchedulerStats:
    """The state of an engine's scheduler after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = attrs.field(factory=dict)
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    """0 to 1."""
    iteration_details: IterationDetails | None = None
    prefix_cache_stats: PrefixCacheStats = attrs.field(factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[KvCacheEvictionEvent] = attrs.field(factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: dict[str, Any] | None = None
    ec_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = attrs.field(factory=dict)
    running_lora_adapters: dict[str, int] = attrs.field(factory=dict)
    cudagraph_stats: CudagraphStats | None = None
    perf_stats: PerfStats | None = None


def _all_counts(cls: type[Any]) -> dict[str, Codec[Any]]:
    """Every field of ``cls`` an unsigned integer."""
    return {attribute.name: U64 for attribute in attrs.fields(cls)}


PREFILL_STATS: Codec[PrefillStats] = map_struct(PrefillStats, _all_counts(PrefillStats))

SPEC_DECODE_METRICS: Codec[RequestSpecDecodeMetrics] = map_struct(
    RequestSpecDecodeMetrics,
    {
        "num_spec_tokens": U64,
        "histogram": U64S,
        "num_draft_tokens": U64,
        "per_step_accepted": U64S,
        "per_step_drafted": U64S,
    },
    required=("num_spec_tokens",),
)

_ITERATION_DETAILS: Codec[IterationDetails] = map_struct(
    IterationDetails,
    {**_all_counts(IterationDetails), "elapsed_ms": FLOAT, "is_dummy": BOOL},
)

_PREFIX_CACHE_STATS: Codec[PrefixCacheStats] = map_struct(
    PrefixCacheStats,
    {**_all_counts(PrefixCacheStats), "reset": BOOL, "hits_by_source": _COUNTS},
)

_EVICTION_EVENT: Codec[KvCacheEvictionEvent] = map_struct(
    KvCacheEvictionEvent,
    {"lifetime_seconds": FLOAT, "idle_seconds": FLOAT, "reuse_gaps_seconds": _FLOATS},
)

_SPEC_DECODING_STATS: Codec[SpecDecodingStats] = map_struct(
    SpecDecodingStats,
    {
        **_all_counts(SpecDecodingStats),
        "num_accepted_tokens_per_pos": U64S,
        "num_draft_tokens_per_pos": U64S,
    },
    required=("num_spec_tokens",),
)

_CUDAGRAPH_STATS: Codec[CudagraphStats] = map_struct(
    CudagraphStats, {**_all_counts(CudagraphStats), "runtime_mode": STR}
)

_PERF_STATS: Codec[PerfStats] = map_struct(
    PerfStats, {**_all_counts(PerfStats), "debug_stats": optional(ANY_MAP)}
)

SCHEDULER_STATS: Codec[SchedulerStats] = map_struct(
    SchedulerStats,
    {
        "num_running_reqs": U64,
        "num_waiting_reqs": U64,
        "num_skipped_waiting_reqs": U64,
        "num_kv_fetch_reqs_by_stage": _COUNTS,
        "step_counter": U64,
        "current_wave": U64,
        "kv_cache_usage": FLOAT,
        "iteration_details": optional(_ITERATION_DETAILS),
        "prefix_cache_stats": _PREFIX_CACHE_STATS,
        "connector_prefix_cache_stats": optional(_PREFIX_CACHE_STATS),
        "kv_cache_eviction_events": list_of(_EVICTION_EVENT),
        "spec_decoding_stats": optional(_SPEC_DECODING_STATS),
        "kv_connector_stats": optional(ANY_MAP),
        "ec_connector_stats": optional(ANY_MAP),
        "waiting_lora_adapters": _COUNTS,
        "running_lora_adapters": _COUNTS,
        "cudagraph_stats": optional(_CUDAGRAPH_STATS),
        "perf_stats": optional(_PERF_STATS),
    },
)
