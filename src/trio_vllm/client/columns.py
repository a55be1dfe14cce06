"""`TokenColumns` hands the tokens of a whole message to the requests that only collect them.

Theory of operation. To hand over a row by `Sink.add_tokens` costs more than to read it, though for most
rows all that it comes to is two appends. So a sink that only collects says where these go
(`ColumnSink.token_place`), and is a member from then on. Of a message with many rows those of members
are handled in C: taken apart by a regular expression (`find_bare_rows`), looked up, appended. While the
same requests come in the same order, as they do until one begins or ends, they are looked up once.

What is appended is what `Sink.add_tokens` would have appended, so any other row of a member can go there
at any time. Three things are kept track of: a member leaves with its request (`remove`); all leave when
the weights change (`interrupt`), which their sinks have to note; and one leaves whose room is used up,
which is known before a message is taken, so that its sink refuses the next token.
A message that is unusual in any way is left alone, and `FrontendCore` handles it row by row.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from trio_vllm.client.streams import Sink
from trio_vllm.protocol import (
    BareRowPattern,
    BareRows,
    Frames,
    bare_row_pattern,
    find_bare_rows,
    pack_id,
    row_request_id,
    unpack_id,
)
from trio_vllm.values import frozen

T = TypeVar("T")

FEWEST_ROWS = 64
"""Rows of a message from which on this pays even if other requests come each time."""

MOST_OTHERS = 64
"""Rows of others in such a message; with more of them, other tasks may need a turn in between."""

MOST_MEMBERS = 8192
"""Requests of an engine that can be members: more than it runs at once, and each costs 300 bytes."""


class ColumnSink(Sink, Protocol):
    """A `Sink` that may be content with having its tokens appended; it need not have these methods."""

    @property
    def only_collects(self) -> bool:
        """Whether `token_place` is worth asking for; that never changes."""
        ...

    def token_place(self, version: str | None) -> TokenPlace | None:
        """Say where tokens made with weights of this version can be appended from now on.

        None if there is more to do now, such as to note the first token; it is asked for again then.
        """
        ...


class TokenPlace(NamedTuple):
    """Where to append what `Sink.add_tokens` would append for one token and its time."""

    add_token: Callable[[int], None]
    add_time: Callable[[float], None]
    """Not called for a message without a time."""
    held: Sequence[int]
    """What ``add_token`` appends to."""
    room: int
    """So many tokens it may hold."""


@frozen
class _LineUp:
    """The requests of a message's bare rows, looked up."""

    packed_ids: list[bytes]
    distinct: frozenset[bytes]
    """The same."""
    add_token: Sequence[Callable[[int], None]]
    """Of members."""
    add_time: Sequence[Callable[[float], None]]
    strangers: list[str | None]
    """By row the id of one who is no member; empty if there is none."""

    def is_apart_from(self, rows: list[Any]) -> bool:
        """Whether rows are those of other requests, and one can tell whose they are."""
        if not rows:
            return True
        request_ids = [row_request_id(row) for row in rows]
        return all(id_ is not None and pack_id(id_) not in self.distinct for id_ in request_ids)

    def divide(self, token_ids: list[int]) -> tuple[list[int], list[Any]]:
        """The tokens of members, and rows like those of the others."""
        if not self.strangers:
            return token_ids, []
        of_members = [
            token for token, id_ in zip(token_ids, self.strangers, strict=True) if id_ is None
        ]
        rows = [
            [id_, [token]]
            for token, id_ in zip(token_ids, self.strangers, strict=True)
            if id_ is not None
        ]
        return of_members, rows


class TokenColumns:
    """The requests of one engine that only collect tokens."""

    def __init__(self, requests: Mapping[str, Sink]) -> None:
        """``requests`` are all that the engine has."""
        self.fewest_rows = FEWEST_ROWS
        self.most_members = MOST_MEMBERS
        self._requests = requests
        self._collecting = 0  # requests that are members or may become some
        self.places: dict[bytes, TokenPlace] = {}
        """The members, by their packed ids."""
        self._version: str | None = None
        self._id_sizes: frozenset[int] = frozenset()
        self._pattern: BareRowPattern | None = None
        self._line_up: _LineUp | None = None
        self._left = 0  # messages that fit into the fullest member of the line-up

    def add(self, sink: Sink) -> None:
        """Note a request that may become a member."""
        self._collecting += _only_collects(sink)

    def remove(self, sink: Sink) -> None:
        """Forget a request that is over."""
        self._collecting -= _only_collects(sink)
        if self.places:
            self._line_up = None
            self.places.pop(pack_id(sink.request_id), None)

    # Row by row ---------------------------------------------------------------------------------

    def interrupt(self, version: str | None) -> None:
        """Note that rows made with these weights are handled one by one."""
        self._line_up = None
        if version is not None and version != self._version:
            self._version = version
            self.places.clear()

    def admit(self, rows: Sequence[Any]) -> None:
        """Make members of those who can be now, after rows of theirs were handled one by one."""
        most = min(self._collecting, self.most_members)
        for row in rows:
            if len(self.places) >= most:
                return
            sink = self._requests.get(row_request_id(row) or "")
            if sink is not None and _only_collects(sink):
                self._admit(cast("ColumnSink", sink), row)

    def _admit(self, sink: ColumnSink, row: list[Any]) -> None:
        packed_id = pack_id(sink.request_id)
        if packed_id not in self.places:
            place = sink.token_place(self._version)
            if place is not None:
                self._line_up = None
                self.places[packed_id] = place
                self._learn(row, len(packed_id))

    def _learn(self, row: list[Any], id_size: int) -> None:
        """Look for rows like this one, and with ids like this one's, in the next messages."""
        if id_size not in self._id_sizes:
            self._id_sizes |= {id_size}
        self._pattern = bare_row_pattern(row, self._id_sizes) or self._pattern

    # Column by column ---------------------------------------------------------------------------

    def find(self, frames: Frames) -> BareRows | None:
        """Take a message apart, if that pays; nothing is appended yet."""
        if self._pattern is None or not self._are_most_members():
            return None
        return find_bare_rows(frames, self._pattern, self.fewest_rows)

    def _are_most_members(self) -> bool:
        """Whether there are members, and no more requests that cannot become any."""
        members = len(self.places)
        return members > 0 and members + self._collecting >= len(self._requests)

    def append(self, found: BareRows) -> bool:
        """Append the tokens of members; whether the message could be taken so.

        The rows of all others are among ``found.others`` then.
        """
        batch, packed_ids = found.others, found.packed_ids
        if batch.weight_version != self._version:
            self.interrupt(batch.weight_version)
        if self._line_up is None or self._line_up.packed_ids != packed_ids or not self._left:
            self._line_up = self._look_up(packed_ids)
        line_up = self._line_up
        if line_up is None or not line_up.is_apart_from(batch.rows):
            return False
        token_ids, rows = line_up.divide(found.token_ids)
        if len(rows) + len(batch.rows) > MOST_OTHERS:
            return False
        self._left -= 1
        batch.rows[:0] = rows
        _call_each(line_up.add_token, token_ids)
        if batch.timestamp:  # 0 is none
            _call_each(line_up.add_time, repeat(batch.timestamp))
        return True

    def _look_up(self, packed_ids: list[bytes]) -> _LineUp | None:
        """Find the members among these ids; None if there is none, an id comes twice, or is none."""
        distinct = frozenset(packed_ids)
        places: list[Any] = list(map(self.places.get, packed_ids))
        if None in places:
            places = list(filter(None, places))
        if not places or len(distinct) < len(packed_ids):
            return None
        add_token, add_time, held, room = zip(*places, strict=True)
        self._left = min(map(operator.sub, room, map(len, held)))
        if self._left <= 0:
            self._remove_full()
            return self._look_up(packed_ids)
        strangers: list[str | None] = []
        if len(places) < len(packed_ids):
            strangers = [None if id_ in self.places else unpack_id(id_) for id_ in packed_ids]
            if strangers.count(None) > len(places):
                return None
        return _LineUp(packed_ids, distinct, add_token, add_time, strangers)

    def _remove_full(self) -> None:
        """Leave to their sinks the requests whose engine goes on after all that they asked for."""
        for packed_id, place in list(self.places.items()):
            if len(place.held) >= place.room:
                del self.places[packed_id]


def _only_collects(sink: Sink) -> bool:
    return getattr(sink, "only_collects", False)


def _call_each(functions: Iterable[Callable[[T], None]], arguments: Iterable[T]) -> None:
    """Call each function with its argument, at the speed of C."""
    deque(map(operator.call, functions, arguments), maxlen=0)
