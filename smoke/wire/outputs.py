"""What engines send, of every kind, for ``cases.py``."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from ready import READY
from trio_vllm.protocol import (
    CudagraphStats,
    DpControlOutput,
    EngineAddresses,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreReadyResponse,
    EventType,
    FinishReason,
    HandshakeInit,
    IterationDetails,
    KvCacheEvictionEvent,
    KvEventsConfig,
    Logprobs,
    PerfStats,
    PrefillStats,
    PrefixCacheStats,
    RequestBatchOutputs,
    RequestSpecDecodeMetrics,
    SamplingMask,
    SchedulerStats,
    SpecDecodingStats,
    Tensor,
    UtilityCallOutput,
    UtilityOutput,
)
from wire.requests import floats


def outputs() -> dict[str, Any]:
    """Every kind of output message, with something in every field that 0.32 knows."""
    step = RequestBatchOutputs(engine_index=1, timestamp=5.5, weight_version="default")
    utility = UtilityCallOutput(
        engine_index=1, timestamp=5.5, output=UtilityOutput(2**64 - 1, result=[{"a": 1}, None])
    )
    return {
        "tokens": attrs.evolve(
            step, outputs=[EngineCoreOutput("a", [1]), EngineCoreOutput("b", [2, 3])]
        ),
        "finish": attrs.evolve(
            step,
            outputs=[EngineCoreOutput("a", [1], finish_reason=FinishReason.LENGTH)],
            finished_requests=["a"],
        ),
        "output in full": attrs.evolve(step, outputs=[full_output(4), full_output(400)]),
        "statistics": attrs.evolve(step, scheduler_stats=FULL_STATS),
        "default statistics": attrs.evolve(step, scheduler_stats=SchedulerStats()),
        "utility": utility,
        "void utility": attrs.evolve(utility, output=UtilityOutput(-5)),
        "failed utility": attrs.evolve(utility, output=UtilityOutput(5, "why")),
        "wave complete": DpControlOutput(engine_index=1, timestamp=5.5, wave_complete=0),
        "start wave": DpControlOutput(engine_index=1, timestamp=5.5, start_wave=3),
    }


def full_output(columns: int) -> EngineCoreOutput:
    """Arrays small enough for the payload, or too large for it."""
    values = -floats(2, columns)
    values[0, 1:3] = -np.inf, np.nan
    logprobs = Logprobs(np.ones((2, columns), np.int32), values, np.array([1, 0], np.int64))
    return EngineCoreOutput(
        "a",
        [1, 2],
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=attrs.evolve(logprobs, ranks=np.array([1, 2], np.int32)),
        pooling_output=Tensor.from_numpy(floats(columns).astype(np.float16)),
        finish_reason=FinishReason.REPETITION,
        stop_reason="repetition_detected",
        events=[EngineCoreEvent(EventType.QUEUED, 1.5), EngineCoreEvent(EventType.PREEMPTED, 2.5)],
        kv_transfer_params={"a": [1, {"b": None}]},
        ec_transfer_params={"c": 0.5},
        trace_headers={"traceparent": "00"},
        prefill_stats=PrefillStats(num_prompt_tokens=3, num_computed_tokens=3),
        routed_experts=np.zeros((2, columns, 1), np.uint8),
        num_nans_in_logits=2,
        mm_cache_miss_hashes=["h"],
        new_sampling_mask=SamplingMask(np.arange(columns), np.array([0, 1, columns])),
        spec_decode_metrics=RequestSpecDecodeMetrics(
            num_spec_tokens=2, histogram=[1, 0], num_draft_tokens=3, per_step_accepted=[1],
            per_step_drafted=[2],
        ),
        prompt_token_id_logprobs=floats(2, columns),
    )  # fmt: skip


FULL_STATS = SchedulerStats(
    num_running_reqs=1,
    num_waiting_reqs=2,
    num_skipped_waiting_reqs=3,
    num_kv_fetch_reqs_by_stage={"in_progress": 2},
    step_counter=4,
    current_wave=5,
    kv_cache_usage=0.5,
    iteration_details=IterationDetails(iteration_index=1, elapsed_ms=0.5, is_dummy=True),
    prefix_cache_stats=PrefixCacheStats(reset=True, requests=1, hits_by_source={"host": 1}),
    connector_prefix_cache_stats=PrefixCacheStats(queries=3),
    kv_cache_eviction_events=[KvCacheEvictionEvent(lifetime_seconds=1.5, reuse_gaps_seconds=[0.5])],
    spec_decoding_stats=SpecDecodingStats(num_spec_tokens=1, num_accepted_tokens_per_pos=[2]),
    kv_connector_stats={"any": "thing"},
    ec_connector_stats={},
    waiting_lora_adapters={"a": 1},
    running_lora_adapters={"b": 2},
    cudagraph_stats=CudagraphStats(num_unpadded_tokens=1, runtime_mode="FULL"),
    perf_stats=PerfStats(num_flops_per_gpu=2**40, debug_stats=None),
)

REGISTRATION = EngineCoreReadyResponse(
    **{
        **READY,
        "dp_stats_address": "tcp://h:1",
        "data_parallel_size": 2,
        "data_parallel_rank": 1,
        "supports_lora": True,
        "max_loras": 1,
        "mamba_block_size": 1,
        "kv_cache_size_tokens": 2**40,
        "kv_cache_max_concurrency": 1.5,
        "kv_events_config": KvEventsConfig(topic="t", publisher="zmq"),
        "weight_transfer_backend": "nccl",
        "enable_sleep_mode": True,
        "supports_draft_weight_updates": True,
        "effective_attention_block_size": 16,
    }
)

INIT = HandshakeInit(
    addresses=EngineAddresses(
        inputs=["tcp://h:1", "tcp://h:2"],
        outputs=["tcp://h:3", "tcp://h:4"],
        coordinator_input="ipc://c",
        coordinator_output="ipc://d",
        frontend_stats_publish_address="ipc://e",
    )
)
