"""What a caller asks of `Llm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trio_vllm.protocol import (
    EngineCoreSamplingParams,
    KvHintsEnvelope,
    LoRARequest,
    MultiModalFeatureSpec,
    PoolingParams,
)


@attrs.frozen(kw_only=True, eq=False)
class PromptRequest:
    """What requests of either kind have; mirrors ``GenerateRequest`` of ``rust/src/llm``."""

    request_id: str | None = None
    """The caller's id; None lets `Llm` choose one. It need not be unique unless randomisation is
    off."""
    prompt_token_ids: Sequence[int]
    mm_features: list[MultiModalFeatureSpec] | None = None
    arrival_time: float | None = None
    """UNIX seconds; None is now. Latencies count from here."""
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    """Prefix-cache entries are shared only between requests of the same salt."""
    trace_headers: dict[str, str] | None = None
    priority: int = 0
    """Lower is earlier, if the engine schedules by priority."""
    data_parallel_rank: int | None = None
    """Pins the request to the engine with this index."""
    session_id: str | None = None
    kv_hints: KvHintsEnvelope | None = None


@attrs.frozen(kw_only=True, eq=False)
class GenerateRequest(PromptRequest):
    """A prompt to complete."""

    sampling_params: EngineCoreSamplingParams = attrs.field(factory=EngineCoreSamplingParams)
    """``n`` completions are as many engine requests; the seed of the i-th is ``seed + i``.
    ``max_tokens=None`` is what the model's context leaves."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    reasoning_ended: bool | None = None


@attrs.frozen(kw_only=True, eq=False)
class EncodeRequest(PromptRequest):
    """A prompt to pool, into an embedding for example."""

    pooling_params: PoolingParams
