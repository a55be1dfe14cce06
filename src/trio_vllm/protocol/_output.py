"""One request's share of what an engine core sends.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreOutput``) and
``engine-core-client/src/protocol/output.rs``. How outputs are packed into messages is in
``_output_message.py``.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from trio_vllm.protocol._arrays import NUMPY_ARRAY, TENSOR, TENSOR_AS_NUMPY, Array, Tensor
from trio_vllm.protocol._containers import ANY_MAP, TOKEN_IDS, list_of, map_of, optional
from trio_vllm.protocol._forms import (
    BOOL,
    FLOAT,
    INT64_OR_UINT64,
    STR,
    U64,
    Form,
    enumeration,
    misfit,
)
from trio_vllm.protocol._logprobs import (
    PROMPT_LOGPROBS,
    SAMPLE_LOGPROBS,
    SAMPLING_MASK,
    Logprobs,
    SamplingMask,
)
from trio_vllm.protocol._stats import (
    PREFILL_STATS,
    SPEC_DECODE_METRICS,
    PrefillStats,
    RequestSpecDecodeMetrics,
)
from trio_vllm.protocol._structs import array_struct, map_struct


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    """An end-of-text or stop token, or a stop string."""
    LENGTH = 1
    """``max_tokens`` or the model's context was reached."""
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EventType(enum.IntEnum):
    """A turn in the life of a request inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@attrs.define
class EngineCoreEvent:
    """When something happened to a request, by the engine's monotonic clock (seconds)."""

    type: EventType
    timestamp: float


@attrs.define(kw_only=True)
class RequestErrorInfo:
    """Why the engine ended a request with ERROR (0.33); upstream calls it ``RequestError``."""

    code: str
    """Such as ``engine_paused`` or ``validation_error``."""
    message: str
    retryable: bool = False


@attrs.define(eq=False)
class EngineCoreOutput:
    """One request's share of one step. Arrays may alias the message they came in."""

    request_id: str
    new_token_ids: list[int] = attrs.field(factory=list)
    new_logprobs: Logprobs | None = None
    """As wide as the widest request of the step: cut it to what was asked for."""
    new_prompt_logprobs_tensors: Logprobs | None = None
    """Row ``i`` is about prompt token ``i + 1``."""
    pooling_output: Tensor | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token, if one matched; None for end of text."""
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Array | None = None
    """``[rows, layers, top_k]``."""
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: SamplingMask | None = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    prompt_token_id_logprobs: Array | None = None
    """float32 ``[rows, ids]``."""
    error: RequestErrorInfo | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


# Forms ------------------------------------------------------------------------------------------


def _check_stop_reason(value: Any, context: Any) -> int | str:
    if type(value) is int:
        return INT64_OR_UINT64.decode(value, context)
    if type(value) is str:
        return STR.decode(value, context)
    raise misfit("an integer or a string", value)


_STOP_REASON: Form[int | str] = Form("a stop reason", _check_stop_reason, _check_stop_reason)

_EVENT: Form[EngineCoreEvent] = map_struct(
    EngineCoreEvent,
    {"type": enumeration(EventType), "timestamp": FLOAT},
    required=("type", "timestamp"),
)

_REQUEST_ERROR: Form[RequestErrorInfo] = map_struct(
    RequestErrorInfo,
    {"code": STR, "message": STR, "retryable": BOOL},
    required=("code", "message"),
)

ENGINE_CORE_OUTPUT: Form[EngineCoreOutput] = array_struct(
    EngineCoreOutput,
    2,
    {
        "request_id": STR,
        "new_token_ids": TOKEN_IDS,
        "new_logprobs": optional(SAMPLE_LOGPROBS),
        "new_prompt_logprobs_tensors": optional(PROMPT_LOGPROBS),
        "pooling_output": optional(TENSOR),
        "finish_reason": optional(enumeration(FinishReason)),
        "stop_reason": optional(_STOP_REASON),
        "events": optional(list_of(_EVENT)),
        "kv_transfer_params": optional(ANY_MAP),
        "ec_transfer_params": optional(ANY_MAP),
        "trace_headers": optional(map_of(STR, STR)),
        "prefill_stats": optional(PREFILL_STATS),
        "routed_experts": optional(NUMPY_ARRAY),
        "num_nans_in_logits": U64,
        "mm_cache_miss_hashes": optional(list_of(STR)),
        "new_sampling_mask": optional(SAMPLING_MASK),
        "spec_decode_metrics": optional(SPEC_DECODE_METRICS),
        "prompt_token_id_logprobs": optional(TENSOR_AS_NUMPY),
        "error": optional(_REQUEST_ERROR),
    },
)
