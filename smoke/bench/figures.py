"""What a benchmark finds out: samples of us and of the yardstick, and what they should be."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, Literal

Better = Literal["more", "less"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a figure has to reach."""

    limit: float
    of: Literal["value", "ratio"] = "value"

    def describe(self, better: Better) -> str:
        """In the table."""
        sign = "≥" if better == "more" else "≤"
        return f"{sign} {shorten(self.limit)}{' x' if self.of == 'ratio' else ''}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a benchmark.

    The n-th samples of us and of the yardstick were taken one right after the other.
    """

    name: str
    """Unique among all, such as ``burst/64 tokens per second``."""
    unit: str
    better: Better
    samples: Sequence[float]
    yardstick: str = ""
    """What it is compared with; empty if with nothing."""
    yardstick_samples: Sequence[float] = ()
    target: Target | None = None
    note: str = ""
    """What a reader of the table should know."""

    @property
    def value(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    @property
    def yardstick_value(self) -> float | None:
        """The median of the yardstick's samples."""
        return statistics.median(self.yardstick_samples) if self.yardstick_samples else None

    @property
    def ratios(self) -> list[float]:
        """Us by the yardstick, for each pair of samples."""
        pairs = zip(self.samples, self.yardstick_samples, strict=True)
        return [ours / theirs for ours, theirs in pairs] if self.yardstick_samples else []

    @property
    def ratio(self) -> float | None:
        """The median of the ratios."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if there is none, or no yardstick was there."""
        if self.target is None:
            return None
        measured = self.value if self.target.of == "value" else self.ratio
        if measured is None:
            return None
        limit = self.target.limit
        return measured >= limit if self.better == "more" else measured <= limit

    @property
    def compared(self) -> float:
        """What two runs are compared by: the ratio, or, without a yardstick, the value."""
        return self.value if self.ratio is None else self.ratio

    @property
    def compared_range(self) -> tuple[float, float]:
        """The least and the most that `compared` was in a sample."""
        values = self.ratios or self.samples
        return min(values), max(values)

    def worsening(self, before: float) -> float:
        """How much worse `compared` is than ``before``: 0.25 is a quarter worse, below 0 is better."""
        now = self.compared
        if not now or not before:
            return 0.0
        return before / now - 1 if self.better == "more" else now / before - 1

    def as_dict(self) -> dict[str, Any]:
        """What goes into the JSON file."""
        return {
            "name": self.name,
            "unit": self.unit,
            "better": self.better,
            "value": self.value,
            "samples": list(self.samples),
            "yardstick": self.yardstick,
            "yardstick_value": self.yardstick_value,
            "yardstick_samples": list(self.yardstick_samples),
            "ratio": self.ratio,
            "compared": self.compared,
            "compared_range": self.compared_range,
            "target": self.target and dataclasses.asdict(self.target),
            "met": self.met,
            "note": self.note,
        }


def shorten(number: float) -> str:
    """Three significant digits, with a suffix for large numbers."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if suffix == 'k' else limit):.3g} {suffix}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
