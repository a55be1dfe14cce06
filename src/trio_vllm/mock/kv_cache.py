"""`KvCache` gives blocks to requests, and finds cached prefixes: vLLM's ``KVCacheManager``.

A block that is full gets the hash of its tokens and of all before them, and can from then on be shared.
Blocks whose requests are over stay cached until the pool hands them out again: first those without
contents, then the others in the order in which they were freed, the tail of a request before its head.

Sources: ``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py`` and ``single_type_kv_cache_manager.py``
with one group of full-attention layers.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, MutableSequence, Sequence
from itertools import islice

import attrs

from trio_vllm.mock.block_hashes import (
    PLAIN,
    BlockHasher,
    CacheScope,
    event_extra_keys,
    event_hash,
)
from trio_vllm.mock.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvCacheEvent,
)
from trio_vllm.protocol import PrefixCacheStats
from trio_vllm.values import define

BLOCKS_AT_ONCE = 64
"""Blocks that are hashed without a turn for others: some 0.3 ms."""

_HASHED_AHEAD = 8
"""Blocks of an output that are hashed together, as far as they are drawn."""


class FreeBlocks:
    """The free blocks of a pool, in the order in which they are handed out.

    Block 0, the null block, is never free. A block is in one of three parts: blocks that were freed
    without contents, newest first; blocks that were never used, by number; blocks that may still be
    found by their hash, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._without_contents: list[int] = []
        self._unused = iter(range(1, num_blocks))
        self._unused_count = num_blocks - 1
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._without_contents) + self._unused_count + len(self._cached)

    def pop(self) -> int:
        """Take the block to be used next."""
        if self._without_contents:
            return self._without_contents.pop()
        if self._unused_count:
            self._unused_count -= 1
            return next(self._unused)
        return self._cached.popitem(last=False)[0]

    def pop_many(self, count: int) -> list[int]:
        """Take so many blocks, in the order in which they are to be used; there must be enough."""
        if self._without_contents or 0 < self._unused_count < count:
            return [self.pop() for _ in range(count)]
        if self._unused_count:
            self._unused_count -= count
            return [*islice(self._unused, count)]
        popitem = self._cached.popitem
        return [popitem(last=False)[0] for _ in range(count)]

    def remove(self, block: int) -> None:
        """Take a block that was found by its hash."""
        del self._cached[block]

    def put_first(self, blocks: Sequence[int]) -> None:
        """Free blocks without contents; the first of them is used first."""
        self._without_contents.extend(reversed(blocks))

    def put_last(self, blocks: Iterable[int]) -> None:
        """Free cached blocks; the first of them is evicted first."""
        self._cached.update(dict.fromkeys(blocks))


class CachedBlocks:
    """Full blocks by hash. Several blocks may hold the same; the one cached first is used."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}  # apart, since there are few
        self.find: Callable[[bytes], int | None] = self._first.get
        """A block with these contents."""
        self.setdefault: Callable[[bytes, int], int] = self._first.setdefault
        """Make a block known if there is none with these contents; the first one that has them."""

    def add(self, block_hash: bytes, block: int) -> None:
        """Make a block known."""
        if self._first.setdefault(block_hash, block) != block:
            self._others.setdefault(block_hash, []).append(block)

    def remove(self, block_hash: bytes, block: int) -> None:
        """Forget a block."""
        others = self._others.get(block_hash)
        if others is None:
            del self._first[block_hash]
            return
        if self._first[block_hash] == block:
            self._first[block_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others[block_hash]


@define(eq=False)
class BlockTable:
    """The blocks of one request, and the tokens in them."""

    token_ids: MutableSequence[int]
    """Prompt and output; must hold the tokens of a block by the time the block is full."""
    scope: CacheScope = PLAIN
    lora_id: int | None = None
    session_id: str | None = None
    skip_reading_prefix_cache: bool = False
    blocks: list[int] = attrs.field(factory=list, init=False)
    num_cached: int = attrs.field(default=0, init=False)
    """How many of the blocks are full and known by their hash, from the first on."""
    hashes: list[bytes] = attrs.field(factory=list, init=False)


def count_query(
    statistics: PrefixCacheStats, num_tokens: int, num_hits: int, *, preempted: bool
) -> None:
    """Count that so many tokens of a request were looked for in a cache, and so many found."""
    if preempted:
        statistics.preempted_requests += 1
        statistics.preempted_queries += num_tokens
        statistics.preempted_hits += num_hits
    else:
        statistics.requests += 1
        statistics.queries += num_tokens
        statistics.hits += num_hits


class KvCache:
    """A pool of blocks with a prefix cache.

    Args:
      num_blocks: Including the null block, which nobody gets.
      block_size: Tokens in a block.
      enable_prefix_caching: Whether full blocks are kept and found again.
      enable_events: Whether to note what is cached and evicted.
      int_event_hashes: Whether events name blocks by 64 bits and not by the whole hash.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        enable_events: bool = False,
        int_event_hashes: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._usable = num_blocks - 1
        self._hasher = hasher or BlockHasher()
        self._free = FreeBlocks(num_blocks)
        self._cached = CachedBlocks()
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self.enable_events = enable_events
        self._int_event_hashes = int_event_hashes
        self._events: list[KvCacheEvent] = []
        self._statistics = PrefixCacheStats()
        self.num_changes = 0
        """How many blocks were cached or evicted so far."""

    @property
    def free_count(self) -> int:
        """Blocks that can be had, cached ones among them."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The part of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.free_count / self._usable if self._usable else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def reads_cache(self, table: BlockTable) -> bool:
        """Whether the request may use blocks computed for others."""
        return self.enable_prefix_caching and not table.skip_reading_prefix_cache

    def find_cached(self, table: BlockTable, num_tokens: int) -> list[int]:
        """The cached blocks that a request of so many tokens can start with.

        The last token is computed in any case, since its logits are needed, and so its whole block.
        """
        if not self.reads_cache(table):
            return []
        count = (num_tokens - 1) // self.block_size
        found: list[int] = []
        hashes, find = table.hashes, self._cached.find
        for index in range(count):
            if index == len(hashes):  # not before: a long prompt takes long to hash
                self._compute_hashes(table, index + 1)
            block = find(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def count_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are free: to use them takes them out of the pool."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def adopt(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Begin a table with cached blocks."""
        references, take = self._references, self._free.remove
        for block in blocks:
            if not references[block]:
                take(block)
            references[block] += 1
        table.blocks.extend(blocks)
        table.num_cached = len(blocks)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Give a table blocks for so many tokens in all; there must be enough."""
        for _ in range(-(-num_tokens // self.block_size) - len(table.blocks)):
            self.add_block(table)

    def add_block(self, table: BlockTable) -> None:
        """Give a table another block; there must be one."""
        block = self._free.pop()
        if self._hashes[block] is not None:
            self._evict(block)
        self._references[block] = 1
        table.blocks.append(block)

    def add_block_to_each(self, tables: Sequence[BlockTable]) -> None:
        """Give each of these tables another block, one after the other; there must be enough."""
        references, hashes = self._references, self._hashes
        blocks = self._free.pop_many(len(tables))
        for table, block in zip(tables, blocks, strict=True):
            references[block] = 1
            table.blocks.append(block)
        for block in blocks:
            if hashes[block] is not None:
                self._evict(block)

    def cache_block_of_each(self, tables: Sequence[BlockTable]) -> None:
        """Make the first block of each of these tables known that is not known yet; it must be full."""
        if not self.enable_prefix_caching:
            return
        self.num_changes += len(tables)
        hashes, setdefault = self._hashes, self._cached.setdefault
        for table in tables:
            known = table.num_cached
            if known == len(table.hashes):
                self._hash_ahead(table)
            block, block_hash = table.blocks[known], table.hashes[known]
            hashes[block] = block_hash
            if setdefault(block_hash, block) != block:
                self._cached.add(block_hash, block)
            table.num_cached = known + 1
            if self.enable_events:
                self._events.append(self._stored_event(table, known, known + 1))

    def cache_full_blocks(self, table: BlockTable, num_tokens: int) -> None:
        """Make blocks known that are full once so many tokens are computed."""
        full = num_tokens // self.block_size
        known = table.num_cached
        if not self.enable_prefix_caching or full <= known:
            return
        if len(table.hashes) < full:
            self._compute_hashes(table, full)
        for index in range(known, full):
            block, block_hash = table.blocks[index], table.hashes[index]
            self._hashes[block] = block_hash
            self._cached.add(block_hash, block)
        table.num_cached = full
        self.num_changes += full - known
        if self.enable_events:
            self._events.append(self._stored_event(table, known, full))

    def free(self, table: BlockTable) -> None:
        """Give back all blocks of a table, the last one first."""
        without_contents: list[int] = []
        cached: list[int] = []
        references, hashes = self._references, self._hashes
        for block in reversed(table.blocks):
            references[block] = left = references[block] - 1
            if not left:
                (without_contents if hashes[block] is None else cached).append(block)
        self._free.put_first(without_contents)
        self._free.put_last(cached)
        table.blocks.clear()
        table.num_cached = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, unless some request holds blocks; whether that was done."""
        if self.free_count < self._usable:
            return False
        self._cached = CachedBlocks()
        self._hashes = [None] * len(self._hashes)
        self._statistics.reset = True
        if self.enable_events:
            self._events.append(AllBlocksCleared())
        return True

    def record_query(self, num_tokens: int, num_hits: int, *, preempted: bool) -> None:
        """Count that a request of so many tokens was scheduled, with so many found in the cache."""
        count_query(self._statistics, num_tokens, num_hits, preempted=preempted)

    def take_statistics(self) -> PrefixCacheStats:
        """What happened since this was last called."""
        statistics, self._statistics = self._statistics, PrefixCacheStats()
        return statistics

    def take_events(self) -> list[KvCacheEvent]:
        """The events since this was last called."""
        events, self._events = self._events, []
        return events

    def hash_blocks(
        self, token_ids: Sequence[int], scope: CacheScope
    ) -> Generator[None, None, list[bytes]]:
        """Compute the hashes of all full blocks of a prompt; yields whenever others should have a turn."""
        table = BlockTable(array("I", token_ids), scope)
        full = len(token_ids) // self.block_size if self.enable_prefix_caching else 0
        for count in range(BLOCKS_AT_ONCE, full, BLOCKS_AT_ONCE):
            self._compute_hashes(table, count)
            yield
        self._compute_hashes(table, full)
        return table.hashes

    def _hash_ahead(self, table: BlockTable) -> None:
        """Compute the hash of the next full block, and of some after it whose tokens are known."""
        full = min(len(table.token_ids) // self.block_size, len(table.hashes) + _HASHED_AHEAD)
        self._compute_hashes(table, full)

    def _compute_hashes(self, table: BlockTable, count: int) -> None:
        """Compute the hashes of the first full blocks of a request, each once."""
        hashes, size = table.hashes, self.block_size
        self._hasher.extend(
            hashes, table.token_ids[len(hashes) * size : count * size], size, table.scope
        )

    def _evict(self, block: int) -> None:
        """Forget the contents of a cached block."""
        self.num_changes += 1
        block_hash, self._hashes[block] = self._hashes[block], None
        assert block_hash is not None
        self._cached.remove(block_hash, block)
        if self.enable_events:
            self._events.append(BlockRemoved(self._event_hash(block_hash)))

    def _event_hash(self, block_hash: bytes) -> int | bytes:
        return event_hash(block_hash) if self._int_event_hashes else block_hash

    def _stored_event(self, table: BlockTable, start: int, end: int) -> BlockStored:
        size = self.block_size
        return BlockStored(
            block_hashes=[self._event_hash(block_hash) for block_hash in table.hashes[start:end]],
            parent_block_hash=self._event_hash(table.hashes[start - 1]) if start else None,
            token_ids=list(table.token_ids[start * size : end * size]),
            block_size=size,
            lora_id=table.lora_id,
            lora_name=table.scope.lora_name,
            extra_keys=[
                event_extra_keys(table.scope.extra_keys(first * size, (first + 1) * size))
                for first in range(start, end)
            ],
            session_id=table.session_id,
        )
