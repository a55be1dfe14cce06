"""Late interaction sends documents to the engine that keeps their query.

A worker caches the embeddings of a query under a key, for so many documents; it dies of a document
whose query it does not have. Mirrors ``vllm/v1/pool/late_interaction.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import attrs

from trio_vllm.protocol import EngineCoreRequest, LateInteractionParams
from trio_vllm.values import define, frozen


def late_interaction_of(request: EngineCoreRequest) -> LateInteractionParams | None:
    """What a request says of late interaction."""
    pooling = request.pooling_params
    return None if pooling is None else pooling.late_interaction_params


def late_interaction_engine(query_key: str, engine_count: int) -> int:
    """The position, among so many engines, of the one for a query and all its documents."""
    return zlib.crc32(query_key.encode()) % engine_count


@frozen
class _Query:
    engine_index: int
    uses: int


@define
class SentQueries(Mapping[str, int]):
    """Queries by key, each with the number of documents that it is still good for.

    To be given to `RequestLimits` as ``late_interaction_queries``, and told of each query that was
    answered and each document that was sent.
    """

    _queries: dict[str, _Query] = attrs.field(factory=dict, init=False)

    def add(self, params: LateInteractionParams, engine_index: int = 0) -> None:
        """Note a query that an engine keeps, or a document, which uses it up by one."""
        key = params.query_key
        if params.mode == "cache_query":
            self._queries[key] = _Query(engine_index, params.query_uses or 0)
        elif (query := self._queries.get(key)) is not None:
            self._queries[key] = attrs.evolve(query, uses=query.uses - 1)
        if key in self._queries and self._queries[key].uses < 1:
            del self._queries[key]

    def engine_of(self, query_key: str) -> int | None:
        """The index of the engine that keeps a query; None if none does."""
        query = self._queries.get(query_key)
        return None if query is None else query.engine_index

    def forget_engine(self, engine_index: int) -> None:
        """Forget what a lost engine kept."""
        kept = {k: q for k, q in self._queries.items() if q.engine_index != engine_index}
        self._queries = kept

    def clear(self) -> None:
        """Forget all, as engines do that were started anew."""
        self._queries.clear()

    def __getitem__(self, query_key: str) -> int:
        return self._queries[query_key].uses

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)
