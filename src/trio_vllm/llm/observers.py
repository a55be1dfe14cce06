"""`Observer` is called for each event of the engines' requests; `StatsLine` logs a summary of them."""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import attrs
import trio

from trio_vllm.concurrency import Waker
from trio_vllm.errors import ConfigurationError
from trio_vllm.llm.collector import Collector
from trio_vllm.llm.output import Progress, RequestTimings, Usage
from trio_vllm.protocol import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    EventType,
    FinishReason,
    PrefillStats,
    SchedulerStats,
    SpecDecodingStats,
)
from trio_vllm.values import define, frozen


class AdapterState(enum.Enum):
    """Where a request of a LoRA adapter is, as far as its events tell."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    OVER = enum.auto()


@frozen(kw_only=True)
class FinishedCompletion:
    """One engine request that has ended, as `Observer.finished` gets it."""

    request_id: str
    """The engine's."""
    external_request_id: str
    """The caller's."""
    sampling_params: EngineCoreSamplingParams | None
    """None if the prompt was pooled."""
    arrival_time: float
    """UNIX seconds."""
    finish_reason: FinishReason
    usage: Usage
    timings: RequestTimings
    preemption_count: int | None
    """None if the engine sends no events."""
    computed_prompt_tokens: int
    """Prompt tokens that were not in this engine's cache. In `usage` those that the engine of the
    prefill had to compute are counted instead."""
    is_corrupted: bool
    """Whether there were NaNs in its logits."""


class Observer:
    """Base of what `Llm` calls for each event, by engine; its methods do nothing. Times are seconds.

    They are called in the task that hands out outputs, so they must not wait or raise. Of a request
    that is refused before it runs only `trace_headers` and `over` tell.
    """

    def start(self, engine_indices: Iterable[int], max_model_len: int, max_loras: int) -> None:
        """Engines are connected; called once, before every other method."""

    def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """An engine has sent its statistics."""

    def sleep_level(self, engine_index: int, level: int | None) -> None:
        """This client has put an engine to sleep, at this level, or woken it up, which is None."""

    def trace_headers(self, request: EngineCoreRequest) -> Mapping[str, str] | None:
        """An engine request is about to be sent; gives headers in place of its own, or None.

        Called in the caller's task. `over` follows in any case.
        """

    def batch(self, engine_index: int, prompt_tokens: int, output_tokens: int) -> None:
        """A message of an engine had tokens: so many computed in prefills, so many new ones."""

    def event(self, engine_index: int, event: EngineCoreEvent) -> None:
        """An engine has queued, scheduled or preempted a request."""

    def adapter(self, request_id: str, lora_name: str, state: AdapterState) -> None:
        """A request for a LoRA adapter waits, runs or has ended."""

    def prefilled(self, engine_index: int, stats: PrefillStats) -> None:
        """The prefill of a request has ended."""

    def first_tokens(self, engine_index: int, seconds: float) -> None:
        """The first tokens of a request, or its pooled prompt, came this long after its arrival."""

    def tokens(self, engine_index: int, count: int, seconds: float | None) -> None:
        """Tokens of a request came, this long after its previous ones; None with the first."""

    def finished(self, engine_index: int, completion: FinishedCompletion) -> None:
        """An engine request has ended; not called for one that failed with its engine."""

    def over(self, request_id: str, failure: str) -> None:
        """The caller has done with an engine request; ``failure`` says why it failed, if it did."""

    def request_over(self, engine_index: int, completion_count: int, longest: int) -> None:
        """All completions of a prompt have ended; the longest has this many tokens."""


@define
class _Batch:
    timestamp: float
    prompt_tokens: int = 0
    output_tokens: int = 0


class BatchTokens:
    """Sums the tokens of each message of an engine for `Observer.batch`.

    All outputs of a message have its timestamp. So a message is over when one with another timestamp
    begins; at the latest when its statistics, which come after its outputs, or the end of one of its
    requests is told of.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._open: dict[int, _Batch] = {}

    def add(self, engine_index: int, timestamp: float, prompt: int, output: int) -> None:
        """Add tokens that came in the message with this timestamp."""
        batch = self._open.get(engine_index)
        if batch is None or batch.timestamp != timestamp:
            self.end(engine_index)
            batch = self._open[engine_index] = _Batch(timestamp)
        batch.prompt_tokens += prompt
        batch.output_tokens += output

    def end(self, engine_index: int) -> None:
        """Tell the observers of the last message, if it had tokens."""
        if (batch := self._open.pop(engine_index, None)) is not None:
            for observer in self._observers:
                observer.batch(engine_index, batch.prompt_tokens, batch.output_tokens)


def sleep_levels(
    method: str, args: Sequence[Any], results: Mapping[int, Any]
) -> dict[int, int | None]:
    """Tell the new sleep levels of engines by a utility call that has succeeded, if it sets any.

    As ``AsyncLLM`` in ``vllm/v1/engine/async_llm.py`` notes them; None is awake.
    """
    match method:
        case "sleep":
            return dict.fromkeys(results, args[0] if args else 1)
        case "release_kv_cache_memory":
            return dict.fromkeys(results, 0)
        case "wake_up":
            return {index: None for index, is_awake in results.items() if is_awake is not False}
        case _:
            return {}


_ADAPTER_STATES = {
    EventType.QUEUED: AdapterState.WAITING,
    EventType.SCHEDULED: AdapterState.RUNNING,
    EventType.PREEMPTED: AdapterState.WAITING,
}


class ObservedCollector(Collector):
    """Collector that calls observers; used only if there are any."""

    __slots__ = (
        "_adapter",
        "_batch_tokens",
        "_external_id",
        "_is_corrupted",
        "_last_time",
        "_observers",
        "_preemption_count",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        waker: Waker,
        clock: Callable[[], float],
        *,
        interval: int,
        observers: Sequence[Observer],
        batch_tokens: BatchTokens,
    ) -> None:
        super().__init__(request, index, waker, clock, interval=interval)
        self._observers = observers
        self._batch_tokens = batch_tokens
        self._external_id = request.external_req_id or request.request_id
        # What is no adapter is for the client to refuse.
        self._adapter: str | None = getattr(request.lora_request, "lora_name", None)
        self._last_time: float | None = None
        self._preemption_count = 0
        self._is_corrupted = False

    @property
    def only_collects(self) -> bool:
        return False  # the observers are told of each token

    def begin(self) -> None:
        self._tell_adapter(AdapterState.WAITING)

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        is_first = self._first_token_time is None
        Collector.add_tokens(self, token_ids, timestamp, version)  # faster than by super()
        last, self._last_time = self._last_time, timestamp or None
        seconds = timestamp - last if timestamp and last is not None else None
        engine_index, count = self.engine_index, len(token_ids)
        self._batch_tokens.add(engine_index, timestamp, 0, count)
        for observer in self._observers:
            if is_first:
                self._tell_first(observer)
            observer.tokens(engine_index, count, seconds)

    def _tell_first(self, observer: Observer) -> None:
        if self._first_token_time is not None:
            observer.first_tokens(self.engine_index, self._first_token_time - self._arrival_time)

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        is_first = self._first_token_time is None
        super().add_output(output, timestamp, version)
        if is_first and output.pooling_output is not None:
            for observer in self._observers:
                self._tell_first(observer)
        for event in output.events or ():
            self._tell_event(event)
        if output.prefill_stats is not None:
            self._tell_prefill(output.prefill_stats, timestamp)
        if output.num_nans_in_logits > 0:
            self._is_corrupted = True
        if output.finish_reason is not None:
            self._tell_end(output.finish_reason)

    def abandon(self) -> None:
        if not self.is_over:
            self._tell_end(FinishReason.ABORT)
        elif self.error is not None:
            self._tell_adapter(AdapterState.OVER)
        failure = "" if self.error is None else str(self.error)
        if self.is_refused and self._last is not None and self._last.error is not None:
            failure = self._last.error.message
        self._tell_over(failure)

    def refuse(self, error: BaseException) -> None:
        self._tell_over(str(error))

    def _tell_over(self, failure: str) -> None:
        for observer in self._observers:
            observer.over(self.request_id, failure)

    def _tell_event(self, event: EngineCoreEvent) -> None:
        if event.type is EventType.PREEMPTED:
            self._preemption_count += 1
        self._tell_adapter(_ADAPTER_STATES[event.type])
        for observer in self._observers:
            observer.event(self.engine_index, event)

    def _tell_prefill(self, stats: PrefillStats, timestamp: float) -> None:
        self._batch_tokens.add(self.engine_index, timestamp, stats.num_computed_tokens, 0)
        for observer in self._observers:
            observer.prefilled(self.engine_index, stats)

    def _tell_adapter(self, state: AdapterState) -> None:
        if self._adapter is not None:
            for observer in self._observers:
                observer.adapter(self.request_id, self._adapter, state)

    def _tell_end(self, reason: FinishReason) -> None:
        self._tell_adapter(AdapterState.OVER)
        if self.is_refused:
            return
        progress = Progress._make(self._progress())
        completion = FinishedCompletion(
            request_id=self.request_id,
            external_request_id=self._external_id,
            sampling_params=self._params,
            arrival_time=self._arrival_time,
            finish_reason=reason,
            usage=progress.usage(),
            timings=progress.timings(),
            preemption_count=self._preemption_count if self._events else None,
            computed_prompt_tokens=self._computed_prompt_tokens(),
            is_corrupted=self._is_corrupted,
        )
        for observer in self._observers:
            observer.finished(self.engine_index, completion)

    def _computed_prompt_tokens(self) -> int:
        cached = 0 if self._prefill_stats is None else self._prefill_stats.num_cached_tokens
        return max(self._prompt_tokens - cached, 0)


_log = logging.getLogger("trio_vllm.llm")


@define
class _Drafts:
    """Sums of speculative decoding."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = attrs.field(factory=list)

    def add(self, stats: SpecDecodingStats) -> None:
        self.drafts += stats.num_drafts
        self.drafted += stats.num_draft_tokens
        self.accepted += stats.num_accepted_tokens
        pairs = zip_longest(
            self.accepted_by_position, stats.num_accepted_tokens_per_pos, fillvalue=0
        )
        self.accepted_by_position = [sum(pair) for pair in pairs]

    def describe(self, seconds: float) -> list[str]:
        """Parts of the line; the length of acceptance counts the token after the draft, too."""
        if not self.drafts:
            return []
        rates = " ".join(f"{count / self.drafts:.3f}" for count in self.accepted_by_position)
        return [
            f"mean acceptance length {1 + self.accepted / self.drafts:.2f}",
            f"accepted {self.accepted / seconds:.1f} tokens/s",
            f"drafted {self.drafted / seconds:.1f} tokens/s",
            *_rate("draft acceptance rate", self.accepted, self.drafted),
            *([f"acceptance by position {rates}"] if rates else []),
        ]


@define
class _Counts:
    """Sums since the last line."""

    since: float
    """On trio's clock."""
    prompt_tokens: int = 0
    """Computed ones; those from a cache cost no time."""
    generation_tokens: int = 0
    preemptions: int = 0
    corrupted: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    external_cache_queries: int = 0
    external_cache_hits: int = 0
    flops: int = 0
    bytes: int = 0
    measured_engines: set[int] = attrs.field(factory=set)
    """Those that estimate their work."""
    drafts: _Drafts = attrs.field(factory=_Drafts)

    @property
    def is_idle(self) -> bool:
        return not self.prompt_tokens and not self.generation_tokens

    def add(self, engine_index: int, stats: SchedulerStats) -> None:
        self.cache_queries += stats.prefix_cache_stats.queries
        self.cache_hits += stats.prefix_cache_stats.hits
        if (external := stats.connector_prefix_cache_stats) is not None:
            self.external_cache_queries += external.queries
            self.external_cache_hits += external.hits
        if stats.spec_decoding_stats is not None:
            self.drafts.add(stats.spec_decoding_stats)
        if (perf := stats.perf_stats) is not None:
            self.measured_engines.add(engine_index)
            self.flops += perf.num_flops_per_gpu
            self.bytes += perf.num_read_bytes_per_gpu + perf.num_write_bytes_per_gpu

    def describe_throughput(self, seconds: float) -> list[str]:
        return [
            f"prompt throughput {self.prompt_tokens / seconds:.1f} tokens/s",
            f"generation throughput {self.generation_tokens / seconds:.1f} tokens/s",
        ]

    def describe_events(self, seconds: float) -> list[str]:
        return [
            *_count("preemptions", self.preemptions),
            *_count("corrupted", self.corrupted),
            *_rate("prefix cache hit rate", self.cache_hits, self.cache_queries),
            *_rate(
                "external prefix cache hit rate",
                self.external_cache_hits,
                self.external_cache_queries,
            ),
            *self.drafts.describe(seconds),
            *self._describe_work(seconds),
        ]

    def _describe_work(self, seconds: float) -> list[str]:
        """Per GPU, as a mean over the engines, whose GPUs are different ones."""
        if not self.flops and not self.bytes:
            return []
        each = seconds * len(self.measured_engines)
        return [
            f"{self.flops / each / 1e12:.1f} TFLOP/s per GPU",
            f"{self.bytes / each / 1e9:.1f} GB/s per GPU",
        ]


def _count(name: str, number: int) -> list[str]:
    return [f"{name} {number}"] if number else []


def _rate(name: str, hits: int, queries: int) -> list[str]:
    return [f"{name} {hits / queries:.1%}"] if queries else []


def _describe_state(engines: Sequence[SchedulerStats]) -> list[str]:
    """Requests and KV cache of all engines that have sent statistics."""
    if not engines:
        return []
    fetches: Counter[str] = Counter()
    for stats in engines:
        fetches.update(stats.num_kv_fetch_reqs_by_stage)
    usage = sum(stats.kv_cache_usage for stats in engines) / len(engines)
    return [
        f"running {sum(stats.num_running_reqs for stats in engines)}",
        f"waiting {sum(waiting_count(stats) for stats in engines)}",
        *_count("deferred", sum(stats.num_skipped_waiting_reqs for stats in engines)),
        *(f"KV fetch {stage.replace('_', ' ')} {n}" for stage, n in fetches.items() if n),
        f"KV cache usage {usage:.1%}",
    ]


class StatsLine(Observer):
    """Observer that logs throughput and load, summed over all engines, every so many seconds.

    At INFO while tokens come and once after, else at DEBUG; what engines do not tell is left out.
    Says what ``LoggingStatLogger`` of ``vllm/v1/metrics/loggers.py`` says, in one line. Rates of hits
    are over the time since the last line.
    """

    def __init__(self, interval: float) -> None:
        """``interval`` is in seconds."""
        if not 0 < interval < math.inf:
            raise ConfigurationError("stats_interval must be above 0")
        self._interval = interval
        self._counts = _Counts(0.0)
        self._was_idle = True
        self._newest: dict[int, SchedulerStats] = {}

    async def run(self) -> None:
        """Write lines until cancelled; a task of `open_llm`."""
        self._counts.since = trio.current_time()
        while True:
            await trio.sleep(self._interval)
            self._write(trio.current_time())

    def _write(self, now: float) -> None:
        counts, self._counts = self._counts, _Counts(now)
        seconds = now - counts.since
        # One line of zeros shows that the work is done.
        level = logging.DEBUG if counts.is_idle and self._was_idle else logging.INFO
        self._was_idle = counts.is_idle
        parts = [
            *counts.describe_throughput(seconds),
            *_describe_state(list(self._newest.values())),
            *counts.describe_events(seconds),
        ]
        _log.log(level, "%s", ", ".join(parts))

    # Observer -----------------------------------------------------------------------------------

    def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        self._newest[engine_index] = stats
        self._counts.add(engine_index, stats)

    def prefilled(self, engine_index: int, stats: PrefillStats) -> None:
        self._counts.prompt_tokens += stats.num_computed_tokens

    def tokens(self, engine_index: int, count: int, seconds: float | None) -> None:
        self._counts.generation_tokens += count

    def event(self, engine_index: int, event: EngineCoreEvent) -> None:
        if event.type is EventType.PREEMPTED:
            self._counts.preemptions += 1

    def finished(self, engine_index: int, completion: FinishedCompletion) -> None:
        self._counts.corrupted += completion.is_corrupted


def waiting_count(stats: SchedulerStats) -> int:
    """Count the requests that do not run, whatever they wait for."""
    return stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
