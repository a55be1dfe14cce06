"""`find_bare_rows` takes the bare rows of a batch by their bytes; only the others are unpacked.

A bare row (see `bare_token_ids`) of one token is an id, a token id and bytes that are the same in all
bare rows of an engine, so `trio_vllm.protocol.row_patterns` finds them. To unpack them costs half as
much again, and as much once more to see that each is bare.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from trio_vllm.protocol.codec import CodecError, Frames
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.output import UndecodedBatch, bare_token_ids
from trio_vllm.protocol.pieces import array_head
from trio_vllm.protocol.row_patterns import ANY_ID, MARK, TOKEN, pattern_around, split_rows
from trio_vllm.values import frozen

BareRowPattern = re.Pattern[bytes]
"""Matches the bare rows of an engine; its groups are the packed id and the packed token id."""

_MOST_ID_SIZES = 3
"""More of them are searched more slowly than ids of any length."""


def bare_row_pattern(row: list[Any], id_sizes: frozenset[int]) -> BareRowPattern | None:
    """Make a pattern for all rows that are like this one, if it is bare and has one token.

    ``id_sizes`` are those of packed ids that are to be found; if there are too many, all are.
    """
    token_ids = bare_token_ids(row)
    if token_ids is None or len(token_ids) != 1:
        return None
    try:
        return _pattern(len(row), pack(row[2:]), id_sizes)
    except CodecError:
        return None


@functools.lru_cache(maxsize=64)
def _pattern(length: int, packed_rest: bytes, id_sizes: frozenset[int]) -> BareRowPattern:
    ids = ANY_ID
    if len(id_sizes) <= _MOST_ID_SIZES:
        ids = b"|".join(map(_id_of_size, sorted(id_sizes)))
    return pattern_around(rb"(%b)\x91(%b)" % (ids, TOKEN), length, packed_rest)


def _id_of_size(size: int) -> bytes:
    """A pattern for packed ids of so many bytes."""
    lead_size = 1 if size <= 32 else 2 if size <= 257 else 3
    length = size - lead_size
    return re.escape(pack("x" * length)[:lead_size]) + b".{%d}" % length


@frozen
class BareRows:
    """The bare rows of a batch, in columns: which ids, and one token id for each."""

    packed_ids: list[bytes]
    token_ids: list[int]
    others: UndecodedBatch
    """The batch with those rows that are left."""


def find_bare_rows(frames: Frames, pattern: BareRowPattern, fewest: int) -> BareRows | None:
    """Take the bare rows out of a message with at least so many rows; None if it is another one.

    None, too, if anything about the message is unusual, so that it should be decoded as a whole.
    """
    split = split_rows(frames, pattern, fewest)
    if split is None:
        return None
    packed_tokens = split.second_groups
    batch = split.decode_others(array_head(len(packed_tokens)) + b"".join(packed_tokens))
    if batch is None:
        return None
    token_ids, *rows = batch.rows
    batch.rows = [row for row in rows if row != MARK]
    return BareRows(split.first_groups, token_ids, batch)


def unpack_id(packed: bytes) -> str | None:
    """The id that a `BareRowPattern` has matched; None if it is not written as it should be."""
    try:
        request_id: str = unpack(packed)
    except CodecError:
        return None
    return request_id if pack(request_id) == packed else None


def pack_id(request_id: str) -> bytes:
    """An id as an engine writes it."""
    return pack(request_id)
