"""`EngineStatuses`: what the mock engines of a process do at present, and what each has done so far."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trio_vllm.mock.engine import MockEngine
from trio_vllm.mock.events import Summary
from trio_vllm.values import define, frozen


@frozen(kw_only=True)
class EngineStatus:
    """One engine at one moment."""

    engine_index: int
    is_joined: bool = False
    """Whether it serves a frontend."""
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    """From 0 to 1."""
    summary: Summary = attrs.field(factory=Summary)
    """Counts of all frontends that it has served."""


@define
class EngineStatuses:
    """The engines of this process, and what was last heard of those of others."""

    _engines: dict[int, MockEngine] = attrs.field(factory=dict, init=False)
    """Those that serve a frontend."""
    _past: dict[int, Summary] = attrs.field(factory=dict, init=False)
    """By engine index, what those have done whose frontend has gone."""
    _elsewhere: dict[int, EngineStatus] = attrs.field(factory=dict, init=False)

    def expect(self, engine_indices: Iterable[int]) -> None:
        """Note engines that are to come."""
        self._past |= {index: Summary() for index in engine_indices}

    def join(self, engine: MockEngine) -> None:
        """An engine has joined a frontend."""
        self._engines[engine.engine_index] = engine

    def leave(self, engine: MockEngine) -> None:
        """It serves that frontend no more."""
        index = engine.engine_index
        del self._engines[index]
        self._past[index] = self._past.get(index, Summary()) + engine.summary

    def take(self, states: Iterable[EngineStatus]) -> None:
        """Note what another process tells of its engines."""
        self._elsewhere |= {state.engine_index: state for state in states}

    def read(self) -> list[EngineStatus]:
        """All of them, by their index."""
        ours = {index: self._state_of(index) for index in self._past}
        return [state for _, state in sorted((self._elsewhere | ours).items())]

    def _state_of(self, index: int) -> EngineStatus:
        past, engine = self._past[index], self._engines.get(index)
        if engine is None:
            return EngineStatus(engine_index=index, summary=past)
        running, waiting = engine.counts
        return EngineStatus(
            engine_index=index,
            is_joined=True,
            running=running,
            waiting=waiting,
            kv_cache_usage=engine.kv_cache_usage,
            summary=past + engine.summary,
        )

    @property
    def total(self) -> Summary:
        """What all engines of this process have done together."""
        return sum((self._state_of(index).summary for index in self._past), Summary())
