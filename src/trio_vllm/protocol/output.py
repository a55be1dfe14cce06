"""One request's share of what an engine core sends.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreOutput``) and
``engine-core-client/src/protocol/output.rs``. How outputs are packed into messages is in
``_output_message.py``.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.arrays import NUMPY_ARRAY, TENSOR, TENSOR_AS_NUMPY, Array, Tensor
from trio_vllm.protocol.codec import (
    ANY_MAP,
    BOOL,
    FLOAT,
    INT64_OR_UINT64,
    STR,
    TOKEN_IDS,
    U32,
    U64,
    AuxFrames,
    Buffer,
    Codec,
    CodecError,
    Frames,
    enumeration,
    list_of,
    map_of,
    misfit,
    optional,
    pass_on,
)
from trio_vllm.protocol.logprobs import (
    PROMPT_LOGPROBS,
    SAMPLE_LOGPROBS,
    SAMPLING_MASK,
    Logprobs,
    SamplingMask,
)
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.stats import (
    PREFILL_STATS,
    SCHEDULER_STATS,
    SPEC_DECODE_METRICS,
    PrefillStats,
    RequestSpecDecodeMetrics,
    SchedulerStats,
)
from trio_vllm.protocol.structs import array_struct, map_struct
from trio_vllm.protocol.utility import UTILITY_OUTPUT, UtilityOutput

# MERGED protocol/_output_message: The messages of an engine core: outputs of requests, answers to utility calls, wave notices.
#
# Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreOutputs``) and
# ``engine-core-client/src/protocol/output.rs``. On the wire one message is a product of optional
# fields; here it is a union of the kinds it can be.
#
# `decode_outputs` reads a whole message. A client that serves thousands of requests uses
# `decode_outputs_lazily` instead, which leaves the rows of a batch as they are: most carry a few token ids and
# nothing else (`plain_token_ids`), and a row that does not decode hurts only its own request.


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


_STOP_REASON: Codec[int | str] = Codec("a stop reason", _check_stop_reason, _check_stop_reason)

_EVENT: Codec[EngineCoreEvent] = map_struct(
    EngineCoreEvent,
    {"type": enumeration(EventType), "timestamp": FLOAT},
    required=("type", "timestamp"),
)

_REQUEST_ERROR: Codec[RequestErrorInfo] = map_struct(
    RequestErrorInfo,
    {"code": STR, "message": STR, "retryable": BOOL},
    required=("code", "message"),
)

ENGINE_CORE_OUTPUT: Codec[EngineCoreOutput] = array_struct(
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


ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The farewell of a dying engine: alone in its frame, on every output socket, not MessagePack."""


@attrs.define(kw_only=True)
class RequestBatchOutputs:
    """Outputs of one step, with statistics; either may be missing."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = attrs.field(factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """The engine's monotonic clock, seconds."""
    finished_requests: list[str] | None = None
    weight_version: str | None = None


@attrs.define(kw_only=True)
class UtilityCallOutput:
    """The answer to a utility call."""

    engine_index: int = 0
    output: UtilityOutput
    timestamp: float = 0.0


@attrs.define(kw_only=True)
class DpControlOutput:
    """A wave notice, for the coordinator: exactly one of the two is set."""

    engine_index: int = 0
    wave_complete: int | None = None
    """All engines ran out of work in this wave."""
    start_wave: int | None = None
    """This engine, idle until now, has work for this wave."""
    timestamp: float = 0.0


@attrs.define
class EngineDead:
    """The engine says that it is dying; the message does not tell which one."""


EngineCoreOutputs = RequestBatchOutputs | UtilityCallOutput | DpControlOutput


@attrs.define
class UndecodedBatch:
    """A `RequestBatchOutputs` whose outputs and statistics are not decoded yet."""

    engine_index: int
    rows: list[Any]
    timestamp: float
    finished_requests: list[str] | None
    weight_version: str | None
    _raw_stats: Any
    _frames: Frames

    def decode_row(self, row: Any) -> EngineCoreOutput:
        """Decode one of the rows; a `DecodeError` has the request id, if that can be read."""
        try:
            return ENGINE_CORE_OUTPUT.decode(row, self._frames)
        except CodecError as error:
            raise DecodeError(
                "an output", error.where, error.reason, self.engine_index, row_request_id(row)
            ) from error

    @property
    def has_stats(self) -> bool:
        """Whether the engine sent statistics along."""
        return self._raw_stats is not None

    def decode_stats(self) -> SchedulerStats | None:
        """Decode the statistics; `DecodeError` if they do not have their form."""
        try:
            return _OPTIONAL_STATS.decode(self._raw_stats, self._frames)
        except CodecError as error:
            where = error.within(".scheduler_stats").where
            raise DecodeError("outputs", where, error.reason, self.engine_index) from error


# Forms ------------------------------------------------------------------------------------------


@attrs.define
class _Message:
    """The array that every output message is, before its kind is known."""

    engine_index: int = 0
    outputs: list[Any] = attrs.field(factory=list)
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


def _check_rows(raw: Any, _: Frames) -> list[Any]:
    if type(raw) is not list:
        raise misfit("an array", raw)
    return raw


_OPTIONAL_STATS = optional(SCHEDULER_STATS)
_OUTPUTS = list_of(ENGINE_CORE_OUTPUT)

_MESSAGE: Codec[_Message] = array_struct(
    _Message,
    0,
    {
        "engine_index": U32,
        # Read when somebody asks for them, see UndecodedBatch.
        "outputs": Codec("an array", _check_rows, _OUTPUTS.encode),
        "scheduler_stats": Codec("a map or nil", pass_on, _OPTIONAL_STATS.encode),
        "timestamp": FLOAT,
        "utility_output": optional(UTILITY_OUTPUT),
        "finished_requests": optional(list_of(STR)),
        "wave_complete": optional(U32),
        "start_wave": optional(U32),
        "weight_version": optional(STR),
    },
)


# Reading ----------------------------------------------------------------------------------------


def plain_token_ids(row: Any) -> list[int] | None:
    """The new token ids of a row that carries nothing else; None for other rows.

    They are integers, one at least. Their range is not checked, nor is the row's id.
    """
    if type(row) is not list:
        return None
    length = len(row)
    # A row as 0.32 or 0.33 writes it, or a short one. All is nil but id, ids and `num_nans_in_logits`.
    if length != 2 and not (18 <= length <= 19 and row.count(None) == length - 3 and row[13] == 0):
        return None
    token_ids = row[1]
    # One after the other is faster than all at once for the one or few that a step makes.
    if type(token_ids) is list and token_ids:
        for token_id in token_ids:
            if type(token_id) is not int:
                return None
        return token_ids
    return None


def row_request_id(row: Any) -> str | None:
    """The request id of a row, if it has one."""
    return row[0] if type(row) is list and row and type(row[0]) is str else None


def decode_outputs_lazily(
    frames: Frames,
) -> UndecodedBatch | UtilityCallOutput | DpControlOutput | EngineDead:
    """Read an output message up to, but without, the rows and statistics of a batch.

    Raises `DecodeError`, with the engine's index if that can be read.
    """
    if not frames:
        raise DecodeError("outputs", "", "the message has no frame")
    if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
        return EngineDead()
    raw = None
    try:
        raw = unpack(frames[0])
        if batch := _plain_batch(raw, frames):
            return batch
        message = _MESSAGE.decode(raw, frames)
    except CodecError as error:
        raise DecodeError("outputs", error.where, error.reason, _index_of(raw)) from error
    if message.utility_output is None and message.wave_complete is message.start_wave is None:
        return UndecodedBatch(
            message.engine_index,
            message.outputs,
            message.timestamp,
            message.finished_requests,
            message.weight_version,
            message.scheduler_stats,
            frames,
        )
    return _kind(message)


_ALL_MISSING: tuple[Any, ...] = ([], None, 0.0, None, None, None, None, None)


def _plain_batch(raw: Any, frames: Frames) -> UndecodedBatch | None:
    """A well-formed batch; None for everything else, about which `_MESSAGE` has the say.

    What that does field by field costs as much as handing out ten rows.
    """
    if type(raw) is not list or not 1 <= len(raw) <= 9:
        return None
    fields = (*raw, *_ALL_MISSING[len(raw) - 1 :])
    index, rows, stats, timestamp, utility, finished, complete, start, version = fields
    if (
        type(index) is int
        and 0 <= index < 2**32
        and type(rows) is list
        and type(timestamp) is float
        and utility is complete is start is None
        and (finished is None or (type(finished) is list and set(map(type, finished)) <= {str}))
        and (version is None or type(version) is str)
    ):
        return UndecodedBatch(index, rows, timestamp, finished, version, stats, frames)
    return None


def _index_of(raw: Any) -> int | None:
    return raw[0] if type(raw) is list and raw and type(raw[0]) is int else None


def _kind(message: _Message) -> UtilityCallOutput | DpControlOutput:
    index, timestamp = message.engine_index, message.timestamp
    utility, complete, start = message.utility_output, message.wave_complete, message.start_wave
    batch = message.outputs or message.scheduler_stats or message.finished_requests
    kinds = [part is not None for part in (utility, complete, start)]
    if batch or sum(kinds) > 1:
        raise DecodeError("outputs", "", "the message is of several kinds at once", index)
    if utility is not None:
        return UtilityCallOutput(engine_index=index, output=utility, timestamp=timestamp)
    return DpControlOutput(
        engine_index=index, wave_complete=complete, start_wave=start, timestamp=timestamp
    )


def decode_outputs(frames: Frames) -> EngineCoreOutputs | EngineDead:
    """Read a whole output message; raises `DecodeError`."""
    message = decode_outputs_lazily(frames)
    if not isinstance(message, UndecodedBatch):
        return message
    return RequestBatchOutputs(
        engine_index=message.engine_index,
        outputs=[message.decode_row(row) for row in message.rows],
        scheduler_stats=message.decode_stats(),
        timestamp=message.timestamp,
        finished_requests=message.finished_requests,
        weight_version=message.weight_version,
    )


# Writing ----------------------------------------------------------------------------------------


def encode_outputs(outputs: EngineCoreOutputs) -> list[Buffer]:
    """The message of these outputs: payload and an auxiliary frame per large array.

    Every position is written, as upstream's engine does. Raises `CodecError`, an engine's bug.
    """
    message = _Message(outputs.engine_index, timestamp=outputs.timestamp)
    match outputs:
        case RequestBatchOutputs():
            message.outputs = outputs.outputs
            message.scheduler_stats = outputs.scheduler_stats
            message.finished_requests = outputs.finished_requests
            message.weight_version = outputs.weight_version
        case UtilityCallOutput():
            message.utility_output = outputs.output
        case DpControlOutput():
            if (outputs.wave_complete is None) == (outputs.start_wave is None):
                raise CodecError("must have either wave_complete or start_wave")
            message.wave_complete = outputs.wave_complete
            message.start_wave = outputs.start_wave
    aux: AuxFrames = []
    return [pack(_MESSAGE.encode(message, aux)), *aux]
