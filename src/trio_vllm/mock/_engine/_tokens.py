"""The tokens that a mock engine makes up.

Token ``i`` of a request is a hash of the request's key and ``i``, so any stretch of any request can
be drawn at any time, in any company, and always comes out the same. The key is a digest of the seed,
the engine's index and the request id; the hash is that of SplitMix64, a step of which adds a
constant, so that "the state after ``i`` steps" is a product.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

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
