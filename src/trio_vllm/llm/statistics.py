"""`LlmStatistics`: what is known of the engines and of the requests at them, in one object."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """One engine; None where it has sent no statistics that can be read."""

    is_alive: bool
    """Whether it takes requests."""
    in_flight: int
    """This client's engine requests that have not ended there."""
    running: int | None = None
    waiting: int | None = None
    """Requests that do not run, whatever they wait for; other clients' too."""
    kv_cache_usage: float | None = None
    """0 to 1."""


@attrs.frozen(kw_only=True)
class LlmStatistics:
    """All engines by index, the dead too, and the requests of this `Llm`'s callers."""

    engines: Mapping[int, EngineStatistics]
    in_flight: int
    """Callers' requests that have not ended; each may be several engine requests."""
