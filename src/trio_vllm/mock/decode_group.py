"""`DecodeGroup` advances running requests that all decode: the fast path of the scheduler.

Each of them computes one token a step, so only two kinds of steps matter to a request: the one for
which it needs another block, and the one that fills a block. Both come round every ``block_size``
steps, so the group is sorted by when that is, and a step looks only at those whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from trio_vllm.mock.scheduled_request import ScheduledRequest

by_seat = attrgetter("seat")


class DecodeGroup:
    """Decoding requests, each at its place in the round of a block."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._clock = 0  # steps made
        self._starts: dict[ScheduledRequest, int] = {}  # computed tokens, less the clock
        self._places: list[dict[ScheduledRequest, None]] = [{} for _ in range(block_size)]
        self._start_sum = 0

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def num_computed_tokens(self) -> int:
        """Of all together."""
        return self._start_sum + self._clock * len(self._starts)

    def join(self, request: ScheduledRequest) -> None:
        """Count for this request from now on."""
        start = request.num_computed_tokens - self._clock
        self._starts[request] = start
        self._start_sum += start
        self._places[start % self._size][request] = None

    def leave(self, request: ScheduledRequest) -> None:
        """Let the request count for itself again, if it was in the group."""
        start = self._starts.pop(request, None)
        if start is not None:
            self._start_sum -= start
            del self._places[start % self._size][request]
            self._settle(request, start)

    def dissolve(self) -> None:
        """Let all requests count for themselves again."""
        for request, start in self._starts.items():
            self._places[start % self._size].clear()
            self._settle(request, start)
        self._starts.clear()
        self._start_sum = 0

    def _settle(self, request: ScheduledRequest, start: int) -> None:
        request.num_computed_tokens = start + self._clock
        request.num_tokens = request.num_computed_tokens + 1

    @property
    def blocks_needed(self) -> int:
        """How many requests need another block for the next step."""
        return len(self._places[-self._clock % self._size])

    def step(self) -> tuple[Sequence[ScheduledRequest], Sequence[ScheduledRequest]]:
        """Compute a token of each.

        Returns:
          Those for which that is the first token of a block, and those for which it is the last one,
          both in the order in which they run.
        """
        # They join in this order, and a dict keeps it.
        starting = tuple(self._places[-self._clock % self._size])
        self._clock += 1
        return starting, tuple(self._places[-self._clock % self._size])
