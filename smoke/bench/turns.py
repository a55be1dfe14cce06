"""How often what is measured, and in which order."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from bench.figures import Better, Figure, Target
from bench.workers import Worker

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is spent on a benchmark."""

    rounds: int
    """Samples of each figure, besides one to warm up."""
    scale: float
    """How much of the full load a sample has."""

    @property
    def is_quick(self) -> bool:
        """Whether what takes long and tells little is left out."""
        return self.scale < 1

    def times(self, factor: int) -> "Effort":
        """More samples, where these are cheap."""
        return dataclasses.replace(self, rounds=self.rounds * factor)

    def part(self, full: float) -> int:
        """That much of a number."""
        return max(1, round(full * self.scale))


FULL = Effort(rounds=5, scale=1.0)
QUICK = Effort(rounds=3, scale=0.25)


def take_turns(
    effort: Effort, subject: Callable[[], T], yardstick: Callable[[], T]
) -> tuple[list[T], list[T]]:
    """Samples of us and of the yardstick; see `in_turns`."""
    ours, theirs = in_turns(effort, subject, yardstick)
    return ours, theirs


def in_turns(effort: Effort, *measures: Callable[[], T]) -> list[list[T]]:
    """Samples of each, one right after the other, who is first changing.

    What else goes on on the machine then comes upon all. The first turn of each does not count.
    """
    for measure in measures:
        measure()
    samples: list[list[T]] = [[] for _ in measures]
    turns = list(zip(measures, samples, strict=True))
    for _ in range(effort.rounds):
        for measure, kept in turns:
            kept.append(measure())
        turns.reverse()
    return samples


def ask_in_turns(
    effort: Effort,
    worker: Worker,
    name: str,
    unit: str,
    better: Better,
    yardstick: str,
    target: Target | None = None,
    **order: Any,
) -> Figure:
    """A figure by a worker that measures us and the yardstick with each order."""
    worker.ask(**order)
    answers = [worker.ask(**order) for _ in range(effort.rounds)]
    return Figure(
        name,
        unit,
        better,
        [answer["value"] for answer in answers],
        yardstick,
        [answer["yardstick"] for answer in answers],
        target,
    )
