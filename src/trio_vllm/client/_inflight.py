"""The requests in flight: which engine has them, who takes their outputs.

Sans IO. `Inflight.take` is the hot path of the whole client: it runs once for every output of every
request. Most outputs are a few token ids and nothing else; these go to their sink as they came off
the wire. A sink that only collects wakes nobody, so a request that waits for its end costs no task
switch before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from trio_vllm._errors import DecodeError, DuplicateRequestIdError, EngineCoreError
from trio_vllm.protocol import (
    EngineCoreOutput,
    FinishReason,
    RowBatch,
    plain_token_ids,
    row_request_id,
)


class Sink(Protocol):
    """Takes the outputs of one request. Its methods must not wait and should not raise."""

    request_id: str
    engine_index: int
    """Set by `EngineCoreClient.submit`."""

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """Take an output that is nothing but token ids; they are not checked.

        ``timestamp`` is the engine's monotonic clock, ``version`` that of its weights. `TypeError`, `ValueError` or `OverflowError`
        if they are no token ids.
        """
        ...

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        """Take any other output; the last one is finished."""
        ...

    def fail(self, error: EngineCoreError) -> None:
        """No further output will come, because of ``error``."""
        ...


class Inflight:
    """The table of requests in flight."""

    def __init__(self, released: Callable[[int], None]) -> None:
        """``released`` is called with the engine index of every request that leaves the table."""
        self._sinks: dict[str, Sink] = {}
        self._released = released

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sinks

    def add(self, sink: Sink) -> None:
        """Take a request in; its sink knows its id and engine."""
        if sink.request_id in self._sinks:
            raise DuplicateRequestIdError(sink.request_id)
        self._sinks[sink.request_id] = sink

    def pop(self, request_id: str) -> Sink | None:
        """Forget a request; None if it is not in flight."""
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            self._released(sink.engine_index)
        return sink

    def take(self, batch: RowBatch) -> None:
        """Hand the outputs of a message to their sinks; rows of unknown requests are dropped."""
        sinks, timestamp, version = self._sinks, batch.timestamp, batch.weight_version
        for row in batch.rows:
            token_ids = plain_token_ids(row)
            if token_ids is None:
                self._take_row(row, batch)
                continue
            try:
                sink = sinks.get(row[0])
                if sink is not None:
                    sink.add_tokens(token_ids, timestamp, version)
            except (TypeError, ValueError, OverflowError):
                self._take_row(row, batch)
        for request_id in batch.finished_requests or ():
            if request_id in sinks:
                reason = "lists the request, but it had no last output"
                self._fail(
                    request_id,
                    DecodeError(
                        "outputs", "finished_requests", reason, batch.engine_index, request_id
                    ),
                )

    def _take_row(self, row: object, batch: RowBatch) -> None:
        request_id = row_request_id(row)
        if request_id is not None and request_id not in self._sinks:
            return
        try:
            output = batch.decode_row(row)
        except DecodeError as error:
            if request_id is None:
                raise
            self._fail(request_id, error)
            return
        sink = self.pop(output.request_id) if output.finished else self._sinks[output.request_id]
        if sink is not None:
            sink.add_output(output, batch.timestamp, batch.weight_version)

    def _fail(self, request_id: str, error: EngineCoreError) -> None:
        if sink := self.pop(request_id):
            sink.fail(error)

    def abort(self, request_ids: Iterable[str]) -> Iterator[Sink]:
        """End these requests with a last output of ours, since an engine answers no abort.

        Yields the sinks of those that were in flight: their engines are to be told.
        """
        for request_id in request_ids:
            if sink := self.pop(request_id):
                output = EngineCoreOutput(request_id, finish_reason=FinishReason.ABORT)
                sink.add_output(output, 0.0, None)
                yield sink

    def fail_engine(self, engine_index: int, error: EngineCoreError) -> None:
        """End all requests of one engine."""
        for request_id in [
            s.request_id for s in self._sinks.values() if s.engine_index == engine_index
        ]:
            self._fail(request_id, error)

    def fail_all(self, error: EngineCoreError) -> list[Sink]:
        """End all requests; gives their sinks."""
        sinks = list(self._sinks.values())
        for sink in sinks:
            self._fail(sink.request_id, error)
        return sinks

    @property
    def request_ids(self) -> list[str]:
        """The ids in flight, oldest first."""
        return list(self._sinks)
