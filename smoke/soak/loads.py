"""The loads of one client, and what comes of their requests."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import attrs
import trio

from trio_vllm import (
    CompletionDelta,
    CompletionOutput,
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    Llm,
    SamplingParams,
)
from trio_vllm.errors import InvalidDataParallelRankError, UtilityCallFailedError
from trio_vllm.mock.content import TokenSource, request_key

VOCAB_SIZE = 32_000
MAX_TOKENS = 200
MANY_TOKENS = 1_000_000

Ask = Callable[[Llm], Awaitable[None]]


class MiscountError(Exception):
    """A request did not get what it should."""


@attrs.define
class Counts:
    """What requests came to."""

    finished: Counter[int] = attrs.field(factory=Counter)
    """Those that got all their tokens, by engine."""
    tokens: Counter[int] = attrs.field(factory=Counter)
    """The tokens of these, by engine."""
    left: Counter[int] = attrs.field(factory=Counter)
    """Those whose caller left or aborted them, by engine; pinned, so that the engine is known."""
    failed: Counter[int] = attrs.field(factory=Counter)
    """Those that failed with their engine."""
    refused: int = 0
    """Those that were sent nowhere, since their engine was dead."""
    calls: int = 0
    """Utility calls that were answered."""

    def sent_to(self, engine_index: int) -> int:
        """Requests that an engine which was never lost must have taken."""
        return self.finished[engine_index] + self.left[engine_index]


@attrs.define
class Load:
    """Draws requests, makes them, and counts."""

    draw: random.Random
    counts: Counts = attrs.field(factory=Counts)
    _tokens: TokenSource = attrs.field(factory=lambda: TokenSource(VOCAB_SIZE), init=False)
    is_ending: bool = False
    """No request is begun any more."""

    async def closed_loop(self, llm: Llm, workers: int) -> None:
        """So many callers, each of whom asks again once answered, until it is ending."""

        async def caller() -> None:
            while not self.is_ending:
                await self._ask(llm)

        async with trio.open_nursery() as nursery:
            for _ in range(workers):
                nursery.start_soon(caller)

    async def open_loop(self, llm: Llm, rate: float) -> None:
        """So many requests a second, at random times, whether or not the others are answered."""
        async with trio.open_nursery() as nursery:
            while not self.is_ending:
                await trio.sleep(self.draw.expovariate(rate))
                nursery.start_soon(self._ask, llm)

    async def call_utilities(self, llm: Llm, interval: float) -> None:
        """A utility call now and then."""
        while not self.is_ending:
            try:
                await llm.client.is_sleeping()
                self.counts.calls += 1
            except UtilityCallFailedError as error:
                if not isinstance(error.__cause__, EngineDeadError):
                    raise  # it is not that an engine was killed meanwhile
            await trio.sleep(interval)

    async def _ask(self, llm: Llm) -> None:
        kinds: list[tuple[float, Ask]] = [
            (0.6, self._generate),
            (0.15, self._read),
            (0.1, self._leave),
            (0.1, self._cancel),
            (0.05, self._abort),
        ]
        (ask,) = self.draw.choices([a for _, a in kinds], [weight for weight, _ in kinds])
        try:
            await ask(llm)
        except EngineDeadError as error:
            self.counts.failed[-1 if error.engine_index is None else error.engine_index] += 1
            await trio.lowlevel.checkpoint()
        except InvalidDataParallelRankError:
            self.counts.refused += 1
            await trio.lowlevel.checkpoint()

    def _request(self, max_tokens: int, rank: int | None = None) -> GenerateRequest:
        prompt = [self.draw.randrange(VOCAB_SIZE) for _ in range(self.draw.randint(1, 64))]
        params = SamplingParams(max_tokens=max_tokens)
        return GenerateRequest(
            prompt_token_ids=prompt, sampling_params=params, data_parallel_rank=rank
        )

    def _length(self) -> int:
        return max(1, min(MAX_TOKENS, int(self.draw.expovariate(1 / 40))))

    async def _generate(self, llm: Llm) -> None:
        """A request that is waited for."""
        length = self._length()
        output = await llm.generate(self._request(length))
        self._finished(output.completions[0], output.completions[0].token_ids, length)

    async def _read(self, llm: Llm) -> None:
        """A stream that is read to its end."""
        length, token_ids = self._length(), []
        async with llm.stream(self._request(length)) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
        self._finished(delta, token_ids, length)

    def _finished(
        self, last: CompletionDelta | CompletionOutput, token_ids: list[int], length: int
    ) -> None:
        index = last.engine_index
        key = request_key(0, index, last.engine_request_id)
        if last.finish_reason is FinishReason.ABORT and index:
            self.counts.failed[index] += 1  # its engine was ended in order
            return
        if last.finish_reason is not FinishReason.LENGTH:
            raise MiscountError(f"a request ended with {last.finish_reason}")
        if token_ids != self._tokens.draw(key, 0, length):
            raise MiscountError(f"of {length} tokens {len(token_ids)} came, or not the right ones")
        self.counts.finished[index] += 1
        self.counts.tokens[index] += length

    def _rank(self, llm: Llm) -> int:
        return self.draw.choice(llm.client.engine_indices or [0])

    async def _leave(self, llm: Llm) -> None:
        """A stream that is left in the middle."""
        rank = self._rank(llm)
        async with llm.stream(self._request(MANY_TOKENS, rank)) as deltas:
            wanted = self._length()
            async for delta in deltas:
                wanted -= len(delta.token_ids)
                if wanted <= 0:
                    break
        self.counts.left[rank] += 1

    async def _cancel(self, llm: Llm) -> None:
        """A request whose caller is cancelled."""
        rank = self._rank(llm)
        with trio.move_on_after(self.draw.uniform(0, 0.1)):
            await llm.generate(self._request(MANY_TOKENS, rank))
        self.counts.left[rank] += 1

    async def _abort(self, llm: Llm) -> None:
        """A request that is ended by its id; whoever waits gets what there is."""
        rank, request = self._rank(llm), self._request(MANY_TOKENS)
        request = attrs.evolve(
            request, request_id=f"{self.draw.getrandbits(64):x}", data_parallel_rank=rank
        )
        async with trio.open_nursery() as nursery:

            async def abort_soon() -> None:
                await trio.sleep(self.draw.uniform(0, 0.1))
                llm.abort([str(request.request_id)])

            nursery.start_soon(abort_soon)
            try:
                output = await llm.generate(request)
            except (EngineDeadError, InvalidDataParallelRankError) as error:
                nursery.cancel_scope.cancel()
                failure: Exception | None = error
            else:
                failure = None
        if failure is not None:
            raise failure
        if output.finish_reason is not FinishReason.ABORT:
            raise MiscountError(f"an aborted request ended with {output.finish_reason}")
        self.counts.left[rank] += 1


async def read_for_ever(llm: Llm, rank: int, begun: trio.Event) -> None:
    """A stream without end, which is there when its frontend goes."""
    params = SamplingParams(max_tokens=MANY_TOKENS)
    request = GenerateRequest(prompt_token_ids=[1], sampling_params=params, data_parallel_rank=rank)
    async with llm.stream(request) as deltas:
        async for _ in deltas:
            begun.set()
    await trio.sleep(math.inf)
