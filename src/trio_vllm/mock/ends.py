"""`first_stop` and `first_repetition` find where the tokens of a request end it.

Both yield whenever others should have a turn: a request may get a million tokens.

Sources: ``check_stop`` and ``check_sequence_repetition`` in ``vllm/v1/core/sched/utils.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trio_vllm.mock.content import TokenSource
from trio_vllm.protocol import RepetitionDetectionParams

SCAN = 16 * 1024
"""Tokens drawn and looked at without a turn for others: some 3 ms."""
FIRST_SCAN = 256
"""Tokens looked at first in the search for a repetition; then there are more and more."""
COMPARED_AT_ONCE = 1_000_000
"""Pairs of tokens compared without a turn for others: some 10 ms."""
BEGINNING = 1000
"""As many pairs could be compared in the time that NumPy needs to begin."""
PASSES = 10
"""A search for runs goes over all pairs so often."""

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
) -> Generator[None, None, tuple[int, int] | None]:
    """Find the first position from ``start`` on that has one of ``stops``, and which one."""
    wanted = frozenset(stops)
    for first in range(start, request.end, SCAN):
        if first > start:
            yield
        tokens = request.tokens(source, first, min(SCAN, request.end - first))
        if not wanted.isdisjoint(tokens):
            return next(hit for hit in enumerate(tokens, first) if hit[1] in wanted)
    return None


def first_repetition(
    request: HasTokens,
    source: TokenSource,
    params: RepetitionDetectionParams,
    min_tokens: int,
    *,
    first_scan: int = FIRST_SCAN,
    scan: int = SCAN,
) -> Generator[None, None, int | None]:
    """Find how many tokens the request has when it first repeats itself, if it does before its end."""
    if params.min_count < 2:
        return None
    total = request.end - request.emitted
    size = min(first_scan, total)
    tokens = np.empty(0, np.int64)
    while True:  # with each round four times as many, as most repetitions come early
        while (count := len(tokens)) < size:
            if count:
                yield
            more = request.tokens(source, request.emitted + count, min(scan, size - count))
            tokens = np.concatenate([tokens, np.array(more, np.int64)])
        found = yield from _repetition_in(tokens, params, min_tokens)
        # The last token ends the request in any case.
        if found is not None or size >= total:
            return None if found == total else found
        size = min(4 * size, total)


def _repetition_in(
    tokens: Tokens, params: RepetitionDetectionParams, min_tokens: int
) -> Generator[None, None, int | None]:
    count, first, compared = params.min_count, None, 0
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        if size * count > len(tokens):
            break
        if compared > COMPARED_AT_ONCE:
            yield
            compared = 0
        length = size * (count - 1)
        compared += BEGINNING + len(tokens) // length
        if _may_repeat(tokens, size, length):
            compared += PASSES * len(tokens)
            found = _repeated_after(tokens, size, length, min_tokens)
            if found is not None:
                first, tokens = found, tokens[: found - 1]  # what comes later does not matter
    return first


def _may_repeat(tokens: Tokens, size: int, length: int) -> bool:
    """Whether tokens may be those ``size`` before them, ``length`` times in a row.

    Among that many is one of each ``length``.
    """
    places = slice(length - 1, len(tokens) - size, length)
    return bool((tokens[size:][places] == tokens[places]).any())


def _repeated_after(tokens: Tokens, size: int, length: int, min_tokens: int) -> int | None:
    """After how many tokens ``length`` of them in a row have been those ``size`` before them."""
    places = np.arange(len(tokens) - size)
    differs = tokens[size:] != tokens[:-size]
    run = places - np.maximum.accumulate(np.where(differs, places, -1))
    is_repeated = (run >= length) & (places + size + 1 >= min_tokens)
    hits = np.flatnonzero(is_repeated)
    return int(hits[0]) + size + 1 if hits.size else None
