"""The tokens that a mock engine makes up.

Token ``i`` of a request is a hash of the request's key and ``i``, so any stretch of any request can
be drawn at any time, in any company, and always comes out the same. The key is a digest of the seed,
the engine's index and the request id; the hash is that of SplitMix64, a step of which adds a
constant, so that "the state after ``i`` steps" is a product.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_vllm.protocol import Array, Logprobs, PoolingParams, Tensor

# MERGED mock/_engine/_logprobs: Log probabilities that a mock engine makes up.
#
# At each position the vocabulary is ranked, and the token of rank ``r`` has a probability in
# proportion to ``r ** -1.5``, so that the probabilities of all tokens sum to one, as a model's do. The
# rank of the token that was sampled is drawn from just that distribution. The ranking is a walk through
# the vocabulary in steps of a constant, laid so that the sampled token gets its rank.
# MERGED mock/_engine/_pooling: Pooling outputs that a mock engine makes up.


U64 = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1

# The same numbers as numpy wants them: a Python integer would turn the arrays into floats.
_STEP, _FACTOR_1, _FACTOR_2 = map(np.uint64, (_GOLDEN, *_FACTORS))
_27, _30, _31, _32 = map(np.uint64, (27, 30, 31, 32))

_TILE = 16_384
"""Numbers hashed at a time: what they need while hashed fits the processor's cache."""

_FEW = 16
"""Up to here numpy's calls cost more than hashing one by one."""


def request_key(seed: int, engine_index: int, request_id: str) -> int:
    """What, besides its position, a token of this request depends on: 64 bits."""
    text = f"{seed}/{engine_index}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def hash_at(key: int, position: int) -> int:
    """The 64 random bits of one position."""
    x = (key + _GOLDEN * position) & _MASK
    x = (x ^ x >> 30) * _FACTORS[0] & _MASK
    x = (x ^ x >> 27) * _FACTORS[1] & _MASK
    return x ^ x >> 31


def hashes(key: int, first: int, count: int) -> U64:
    """The random bits of ``count`` positions from ``first`` on."""
    x = np.uint64(key) + _STEP * np.arange(first, first + count, dtype=np.uint64)
    _mix(x, np.empty_like(x))
    return x


def _mix(x: U64, y: U64) -> None:
    """Turn counters into random bits; ``y`` is room for as many numbers."""
    np.right_shift(x, _30, out=y)
    np.bitwise_xor(x, y, out=x)
    np.multiply(x, _FACTOR_1, out=x)
    np.right_shift(x, _27, out=y)
    np.bitwise_xor(x, y, out=x)
    np.multiply(x, _FACTOR_2, out=x)
    np.right_shift(x, _31, out=y)
    np.bitwise_xor(x, y, out=x)


class TokenSource:
    """Draws tokens of one vocabulary.

    It keeps the memory that hashing needs: to ask for it every time cost more than the hashing.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._factor = np.uint64(vocab_size)
        self._multiples: U64 = _STEP * np.arange(_TILE, dtype=np.uint64)
        self._room: U64 = np.empty((2, _TILE), np.uint64)

    def fill(self, out: npt.NDArray[Any], keys: U64, firsts: U64) -> None:
        """Fill the rows of ``out`` with the tokens from ``firsts`` on of the requests with ``keys``."""
        rows, count = out.shape
        starts = keys + _STEP * firsts
        width = min(count, _TILE)
        height = _TILE // max(1, width)
        for left in range(0, count, _TILE):
            for top in range(0, rows, height):
                part = out[top : top + height, left : left + width]
                self._fill_tile(part, starts[top : top + height])
            starts += np.uint64(_GOLDEN * _TILE & _MASK)

    def _fill_tile(self, out: npt.NDArray[Any], starts: U64) -> None:
        size, shape = out.size, out.shape
        x, y = (room[:size].reshape(shape) for room in self._room)
        np.add.outer(starts, self._multiples[: shape[1]], out=x)
        _mix(x, y)
        np.right_shift(x, _32, out=x)
        np.multiply(x, self._factor, out=x)
        np.right_shift(x, _32, out=x)
        out[...] = x

    def draw(self, key: int, first: int, count: int) -> list[int]:
        """The ``count`` tokens from position ``first`` on of one request."""
        if count <= _FEW:
            size, positions = self._vocab_size, range(first, first + count)
            return [(hash_at(key, position) >> 32) * size >> 32 for position in positions]
        out = np.empty((1, count), np.uint64)
        self.fill(out, np.array([key], np.uint64), np.array([first], np.uint64))
        tokens: list[int] = out[0].tolist()
        return tokens


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


_PER_TOKEN = ("token_embed", "token_classify")


def pooled_shape(params: PoolingParams, prompt_len: int, size: int) -> tuple[int, int]:
    """How many vectors of how many numbers are asked for; ``size`` if it is not said."""
    return prompt_len if params.task in _PER_TOKEN else 1, params.dimensions or size


def pool(key: int, params: PoolingParams, prompt_len: int, size: int) -> Tensor:
    """A vector of length one, or one for each token of the prompt where the task is about tokens."""
    rows, size = pooled_shape(params, prompt_len, size)
    bits = hashes(key, 0, rows * size).reshape(rows, size)
    values = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-6))
    return Tensor.from_numpy(values if params.task in _PER_TOKEN else values[0])
