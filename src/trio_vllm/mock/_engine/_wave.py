"""An engine's part in data-parallel waves.

Mirrors ``DPEngineCoreProc`` in upstream ``vllm/v1/engine/core.py`` (0.33): an idle engine that gets
a request tells the coordinator, which wakes the others; when all are out of work, the wave is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from trio_vllm.protocol import StartDpWave


@attrs.define
class Wave:
    """The wave that an engine is in, or waits for."""

    engine_index: int
    current: int = 0
    is_running: bool = False

    def request_came(self, wave: int, *, paused: bool) -> int | None:
        """A request came from a frontend that believes in ``wave``; the wave to announce, if any."""
        self.current = max(self.current, wave)
        if self.is_running or paused:
            return None
        self.is_running = True
        return self.current

    def start(self, notice: StartDpWave) -> None:
        """The coordinator starts a wave."""
        if notice.exclude_engine_index != self.engine_index and notice.wave >= self.current:
            self.current = notice.wave
            self.is_running = True

    def complete(self) -> int:
        """All engines are out of work; the wave that is over."""
        self.is_running = False
        self.current += 1
        return self.current - 1
