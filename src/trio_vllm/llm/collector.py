"""`Collector`: accumulates the outputs of one engine request until they are delivered.

It keeps token ids in a flat array, and the few outputs that carry more (log probabilities, masks,
experts) as they are; only a delivery makes a result of them. So a request in flight costs some hundred
bytes and its tokens four each, besides their times, and an output that is not delivered yet costs two
appends, which the client does by itself (`Collector.token_place`) if only the end is waited for.
Upstream's counterpart is ``RequestState`` with ``RequestOutputCollector`` of
``vllm/v1/engine/output_processor.py``.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from trio_vllm.client import (
    AnswerCheck,
    LogprobsCheck,
    TokenPlace,
    logprob_columns,
    too_many_tokens,
)
from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, EngineCoreError
from trio_vllm.llm.output import (
    Completion,
    CompletionDelta,
    CompletionOutput,
    WeightVersionSpan,
)
from trio_vllm.protocol import (
    Array,
    CodecError,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    EventType,
    FinishReason,
    Frames,
    LogprobsCollector,
    PrefillStats,
    Tensor,
)

T = TypeVar("T")


class Collector:
    """A `Sink` for one completion (or one pooling request) of an `Llm` request."""

    __slots__ = (
        "_arrival_time",
        "_cached_tokens",
        "_clock",
        "_delivered_count",
        "_due_count",
        "_end_time",
        "_events",
        "_first_token_time",
        "_interval",
        "_is_for_tokens",
        "_is_last_delivered",
        "_last",
        "_logprobs",
        "_max_tokens",
        "_outputs_with_details",
        "_params",
        "_pooled",
        "_prefill_stats",
        "_prompt_logprobs",
        "_prompt_tokens",
        "_room",
        "_spans",
        "_times",
        "_token_ids",
        "_version",
        "_waker",
        "answer_checks",
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
        """Wake ``waker`` when ``interval`` tokens can be delivered; 0 is at the end only."""
        self.request_id = request.request_id
        self.index = index
        self.engine_index = -1
        self.answer_checks: Sequence[AnswerCheck] = ()
        self.error: EngineCoreError | None = None
        self._waker = waker
        self._clock = clock
        self._interval = interval
        self._arrival_time = request.arrival_time
        self._params = params = request.sampling_params
        # The parameters are the caller's, who may change them for another request.
        self._is_for_tokens = not interval and (params is None or params.logprobs is None)
        limit: Any = None if params is None else params.max_tokens
        # What is no number at all is for the client to refuse.
        self._max_tokens: int = limit if type(limit) is int else sys.maxsize
        self._room = self._max_tokens  # that may come before the next delivery
        # With so many tokens there is more to do than to keep them; the first one is such.
        self._due_count = 1
        prompt = request.prompt_token_ids
        self._prompt_tokens = 0 if prompt is None else len(prompt)
        # Unbounded on purpose: one pump serves all requests and must not wait for one slow reader.
        # What piles up is at most max_tokens tokens of this request.
        self._token_ids = array("I")
        # The engine's clock, one for each output with tokens. A list, since the requests of a message
        # share its number, and it is the faster one to append to.
        self._times: list[float] = []
        self._outputs_with_details: list[EngineCoreOutput] = []  # until they are delivered
        self._logprobs: LogprobsCollector | None = None
        self._prompt_logprobs: LogprobsCollector | None = None
        self._pooled: Tensor | None = None
        self._events: list[EngineCoreEvent] = []
        self._prefill_stats: PrefillStats | None = None
        has_transfer = params is not None and params.extra_args is not None
        self._cached_tokens = self._remotely_cached_tokens() if has_transfer else None
        self._last: EngineCoreOutput | None = None
        self._is_last_delivered = False
        self._delivered_count = 0
        self._first_token_time: float | None = None
        self._end_time: float | None = None
        self._version: str | None = None
        self._spans: list[tuple[int, str]] = []

    # Sink ---------------------------------------------------------------------------------------

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        # Done for every token of every request: all that is not needed each time is in `_note_due`.
        held = self._token_ids
        held.fromlist(token_ids)  # all or none
        if len(held) >= self._due_count:
            self._note_due(len(token_ids))
        if timestamp:  # 0 is none
            self._times.append(timestamp)
        if version != self._version and version is not None:
            self._version = version
            self._spans.append((self.token_count - len(token_ids), version))

    def _note_due(self, new_count: int) -> None:
        """Refuse more tokens than were asked for, note the first one, wake who waits."""
        held = self._token_ids
        if len(held) > self._room:
            del held[len(held) - new_count :]
            raise too_many_tokens(self, self._max_tokens)
        if self._first_token_time is None:
            self._first_token_time = self._clock()
            self._due_count = min(self._interval or sys.maxsize, self._room + 1)
        if self._interval:
            self._waker.wake()

    @property
    def only_collects(self) -> bool:
        """Whether only tokens are to come, and nobody waits for them; see `ColumnSink`."""
        return self._is_for_tokens

    def token_place(self, version: str | None) -> TokenPlace | None:
        """Where tokens can be appended, once the first one was noted, and its weights."""
        is_noted = version is None or version == self._version
        if self._first_token_time is None or not is_noted:
            return None
        held = self._token_ids
        return TokenPlace(held.append, self._times.append, held, self._room)

    def add_raw_logprobs(
        self,
        token_ids: list[int],
        logprobs: Any,
        frames: Frames,
        timestamp: float,
        version: str | None,
    ) -> bool:
        collector = self._logprobs or self._sample_logprobs()
        if type(logprobs) is bytes:
            is_taken = collector.add_packed(logprobs)
        else:
            is_taken = collector.add_raw(logprobs, frames)
        if is_taken:
            self.add_tokens(token_ids, timestamp, version)
        return is_taken

    def _sample_logprobs(self) -> LogprobsCollector:
        if self._logprobs is None:  # most requests want none
            params = self._params or EngineCoreSamplingParams()
            columns = logprob_columns(params.logprobs, params.logprob_token_ids)
            self._logprobs = LogprobsCollector(columns)
        return self._logprobs

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        if output.new_token_ids:
            self.add_tokens(output.new_token_ids, timestamp, version)
        if output.new_logprobs is not None:
            self._sample_logprobs().add(output.new_logprobs)
        if (prompt := output.new_prompt_logprobs_tensors) is not None:
            if self._prompt_logprobs is None:
                count = None if self._params is None else self._params.prompt_logprobs
                self._prompt_logprobs = LogprobsCollector(logprob_columns(count))
            self._prompt_logprobs.add(prompt)
        if _has_details(output):
            self._outputs_with_details.append(output)
        if output.pooling_output is not None:
            self._add_pooled(output.pooling_output, timestamp)
        if output.events:
            self._events += output.events
        if output.prefill_stats is not None:
            self._add_prefill(output.prefill_stats)
        if output.finished:
            self._last = output
            self._end_time = self._clock()
            self._waker.wake()

    def _add_prefill(self, stats: PrefillStats) -> None:
        self._prefill_stats = stats
        remote = self._remotely_cached_tokens()
        self._cached_tokens = stats.num_cached_tokens if remote is None else remote

    def _add_pooled(self, pooled: Tensor, timestamp: float) -> None:
        self._pooled = pooled
        if self._first_token_time is None:
            self._first_token_time = self._clock()
            if timestamp:
                self._times.append(timestamp)

    def fail(self, error: EngineCoreError) -> None:
        self.error = error
        self._waker.wake()

    # What the caller does -----------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the request was submitted."""

    def stop(self, stop_reason: str | None) -> None:
        """Finish with STOP, as if the engine had matched a stop string."""
        output = EngineCoreOutput(
            self.request_id, finish_reason=FinishReason.STOP, stop_reason=stop_reason
        )
        self.add_output(output, 0.0, None)

    def abandon(self) -> None:
        """Note that the caller has left the request, which may have ended before."""

    def refuse(self, error: BaseException) -> None:
        """Note that the request was not submitted."""

    # Deliveries ---------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no further output will come."""
        return self._last is not None or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether the last output has come, delivered or not."""
        return self._last is not None

    @property
    def is_refused(self) -> bool:
        """Whether the engine refused the request, by an error, before it was scheduled."""
        last = self._last
        return (
            last is not None
            and last.finish_reason is FinishReason.ERROR
            and last.error is not None
            and not self.token_count
            and all(event.type is not EventType.SCHEDULED for event in self._events)
        )

    @property
    def token_count(self) -> int:
        """Tokens so far, delivered or not."""
        return self._delivered_count + len(self._token_ids)

    @property
    def arrival_time(self) -> float:
        """UNIX seconds."""
        return self._arrival_time

    @property
    def prefill_stats(self) -> PrefillStats | None:
        """Where its prompt tokens came from; None before the end of its prefill."""
        return self._prefill_stats

    @property
    def is_due(self) -> bool:
        """Whether a delivery is wanted now: the first token, enough tokens, or the end."""
        if self._last is not None:
            return not self._is_last_delivered
        count = len(self._token_ids)
        if not count or not self._interval:  # in this order: most looks are at nothing
            return False
        return count >= self._interval or not self._delivered_count or self.error is not None

    def take_delta(self) -> CompletionDelta:
        """Make a delivery of what came since the last one.

        Raises:
          DecodeError: The parts of an array do not fit each other.
        """
        # Written out twice: a stream's reader pays for each indirection with each delivery.
        delta = CompletionDelta(
            index=self.index,
            engine_request_id=self.request_id,
            engine_index=self.engine_index,
            token_ids=self._take_tokens(),
            progress=self._progress(),
        )
        # Where there is nothing to check there may still be what was not asked for.
        if self.answer_checks or self._logprobs is not None or self._prompt_logprobs is not None:
            self._add_logprobs(delta)
        if self._outputs_with_details:
            self._add_details(delta)
        if self._last is not None:
            delta.finish_reason = self._last.finish_reason
            self._add_end(delta, self._last)
        return delta

    def take_output(self) -> CompletionOutput:
        """Make the only delivery, after the last output. Raises as `take_delta`."""
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        output = CompletionOutput(
            index=self.index,
            engine_request_id=self.request_id,
            engine_index=self.engine_index,
            token_ids=self._take_tokens(),
            progress=self._progress(),
            finish_reason=last.finish_reason,
        )
        self._add_logprobs(output)
        if self._outputs_with_details:
            self._add_details(output)
        self._add_end(output, last)
        return output

    def _take_tokens(self) -> list[int]:
        token_ids = self._token_ids.tolist()
        del self._token_ids[:]
        self._delivered_count += len(token_ids)
        self._room -= len(token_ids)
        if self._room < self._due_count:
            self._due_count = self._room + 1
        return token_ids

    @property
    def pooled(self) -> Array | None:
        """The pooled prompt, if there is one."""
        return None if self._pooled is None else self._pooled.numpy()

    def _add_logprobs(self, completion: Completion) -> None:
        try:
            if self._logprobs is not None:
                completion.logprobs = self._logprobs.take()
            if self._prompt_logprobs is not None:
                completion.prompt_logprobs = self._prompt_logprobs.take()
        except CodecError as error:
            raise self._decode_error(error.add_path(".new_logprobs")) from error
        if self.answer_checks:
            self._check_logprobs(completion)

    def _check_logprobs(self, completion: Completion) -> None:
        """Check what the client has not decoded."""
        try:
            for check in self.answer_checks:
                if isinstance(check, LogprobsCheck):
                    check.check_tokens(len(completion.token_ids), completion.logprobs)
        except CodecError as error:
            raise self._decode_error(error) from error

    def _decode_error(self, error: CodecError) -> DecodeError:
        return DecodeError(
            "an output", error.where, error.reason, self.engine_index, self.request_id
        )

    def _add_details(self, completion: Completion) -> None:
        outputs, self._outputs_with_details = self._outputs_with_details, []
        completion.prompt_token_id_logprobs = self._concatenated(
            ".prompt_token_id_logprobs", [o.prompt_token_id_logprobs for o in outputs]
        )
        completion.sampling_masks = tuple(_present([o.new_sampling_mask for o in outputs]))
        completion.routed_experts = self._concatenated(
            ".routed_experts", [o.routed_experts for o in outputs]
        )
        completion.num_nans_in_logits = sum(o.num_nans_in_logits for o in outputs)

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

    def _add_end(self, completion: Completion, last: EngineCoreOutput) -> None:
        self._is_last_delivered = True
        completion.stop_reason = last.stop_reason
        completion.error = last.error
        completion.mm_cache_miss_hashes = last.mm_cache_miss_hashes
        completion.spec_decode_metrics = last.spec_decode_metrics
        completion.kv_transfer_params = last.kv_transfer_params
        completion.ec_transfer_params = last.ec_transfer_params
        completion.trace_headers = last.trace_headers
        completion.weight_versions = self._weight_versions()

    def _progress(self) -> tuple[Any, ...]:
        """The fields of `Progress`."""
        return (
            self._prompt_tokens,
            self._delivered_count + len(self._token_ids),
            self._cached_tokens,
            self._arrival_time,
            self._first_token_time,
            self._clock() if self._end_time is None else self._end_time,
            self._events,
            len(self._events),
            self._times,
            len(self._times),
        )

    def _remotely_cached_tokens(self) -> int | None:
        """Prompt tokens that the engine which did the prefill found in its cache.

        To the engine that gets the prompt from there all of it looks cached. See ``RequestState`` in
        ``vllm/v1/engine/output_processor.py``.
        """
        transfer = None if self._params is None else self._params.kv_transfer_params
        if transfer is None or not transfer.get("do_remote_prefill"):
            return None
        cached = transfer.get("remote_prefill_cached_tokens")
        return min(max(cached, 0), self._prompt_tokens) if type(cached) is int else None

    def _weight_versions(self) -> tuple[WeightVersionSpan, ...]:
        spans, end = [], self._delivered_count
        for start, version in reversed(self._spans):
            spans.append(WeightVersionSpan(start=start, end=end, version=version))
            end = start
        return tuple(reversed(spans))


def _has_details(output: EngineCoreOutput) -> bool:
    """Whether an output describes its tokens by more than their ids."""
    return (
        output.prompt_token_id_logprobs is not None
        or output.new_sampling_mask is not None
        or output.routed_experts is not None
        or output.num_nans_in_logits > 0
    )


def _present(parts: Iterable[T | None]) -> list[T]:
    return [part for part in parts if part is not None]
