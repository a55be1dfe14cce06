"""The utility calls under way: who has been asked, who has answered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import attrs
import trio

from trio_vllm._errors import EngineCoreError, UtilityCallFailedError, fresh
from trio_vllm.protocol import UtilityCallOutput


@attrs.define
class UtilityCall:
    """One method, asked of several engines."""

    call_id: int
    method: str
    missing: set[int]
    """Engines that have neither answered nor died."""
    results: dict[int, Any] = attrs.field(factory=dict)
    failures: dict[int, str] = attrs.field(factory=dict)
    error: EngineCoreError | None = None
    """The first reason, of ours, why an engine will not answer."""
    given_up: EngineCoreError | None = None
    """Why no engine will answer any more."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """Set when no engine is missing any more."""

    def outcome(self) -> dict[int, Any]:
        """The results by engine index, or raises for the failures; once it is settled."""
        if not self.failures:
            return dict(sorted(self.results.items()))
        if self.given_up is not None:
            raise fresh(self.given_up)
        if self.error is not None and not self.results and len(self.failures) == 1:
            raise fresh(self.error)
        raise UtilityCallFailedError(
            self.method, self.call_id, dict(sorted(self.failures.items())), sorted(self.results)
        ) from self.error

    def settle(self, engine_index: int) -> None:
        """Wait for this engine no longer."""
        self.missing.discard(engine_index)
        if not self.missing:
            self.settled.set()


class UtilityCalls:
    """The table of calls. An answer to a call that is not in it is dropped."""

    def __init__(self) -> None:
        self._calls: dict[int, UtilityCall] = {}
        self._call_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, method: str, engine_indices: Iterable[int]) -> UtilityCall:
        """Take a new call in."""
        call = UtilityCall(next(self._call_ids), method, set(engine_indices))
        self._calls[call.call_id] = call
        return call

    def close(self, call: UtilityCall) -> None:
        """Forget a call, answered or not."""
        self._calls.pop(call.call_id, None)

    def take(self, answer: UtilityCallOutput) -> None:
        """Hand an engine's answer to its call."""
        output, index = answer.output, answer.engine_index
        call = self._calls.get(output.call_id)
        if call is None or index not in call.missing:
            return
        if output.failure_message is not None:
            call.failures[index] = output.failure_message
        else:
            call.results[index] = output.result
        call.settle(index)

    def fail_engine(self, engine_index: int, error: EngineCoreError) -> None:
        """This engine will answer no call any more."""
        for call in self._calls.values():
            if engine_index in call.missing:
                call.failures[engine_index] = str(error)
                call.error = call.error or error
                call.settle(engine_index)

    def fail_all(self, error: EngineCoreError) -> None:
        """No engine will answer any call any more."""
        for call in self._calls.values():
            for engine_index in list(call.missing):
                call.given_up = error
                call.failures[engine_index] = str(error)
                call.settle(engine_index)
