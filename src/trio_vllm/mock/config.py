"""What a mock engine is told at its start."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge, in_, le, optional

from trio_vllm.protocol import EngineCoreReadyResponse

MAX_VOCAB_SIZE = 2**31
"""With log probabilities, token ids are signed 32-bit integers on the wire."""
MAX_SEED = 2**64 - 1


def _between(low: int, high: int) -> Any:
    return attrs.validators.and_(attrs.validators.instance_of(int), ge(low), le(high))


def _count_from(low: int) -> Any:
    return _between(low, 2**63 - 1)


@attrs.frozen(kw_only=True)
class MockEngineConfig:
    """How mock engines behave and what they say of themselves; `ValueError` for nonsense."""

    vocab_size: int = attrs.field(default=32_000, validator=_between(1, MAX_VOCAB_SIZE))
    """Tokens are drawn from 0 up to, but without, this number."""
    seed: int = attrs.field(default=0, validator=_between(0, MAX_SEED))
    """Tokens depend on this, the engine's index and the request id, and on nothing else."""
    output_token_chunk_size: int = attrs.field(default=1, validator=_between(1, 2**16 - 1))
    """Tokens that each request gets per step."""
    stop_at_eos: bool = False
    """Whether drawing a request's end-of-text token ends it. Off, so that lengths are exact."""
    embedding_size: int = attrs.field(default=64, validator=_between(1, 2**20))
    """Numbers in a pooling output, unless the request says ``dimensions``."""
    log_requests: bool = False
    """Whether requests that start and finish are noted in the engine's journal."""

    # What the engine registers with (EngineCoreReadyResponse) and answers to utility calls.
    max_model_len: int = attrs.field(default=1_048_576, validator=_count_from(1))
    """Prompt and output tokens together never exceed this."""
    num_gpu_blocks: int = attrs.field(default=0, validator=_count_from(0))
    block_size: int = attrs.field(default=16, validator=_count_from(1))
    max_num_seqs: int = attrs.field(default=256, validator=_count_from(1))
    """Only reported: the mock runs all requests at once."""
    max_num_batched_tokens: int = attrs.field(default=8192, validator=_count_from(1))
    """Only reported: a prompt is prefilled in one step, however long."""
    dtype: str = attrs.field(default="float32", validator=in_(("float16", "bfloat16", "float32")))
    vllm_version: str = "0.33.0"
    instance_id: str = "mock-engine"
    max_loras: int = attrs.field(default=0, validator=_between(0, 2**31 - 1))
    """Adapters held at a time; 0 is an engine without LoRA."""
    kv_cache_size_tokens: int | None = attrs.field(default=None, validator=optional(_count_from(0)))
    enable_sleep_mode: bool = True
    supported_tasks: tuple[str, ...] = ("generate",)
    """The answer to ``get_supported_tasks``; pooling requests are served all the same."""
    lockstep: bool = False
    """Follow data-parallel waves, like the engines of a mixture-of-experts model."""

    def ready_response(
        self,
        engine_index: int,
        *,
        data_parallel_size: int = 1,
        dp_stats_address: str | None = None,
    ) -> EngineCoreReadyResponse:
        """What the engine with this index registers with."""
        return EngineCoreReadyResponse(
            max_model_len=self.max_model_len,
            num_gpu_blocks=self.num_gpu_blocks,
            block_size=self.block_size,
            dp_stats_address=dp_stats_address,
            dtype=self.dtype,
            vllm_version=self.vllm_version,
            world_size=1,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=engine_index,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            instance_id=self.instance_id,
            supports_lora=self.max_loras > 0,
            max_loras=self.max_loras,
            kv_cache_size_tokens=self.kv_cache_size_tokens,
            enable_sleep_mode=self.enable_sleep_mode,
        )
