"""`LoadPlan` says which requests come when, `run_load` sends them and measures each one.

The names and meanings of the figures are those of ``vllm bench serve``, in ``vllm/benchmarks/serve.py``,
so that the two can be laid side by side: what a frontend and HTTP add is the difference.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

from trio_vllm import EngineCoreError, FinishReason, GenerateRequest, Llm, SamplingParams
from trio_vllm.values import define, frozen

TRACE_BLOCK = 512
"""Prompt tokens that one of the ``hash_ids`` of a Mooncake trace stands for."""


class TraceError(ValueError):
    """A trace file that cannot be read; the text says which line, and what is wrong."""


@frozen
class PlannedRequest:
    """One request of a plan."""

    time: float
    """Seconds after the start of the run."""
    prompt_token_ids: Sequence[int]
    output_len: int


@frozen(kw_only=True)
class LoadPlan:
    """Random prompts at random times; the same for the same seed.

    Lengths are drawn uniformly from ``length * (1 - range_ratio)`` to ``length * (1 + range_ratio)``.
    """

    request_rate: float = math.inf
    """Requests per second; infinite is all at once."""
    burstiness: float = 1.0
    """The shape of the gamma distribution of the times between requests: 1 is a Poisson process, less
    comes in bursts, more comes more evenly, infinite is a fixed interval."""
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    """Tokens that all prompts have in common, before the random ones."""
    vocab_size: int = 1000
    """Prompts are made of token ids below this number."""
    seed: int = 0

    def requests(self) -> Iterator[PlannedRequest]:
        """The requests, without end."""
        random = np.random.default_rng(self.seed)
        prefix = random.integers(0, self.vocab_size, self.prefix_len).tolist()
        time = 0.0
        while True:
            own = random.integers(0, self.vocab_size, self._length(self.input_len, random)).tolist()
            yield PlannedRequest(time, prefix + own, self._length(self.output_len, random))
            time += self._interval(random)

    def _length(self, mean: int, random: np.random.Generator) -> int:
        low = math.floor(mean * (1 - self.range_ratio))
        high = math.ceil(mean * (1 + self.range_ratio))
        return max(int(random.integers(low, high + 1)), 1)

    def _interval(self, random: np.random.Generator) -> float:
        if self.request_rate == math.inf:
            return 0.0
        if self.burstiness == math.inf:
            return 1 / self.request_rate
        return float(random.gamma(self.burstiness, 1 / (self.request_rate * self.burstiness)))


def read_trace(path: Path, *, vocab_size: int, seed: int, speed: float) -> Iterator[PlannedRequest]:
    """The requests of a recorded trace, ``speed`` times as fast as they were recorded.

    Either JSON lines as Mooncake publishes them (``timestamp`` in milliseconds, ``input_length``,
    ``output_length``, and ``hash_ids`` of blocks of `TRACE_BLOCK` tokens: equal ids are equal tokens), or
    a CSV file as BurstGPT does (``Timestamp`` in seconds, ``Request tokens``, ``Response tokens``).

    Raises:
      TraceError: A line is not of that form.
      OSError: The file cannot be read.
    """
    rows = _read_burstgpt(path) if path.suffix == ".csv" else _read_mooncake(path)
    for number, row in rows:
        try:
            time, input_len, output_len, hash_ids = row()
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"line {number} of {path}: {_reason(error)}") from error
        if output_len > 0 < input_len:  # a request that failed when it was recorded has no answer
            prompt = _prompt(number, input_len, hash_ids, vocab_size, seed)
            yield PlannedRequest(time / speed, prompt, output_len)


Row = Callable[[], tuple[float, int, int, Sequence[int]]]


def _read_mooncake(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, lambda line=line: _mooncake_row(json.loads(line))  # type: ignore[misc]


def _mooncake_row(item: Mapping[str, Any]) -> tuple[float, int, int, Sequence[int]]:
    return (
        float(item["timestamp"]) / 1000,
        int(item["input_length"]),
        int(item["output_length"]),
        item.get("hash_ids", ()),
    )


def _read_burstgpt(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for number, item in enumerate(csv.DictReader(lines), 2):
            yield number, lambda item=item: _burstgpt_row(item)  # type: ignore[misc]


def _burstgpt_row(item: Mapping[str, str]) -> tuple[float, int, int, Sequence[int]]:
    return float(item["Timestamp"]), int(item["Request tokens"]), int(item["Response tokens"]), ()


def _reason(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


def _prompt(
    number: int, length: int, hash_ids: Sequence[int], vocab_size: int, seed: int
) -> list[int]:
    """Tokens for one request: block by block from its hash ids, the rest its own."""
    tokens: list[int] = []
    for hash_id in hash_ids:
        block = np.random.default_rng([seed, 0, hash_id])
        tokens.extend(block.integers(0, vocab_size, TRACE_BLOCK).tolist())
    own = np.random.default_rng([seed, 1, number])
    tokens.extend(own.integers(0, vocab_size, max(length - len(tokens), 0)).tolist())
    return tokens[:length]


# Sending and measuring ----------------------------------------------------------------------------


@define
class RequestRecord:
    """What happened to one request; times are seconds after the start of the run."""

    input_len: int
    start_time: float
    output_len: int = 0
    delivery_times: list[float] = attrs.field(factory=list)
    delivery_sizes: list[int] = attrs.field(factory=list)
    end_time: float = 0.0
    error: str = ""

    @property
    def latency(self) -> float:
        """From sending it to its end."""
        return self.end_time - self.start_time

    @property
    def ttft(self) -> float:
        """From sending it to its first token."""
        return self.delivery_times[0] - self.start_time if self.delivery_times else 0.0

    @property
    def itl(self) -> list[float]:
        """Between each two deliveries."""
        return [
            later - earlier
            for earlier, later in zip(self.delivery_times, self.delivery_times[1:], strict=False)
        ]

    @property
    def tpot(self) -> float:
        """Per token after the first; 0 if there is none."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


async def run_load(
    llm: Llm,
    requests: Iterator[PlannedRequest],
    *,
    count: float = math.inf,
    duration: float = math.inf,
    max_concurrency: int | None = None,
    on_end: Callable[[RequestRecord], None] = lambda _record: None,
) -> LoadResult:
    """Send each request at its time, and wait for the last of them.

    Args:
      llm: Sends them.
      requests: In the order of their times.
      count: How many are sent at most.
      duration: Seconds after which no more are sent.
      max_concurrency: How many may be in flight; one that would be too much is sent when another one
        has ended.
      on_end: Called with each that has ended.
    """
    begin = trio.current_time()
    records: list[RequestRecord] = []
    slots = trio.Semaphore(max_concurrency) if max_concurrency else None

    async def measure(planned: PlannedRequest) -> None:
        record = await _measure(llm, planned, begin)
        records.append(record)
        if slots is not None:
            slots.release()
        on_end(record)

    async def send_all(nursery: trio.Nursery) -> None:
        await trio.lowlevel.checkpoint()
        for number, planned in enumerate(requests):
            if number >= count or planned.time > duration:
                return
            await trio.sleep_until(begin + planned.time)
            if slots is not None:
                await slots.acquire()
            if trio.current_time() - begin > duration:
                return
            nursery.start_soon(measure, planned)

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            await send_all(nursery)
        except (OSError, TraceError) as error:  # of the trace; bare, and not in a group
            failure = error
            nursery.cancel_scope.cancel(reason="the plan cannot be read on")
    if failure is not None:
        raise failure
    return LoadResult(records, trio.current_time() - begin)


async def _measure(llm: Llm, planned: PlannedRequest, begin: float) -> RequestRecord:
    record = RequestRecord(len(planned.prompt_token_ids), trio.current_time() - begin)
    request = GenerateRequest(
        prompt_token_ids=planned.prompt_token_ids,
        sampling_params=SamplingParams(max_tokens=planned.output_len),
    )
    try:
        async with llm.stream(request) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    record.delivery_times.append(trio.current_time() - begin)
                    record.delivery_sizes.append(len(delta.token_ids))
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    reason = delta.error.message if delta.error else "no reason was given"
                    record.error = f"{delta.finish_reason.name.lower()}: {reason}"
    except EngineCoreError as error:
        record.error = str(error)
    record.output_len = sum(record.delivery_sizes)
    record.end_time = trio.current_time() - begin
    return record  # noqa: ASYNC910


# Figures ------------------------------------------------------------------------------------------


@frozen
class LoadResult:
    """All requests of a run, in the order of their ends."""

    records: Sequence[RequestRecord]
    duration: float
    """Seconds."""

    @property
    def completed(self) -> list[RequestRecord]:
        """Those without an error."""
        return [record for record in self.records if not record.error]

    def summary(
        self, percentiles: Sequence[float] = (99,), goodput: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """The figures under the names of ``vllm bench serve``; latencies in milliseconds.

        Args:
          percentiles: Which of each latency's, from 0 to 100.
          goodput: Limits in milliseconds by ``ttft``, ``tpot`` or ``e2el``; requests that keep all of
            them count as good.
        """
        completed = self.completed
        seconds = self.duration or math.nan
        input_tokens = sum(record.input_len for record in completed)
        output_tokens = sum(record.output_len for record in completed)
        good = [record for record in completed if _is_good(record, goodput or {})]
        return {
            "duration": self.duration,
            "completed": len(completed),
            "failed": len(self.records) - len(completed),
            "total_input_tokens": input_tokens,
            "total_output_tokens": output_tokens,
            "request_throughput": len(completed) / seconds,
            "request_goodput": len(good) / seconds if goodput else None,
            "output_throughput": output_tokens / seconds,
            "total_token_throughput": (input_tokens + output_tokens) / seconds,
            "max_output_tokens_per_s": self._max_tokens_per_second(),
            "max_concurrent_requests": self._max_concurrent(),
            **_spread("ttft", [record.ttft for record in completed], percentiles),
            **_spread("tpot", [r.tpot for r in completed if r.output_len > 1], percentiles),
            **_spread("itl", [gap for record in completed for gap in record.itl], percentiles),
            **_spread("e2el", [record.latency for record in completed], percentiles),
        }

    def details(self) -> dict[str, Any]:
        """The figures of each request, under the names of ``vllm bench serve``; in seconds."""
        return {
            "input_lens": [record.input_len for record in self.records],
            "output_lens": [record.output_len for record in self.records],
            "ttfts": [record.ttft for record in self.records],
            "itls": [record.itl for record in self.records],
            "latencies": [record.latency for record in self.records],
            "start_times": [record.start_time for record in self.records],
            "errors": [record.error for record in self.records],
        }

    def _max_tokens_per_second(self) -> float:
        by_second: Counter[int] = Counter()
        for record in self.completed:
            for time, size in zip(record.delivery_times, record.delivery_sizes, strict=True):
                by_second[int(time)] += size
        return float(max(by_second.values(), default=0))

    def _max_concurrent(self) -> int:
        changes = [(record.start_time, 1) for record in self.records]
        changes += [(record.end_time, -1) for record in self.records]
        running = np.cumsum([change for _, change in sorted(changes)])
        return int(running.max(initial=0))


def _is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    figures = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return all(figures[name] * 1000 <= limit for name, limit in limits.items())


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds or [0.0]) * 1000
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles},
    }
