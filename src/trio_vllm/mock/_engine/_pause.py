"""Whether an engine takes, starts and steps requests.

Mirrors ``pause_scheduler`` and its relatives in upstream ``vllm/v1/engine/core.py``.
"""

from __future__ import annotations

import enum

import attrs

PAUSE_MODES = ("abort", "wait", "keep")
MEMORY = frozenset({"weights", "kv_cache"})
"""What sleeping gives up and waking up gets back, by tag."""


class PauseState(enum.Enum):
    """How far a scheduler is paused."""

    RUNNING = enum.auto()
    NO_NEW = enum.auto()
    """What runs goes on, what is new waits."""
    ALL = enum.auto()
    """Nothing goes on."""


@attrs.define
class Pause:
    """The pause and sleep state of one engine."""

    state: PauseState = PauseState.RUNNING
    refuses: bool = False
    """Whether new requests are refused rather than queued."""
    asleep: set[str] = attrs.field(factory=set)
    """Tags of the memory that is given up."""

    @property
    def is_paused(self) -> bool:
        """Whether there is a pause of any kind."""
        return self.state is not PauseState.RUNNING

    @property
    def is_stepping(self) -> bool:
        """Whether running requests go on."""
        return self.state is not PauseState.ALL

    def start(self, mode: str, *, refuse: bool) -> None:
        """Pause in one of the `PAUSE_MODES`."""
        self.state = PauseState.ALL if mode == "keep" else PauseState.NO_NEW
        self.refuses = refuse and mode != "keep"

    def resume(self) -> None:
        """End a pause."""
        self.state, self.refuses = PauseState.RUNNING, False

    def sleep(self) -> None:
        """Give up all memory."""
        self.asleep |= MEMORY

    def wake_up(self, tags: list[str] | None) -> bool:
        """Get memory back, and end the pause if that was the last; whether it was.

        ``["scheduling"]`` only ends the pause. Tags that are not asleep change nothing.
        """
        if tags is not None and "scheduling" in tags:
            tags = [tag for tag in tags if tag != "scheduling"]
            if not tags:
                return self._resume_if_awake()
        if not tags:
            self.asleep.clear()
        elif self.asleep.issuperset(tags):
            self.asleep.difference_update(tags)
        return self._resume_if_awake()

    def _resume_if_awake(self) -> bool:
        if not self.asleep:
            self.resume()
        return not self.asleep
