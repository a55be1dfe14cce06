"""`BlockHasher` hashes KV-cache blocks: by their tokens, what else shapes their values, and their prefix.

The hashes equal those of vLLM for the algorithms ``sha256`` and ``sha256_cbor``; sources:
``vllm/v1/core/kv_cache_utils.py`` and ``vllm/utils/hashing.py``. Upstream's other two algorithms need
the ``xxhash`` package.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs

from trio_vllm.values import frozen

DEFAULT_SEED = "vllm-none-hash"
"""What upstream hashes in place of the parent of a first block, if PYTHONHASHSEED is not set."""

ExtraKeys = tuple[tuple[str | int | bytes, ...], ...]
"""What shapes a block besides its tokens: named parts, such as ``("cache_salt", "a")``."""

HashFunction = Callable[[object], bytes]


def encode_cbor(value: object) -> bytes:
    """Canonical CBOR (RFC 8949) of the types that block hashes are made of.

    Raises:
      TypeError: another type.
    """
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
        case bytes():
            return _cbor_head(2, len(value)) + value
        case str():
            text = value.encode()
            return _cbor_head(3, len(text)) + text
        case tuple() | list():
            return _cbor_head(4, len(value)) + b"".join(map(encode_cbor, value))
    raise TypeError(f"no CBOR for {type(value).__name__}")


def _cbor_head(major: int, argument: int) -> bytes:
    """The type of an item and its number, in as few bytes as it takes."""
    kind = major << 5
    if argument < 24:
        return bytes((kind | argument,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * size:
            return bytes((kind | code,)) + argument.to_bytes(size, "big")
    raise TypeError(f"{argument} is beyond 64 bits")


def sha256(value: object) -> bytes:
    """SHA-256 of the pickle, upstream's default."""
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def sha256_cbor(value: object) -> bytes:
    """SHA-256 of the canonical CBOR, the same in every language."""
    return hashlib.sha256(encode_cbor(value)).digest()


HASH_FUNCTIONS: dict[str, HashFunction] = {"sha256": sha256, "sha256_cbor": sha256_cbor}
"""By their names in ``--prefix-caching-hash-algo``."""


@frozen
class MultiModalSpan:
    """Where one multimodal input stands in a prompt, and the hash that identifies it."""

    identifier: str
    offset: int
    length: int


@frozen(kw_only=True)
class CacheScope:
    """What keeps a request's blocks apart from blocks of the same tokens."""

    cache_salt: str | None = None
    lora_name: str | None = None
    lora_path: str = ""
    multimodal: tuple[MultiModalSpan, ...] = ()
    """In the order of their offsets."""
    _offsets: tuple[int, ...] = attrs.field(
        default=attrs.Factory(
            lambda self: tuple(span.offset for span in self.multimodal), takes_self=True
        ),
        init=False,
        eq=False,
        repr=False,
    )
    _reaches: tuple[int, ...] = attrs.field(
        default=attrs.Factory(lambda self: _reaches(self.multimodal), takes_self=True),
        init=False,
        eq=False,
        repr=False,
    )
    """How far each input, or one before it, reaches: this grows, and so can be searched."""

    def extra_keys(self, start: int, end: int) -> ExtraKeys | None:
        """The extra keys of the block of the tokens from ``start`` to ``end``."""
        if self is PLAIN:
            return None
        keys: list[tuple[str | int | bytes, ...]] = []
        if self.lora_name is not None:
            keys.append(("lora", self.lora_name, self.lora_path))
        near = slice(bisect_right(self._reaches, start), bisect_left(self._offsets, end))
        keys += [
            ("mm", span.identifier, span.offset - start)
            for span in self.multimodal[near]
            if start < span.offset + span.length
        ]
        if self.cache_salt and start == 0:
            keys.append(("cache_salt", self.cache_salt))
        return tuple(keys) or None


def _reaches(spans: Sequence[MultiModalSpan]) -> tuple[int, ...]:
    return tuple(accumulate((span.offset + span.length for span in spans), max))


PLAIN = CacheScope()
"""Nothing but tokens."""


class BlockHasher:
    """Hashes blocks in a chain: each hash stands for the block and all before it."""

    def __init__(self, algorithm: str = "sha256", seed: str = DEFAULT_SEED) -> None:
        self._hash = HASH_FUNCTIONS[algorithm]
        self._root = self._hash(seed)

    def hash_block(
        self, parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None
    ) -> bytes:
        """The hash of a full block after the block with the hash ``parent``."""
        return self._hash((self._root if parent is None else parent, tuple(token_ids), extra_keys))

    def extend(
        self, hashes: list[bytes], token_ids: Sequence[int], block_size: int, scope: CacheScope
    ) -> None:
        """Append the hashes of the next full blocks, which have these tokens, to those before them."""
        parent, extra_keys = hashes[-1] if hashes else None, None
        start = len(hashes) * block_size
        for at in range(0, len(token_ids), block_size):
            if scope is not PLAIN:
                extra_keys = scope.extra_keys(start + at, start + at + block_size)
            parent = self.hash_block(parent, token_ids[at : at + block_size], extra_keys)
            hashes.append(parent)


class BlockKeys(BlockHasher):
    """Hashes blocks for a cache that tells nobody the hashes, in less time."""

    def hash_block(
        self, parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None
    ) -> bytes:
        """A key that is different for another block, or the same one after others."""
        ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        known = (parent or self._root) + ids.tobytes()
        if extra_keys is not None:
            known += repr(extra_keys).encode()
        return _pack_key(hash(known))

    def extend(
        self, hashes: list[bytes], token_ids: Sequence[int], block_size: int, scope: CacheScope
    ) -> None:
        """Append the keys of the next full blocks, which have these tokens, to those before them."""
        if scope is not PLAIN or not isinstance(token_ids, array):
            super().extend(hashes, token_ids, block_size, scope)
            return
        parent = hashes[-1] if hashes else self._root
        data, width = token_ids.tobytes(), block_size * token_ids.itemsize
        for at in range(0, len(data), width):
            parent = _pack_key(hash(parent + data[at : at + width]))
            hashes.append(parent)


_pack_key = struct.Struct(">q").pack


def event_hash(block_hash: bytes) -> int:
    """The 64-bit form in which KV-cache events name a block, unless upstream is told otherwise."""
    return int.from_bytes(block_hash[-8:], "big")


def event_extra_keys(extra_keys: ExtraKeys | None) -> tuple[object, ...] | None:
    """Extra keys as KV-cache events show them: without their names."""
    if extra_keys is None:
        return None
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in extra_keys)
