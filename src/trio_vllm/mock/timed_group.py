"""`TimedGroup`: decoding requests whose tokens come at times of their own, in columns.

It is the fast path of `TimedRequests`. With each token only the request's next time and the number of
its tokens change; blocks are looked after where a token begins or fills one. For its last token a request
leaves the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_vllm.mock.lineup import Member
from trio_vllm.mock.scheduling import Besides
from trio_vllm.mock.token_rows import Indices, TokenRows

Times = npt.NDArray[np.float64]

NO_SLOTS: Indices = np.zeros(0, np.intp)
_FIRST_CAPACITY = 64


class TimedGroup:
    """Requests that are scheduled for one token, which is withheld until it is due.

    While a request is in the group, the group counts for it. Its slot is in no layout.
    """

    def __init__(self, block_size: int, rows: TokenRows) -> None:
        self._block_size = block_size
        self._rows = rows
        self._members: dict[int, Member] = {}
        """By slot, as all columns are."""
        self._dues: Times = np.full(0, math.inf)
        self._computed: Indices = np.zeros(0, np.intp)
        self._seats: Indices = np.zeros(0, np.intp)
        self._clients: Indices = np.zeros(0, np.intp)
        self._first_due = math.inf
        self._is_changed = False  # since the first one was looked for

    def __len__(self) -> int:
        return len(self._members)

    @property
    def first_due(self) -> float:
        """When the next token is due."""
        if self._is_changed:
            self._first_due = float(self._dues.min())
            self._is_changed = False
        return self._first_due

    # Members ------------------------------------------------------------------------------------

    def join(self, member: Member, due: float) -> None:
        """Count for this request from now on; it is scheduled for a token that is due then."""
        slot, scheduled = member.slot, member.scheduled
        assert slot is not None
        if slot >= len(self._dues):
            self._grow(slot + 1)
        self._members[slot] = member
        self._dues[slot] = due
        self._computed[slot], self._seats[slot] = scheduled.num_computed_tokens, scheduled.seat
        self._clients[slot] = member.request.client_index
        self._is_changed = True

    def _grow(self, count: int) -> None:
        capacity = max(_FIRST_CAPACITY, 2 * count)
        columns = (self._dues, self._computed, self._seats, self._clients)
        self._dues, self._computed, self._seats, self._clients = (
            _longer(column, capacity) for column in columns
        )

    def leave(self, member: Member) -> float | None:
        """Let a request count for itself again; when its token is due, or None if it was not in the group."""
        slot, scheduled = member.slot, member.scheduled
        if slot is None or self._members.get(slot) is not member:
            return None
        del self._members[slot]
        due = float(self._dues[slot])
        self._dues[slot] = math.inf
        self._is_changed = True
        scheduled.num_computed_tokens = scheduled.num_tokens = int(self._computed[slot])
        return due

    def dissolve(self) -> Iterator[tuple[Member, float]]:
        """Let all count for themselves again; when the token of each is due."""
        return self._leave_all([*self._members.values()])

    def _leave_all(self, members: Sequence[Member]) -> Iterator[tuple[Member, float]]:
        for member in members:
            due = self.leave(member)
            assert due is not None
            yield member, due

    # Tokens -------------------------------------------------------------------------------------

    def leave_at_end(self, now: float) -> Iterator[tuple[Member, float]]:
        """Let those go whose last token is due."""
        slots = self._due(now)
        return self._leave_all(self._members_at(slots[self._rows.left(slots) == 1]))

    def due(self, now: float) -> Indices:
        """The slots whose token is due and not the last, in the order in which their requests run."""
        slots = self._due(now)
        slots = slots[self._rows.left(slots) > 1]
        return slots[self._seats[slots].argsort()]

    def _due(self, now: float) -> Indices:
        return (self._dues <= now).nonzero()[0] if self.first_due <= now else NO_SLOTS

    def _members_at(self, slots: Indices) -> list[Member]:
        return [self._members[slot] for slot in slots.tolist()]

    def by_client(self, slots: Indices) -> list[tuple[int, Indices]]:
        """Slots by the client of their request."""
        clients = self._clients[slots]
        return [(int(client), slots[clients == client]) for client in np.unique(clients)]

    def dues(self, slots: Indices) -> Times:
        """When their tokens are due."""
        return self._dues[slots]

    def positions(self, slots: Indices) -> list[tuple[int, int]]:
        """The key of each request, and how many tokens it has with the one that is due."""
        counts = (self._computed[slots] + 1).tolist()
        members = zip(self._members_at(slots), counts, strict=True)
        return [(member.request.key, count) for member, count in members]

    def next_tokens(self, slots: Indices) -> Besides:
        """What these requests compute as they are scheduled again."""
        computed = self._computed[slots]
        in_block = computed % self._block_size
        starting = self._members_at(slots[in_block == 0])
        filling = self._members_at(slots[in_block == self._block_size - 1])
        return Besides(
            len(slots),
            int(computed.sum()) + len(slots),
            [member.scheduled for member in starting],
            [member.scheduled for member in filling],
        )

    def advance(self, slots: Indices, dues: Times) -> None:
        """These have got their token, and are scheduled for the next one, which is due then."""
        self._computed[slots] += 1
        self._dues[slots] = dues
        self._is_changed = True


def _longer(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    longer = np.full(capacity, math.inf if column.dtype == np.float64 else 0, column.dtype)
    longer[: len(column)] = column
    return longer
