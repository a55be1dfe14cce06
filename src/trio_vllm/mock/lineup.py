"""`Lineup`: whose rows are in the messages of a step, in the order of the scheduler.

From step to step some requests leave and others come, at the end. Only where running requests get no
row in a step, as in the middle of a prompt, everything is laid out anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import attrs

from trio_vllm.mock.plain_batch import PlainMember
from trio_vllm.mock.request import Request
from trio_vllm.mock.scheduled_request import ScheduledRequest
from trio_vllm.mock.token_rows import Layout, TokenRows
from trio_vllm.values import define

_MANY = 16
"""If more leave at once, it takes less time to lay out the others anew."""


@define(eq=False)
class Member:
    """A request, and where its rows are made: in a slot, or as objects."""

    request: Request
    scheduled: ScheduledRequest
    slot: int | None = None
    plain: PlainMember | None = None
    seat: int = -1
    """The request's, when its row was laid out."""


@define(eq=False)
class SeatedMembers:
    """Members in the order of their seats."""

    members: list[Member] = attrs.field(factory=list, init=False)
    _seats: list[int] = attrs.field(factory=list, init=False)

    def extend(self, members: Sequence[Member]) -> None:
        """Put members at the end."""
        self.members += members
        self._seats += [member.seat for member in members]

    def find(self, seat: int) -> int | None:
        """The place of the member with this seat."""
        seats = self._seats
        place = bisect_left(seats, seat)
        return place if place < len(seats) and seats[place] == seat else None

    def remove(self, member: Member) -> int | None:
        """Take out a member, if it is there; where it was."""
        place = self.find(member.seat)
        if place is not None:
            del self.members[place], self._seats[place]
        return place


@define(eq=False)
class Share(SeatedMembers):
    """What one client gets in a step: the rows of its requests with a slot."""

    layout: Layout = attrs.field(factory=Layout, init=False)


class Lineup:
    """The requests that get a row, those with a slot by client."""

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows
        self._scheduled: list[ScheduledRequest] = []
        self._everybody = SeatedMembers()
        self.shares: dict[int, Share] = {}
        self.plain = SeatedMembers()
        """Those without a slot."""

    def follow(
        self, scheduled: list[ScheduledRequest], members: Mapping[ScheduledRequest, Member]
    ) -> None:
        """Let just these requests have a row."""
        if scheduled == self._scheduled:
            return
        known = len(self._scheduled)
        if scheduled[:known] != self._scheduled:
            self.clear()
            known = 0
        self._append([members[one] for one in scheduled[known:]])
        self._scheduled = scheduled.copy()

    def remove(self, members: Sequence[Member]) -> None:
        """Take out the rows of members, where they have one."""
        if len(members) > _MANY:
            self.clear()
            return
        for member in members:
            place = self._everybody.remove(member)
            if place is not None:
                del self._scheduled[place]
                self._remove_row(member)

    def clear(self) -> None:
        """Take out all rows."""
        for share in self.shares.values():
            self._rows.take_apart(share.layout)
        for member in self._everybody.members:
            member.seat = -1
        self._scheduled, self.shares = [], {}
        self._everybody, self.plain = SeatedMembers(), SeatedMembers()

    def _append(self, members: Sequence[Member]) -> None:
        by_client: dict[int, list[Member]] = {}
        for member in members:
            member.seat = member.scheduled.seat
            if member.slot is not None:
                by_client.setdefault(member.request.client_index, []).append(member)
        self._everybody.extend(members)
        self.plain.extend([member for member in members if member.slot is None])
        for client_index, newcomers in by_client.items():
            share = self.shares.setdefault(client_index, Share())
            share.extend(newcomers)
            slots = [member.slot for member in newcomers if member.slot is not None]
            self._rows.append(share.layout, slots)

    def _remove_row(self, member: Member) -> None:
        if member.slot is None:
            self.plain.remove(member)
            return
        client_index = member.request.client_index
        share = self.shares[client_index]
        place = share.remove(member)
        assert place is not None
        self._rows.take_out(share.layout, place)
        if not share.members:
            del self.shares[client_index]
