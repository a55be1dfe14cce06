"""What a small engine registers with, for whatever stands in for one."""

from typing import Any

READY: dict[str, Any] = {
    "max_model_len": 1_048_576,
    "num_gpu_blocks": 0,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": "0.33.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "instance_id": "smoke",
    "supports_lora": False,
    "max_loras": 0,
}
"""The fields of vLLM's ``EngineCoreReadyResponse`` that have no default there."""
