"""Gathers the outputs of one engine request until somebody takes them.

A collector keeps token ids and times in flat arrays, and the few outputs that carry more as they
are; only `Collector.take` makes a result of them. So a request in flight costs some hundred bytes
and its tokens four each, and an output that nobody waits for costs three list operations.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from trio_vllm._errors import EngineCoreError
from trio_vllm.client import Waker
from trio_vllm.llm._output import CompletionOutput, RequestTimings, Usage, WeightVersionSpan
from trio_vllm.protocol import (
    Array,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    Logprobs,
)

T = TypeVar("T")


class Collector:
    """A `Sink` for one completion (or one pooling request) of an `Llm` request."""

    __slots__ = (
        "_arrival_time",
        "_cached_tokens",
        "_clock",
        "_events",
        "_first_token_time",
        "_interval",
        "_last",
        "_logprob_columns",
        "_prompt_logprob_columns",
        "_prompt_tokens",
        "_rich",
        "_spans",
        "_taken",
        "_times",
        "_token_ids",
        "_version",
        "_waker",
        "engine_index",
        "error",
        "index",
        "request_id",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        waker: Waker,
        clock: Callable[[], float],
        *,
        interval: int,
    ) -> None:
        """Wake ``waker`` when ``interval`` tokens are there to be taken; 0 is at the end only."""
        params = request.sampling_params or EngineCoreSamplingParams()
        self.request_id = request.request_id
        self.index = index
        self.engine_index = -1
        self.error: EngineCoreError | None = None
        self._waker = waker
        self._clock = clock
        self._interval = interval
        self._arrival_time = request.arrival_time
        self._prompt_tokens = len(request.prompt_token_ids or ())
        self._logprob_columns = _columns(params.logprobs, params.logprob_token_ids)
        self._prompt_logprob_columns = _columns(params.prompt_logprobs, None)
        # Unbounded on purpose: one pump serves all requests and must not wait for one slow reader.
        # What piles up is at most max_tokens tokens of this request.
        self._token_ids = array("I")
        self._times = array("d")  # the engine's clock, one for each output with tokens
        self._rich: list[EngineCoreOutput] = []
        self._last: EngineCoreOutput | None = None
        self._events: list[EngineCoreEvent] = []
        self._cached_tokens: int | None = None
        self._taken = 0  # tokens delivered before
        self._first_token_time: float | None = None
        self._version: str | None = None
        self._spans: list[tuple[int, str | None]] = []

    # Sink ---------------------------------------------------------------------------------------

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        self._token_ids.extend(token_ids)  # checks each one
        self._times.append(timestamp)
        if version != self._version:
            self._change_version(version, len(token_ids))
        if self._interval or self._first_token_time is None:
            self._note_progress()

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        if output.new_token_ids:
            self.add_tokens(output.new_token_ids, timestamp, version)
        self._rich.append(output)
        if output.events:
            self._events += output.events
        if output.prefill_stats is not None:
            self._cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finished:
            self._last = output
            self._waker.wake()

    def fail(self, error: EngineCoreError) -> None:
        """See `Sink`."""
        self.error = error
        self._waker.wake()

    def _note_progress(self) -> None:
        first = self._first_token_time is None
        if first:
            self._first_token_time = self._clock()
        if self._interval and (first or len(self._token_ids) >= self._interval):
            self._waker.wake()

    def _change_version(self, version: str | None, new_tokens: int) -> None:
        self._version = version
        self._spans.append((self._taken + len(self._token_ids) - new_tokens, version))

    # Taking -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the last output is here (or was taken)."""
        return self._last is not None

    @property
    def is_due(self) -> bool:
        """Whether a delivery is wanted now: the first token, enough tokens, or the end."""
        if self._last is not None:
            return bool(self._rich)
        count = len(self._token_ids)
        if not self._interval or not count:
            return False
        return not self._taken or count >= self._interval or self.error is not None

    def take(self) -> CompletionOutput:
        """What came since the last call; with the last output also what is known of the whole."""
        rich, self._rich = self._rich, []
        token_ids = self._token_ids.tolist()
        del self._token_ids[:]
        self._taken += len(token_ids)
        completion = CompletionOutput(
            index=self.index,
            token_ids=token_ids,
            logprobs=_joined([o.new_logprobs for o in rich], self._logprob_columns),
            prompt_logprobs=_joined(
                [o.new_prompt_logprobs_tensors for o in rich], self._prompt_logprob_columns
            ),
            prompt_token_id_logprobs=_concatenated([o.prompt_token_id_logprobs for o in rich]),
            sampling_masks=tuple(_present([o.new_sampling_mask for o in rich])),
            routed_experts=_concatenated([o.routed_experts for o in rich]),
            num_nans_in_logits=sum(o.num_nans_in_logits for o in rich),
        )
        if self._last is not None:
            self._describe_whole(completion, self._last)
        return completion

    def take_pooled(self) -> tuple[Array | None, CompletionOutput]:
        """The pooled prompt, if there is one, and the rest of its output."""
        pooled = self._last.pooling_output if self._last is not None else None
        return None if pooled is None else pooled.numpy(), self.take()

    def _describe_whole(self, completion: CompletionOutput, last: EngineCoreOutput) -> None:
        completion.finish_reason = last.finish_reason
        completion.stop_reason = last.stop_reason
        completion.error = last.error
        completion.mm_cache_miss_hashes = last.mm_cache_miss_hashes
        completion.spec_decode_metrics = last.spec_decode_metrics
        completion.kv_transfer_params = last.kv_transfer_params
        completion.ec_transfer_params = last.ec_transfer_params
        completion.trace_headers = last.trace_headers
        completion.weight_versions = self._weight_versions()
        completion.usage = Usage(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._taken,
            cached_tokens=self._cached_tokens,
        )
        first = self._first_token_time
        completion.timings = RequestTimings.compute(
            e2e_latency=self._clock() - self._arrival_time,
            time_to_first_token=None if first is None else first - self._arrival_time,
            events=self._events,
            token_times=self._times.tolist(),
            output_tokens=self._taken,
        )

    def _weight_versions(self) -> tuple[WeightVersionSpan, ...]:
        ends = [start for start, _ in self._spans[1:]] + [self._taken]
        return tuple(
            WeightVersionSpan(start=start, end=end, version=version)
            for (start, version), end in zip(self._spans, ends, strict=False)
            if version is not None
        )


def _columns(count: int | None, token_ids: Sequence[int] | None) -> int | None:
    """How many columns of logprobs were asked for, the token itself included; None is all."""
    if count is None:
        count = len(token_ids or ())
    return None if count < 0 else count + 1


def _present(parts: Iterable[T | None]) -> list[T]:
    return [part for part in parts if part is not None]


def _joined(parts: Iterable[Logprobs | None], columns: int | None) -> Logprobs | None:
    present = _present(parts)
    if not present:
        return None
    whole = Logprobs.concatenate(present)
    return whole if columns is None else whole.cut(columns)


def _concatenated(parts: Iterable[Array | None]) -> Array | None:
    present = _present(parts)
    return np.concatenate(present) if present else None
