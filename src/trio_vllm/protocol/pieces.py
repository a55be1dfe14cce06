"""`split` divides a large MessagePack payload between elements of an array, without unpacking it.

To unpack megabytes takes long, and nothing else can run meanwhile. Here the ends of elements are
found by their lengths alone, in generators that yield whenever others should have a turn. What is
between two ends can then be unpacked by itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import Any, TypeVar

from trio_vllm.protocol.codec import Buffer, CodecError
from trio_vllm.protocol.msgpack import unpack
from trio_vllm.values import frozen

T = TypeVar("T")

LARGE = 128 * 1024
"""Bytes from which a payload is worth splitting: to find an element's end costs more than to unpack it."""

OBJECTS_AT_ONCE = 5_000
"""Objects skipped between two yields: about half a millisecond."""

_INVALID = 0xC1


def _sizes() -> list[int]:
    """By an object's first byte its size, without elements; 0 where its length follows."""
    sizes = [1] * 256
    sizes[0xA0:0xC0] = [1 + length for length in range(32)]  # strings
    sizes[0xC4:0xCA] = [0] * 6  # binaries and extensions
    sizes[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # numbers
    sizes[0xD4:0xD9] = [3, 4, 6, 10, 18]  # extensions of fixed size
    sizes[0xD9:0xE0] = [0] * 7  # strings, arrays, maps
    sizes[_INVALID] = 0
    return sizes


def _elements() -> list[int]:
    """By an object's first byte how many objects belong to it, if it tells."""
    elements = [0] * 256
    elements[0x80:0x90] = [2 * pairs for pairs in range(16)]
    elements[0x90:0xA0] = range(16)
    return elements


_SIZES, _ELEMENTS = _sizes(), _elements()

# By first byte: of how many bytes the length is, and what comes besides that many bytes.
_BYTES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_BYTES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
# By first byte: of how many bytes the count is, and how many objects belong to each.
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}

_TRUNCATED = "not MessagePack: it ends early"


def in_one_go(work: Generator[object, None, T]) -> T:
    """Do work that is done in pieces, without turns for others; gives what comes of it."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def array_at(payload: Buffer, at: int) -> tuple[int, int] | None:
    """The number of elements of an array that begins there, and where the first does; None if none."""
    lead = payload[at] if at < len(payload) else _INVALID
    if 0x90 <= lead < 0xA0:
        return lead - 0x90, at + 1
    if lead in (0xDC, 0xDD):
        size, _ = _CONTAINERS[lead]
        return int.from_bytes(payload[at + 1 : at + 1 + size], "big"), at + 1 + size
    return None


def array_head(count: int) -> bytes:
    """What an array of so many elements begins with."""
    return b"\xdd" + count.to_bytes(4, "big")


def skip(payload: Buffer, at: int, count: int) -> Generator[None, None, int]:
    """Find the end of so many objects; yields from time to time.

    Raises `CodecError` if the payload ends before, or holds what cannot be.
    """
    while count:
        at, count = _skip_some(payload, at, count)
        if count:
            yield
    if at > len(payload):
        raise CodecError(_TRUNCATED)
    return at


def _skip_some(payload: Buffer, at: int, count: int) -> tuple[int, int]:
    """Skip a limited number of objects; gives how far that was, and how many are left."""
    sizes, elements = _SIZES, _ELEMENTS
    try:
        for _ in range(OBJECTS_AT_ONCE):
            lead = payload[at]
            if size := sizes[lead]:
                at += size
                count += elements[lead] - 1
            else:
                at, children = _skip_variable(payload, at, lead)
                count += children - 1
            if not count:
                break
    except IndexError:
        raise CodecError(_TRUNCATED) from None
    return at, count


def _skip_variable(payload: Buffer, at: int, lead: int) -> tuple[int, int]:
    """Skip an object whose length follows its first byte; gives how many belong to it."""
    if lead == _INVALID:
        raise CodecError("not MessagePack: it holds the byte 0xc1")
    if lead in _BYTES:
        size, more = _BYTES[lead]
        return at + 1 + size + more + int.from_bytes(payload[at + 1 : at + 1 + size], "big"), 0
    size, each = _CONTAINERS[lead]
    return at + 1 + size, each * int.from_bytes(payload[at + 1 : at + 1 + size], "big")


@frozen
class PackedPiece:
    """Some elements of an array, still packed."""

    _payload: Buffer
    _start: int
    _end: int
    _count: int

    def unpack(self) -> list[Any]:
        """Unpack the elements; raises `CodecError`."""
        elements: list[Any] = unpack(
            array_head(self._count) + bytes(self._payload[self._start : self._end])
        )
        return elements


@functools.lru_cache(maxsize=64)
def _integers(count: int) -> re.Pattern[bytes]:
    """Matches so many unsigned integers of 32 bits at most: prompts, six times as fast as `skip`."""
    return re.compile(rb"(?s:\xcd..|\xce....|[\x00-\x7f]|\xcc.){%d}" % count)


def split(
    payload: Buffer, at: int, count: int, size: int
) -> Generator[None, None, tuple[list[PackedPiece], int]]:
    """Split so many objects into pieces of a size; gives them, and where the last ends.

    Yields after each, and raises like `skip`.
    """
    pieces = []
    while count:
        number = min(size, count)
        match = _integers(number).match(payload, at)
        end = match.end() if match else (yield from skip(payload, at, number))
        pieces.append(PackedPiece(payload, at, end, number))
        at, count = end, count - number
        yield
    return pieces, at


_FEW, _DEEP = 64, 8
"""Elements of an array that are unpacked one by one if they are many objects in all, and how many
levels of such arrays."""

_SMALL = 1024
"""Bytes of an object that is unpacked without a turn for others."""


def unpack_in_pieces(payload: Buffer) -> Generator[None, None, Any]:
    """Unpack one complete object, long arrays in it some elements at a time; yields in between.

    Raises `CodecError` like `unpack`.
    """
    raw, end = yield from _unpack_at(payload, 0, 0)
    if end != len(payload):
        raise CodecError("bytes follow the end of the payload")
    return raw


def _unpack_at(payload: Buffer, at: int, depth: int) -> Generator[None, None, tuple[Any, int]]:
    """Unpack the object that begins there; gives where it ends, too."""
    end, left = _skip_some(payload, at, 1)
    if not left:
        if end > len(payload):
            raise CodecError(_TRUNCATED)
        raw = unpack(payload[at:end])
        if end - at > _SMALL:
            yield
        return raw, end
    yield
    count, first = array_at(payload, at) or (0, at)
    items: list[Any] = []
    if count > OBJECTS_AT_ONCE:
        pieces, end = yield from split(payload, first, count, OBJECTS_AT_ONCE)
        for piece in pieces:
            items += piece.unpack()
            yield
        return items, end
    if 0x80 < payload[at] < 0x90 and depth < _DEEP:
        return (yield from _unpack_map(payload, at, depth))
    if count > _FEW or first == at or depth == _DEEP:
        end = yield from skip(payload, at, 1)
        return unpack(payload[at:end]), end
    for _ in range(count):
        item, first = yield from _unpack_at(payload, first, depth + 1)
        items.append(item)
    return items, first


def _unpack_map(payload: Buffer, at: int, depth: int) -> Generator[None, None, tuple[Any, int]]:
    """Unpack a map of few entries, as the fields of a request are."""
    count, at = payload[at] - 0x80, at + 1
    entries: dict[Any, Any] = {}
    for _ in range(count):
        end = yield from skip(payload, at, 1)
        ((key, _),) = unpack(b"".join((b"\x81", payload[at:end], b"\xc0"))).items()
        entries[key], at = yield from _unpack_at(payload, end, depth + 1)
    return entries, at
