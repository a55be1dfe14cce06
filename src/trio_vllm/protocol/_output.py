"""What an engine core sends: outputs of requests, answers to utility calls, wave notices.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreOutput``, ``EngineCoreOutputs``) and
``engine-core-client/src/protocol/output.rs``. On the wire one message is a product of optional
fields; here it is a union of the kinds it can be.

`decode_outputs` reads a whole message. A client that serves thousands of requests uses
`open_outputs` instead, which leaves the rows of a batch as they are: most carry a few token ids and
nothing else (`plain_token_ids`), and a row that does not decode hurts only its own request.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from .._errors import DecodeError
from ._arrays import NUMPY_ARRAY, TENSOR, TENSOR_AS_NUMPY, Array, Tensor
from ._forms import (
    ANY,
    ANY_MAP,
    BOOL,
    FLOAT,
    STR,
    TOKEN_IDS,
    U32,
    U64,
    AuxFrames,
    Buffer,
    Form,
    FormError,
    Frames,
    array_struct,
    enumeration,
    list_of,
    map_of,
    map_struct,
    misfit,
    optional,
)
from ._logprobs import PROMPT_LOGPROBS, SAMPLE_LOGPROBS, SAMPLING_MASK, Logprobs, SamplingMask
from ._msgpack import pack, unpack
from ._stats import (
    PREFILL_STATS,
    SCHEDULER_STATS,
    SPEC_DECODE_METRICS,
    PrefillStats,
    RequestSpecDecodeMetrics,
    SchedulerStats,
)
from ._utility import UTILITY_OUTPUT, UtilityOutput

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The farewell of a dying engine: alone in its frame, on every output socket, not MessagePack."""


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
class RowBatch:
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
        except FormError as error:
            raise DecodeError(
                "an output", error.where, error.reason, self.engine_index, row_request_id(row)
            ) from error

    def decode_stats(self) -> SchedulerStats | None:
        """Decode the statistics; `DecodeError` if they do not have their form."""
        try:
            return _OPTIONAL_STATS.decode(self._raw_stats, self._frames)
        except FormError as error:
            where = f"scheduler_stats.{error.where}"
            raise DecodeError("outputs", where, error.reason, self.engine_index) from error


# Forms ------------------------------------------------------------------------------------------


def _check_stop_reason(value: Any, _: object) -> int | str | None:
    if value is not None and type(value) not in (int, str):
        raise misfit("an integer, a string or nil", value)
    return value  # type: ignore[no-any-return]


_STOP_REASON: Form[int | str | None] = Form("a stop reason", _check_stop_reason, _check_stop_reason)

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
        "stop_reason": _STOP_REASON,
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

_OPTIONAL_STATS = optional(SCHEDULER_STATS)


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


_MESSAGE: Form[_Message] = array_struct(
    _Message,
    0,
    {
        "engine_index": U32,
        "outputs": list_of(ANY),
        "scheduler_stats": ANY,
        "timestamp": FLOAT,
        "utility_output": optional(UTILITY_OUTPUT),
        "finished_requests": optional(list_of(STR)),
        "wave_complete": optional(U32),
        "start_wave": optional(U32),
        "weight_version": optional(STR),
    },
)


# Reading ----------------------------------------------------------------------------------------

# What follows the token ids in a row that carries nothing else, as 0.32 and 0.33 write it.
_NOTHING_ELSE = tuple([*[None] * 11, 0, *[None] * rest] for rest in (4, 5))


def plain_token_ids(row: Any) -> list[int] | None:
    """The new token ids of a row that carries nothing else, not checked; None for other rows."""
    if type(row) is list and (len(row) == 2 or row[2:] in _NOTHING_ELSE):
        return row[1]  # type: ignore[no-any-return]
    return None


def row_request_id(row: Any) -> str | None:
    """The request id of a row, if it has one."""
    return row[0] if type(row) is list and row and type(row[0]) is str else None


def open_outputs(frames: Frames) -> RowBatch | UtilityCallOutput | DpControlOutput | EngineDead:
    """Read an output message up to, but without, the rows and statistics of a batch.

    Raises `DecodeError`, with the engine's index if that can be read.
    """
    if not frames:
        raise DecodeError("outputs", "", "the message has no frame")
    if len(frames) == 1 and bytes(frames[0][:17]) == ENGINE_CORE_DEAD:
        return EngineDead()
    raw = None
    try:
        raw = unpack(frames[0])
        message = _MESSAGE.decode(raw, frames)
    except FormError as error:
        raise DecodeError("outputs", error.where, error.reason, _index_of(raw)) from error
    if message.utility_output is None and message.wave_complete is message.start_wave is None:
        return RowBatch(
            message.engine_index,
            message.outputs,
            message.timestamp,
            message.finished_requests,
            message.weight_version,
            message.scheduler_stats,
            frames,
        )
    return _kind(message)


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
    message = open_outputs(frames)
    if not isinstance(message, RowBatch):
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

    Every position is written, as upstream's engine does. Raises `FormError`, an engine's bug.
    """
    aux: AuxFrames = []
    message = _Message(outputs.engine_index, timestamp=outputs.timestamp)
    match outputs:
        case RequestBatchOutputs():
            encode = ENGINE_CORE_OUTPUT.encode
            message.outputs = [encode(output, aux) for output in outputs.outputs]
            message.scheduler_stats = _OPTIONAL_STATS.encode(outputs.scheduler_stats, aux)
            message.finished_requests = outputs.finished_requests
            message.weight_version = outputs.weight_version
        case UtilityCallOutput():
            message.utility_output = outputs.output
        case DpControlOutput():
            message.wave_complete = outputs.wave_complete
            message.start_wave = outputs.start_wave
    return [pack(_MESSAGE.encode(message, aux)), *aux]
