"""`FastBatch`: the requests that want tokens, with log probabilities or without, as encoded rows.

When each request ends is known from the start. A step in which none comes or goes is *steady*: it
copies bytes of tokens, and of log probabilities, into encoded rows (`RowBlock`) and joins the rows of each client (`ClientBatch`)
into one message. Nothing is done per row, let alone per token, in Python.

`PlainBatch` makes the same outputs one by one; a property test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.content import U64, LogprobModel, TokenSource
from trio_vllm.mock.encoding import (
    NIL,
    MessageBuilder,
    MessageTemplate,
    Outgoing,
    TokenCells,
    pack_double,
    pack_str,
    row,
)
from trio_vllm.mock.logprob_cells import MAX_COLUMNS, LogprobCells
from trio_vllm.mock.request import Request
from trio_vllm.protocol import Buffer
from trio_vllm.values import define

FIRST_CAPACITY = 4
"""Rows of a new block: few, since there may be one for each length of ids."""
FIRST_WIDTH = 16
"""Steps drawn ahead while requests come and go; what is drawn for one that leaves is wasted."""
FIRST_BYTES = 1024
"""What these take for a row at most."""
MAX_WIDTH = 512
"""Steps drawn ahead at most: with so many the call of numpy costs next to nothing for each."""

Cells = TokenCells | LogprobCells
"""What changes in a row from step to step."""


@define(eq=False, weakref_slot=False)
class Member:
    """A request in the batch, and its place there; steps are those of its client."""

    request: Request
    block: RowBlock
    slot: int
    joined_step: int = 0
    final_step: int = 0


class RowBlock:
    """Encoded rows of one length, with the tokens of the next steps.

    The rows stand one behind the other in one array, so that all of them are one buffer for the
    message, and the token ids in them are one strided view. Beside them are the tokens of the steps
    to come, drawn for all rows at once: one call of numpy draws many steps for little more than one.
    A step copies one column of them into the view. Since rows have one length, a new one is
    appended, and the last one moves into the place of one that leaves.
    """

    def __init__(
        self, row_length: int, cells: Cells, chunk_size: int, source: TokenSource | LogprobCells
    ) -> None:
        self.count = 0
        self.cells = cells
        self.members: list[Member] = []
        """By slot."""
        self._row_length = row_length
        self._chunk_size = chunk_size
        self._source = source
        # Wide cells for many requests that come and go would take much memory.
        self._first_width = max(1, min(FIRST_WIDTH, FIRST_BYTES // cells.dtype.itemsize))
        self._width = self._first_width
        self._column = 0  # the next step's
        self._is_stable = False  # no row came or went since the last refill
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
        self._map_token_view()

    def _allocate_ahead(self) -> None:
        self._ahead = np.zeros((self.capacity, *self._per_row()), self.cells.dtype)

    def _per_row(self) -> tuple[int, ...]:
        # one dimension less for single tokens: numpy copies that twice as fast
        return (self._width,) if self._chunk_size == 1 else (self._width, self._chunk_size)

    def _map_token_view(self) -> None:
        """Make `_tokens` a view of all token ids in the rows."""
        mark, stride = len(self.cells.mark), self._row_length
        offset = self._offset = stride - self._chunk_size * self.cells.width + mark
        one = self._chunk_size == 1
        self._tokens: np.ndarray[Any, Any] = np.ndarray(
            (self.capacity,) if one else (self.capacity, self._chunk_size),
            self.cells.dtype,
            self._rows.data,
            offset,
            (stride,) if one else (stride, self.cells.width),
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
        limit = max(1, min(MAX_WIDTH, self.cells.ahead // (n * self._chunk_size)))
        width = min(limit, self._width * 2 if self._is_stable else self._first_width)
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
        """The rows as they are to be sent; valid until the next change of the block."""
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

    def add(
        self, members: Sequence[Member], rows: Sequence[bytes], positions: Sequence[int]
    ) -> list[bytes]:
        """Put rows at the end, with their tokens of the step that was advanced to; give them.

        ``rows`` are blank; ``positions`` are those of the first token of that step.
        """
        start = self.count
        stop = start + len(members)
        if not start:
            self._width, self._column, self._is_stable = (
                min(self._width, self._first_width),
                1,
                False,
            )
            if self._ahead.shape[1] != self._width:
                self._allocate_ahead()
        if stop > self.capacity:
            self._grow(max(stop, self.capacity * 2))
        column = self._column - 1
        passed = column * self._chunk_size
        blank = np.frombuffer(b"".join(rows), np.uint8)
        self._rows[start:stop] = blank.reshape(-1, self._row_length)
        self._keys[start:stop] = [member.request.key for member in members]
        firsts = [(position - passed) % 2**64 for position in positions]
        self._firsts[start:stop] = firsts
        self._draw(start, stop, column)
        self._tokens[start:stop] = self._ahead[start:stop, column]
        for slot, member in enumerate(members, start):
            member.slot = slot
        self.members += members
        self.count = stop
        self._changed()
        data, length = self._rows[start:stop].tobytes(), self._row_length
        return [data[at : at + length] for at in range(0, len(data), length)]

    def remove(self, member: Member) -> None:
        """Take out a row; the last one moves to its place."""
        last = self.count - 1
        slot = member.slot
        moved = self.members.pop()
        if slot != last:
            for array in (self._rows, self._keys, self._firsts, self._ahead):
                array[slot] = array[last]
            self.members[slot] = moved
            moved.slot = slot
        self.count = last
        self._changed()

    def _changed(self) -> None:
        self._is_stable = False
        self._columns = iter(())


MAX_ROW_LENGTH = 4096
"""Longer rows, that is very long request ids or chunks, take the plain path."""
SPARE_BLOCKS = 8
"""Empty blocks kept for requests to come."""
SPARE_ROWS = 1024
"""An empty block with more members than this at its peak is not kept."""

WRITTEN_AT_ONCE = 4000
"""Bytes of rows. With more it is better to write one message after the other: several at once would ask
for more than 128 KiB, which malloc gets from the system anew each time; up to 70 times as slow."""

MADE_AT_ONCE = 128 * 1024
"""Bytes of rows of all the steps that are made together."""

TWO_FIELDS, THREE_FIELDS = b"\x92", b"\x93"
"""What a row begins with that has tokens, and one that has log probabilities, too."""


class ClientBatch:
    """The requests of one client, with a count of steps of its own: others may be held meanwhile."""

    def __init__(self, config: MockEngineConfig, source: TokenSource, model: LogprobModel) -> None:
        self._source = source
        self._chunk_size = config.output_token_chunk_size
        self._cells = TokenCells.of(config.vocab_size)
        self._blank_tokens = self._cells.blank(self._chunk_size)
        self._model = model
        self._logprob_columns = 0
        self._logprob_cells: dict[int | None, LogprobCells] = {}  # by the number of candidates
        # By the number of candidates, where there are log probabilities (0 for all), and row length.
        self._blocks: dict[tuple[int | None, int], RowBlock] = {}
        self._occupied: list[RowBlock] = []
        self._steady: list[Buffer] | None = None  # the message of a steady step, in parts
        self._members: dict[str, Member] = {}
        self.finishing: dict[int, dict[str, Member]] = {}
        """Members by their last step and their id."""
        self.step_count = 0
        self.tokens_made = 0
        self._tokens_per_step = 0
        self.count = 0
        """How many requests there are."""
        self.size = 0
        """Bytes of all rows."""

    def forget_message(self) -> None:
        """Make the next steady message anew."""
        self._steady = None

    # Steady steps -------------------------------------------------------------------------------

    @property
    def steady_count(self) -> int:
        """How many steady steps come next, before one in which a request ends."""
        # Computed here, where steps are few: to keep it up to date would make every abort a search.
        return min(self.finishing, default=0) - self.step_count - 1

    def steady_message(self, template: MessageTemplate, now: float) -> bytes:
        """Make a steady step; the message of it."""
        self.step_count += 1
        for block in self._occupied:
            block.advance()
        parts = self._steady
        if parts is None:
            views = [block.view() for block in self._occupied]
            head, tail = template.start(self.count), template.end()
            self._steady = parts = [head, *views, NIL, b"\xcb", b"", tail]
        parts[-2] = pack_double(now)
        self.tokens_made += self._tokens_per_step
        return b"".join(parts)

    def steady_messages(self, template: MessageTemplate, now: float, count: int) -> list[bytes]:
        """Make ``count`` steady steps; their messages."""
        if len(self._occupied) > 1 or self.size > WRITTEN_AT_ONCE:
            return [self.steady_message(template, now) for _ in range(count)]
        (block,) = self._occupied
        head = template.start(self.count)
        tail = b"".join((NIL, b"\xcb", pack_double(now), template.end()))
        messages: list[bytes] = []
        while len(messages) < count:
            messages += block.messages(head, tail, count - len(messages))
        self.step_count += count
        self.tokens_made += count * self._tokens_per_step
        return messages

    # Any step -----------------------------------------------------------------------------------

    def step(self, joining: Sequence[Request], builder: MessageBuilder) -> list[Request]:
        """Make a step; gives the requests that have finished."""
        self.step_count += 1
        for block in self._occupied:
            block.advance()
        finished = self._finish(builder)
        for block in self._occupied:
            if block.count:
                builder.add(block.view(), block.count)
                self.tokens_made += block.count * self._chunk_size
        if joining:
            finished += self._join(joining, builder)
        if joining or finished:
            self._tidy()
        return finished

    def _finish(self, builder: MessageBuilder) -> list[Request]:
        finishing = list(self.finishing.pop(self.step_count, {}).values())
        for member in finishing:
            request = member.request
            count = request.end - request.emitted
            count -= (self.step_count - member.joined_step) * self._chunk_size
            id_and_tokens = member.block.row(member.slot)[1:]
            if count < self._chunk_size or request.last_token is not None:
                blank = member.block.cells.blank(self._chunk_size)
                id_and_tokens = id_and_tokens[: -len(blank)] + self._last_tokens(member, count)
            member.block.remove(member)
            del self._members[request.request_id]
            self._add_last_row(id_and_tokens, request, builder)
            self.tokens_made += count
        return [member.request for member in finishing]

    def _last_tokens(self, member: Member, count: int) -> bytes:
        """The last tokens of a request, fewer than usual or with one that is known beforehand."""
        request, block, last = member.request, member.block, member.request.last_token
        if isinstance(block.cells, LogprobCells) and last is not None:
            return block.cells.pack(request.key, request.end - 1, last)
        tokens = block.tokens(member.slot, count)
        tokens[-1] = tokens[-1] if last is None else last
        return self._cells.pack(tokens)

    def _add_last_row(
        self, id_and_tokens: bytes, request: Request, builder: MessageBuilder
    ) -> None:
        has_logprobs = request.extras is not None
        builder.add(row(id_and_tokens, request, final=True, has_logprobs=has_logprobs))
        builder.finished.append(request.request_id)
        request.emitted = request.end

    def _join(self, requests: Iterable[Request], builder: MessageBuilder) -> list[Request]:
        """Take in requests, with their first rows; gives those that have finished already."""
        finished: list[Request] = []
        staying: dict[RowBlock, list[tuple[Member, bytes]]] = {}
        for request in requests:
            left = request.end - request.emitted
            if left <= self._chunk_size:
                head = pack_str(request.request_id)
                self._add_last_row(head + self._only_tokens(request, left), request, builder)
                self.tokens_made += left
                finished.append(request)
                continue
            blank = self._blank_row(request)
            block = self._block_of(request, len(blank))
            staying.setdefault(block, []).append((Member(request, block, 0), blank))
        for block, entries in staying.items():
            members = [member for member, _ in entries]
            positions = [member.request.emitted for member in members]
            rows = block.add(members, [blank for _, blank in entries], positions)
            for member, first in zip(members, rows, strict=True):
                self._add_first_row(member, first[1:], builder)
        return finished

    def _only_tokens(self, request: Request, count: int) -> bytes:
        """The tokens, and log probabilities, of a request that begins and ends with them."""
        tokens, cells = (
            request.tokens(self._source, request.emitted, count),
            self._cells_of(request),
        )
        if isinstance(cells, LogprobCells):
            return cells.pack(request.key, request.emitted, tokens[0])
        return cells.pack(tokens)

    def _blank_row(self, request: Request) -> bytes:
        if request.extras is None:
            return b"".join((TWO_FIELDS, pack_str(request.request_id), self._blank_tokens))
        blank = self._cells_of(request).blank(self._chunk_size)
        return b"".join((THREE_FIELDS, pack_str(request.request_id), blank))

    def _cells_of(self, request: Request) -> Cells:
        """How the tokens of a request are written."""
        if request.extras is None:
            return self._cells
        count = request.extras.num_candidates
        cells = self._logprob_cells.get(count)
        if cells is None:
            cells = LogprobCells(self._source, self._model, self._logprob_columns, count)
            self._logprob_cells[count] = cells
        return cells

    def _block_of(self, request: Request, row_length: int) -> RowBlock:
        extras = request.extras
        key = (None if extras is None else extras.num_candidates or 0, row_length)
        block = self._blocks.get(key)
        if block is None:
            cells = self._cells_of(request)
            source = cells if isinstance(cells, LogprobCells) else self._source
            block = RowBlock(row_length, cells, self._chunk_size, source)
            self._blocks[key] = block
        return block

    # Log probabilities --------------------------------------------------------------------------

    def with_logprobs(self) -> list[Request]:
        """The requests that have them."""
        return [m.request for m in self._members.values() if m.request.extras is not None]

    def set_logprob_columns(self, columns: int) -> None:
        """Write log probabilities in so many columns from now on."""
        self._logprob_columns = columns
        self._logprob_cells.clear()
        blocks = [b for b in self._blocks.values() if isinstance(b.cells, LogprobCells)]
        self._blocks = {key: b for key, b in self._blocks.items() if b not in blocks}
        for members in [block.members for block in blocks if block.count]:
            rows = [self._blank_row(member.request) for member in members]
            block = self._block_of(members[0].request, len(rows[0]))
            for member in members:
                member.block = block
            # Those of the last step, which the next one goes on from.
            positions = [m.request.emitted + self.step_count - m.joined_step for m in members]
            block.add(members, rows, positions)
        self._tidy()

    def _add_first_row(self, member: Member, id_and_tokens: bytes, builder: MessageBuilder) -> None:
        request = member.request
        has_logprobs = request.extras is not None
        builder.add(row(id_and_tokens, request, final=False, has_logprobs=has_logprobs))
        request.events, request.is_prefilled = None, True
        member.joined_step = self.step_count
        left = request.end - request.emitted
        member.final_step = self.step_count + (left - 1) // self._chunk_size
        self.finishing.setdefault(member.final_step, {})[request.request_id] = member
        self._members[request.request_id] = member
        self.tokens_made += self._chunk_size

    def remove(self, request_id: str) -> None:
        """Take out a request before its end, with the tokens that it has got."""
        member = self._members.pop(request_id)
        steps = self.step_count + 1 - member.joined_step
        member.request.emitted += steps * self._chunk_size
        ending = self.finishing[member.final_step]
        del ending[request_id]
        if not ending:
            del self.finishing[member.final_step]
        member.block.remove(member)
        self._tidy()

    def _tidy(self) -> None:
        """Find the blocks in use, after a change, and give up those that are too many."""
        self._occupied = [block for block in self._blocks.values() if block.count]
        self.count = len(self._members)
        self.size = sum([block.size for block in self._occupied])
        self._tokens_per_step = self.count * self._chunk_size
        self._steady = None
        if len(self._blocks) - len(self._occupied) > SPARE_BLOCKS:
            self._blocks = {key: block for key, block in self._blocks.items() if block.count}
        elif not self._members:
            spare = [key for key, block in self._blocks.items() if block.capacity > SPARE_ROWS]
            for key in spare:
                del self._blocks[key]


class FastBatch:
    """The requests of one engine on the fast path, by client."""

    def __init__(self, config: MockEngineConfig, source: TokenSource, client_count: int) -> None:
        model = LogprobModel(config.vocab_size)
        self._clients = [ClientBatch(config, source, model) for _ in range(client_count)]
        self._chunk_size = config.output_token_chunk_size
        self._held: frozenset[int] = frozenset()
        self._active: list[tuple[int, ClientBatch]] = []  # that have requests and are not held
        self._size = 0  # bytes of their rows
        cells = TokenCells.of(config.vocab_size)
        self._room = MAX_ROW_LENGTH - len(cells.blank(config.output_token_chunk_size)) - 8
        self.count = 0
        """Requests, those of held clients too."""
        self.active_count = 0
        """Requests that get tokens in the next step."""
        self.logprob_columns = 0
        """All rows with log probabilities are as wide as the widest request wants."""

    @property
    def tokens_made(self) -> int:
        """How many tokens there have been in all."""
        return sum(client.tokens_made for client in self._clients)

    def accepts(self, request: Request) -> bool:
        """Whether a request can take this path, with the columns that there are now."""
        if len(request.request_id) * 4 >= self._room:
            return False
        if not request.is_plain:
            return True
        is_small = self._chunk_size == 1 and self.logprob_columns <= MAX_COLUMNS
        return is_small and request.has_logprobs

    def set_logprob_columns(self, columns: int) -> list[Request]:
        """Write log probabilities in so many columns from now on.

        Takes out, and gives, the requests that have them if these are too many for this path.
        """
        if columns == self.logprob_columns:
            return []
        self.logprob_columns = columns
        if columns > MAX_COLUMNS:
            leaving = [request for client in self._clients for request in client.with_logprobs()]
            for request in leaving:
                self.remove(request)
            return leaving
        for client in self._clients:
            client.set_logprob_columns(columns)
        self._tidy()
        return []

    def steady_step(self, template: MessageTemplate, now: float) -> list[Outgoing] | None:
        """Make the next step if it is steady; its messages, or None if it is not."""
        for _, client in self._active:
            if client.step_count + 1 in client.finishing:
                return None
        return [
            (client_index, [client.steady_message(template, now)])
            for client_index, client in self._active
        ]

    def steady_steps(
        self, template: MessageTemplate, now: float, limit: int
    ) -> tuple[int, list[Outgoing]] | None:
        """Make the next steady steps, ``limit`` at most: how many, and their messages.

        None if there are none.
        """
        limit = min(limit, 1 + MADE_AT_ONCE // self._size)
        count = min([limit, *[client.steady_count for _, client in self._active]])
        if count < 1:
            return None
        return count, [
            (client_index, [message])
            for client_index, client in self._active
            for message in client.steady_messages(template, now, count)
        ]

    def step(
        self, joining: Sequence[Request], builder_for: Callable[[int], MessageBuilder]
    ) -> list[Request]:
        """Make the next step; gives the requests that have finished."""
        by_client: dict[int, list[Request]] = {index: [] for index, _ in self._active}
        for request in joining:
            by_client.setdefault(request.client_index, []).append(request)
        finished: list[Request] = []
        for index, requests in by_client.items():
            finished += self._clients[index].step(requests, builder_for(index))
        if joining or finished:
            self._tidy()
        return finished

    def remove(self, request: Request) -> None:
        """Take out a member before its end, with the tokens that it has got."""
        self._clients[request.client_index].remove(request.request_id)
        self._tidy()

    def hold(self, held: frozenset[int]) -> None:
        """Give no tokens to the requests of these clients until the next call."""
        self._held = held
        self._tidy()

    def _tidy(self) -> None:
        self._active = []
        self._size = self.active_count = self.count = 0
        for index, client in enumerate(self._clients):
            count = client.count
            self.count += count
            if count and index not in self._held:
                self._active.append((index, client))
                self._size += client.size
                self.active_count += count

    def forget_messages(self) -> None:
        """Use another template from now on."""
        for client in self._clients:
            client.forget_message()
