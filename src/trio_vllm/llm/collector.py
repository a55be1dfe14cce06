"""Gathers the outputs of one engine request until somebody takes them.

A collector keeps token ids and times in flat arrays, and the few outputs that carry more as they
are; only `Collector.take` makes a result of them. So a request in flight costs some hundred bytes
and its tokens four each, and an output that nobody waits for costs three list operations.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np

from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, EngineCoreError
from trio_vllm.llm.output import CompletionOutput, RequestTimings, Usage, WeightVersionSpan
from trio_vllm.protocol import (
    Array,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    Logprobs,
    Tensor,
)

T = TypeVar("T")


class Collector:
    """A `Sink` for one completion (or one pooling request) of an `Llm` request."""

    __slots__ = (
        "_arrival_time",
        "_cached_tokens",
        "_clock",
        "_end_time",
        "_events",
        "_first_token_time",
        "_interval",
        "_is_last_taken",
        "_last",
        "_params",
        "_pooled",
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
        self.request_id = request.request_id
        self.index = index
        self.engine_index = -1
        self.error: EngineCoreError | None = None
        self._waker = waker
        self._clock = clock
        self._interval = interval
        self._arrival_time = request.arrival_time
        self._params = request.sampling_params
        prompt = request.prompt_token_ids
        self._prompt_tokens = 0 if prompt is None else len(prompt)
        # Unbounded on purpose: one pump serves all requests and must not wait for one slow reader.
        # What piles up is at most max_tokens tokens of this request.
        self._token_ids = array("I")
        self._times = array("d")  # the engine's clock, one for each output with tokens
        self._rich: list[EngineCoreOutput] = []  # those that carry more, until they are taken
        self._pooled: Tensor | None = None
        self._events: list[EngineCoreEvent] = []
        self._cached_tokens: int | None = None
        self._last: EngineCoreOutput | None = None
        self._is_last_taken = False
        self._taken = 0  # tokens delivered before
        self._first_token_time: float | None = None
        self._end_time: float | None = None
        self._version: str | None = None
        self._spans: list[tuple[int, str]] = []

    # Sink ---------------------------------------------------------------------------------------

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        self._token_ids.fromlist(token_ids)  # all or none
        if timestamp:  # 0 is none
            self._times.append(timestamp)
        if version != self._version and version is not None:
            self._version = version
            self._spans.append((self.token_count - len(token_ids), version))
        if self._first_token_time is None:
            self._first_token_time = self._clock()
            if self._interval:
                self._waker.wake()
        elif self._interval and len(self._token_ids) >= self._interval:
            self._waker.wake()

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        """See `Sink`."""
        if output.new_token_ids:
            self.add_tokens(output.new_token_ids, timestamp, version)
        if _carries_more(output):
            output = self._narrowed(output)
            self._rich.append(output)
        if output.pooling_output is not None:
            self._pooled = output.pooling_output
        if output.events:
            self._events += output.events
        if output.prefill_stats is not None:
            self._cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finished:
            self._last = output
            self._end_time = self._clock()
            self._waker.wake()

    def _narrowed(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """The output without the columns of logprobs that other requests of its step asked for."""
        sample, prompt = output.new_logprobs, output.new_prompt_logprobs_tensors
        params = self._params or EngineCoreSamplingParams()
        if sample is not None:
            sample = _cut(sample, params.logprobs, params.logprob_token_ids)
        if prompt is not None:
            prompt = _cut(prompt, params.prompt_logprobs, None)
        if sample is output.new_logprobs and prompt is output.new_prompt_logprobs_tensors:
            return output
        return attrs.evolve(output, new_logprobs=sample, new_prompt_logprobs_tensors=prompt)

    def fail(self, error: EngineCoreError) -> None:
        """See `Sink`."""
        self.error = error
        self._waker.wake()

    def leave(self) -> None:
        """The caller has no further interest."""

    # Taking -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the last output is here (or was taken)."""
        return self._last is not None

    @property
    def token_count(self) -> int:
        """Tokens so far, taken or not."""
        return self._taken + len(self._token_ids)

    @property
    def is_due(self) -> bool:
        """Whether a delivery is wanted now: the first token, enough tokens, or the end."""
        if self._last is not None:
            return not self._is_last_taken
        count = len(self._token_ids)
        if not self._interval or not count:
            return False
        return not self._taken or count >= self._interval or self.error is not None

    def take(self) -> CompletionOutput:
        """What came since the last call; with the last output also what is known of the whole.

        Raises:
          DecodeError: The parts of an array do not fit each other.
        """
        token_ids = self._token_ids.tolist()
        del self._token_ids[:]
        self._taken += len(token_ids)
        completion = CompletionOutput(
            index=self.index,
            engine_request_id=self.request_id,
            engine_index=self.engine_index,
            token_ids=token_ids,
        )
        if self._rich:
            self._describe_tokens(completion)
        if self._last is not None:
            self._is_last_taken = True
            self._describe_whole(completion, self._last)
        return completion

    @property
    def pooled(self) -> Array | None:
        """The pooled prompt, if there is one."""
        return None if self._pooled is None else self._pooled.numpy()

    def _describe_tokens(self, completion: CompletionOutput) -> None:
        rich, self._rich = self._rich, []
        completion.logprobs = _joined([o.new_logprobs for o in rich])
        completion.prompt_logprobs = _joined([o.new_prompt_logprobs_tensors for o in rich])
        completion.prompt_token_id_logprobs = self._concatenated(
            ".prompt_token_id_logprobs", [o.prompt_token_id_logprobs for o in rich]
        )
        completion.sampling_masks = tuple(_present([o.new_sampling_mask for o in rich]))
        completion.routed_experts = self._concatenated(
            ".routed_experts", [o.routed_experts for o in rich]
        )
        completion.num_nans_in_logits = sum(o.num_nans_in_logits for o in rich)

    def _concatenated(self, field: str, parts: Iterable[Array | None]) -> Array | None:
        """The rows of all parts; `DecodeError` if their shapes do not allow that."""
        present = _present(parts)
        if not present:
            return None
        try:
            return np.concatenate(present)
        except ValueError as error:
            shapes = ", ".join(str(part.shape) for part in present)
            reason = f"the shapes of its parts do not fit: {shapes}"
            raise DecodeError(
                "an output", field, reason, self.engine_index, self.request_id
            ) from error

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
        completion.usage = self._usage()
        completion.timings = self._timings()

    def _usage(self) -> Usage:
        cached = _remotely_cached_tokens(self._params)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self.token_count,
            cached_tokens=(
                self._cached_tokens if cached is None else min(max(cached, 0), self._prompt_tokens)
            ),
        )

    def _timings(self) -> RequestTimings:
        first, end = self._first_token_time, self._end_time
        return RequestTimings(
            e2e_latency=(self._clock() if end is None else end) - self._arrival_time,
            time_to_first_token=None if first is None else first - self._arrival_time,
            events=self._events,
            token_times=self._times,
            output_tokens=self.token_count,
        )

    def _weight_versions(self) -> tuple[WeightVersionSpan, ...]:
        spans, end = [], self._taken
        for start, version in reversed(self._spans):
            spans.append(WeightVersionSpan(start=start, end=end, version=version))
            end = start
        return tuple(reversed(spans))


def _carries_more(output: EngineCoreOutput) -> bool:
    """Whether an output has something for its tokens' delivery besides their ids."""
    return (
        output.new_logprobs is not None
        or output.new_prompt_logprobs_tensors is not None
        or output.prompt_token_id_logprobs is not None
        or output.new_sampling_mask is not None
        or output.routed_experts is not None
        or output.num_nans_in_logits > 0
    )


def _remotely_cached_tokens(params: EngineCoreSamplingParams | None) -> int | None:
    """What another engine, which did the prefill, had of the prompt in its cache.

    To the engine that gets the prompt from there all of it looks cached. See ``RequestState`` in
    ``vllm/v1/engine/output_processor.py``.
    """
    if params is None or params.extra_args is None:
        return None
    transfer = params.extra_args.get("kv_transfer_params")
    if not isinstance(transfer, Mapping) or not transfer.get("do_remote_prefill"):
        return None
    cached = transfer.get("remote_prefill_cached_tokens")
    return cached if type(cached) is int else None


def _cut(logprobs: Logprobs, count: int | None, token_ids: Sequence[int] | None) -> Logprobs:
    """The columns that were asked for, and that of the token itself; a negative count is all."""
    if count is None:
        count = 0 if token_ids is None else len(token_ids)
    narrow = logprobs if count < 0 else logprobs.cut(count + 1)
    if narrow is logprobs:
        return logprobs
    # A view would keep the rest alive, which may be as wide as the vocabulary.
    return Logprobs(narrow.token_ids.copy(), narrow.logprobs.copy(), narrow.ranks)


def _present(parts: Iterable[T | None]) -> list[T]:
    return [part for part in parts if part is not None]


def _joined(parts: Iterable[Logprobs | None]) -> Logprobs | None:
    present = _present(parts)
    return Logprobs.concatenate(present) if present else None
