"""Log probabilities that a mock engine makes up.

At each position the vocabulary is ranked, and the token of rank ``r`` has a probability in
proportion to ``r ** -1.5``, so that the probabilities of all tokens sum to one, as a model's do. The
rank of the token that was sampled is drawn from just that distribution. The ranking is a walk through
the vocabulary in steps of a constant, laid so that the sampled token gets its rank.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trio_vllm.protocol import Array, Logprobs

from ._tokens import hash_at

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPONENT = 1.5
_RANK_SALT = 1 << 40
"""Keeps the bits that ranks are drawn from apart from those of tokens."""
_PROMPT_SALT = 1 << 41

_MAX_ID = 2**31 - 1
"""A prompt may have larger ids than log probabilities can name."""
_COMMON = 65_536
"""Less common ranks are never drawn for a sampled token."""

Floats = npt.NDArray[np.float32]


class LogprobModel:
    """The made-up distribution over a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._stride = _coprime(vocab_size)
        self._inverse = pow(self._stride, -1, vocab_size) if vocab_size > 1 else 0

    @functools.cached_property
    def _cumulated(self) -> npt.NDArray[np.float64]:
        """The sums of the first 1, 2, ... terms, not yet divided by the sum of all."""
        return np.cumsum(np.arange(1, min(self._size, _COMMON) + 1) ** -_EXPONENT)

    @functools.cached_property
    def _total(self) -> float:
        """The sum of all terms; of those past the common ranks an integral."""
        tail = 2 * (_COMMON**-0.5 - self._size**-0.5) if self._size > _COMMON else 0.0
        return float(self._cumulated[-1]) + tail

    def _logprobs(self, ranks: Array) -> Floats:
        """The log probabilities of some ranks, which are counted from 0."""
        values: Floats = -_EXPONENT * np.log(ranks + 1) - math.log(self._total)
        return values.astype(np.float32)

    def width(self, logprobs: int | None, token_ids: Sequence[int] | None = None) -> int:
        """How many columns a request's wish comes to."""
        if token_ids is not None:
            return 1 + len(token_ids)
        if logprobs is None:
            return 0
        return 1 + (self._size if logprobs < 0 else min(logprobs, self._size))

    def _draw_ranks(self, key: int, positions: range) -> npt.NDArray[np.int64]:
        """From 0, one per position."""
        drawn = [hash_at(key, position) / 2**64 * self._total for position in positions]
        return np.minimum(np.searchsorted(self._cumulated, drawn), len(self._cumulated) - 1)

    def sample(
        self,
        key: int,
        first: int,
        tokens: Sequence[int],
        width: int,
        token_ids: Sequence[int] | None = None,
    ) -> Logprobs:
        """Of tokens sampled from position ``first`` on, in ``width`` columns.

        With ``token_ids`` the columns after the first are about these, and what is left of the width
        is padded.
        """
        positions = range(first + _RANK_SALT, first + _RANK_SALT + len(tokens))
        ranks = self._draw_ranks(key, positions)
        chosen = np.array(tokens, np.int64)
        if token_ids is None:
            return self._most_probable(chosen, ranks, width)
        ids, values = self._empty(len(tokens), width)
        ids[:, 0], values[:, 0] = chosen, self._logprobs(ranks)
        ids[:, 1 : 1 + len(token_ids)] = token_ids
        values[:, 1 : 1 + len(token_ids)] = self._of_tokens(chosen, ranks, np.array(token_ids))
        return Logprobs(ids, values, ranks + 1)

    def prompt(self, key: int, prompt: Sequence[int], logprobs: int) -> Logprobs:
        """Of the tokens of a prompt but the first; as upstream, all in 32 bits."""
        chosen = np.array(prompt[1:], np.int64) & _MAX_ID
        ranks = self._draw_ranks(key, range(_PROMPT_SALT, _PROMPT_SALT + len(chosen)))
        made = self._most_probable(chosen, ranks, self.width(logprobs))
        return Logprobs(made.token_ids, made.logprobs, made.ranks.astype(np.int32))

    def prompt_token_ids(self, key: int, prompt: Sequence[int], token_ids: Array) -> Floats:
        """Of tokens named position by position; minus infinity where the id is -1."""
        rows = min(len(token_ids), max(0, len(prompt) - 1))
        chosen = np.array(prompt[1 : rows + 1], np.int64)
        ranks = self._draw_ranks(key, range(_PROMPT_SALT, _PROMPT_SALT + rows))
        values = np.full(token_ids.shape, -math.inf, np.float32)
        values[:rows] = self._of_tokens(chosen, ranks, token_ids[:rows])
        return values

    def _empty(self, rows: int, width: int) -> tuple[npt.NDArray[np.int32], Floats]:
        return np.zeros((rows, width), np.int32), np.full((rows, width), -math.inf, np.float32)

    def _most_probable(
        self, chosen: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64], width: int
    ) -> Logprobs:
        ids, values = self._empty(len(chosen), width)
        ids[:, 0], values[:, 0] = chosen, self._logprobs(ranks)
        columns = np.arange(min(width - 1, self._size))
        steps = (columns - ranks[:, None]) * self._stride
        ids[:, 1 : 1 + len(columns)] = (chosen[:, None] + steps) % self._size
        values[:, 1 : 1 + len(columns)] = self._logprobs(columns)
        return Logprobs(ids, values, ranks + 1)

    def _of_tokens(
        self, chosen: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64], token_ids: Array
    ) -> Floats:
        """The log probabilities of some tokens at each position."""
        distance = (token_ids.astype(np.int64) - chosen[:, None]) % self._size * self._inverse
        values = self._logprobs((ranks[:, None] + distance) % self._size)
        known = (token_ids >= 0) & (token_ids < self._size)
        return np.where(known, values, np.float32(-math.inf))


def _coprime(size: int) -> int:
    """A number near the golden section of ``size`` that visits all of it."""
    stride = max(1, round(size * 0.618))
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride
