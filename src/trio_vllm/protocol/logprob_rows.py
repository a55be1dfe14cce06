"""`find_logprob_rows` takes the rows of one token with its logprobs by their bytes.

To unpack such a row costs as much as everything else that is done with it: it has three arrays, and
each of them is three objects and a call of ours. But all rows of a message have one layout, for an
engine pads them to the widest request of the step. So a regular expression, which is made of one row
that was unpacked, takes hundreds of them apart, and what stands for the logprobs is kept as it is
(see `LogprobsCollector.add_packed`). Rows that are different, as the first and the last of a request
are, are unpacked as usual.

That a match is a row, and not something within one, is shown by what is left: in the place of matches
it gets a mark, and each mark has to come out as a row of its own. So before and behind it a row begins
or ends. A message of which this cannot be shown is left to `decode_outputs_lazily`, as a whole.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import CodecError, Frames
from trio_vllm.protocol.logprobs import PackedLayout, packed_layout
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.output import (
    EngineCoreOutput,
    OutputsMessage,
    UndecodedBatch,
    decode_outputs_lazily,
    raw_logprobs_of,
    rest_of,
)
from trio_vllm.protocol.pieces import array_at, array_head
from trio_vllm.protocol.structs import index_of

LogprobsPattern = re.Pattern[bytes]
"""Matches the rows of one layout. Its groups are the packed id and token ids, and the logprobs."""

FEWEST = 4
"""Rows of a message from which on this pays."""

MOST = 4096
"""Rows of a message that are taken apart without a turn for others: that takes about 2 ms."""

MOST_BYTES = 2**21
"""Bytes of a message up to which that holds whatever is in it."""

LogprobRow = tuple[str, list[int], bytes]
"""A request's id, its new token id and the packed logprobs of it."""

# The id is of printable ASCII characters, so it ends where the array of token ids begins. Whether it is
# as long as it says is seen when it is unpacked.
_ID_AND_TOKEN = rb"((?:[\xa0-\xbf]|\xd9.)[\x20-\x7e]*\x91(?:[\x00-\x7f]|\xcd..|\xce....|\xcc.))"

_INLINE = 256
"""Bytes of an array that does not travel inline any more."""

MARK = 0x95A1_E4C7_2D38_F06B
"""Stands for matches among the other rows; no engine would send such a row."""

PACKED_MARK = pack(MARK)

_INDEX = re.compile(rb"(?s:[\x00-\x7f]|\xcc.|\xcd..)")
"""That of an engine stands before the rows."""
_MESSAGE_LENGTH = len(attrs.fields(OutputsMessage))
_LOGPROBS_END = index_of(EngineCoreOutput, "new_logprobs") + 1


def logprobs_pattern(row: Any) -> LogprobsPattern | None:
    """Make the pattern of all rows that are like one; None if that has more than a token and logprobs.

    None, too, if its arrays are too large to travel inline.
    """
    raw: Any = raw_logprobs_of(row)
    if raw is None or rest_of(row) is not None:
        return None
    try:
        (id_type, (_, columns), _), _, (rank_type, *_), _ = raw
        layout = packed_layout(columns, id_type, rank_type)
        if max(layout.sizes) >= _INLINE:
            return None
        return _pattern(layout, len(row), pack(row[_LOGPROBS_END:]))
    except (CodecError, KeyError, TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=64)
def _pattern(layout: PackedLayout, length: int, packed_rest: bytes) -> LogprobsPattern:
    found = array_at(packed_rest, 0)
    assert found is not None
    head, rest = pack([None] * length)[:-length], packed_rest[found[1] :]
    arrays = [
        re.escape(before) + b".{%d}" % size
        for before, size in zip(layout.heads, layout.sizes, strict=True)
    ]
    logprobs = b"".join(arrays) + rb"\xc0"
    parts = (re.escape(head), _ID_AND_TOKEN, logprobs, re.escape(rest))
    return re.compile(rb"(?s:%b%b(%b)%b)" % parts)


def find_logprob_rows(frames: Frames, pattern: LogprobsPattern) -> UndecodedBatch | None:
    """Decode a batch lazily, with a `LogprobRow` in place of each row that the pattern matches.

    None for a message without any, and for one that is in any way unusual.
    """
    payload = frames[0] if frames else b""
    if type(payload) is not bytes or len(payload) > MOST_BYTES:
        return None
    start = _rows_start(payload)
    count, first = (start and array_at(payload, start)) or (0, 0)
    if not FEWEST <= count <= MOST:
        return None
    pieces = pattern.split(payload)
    gaps, ids_and_tokens, logprobs = pieces[::3], pieces[1::3], pieces[2::3]
    if not logprobs or len(logprobs) > count or len(gaps[0]) < first:
        return None
    gaps[0] = gaps[0][first:]
    try:
        batch = _decode_gaps(frames, payload[:start], gaps, count - len(logprobs))
        flat: list[Any] = unpack(array_head(2 * len(logprobs)) + b"".join(ids_and_tokens))
    except (CodecError, DecodeError):
        return None
    if batch is not None:
        matched = list(zip(flat[::2], flat[1::2], logprobs, strict=True))
        batch.rows, batch.has_logprob_rows = _in_order(matched, batch.rows, gaps), True
    return batch


def _rows_start(payload: bytes) -> int:
    """Where the array of rows begins in a message of an engine; 0 if it is none."""
    message = array_at(payload, 0)
    if message is None or message[0] < _MESSAGE_LENGTH:
        return 0
    _, start = message
    index = _INDEX.match(payload, start)
    return index.end() if index else 0


def _decode_gaps(
    frames: Frames, head: bytes, gaps: list[bytes], count: int
) -> UndecodedBatch | None:
    """Decode a batch of so many rows, with a mark in place of each run of matches between them.

    None if a mark does not come out as a row.
    """
    between = [gaps[0], *filter(None, gaps[1:-1]), gaps[-1]]
    runs = len(between) - 1
    if any(PACKED_MARK in gap for gap in between):
        return None
    rest = b"".join((head, array_head(count + runs), PACKED_MARK.join(between)))
    batch = decode_outputs_lazily([rest, *frames[1:]])
    if not isinstance(batch, UndecodedBatch) or batch.rows.count(MARK) != runs:
        return None
    batch.frames = frames
    return batch


def _in_order(matched: list[LogprobRow], others: list[Any], gaps: list[bytes]) -> list[Any]:
    """Put runs of matches in the places of their marks."""
    ends = iter([*(i for i, gap in enumerate(gaps[1:-1], 1) if gap), len(matched)])
    rows: list[Any] = []
    begin = 0
    for row in others:
        if row == MARK:
            end = next(ends)
            rows += matched[begin:end]
            begin = end
        else:
            rows.append(row)
    return rows


def unpacked_row(row: LogprobRow) -> list[Any]:
    """The row as it would have been unpacked, without what is behind the logprobs: defaults."""
    request_id, token_ids, logprobs = row
    return [request_id, token_ids, unpack(logprobs)]
