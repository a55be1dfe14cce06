"""Late interaction: documents are scored by the engine that keeps their query.

A worker caches the embeddings of a query under a key, for so many documents; it dies of a document
whose query it does not have. Mirrors ``vllm/v1/pool/late_interaction.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import attrs

from trio_vllm.protocol import LateInteractionParams


def late_interaction_engine(query_key: str, engine_count: int) -> int:
    """The position, among so many engines, of the one for a query and all its documents."""
    return zlib.crc32(query_key.encode()) % engine_count


@attrs.define
class SentQueries(Mapping[str, int]):
    """Queries by key, each with the number of documents that it is still good for.

    To be given to `RequestLimits` as ``late_interaction_queries``, and told of each request that
    was sent.
    """

    _left: dict[str, int] = attrs.field(factory=dict, init=False)

    def add(self, params: LateInteractionParams) -> None:
        """Note a query that was sent, or a document, which uses it up by one."""
        if params.mode == "cache_query":
            self._left[params.query_key] = params.query_uses or 0
        elif params.query_key in self._left:
            self._left[params.query_key] -= 1
        if self._left.get(params.query_key, 1) < 1:
            del self._left[params.query_key]

    def clear(self) -> None:
        """Forget all, as engines do that were started anew."""
        self._left.clear()

    def __getitem__(self, query_key: str) -> int:
        return self._left[query_key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._left)

    def __len__(self) -> int:
        return len(self._left)
