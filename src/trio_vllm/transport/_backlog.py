"""How many bytes of large messages wait for a peer.

ØMQ bounds what waits by the number of messages, whatever their size, and tells of none of them when
it is out. But the memory of a large one is lent to it, and it gives that back.
"""

from __future__ import annotations

from collections import deque

import attrs
import zmq

BACKLOG_SIZE = 64 * 1024 * 1024
"""Bytes; the message that goes beyond is still taken."""

LOOKING_INTERVAL = 0.005
"""Seconds between two looks whether there is room again: that memory is back wakes nobody."""

Lent = tuple[zmq.MessageTracker, int]


@attrs.define
class Backlog:
    """The large messages of one socket that ØMQ has not done with."""

    _lent: deque[Lent] = attrs.field(factory=deque, init=False)
    _size: int = attrs.field(default=0, init=False)

    @property
    def is_full(self) -> bool:
        """Whether no more should be lent."""
        while self._lent and self._lent[0][0].done:
            self._size -= self._lent.popleft()[1]
        return self._size >= BACKLOG_SIZE

    def add(self, tracker: zmq.MessageTracker, size: int) -> None:
        """A message of this size waits until its tracker is done."""
        self._lent.append((tracker, size))
        self._size += size


def tracked(frame: bytes | memoryview) -> tuple[zmq.Frame, zmq.MessageTracker]:
    """The frame, lent whatever its size, and what is done when ØMQ gives it back."""
    lent = zmq.Frame(bytes(frame), track=True, copy=False, copy_threshold=0)
    tracker = lent.tracker
    assert isinstance(tracker, zmq.MessageTracker)
    return lent, tracker
