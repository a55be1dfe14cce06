"""Which engine scores documents, and how many a query is good for."""

from __future__ import annotations

import pytest

from trio_vllm.client.late_interaction import SentQueries, late_interaction_engine
from trio_vllm.protocol import LateInteractionParams


@pytest.mark.parametrize(
    ("query_key", "engine_count", "engine"),
    [
        ("q1", 1, 0),
        ("q1", 2, 0),
        ("q2", 2, 0),
        ("q3", 2, 0),
        ("\u00fc", 7, 4),
        ("query", 3, 2),
        ("other", 3, 0),
        ("a", 3, 0),
    ],
)
def test_all_of_a_query_go_to_one_engine(query_key: str, engine_count: int, engine: int) -> None:
    assert late_interaction_engine(query_key, engine_count) == engine


def query(uses: int, key: str = "q") -> LateInteractionParams:
    return LateInteractionParams(mode="cache_query", query_key=key, query_uses=uses)


def document(key: str = "q") -> LateInteractionParams:
    return LateInteractionParams(mode="score_doc", query_key=key)


def test_query_is_good_for_so_many_documents() -> None:
    queries = SentQueries()

    queries.add(query(2))
    assert dict(queries) == {"q": 2}
    queries.add(document())
    assert dict(queries) == {"q": 1}
    queries.add(document())
    assert "q" not in queries
    assert len(queries) == 0


def test_document_of_no_query_changes_nothing() -> None:
    queries = SentQueries()

    queries.add(document("other"))

    assert dict(queries) == {}


def test_engine_that_starts_anew_has_no_queries() -> None:
    queries = SentQueries()
    queries.add(query(2))

    queries.clear()

    assert dict(queries) == {}
