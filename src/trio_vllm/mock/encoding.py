"""`MessageTemplate`, `StatsTemplate` and `row` write output messages without building objects.

A row is an `EngineCoreOutput` as an array that ends with the last field that has a value: readers
fill up what is missing (two elements are the least). Token ids are written with a fixed width, also
small ones, so that a row keeps its length and its tokens their places from step to step.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar

import attrs
import numpy as np

from trio_vllm.mock.request import Request
from trio_vllm.protocol import (
    Buffer,
    EngineCoreOutput,
    EventType,
    FinishReason,
    OutputsMessage,
    PrefillStats,
    PrefixCacheStats,
    RequestBatchOutputs,
    SchedulerStats,
    encode_output_rows,
    encode_outputs,
    index_of,
)
from trio_vllm.values import define, frozen

COORDINATOR = -1
"""Instead of a client index: a message to the data-parallel coordinator."""

Outgoing = tuple[int, list[Buffer]]
"""A client index, or `COORDINATOR`, and the frames to send there."""

NIL = b"\xc0"

PACKED_AT_ONCE = 512
"""Rows of the plain path encoded without a turn for others: some 15 ms, with log probabilities."""

_FIELDS = len(attrs.fields(OutputsMessage))
_AFTER_TIME = _FIELDS - 1 - index_of(OutputsMessage, "timestamp")


def _index_after_time(name: str) -> int:
    return index_of(OutputsMessage, name) - index_of(OutputsMessage, "timestamp") - 1


# What `encode_outputs` writes around the rows of a message without anything else: an array header
# and an engine index of one byte before, nil statistics, time 0.0 and nils behind.
_STATS_END = -len(b"\xcb" + bytes(8) + NIL * _AFTER_TIME)
_STATS_START = 3  # behind the header of no rows


@define
class MessageBuilder:
    """Collects what one client gets in one step."""

    pieces: list[Buffer] = attrs.field(factory=list)
    """Encoded rows, one or more a piece."""
    row_count: int = 0
    outputs: list[EngineCoreOutput] = attrs.field(factory=list)
    """Rows of the plain path."""
    finished: list[str] = attrs.field(factory=list)
    """Ids of requests that are over."""

    _packed: list[Buffer] = attrs.field(factory=list, init=False)
    """Some of them that were encoded before the others, and their arrays."""
    _packed_count: int = attrs.field(default=0, init=False)
    _aux: list[Buffer] = attrs.field(factory=list, init=False)

    def pack_in_slices(self) -> Iterator[None]:
        """Encode rows of the plain path, all but the last few; yields whenever others should have a turn."""
        while len(self.outputs) > PACKED_AT_ONCE:
            self._pack(PACKED_AT_ONCE)
            yield

    def _pack(self, count: int) -> None:
        self._packed.append(encode_output_rows(self.outputs[:count], self._aux))
        self._packed_count += len(self.outputs[:count])
        del self.outputs[:count]

    def pack_rows(self) -> tuple[int, list[Buffer], list[Buffer]]:
        """Encode what is not yet encoded; gives the number of rows, the rows, and their auxiliary frames."""
        if self.outputs:
            self._pack(len(self.outputs))
        return self.row_count + self._packed_count, [*self.pieces, *self._packed], self._aux

    def add(self, piece: Buffer, row_count: int = 1) -> None:
        """Append encoded rows."""
        self.pieces.append(piece)
        self.row_count += row_count


class MessageTemplate:
    """Writes what stands around the rows of every message of an engine."""

    def __init__(self, engine_index: int, weight_version: str) -> None:
        # Inside a message of nine fields; indices take one, two or three bytes.
        index = engine_index.to_bytes(2, "big")
        packed = index[1:] if engine_index < 128 else b"\xcd" + index
        self._start = pack_array_header(_FIELDS) + packed
        self.weight_version = weight_version
        end = [NIL] * _AFTER_TIME
        end[_index_after_time("weight_version")] = pack_str(weight_version)
        finished = _index_after_time("finished_requests")
        self._end = b"".join(end)
        self._before_finished = b"".join(end[:finished])
        self._after_finished = b"".join(end[finished + 1 :])

    def start(self, row_count: int) -> bytes:
        """Everything before the rows."""
        return self._start + pack_array_header(row_count)

    def end(self, finished: Sequence[str] = ()) -> bytes:
        """Everything behind the time."""
        if not finished:
            return self._end
        return b"".join((self._before_finished, pack_strs(finished), self._after_finished))

    def build(self, builder: MessageBuilder, stats: bytes, now: float) -> list[Buffer]:
        """The frames of a message; ``stats`` are encoded, nil for none."""
        row_count, pieces, aux = builder.pack_rows()
        message = (
            self.start(row_count),
            *pieces,
            stats,
            b"\xcb",
            pack_double(now),
            self.end(builder.finished),
        )
        return [b"".join(message), *aux]


def encode_stats(stats: SchedulerStats) -> bytes:
    """Statistics as they stand in a message."""
    payload = bytes(encode_outputs(RequestBatchOutputs(scheduler_stats=stats))[0])
    return payload[_STATS_START:_STATS_END]


class StatsTemplate:
    """Encoded `SchedulerStats` in which only a few numbers change, all of fixed width."""

    def __init__(self, *names: str) -> None:
        """Let these fields change, in the order of the message; a dot leads into a part."""
        parts, form = _layout(names)
        self._parts: list[bytes | int | float] = [*parts]
        self._pack = form.pack

    def fill(self, *numbers: float) -> bytes:
        """The statistics with these numbers, one for each name."""
        self._parts[1::2] = numbers
        return self._pack(*self._parts)


@functools.cache  # to find it takes a fifth of the time of making an engine
def _layout(names: tuple[str, ...]) -> tuple[tuple[bytes | float, ...], struct.Struct]:
    """What stands before and behind the numbers of these fields, with them, and how all is packed."""
    default = SchedulerStats()
    marks = [_mark(attrgetter(name)(default), place) for place, name in enumerate(names)]
    for name, mark in zip(names, marks, strict=True):
        part, _, field = name.rpartition(".")
        setattr(getattr(default, part) if part else default, field, mark)
    rest, form, parts = encode_stats(default), ">", list[bytes | float]()
    for mark in marks:
        kind = "Q" if isinstance(mark, int) else "d"
        before, _, rest = rest.partition(struct.pack(f">{kind}", mark))
        form += f"{len(before)}s{kind}"
        parts += [before, mark]
    return (*parts, rest), struct.Struct(f"{form}{len(rest)}s")


def _mark(default: float, place: int) -> float:
    """A number that stands nowhere else in the statistics, and is written with eight bytes."""
    return 2**64 - 1 - place if isinstance(default, int) else 0.123456789


def _fields(*, numbers: bool) -> list[str]:
    """The fields of statistics that are numbers in any case, or all others."""
    of_cache = [f"prefix_cache_stats.{field.name}" for field in attrs.fields(PrefixCacheStats)]
    names: list[str] = []
    for field in attrs.fields(SchedulerStats):
        names += of_cache if field.name == "prefix_cache_stats" else [field.name]
    default = SchedulerStats()
    return [name for name in names if (type(attrgetter(name)(default)) in {int, float}) is numbers]


class SchedulerStatsEncoder:
    """Encodes the statistics of steps: of most of them only numbers change.

    What has more than numbers is encoded as usual.
    """

    def __init__(self) -> None:
        numbers = _fields(numbers=True)
        self._numbers = attrgetter(*numbers)
        self._others = attrgetter(*_fields(numbers=False))
        self._no_others = self._others(SchedulerStats())
        self._template = StatsTemplate(*numbers)

    def encode(self, stats: SchedulerStats) -> bytes:
        """The encoded statistics."""
        if self._others(stats) != self._no_others:
            return encode_stats(stats)
        return self._template.fill(*self._numbers(stats))


pack_double = struct.Struct(">d").pack
_pack_u16 = struct.Struct(">H").pack
_pack_u32 = struct.Struct(">I").pack


def pack_u32(value: int) -> bytes:
    """An unsigned integer of up to 32 bits, always five bytes."""
    return b"\xce" + _pack_u32(value)


def pack_array_header(length: int) -> bytes:
    """What stands before ``length`` elements."""
    if length < 16:
        return bytes((0x90 | length,))
    return b"\xdc" + _pack_u16(length) if length < 2**16 else b"\xdd" + _pack_u32(length)


def pack_str(text: str) -> bytes:
    """A string."""
    data = text.encode()
    length = len(data)
    if length < 32:
        return bytes((0xA0 | length,)) + data
    if length < 2**8:
        return bytes((0xD9, length)) + data
    head = b"\xda" + _pack_u16(length) if length < 2**16 else b"\xdb" + _pack_u32(length)
    return head + data


def pack_strs(texts: Iterable[str]) -> bytes:
    """An array of strings."""
    packed = [pack_str(text) for text in texts]
    return pack_array_header(len(packed)) + b"".join(packed)


@frozen
class TokenCells:
    """How token ids of one vocabulary are written: a mark and a big-endian number."""

    mark: bytes
    dtype: np.dtype[Any]
    ahead: ClassVar = 32_768
    """How many tokens a block whose requests stay draws ahead for all of them together."""

    @classmethod
    def of(cls, vocab_size: int) -> TokenCells:
        """The narrowest cells that hold every token of the vocabulary."""
        if vocab_size <= 2**16:
            return cls(b"\xcd", np.dtype(">u2"))
        return cls(b"\xce", np.dtype(">u4"))

    @property
    def width(self) -> int:
        """Bytes per cell."""
        return 1 + self.dtype.itemsize

    def pack(self, tokens: Sequence[int]) -> bytes:
        """An array of token ids; the last may be one that the vocabulary does not have."""
        size = self.dtype.itemsize
        limit = 1 << 8 * size
        cells = [
            self.mark + token.to_bytes(size, "big") if token < limit else pack_u32(token)
            for token in tokens
        ]
        return pack_array_header(len(cells)) + b"".join(cells)

    def blank(self, count: int) -> bytes:
        """An array of ``count`` token ids yet to be filled in."""
        return pack_array_header(count) + (self.mark + bytes(self.dtype.itemsize)) * count


_FINISH_REASON = index_of(EngineCoreOutput, "finish_reason")
_EVENTS = index_of(EngineCoreOutput, "events")
_PREFILL_STATS = index_of(EngineCoreOutput, "prefill_stats")
_NO_EXTRAS = NIL * (_FINISH_REASON - 1 - index_of(EngineCoreOutput, "new_token_ids"))
_NO_END = NIL * (_EVENTS - _FINISH_REASON)  # finish and stop reason
_NO_TRANSFERS = NIL * (_PREFILL_STATS - 1 - _EVENTS)
_EVENT = b"\x82\xa4type%c\xa9timestamp\xcb"
_EVENT_STARTS = {kind: _EVENT % kind for kind in EventType}
_ENDS = {reason: bytes((reason,)) + NIL for reason in FinishReason}

_PREFILL_FIELDS = tuple(field.name for field in attrs.fields(PrefillStats))
_PREFILL = bytes((0x80 | len(_PREFILL_FIELDS),)) + b"".join(
    pack_str(name) + b"%b" for name in _PREFILL_FIELDS
)


def row(
    id_and_tokens: bytes, request: Request, *, final: bool, has_logprobs: bool = False
) -> bytes:
    """A row with the request's events, with its end, or with both, besides its tokens.

    If it ``has_logprobs``, they stand behind the tokens already.
    """
    # A request that is not prefilled has events: it was queued.
    prefill = None if request.is_prefilled else _computed_prompt(request.prompt_len)
    extras = _NO_EXTRAS[len(NIL) :] if has_logprobs else _NO_EXTRAS
    events = request.events or ()
    return row_with(id_and_tokens, request, events, prefill, final=final, extras=extras)


@lru_cache(maxsize=1024)
def _computed_prompt(count: int) -> bytes:
    return pack_prefill_stats(PrefillStats(num_prompt_tokens=count, num_computed_tokens=count))


def pack_prefill_stats(stats: PrefillStats) -> bytes:
    """The statistics of a prefill, as a row has them."""
    return _PREFILL % tuple(pack_u32(getattr(stats, name)) for name in _PREFILL_FIELDS)


def row_with(
    id_and_tokens: bytes,
    request: Request,
    events: Sequence[tuple[EventType, float]],
    prefill_stats: bytes | None,
    *,
    final: bool,
    extras: bytes = _NO_EXTRAS,
) -> bytes:
    """A row with these events and statistics, and with the request's end if it is the last."""
    parts = [
        b"",
        id_and_tokens,
        extras,
        _pack_end(request.finish_reason, request.stop_reason) if final else _NO_END,
    ]
    length = _EVENTS
    if events or prefill_stats is not None:
        parts.append(_pack_events(events))
        length = _EVENTS + 1
    if prefill_stats is not None:
        parts += (_NO_TRANSFERS, prefill_stats)
        length = _PREFILL_STATS + 1
    parts[0] = pack_array_header(length)
    return b"".join(parts)


def _pack_end(reason: FinishReason, stop_reason: int | str | None) -> bytes:
    if stop_reason is None:
        return _ENDS[reason]
    packed = pack_str(stop_reason) if isinstance(stop_reason, str) else pack_u32(stop_reason)
    return bytes((reason,)) + packed


def _pack_events(events: Sequence[tuple[EventType, float]]) -> bytes:
    packed = [_EVENT_STARTS[kind] + pack_double(time) for kind, time in events]
    return pack_array_header(len(packed)) + b"".join(packed)
