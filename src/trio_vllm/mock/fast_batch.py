"""Rows of the fast path that are equally long, ready to be sent.

A shelf keeps the encoded rows of its requests one behind the other in one array, and beside it the
tokens of some steps to come, drawn for all rows at once. A step copies one column of the tokens into
the rows; nothing is done per row, let alone per token, in Python. Rows of equal length make adding
one an append and removing one a move of the last into the gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trio_vllm.mock.content import U64
from trio_vllm.mock.encoding import NIL, Draft, Envelope, TokenCells, pack_double, pack_str, row
from trio_vllm.protocol import Buffer

if TYPE_CHECKING:
    from trio_vllm.mock.config import MockEngineConfig
    from trio_vllm.mock.content import TokenSource
    from trio_vllm.mock.encoding import Outgoing
    from trio_vllm.mock.request import Request

# MERGED mock/_engine/_decode_batch: The fast path: requests that want nothing but tokens.
#
# When each of them ends is known from the start, so a step in which nobody comes or goes costs a copy
# of token bytes into encoded rows (`Shelf`) and one concatenation per client.


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


MAX_ROW_LENGTH = 4096
"""Longer rows, that is very long request ids or chunks, take the plain path."""
SPARE_SHELVES = 8
"""Empty shelves kept for requests to come."""
SPARE_ROWS = 1024
"""An empty shelf with more members than this at its peak is not kept."""

SEVERAL_STEPS_SIZE = 4000
"""Bytes of rows. With more it is better to make one step after the other: several at once would ask
for more than 128 KiB, which malloc gets from the system anew each time; up to 70 times as slow."""

TWO_FIELDS = b"\x92"


class Lane:
    """The part of a batch that belongs to one client."""

    def __init__(self, make_shelf: Callable[[int], Shelf]) -> None:
        self._make_shelf = make_shelf
        self._shelves: dict[int, Shelf] = {}  # by row length
        self._occupied: list[Shelf] = []
        self._steady: list[Buffer] | None = None  # the message of an undisturbed step, in parts
        self.count = 0

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return sum(shelf.size for shelf in self._occupied)

    def forget_message(self) -> None:
        """The next steady step makes its message anew."""
        self._steady = None

    def advance(self) -> None:
        """Give every request its next tokens."""
        for shelf in self._occupied:
            shelf.advance()

    def steady_message(self, envelope: Envelope, now: float) -> bytes:
        """Give every request its next tokens, and nothing else: the message of that."""
        for shelf in self._occupied:
            shelf.advance()
        parts = self._steady
        if parts is None:
            views = [shelf.view() for shelf in self._occupied]
            head, tail = envelope.start(self.count), envelope.end()
            self._steady = parts = [head, *views, NIL, b"\xcb", b"", tail]
        parts[-2] = pack_double(now)
        return b"".join(parts)

    def steady_messages(self, envelope: Envelope, now: float, count: int) -> list[bytes]:
        """What `steady_message` would give, so many times."""
        if len(self._occupied) > 1:
            return [self.steady_message(envelope, now) for _ in range(count)]
        (shelf,) = self._occupied
        head = envelope.start(self.count)
        tail = b"".join((NIL, b"\xcb", pack_double(now), envelope.end()))
        messages: list[bytes] = []
        while len(messages) < count:
            messages += shelf.messages(head, tail, count - len(messages))
        return messages

    def views(self) -> Iterator[tuple[memoryview, int]]:
        """All rows, piece by piece, and how many they are."""
        for shelf in self._occupied:
            if shelf.count:
                yield shelf.view(), shelf.count

    def join(self, rows: dict[int, list[tuple[Request, bytes]]]) -> None:
        """Take in requests by row length; each row is blank."""
        for length, entries in rows.items():
            shelf = self._shelves.get(length)
            if shelf is None:
                shelf = self._shelves[length] = self._make_shelf(length)
            shelf.add([request for request, _ in entries], [blank for _, blank in entries])
            self.count += len(entries)

    def leave(self, request: Request) -> None:
        """Take out a request."""
        if request.shelf is not None:
            request.shelf.remove(request)
            self.count -= 1

    def tidy(self) -> None:
        """Note which shelves are in use, to be called after changes."""
        self._occupied = [shelf for shelf in self._shelves.values() if shelf.count]
        self._steady = None
        if len(self._shelves) - len(self._occupied) > SPARE_SHELVES:
            self._shelves = {n: shelf for n, shelf in self._shelves.items() if shelf.count}
        elif not self.count:
            spare = [n for n, shelf in self._shelves.items() if shelf.capacity > SPARE_ROWS]
            for length in spare:
                del self._shelves[length]


class DecodeBatch:
    """The requests of one engine on the fast path."""

    def __init__(self, config: MockEngineConfig, source: TokenSource, client_count: int) -> None:
        self._source = source
        self._chunk_size = config.output_token_chunk_size
        self._cells = TokenCells.of(config.vocab_size)
        self._blank_tokens = self._cells.blank(self._chunk_size)
        self._lanes = [Lane(self._make_shelf) for _ in range(client_count)]
        self._finishing: dict[int, dict[str, Request]] = {}  # by step, by id
        self._busy_lanes: list[tuple[int, Lane]] = []
        self._size = 0  # bytes of their rows
        self._step = 0  # the last one
        self.count = 0
        self.tokens_made = 0

    def _make_shelf(self, row_length: int) -> Shelf:
        return Shelf(row_length, self._cells, self._chunk_size, self._source)

    def accepts(self, request: Request) -> bool:
        """Whether a request can take this path."""
        room = MAX_ROW_LENGTH - len(self._blank_tokens) - 8
        return request.extras is None and len(request.request_id) * 4 < room

    def emitted(self, request: Request) -> int:
        """How many tokens a member has got."""
        return request.emitted + (self._step + 1 - request.joined_step) * self._chunk_size

    def steady_step(self, envelope: Envelope, now: float) -> list[Outgoing] | None:
        """The next step, if nobody ends in it: its messages."""
        if self._step + 1 in self._finishing:
            return None
        self._step += 1
        self.tokens_made += self.count * self._chunk_size
        return [
            (client_index, [lane.steady_message(envelope, now)])
            for client_index, lane in self._busy_lanes
        ]

    def steady_steps(
        self, envelope: Envelope, now: float, limit: int
    ) -> tuple[int, list[Outgoing]] | None:
        """The next steps until somebody ends, ``limit`` at most: how many, and their messages.

        None if there are none, or if `steady_step` is as fast.
        """
        if self._size > SEVERAL_STEPS_SIZE:
            return None
        # Found here, where they are few: to know it always would make every abort a search.
        next_end = min(self._finishing, default=0)
        count = min(limit, next_end - self._step - 1)
        if count < 1:
            return None
        self._step += count
        self.tokens_made += count * self.count * self._chunk_size
        return count, [
            (client_index, [message])
            for client_index, lane in self._busy_lanes
            for message in lane.steady_messages(envelope, now, count)
        ]

    def step(self, joining: Iterable[Request], draft_for: Callable[[int], Draft]) -> list[Request]:
        """The next step; who has finished."""
        self._step += 1
        for lane in self._lanes:
            lane.advance()
        finished = self._finish(draft_for)
        for client_index, lane in self._busy_lanes:
            for view, count in lane.views():
                draft_for(client_index).add(view, count)
                self.tokens_made += count * self._chunk_size
        finished += self._join(joining, draft_for)
        self._tidy(self._lanes)
        return finished

    def _tidy(self, changed: Iterable[Lane]) -> None:
        for lane in changed:
            lane.tidy()
        self._busy_lanes = [(i, lane) for i, lane in enumerate(self._lanes) if lane.count]
        self._size = sum(lane.size for _, lane in self._busy_lanes)

    def _finish(self, draft_for: Callable[[int], Draft]) -> list[Request]:
        finishing = list(self._finishing.pop(self._step, {}).values())
        for request in finishing:
            draft, shelf = draft_for(request.client_index), request.shelf
            assert shelf is not None
            count = request.end - request.emitted
            count -= (self._step - request.joined_step) * self._chunk_size
            id_and_tokens = shelf.row(request.slot)[1:]
            if count < self._chunk_size:
                tokens = self._cells.pack(shelf.tokens(request.slot, count))
                id_and_tokens = id_and_tokens[: -len(self._blank_tokens)] + tokens
            self._lanes[request.client_index].leave(request)
            self.count -= 1
            self._answer_last(id_and_tokens, request, draft)
            self.tokens_made += count
        return finishing

    def _answer_last(self, id_and_tokens: bytes, request: Request, draft: Draft) -> None:
        draft.add(row(id_and_tokens, request, final=True))
        draft.finished.append(request.request_id)
        request.emitted = request.end

    def _join(
        self, requests: Iterable[Request], draft_for: Callable[[int], Draft]
    ) -> list[Request]:
        """Take in requests, with their first answers; who has finished already."""
        finished: list[Request] = []
        staying: dict[int, dict[int, list[tuple[Request, bytes]]]] = {}
        for request in requests:
            head = pack_str(request.request_id)
            left = request.end - request.emitted
            if left <= self._chunk_size:
                tokens = self._source.draw(request.key, request.emitted, left)
                packed = head + self._cells.pack(tokens)
                self._answer_last(packed, request, draft_for(request.client_index))
                self.tokens_made += left
                finished.append(request)
                continue
            blank = b"".join((TWO_FIELDS, head, self._blank_tokens))
            by_length = staying.setdefault(request.client_index, {})
            by_length.setdefault(len(blank), []).append((request, blank))
        for client_index, rows in staying.items():
            self._lanes[client_index].join(rows)
            for request, _ in itertools.chain.from_iterable(rows.values()):
                self._answer_first(request, draft_for(client_index))
        return finished

    def _answer_first(self, request: Request, draft: Draft) -> None:
        assert request.shelf is not None
        draft.add(row(request.shelf.row(request.slot)[1:], request, final=False))
        request.events, request.is_prefilled = None, True
        request.joined_step = self._step
        left = request.end - request.emitted
        request.final_step = self._step + (left - 1) // self._chunk_size
        self._finishing.setdefault(request.final_step, {})[request.request_id] = request
        self.count += 1
        self.tokens_made += self._chunk_size

    def remove(self, request: Request) -> None:
        """Take out a member before its end, with the tokens that it has got."""
        request.emitted = self.emitted(request)
        ending = self._finishing[request.final_step]
        del ending[request.request_id]
        if not ending:
            del self._finishing[request.final_step]
        lane = self._lanes[request.client_index]
        lane.leave(request)
        self._tidy((lane,))
        self.count -= 1

    def forget_messages(self) -> None:
        """The envelope has changed."""
        for lane in self._lanes:
            lane.forget_message()
