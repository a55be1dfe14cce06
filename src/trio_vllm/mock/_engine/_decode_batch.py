"""The fast path: requests that want nothing but tokens.

When each of them ends is known from the start, so a step in which nobody comes or goes costs a copy
of token bytes into encoded rows (`Shelf`) and one concatenation per client.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ._messages import Draft, Envelope
from ._rows import NIL, TokenCells, pack_double, pack_str, row
from ._shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trio_vllm.protocol import Buffer

    from ._config import MockEngineConfig
    from ._messages import Outgoing
    from ._requests import Request
    from ._tokens import TokenSource

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
