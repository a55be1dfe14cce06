"""Run work that is done in slices."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def finish(work: Generator[object, None, T]) -> tuple[T, int]:
    """What comes of it, and how many turns others had."""
    turns = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result, turns
        turns += 1
