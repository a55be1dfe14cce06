"""Engines of one process that run in lockstep.

Real ones agree by an all-reduce that nobody has work any more. These see each other; engines of other
processes they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from ._engine_loop import EngineLoop


@attrs.define
class Lockstep:
    """The engines that end a wave together."""

    loops: set[EngineLoop] = attrs.field(factory=set, init=False)

    def settle(self, now: float) -> None:
        """End the wave if there is one and nobody has work left in it."""
        running = [loop for loop in self.loops if loop.engine.is_in_wave]
        if running and not any(loop.engine.has_unfinished for loop in running):
            for loop in self.loops:
                loop.post(loop.engine.complete_wave(now))
