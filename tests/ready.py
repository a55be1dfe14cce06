"""What an engine tells of itself when it registers."""

from __future__ import annotations

from typing import Any

from trio_vllm.protocol import EngineCoreReadyResponse


def ready_response(engine_index: int = 0, **changes: Any) -> EngineCoreReadyResponse:
    """What a small engine registers with, but for ``changes``."""
    values: dict[str, Any] = {
        "max_model_len": 512,
        "num_gpu_blocks": 100,
        "block_size": 16,
        "dtype": "float32",
        "vllm_version": "0.33.0",
        "world_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": engine_index,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "instance_id": "test",
        "supports_lora": False,
        "max_loras": 0,
    }
    return EngineCoreReadyResponse(**{**values, **changes})
