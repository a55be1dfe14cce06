"""Let slices of work in a mock engine have room for few requests."""

from __future__ import annotations

import pytest

from trio_vllm.mock import encoding, scheduling, simulated, token_rows, unlimited
from trio_vllm.mock import engine as engine_module

OF_STEPS = (
    (scheduling, "SCHEDULED_AT_ONCE"),
    (simulated, "SCHEDULED_AT_ONCE"),
    (simulated, "DRAWN_AT_ONCE"),
    (token_rows, "DRAWN_AT_ONCE"),
    (encoding, "PACKED_AT_ONCE"),
    (engine_module, "ENDED_AT_ONCE"),
)
OF_PREEMPTIONS = ((scheduling, "PREEMPTED_AT_ONCE"), (unlimited, "PREEMPTED_AT_ONCE"))


def limit_steps(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let a slice of a step have room for so many."""
    for module, name in OF_STEPS:
        patch.setattr(module, name, size)


def limit_preemptions(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let so many be preempted in a slice."""
    for module, name in OF_PREEMPTIONS:
        patch.setattr(module, name, size)
