"""LoRA adapters by name, id and path; mirrors upstream ``vllm/lora/request.py``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import attrs

from trio_vllm.errors import DecodeError, InvalidFieldError
from trio_vllm.protocol.arrays import TENSOR, Tensor
from trio_vllm.protocol.codec import (
    ANY_MAP,
    BOOL,
    FINITE,
    I32,
    STR,
    TEXT,
    TOKEN_IDS,
    U32,
    AuxFrames,
    Buffer,
    Codec,
    CodecError,
    Frames,
    brief,
    integer,
    list_of,
    map_of,
    one_of,
    optional,
    read_write,
)
from trio_vllm.protocol.coordination import StartDpWave, decode_start_dp_wave
from trio_vllm.protocol.msgpack import decode_payload, pack, unpack
from trio_vllm.protocol.multimodal import MULTIMODAL_FEATURE, MultiModalFeatureSpec
from trio_vllm.protocol.sampling import SAMPLING_PARAMS, EngineCoreSamplingParams
from trio_vllm.protocol.structs import array_struct, map_struct
from trio_vllm.protocol.utility import UTILITY_REQUEST, UtilityRequest

# MERGED protocol/_pooling: Pooling parameters: what to compute from a prompt instead of a completion.
#
# Mirrors upstream ``vllm/pooling_params.py``; 10 elements in 0.32, 11 from 0.33.
# MERGED protocol/_request: What a frontend sends to an engine core: ADD, ABORT, START_DP_WAVE and UTILITY messages.
#
# Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreRequest``, ``EngineCoreRequestType``)
# and ``engine-core-client/src/protocol/request.rs``. A message is ``[type, payload, aux…]``.
#
# An engine does not survive a message that it cannot read (its input thread ends), so the encoders
# here check every field.


@attrs.define(kw_only=True)
class LoRARequest:
    """An adapter that the engine loads from ``lora_path`` on its own file system."""

    lora_name: str
    lora_int_id: int
    """From 1, unique for each adapter of an engine."""
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


LORA_REQUEST: Codec[LoRARequest] = array_struct(
    LoRARequest,
    3,
    {
        "lora_name": STR,
        "lora_int_id": integer(1, 2**63 - 1, "a positive integer"),
        "lora_path": TEXT,
        "base_model_name": optional(STR),
        "load_inplace": BOOL,
        "is_3d_lora_weight": BOOL,
    },
)


POOLING_TASKS = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
    "plugin",
    "embed&token_classify",
)
"""What there is; which of them a model supports, `get_supported_tasks` of its engine tells."""


@attrs.define(kw_only=True)
class LateInteractionParams:
    """Which role a pooling request has in late-interaction scoring."""

    mode: str
    """``cache_query`` or ``score_doc``."""
    query_key: str
    query_uses: int | None = None


@attrs.define(kw_only=True)
class LateChunkingParams:
    """Split the pooled sequence into chunks of this many tokens (0.33)."""

    chunk_size: int


@attrs.define(kw_only=True)
class PoolingParams:
    """How to pool one request; ``task`` must be one that the model supports, or the engine dies."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    """One of `POOLING_TASKS`."""
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: int = 2
    """Final only; an engine goes deaf at any other."""
    late_chunking_params: LateChunkingParams | None = None


_COUNT = read_write(U32, integer(1, 2**32 - 1, "at least 1"))

POOLING_PARAMS: Codec[PoolingParams] = array_struct(
    PoolingParams,
    0,
    {
        "use_activation": optional(BOOL),
        "dimensions": optional(_COUNT),
        "step_tag_id": optional(I32),
        "returned_token_ids": optional(TOKEN_IDS),
        "task": optional(one_of(*POOLING_TASKS)),
        "requires_token_ids": BOOL,
        "skip_reading_prefix_cache": optional(BOOL),
        "late_interaction_params": optional(
            array_struct(
                LateInteractionParams,
                2,
                {
                    "mode": one_of("cache_query", "score_doc"),
                    "query_key": STR,
                    "query_uses": optional(U32),
                },
            )
        ),
        "extra_kwargs": optional(ANY_MAP),
        "output_kind": read_write(I32, integer(2, 2, "2 (final only)")),
        "late_chunking_params": optional(
            array_struct(LateChunkingParams, 1, {"chunk_size": _COUNT})
        ),
    },
)


class RequestType(bytes, enum.Enum):
    """The one-byte frame in front of a payload."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


@attrs.define(kw_only=True)
class KvHintAction:
    """One hint about KV-cache blocks; ``payload`` is the action's own."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


@attrs.define(kw_only=True)
class KvHintsEnvelope:
    """Hints about KV-cache blocks that travel with a request."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


@attrs.define(kw_only=True, eq=False)
class EngineCoreRequest:
    """One request as the engine sees it. Exactly one of the two ``*_params`` is set."""

    request_id: str
    """Unique among the requests in flight: an engine dies of a duplicate."""
    prompt_token_ids: Sequence[int] | None = None
    mm_features: list[MultiModalFeatureSpec] | None = None
    sampling_params: EngineCoreSamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float = 0.0
    """UNIX seconds."""
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    """Pins the request to this engine; read by clients, not by engines."""
    prompt_embeds: Tensor | None = None
    """``[tokens, hidden]``."""
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    """Which of the frontend's output sockets gets the answer."""
    current_wave: int = 0
    priority: int = 0
    """Lower is earlier."""
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: KvHintsEnvelope | None = None


@attrs.define
class AbortRequests:
    """Drop these requests; unknown and finished ids are ignored, nothing is answered."""

    request_ids: list[str]


EngineMessage = EngineCoreRequest | AbortRequests | StartDpWave | UtilityRequest
"""What an engine can receive on an input socket."""

_KV_HINT_ACTION: Codec[KvHintAction] = map_struct(
    KvHintAction,
    {"action_id": STR, "action_type": STR, "action_version": STR, "payload": ANY_MAP},
    required=("action_id", "action_type", "action_version", "payload"),
)

KV_HINTS: Codec[KvHintsEnvelope] = map_struct(
    KvHintsEnvelope,
    {"protocol_version": STR, "message_id": STR, "actions": list_of(_KV_HINT_ACTION)},
    required=("protocol_version", "message_id", "actions"),
)

REQUEST_FIELDS: dict[str, Codec[Any]] = {
    "request_id": STR,
    "prompt_token_ids": optional(TOKEN_IDS),
    "mm_features": optional(list_of(MULTIMODAL_FEATURE)),
    "sampling_params": optional(SAMPLING_PARAMS),
    "pooling_params": optional(POOLING_PARAMS),
    "arrival_time": FINITE,
    "lora_request": optional(LORA_REQUEST),
    "cache_salt": optional(STR),
    "data_parallel_rank": optional(U32),
    "prompt_embeds": optional(TENSOR),
    "prompt_is_token_ids": optional(list_of(BOOL)),
    "client_index": U32,
    "current_wave": U32,
    "priority": I32,
    "trace_headers": optional(map_of(STR, STR)),
    "resumable": BOOL,
    "external_req_id": optional(STR),
    "reasoning_ended": optional(BOOL),
    "reasoning_parser_kwargs": optional(ANY_MAP),
    "abort_immediately": BOOL,
    "session_id": optional(STR),
    "kv_hints": optional(KV_HINTS),
}

ENGINE_CORE_REQUEST: Codec[EngineCoreRequest] = array_struct(
    EngineCoreRequest,
    6,  # upstream's Rust reader; its Python reader wants 9
    REQUEST_FIELDS,
)

_REQUEST_IDS = list_of(STR)

# An enumeration member costs as much to look up as a string to check.
_ADD, _ABORT, _START_DP_WAVE, _UTILITY = (kind.value for kind in RequestType)


def encode_add(request: EngineCoreRequest) -> list[Buffer]:
    """The ADD message of a request: type, payload and an auxiliary frame per large array.

    Auxiliary frames alias the request's arrays. Raises `InvalidFieldError` if a field does not
    have its type or range.
    """
    aux: AuxFrames = []
    try:
        payload = pack(ENGINE_CORE_REQUEST.encode(request, aux))
    except CodecError as error:
        raise InvalidFieldError(request_label(request), error.where, error.reason) from error
    return [_ADD, payload, *aux]


def request_label(request: EngineCoreRequest) -> str:
    """The request id, or what stands in its place, for an error."""
    request_id: Any = request.request_id
    return request_id if isinstance(request_id, str) else brief(request_id)


def encode_abort(request_ids: Sequence[str]) -> list[Buffer]:
    """The ABORT message for these ids; `TypeError` if they are no list of strings."""
    ids: Any = request_ids  # any kind of sequence, but not a string
    try:
        payload = pack(_REQUEST_IDS.encode(ids, []))
    except CodecError as error:
        raise TypeError(f"request ids to abort: {error}") from error
    return [_ABORT, payload]


def encode_utility(request: UtilityRequest) -> list[Buffer]:
    """The UTILITY message of a call; `TypeError` if an argument has no MessagePack form."""
    try:
        payload = pack(UTILITY_REQUEST.encode(request, []))
    except CodecError as error:
        raise TypeError(f"utility call {request.method!r}: {error}") from error
    return [_UTILITY, payload]


def decode_engine_message(frames: Frames) -> EngineMessage:
    """Read a message on an input socket, as an engine does.

    Raises `DecodeError`; its ``request_id`` is set if the message is an ADD whose id is readable,
    so that an answer can be given.
    """
    if len(frames) < 2:
        raise DecodeError("an input message", "", f"has {len(frames)} frames, not 2 or more")
    kind, *body = frames
    if kind == _ADD:
        return _decode_add(body)
    if kind == _ABORT:
        return AbortRequests(decode_payload(_REQUEST_IDS, body[0], body, "an ABORT message"))
    if kind == _UTILITY:
        return decode_payload(UTILITY_REQUEST, body[0], body, "a UTILITY message")
    if kind == _START_DP_WAVE:
        return decode_start_dp_wave(body[0])
    raise DecodeError("an input message", "", f"unknown request type {bytes(kind[:8])!r}")


def _decode_add(body: Frames) -> EngineCoreRequest:
    request_id = None
    try:
        raw = unpack(body[0])
        if type(raw) is list and raw and type(raw[0]) is str:
            request_id = raw[0]
        return ENGINE_CORE_REQUEST.decode(raw, body)
    except CodecError as error:
        raise DecodeError(
            "an ADD message", error.where, error.reason, request_id=request_id
        ) from error
