"""`find_bare_rows` takes the bare rows of a batch by their bytes; only the others are unpacked.

A bare row (see `bare_token_ids`) of one token is an id, a token id and bytes that are the same in all
bare rows of an engine. So a regular expression, which is made of one such row, takes hundreds of them
apart at the price of one `bytes.split`. To unpack them costs half as much again, and as much once more
to see that each is bare.

That a match is a row, and not something in the middle of one, is shown by what is between matches:
it is unpacked with a mark at each place where a match was. Each mark comes out as a row of its own,
so before and behind it a row begins or ends.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import CodecError, Frames
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.output import (
    OutputsMessage,
    UndecodedBatch,
    bare_token_ids,
    decode_outputs_lazily,
)
from trio_vllm.protocol.pieces import array_at, array_head

RowPattern = re.Pattern[bytes]
"""Matches the bare rows of an engine; its groups are the packed id and the packed token id."""

# Of any length: of ASCII characters, so that it ends where the array of token ids begins. Its length is
# not compared with the one that is written before it: see `unpack_id`.
_ANY_ID = rb"(?:[\xa0-\xbf]|\xd9.)[\x20-\x7f]+"
_MOST_LENGTHS = 3
_ONE_TOKEN = rb"\x91([\x00-\x7f]|\xcd..|\xce....|\xcc.)"

# An array of at least as many fields as we know and an engine's index; then the number of rows.
_HEAD = re.compile(
    rb"(?s:([\x%x-\x9f](?:[\x00-\x7f]|\xcc.|\xcd..))(\xdc..|[\x90-\x9f]))"
    % (0x90 | len(attrs.fields(OutputsMessage)))
)

_MARK = 0xB7E3_51D9_84C6_2F0B
_PACKED_MARK = pack(_MARK)


def row_pattern(row: list[Any], id_sizes: frozenset[int]) -> RowPattern | None:
    """Make a pattern for all rows that are like this one, if it is bare and has one token.

    ``id_sizes`` are those of packed ids that are to be found; if there are too many, all are.
    """
    token_ids = bare_token_ids(row)
    if token_ids is None or len(token_ids) != 1 or len(row) >= 2**16:
        return None
    try:
        rest = pack(row[2:])
    except CodecError:
        return None
    return _pattern(len(row), rest, id_sizes)


@functools.lru_cache(maxsize=64)
def _pattern(length: int, packed_rest: bytes, id_sizes: frozenset[int]) -> RowPattern:
    lead = bytes([0x90 | length]) if length < 16 else b"\xdc" + length.to_bytes(2, "big")
    _, start = array_at(packed_rest, 0) or (0, 0)
    ids = b"|".join(map(_id_of_size, sorted(id_sizes)))
    if len(id_sizes) > _MOST_LENGTHS:
        ids = _ANY_ID
    parts = re.escape(lead), ids, _ONE_TOKEN, re.escape(packed_rest[start:])
    return re.compile(rb"(?s:%b(%b)%b%b)" % parts)


def _id_of_size(size: int) -> bytes:
    """A pattern for packed ids of so many bytes."""
    lead_size = 1 if size <= 32 else 2 if size <= 257 else 3
    length = size - lead_size
    return re.escape(pack("x" * length)[:lead_size]) + b".{%d}" % length


@attrs.frozen
class BareRows:
    """The bare rows of a batch, in columns: which ids, and one token id for each."""

    packed_ids: list[bytes]
    token_ids: list[int]
    others: UndecodedBatch
    """The batch with those rows that are left."""


def find_bare_rows(frames: Frames, pattern: RowPattern, fewest: int) -> BareRows | None:
    """Take the bare rows out of a message with at least so many rows; None if it is another one.

    None, too, if anything about the message is unusual, so that it should be decoded as a whole.
    """
    payload = frames[0]
    if type(payload) is not bytes or (found := _HEAD.match(payload)) is None:
        return None
    lead, first = found[2], found.end()
    count = lead[0] & 0xF if len(lead) == 1 else int.from_bytes(lead[1:], "big")
    if count < fewest:
        return None
    pieces = pattern.split(payload)
    packed_ids, packed_tokens, gaps = pieces[1::3], pieces[2::3], pieces[::3]
    if not packed_ids or len(packed_ids) > count or len(gaps[0]) < first:
        return None
    gaps[0] = gaps[0][first:]
    others = count - len(packed_ids)
    return _decode_rest(frames, found[1], packed_ids, packed_tokens, gaps, others)


def _decode_rest(
    frames: Frames,
    head: bytes,
    packed_ids: list[bytes],
    packed_tokens: list[bytes],
    gaps: list[bytes],
    count: int,
) -> BareRows | None:
    """Decode what a message is without its bare rows; there must be so many rows left.

    The first row of what is decoded are the tokens, since it is one message that costs, not its size.
    """
    tail = gaps.pop()
    between = list(filter(None, gaps))
    if between and _PACKED_MARK in frames[0]:
        return None
    between.append(b"")
    rest = b"".join(
        (
            head,
            array_head(count + len(between)),
            array_head(len(packed_tokens)),
            *packed_tokens,
            _PACKED_MARK.join(between),
            tail,
        )
    )
    try:
        batch = decode_outputs_lazily([rest, *frames[1:]])
    except DecodeError:
        return None
    if not isinstance(batch, UndecodedBatch):
        return None
    token_ids, *rows = batch.rows
    if len(between) > 1:
        rows = [row for row in rows if row != _MARK]
    if len(rows) != count:
        return None
    batch.rows, batch.frames = rows, frames
    return BareRows(packed_ids, token_ids, batch)


def unpack_id(packed: bytes) -> str | None:
    """The id that a `RowPattern` has matched; None if it is not written as it should be."""
    try:
        request_id: str = unpack(packed)
    except CodecError:
        return None
    return request_id if pack(request_id) == packed else None


def pack_id(request_id: str) -> bytes:
    """An id as an engine writes it."""
    return pack(request_id)
