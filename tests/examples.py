"""How many examples a property test tries, by the profile of hypothesis."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""The examples of a property test that says nothing about it, in the profile "thorough"."""


def examples(count: int) -> settings:
    """So many in the profile "thorough", and as much fewer as its profile wants in another."""
    return settings(max_examples=count * settings().max_examples // USUAL)
