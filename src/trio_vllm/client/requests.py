"""The raw outputs of one request, as the engine sends them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
import trio

from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, EngineCoreError, copy_error
from trio_vllm.protocol import (
    EngineCoreOutput,
    FinishReason,
    UndecodedBatch,
    plain_token_ids,
    row_request_id,
)

# MERGED client/_inflight: The requests in flight: which engine has them, who takes their outputs.
#
# Sans IO. `Inflight.take` is the hot path of the whole client: it runs once for every output of every
# request. Most outputs are a few token ids and nothing else; these go to their sink as they came off
# the wire. A sink that only collects wakes nobody, so a request that waits for its end costs no task
# switch before it.


@attrs.define
class StreamOutput:
    """One output of a request, with what its message said besides.

    Mirrors ``EngineCoreStreamOutput`` of ``engine-core-client/src/client/stream.rs``.
    """

    engine_index: int
    timestamp: float
    """The engine's monotonic clock, seconds; for an abort of ours, 0."""
    weight_version: str | None
    output: EngineCoreOutput


class OutputStream:
    """An asynchronous iterator over the outputs of one request; a `Sink` of the client.

    Made by `EngineCoreClient.call`. It ends after the output that has a finish reason. One task at
    a time may iterate.
    """

    def __init__(self, request_id: str, engine_index: int = -1) -> None:
        self.request_id = request_id
        self.engine_index = engine_index
        # Unbounded on purpose: one pump serves all requests and must not wait for one slow reader.
        # What piles up is at most max_tokens outputs of this request.
        self._outputs: deque[StreamOutput] = deque()
        self._waker = Waker()
        self._ended = False
        self._error: EngineCoreError | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> StreamOutput:
        """Wait for the next output.

        Raises:
          EngineDeadError: The engine died, or its connection was lost.
          DecodeError: An output of this request could not be read.
          ClientClosedError: The client was closed.
          trio.BusyResourceError: Another task is iterating.

        Cancellation:
          Loses no output.
        """
        if self._outputs or self._ended:
            await trio.lowlevel.checkpoint()
        else:
            await self._waker.wait()
        while not self._outputs:
            if self._error is not None:
                raise copy_error(self._error)
            if self._ended:
                raise StopAsyncIteration
            await self._waker.wait()
        return self._outputs.popleft()

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        array("I").fromlist(token_ids)
        self.add_output(EngineCoreOutput(self.request_id, token_ids), timestamp, version)

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        self._ended = output.finished
        self._outputs.append(StreamOutput(self.engine_index, timestamp, version, output))
        self._waker.wake()

    def fail(self, error: EngineCoreError) -> None:
        """See `Sink`."""
        self._error, self._ended = error, True
        self._waker.wake()


class Sink(Protocol):
    """Takes the outputs of one request. Its methods must not wait."""

    request_id: str
    engine_index: int
    """Set by the client, and again if the engine is gone before it has got the request."""

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """Take an output that is nothing but token ids, one at least.

        ``timestamp`` is the engine's monotonic clock, ``version`` that of its weights. Raise
        `OverflowError` if one is no unsigned number of 32 bits, and take none of them then.
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

    def __init__(
        self, *, on_release: Callable[[int], None], on_abort: Callable[[int, str], None]
    ) -> None:
        """
        Args:
          on_release: A request has left the table; its engine.
          on_abort: An engine may not know that a request is over; the engine and the request.
        """
        self._sinks: dict[str, Sink] = {}
        self._on_release = on_release
        self._on_abort = on_abort

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sinks

    def get(self, request_id: str) -> Sink | None:
        """Who takes the outputs of a request, if it is in flight."""
        return self._sinks.get(request_id)

    @property
    def request_ids(self) -> list[str]:
        """The ids in flight, oldest first."""
        return list(self._sinks)

    def add(self, sink: Sink) -> None:
        """Take a request in whose id is not in the table; its sink knows id and engine."""
        self._sinks[sink.request_id] = sink

    # Outputs ------------------------------------------------------------------------------------

    def take(self, batch: UndecodedBatch) -> None:
        """Hand the outputs of a message to their sinks; rows of unknown requests are dropped.

        Raises `DecodeError` for a row whose request cannot be told.
        """
        sinks, timestamp, version = self._sinks, batch.timestamp, batch.weight_version
        for row in batch.rows:
            token_ids = plain_token_ids(row)
            if token_ids is not None:
                request_id = row[0]
                sink = sinks.get(request_id) if type(request_id) is str else None
                if sink is not None:
                    try:
                        sink.add_tokens(token_ids, timestamp, version)
                    except OverflowError:
                        pass
                    else:
                        continue
            self._take_row(row, batch)
        if batch.finished_requests:
            self._take_finished(batch.finished_requests, batch.engine_index)

    def _take_row(self, row: object, batch: UndecodedBatch) -> None:
        request_id = row_request_id(row)
        if request_id is not None and request_id not in self._sinks:
            return
        try:
            output = batch.decode_row(row)
            _check_rows(output, batch.engine_index)
        except DecodeError as error:
            if request_id is None:
                raise
            self._fail(request_id, error)
            return
        sink = self._sinks[output.request_id]
        if output.finished:
            self._remove(sink)
        sink.add_output(output, batch.timestamp, batch.weight_version)

    def _take_finished(self, request_ids: list[str], engine_index: int) -> None:
        for request_id in request_ids:
            if request_id in self._sinks:
                reason = "lists the request, but it had no last output"
                error = DecodeError(
                    "outputs", "finished_requests", reason, engine_index, request_id
                )
                self._fail(request_id, error)

    # Ends ---------------------------------------------------------------------------------------

    def _remove(self, sink: Sink) -> None:
        del self._sinks[sink.request_id]
        self._on_release(sink.engine_index)

    def _fail(self, request_id: str, error: EngineCoreError) -> None:
        sink = self._sinks[request_id]
        self.drop(sink)
        sink.fail(error)

    def drop(self, sink: Sink) -> None:
        """Forget a request, if it is still in flight; its sink hears nothing more."""
        # Another request may have got the id since.
        if self._sinks.get(sink.request_id) is sink:
            self._remove(sink)
            self._on_abort(sink.engine_index, sink.request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests with a last output of ours, since an engine answers no abort.

        Ids that are not in flight are ignored.
        """
        for request_id in request_ids:
            if sink := self._sinks.get(request_id):
                self.drop(sink)
                output = EngineCoreOutput(request_id, finish_reason=FinishReason.ABORT)
                sink.add_output(output, 0.0, None)

    def fail_engine(self, engine_index: int, error: EngineCoreError) -> None:
        """End all requests of one engine."""
        for sink in list(self._sinks.values()):
            if sink.engine_index == engine_index:
                self._fail(sink.request_id, error)

    def fail_all(self, error: EngineCoreError) -> None:
        """End all requests."""
        for request_id in self.request_ids:
            self._fail(request_id, error)


def _check_rows(output: EngineCoreOutput, engine_index: int) -> None:
    """What describes the new tokens must have a row for each."""
    count = len(output.new_token_ids)
    logprobs, mask = output.new_logprobs, output.new_sampling_mask
    for field, rows in (
        ("new_logprobs", count if logprobs is None else len(logprobs)),
        ("new_sampling_mask", count if mask is None else len(mask.rows)),
    ):
        if rows != count:
            reason = f"has {rows} rows for {count} tokens"
            raise DecodeError("an output", f".{field}", reason, engine_index, output.request_id)
