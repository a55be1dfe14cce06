"""The raw outputs of one request, as the engine sends them."""

from __future__ import annotations

from array import array
from collections import deque

import attrs
import trio

from trio_vllm._errors import EngineCoreError, fresh
from trio_vllm._waker import Waker
from trio_vllm.protocol import EngineCoreOutput


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
                raise fresh(self._error)
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
