"""`SchedulerStats` and its parts: the statistics that engines attach to outputs.

Mirrors upstream ``vllm/v1/metrics/stats.py``. Encoding writes every key, since upstream's Rust client
fails for good on a partial map.
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm.protocol.codec import UInt64
from trio_vllm.values import define


@define(kw_only=True)
class PrefillStats:
    """Where the prompt tokens of a request came from; on the first output of its prefill.

    computed + cached = prompt, and cached = local + external.
    """

    num_prompt_tokens: UInt64 = 0
    num_computed_tokens: UInt64 = 0
    num_cached_tokens: UInt64 = 0
    num_local_cached_tokens: UInt64 = 0
    num_external_cached_tokens: UInt64 = 0
    num_cache_creation_tokens: UInt64 = 0


@define(kw_only=True)
class RequestSpecDecodeMetrics:
    """Speculative decoding of one request; on its final output."""

    num_spec_tokens: UInt64
    histogram: list[UInt64] = attrs.field(factory=list)
    num_draft_tokens: UInt64 = 0
    per_step_accepted: list[UInt64] = attrs.field(factory=list)
    per_step_drafted: list[UInt64] = attrs.field(factory=list)


@define(kw_only=True)
class IterationDetails:
    """What one step of the engine worked on."""

    iteration_index: UInt64 = 0
    num_ctx_requests: UInt64 = 0
    num_ctx_tokens: UInt64 = 0
    num_generation_requests: UInt64 = 0
    num_generation_tokens: UInt64 = 0
    elapsed_ms: float = 0.0
    num_encoder_inputs: UInt64 = 0
    num_encoder_output_tokens: UInt64 = 0
    is_dummy: bool = False


@define(kw_only=True)
class PrefixCacheStats:
    """Prefix-cache queries since the last message, in tokens."""

    reset: bool = False
    requests: UInt64 = 0
    queries: UInt64 = 0
    hits: UInt64 = 0
    preempted_requests: UInt64 = 0
    preempted_queries: UInt64 = 0
    preempted_hits: UInt64 = 0
    hits_by_source: dict[str, UInt64] = attrs.field(factory=dict)


@define(kw_only=True)
class KvCacheEvictionEvent:
    """The life of one evicted cache block, in seconds."""

    lifetime_seconds: float = 0.0
    idle_seconds: float = 0.0
    reuse_gaps_seconds: list[float] = attrs.field(factory=list)


@define(kw_only=True)
class SpecDecodingStats:
    """Speculative decoding of one step."""

    num_spec_tokens: UInt64
    num_drafts: UInt64 = 0
    num_draft_tokens: UInt64 = 0
    num_accepted_tokens: UInt64 = 0
    num_accepted_tokens_per_pos: list[UInt64] = attrs.field(factory=list)
    num_draft_tokens_per_pos: list[UInt64] = attrs.field(factory=list)


@define(kw_only=True)
class CudagraphStats:
    """The padding of one step's CUDA graph."""

    num_unpadded_tokens: UInt64 = 0
    num_padded_tokens: UInt64 = 0
    num_paddings: UInt64 = 0
    runtime_mode: str = ""


@define(kw_only=True)
class PerfStats:
    """An estimate of one step's work on each GPU."""

    num_flops_per_gpu: UInt64 = 0
    num_read_bytes_per_gpu: UInt64 = 0
    num_write_bytes_per_gpu: UInt64 = 0
    debug_stats: dict[str, Any] | None = None


@define(kw_only=True)
class SchedulerStats:
    """The state of an engine's scheduler after a step."""

    num_running_reqs: UInt64 = 0
    num_waiting_reqs: UInt64 = 0
    num_skipped_waiting_reqs: UInt64 = 0
    num_kv_fetch_reqs_by_stage: dict[str, UInt64] = attrs.field(factory=dict)
    step_counter: UInt64 = 0
    current_wave: UInt64 = 0
    kv_cache_usage: float = 0.0
    """0 to 1."""
    iteration_details: IterationDetails | None = None
    prefix_cache_stats: PrefixCacheStats = attrs.field(factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[KvCacheEvictionEvent] = attrs.field(factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: dict[str, Any] | None = None
    ec_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, UInt64] = attrs.field(factory=dict)
    running_lora_adapters: dict[str, UInt64] = attrs.field(factory=dict)
    cudagraph_stats: CudagraphStats | None = None
    perf_stats: PerfStats | None = None
