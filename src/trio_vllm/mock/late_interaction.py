"""`LateQueries`: the queries that an engine keeps for documents to be scored by late interaction.

Mirrors ``vllm/v1/pool/late_interaction_runner.py`` upstream: a query is kept for as many documents as it
says, and what is answered is a number, not the vectors.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from trio_vllm.mock.content import Pooler
from trio_vllm.protocol import EngineCoreRequest, LateInteractionParams, PoolingParams
from trio_vllm.values import define

Numbers = npt.NDArray[np.float32]


@define
class LateQuery:
    """A query: its vectors follow from its key and its length."""

    key: int
    prompt_len: int
    uses: int
    """Documents that may still ask for it."""

    def score(self, document: Numbers, pooler: Pooler, params: PoolingParams) -> Numbers:
        """The sum, over the query's tokens, of their likeness to the most alike of the document's."""
        vectors = pooler.empty(params, self.prompt_len)
        pooler.fill(vectors, self.key, params, slice(0, self.prompt_len))
        return np.array((vectors @ document.T).max(axis=1).sum(), np.float32)


def late_params(wire: EngineCoreRequest, mode: str) -> LateInteractionParams | None:
    """What a request says of late interaction, if it has this part in it."""
    pooling = wire.pooling_params
    late = pooling.late_interaction_params if pooling is not None else None
    return late if late is not None and late.mode == mode else None


@define
class LateQueries:
    """The queries of one engine, by their keys."""

    _queries: dict[str, LateQuery] = attrs.field(factory=dict, init=False)

    def __contains__(self, query_key: str) -> bool:
        return query_key in self._queries

    def clear(self) -> None:
        """Forget all, as workers do when their multimodal or encoder cache is reset."""
        self._queries.clear()

    def fault_of(self, wire: EngineCoreRequest) -> str | None:
        """Why a request cannot be scored, in vLLM's words, if so."""
        late = late_params(wire, "score_doc")
        if late is None or late.query_key in self._queries:
            return None
        return (
            f"late-interaction query cache miss for key {late.query_key!r}. Ensure query requests are"
            " executed before their paired document requests."
        )

    def take(self, wire: EngineCoreRequest, key: int, prompt_len: int) -> LateQuery | None:
        """Keep a query; or the query of a document, which may be the last that asks for it."""
        if (late := late_params(wire, "cache_query")) is not None:
            self._queries[late.query_key] = LateQuery(key, prompt_len, late.query_uses or 1)
            return None
        if (late := late_params(wire, "score_doc")) is None:
            return None
        query = self._queries[late.query_key]
        query.uses -= 1
        if query.uses < 1:
            del self._queries[late.query_key]
        return query
