"""Pooling parameters: what to compute from a prompt instead of a completion.

Mirrors upstream ``vllm/pooling_params.py``; 10 elements in 0.32, 11 from 0.33.
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm.protocol._containers import ANY_MAP, TOKEN_IDS, optional
from trio_vllm.protocol._forms import BOOL, I32, STR, U32, Form, integer, one_of, read_write
from trio_vllm.protocol._structs import array_struct

POOLING_TASKS = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
    "plugin",
    "embed&token_classify",
)
"""What there is; which of them a model supports, `get_supported_tasks` of its engine tells."""


@attrs.define(kw_only=True)
class LateInteractionParams:
    """Which role a pooling request has in late-interaction scoring."""

    mode: str
    """``cache_query`` or ``score_doc``."""
    query_key: str
    query_uses: int | None = None


@attrs.define(kw_only=True)
class LateChunkingParams:
    """Split the pooled sequence into chunks of this many tokens (0.33)."""

    chunk_size: int


@attrs.define(kw_only=True)
class PoolingParams:
    """How to pool one request; ``task`` must be one that the model supports, or the engine dies."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    """One of `POOLING_TASKS`."""
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: int = 2
    """Final only; an engine goes deaf at any other."""
    late_chunking_params: LateChunkingParams | None = None


_COUNT = read_write(U32, integer(1, 2**32 - 1, "at least 1"))

POOLING_PARAMS: Form[PoolingParams] = array_struct(
    PoolingParams,
    0,
    {
        "use_activation": optional(BOOL),
        "dimensions": optional(_COUNT),
        "step_tag_id": optional(I32),
        "returned_token_ids": optional(TOKEN_IDS),
        "task": optional(one_of(*POOLING_TASKS)),
        "requires_token_ids": BOOL,
        "skip_reading_prefix_cache": optional(BOOL),
        "late_interaction_params": optional(
            array_struct(
                LateInteractionParams,
                2,
                {
                    "mode": one_of("cache_query", "score_doc"),
                    "query_key": STR,
                    "query_uses": optional(U32),
                },
            )
        ),
        "extra_kwargs": optional(ANY_MAP),
        "output_kind": read_write(I32, integer(2, 2, "2 (final only)")),
        "late_chunking_params": optional(
            array_struct(LateChunkingParams, 1, {"chunk_size": _COUNT})
        ),
    },
)
