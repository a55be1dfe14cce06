"""`GenerateOutput`, `CompletionDelta` and `EncodeOutput`: what `Llm` returns, with counts and times."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from trio_vllm.errors import RequestFailedError
from trio_vllm.protocol import (
    Array,
    EngineCoreEvent,
    EventType,
    FinishReason,
    Logprobs,
    RequestErrorInfo,
    RequestSpecDecodeMetrics,
    SamplingMask,
)
from trio_vllm.values import define, frozen


@frozen(kw_only=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens that came out of a cache, if the engine says."""


@frozen(kw_only=True)
class WeightVersionSpan:
    """The output tokens ``start`` to ``end`` (exclusive) were made with these weights."""

    start: int
    end: int
    version: str


@define(kw_only=True)
class RequestTimings:
    """Durations of the parts of a completion so far, in seconds; None where the engine does not say.

    Computed as upstream's frontends do (``vllm/v1/metrics/stats.py``, ``IterationStats``), when they
    are asked for: the two latencies by this process's clock, everything else by the engine's
    monotonic clock, of which only differences mean anything.
    """

    e2e_latency: float
    """From arrival to the last output; before there is one, to this delivery."""
    time_to_first_token: float | None
    """From arrival to the first output with a token, or with the pooled prompt."""
    events: Sequence[EngineCoreEvent]
    """When the request was queued, scheduled and preempted, by the engine's clock."""
    token_times: Sequence[float]
    """When each output with tokens, or the pooled prompt, was made, by the engine's clock."""
    output_tokens: int

    @property
    def queued_time(self) -> float | None:
        """From being queued to being scheduled."""
        queued = _first(self.events, EventType.QUEUED)
        return _between(queued, _first(self.events, EventType.SCHEDULED))

    @property
    def prefill_time(self) -> float | None:
        """From being scheduled to the first token."""
        return _between(_first(self.events, EventType.SCHEDULED), self._at(0))

    @property
    def decode_time(self) -> float | None:
        """From the first to the last token."""
        return _between(self._at(0), self._at(-1))

    @property
    def inference_time(self) -> float | None:
        """From being scheduled to the last token."""
        return _between(_first(self.events, EventType.SCHEDULED), self._at(-1))

    @property
    def inter_token_latencies(self) -> tuple[float, ...]:
        """Between each two outputs of the engine (which may hold several tokens)."""
        return tuple(map(operator.sub, self.token_times[1:], self.token_times))

    @property
    def mean_time_per_output_token(self) -> float | None:
        """``decode_time`` per token after the first."""
        decode = self.decode_time
        return (
            None if decode is None or self.output_tokens < 2 else decode / (self.output_tokens - 1)
        )

    def _at(self, index: int) -> float | None:
        return self.token_times[index] if self.token_times else None


def _first(events: Sequence[EngineCoreEvent], kind: EventType) -> float | None:
    return next((event.timestamp for event in events if event.type is kind), None)


def _between(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier


class Progress(NamedTuple):
    """What was known of a completion at a delivery; `Usage` and `RequestTimings` are made of it.

    They are made when they are asked for, since most readers of a stream do not, and each object
    costs as much as the rest of a delivery; so it is a bare tuple until then, too. Events and times
    are lists that go on growing, so it keeps how much of them was there.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    arrival_time: float
    first_token_time: float | None
    last_time: float
    events: Sequence[EngineCoreEvent]
    event_count: int
    token_times: Sequence[float]
    token_time_count: int

    def usage(self) -> Usage:
        """Count the tokens."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
        )

    def timings(self) -> RequestTimings:
        """Measure the durations."""
        first = self.first_token_time
        return RequestTimings(
            e2e_latency=self.last_time - self.arrival_time,
            time_to_first_token=None if first is None else first - self.arrival_time,
            events=self.events[: self.event_count],
            token_times=self.token_times[: self.token_time_count],
            output_tokens=self.output_tokens,
        )


@define(kw_only=True, eq=False)
class Completion:
    """Fields of a whole completion and of a stream's delta: what is said of these tokens.

    In a delta the fields from ``stop_reason`` on are set with the completion's last one.
    """

    index: int
    """Which of the ``n`` completions."""
    engine_request_id: str
    """The id that the engine knows it by."""
    engine_index: int
    """The engine that makes it."""
    token_ids: list[int]
    logprobs: Logprobs | None = None
    """One row per token id, cut to the number asked for. With ``logprob_token_ids`` the columns after
    the first are those ids, and their ranks mean nothing."""
    prompt_logprobs: Logprobs | None = None
    """On the first delivery. Row ``i`` is about prompt token ``i + 1``; the first has none."""
    prompt_token_id_logprobs: Array | None = None
    """On the first delivery: float32 ``[rows, ids]`` for the ids that were asked about."""
    sampling_masks: tuple[SamplingMask, ...] = ()
    routed_experts: Array | None = None
    """``[rows, layers, top_k]``."""
    num_nans_in_logits: int = 0

    stop_reason: int | str | None = None
    """With STOP: the stop token that matched, or the string given to `GenerateStream.stop`; None for
    end of text."""
    error: RequestErrorInfo | None = None
    """With ERROR: why, if the engine says."""
    mm_cache_miss_hashes: list[str] | None = None
    """With ERROR: multimodal data that has to be sent again."""
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None

    _progress: tuple[Any, ...]
    """The fields of `Progress`."""

    @property
    def usage(self) -> Usage:
        """Token counts up to and with this delivery."""
        return Progress._make(self._progress).usage()

    @property
    def timings(self) -> RequestTimings:
        """Durations up to this delivery."""
        return Progress._make(self._progress).timings()


@define(kw_only=True, eq=False)
class CompletionDelta(Completion):
    """What is new of a completion since the last delivery of its stream."""

    finish_reason: FinishReason | None = None
    """Set on the last delivery."""

    @property
    def finished(self) -> bool:
        """Whether this is the completion's last delivery."""
        return self.finish_reason is not None


@define(kw_only=True, eq=False)
class CompletionOutput(Completion):
    """One whole completion of a prompt."""

    finish_reason: FinishReason


@define(kw_only=True, eq=False)
class GenerateOutput:
    """The completions of one prompt.

    The properties about one completion are for ``n=1``; with more completions they raise
    `ValueError`, since there is no telling which one is meant.
    """

    request_id: str
    """The caller's id."""
    prompt_token_ids: list[int]
    completions: list[CompletionOutput]

    @property
    def token_ids(self) -> list[int]:
        """Of the only completion."""
        return self._only_completion("token_ids").token_ids

    @property
    def logprobs(self) -> Logprobs | None:
        """Of the only completion."""
        return self._only_completion("logprobs").logprobs

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Row ``i`` is about prompt token ``i + 1``; the same for all completions."""
        return self.completions[0].prompt_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Of the only completion."""
        return self._only_completion("finish_reason").finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Of the only completion."""
        return self._only_completion("stop_reason").stop_reason

    @property
    def error(self) -> RequestErrorInfo | None:
        """Of the only completion."""
        return self._only_completion("error").error

    @property
    def timings(self) -> RequestTimings:
        """Of the only completion."""
        return self._only_completion("timings").timings

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """Of the only completion."""
        return self._only_completion("kv_transfer_params").kv_transfer_params

    @property
    def usage(self) -> Usage:
        """The prompt once, the output tokens of all completions."""
        usages = [completion.usage for completion in self.completions]
        return attrs.evolve(usages[0], output_tokens=sum(usage.output_tokens for usage in usages))

    def raise_for_error(self) -> None:
        """Raise `RequestFailedError` if the engine reported an error for any completion."""
        for completion in self.completions:
            _raise_for_error(self.request_id, completion)

    def _only_completion(self, field: str) -> CompletionOutput:
        if len(self.completions) != 1:
            raise ValueError(
                f"there are {len(self.completions)} completions: read completions[i].{field}"
            )
        return self.completions[0]


@define(kw_only=True, eq=False)
class EncodeOutput:
    """The pooled prompt."""

    request_id: str
    """The caller's id."""
    prompt_token_ids: list[int]
    data: Array | None
    """The pooled vector or matrix, float32 for a bfloat16 model; None if it failed."""
    completion: CompletionOutput
    """How it ended: finish reason, error, usage, timings."""

    @property
    def finish_reason(self) -> FinishReason:
        """STOP, unless it failed or was aborted."""
        return self.completion.finish_reason

    def raise_for_error(self) -> None:
        """Raise `RequestFailedError` if the engine reported an error."""
        _raise_for_error(self.request_id, self.completion)


def _raise_for_error(request_id: str, completion: CompletionOutput) -> None:
    if completion.finish_reason is not FinishReason.ERROR:
        return
    if (error := completion.error) is None:
        raise RequestFailedError(request_id, None, "no reason was given", retryable=False)
    raise RequestFailedError(request_id, error.code, error.message, error.retryable)
