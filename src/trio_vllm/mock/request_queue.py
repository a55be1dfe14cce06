"""`FcfsQueue` and `PriorityQueue` hold requests that wait to be scheduled.

Source: ``vllm/v1/core/sched/request_queue.py``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What a queue asks of a request."""

    @property
    def urgency(self) -> tuple[int, float, str]:
        """Priority, arrival time and id: the smallest is scheduled first under ``priority``."""
        ...


R = TypeVar("R", bound=Waiting)


class FcfsQueue(Generic[R]):
    """First come, first served; who was preempted goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[R] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: R) -> None:
        """Put a request at the end."""
        self._requests.append(request)

    def put_back(self, requests: Iterable[R]) -> None:
        """Put requests at the front, in their order."""
        self._requests.extendleft(reversed(list(requests)))

    def peek(self) -> R:
        """The request that is next."""
        return self._requests[0]

    def pop(self) -> R:
        """Take the request that is next."""
        return self._requests.popleft()

    def remove(self, requests: Collection[R]) -> None:
        """Take these requests out, where present."""
        self._requests = deque(request for request in self._requests if request not in requests)


class PriorityQueue(Generic[R]):
    """The lowest number first, then the earliest arrival; there is no front to go to."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], R]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: R) -> None:
        """Put a request where its priority says."""
        heapq.heappush(self._heap, (request.urgency, request))

    def put_back(self, requests: Iterable[R]) -> None:
        """Put requests where their priorities say."""
        for request in requests:
            self.add(request)

    def peek(self) -> R:
        """The request that is next."""
        return self._heap[0][1]

    def pop(self) -> R:
        """Take the request that is next."""
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[R]) -> None:
        """Take these requests out, where present."""
        self._heap = [entry for entry in self._heap if entry[1] not in requests]
        heapq.heapify(self._heap)
