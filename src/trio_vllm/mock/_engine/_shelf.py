"""Rows of the fast path that are equally long, ready to be sent.

A shelf keeps the encoded rows of its requests one behind the other in one array, and beside it the
tokens of some steps to come, drawn for all rows at once. A step copies one column of the tokens into
the rows; nothing is done per row, let alone per token, in Python. Rows of equal length make adding
one an append and removing one a move of the last into the gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._tokens import U64

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._requests import Request
    from ._rows import TokenCells
    from ._tokens import TokenSource

FIRST_CAPACITY = 4
FIRST_WIDTH = 16
"""Steps drawn ahead while requests come and go; what is drawn for one that leaves is wasted."""
MAX_WIDTH = 512
TOKENS_AHEAD = 32_768
"""How many tokens a shelf whose requests stay draws ahead for all of them together."""


class Shelf:
    """Encoded rows of one length, with the tokens of the next steps."""

    def __init__(
        self, row_length: int, cells: TokenCells, chunk_size: int, source: TokenSource
    ) -> None:
        self.count = 0
        self.members: list[Request] = []
        """By slot; each also knows its own slot."""
        self._row_length = row_length
        self._cells = cells
        self._chunk_size = chunk_size
        self._source = source
        self._width = FIRST_WIDTH
        self._column = 0  # the next step's
        self._is_stable = False  # nobody came or went since the last refill
        self._columns: Iterator[np.ndarray[Any, Any]] = iter(())
        self._allocate(FIRST_CAPACITY)

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.count * self._row_length

    # Arrays -------------------------------------------------------------------------------------

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows = np.zeros((capacity, self._row_length), np.uint8)
        self._keys: U64 = np.zeros(capacity, np.uint64)
        self._firsts: U64 = np.zeros(capacity, np.uint64)  # position of the tokens in column 0
        self._allocate_ahead()
        self._look_at_tokens()

    def _allocate_ahead(self) -> None:
        self._ahead = np.zeros((self.capacity, *self._per_row()), self._cells.dtype)

    def _per_row(self) -> tuple[int, ...]:
        # one dimension less for single tokens: numpy copies that twice as fast
        return (self._width,) if self._chunk_size == 1 else (self._width, self._chunk_size)

    def _look_at_tokens(self) -> None:
        """Make `_tokens` the view of all token ids that stand in the rows."""
        mark, stride = len(self._cells.mark), self._row_length
        offset = self._offset = stride - self._chunk_size * self._cells.width + mark
        one = self._chunk_size == 1
        self._tokens: np.ndarray[Any, Any] = np.ndarray(
            (self.capacity,) if one else (self.capacity, self._chunk_size),
            self._cells.dtype,
            self._rows.data,
            offset,
            (stride,) if one else (stride, self._cells.width),
        )

    def _grow(self, capacity: int) -> None:
        rows, keys, firsts, ahead = self._rows, self._keys, self._firsts, self._ahead
        self._allocate(capacity)
        n = self.count
        self._rows[:n], self._keys[:n], self._firsts[:n] = rows[:n], keys[:n], firsts[:n]
        self._ahead[:n] = ahead[:n]

    # Steps --------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Write the tokens of the next step into all rows."""
        for column in self._columns:
            self._target[...] = column
            self._column += 1
            return
        self._look_ahead()
        self.advance()

    def _look_ahead(self) -> None:
        """Make views of the columns to come, once for many steps."""
        if self._column == self._width:
            self._refill()
        self._columns = iter(self._ahead[: self.count, self._column :].swapaxes(0, 1))
        self._target = self._tokens[: self.count]

    def _refill(self) -> None:
        n = self.count
        self._firsts[:n] += np.uint64(self._width * self._chunk_size)
        limit = max(1, min(MAX_WIDTH, TOKENS_AHEAD // (n * self._chunk_size)))
        width = min(limit, self._width * 2 if self._is_stable else FIRST_WIDTH)
        if width != self._width:
            self._width = width
            self._allocate_ahead()
        self._draw(0, n, 0)
        self._column = 0
        self._is_stable = True

    def _draw(self, start: int, stop: int, column: int) -> None:
        """Draw the tokens from ``column`` on for some slots."""
        out = self._ahead[start:stop, column:]
        firsts = self._firsts[start:stop] + np.uint64(column * self._chunk_size)
        flat = out if out.ndim == 2 else np.empty((stop - start, out[0].size), out.dtype)
        self._source.fill(flat, self._keys[start:stop], firsts)
        if flat is not out:
            out[...] = flat.reshape(out.shape)

    def view(self) -> memoryview:
        """The rows as they are to be sent; valid until the next change of the shelf."""
        return self._rows[: self.count].reshape(-1).data

    def messages(self, head: bytes, tail: bytes, limit: int) -> list[bytes]:
        """Advance ``limit`` times at most; the rows after each, between ``head`` and ``tail``.

        All of them are written at once, which costs less for each than an `advance` and a join.
        """
        if self._column == self._width:
            self._refill()
        stop = min(self._column + limit, self._width)
        columns = self._ahead[: self.count, self._column : stop].swapaxes(0, 1)
        blank = b"".join((head, self.view(), tail))
        length = len(blank)
        messages = np.empty((len(columns), length), np.uint8)
        messages[:] = np.frombuffer(blank, np.uint8)
        strides = (length, *self._tokens.strides)
        start = len(head) + self._offset
        np.ndarray(columns.shape, columns.dtype, messages.data, start, strides)[...] = columns
        self._column, self._columns = stop, iter(())  # the rows themselves are behind now
        data = messages.tobytes()
        return [data[at : at + length] for at in range(0, len(data), length)]

    def row(self, slot: int) -> bytes:
        """One row as it is to be sent."""
        row: bytes = self._rows[slot].tobytes()
        return row

    def tokens(self, slot: int, count: int) -> list[int]:
        """The first tokens that stand in one row."""
        tokens: list[int] = self._tokens[slot : slot + 1].reshape(-1)[:count].tolist()
        return tokens

    # Members ------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], rows: Sequence[bytes]) -> None:
        """Put rows at the end, with their tokens of the step that was advanced to.

        ``rows`` are blank; the requests go on from the tokens that they have ``emitted``.
        """
        start = self.count
        stop = start + len(requests)
        if not start:
            self._width, self._column, self._is_stable = min(self._width, FIRST_WIDTH), 1, False
            if self._ahead.shape[1] != self._width:
                self._allocate_ahead()
        if stop > self.capacity:
            self._grow(max(stop, self.capacity * 2))
        column = self._column - 1
        passed = column * self._chunk_size
        blank = np.frombuffer(b"".join(rows), np.uint8)
        self._rows[start:stop] = blank.reshape(-1, self._row_length)
        self._keys[start:stop] = [request.key for request in requests]
        firsts = [(request.emitted - passed) % 2**64 for request in requests]
        self._firsts[start:stop] = firsts
        self._draw(start, stop, column)
        self._tokens[start:stop] = self._ahead[start:stop, column]
        for slot, request in enumerate(requests, start):
            request.shelf, request.slot = self, slot
        self.members += requests
        self.count = stop
        self._changed()

    def remove(self, request: Request) -> None:
        """Take out a row; the last one moves to its place."""
        last = self.count - 1
        slot = request.slot
        moved = self.members.pop()
        if slot != last:
            for array in (self._rows, self._keys, self._firsts, self._ahead):
                array[slot] = array[last]
            self.members[slot] = moved
            moved.slot = slot
        request.shelf = None
        self.count = last
        self._changed()

    def _changed(self) -> None:
        self._is_stable = False
        self._columns = iter(())
