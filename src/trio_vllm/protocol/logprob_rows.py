"""`find_logprob_rows` takes the rows of one token with its logprobs by their bytes.

To unpack such a row costs as much as everything else that is done with it: it has three arrays, and
each of them is three objects and a call of ours. But all rows of a message have one layout, for an
engine pads them to the widest request of the step. So `trio_vllm.protocol.row_patterns` finds them, and
what stands for the logprobs is kept as it is (see `LogprobsCollector.add_packed`). Rows that are
different, as the first and the last of a request are, are unpacked as usual.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from trio_vllm.protocol.codec import CodecError, Frames
from trio_vllm.protocol.logprobs import PackedLayout, packed_layout
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.output import EngineCoreOutput, UndecodedBatch, raw_logprobs_of, rest_of
from trio_vllm.protocol.pieces import array_head
from trio_vllm.protocol.row_patterns import ANY_ID, TOKEN, pattern_around, split_rows
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

_INLINE = 256
"""Bytes of an array that does not travel inline any more."""

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
    arrays = [
        re.escape(before) + b".{%d}" % size
        for before, size in zip(layout.heads, layout.sizes, strict=True)
    ]
    middle = rb"(%b\x91%b)(%b\xc0)" % (ANY_ID, TOKEN, b"".join(arrays))
    return pattern_around(middle, length, packed_rest)


def find_logprob_rows(frames: Frames, pattern: LogprobsPattern) -> UndecodedBatch | None:
    """Decode a batch lazily, with a `LogprobRow` in place of each row that the pattern matches.

    None for a message without any, and for one that is in any way unusual.
    """
    if frames and len(frames[0]) > MOST_BYTES:
        return None
    split = split_rows(frames, pattern, FEWEST, MOST)
    batch = None if split is None else split.decode_others()
    if split is None or batch is None:
        return None
    ids_and_tokens, logprobs = split.first_groups, split.second_groups
    try:
        flat: list[Any] = unpack(array_head(2 * len(logprobs)) + b"".join(ids_and_tokens))
    except CodecError:
        return None
    matched = list(zip(flat[::2], flat[1::2], logprobs, strict=True))
    batch.rows, batch.has_logprob_rows = split.in_order(matched, batch.rows), True
    return batch


def unpacked_row(row: LogprobRow) -> list[Any]:
    """The row as it would have been unpacked, without what is behind the logprobs: defaults."""
    request_id, token_ids, logprobs = row
    return [request_id, token_ids, unpack(logprobs)]
