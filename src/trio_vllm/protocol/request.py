"""`EngineCoreRequest` and the other messages to an engine core: ABORT, START_DP_WAVE, UTILITY.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreRequest``, ``EngineCoreRequestType``),
``vllm/lora/request.py``, ``vllm/pooling_params.py`` and ``engine-core-client/src/protocol/request.rs``.
A message is ``[type, payload, aux…]``.

An engine does not survive a message that it cannot read (its input thread ends), so the encoders
here check every field.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from typing import Annotated, Any

from trio_vllm.errors import DecodeError, InvalidFieldError
from trio_vllm.protocol.arrays import Tensor
from trio_vllm.protocol.codec import (
    FINITE,
    I32,
    NON_EMPTY_STR,
    STRS,
    TOKEN_IDS,
    U16,
    AuxFrames,
    Buffer,
    Codec,
    CodecError,
    Count,
    Frames,
    Int32,
    UInt32,
    codec_from,
    integer,
    known_string,
    summarize,
)
from trio_vllm.protocol.msgpack import decode_payload, pack, unpack
from trio_vllm.protocol.multimodal import MultiModalFeatureSpec
from trio_vllm.protocol.pieces import LARGE, array_at, array_head, skip, split, unpack_in_pieces
from trio_vllm.protocol.sampling import EngineCoreSamplingParams
from trio_vllm.protocol.structs import as_array, codec_of, index_of
from trio_vllm.protocol.utility import UTILITY_REQUEST, UtilityRequest
from trio_vllm.values import define


@as_array()
@define(kw_only=True)
class LoRARequest:
    """An adapter that the engine loads from ``lora_path`` on its own file system."""

    lora_name: str
    lora_int_id: Annotated[int, integer(1, 2**63 - 1, "a positive integer")]
    """From 1, unique for each adapter of an engine."""
    lora_path: Annotated[str, NON_EMPTY_STR]
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


GENERATION_TASKS = frozenset({"generate", "transcription", "realtime"})
"""Tasks of models that sample tokens."""
POOLING_TASKS = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
    "plugin",
    "embed&token_classify",
)
"""All pooling tasks; `get_supported_tasks` of an engine lists those of its model."""


@as_array()
@define(kw_only=True)
class LateInteractionParams:
    """Which role a pooling request has in late-interaction scoring."""

    mode: Annotated[str, known_string("cache_query", "score_doc")]
    query_key: str
    query_uses: UInt32 | None = None


@as_array()
@define(kw_only=True)
class LateChunkingParams:
    """Split the pooled sequence into chunks of this many tokens (0.33)."""

    chunk_size: Count


@as_array()
@define(kw_only=True)
class PoolingParams:
    """How to pool one request; ``task`` must be one that the model supports, or the engine dies."""

    use_activation: bool | None = None
    dimensions: Count | None = None
    step_tag_id: Int32 | None = None
    returned_token_ids: list[UInt32] | None = None
    task: Annotated[str, known_string(*POOLING_TASKS)] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Annotated[int, codec_from(decode=I32, encode=integer(2, 2, "2 (final only)"))] = 2
    """The only one there is for pooling; an engine's input thread dies of any other."""
    late_chunking_params: LateChunkingParams | None = None


# Messages ---------------------------------------------------------------------------------------


class RequestType(bytes, enum.Enum):
    """The one-byte frame in front of a payload."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


@define(kw_only=True)
class KvHintAction:
    """One hint about KV-cache blocks; ``payload`` is the action's own."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


@define(kw_only=True)
class KvHintsEnvelope:
    """Hints about KV-cache blocks that travel with a request."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


@as_array(minimum=6)  # as upstream's Rust reader; its Python reader wants 9
@define(kw_only=True, eq=False)
class EngineCoreRequest:
    """A request as the engine sees it. Exactly one of the two ``*_params`` is set."""

    request_id: str
    """Unique among the requests in flight: an engine dies of a duplicate."""
    prompt_token_ids: Sequence[UInt32] | None = None
    mm_features: list[MultiModalFeatureSpec] | None = None
    sampling_params: EngineCoreSamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: Annotated[float, FINITE] = 0.0
    """UNIX seconds."""
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: UInt32 | None = None
    """Pins the request to this engine; read by clients, not by engines."""
    prompt_embeds: Tensor | None = None
    """``[tokens, hidden]``."""
    prompt_is_token_ids: list[bool] | None = None
    client_index: UInt32 = 0
    """Which of the frontend's output sockets gets the answer."""
    current_wave: UInt32 = 0
    priority: Int32 = 0
    """Lower is earlier."""
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: KvHintsEnvelope | None = None


def _decode_exclude(raw: Any, _: Frames) -> int | None:
    # After a first-request notice of a 0.32 frontend, upstream's coordinator passes on the engine
    # id as bytes here, which equals no index and so excludes no engine.
    if raw is None or type(raw) is bytes:
        return None
    return U16.decode(raw, ())


def _encode_exclude(value: int | None, _: AuxFrames) -> Any:
    return None if value is None else U16.encode(value, [])


VOCABULARY_QUESTION = "vocabulary-question-"
"""How the id of a request begins that only asks for the size of the vocabulary."""


def vocabulary_question(label: str, priority: int) -> EngineCoreRequest:
    """A request for one token with all log probabilities, of which there is one per token and one."""
    return EngineCoreRequest(
        request_id=f"{VOCABULARY_QUESTION}{label}",
        prompt_token_ids=[1],
        sampling_params=EngineCoreSamplingParams(max_tokens=1, temperature=0.0, logprobs=-1),
        priority=priority,
    )


def is_vocabulary_question(request: EngineCoreRequest) -> bool:
    """Whether a client of ours has made up the request; a caller's has an id of the caller's, too."""
    is_ours = request.external_req_id is None and request.sampling_params is not None
    return is_ours and request.request_id.startswith(VOCABULARY_QUESTION)


@as_array(minimum=2)
@define
class StartDpWave:
    """Tells all engines but ``exclude_engine_index``, which runs already, to run wave ``wave``."""

    wave: UInt32
    exclude_engine_index: Annotated[
        int | None, Codec("an index or nil", _decode_exclude, _encode_exclude)
    ] = None


@define
class AbortRequests:
    """Drops these requests; unknown and finished ids are ignored, nothing is answered."""

    request_ids: list[str]


EngineMessage = EngineCoreRequest | AbortRequests | StartDpWave | UtilityRequest
"""What an engine receives on an input socket."""

ENGINE_CORE_REQUEST = codec_of(EngineCoreRequest)
_WAVE = codec_of(StartDpWave)
_REQUEST_IDS = STRS

# An enumeration member costs as much to look up as a string to check.
_ADD, _ABORT, _START_DP_WAVE, _UTILITY = (kind.value for kind in RequestType)


def encode_add(request: EngineCoreRequest) -> list[Buffer]:
    """Encode an ADD message: type, payload and an auxiliary frame per large array.

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
    """Give the request id, or describe what stands in its place, for an error."""
    request_id: Any = request.request_id
    return request_id if isinstance(request_id, str) else summarize(request_id)


def encode_abort(request_ids: Sequence[str]) -> list[Buffer]:
    """Encode an ABORT of these ids; raises `CodecError` if they are no list of strings."""
    ids: Any = request_ids  # any kind of sequence, but not a string
    return [_ABORT, pack(_REQUEST_IDS.encode(ids, []))]


def encode_utility(request: UtilityRequest) -> list[Buffer]:
    """Encode a UTILITY message; raises `CodecError` if an argument cannot be packed."""
    return [_UTILITY, pack(UTILITY_REQUEST.encode(request, []))]


def encode_start_dp_wave(message: StartDpWave) -> list[Buffer]:
    """Encode a START_DP_WAVE message, for a coordinator's broadcast or an input socket."""
    return [_START_DP_WAVE, pack(_WAVE.encode(message, []))]


def decode_start_dp_wave(body: Frames) -> StartDpWave:
    """Decode a START_DP_WAVE message without its type; raises `DecodeError`."""
    return decode_payload(_WAVE, body, "a START_DP_WAVE message")


def decode_engine_message(frames: Frames) -> EngineMessage:
    """Decode a message of an input socket, as an engine does.

    Raises `DecodeError`; its ``request_id`` is set if the message is an ADD whose id is readable,
    so that an answer can be given.
    """
    if len(frames) < 2:
        raise DecodeError("an input message", "", f"has {len(frames)} frames, not 2 or more")
    kind, *body = frames
    if kind == _ADD:
        return _decode_add(body)
    if kind == _ABORT:
        return AbortRequests(decode_payload(_REQUEST_IDS, body, "an ABORT message"))
    if kind == _UTILITY:
        return decode_payload(UTILITY_REQUEST, body, "a UTILITY message")
    if kind == _START_DP_WAVE:
        return decode_start_dp_wave(body)
    raise DecodeError("an input message", "", f"unknown request type {bytes(kind[:8])!r}")


def _decode_add(body: Frames) -> EngineCoreRequest:
    try:
        raw = unpack(body[0])
    except CodecError as error:
        raise DecodeError("an ADD message", error.where, error.reason) from error
    return _add_of(raw, body)


def _add_of(raw: Any, body: Frames) -> EngineCoreRequest:
    """The request of an unpacked ADD message."""
    request_id = None
    try:
        if type(raw) is list and raw and type(raw[0]) is str:
            request_id = raw[0]
        return ENGINE_CORE_REQUEST.decode(raw, body)
    except CodecError as error:
        raise DecodeError(
            "an ADD message", error.where, error.reason, request_id=request_id
        ) from error


_PROMPT_INDEX = index_of(EngineCoreRequest, "prompt_token_ids")

TOKEN_IDS_AT_ONCE = 5_000
"""Token ids unpacked and checked without a turn for others."""


def is_short_add(frames: Frames) -> bool:
    """Whether a message is an ADD that is decoded in one go."""
    return len(frames) == 2 and frames[0] == _ADD and len(frames[1]) < LARGE


def decode_engine_message_in_pieces(frames: Frames) -> Generator[None, None, EngineMessage]:
    """Decode like `decode_engine_message`; yields whenever others should have a turn.

    That is while a long prompt is unpacked, or many ids to be aborted.
    """
    if len(frames) == 2 and frames[0] == _ABORT and len(frames[1]) >= LARGE:
        return (yield from _decode_ids_in_pieces(frames))
    try:
        prompt = yield from _find_prompt(frames)
    except CodecError as error:
        raise DecodeError("an ADD message", error.where, error.reason) from error
    if prompt is None:
        message = yield from _decode_other(frames)
        if len(frames[1]) >= LARGE:
            yield  # to take it may take as long again
        return message
    start, end, token_ids = prompt
    _, payload, *aux = frames
    request = _decode_add([b"".join((payload[:start], array_head(0), payload[end:])), *aux])
    if isinstance(token_ids, CodecError):
        reason = token_ids.reason
        raise DecodeError(
            "an ADD message", ".prompt_token_ids", reason, request_id=request.request_id
        ) from token_ids
    request.prompt_token_ids = token_ids
    return request


def _decode_other(frames: Frames) -> Generator[None, None, EngineMessage]:
    """Decode a message without a long prompt; a large one in pieces."""
    if len(frames) != 2 or frames[0] not in (_UTILITY, _ADD) or len(frames[1]) < LARGE:
        return decode_engine_message(frames)
    if frames[0] == _ADD:
        try:
            raw = yield from unpack_in_pieces(frames[1])
        except CodecError as error:
            raise DecodeError("an ADD message", error.where, error.reason) from error
        yield
        return _add_of(raw, frames[1:])
    try:
        raw = yield from unpack_in_pieces(frames[1])
        yield
        return UTILITY_REQUEST.decode(raw, frames[1:])
    except CodecError as error:
        raise DecodeError("a UTILITY message", error.where, error.reason) from error


def _decode_ids_in_pieces(frames: Frames) -> Generator[None, None, EngineMessage]:
    """Decode a large ABORT message."""
    payload = frames[1]
    request_ids: list[str] = []
    count, first = array_at(payload, 0) or (0, 0)
    try:
        pieces, end = yield from split(payload, first, count, TOKEN_IDS_AT_ONCE)
        for piece in pieces:
            request_ids += _REQUEST_IDS.decode(piece.unpack(), ())
            yield
    except CodecError:
        end = 0
    if end != len(payload):  # which raises the same as for a small one
        return decode_engine_message(frames)
    return AbortRequests(request_ids)


def _find_prompt(
    frames: Frames,
) -> Generator[None, None, tuple[int, int, list[int] | CodecError] | None]:
    """Where the array of a long prompt begins and ends, and its token ids, or what is wrong with them.

    None for other messages. Raises `CodecError` if the end cannot be found.
    """
    if len(frames) < 2 or frames[0] != _ADD or len(payload := frames[1]) < LARGE:
        return None
    message = array_at(payload, 0)
    if message is None or message[0] <= _PROMPT_INDEX:
        return None
    start = yield from skip(payload, message[1], _PROMPT_INDEX)
    prompt = array_at(payload, start)
    if prompt is None or prompt[0] <= TOKEN_IDS_AT_ONCE:
        return None
    count, first = prompt
    pieces, end = yield from split(payload, first, count, TOKEN_IDS_AT_ONCE)
    token_ids: list[int] = []
    for piece in pieces:
        try:
            token_ids += TOKEN_IDS.decode(piece.unpack(), ())
        except CodecError as error:
            return start, end, error
        yield
    return start, end, token_ids
