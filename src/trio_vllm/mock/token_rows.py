"""`TokenRows`: the encoded rows of scheduled requests, in the order in which these run.

A `FastBatch` appends and moves rows as it likes. Here their order is the scheduler's, and each request
goes on at its own pace, so that every row has a slot with tokens drawn ahead for it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trio_vllm.mock.content import U64, TokenSource
from trio_vllm.mock.encoding import TokenCells, pack_str
from trio_vllm.mock.request import Request

_WIDTH = 64
"""Tokens drawn ahead for a request."""
_FIRST_CAPACITY = 64
MAX_ROW_LENGTH = 4096
"""Longer rows, that is very long request ids, are made as objects."""

Indices = npt.NDArray[np.intp]


@attrs.define(eq=False)
class Layout:
    """Rows that stand one behind the other, each with room for one token."""

    slots: Indices
    buffer: npt.NDArray[np.uint8]
    edges: Sequence[int]
    """Where each row begins, and where the last one ends."""
    cells: Indices
    """Where the bytes of each token are."""


class TokenRows:
    """Slots of requests that want nothing but tokens, one in a step."""

    def __init__(self, vocab_size: int, source: TokenSource) -> None:
        self._source = source
        self._cells = TokenCells.of(vocab_size)
        self._blank = self._cells.blank(1)
        self._last_tokens: dict[int, int] = {}  # by slot, of those that know theirs
        self._ids: list[list[int]] = []
        """By slot, where tokens go once they are drawn."""
        self._heads: list[bytes] = []
        self._free: list[int] = []
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        self._ahead = np.zeros((capacity, _WIDTH), self._cells.dtype)
        self._columns: Indices = np.zeros(capacity, np.intp)  # of the next token
        self._keys: U64 = np.zeros(capacity, np.uint64)
        self._nexts: U64 = np.zeros(capacity, np.uint64)  # position behind those drawn
        self._left: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)

    def _grow(self) -> None:
        old = (self._ahead, self._columns, self._keys, self._nexts, self._left)
        count = len(self._heads)
        capacity = max(_FIRST_CAPACITY, 2 * count)
        self._allocate(capacity)
        new: tuple[npt.NDArray[Any], ...]
        new = (self._ahead, self._columns, self._keys, self._nexts, self._left)
        for array, values in zip(new, old, strict=True):
            array[:count] = values
        self._heads += [b""] * (capacity - count)
        self._ids += [[]] * (capacity - count)
        self._free += range(capacity - 1, count - 1, -1)

    def accepts(self, request: Request) -> bool:
        """Whether a request can have a slot: all its tokens must be of one width."""
        last, is_short = request.last_token, len(request.request_id) * 4 < MAX_ROW_LENGTH
        fits = last is None or last < 1 << 8 * self._cells.dtype.itemsize
        return is_short and fits and not request.is_plain

    def add(self, request: Request, ids: list[int]) -> int:
        """Give a request a slot; its tokens are appended to ``ids`` some time before they are sent."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._heads[slot] = b"".join((b"\x92", pack_str(request.request_id), self._blank))
        self._ids[slot] = ids
        self._columns[slot] = _WIDTH
        self._keys[slot], self._nexts[slot] = request.key, request.emitted
        self._left[slot] = request.end - request.emitted
        if request.last_token is not None:
            self._last_tokens[slot] = request.last_token
        return slot

    def remove(self, slot: int) -> int:
        """Free a slot; how many tokens its request did not get."""
        self._free.append(slot)
        self._ids[slot] = []
        self._last_tokens.pop(slot, None)
        return int(self._left[slot])

    def lay_out(self, slots: Sequence[int]) -> Layout:
        """The rows of these slots in this order."""
        heads = [self._heads[slot] for slot in slots]
        edges = [0, *accumulate(map(len, heads))]
        size = self._cells.dtype.itemsize
        starts = np.array(edges[1:], np.intp) - size
        buffer = np.frombuffer(bytearray().join(heads), np.uint8)
        return Layout(np.array(slots, np.intp), buffer, edges, starts[:, None] + np.arange(size))

    def advance(self, layout: Layout) -> list[int]:
        """Write the next token into each row; which rows have their last one."""
        slots = layout.slots
        columns = self._columns[slots]
        spent = slots[columns == _WIDTH]
        if spent.size:
            self._draw(spent)
            columns = self._columns[slots]
        tokens = self._ahead[slots, columns]
        layout.buffer[layout.cells] = tokens.view(np.uint8).reshape(layout.cells.shape)
        self._columns[slots] = columns + 1
        left = self._left[slots] - 1
        self._left[slots] = left
        last: list[int] = np.flatnonzero(left == 0).tolist()
        return last

    def _draw(self, slots: Indices) -> None:
        drawn = np.empty((len(slots), _WIDTH), self._cells.dtype)
        self._source.fill(drawn, self._keys[slots], self._nexts[slots])
        if self._last_tokens:
            self._put_last_tokens(drawn, slots)
        self._ahead[slots] = drawn
        self._columns[slots] = 0
        self._nexts[slots] += np.uint64(_WIDTH)
        for slot, ids in zip(slots.tolist(), drawn.tolist(), strict=True):
            self._ids[slot] += ids

    def _put_last_tokens(self, drawn: npt.NDArray[Any], slots: Indices) -> None:
        left = self._left[slots]
        for row in np.flatnonzero(left <= _WIDTH).tolist():
            last = self._last_tokens.get(int(slots[row]))
            if last is not None:
                drawn[row, left[row] - 1] = last
