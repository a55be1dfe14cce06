"""Rows of an output message, written without building objects.

A row is an `EngineCoreOutput` as an array that ends with the last field that has a value: readers
fill up what is missing (two elements are the least). Token ids are written with a fixed width, also
small ones, so that a row keeps its length and its tokens their places from step to step.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trio_vllm.protocol import EventType, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._requests import Request

NIL = b"\xc0"

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


@attrs.frozen
class TokenCells:
    """How token ids of one vocabulary are written: a mark and a big-endian number."""

    mark: bytes
    dtype: np.dtype[Any]

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
        """An array of token ids."""
        size = self.dtype.itemsize
        cells = [self.mark + token.to_bytes(size, "big") for token in tokens]
        return pack_array_header(len(cells)) + b"".join(cells)

    def blank(self, count: int) -> bytes:
        """An array of ``count`` token ids yet to be filled in."""
        return pack_array_header(count) + (self.mark + bytes(self.dtype.itemsize)) * count


# What follows the token ids. Positions 2 to 4 are logprobs and the pooling output.
_NOTHING_2_TO_4 = NIL * 3
_NOTHING_5_TO_6 = NIL * 2
_NOTHING_8_TO_10 = NIL * 3
_EVENT = b"\x82\xa4type%c\xa9timestamp\xcb%b"
_PREFILL = (
    b"\x86\xb1num_prompt_tokens%b\xb3num_computed_tokens%b\xb1num_cached_tokens\x00"
    b"\xb7num_local_cached_tokens\x00\xbanum_external_cached_tokens\x00"
    b"\xb9num_cache_creation_tokens\x00"
)


def row(id_and_tokens: bytes, request: Request, *, final: bool) -> bytes:
    """A row that tells more than tokens: of the request's events, of its end, or of both."""
    parts = [
        b"",
        id_and_tokens,
        _NOTHING_2_TO_4,
        _pack_end(request.finish_reason, request.stop_reason) if final else _NOTHING_5_TO_6,
    ]
    length = 7
    if request.events:
        parts.append(_pack_events(request.events))
        length = 8
    if not request.is_prefilled:  # then there are events: it was queued
        count = pack_u32(request.prompt_len)
        parts += (_NOTHING_8_TO_10, _PREFILL % (count, count))
        length = 12
    parts[0] = pack_array_header(length)
    return b"".join(parts)


def _pack_end(reason: FinishReason, stop_reason: int | None) -> bytes:
    return bytes((reason,)) + (NIL if stop_reason is None else pack_u32(stop_reason))


def _pack_events(events: list[tuple[EventType, float]]) -> bytes:
    packed = [_EVENT % (kind, pack_double(time)) for kind, time in events]
    return pack_array_header(len(packed)) + b"".join(packed)
