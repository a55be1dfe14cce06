"""`EngineCoreOutput` and the messages of an engine core that carry it.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``EngineCoreOutput``, ``EngineCoreOutputs``) and
``engine-core-client/src/protocol/output.rs``. On the wire one message is a product of optional
fields (`OutputsMessage`); here it is a union of the kinds it can be (`EngineCoreOutputs`).

`decode_outputs` decodes a whole message. A client that serves thousands of requests uses
`decode_outputs_lazily` instead, which leaves the rows of a batch as they are: most carry a few token
ids and nothing else (`bare_token_ids`), and a row that cannot be decoded fails only its own request.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Generator, Iterator, Sequence
from typing import Annotated, Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.arrays import NumpyArray, Tensor, TensorArray
from trio_vllm.protocol.codec import (
    INT64_OR_UINT64,
    STR,
    AuxFrames,
    Buffer,
    Codec,
    CodecError,
    Frames,
    UInt32,
    UInt64,
    list_of,
    optional,
    unchecked,
    wrong_type,
)
from trio_vllm.protocol.logprobs import (
    PROMPT_LOGPROBS,
    SAMPLE_LOGPROBS,
    Logprobs,
    SamplingMask,
)
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.pieces import (
    LARGE,
    PackedPiece,
    array_at,
    array_head,
    skip,
    split,
    unpack_in_pieces,
)
from trio_vllm.protocol.stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from trio_vllm.protocol.structs import as_array, codec_of, defaults_of, index_of
from trio_vllm.protocol.utility import UtilityOutput
from trio_vllm.values import define


class FinishReason(enum.IntEnum):
    """The reason why a request ended."""

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
    """A change of a request's state inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@define
class EngineCoreEvent:
    """A change of a request's state, with its time by the engine's monotonic clock (seconds)."""

    type: EventType
    timestamp: float


@define(kw_only=True)
class RequestErrorInfo:
    """The error that ended a request with ERROR (0.33); upstream calls it ``RequestError``."""

    code: str
    """Such as ``engine_paused`` or ``validation_error``."""
    message: str
    retryable: bool = False


def _check_stop_reason(value: Any, context: Any) -> int | str:
    if type(value) is int:
        return INT64_OR_UINT64.decode(value, context)
    if type(value) is str:
        return STR.decode(value, context)
    raise wrong_type("an integer or a string", value)


StopReason = Annotated[int | str, Codec("a stop reason", _check_stop_reason, _check_stop_reason)]


@as_array(minimum=2)
@define(eq=False)
class EngineCoreOutput:
    """One request's share of one step. Arrays may alias the message they came in."""

    request_id: str
    new_token_ids: list[UInt32] = attrs.field(factory=list)
    new_logprobs: Annotated[Logprobs, SAMPLE_LOGPROBS] | None = None
    """As wide as the widest request of the step: cut it to what was asked for."""
    new_prompt_logprobs_tensors: Annotated[Logprobs, PROMPT_LOGPROBS] | None = None
    """Row ``i`` is about prompt token ``i + 1``."""
    pooling_output: Tensor | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    """The stop token, if one matched; None for end of text."""
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: NumpyArray | None = None
    """``[rows, layers, top_k]``."""
    num_nans_in_logits: UInt64 = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: SamplingMask | None = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    prompt_token_id_logprobs: TensorArray | None = None
    """float32 ``[rows, ids]``."""
    error: RequestErrorInfo | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


ENGINE_CORE_OUTPUT = codec_of(EngineCoreOutput)

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The sentinel of a dying engine: alone in its frame, on every output socket, not MessagePack."""


@define(kw_only=True)
class RequestBatchOutputs:
    """Outputs of one step, with statistics; either may be missing."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = attrs.field(factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """The engine's monotonic clock, seconds."""
    finished_requests: list[str] | None = None
    weight_version: str | None = None


@define(kw_only=True)
class UtilityCallOutput:
    """The answer to a utility call."""

    engine_index: int = 0
    output: UtilityOutput
    timestamp: float = 0.0


@define(kw_only=True)
class DpControlOutput:
    """A wave notice for the coordinator: exactly one of the two waves is set."""

    engine_index: int = 0
    wave_complete: int | None = None
    """All engines ran out of work in this wave."""
    start_wave: int | None = None
    """This engine, idle until now, has work for this wave."""
    timestamp: float = 0.0


@define
class EngineDead:
    """The sentinel of a dying engine; it does not name the engine."""


EngineCoreOutputs = RequestBatchOutputs | UtilityCallOutput | DpControlOutput


ROWS_AT_ONCE = 64
"""Rows handled without a turn for others: less than a millisecond, if each has little more than tokens."""

BYTES_AT_ONCE = 4 * 1024
"""Bytes of rows of a large message handled so; whoever waits for their requests has work with them, too."""


@define
class UndecodedBatch:
    """A `RequestBatchOutputs` whose outputs and statistics are not decoded yet."""

    engine_index: int
    rows: list[Any]
    timestamp: float
    finished_requests: list[str] | None
    weight_version: str | None
    _raw_stats: Any
    frames: Frames
    """The message; rows refer to its auxiliary frames."""
    packed_rows: Sequence[PackedPiece] = ()
    """The rows of a large message, which are unpacked as they are needed; ``rows`` is empty then."""
    has_logprob_rows: bool = False
    """Whether some rows are not unpacked; see `find_logprob_rows`."""

    def row_pieces(self) -> Iterator[list[Any]]:
        """Give the rows, some at a time; raises `DecodeError`."""
        for start in range(0, len(self.rows), ROWS_AT_ONCE):
            yield self.rows[start : start + ROWS_AT_ONCE]
        for piece in self.packed_rows:
            try:
                yield piece.unpack()
            except CodecError as error:
                reason = error.reason
                raise DecodeError("outputs", error.where, reason, self.engine_index) from error

    def decode_row(self, row: Any) -> EngineCoreOutput:
        """Decode one of the rows; a `DecodeError` has the request id, if that can be read."""
        try:
            return ENGINE_CORE_OUTPUT.decode(row, self.frames)
        except CodecError as error:
            raise DecodeError(
                "an output", error.where, error.reason, self.engine_index, row_request_id(row)
            ) from error

    @property
    def has_stats(self) -> bool:
        """Whether the engine sent statistics along."""
        return self._raw_stats is not None

    def decode_stats(self) -> SchedulerStats | None:
        """Decode the statistics; raises `DecodeError`."""
        try:
            return _OPTIONAL_STATS.decode(self._raw_stats, self.frames)
        except CodecError as error:
            where = error.add_path(".scheduler_stats").where
            raise DecodeError("outputs", where, error.reason, self.engine_index) from error


def _check_rows(raw: Any, _: Frames) -> list[Any]:
    if type(raw) is not list:
        raise wrong_type("an array", raw)
    return raw


_OPTIONAL_STATS = optional(codec_of(SchedulerStats))

# A client decodes rows and statistics when it needs them, see `UndecodedBatch`.
_ROWS = Codec("an array", _check_rows, list_of(ENGINE_CORE_OUTPUT).encode)
_STATS = Codec("a map or nil", unchecked, _OPTIONAL_STATS.encode)


@as_array()
@define
class OutputsMessage:
    """``EngineCoreOutputs`` as upstream declares it: one array for every kind of output message."""

    engine_index: UInt32 = 0
    outputs: Annotated[list[Any], _ROWS] = attrs.field(factory=list)
    scheduler_stats: Annotated[Any, _STATS] = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: UInt32 | None = None
    start_wave: UInt32 | None = None
    weight_version: str | None = None


_MESSAGE = codec_of(OutputsMessage)
_MESSAGE_LENGTH = len(attrs.fields(OutputsMessage))
_ROWS_INDEX = index_of(OutputsMessage, "outputs")


# Reading ----------------------------------------------------------------------------------------


# A bare row holds an id and token ids, and then the default in each field: nil in most.
_REST_START = index_of(EngineCoreOutput, "new_token_ids") + 1
_REST = defaults_of(EngineCoreOutput)[_REST_START:]
_REST_END = _REST_START + len(_REST)
_NOT_NIL = [_REST_START + i for i, default in enumerate(_REST) if default is not None]
_BARE_MINIMUM = _NOT_NIL[-1] + 1
_NOT_NIL_COUNT = _REST_START + len(_NOT_NIL)
_not_nil_of = operator.itemgetter(*_NOT_NIL)
_NOT_NIL_DEFAULTS = _not_nil_of([None] * _REST_START + _REST)


_FEW_TOKENS = 64
"""Tokens of a row up to which it is the quickest to look at each."""


def bare_token_ids(row: Any) -> list[int] | None:
    """Give the new token ids of a row that carries nothing else; None for other rows.

    They are integers, one at least. Their range is not checked, nor is the row's id. A row may be
    shorter than ours, or longer by fields that we do not know, if these are nil, zero or empty.
    """
    if type(row) is not list:
        return None
    length = len(row)
    if length >= _BARE_MINIMUM:  # an engine of any version
        if (
            row.count(None) != length - _NOT_NIL_COUNT or _not_nil_of(row) != _NOT_NIL_DEFAULTS
        ) and (length <= _REST_END or not _has_bare_rest(row)):
            return None
    elif length != _REST_START and not _has_bare_rest(row):  # our mock engine writes two elements
        return None
    token_ids = row[1]
    # One after the other is faster than all at once for the one or few that a step makes.
    if type(token_ids) is list and token_ids:
        if len(token_ids) > _FEW_TOKENS:
            return token_ids if set(map(type, token_ids)) == {int} else None
        for token_id in token_ids:
            if type(token_id) is not int:
                return None
        return token_ids
    return None


_LOGPROBS = index_of(EngineCoreOutput, "new_logprobs")
_MASK = index_of(EngineCoreOutput, "new_sampling_mask")


def raw_logprobs_of(row: Any) -> list[Any] | None:
    """Give the sample logprobs, as they were unpacked, of a row with one token; None for other rows.

    See `LogprobsCollector.add_raw`. What else there may be in the row, `rest_of` tells; nothing of that
    is about the token.
    """
    if type(row) is not list or not _LOGPROBS < len(row) <= _REST_END:
        return None
    logprobs, token_ids = row[_LOGPROBS], row[1]
    if (
        type(logprobs) is not list
        or row[_MASK : _MASK + 1] not in ([], [None])
        or type(token_ids) is not list
        or len(token_ids) != 1
        or type(token_ids[0]) is not int
    ):
        return None
    return logprobs


def rest_of(row: list[Any]) -> list[Any] | None:
    """Give a row without its tokens and their logprobs; None if there is nothing else in it."""
    fields = row[_LOGPROBS + 1 :]
    if fields == _REST[1 : 1 + len(fields)]:
        return None
    return [row[0], [], None, *fields]


def _has_bare_rest(row: list[Any]) -> bool:
    known, unknown = row[_REST_START:_REST_END], row[_REST_END:]
    return len(row) > _REST_START and known == _REST[: len(known)] and not any(unknown)


def row_request_id(row: Any) -> str | None:
    """Give the request id of a row, if it has one."""
    return row[0] if type(row) is list and row and type(row[0]) is str else None


def decode_outputs_lazily(
    frames: Frames,
) -> UndecodedBatch | UtilityCallOutput | DpControlOutput | EngineDead:
    """Decode an output message, but for the rows and statistics of a batch.

    Raises `DecodeError`, with the engine's index if that can be read.
    """
    if not frames:
        raise DecodeError("outputs", "", "the message has no frame")
    if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
        return EngineDead()
    try:
        raw = unpack(frames[0])
    except CodecError as error:
        raise DecodeError("outputs", error.where, error.reason) from error
    return _decode_unpacked(raw, frames)


def _decode_unpacked(
    raw: Any, frames: Frames
) -> UndecodedBatch | UtilityCallOutput | DpControlOutput:
    try:
        if (batch := _bare_batch(raw, frames)) is not None:
            return batch
        message = _MESSAGE.decode(raw, frames)
    except CodecError as error:
        raise DecodeError("outputs", error.where, error.reason, _engine_index_of(raw)) from error
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


def _bare_batch(raw: Any, frames: Frames) -> UndecodedBatch | None:
    """A batch without peculiarities; None for all else, about which `OutputsMessage` decides.

    Most messages are such, and behind a fast engine they have few rows each: this takes a third off
    the cost of one with a single row (2.7 instead of 4.2 µs). The names stand in the order of the
    fields of `OutputsMessage`.
    """
    if type(raw) is not list or len(raw) < _MESSAGE_LENGTH:
        return None
    fields = raw if len(raw) == _MESSAGE_LENGTH else raw[:_MESSAGE_LENGTH]
    index, rows, stats, timestamp, utility, finished, complete, start, version = fields
    if utility is complete is start is finished is None and (
        type(index) is int
        and 0 <= index < 2**32
        and type(rows) is list
        and type(timestamp) is float
        and (version is None or type(version) is str)
    ):
        return UndecodedBatch(index, rows, timestamp, None, version, stats, frames)
    return None


def _engine_index_of(raw: Any) -> int | None:
    return raw[0] if type(raw) is list and raw and type(raw[0]) is int else None


def _kind(message: OutputsMessage) -> UtilityCallOutput | DpControlOutput:
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


def decode_outputs_in_pieces(
    frames: Frames,
) -> Generator[None, None, UndecodedBatch | UtilityCallOutput | DpControlOutput | EngineDead]:
    """Decode like `decode_outputs_lazily`; the rows of a large message are not even unpacked.

    It yields whenever others should have a turn.
    """
    try:
        rows = (yield from _find_rows(frames[0])) if frames else None
        if rows is None:
            if not frames or len(frames[0]) < LARGE:
                return decode_outputs_lazily(frames)
            raw = yield from unpack_in_pieces(frames[0])
            yield
            whole = _decode_unpacked(raw, frames)
            yield  # to handle it may take as long again
            return whole
        payload, (start, first, count) = frames[0], rows
        size = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * count // len(payload)))
        pieces, end = yield from split(payload, first, count, size)
    except CodecError as error:
        raise DecodeError("outputs", error.where, error.reason) from error
    rest = b"".join((payload[:start], array_head(0), payload[end:]))
    message = decode_outputs_lazily([rest, *frames[1:]])
    if not isinstance(message, UndecodedBatch):
        raise DecodeError("outputs", "", "the message is of several kinds at once")
    message.frames, message.packed_rows = frames, pieces
    return message


def _find_rows(payload: Buffer) -> Generator[None, None, tuple[int, int, int] | None]:
    """Where the array of rows begins, where the first row does, and how many there are.

    None for a message that is small, not of the usual form, or has few rows.
    """
    message = array_at(payload, 0) if len(payload) >= LARGE else None
    if message is None or message[0] <= _ROWS_INDEX:
        return None
    start = yield from skip(payload, message[1], _ROWS_INDEX)
    rows = array_at(payload, start)
    if rows is None or rows[0] <= ROWS_AT_ONCE:
        return None
    count, first = rows
    return start, first, count


def decode_outputs(frames: Frames) -> EngineCoreOutputs | EngineDead:
    """Decode a whole output message; raises `DecodeError`."""
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


def encode_output_rows(outputs: Sequence[EngineCoreOutput], aux: list[Buffer]) -> bytes:
    """Encode outputs as the elements of the array of a message; appends its auxiliary frames to ``aux``."""
    return b"".join([pack(ENGINE_CORE_OUTPUT.encode(output, aux)) for output in outputs])


def encode_outputs(outputs: EngineCoreOutputs) -> list[Buffer]:
    """Encode an output message: payload and an auxiliary frame per large array.

    Every field is written, as upstream's engine does. Raises `CodecError`.
    """
    message = OutputsMessage(outputs.engine_index, timestamp=outputs.timestamp)
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
