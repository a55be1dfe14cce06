"""When an engine tells how busy it is, and to whom.

Clients get the statistics with the next message after the counts have changed, not with every
message: nothing else in them ever changes. The coordinator gets them in messages of their own, but
not after every step: a mock makes a hundred times as many steps a second as the engines that the
coordinator was made for.
"""

from __future__ import annotations

import attrs

from ._messages import StatsTemplate

COORDINATOR_INTERVAL = 0.02
"""Seconds between two messages to the coordinator while requests run."""

Counts = tuple[int, int]
"""Requests running and waiting."""


@attrs.define
class LoadReporter:
    """What was told last, and what has changed since."""

    _template: StatsTemplate = attrs.field(factory=StatsTemplate, init=False)
    _told: Counts = (0, 0)
    _told_coordinator: Counts = (0, 0)
    _next_for_coordinator: float = 0.0
    _prefills: int = 0
    _prefilled_tokens: int = 0

    def prefilled(self, prompt_len: int) -> None:
        """The prompt of a request was looked up in the prefix cache, in vain."""
        self._prefills += 1
        self._prefilled_tokens += prompt_len

    def is_news(self, counts: Counts) -> bool:
        """Whether clients do not know of these counts yet."""
        return counts != self._told or self._prefills > 0

    def tell(self, counts: Counts, step: int = 0, wave: int = 0) -> bytes:
        """The encoded statistics for a client, who knows them from now on."""
        stats = self._template.fill(*counts, step, wave, self._prefills, self._prefilled_tokens)
        self._told = counts
        self._prefills = self._prefilled_tokens = 0
        return stats

    def is_news_to_coordinator(self, counts: Counts) -> bool:
        """Whether the coordinator does not know of these counts yet."""
        return counts != self._told_coordinator

    def is_due_to_coordinator(self, counts: Counts, now: float) -> bool:
        """Whether the coordinator should be told now: not too often, but at once when idle."""
        is_time = now >= self._next_for_coordinator or not counts[0]
        return is_time and self.is_news_to_coordinator(counts)

    def told_coordinator(self, counts: Counts, now: float) -> None:
        """The coordinator was told."""
        self._told_coordinator = counts
        self._next_for_coordinator = now + COORDINATOR_INTERVAL
