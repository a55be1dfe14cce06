"""`EventPublisher` encodes KV-cache events: which blocks an engine caches and evicts.

Sans IO: `EventPublisher` makes the messages of the PUB socket and answers those of the replay socket.
Source: ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from trio_vllm.values import define

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence number: the end of an answer of the replay socket."""

BlockHash: TypeAlias = int | bytes
ExtraKeys: TypeAlias = tuple[object, ...] | None


@define(kw_only=True)
class BlockStored:
    """Blocks of one request that follow each other came into the prefix cache."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[ExtraKeys]
    session_id: str | None = None

    def to_wire(self) -> dict[str, object]:
        """The map that is published."""
        wire: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": self.block_hashes,
            "parent_block_hash": self.parent_block_hash,
            "token_ids": self.token_ids,
            "block_size": self.block_size,
            "lora_id": self.lora_id,
            "medium": "GPU",
            "lora_name": self.lora_name,
            "extra_keys": self.extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if self.session_id is not None:
            wire["session_id"] = self.session_id
        return wire


@define
class BlockRemoved:
    """A block was evicted from the prefix cache."""

    block_hash: BlockHash

    def to_wire(self) -> dict[str, object]:
        """The map that is published."""
        return {
            "type": "BlockRemoved",
            "block_hashes": [self.block_hash],
            "medium": "GPU",
            "group_idx": 0,
        }


@define
class AllBlocksCleared:
    """The prefix cache was reset."""

    def to_wire(self) -> dict[str, object]:
        """The map that is published."""
        return {"type": "AllBlocksCleared"}


KvCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventPublisher:
    """The messages of one engine's event socket, and of its replay socket.

    A batch of events is published after each step that had any. The newest ``buffer_steps`` of them
    are kept for subscribers who missed some.

    Args:
      pack: Encodes plain values as MessagePack.
      data_parallel_rank: Of the engine; it is part of every batch.
    """

    def __init__(
        self,
        pack: Callable[[object], bytes],
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_steps: int = 10_000,
    ) -> None:
        self._pack = pack
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next = 0

    def publish(self, events: Sequence[KvCacheEvent], now: float) -> list[bytes]:
        """The frames of one batch; ``now`` is in seconds since 1970."""
        number = self._next
        self._next += 1
        payload = self._pack([now, [event.to_wire() for event in events], self._rank])
        self._sent.append((number, payload))
        return [self._topic, number.to_bytes(8, "big"), payload]

    def replay(self, request: Sequence[bytes]) -> Iterator[list[bytes]]:
        """The answers to a request for the batches from a sequence number on.

        Args:
          request: Frames as a ROUTER receives them: identity, empty, 8 bytes of sequence number.
            Upstream does not answer a request with another number of frames.
        """
        if len(request) != 3:
            return
        identity, _, start = request
        first = int.from_bytes(start, "big")
        for number, payload in self._sent:
            if number >= first:
                yield [identity, b"", self._topic, number.to_bytes(8, "big"), payload]
        yield [identity, b"", b"", END_OF_REPLAY, b""]


def offset_port(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of the engine of this rank: each has its own port, or its own inproc name.

    Raises:
      ValueError: an address that is neither TCP nor inproc, which upstream cannot tell apart by rank.
    """
    if not endpoint or data_parallel_rank == 0:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{data_parallel_rank}"
    if "tcp" not in endpoint:
        raise ValueError(f"{endpoint!r} is neither a tcp nor an inproc endpoint")
    base, _, port = endpoint.rpartition(":")
    return endpoint if int(port) == 0 else f"{base}:{int(port) + data_parallel_rank}"
