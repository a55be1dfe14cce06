"""`Sink`: takes the outputs of one request; `OutputStream`: a sink to iterate over."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import trio

from trio_vllm.client.answers import AnswerCheck
from trio_vllm.client.field_errors import invalid
from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, EngineCoreError, copy_error
from trio_vllm.protocol import CodecError, EngineCoreOutput, Frames
from trio_vllm.values import define


class Sink(Protocol):
    """Takes the outputs of one request, and wakes the task that waits for them; never waits.

    Most outputs are a few token ids and nothing else: these come by `add_tokens`, as they are on the
    wire. A sink that only collects wakes no task, so a request of which only the end is wanted costs
    no task switch before it. It may also be a `ColumnSink`, and then is spared most of these calls.
    """

    request_id: str
    engine_index: int
    """Set by the client, and again if the engine is gone before it has been sent the request."""
    answer_checks: Sequence[AnswerCheck]
    """Set by the client, which checks what comes by `add_output`."""

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """Take an output that is nothing but token ids, one at least.

        ``timestamp`` is the engine's monotonic clock, ``version`` that of its weights. Raise
        `OverflowError` if one is no unsigned number of 32 bits, and take none of them then. Raise
        `DecodeError` (see `too_many_tokens`) to let the request fail.
        """
        ...

    def add_raw_logprobs(
        self,
        token_ids: list[int],
        logprobs: Any,
        frames: Frames,
        timestamp: float,
        version: str | None,
    ) -> bool:
        """Take an output that is one token id and its log probabilities, if it can be taken so.

        ``logprobs`` are as they were unpacked from ``frames``, or bytes if they were not unpacked (see
        `LogprobsCollector.add_raw` and `LogprobsCollector.add_packed`). With False
        the output comes again, decoded, by `add_output`. Raise as `add_tokens`.
        """
        ...

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        """Take any other output; the last one is finished. Raise `DecodeError` as `add_tokens`."""
        ...

    def fail(self, error: EngineCoreError) -> None:
        """No further output will come, because of ``error``."""
        ...


@define
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

    def __init__(self, request_id: str, max_tokens: int | None = None) -> None:
        """An engine that sends more than ``max_tokens`` fails the request."""
        self.request_id = request_id
        self.engine_index = -1
        self.answer_checks: Sequence[AnswerCheck] = ()
        self._max_tokens = max_tokens
        self._token_count = 0
        # Unbounded on purpose: one task serves all requests and must not wait for one slow reader.
        # What piles up is at most max_tokens outputs of this request, if that is given.
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
        array("I").fromlist(token_ids)
        output = EngineCoreOutput(self.request_id, token_ids)
        if self.answer_checks:
            check_answer(self, output)
        self.add_output(output, timestamp, version)

    def add_raw_logprobs(self, *_: object) -> bool:
        return False  # its outputs are decoded, as the engine sent them

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        self._token_count += len(output.new_token_ids)
        if self._max_tokens is not None and self._token_count > self._max_tokens:
            raise too_many_tokens(self, self._max_tokens)
        self._ended = output.finished
        self._outputs.append(StreamOutput(self.engine_index, timestamp, version, output))
        self._waker.wake()

    def fail(self, error: EngineCoreError) -> None:
        self._error, self._ended = error, True
        self._waker.wake()


def check_answer(sink: Sink, output: EngineCoreOutput) -> None:
    """Raise `DecodeError` if an output is not what was asked for, or its parts do not add up."""
    try:
        _check_rows(output)
        for answer_check in sink.answer_checks:
            answer_check.check(output)
    except CodecError as error:
        raise DecodeError(
            "an output", error.where, error.reason, sink.engine_index, sink.request_id
        ) from None


def _check_rows(output: EngineCoreOutput) -> None:
    """What describes the new tokens has a row for each."""
    count = len(output.new_token_ids)
    logprobs, mask = output.new_logprobs, output.new_sampling_mask
    for field, rows in (
        ("new_logprobs", count if logprobs is None else len(logprobs)),
        ("new_sampling_mask", count if mask is None else len(mask.rows)),
    ):
        if rows != count:
            raise invalid(field, f"has {rows} rows for {count} tokens")


def too_many_tokens(sink: Sink, max_tokens: int) -> DecodeError:
    """Make the error for an engine that goes on after ``max_tokens``."""
    reason = f"goes on after {max_tokens} tokens, which is all that was asked for"
    return DecodeError("an output", ".new_token_ids", reason, sink.engine_index, sink.request_id)


def as_request_ids(request_ids: Iterable[str]) -> list[str]:
    """The ids to abort; `TypeError` if they are one string, or something else than ids."""
    if isinstance(request_ids, str):
        raise TypeError("request_ids must be several ids, not a string")
    if not isinstance(request_ids, Iterable):
        raise TypeError(f"request_ids must be several ids, not {request_ids!r:.200}")
    ids = list(request_ids)
    if set(map(type, ids)) - {str}:  # not one by one: they may be very many
        for request_id in ids:
            if not isinstance(request_id, str):
                raise TypeError(f"request_ids must be strings, not {type(request_id).__name__}")
    return ids
