"""`Llm`: completes prompts over an `EngineCoreClient`; `open_llm` connects both.

This is the one place that makes request ids and reads the wall clock. Mirrors ``rust/src/llm`` and,
for several completions of one prompt, ``vllm/v1/engine/parallel_sampling.py``.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trio_vllm.client import (
    EngineCoreClient,
    EngineSource,
    LoadBalancer,
    as_request_ids,
    open_client,
)
from trio_vllm.concurrency import Waker, explains_misuse, running
from trio_vllm.errors import ConfigurationError, copy_error
from trio_vllm.llm.batch import BatchResults
from trio_vllm.llm.collector import Collector
from trio_vllm.llm.observers import (
    BatchTokens,
    ObservedCollector,
    Observer,
    StatsLine,
    sleep_levels,
)
from trio_vllm.llm.output import CompletionDelta, EncodeOutput, GenerateOutput
from trio_vllm.llm.request import (
    EncodeRequest,
    GenerateRequest,
    PromptRequest,
    RequestIds,
    check_kind,
    check_many,
    to_engine_requests,
    to_pooling_request,
)
from trio_vllm.llm.statistics import (
    LlmStatistics,
    TokenCounter,
    TokenTotals,
    describe_engine,
)
from trio_vllm.protocol import EngineCoreRequest, SchedulerStats
from trio_vllm.values import define


@define(eq=False)
class Generation:
    """The engine requests of one caller's request; they share a waker, on which one task may wait."""

    external_id: str
    collectors: Sequence[Collector]
    _waker: Waker
    submitted_count: int = attrs.field(default=0, init=False)
    """How many of them were submitted to the client."""
    _turn: int = attrs.field(default=0, init=False)
    """The completion whose turn it is to deliver."""

    async def next_delta(self) -> CompletionDelta:
        """Wait until some completion has a delivery; `StopAsyncIteration` when all have ended."""
        # Each coroutine that is entered here is paid for with each token of a stream.
        if self._has_changed():
            await trio.lowlevel.checkpoint()
        else:
            await self._waker.wait()
        while (due := self._next_due()) is None:
            self._raise_error()
            if self._has_ended():
                raise StopAsyncIteration
            await self._waker.wait()
        return due.take_delta()

    def _next_due(self) -> Collector | None:
        """Choose in turn: with a slow caller the first completion might always be due."""
        collectors, turn = self.collectors, self._turn
        if len(collectors) == 1:
            return collectors[0] if collectors[0].is_due else None
        for number in range(turn, turn + len(collectors)):
            collector = collectors[number % len(collectors)]
            if collector.is_due:
                self._turn = (number + 1) % len(collectors)
                return collector
        return None

    async def wait_ended(self) -> None:
        """Wait for the ends of all completions."""
        if self._has_changed():
            await trio.lowlevel.checkpoint()
        else:
            await self._waker.wait()
        for collector in self.collectors:
            while not collector.finished:
                self._raise_error()
                await self._waker.wait()

    def _has_changed(self) -> bool:
        # A loop and no generator: a stream's reader looks here for each token.
        has_ended = True
        for collector in self.collectors:
            if collector.is_due or collector.error is not None:
                return True
            has_ended = has_ended and collector.finished
        return has_ended

    def _has_ended(self) -> bool:
        return all(collector.finished for collector in self.collectors)

    def _raise_error(self) -> None:
        for collector in self.collectors:
            if collector.error is not None:
                raise copy_error(collector.error)


class GenerateStream:
    """Asynchronous iterator over the deltas of a prompt's completions; see `Llm.stream`.

    A caller who is slower than the engine gets several tokens at once. One task at a time may
    iterate.
    """

    def __init__(self, generation: Generation, drop: Callable[[Collector], None]) -> None:
        """``drop`` forgets an engine request and aborts it at its engine."""
        self.request_id = generation.external_id
        """The caller's id."""
        self._generation = generation
        self._drop = drop

    def __aiter__(self) -> GenerateStream:
        return self

    def __anext__(self) -> Coroutine[Any, Any, CompletionDelta]:
        """Wait for the next delivery.

        Raises:
          EngineDeadError: The engine died, or its connection was lost.
          DecodeError: An output of this request could not be read.
          ClientClosedError: The client was closed.
          trio.BusyResourceError: Another task is iterating.

        Cancellation:
          Loses nothing; what came in the meantime is part of the next delivery.
        """
        return self._generation.next_delta()

    def stop(self, stop_reason: str | None = None, *, index: int | None = None) -> None:
        """Finish a completion whose text, as the caller detokenized it, matched a stop string.

        Its engine request is aborted, and its last delta comes with `FinishReason.STOP` and this
        stop reason; observers count it as stopped, not as aborted. Without ``index`` all completions
        that have not ended are finished. One that has ended stays as it is.
        """
        collectors = self._generation.collectors
        for collector in collectors if index is None else [collectors[index]]:
            if not collector.is_over:
                self._drop(collector)
                collector.stop(stop_reason)


ASYNCIO_LLM = "the Llm of trio_vllm.asyncio.open_llm"

FINAL_ONLY = 0
"""The delivery interval of a request that is waited for to its end."""


class Llm:
    """Token in, token out; made by `open_llm`, or over a client of your own."""

    def __init__(
        self,
        client: EngineCoreClient,
        *,
        randomize_request_ids: bool = True,
        stream_interval: int = 1,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up over ``client``, whose tasks run.

        Args:
          client: Stays the caller's to close.
          randomize_request_ids: Engines see ``{request_id}-{8 hex}``. Without it they see the
            caller's ids as they are, which then must be unique.
          stream_interval: Streams deliver at least this many tokens at a time after the first; a
            request can ask for more.
          observers: Are called for each event.
          clock: Gives UNIX seconds.

        Raises:
          ConfigurationError: ``stream_interval`` is below 1.
        """
        if stream_interval < 1:
            raise ConfigurationError("stream_interval must be 1 or more")
        self.client = client
        self._max_model_len = client.max_model_len
        self._stream_interval = stream_interval
        self._randomize = randomize_request_ids
        self._observers = observers
        self._batch_tokens = BatchTokens(observers)
        self._clock = clock
        self._random = random.Random()  # our own: a program may seed the shared one like others do
        # By the caller's id; several requests may share it.
        self._generations: dict[str, list[Generation]] = {}
        self._counter = TokenCounter(trio.current_time())
        if observers:
            for observer in observers:
                observer.start(
                    client.engine_indices, client.max_model_len, client.engine_info.max_loras
                )
            client.on_scheduler_stats(self._tell_stats)
            client.on_utility_results(self._tell_results)

    @property
    def in_flight_count(self) -> int:
        """Requests of callers that have not ended; each may be several engine requests."""
        return sum(map(len, self._generations.values()))

    def statistics(self, since: LlmStatistics | None = None) -> LlmStatistics:
        """What is known now of engines and requests; statistics that cannot be read are left out.

        Args:
          since: Earlier ones, from which on throughput and hit rates are counted; else it is since
            this `Llm` was made.
        """
        now, totals = trio.current_time(), self._counter.totals(self._in_flight())
        oldest = self._oldest_ages()
        return LlmStatistics(
            time=now,
            engines={
                index: describe_engine(
                    snapshot,
                    totals.get(index, TokenTotals()),
                    oldest.get(index),
                    now=now,
                    earlier=None if since is None else since.engines.get(index),
                    since=self._counter.since if since is None else since.time,
                )
                for index, snapshot in self.client.engine_snapshots().items()
            },
            in_flight=self.in_flight_count,
        )

    def _in_flight(self) -> Iterator[Collector]:
        for generations in self._generations.values():
            for generation in generations:
                yield from generation.collectors[: generation.submitted_count]

    def _oldest_ages(self) -> dict[int, float]:
        """Seconds since the arrival of the oldest request that has not ended, by engine."""
        ages: dict[int, float] = {}
        now = self._clock()
        for collector in self._in_flight():
            if not collector.is_over:
                age, index = now - collector.arrival_time, collector.engine_index
                ages[index] = max(age, ages.get(index, 0.0))
        return ages

    def _tell_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        self._batch_tokens.end(engine_index)
        for observer in self._observers:
            observer.scheduler_stats(engine_index, stats)

    def _tell_results(self, method: str, args: Sequence[Any], results: Mapping[int, Any]) -> None:
        for engine_index, level in sleep_levels(method, args, results).items():
            for observer in self._observers:
                observer.sleep_level(engine_index, level)

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Complete a prompt and wait for the end.

        An abort (by `abort`, or by the engine as it shuts down) is a normal output with
        `FinishReason.ABORT`; an error that the engine reports for this request is one with
        `FinishReason.ERROR` and its details.

        What the request depends on and is not known of the engines yet is found out first (see
        `CoreDriver.prepare`): the size of the vocabulary, whether its adapter loads.

        Raises:
          RequestError: The request was refused, nothing was sent.
          EngineDeadError: The engine died, or its connection was lost.
          DecodeError: An output of this request could not be read, or does not fit it.
          UtilityError: The engines would not say what they support.
          ClientClosedError: The client is closed.

        Cancellation:
          Aborts the request.
        """
        check_kind("generate", request, GenerateRequest)
        generation = await self._begin(request, FINAL_ONLY)
        try:
            await generation.wait_ended()
            return GenerateOutput(
                request_id=generation.external_id,
                prompt_token_ids=list(request.prompt_token_ids),
                completions=[collector.take_output() for collector in generation.collectors],
            )
        finally:
            self._end(generation)

    @explains_misuse("llm.stream", instead=ASYNCIO_LLM)
    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateStream]:
        """Complete a prompt; ``async with llm.stream(request) as deltas`` iterates over what is new.

        The first token is delivered at once, later ones when ``stream_interval`` of them are there.
        Leaving the block early, for whatever reason, aborts the request. Entering raises what
        `generate` raises before anything was sent, iterating the rest.
        """
        check_kind("stream", request, GenerateRequest)
        interval = self._stream_interval
        if type(asked := request.sampling_params.stream_interval) is int:  # or it is refused
            interval = max(interval, asked)
        generation = await self._begin(request, interval)
        try:
            yield GenerateStream(generation, self.client.driver.drop)
        finally:
            self._end(generation)

    async def encode(self, request: EncodeRequest) -> EncodeOutput:
        """Pool a prompt. Raises and is cancelled as `generate`.

        A task that the model does not support is refused. If the engines have not said what it
        supports as the client was opened, they are asked again now.
        """
        check_kind("encode", request, EncodeRequest)
        generation = await self._begin(request, FINAL_ONLY)
        try:
            await generation.wait_ended()
            (collector,) = generation.collectors
            return EncodeOutput(
                request_id=generation.external_id,
                prompt_token_ids=list(request.prompt_token_ids),
                data=collector.pooled,
                completion=collector.take_output(),
            )
        finally:
            self._end(generation)

    @explains_misuse("llm.map", instead=ASYNCIO_LLM)
    @asynccontextmanager
    async def map(
        self,
        requests: Iterable[GenerateRequest] | AsyncIterable[GenerateRequest],
        *,
        limit: int = 256,
        ordered: bool = False,
        retries: int = 0,
    ) -> AsyncIterator[BatchResults[GenerateRequest, GenerateOutput]]:
        """Complete many prompts; ``async with llm.map(requests) as results`` iterates over pairs.

        For thousands of them this is also the way that lets other tasks go on: trio runs the first
        step of all tasks that are started together before any other, for 50,000 that is a second.

        A pair is a request and its output. In place of an output stands the `EngineCoreError` of a
        request that failed; the others go on. Leaving the block aborts what is in flight.

        When no engine is left, no further request is taken, and the iterator raises
        `EngineDeadError` after the pairs that there are. So what has come is done, and nothing else
        is: `BatchResults.unanswered` are the requests that were taken without an answer. It is the
        same with `ClientClosedError` if the client is closed.

        Args:
          requests: Taken from one by one, as there is room; may be endless.
          limit: How many requests may be in flight or wait to be taken out of the iterator.
          ordered: Whether the pairs come in the order of the requests, instead of as they end. When
            no engine is left, none comes behind one that is missing: what has come is the
            beginning of the requests. What was answered behind it is unanswered, too.
          retries: How often a request is sent again whose engine has died meanwhile, if another
            one lives.

        Raises:
          ConfigurationError: ``limit`` or ``retries`` is too small.

        Cancellation:
          Aborts what is in flight.
        """
        check_many("map", requests)

        async def complete(request: GenerateRequest) -> GenerateOutput:
            check_kind("map", request, GenerateRequest)
            return await self.generate(request)

        results = BatchResults(
            requests,
            complete,
            self.client,
            limit=limit,
            ordered=ordered,
            retries=retries,
        )
        async with running(results.run):
            yield results

    def abort(self, request_ids: Iterable[str] = ()) -> None:
        """End requests by the caller's ids, each with all engine requests it stands for.

        Unknown and finished ids are ignored. Without ids, everything in flight is aborted. The
        callers that wait get the tokens so far, with `FinishReason.ABORT`.
        """
        external_ids = as_request_ids(request_ids) or list(self._generations)
        # There may be very many: they are found now, and their engine requests in pieces.
        found = [*filter(None, map(self._generations.get, external_ids))]
        generations = [*itertools.chain.from_iterable(found)]
        self.client.driver.abort_sinks(
            c for one in generations for c in one.collectors[: one.submitted_count]
        )

    async def shutdown(self) -> None:
        """Abort everything and close the client; idempotent. Later calls raise `ClientClosedError`."""
        self.abort()
        self.client.close()
        await trio.lowlevel.checkpoint()

    # From the caller's request to the engines' ----------------------------------------------------

    def _make_ids(self, request: PromptRequest) -> RequestIds:
        digits = f"{self._random.getrandbits(160):040x}"
        external_id = digits[8:] if request.request_id is None else request.request_id
        return RequestIds(
            external_id,
            f"{external_id}-{digits[:8]}" if self._randomize else external_id,
            self._clock() if request.arrival_time is None else request.arrival_time,
        )

    def _to_engine_requests(
        self, request: GenerateRequest | EncodeRequest, ids: RequestIds
    ) -> list[EngineCoreRequest]:
        if isinstance(request, EncodeRequest):
            return [to_pooling_request(request, ids)]
        return to_engine_requests(request, ids, self._max_model_len)

    # What is sent is kept by the client for as long as it may have to send it again. The caller's
    # frame, which lives as long as the request, must not keep it.
    async def _begin(self, request: GenerateRequest | EncodeRequest, interval: int) -> Generation:
        """Find out what the request depends on, and send the engine requests, all or none."""
        driver = self.client.driver
        # What as a rule is no wait is asked for first: each coroutine costs more than the question.
        if not driver.turns.may_go_on():
            await driver.turns.wait_in_line()
        ids = self._make_ids(request)
        children: Sequence[EngineCoreRequest] = self._to_engine_requests(request, ids)
        # It is the same for all of them, and costs no task switch when there is nothing to find out.
        if driver.lacks_facts(children[0]):
            await driver.prepare(children[0])
        if driver.has_large_arrays(children[0]):
            children = await driver.own_arrays(children)
        return self._start(ids, children, interval)  # noqa: ASYNC910

    def _start(
        self, ids: RequestIds, children: Sequence[EngineCoreRequest], interval: int
    ) -> Generation:
        waker, submit = Waker(), self.client.driver.submit
        if self._observers:
            children = [self._with_trace_headers(child) for child in children]
        collectors = [
            self._collector(child, index, waker, interval) for index, child in enumerate(children)
        ]
        generation = Generation(ids.external_id, collectors, waker)
        self._generations.setdefault(ids.external_id, []).append(generation)
        try:
            for child, collector in zip(children, collectors, strict=True):
                submit(child, collector)
                generation.submitted_count += 1
        except BaseException as error:
            self._end(generation)
            for collector in collectors[generation.submitted_count :]:
                collector.refuse(error)
            raise
        for collector in collectors:
            collector.begin()
        return generation

    def _end(self, generation: Generation) -> None:
        """Abort what has not ended."""
        submitted = generation.collectors[: generation.submitted_count]
        drop = self.client.driver.drop
        for collector in submitted:
            drop(collector)
        generations = self._generations[generation.external_id]
        generations.remove(generation)
        if not generations:
            del self._generations[generation.external_id]
        self._counter.add_ended(submitted)
        if self._observers and submitted:
            self._tell_end(submitted)

    def _with_trace_headers(self, request: EngineCoreRequest) -> EngineCoreRequest:
        for observer in self._observers:
            headers = observer.trace_headers(request)
            if headers is not None:
                request = attrs.evolve(request, trace_headers=dict(headers))
        return request

    def _collector(
        self, request: EngineCoreRequest, index: int, waker: Waker, interval: int
    ) -> Collector:
        if not self._observers:
            return Collector(request, index, waker, self._clock, interval=interval)
        return ObservedCollector(
            request,
            index,
            waker,
            self._clock,
            interval=interval,
            observers=self._observers,
            batch_tokens=self._batch_tokens,
        )

    def _tell_end(self, collectors: Sequence[Collector]) -> None:
        for collector in collectors:
            collector.abandon()
            self._batch_tokens.end(collector.engine_index)
        if all(collector.is_refused for collector in collectors):
            return
        longest = max(collector.token_count for collector in collectors)
        for observer in self._observers:
            observer.request_over(collectors[-1].engine_index, len(collectors), longest)


@explains_misuse("open_llm", instead="trio_vllm.asyncio.open_llm")
@asynccontextmanager
async def open_llm(
    mode: EngineSource,
    *,
    randomize_request_ids: bool = True,
    stream_interval: int = 1,
    client_index: int = 0,
    vocab_size: int | None = None,
    hidden_size: int | None = None,
    embedding_size: int | None = None,
    is_multimodal: bool = False,
    accepts_prompt_embeds: bool = False,
    model_runner_v2: bool = True,
    structured_outputs_backend: str = "xgrammar",
    load_balancer: LoadBalancer | None = None,
    learning_timeout: float = 5.0,
    stall_time: float = 10.0,
    observers: Sequence[Observer] = (),
    stats_interval: float = math.inf,
) -> AsyncIterator[Llm]:
    """Connect to engine cores: ``async with open_llm(mode) as llm``. See `Llm` and `open_client`.

    Args:
      observers: Are called for each event; `trio_vllm.llm.metrics.LlmMetrics` is one.
      stats_interval: Seconds between two log lines about throughput and load.
    """
    lines = [] if stats_interval == math.inf else [StatsLine(stats_interval)]
    async with (
        open_client(
            mode,
            client_index=client_index,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            embedding_size=embedding_size,
            is_multimodal=is_multimodal,
            accepts_prompt_embeds=accepts_prompt_embeds,
            model_runner_v2=model_runner_v2,
            structured_outputs_backend=structured_outputs_backend,
            load_balancer=load_balancer,
            learning_timeout=learning_timeout,
            stall_time=stall_time,
        ) as client,
        running(*(line.run for line in lines)),
    ):
        yield Llm(
            client,
            randomize_request_ids=randomize_request_ids,
            stream_interval=stream_interval,
            observers=[*observers, *lines],
        )
