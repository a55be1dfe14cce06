"""`first_stop` and `first_repetition` find where the tokens of a request end it.

Sources: ``check_stop`` and ``check_sequence_repetition`` in ``vllm/v1/core/sched/utils.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trio_vllm.mock.content import TokenSource
from trio_vllm.protocol import RepetitionDetectionParams

_SCAN = 4096
"""Tokens looked at together in the search for a stop token."""
_FIRST_SCAN = 256
"""Tokens looked at first in the search for a repetition; then there are more and more."""

Tokens = npt.NDArray[np.int64]


class HasTokens(Protocol):
    """A request, as far as it matters here."""

    emitted: int
    end: int

    def tokens(self, source: TokenSource, first: int, count: int) -> list[int]:
        """Its tokens from position ``first`` on."""
        ...


def first_stop(
    request: HasTokens, source: TokenSource, stops: Collection[int], start: int
) -> tuple[int, int] | None:
    """The first position from ``start`` on that has one of ``stops``, and which one."""
    wanted = frozenset(stops)
    for first in range(start, request.end, _SCAN):
        tokens = request.tokens(source, first, min(_SCAN, request.end - first))
        if not wanted.isdisjoint(tokens):
            return next(hit for hit in enumerate(tokens, first) if hit[1] in wanted)
    return None


def first_repetition(
    request: HasTokens, source: TokenSource, params: RepetitionDetectionParams, min_tokens: int
) -> int | None:
    """How many tokens the request has when it first repeats itself, if it does before its end."""
    total = request.end - request.emitted
    size = min(_FIRST_SCAN, total)
    while True:
        tokens = np.array(request.tokens(source, request.emitted, size), np.int64)
        found = _repetition_in(tokens, params, min_tokens)
        # The last token ends the request in any case.
        if found is not None or size >= total:
            return None if found == total else found
        size = min(4 * size, total)


def _repetition_in(
    tokens: Tokens, params: RepetitionDetectionParams, min_tokens: int
) -> int | None:
    if params.min_count < 2:
        return None
    longest = min(params.max_pattern_size, len(tokens) // params.min_count)
    found = [
        count
        for size in range(max(1, params.min_pattern_size), longest + 1)
        if (count := _repeated_after(tokens, size, params.min_count, min_tokens)) is not None
    ]
    return min(found, default=None)


def _repeated_after(tokens: Tokens, size: int, count: int, min_tokens: int) -> int | None:
    """After how many tokens a pattern of one size stands there ``count`` times in a row."""
    places = np.arange(len(tokens) - size)
    differs = tokens[size:] != tokens[:-size]
    run = places - np.maximum.accumulate(np.where(differs, places, -1))
    is_repeated = (run >= size * (count - 1)) & (places + size + 1 >= min_tokens)
    hits = np.flatnonzero(is_repeated)
    return int(hits[0]) + size + 1 if hits.size else None
