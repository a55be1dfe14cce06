"""A collector that tells observers what comes in; only used if there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trio_vllm._waker import Waker
from trio_vllm.llm._collector import Collector
from trio_vllm.llm._observer import FinishedCompletion, Observer
from trio_vllm.protocol import EngineCoreOutput, EngineCoreRequest, EventType, FinishReason


class ObservedCollector(Collector):
    """Tells its observers; otherwise like any other."""

    __slots__ = ("_last_time", "_observers", "_preemption_count")

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        waker: Waker,
        clock: Callable[[], float],
        *,
        interval: int,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(request, index, waker, clock, interval=interval)
        self._observers = observers
        self._last_time: float | None = None
        self._preemption_count = 0

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        is_first = self._first_token_time is None
        super().add_tokens(token_ids, timestamp, version)
        last, self._last_time = self._last_time, timestamp or None
        seconds = timestamp - last if timestamp and last is not None else None
        for observer in self._observers:
            if is_first and self._first_token_time is not None:
                observer.first_tokens(
                    self.engine_index, self._first_token_time - self._arrival_time
                )
            observer.tokens(self.engine_index, len(token_ids), seconds)

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        super().add_output(output, timestamp, version)
        for event in output.events or ():
            if event.type is EventType.PREEMPTED:
                self._preemption_count += 1
                for observer in self._observers:
                    observer.preempted(self.engine_index)
        if output.prefill_stats is not None:
            for observer in self._observers:
                observer.prefilled(self.engine_index, output.prefill_stats)
        if output.finish_reason is not None:
            self._tell_end(output.finish_reason)

    def leave(self) -> None:
        """See `Collector`."""
        if not self.finished and self.error is None:
            self._tell_end(FinishReason.ABORT)

    def _tell_end(self, reason: FinishReason) -> None:
        completion = FinishedCompletion(
            finish_reason=reason,
            usage=self._usage(),
            timings=self._timings(),
            max_tokens=None if self._params is None else self._params.max_tokens,
            preemption_count=self._preemption_count,
        )
        for observer in self._observers:
            observer.finished(self.engine_index, completion)
