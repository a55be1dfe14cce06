"""`TokenSource`, `LogprobModel` and vectors: what mock engines answer with, drawn from hashes.

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

from trio_vllm.protocol import Array, Logprobs, PoolingParams
from trio_vllm.values import frozen

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


@functools.cache
def _multiples() -> U64:
    """The steps within a tile; 128 KiB, the same for all engines of a process."""
    return _STEP * np.arange(_TILE, dtype=np.uint64)


class TokenSource:
    """Draws tokens of one vocabulary.

    It keeps the memory that hashing needs: to ask for it every time cost more than the hashing.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._factor = np.uint64(vocab_size)
        self._multiples = _multiples()
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
            size, positions = self.vocab_size, range(first, first + count)
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
    """A distribution over a vocabulary, drawn anew at each position.

    The vocabulary is ranked, and the token of rank ``r`` has a probability in proportion to
    ``r ** -1.5``, so that the probabilities of all tokens sum to one, as a model's do. The rank of
    the token that was sampled is drawn from just that distribution. The ranking is a walk through the
    vocabulary in steps of a constant, laid so that the sampled token gets its rank.
    """

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
        """How many columns a request asks for."""
        if token_ids is not None:
            return 1 + len(token_ids)
        if logprobs is None:
            return 0
        return 1 + (self._size if logprobs < 0 else min(logprobs, self._size))

    def _draw_ranks(self, key: int, first: int, count: int, limit: int) -> npt.NDArray[np.int64]:
        """The ranks, from 0, of the tokens at ``count`` positions; they are below ``limit``."""
        if limit == 1:
            return np.zeros(count, np.int64)
        drawn: Any
        if count <= _FEW:
            drawn = [hash_at(key, position) / 2**64 for position in range(first, first + count)]
        else:
            drawn = hashes(key, first, count) / 2**64
        highest = min(limit, len(self._cumulated)) - 1
        total = self._total if limit >= self._size else self._cumulated[highest]
        found = np.searchsorted(self._cumulated, np.multiply(drawn, total))
        ranks: npt.NDArray[np.int64] = np.minimum(found, highest)
        return ranks

    def sample(
        self,
        key: int,
        first: int,
        tokens: Sequence[int],
        width: int,
        token_ids: Sequence[int] | None = None,
        *,
        num_candidates: int | None = None,
    ) -> Logprobs:
        """Of tokens sampled from position ``first`` on, in ``width`` columns.

        With ``token_ids`` the columns after the first are about these, and what is left of the width
        is padded. With ``num_candidates`` no token of a higher rank was sampled.
        """
        limit = num_candidates or self._size
        ranks = self._draw_ranks(key, first + _RANK_SALT, len(tokens), limit)
        chosen = np.array(tokens, np.int64)
        if token_ids is None:
            made = self._empty(len(tokens), width, np.int64)
            self._fill_most_probable(made, chosen, ranks)
            return made
        ids, values = (
            np.zeros((len(tokens), width), np.int32),
            self._minus_infinity((len(tokens), width)),
        )
        ids[:, 0], values[:, 0] = chosen, self._logprobs(ranks)
        ids[:, 1 : 1 + len(token_ids)] = token_ids
        values[:, 1 : 1 + len(token_ids)] = self._of_tokens(chosen, ranks, np.array(token_ids))
        return Logprobs(ids, values, ranks + 1)

    # Of many requests at once -------------------------------------------------------------------

    @functools.cached_property
    def common_values(self) -> Floats:
        """The log probabilities of all ranks, from 0, that a sampled token can have."""
        return self._logprobs(np.arange(len(self._cumulated)))

    def most_probable_values(self, columns: int) -> Floats:
        """The log probabilities of the most probable tokens, padded as `sample` does."""
        values = np.full(columns, -math.inf, np.float32)
        values[: self._size] = self._logprobs(np.arange(min(columns, self._size)))
        return values

    def draw_ranks_of_many(
        self, keys: U64, firsts: U64, count: int, num_candidates: int | None
    ) -> npt.NDArray[np.int64]:
        """The ranks, from 0, at ``count`` positions from ``firsts`` on of the requests with ``keys``."""
        limit = num_candidates or self._size
        if limit == 1:
            return np.zeros((len(keys), count), np.int64)
        starts = keys + _STEP * (firsts + np.uint64(_RANK_SALT))
        bits: U64 = np.add.outer(starts, _STEP * np.arange(count, dtype=np.uint64))
        _mix(bits, np.empty_like(bits))
        drawn = bits / 2**64
        highest = min(limit, len(self._cumulated)) - 1
        drawn *= self._total if limit >= self._size else self._cumulated[highest]
        ranks: npt.NDArray[np.int64] = np.searchsorted(self._cumulated, drawn)
        return np.minimum(ranks, highest, out=ranks)

    def fill_most_probable_ids(
        self, ids: npt.NDArray[Any], tokens: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]
    ) -> None:
        """Fill in the most probable tokens where these were sampled; there are none past the size."""
        first = ((tokens - ranks * self._stride) % self._size).astype(np.uint32)
        size = np.uint32(self._size)
        for column in range(min(ids.shape[-1], self._size)):
            token = first + np.uint32(column * self._stride % self._size)
            # It is below twice the size; and what would be negative is large instead.
            ids[..., column] = np.minimum(token, token - size)

    def empty_prompt(self, prompt: Sequence[int], logprobs: int) -> Logprobs:
        """Room for `fill_prompt`; as upstream, all in 32 bits, and not for the first token."""
        return self._empty(max(0, len(prompt) - 1), self.width(logprobs), np.int32)

    def fill_prompt(self, made: Logprobs, key: int, prompt: Sequence[int], rows: slice) -> None:
        """Fill in some rows, of the tokens of a prompt but the first."""
        chosen = np.array(prompt[1 + rows.start : 1 + rows.stop], np.int64) & _MAX_ID
        ranks = self._draw_ranks(key, _PROMPT_SALT + rows.start, len(chosen), self._size)
        part = Logprobs(made.token_ids[rows], made.logprobs[rows], made.ranks[rows])
        self._fill_most_probable(part, chosen, ranks)

    def empty_prompt_token_ids(self, token_ids: Array) -> Floats:
        """Room for `fill_prompt_token_ids`."""
        return self._minus_infinity(token_ids.shape)

    def fill_prompt_token_ids(
        self, values: Floats, key: int, prompt: Sequence[int], token_ids: Array, rows: slice
    ) -> None:
        """Fill in some rows, of tokens named by position; minus infinity where the id is -1."""
        stop = min(rows.stop, max(rows.start, len(prompt) - 1))
        chosen = np.array(prompt[1 + rows.start : 1 + stop], np.int64)
        ranks = self._draw_ranks(key, _PROMPT_SALT + rows.start, len(chosen), self._size)
        named = token_ids[rows.start : stop]
        values[rows.start : stop] = self._of_tokens(chosen, ranks, named)

    @staticmethod
    def _minus_infinity(shape: tuple[int, ...]) -> Floats:
        return np.full(shape, -math.inf, np.float32)

    def _empty(self, rows: int, width: int, ranks: npt.DTypeLike) -> Logprobs:
        shape = rows, width
        return Logprobs(
            np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(rows, ranks)
        )

    def _fill_most_probable(
        self, made: Logprobs, chosen: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]
    ) -> None:
        """Fill in the chosen tokens, the most probable ones, and what is left of the width."""
        ids, values = made.token_ids, made.logprobs
        columns = np.arange(min(ids.shape[1] - 1, self._size))
        filled = 1 + len(columns)
        ids[:, 0], values[:, 0] = chosen, self._logprobs(ranks)
        steps = (columns - ranks[:, None]) * self._stride
        ids[:, 1:filled] = (chosen[:, None] + steps) % self._size
        if chosen.size and chosen.max() >= self._size:  # one that was given
            np.copyto(ids[:, 1:filled], chosen[:, None], "same_kind", steps == 0)
        values[:, 1:filled] = self._logprobs(columns)
        ids[:, filled:], values[:, filled:] = 0, -math.inf
        made.ranks[:] = ranks + 1

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


PER_TOKEN = ("token_embed", "token_classify")
_LABELLING = ("classify", "token_classify")


@frozen
class Pooler:
    """Makes up the answers to pooling requests: embeddings, or probabilities of labels."""

    embedding_size: int
    num_labels: int

    def shape(self, params: PoolingParams, prompt_len: int) -> tuple[int, int]:
        """How many vectors of how many numbers a request asks for."""
        rows = prompt_len if params.task in PER_TOKEN else 1
        if params.task in _LABELLING:
            return rows, self.num_labels
        return rows, min(params.dimensions or self.embedding_size, self.embedding_size)

    def empty(self, params: PoolingParams, prompt_len: int) -> Floats:
        """Room for `fill`."""
        return np.empty(self.shape(params, prompt_len), np.float32)

    def fill(self, vectors: Floats, key: int, params: PoolingParams, rows: slice) -> None:
        """Fill in some vectors, activated unless the request says ``use_activation=False``.

        As in upstream, an activated embedding has length one, and activated labels are
        probabilities: softmax of several, sigmoid of a single one.
        """
        size = vectors.shape[1]
        bits = hashes(key, rows.start * size, (rows.stop - rows.start) * size).reshape(-1, size)
        values = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
        is_labelling = params.task in _LABELLING
        if is_labelling:
            values *= _MAX_LOGIT
        if params.use_activation is not False:
            values = _probabilities(values) if is_labelling else _normalized(values)
        vectors[rows] = values


_MAX_LOGIT = np.float32(4)


def _normalized(vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalized: Floats = vectors / np.maximum(norms, np.float32(1e-6))
    return normalized


def _probabilities(logits: Floats) -> Floats:
    powers: Floats = np.exp(logits)
    # the softmax of one label and of none
    others = np.float32(1) if logits.shape[1] == 1 else np.float32(0)
    probabilities: Floats = powers / (powers.sum(axis=1, keepdims=True) + others)
    return probabilities
