"""`Spread`: a normal distribution with its ends cut off, drawn from hashes."""

from __future__ import annotations

from statistics import NormalDist

import attrs

from trio_vllm.mock.config import MAX_DEVIATION
from trio_vllm.mock.content import hash_at

_SALT = 1 << 42
"""Keeps the bits that spreads are drawn from apart from those of tokens."""
_NORMAL = NormalDist()


def share_at(key: int, position: int) -> float:
    """A number between 0 and 1 for one position of a request."""
    return ((hash_at(key, _SALT + position) >> 11) + 0.5) / 2**53


@attrs.frozen
class Spread:
    """A mean with a standard deviation, never further from the mean than `MAX_DEVIATION` of it."""

    mean: float
    deviation: float = 0.0

    def draw(self, key: int, position: int) -> float:
        """The value at one position of a request."""
        if not self.deviation:
            return self.mean
        most = MAX_DEVIATION * self.mean
        drawn = self.deviation * _NORMAL.inv_cdf(share_at(key, position))
        return self.mean + min(most, max(-most, drawn))
