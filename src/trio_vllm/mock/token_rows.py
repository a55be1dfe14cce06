"""`TokenRows`: the encoded rows of scheduled requests, in the order in which these run.

A `FastBatch` appends and moves rows as it likes. Here their order is the scheduler's, and each request
goes on at its own pace, so that every row has a slot with tokens drawn ahead for it alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_vllm.mock.content import U64, TokenSource
from trio_vllm.mock.encoding import TokenCells, pack_str
from trio_vllm.mock.request import Request

_WIDTH = 128
"""Tokens drawn ahead for a request."""
_FIRST_CAPACITY = 64
MOST_STEPS = _WIDTH // 2
"""That can be prepared at once."""
DRAWN_AT_ONCE = 1024
"""Rows for which tokens are drawn without a turn for others: some 3 ms."""
MAX_ROW_LENGTH = 4096
"""Longer rows, that is very long request ids, are made as objects."""

Indices = npt.NDArray[np.intp]


class Layout:
    """Rows that stand one behind the other, each with room for one token.

    Of each row: its slot, where it ends in the buffer, the place of its next token among all drawn ahead,
    how many are drawn ahead for it, and how many tokens it will still get.
    """

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.quiet_steps = 0
        """For so many steps no row ends, and none runs out of tokens drawn ahead."""
        self.set_columns(np.zeros((5, 0), np.intp))

    def set_columns(self, columns: Indices) -> None:
        """Take over what is known of all rows, after the buffer has changed."""
        self.columns = columns
        self.slots, self.ends, self.places, self.ahead, self.left = columns
        self.countdowns = columns[3:]
        self.cells: Indices | None = None
        """Where the bytes of each token are."""
        self.copies: npt.NDArray[np.uint8] | None = None
        """The rows many times, for steps that are made together."""

    def __len__(self) -> int:
        return len(self.slots)

    def edges(self, row: int) -> tuple[int, int]:
        """Where a row begins and ends in the buffer."""
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])


class TokenRows:
    """Slots of requests that want nothing but tokens, one in a step.

    While a slot is in a layout, that is where its place and the number of its tokens are counted.
    """

    def __init__(self, vocab_size: int, source: TokenSource) -> None:
        self._source = source
        self._cells = TokenCells.of(vocab_size)
        self._blank = self._cells.blank(1)
        self._before_end: Indices = np.arange(-self._cells.dtype.itemsize, 0)
        self._last_tokens: dict[int, int] = {}  # by slot, of those that know theirs
        self._ids: list[array[int] | None] = []
        """By slot, where tokens go once they are drawn."""
        self._heads: list[bytes] = []
        self._lengths: Indices = np.zeros(0, np.intp)
        self._free: list[int] = []
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        self._ahead = np.zeros((capacity, _WIDTH), self._cells.dtype)
        self._all_ahead = self._ahead.reshape(-1)
        self._places: Indices = np.zeros(capacity, np.intp)
        self._keys: U64 = np.zeros(capacity, np.uint64)
        self._nexts: U64 = np.zeros(capacity, np.uint64)  # position behind those drawn
        self._left: Indices = np.zeros(capacity, np.intp)

    def _grow(self) -> None:
        old = (self._ahead, self._places, self._keys, self._nexts, self._left)
        count = len(self._heads)
        capacity = max(_FIRST_CAPACITY, 2 * count)
        self._allocate(capacity)
        new: tuple[npt.NDArray[Any], ...]
        new = (self._ahead, self._places, self._keys, self._nexts, self._left)
        for arrays, values in zip(new, old, strict=True):
            arrays[:count] = values
        lengths = self._lengths
        self._lengths = np.zeros(capacity, np.intp)
        self._lengths[:count] = lengths
        self._heads += [b""] * (capacity - count)
        self._ids += [None] * (capacity - count)
        self._free += range(capacity - 1, count - 1, -1)

    def accepts(self, request: Request) -> bool:
        """Whether a request can have a slot: all its tokens must be of one width."""
        last, is_short = request.last_token, len(request.request_id) * 4 < MAX_ROW_LENGTH
        fits = last is None or last < 1 << 8 * self._cells.dtype.itemsize
        return is_short and fits and not request.is_plain

    def add(self, request: Request, ids: array[int]) -> int:
        """Give a request a slot; its tokens are appended to ``ids`` some time before they are sent."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        head = b"".join((b"\x92", pack_str(request.request_id), self._blank))
        self._heads[slot], self._lengths[slot] = head, len(head)
        self._ids[slot] = ids
        self._places[slot] = (slot + 1) * _WIDTH
        self._keys[slot], self._nexts[slot] = request.key, request.emitted
        self._left[slot] = request.end - request.emitted
        if request.last_token is not None:
            self._last_tokens[slot] = request.last_token
        return slot

    def remove(self, slot: int) -> int:
        """Free a slot that is in no layout; how many tokens its request did not get."""
        self._free.append(slot)
        self._ids[slot] = None
        self._last_tokens.pop(slot, None)
        return int(self._left[slot])

    # Without a layout ---------------------------------------------------------------------------

    def left(self, slots: Indices) -> Indices:
        """How many tokens the requests in these slots will still get."""
        return self._left[slots]

    def write(self, slots: Indices) -> memoryview:
        """The next rows of these slots, which are in no layout; none may be the last."""
        ahead = (slots + 1) * _WIDTH - self._places[slots]
        if not ahead.all():
            (low,) = (ahead <= _WIDTH // 2).nonzero()
            refilled = slots[low]
            self._draw(refilled, self._left[refilled], ahead[low])
            self._places[refilled] = refilled * _WIDTH
        heads = self._heads
        buffer = bytearray().join([heads[slot] for slot in slots.tolist()])
        cells = self._lengths[slots].cumsum()[:, None] + self._before_end
        tokens = self._all_ahead[self._places[slots]]
        np.frombuffer(buffer, np.uint8)[cells] = tokens.view(np.uint8).reshape(cells.shape)
        self._places[slots] += 1
        self._left[slots] -= 1
        return memoryview(buffer)

    # Layouts ------------------------------------------------------------------------------------

    def append(self, layout: Layout, slots: Sequence[int]) -> None:
        """Put the rows of some slots at the end of a layout."""
        heads = [self._heads[slot] for slot in slots]
        added = np.empty((5, len(slots)), np.intp)
        added[0] = slots
        np.cumsum([len(head) for head in heads], out=added[1])
        added[1] += len(layout.buffer)
        added[2], added[4] = self._places[added[0]], self._left[added[0]]
        added[3] = (added[0] + 1) * _WIDTH - added[2]
        layout.buffer += b"".join(heads)
        layout.quiet_steps = 0
        layout.set_columns(np.concatenate((layout.columns, added), axis=1))

    def take_out(self, layout: Layout, row: int) -> None:
        """Take a row out of a layout."""
        columns = layout.columns
        slot, _, place, _, left = columns[:, row]
        self._places[slot], self._left[slot] = place, left
        start, end = layout.edges(row)
        del layout.buffer[start:end]
        columns[1, row + 1 :] -= end - start
        layout.set_columns(np.concatenate((columns[:, :row], columns[:, row + 1 :]), axis=1))

    def take_apart(self, layout: Layout) -> None:
        """Take all rows out of a layout."""
        self._places[layout.slots], self._left[layout.slots] = layout.places, layout.left
        layout.buffer.clear()
        layout.set_columns(layout.columns[:, :0])

    def draw_in_slices(self, layout: Layout) -> Iterator[None]:
        """Draw what `advance` would have to, for many rows; yields whenever others should have a turn."""
        if not layout.quiet_steps and not layout.countdowns.min():
            (low,) = (layout.ahead <= _WIDTH // 2).nonzero()
            for start in range(0, len(low), DRAWN_AT_ONCE):
                self._draw_for(layout, low[start : start + DRAWN_AT_ONCE])
                yield

    def advance(self, layout: Layout) -> list[int]:
        """Write the next token into each row; which rows have their last one."""
        if not layout.quiet_steps:
            self._look_ahead(layout)
        if layout.cells is None:
            layout.cells = layout.ends[:, None] + self._before_end
        tokens = self._all_ahead[layout.places]
        data = np.frombuffer(layout.buffer, np.uint8)
        data[layout.cells] = tokens.view(np.uint8).reshape(layout.cells.shape)
        layout.places += 1
        layout.countdowns -= 1
        layout.quiet_steps -= 1
        if layout.quiet_steps:
            return []
        last: list[int] = (layout.left == 0).nonzero()[0].tolist()
        return last

    def prepare(self, layout: Layout, limit: int) -> int:
        """Draw the tokens of several steps, ``limit`` at most, before one in which a row ends; of how many."""
        count = min(limit, int(layout.left.min()) - 1)
        if int(layout.ahead.min()) < count:
            self._draw_for_low(layout)
        return count

    def advance_often(self, layout: Layout, count: int) -> list[memoryview]:
        """Write the tokens of several steps, no more than were prepared.

        Returns:
          The rows after each step, valid until the next call.
        """
        if layout.copies is None or len(layout.copies) < count:
            layout.copies = np.tile(np.frombuffer(layout.buffer, np.uint8), (count, 1))
        if layout.cells is None:
            layout.cells = layout.ends[:, None] + self._before_end
        rows, cells = layout.copies[:count], layout.cells.reshape(-1)
        tokens = self._all_ahead[layout.places + np.arange(count)[:, None]]
        for row, data in zip(rows, tokens.view(np.uint8).reshape(count, -1), strict=True):
            row[cells] = data
        layout.places += count
        layout.countdowns -= count
        layout.quiet_steps = 0  # not looked up
        return [row.data for row in rows]

    def _look_ahead(self, layout: Layout) -> None:
        """Draw tokens if a row has none, and see how long no row will need any."""
        nearest = int(layout.countdowns.min())
        if not nearest:
            self._draw_for_low(layout)
            nearest = int(layout.countdowns.min())
        layout.quiet_steps = nearest

    def _draw_for_low(self, layout: Layout) -> None:
        """Draw tokens for the rows that have none or few, so that it is seldom done."""
        (low,) = (layout.ahead <= _WIDTH // 2).nonzero()
        self._draw_for(layout, low)

    def _draw_for(self, layout: Layout, rows: Indices) -> None:
        slots = layout.slots[rows]
        self._draw(slots, layout.left[rows], layout.ahead[rows])
        layout.places[rows] = slots * _WIDTH
        layout.ahead[rows] = _WIDTH

    def _draw(self, slots: Indices, left: Indices, ahead: Indices) -> None:
        drawn = np.empty((len(slots), _WIDTH), self._cells.dtype)
        firsts = self._nexts[slots] - ahead.astype(np.uint64)
        self._source.fill(drawn, self._keys[slots], firsts)
        if self._last_tokens:
            self._put_last_tokens(drawn, slots, left)
        self._ahead[slots] = drawn
        self._nexts[slots] = firsts + np.uint64(_WIDTH)
        tokens = drawn.astype(np.uint32)
        for row, (slot, known) in enumerate(zip(slots.tolist(), ahead.tolist(), strict=True)):
            ids = self._ids[slot]
            if ids is not None:
                ids.frombytes(tokens[row, known:].tobytes())

    def _put_last_tokens(self, drawn: npt.NDArray[Any], slots: Indices, left: Indices) -> None:
        for row in np.flatnonzero(left <= _WIDTH).tolist():
            last = self._last_tokens.get(int(slots[row]))
            if last is not None:
                drawn[row, left[row] - 1] = last
