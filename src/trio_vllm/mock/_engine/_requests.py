"""One request inside a mock engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_vllm.protocol import Array, EventType, FinishReason, PoolingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._shelf import Shelf


@attrs.frozen(kw_only=True)
class Extras:
    """What a request wants besides tokens; whoever has some takes the plain path."""

    logprobs: int | None = None
    """Candidates per token besides the sampled one; -1 is the whole vocabulary."""
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Array | None = None
    prompt_token_ids: Sequence[int] = ()
    """Kept only where prompt log probabilities are due."""
    masked_token_ids: frozenset[int] = frozenset()
    """Not to be drawn before position ``unmasked_from``."""
    unmasked_from: int = 0
    pooling: PoolingParams | None = None
    trace_headers: dict[str, str] | None = None


@attrs.define(eq=False, kw_only=True)
class Request:
    """What an engine knows of a request that has not finished."""

    request_id: str
    client_index: int
    key: int
    prompt_len: int
    end: int
    """How many tokens it gets in all."""
    finish_reason: FinishReason = FinishReason.LENGTH
    """Why it will end there."""
    stop_reason: int | None = None
    extras: Extras | None = None

    emitted: int = 0
    """Tokens that were sent before it joined the batch it is in, or in all on the plain path."""
    events: list[tuple[EventType, float]] | None = None
    """What happened to it since its last output that told so."""
    is_prefilled: bool = False
    """Whether an output has told of its prefill."""

    # Its place on the fast path.
    shelf: Shelf | None = None
    slot: int = 0
    joined_step: int = 0
    final_step: int = 0

    @property
    def is_pooling(self) -> bool:
        """Whether it wants a vector instead of tokens."""
        return self.extras is not None and self.extras.pooling is not None

    def note(self, event: EventType, now: float) -> None:
        """Something happened that the next output shall tell."""
        self.events = [*(self.events or ()), (event, now)]
