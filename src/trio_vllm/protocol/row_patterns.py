"""`split_rows` takes rows of one form out of a message by a regular expression; only the rest is unpacked.

Theory of operation. Most rows of an engine are alike but for an id and a token. To unpack them, and to
look at each, costs several times what one `bytes.split` costs. So a regular expression is made of a row
that was unpacked (`pattern_around`), which finds all that are like it in the messages to come.

That a match is a row, and not something within one, is shown by what is left (`SplitMessage.decode_others`).
It is unpacked with a mark behind each piece that stood between matches, and each mark has to come out as a
row of its own. So each piece begins and ends where a row does, and between pieces there were rows alone. A
message of which this cannot be shown is left to `decode_outputs_lazily`, as a whole.

What is built on this: `find_bare_rows` and `find_logprob_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import Frames
from trio_vllm.protocol.msgpack import pack
from trio_vllm.protocol.output import OutputsMessage, UndecodedBatch, decode_outputs_lazily
from trio_vllm.protocol.pieces import array_at, array_head

ANY_ID = rb"(?:[\xa0-\xbf]|\xd9.)[\x20-\x7e]*"
"""A packed id of ASCII characters, so that it ends where the array of token ids begins.

Whether it is as long as it says is not seen before it is unpacked.
"""

TOKEN = rb"(?:[\x00-\x7f]|\xcd..|\xce....|\xcc.)"
"""A packed token id."""

MARK = 0xB7E3_51D9_84C6_2F0B
"""Stands for matches among the other rows; no engine would send such a row."""

PACKED_MARK = pack(MARK)

# An array of at least as many fields as we know and an engine's index; then the number of rows.
_HEAD = re.compile(
    rb"(?s:([\x%x-\x9f](?:[\x00-\x7f]|\xcc.|\xcd..))(\xdc..|[\x90-\x9f]))"
    % (0x90 | len(attrs.fields(OutputsMessage)))
)


def pattern_around(middle: bytes, length: int, packed_rest: bytes) -> re.Pattern[bytes]:
    """Make the pattern of rows of so many fields; ``middle`` matches the first of them.

    ``packed_rest`` is the array of the others, which are the same in all rows.
    """
    head = pack([None] * length)[:-length]
    _, start = array_at(packed_rest, 0) or (0, 0)
    return re.compile(rb"(?s:%b%b%b)" % (re.escape(head), middle, re.escape(packed_rest[start:])))


class SplitMessage(NamedTuple):
    """A message of outputs, divided into the rows that a pattern with two groups matches, and the rest."""

    frames: Frames
    head: bytes
    """What stands before the array of rows."""
    first_groups: list[bytes]
    second_groups: list[bytes]
    gaps: list[bytes]
    """What stands before each match."""
    tail: bytes
    """What stands behind the last match."""
    other_count: int
    """How many rows are left, if all is well."""

    def decode_others(self, along: bytes = b"") -> UndecodedBatch | None:
        """Decode what is left, with a `MARK` behind the rows of each gap; None if one is no row.

        ``along`` is a packed value that becomes the first row: it is messages that cost, not their size.
        """
        between = list(filter(None, self.gaps))
        marks = len(between)
        if marks and PACKED_MARK in self.frames[0]:
            return None
        between.append(b"")
        count = self.other_count + marks + bool(along)
        parts = array_head(count), along, PACKED_MARK.join(between), self.tail
        try:
            rest = b"".join((self.head, *parts))
            batch = decode_outputs_lazily([rest, *self.frames[1:]])
        except DecodeError:
            return None
        if not isinstance(batch, UndecodedBatch) or batch.rows.count(MARK) != marks:
            return None
        batch.frames = self.frames
        return batch

    def in_order(self, matched: list[Any], others: Sequence[Any]) -> list[Any]:
        """Put what was made of matches among the other rows, where the marks are."""
        begins = (number for number, gap in enumerate(self.gaps) if gap)
        ends = iter([*begins, len(matched)])
        begin = next(ends)
        rows = matched[:begin]
        for row in others:
            if row == MARK:
                end = next(ends)
                rows += matched[begin:end]
                begin = end
            else:
                rows.append(row)
        return rows


def split_rows(
    frames: Frames, pattern: re.Pattern[bytes], fewest: int, most: int = 2**16
) -> SplitMessage | None:
    """Split a message of ``fewest`` to ``most`` rows; None if it is another one, or has no match.

    None, too, if anything about its head is unusual.
    """
    payload = frames[0] if frames else b""
    if type(payload) is not bytes or (found := _HEAD.match(payload)) is None:
        return None
    head, lead = found.groups()
    count = lead[0] & 0xF if len(lead) == 1 else int.from_bytes(lead[1:], "big")
    if not fewest <= count <= most:
        return None
    pieces = pattern.split(payload)
    first_groups, second_groups, gaps = pieces[1::3], pieces[2::3], pieces[::3]
    if not first_groups or len(first_groups) > count or len(gaps[0]) < found.end():
        return None
    tail = gaps.pop()
    gaps[0] = gaps[0][found.end() :]
    others = count - len(first_groups)
    return SplitMessage(frames, head, first_groups, second_groups, gaps, tail, others)
