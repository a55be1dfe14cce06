"""Distributions drawn from hashes: `Spread` of lengths and times, `Acceptance` of draft tokens."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from trio_vllm.mock.config import MAX_DEVIATION
from trio_vllm.mock.content import hash_at
from trio_vllm.values import frozen

if TYPE_CHECKING:
    from statistics import NormalDist

_SALT = 1 << 42
"""Keeps the bits that spreads are drawn from apart from those of tokens."""
_ACCEPTANCE = 1 << 44
"""The position from which on it is drawn how many draft tokens are accepted."""


@functools.cache
def _normal() -> NormalDist:
    from statistics import NormalDist  # noqa: PLC0415  (4 ms that lengths without a spread need not take)

    return NormalDist()


def share_at(key: int, position: int) -> float:
    """A number between 0 and 1 for one position of a request."""
    return ((hash_at(key, _SALT + position) >> 11) + 0.5) / 2**53


@frozen
class Spread:
    """A mean with a standard deviation, never further from the mean than `MAX_DEVIATION` of it."""

    mean: float
    deviation: float = 0.0

    def draw(self, key: int, position: int) -> float:
        """The value at one position of a request."""
        if not self.deviation:
            return self.mean
        most = MAX_DEVIATION * self.mean
        drawn = self.deviation * _normal().inv_cdf(share_at(key, position))
        return self.mean + min(most, max(-most, drawn))


@frozen
class Acceptance:
    """How many draft tokens of a step the model agrees with."""

    rate: float
    """The probability that it does with one, if it did with those before."""

    def draw(self, key: int, position: int, num_drafts: int) -> int:
        """The number at one position of a request."""
        if not 0 < self.rate < 1:
            return num_drafts if self.rate else 0
        share = share_at(key, _ACCEPTANCE + position)
        return min(num_drafts, int(math.log(share) / math.log(self.rate)))
