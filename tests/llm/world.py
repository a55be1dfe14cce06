"""An `Llm` over a client and engines that do what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import attrs
import trio
from tests.client.world import Engine, World, make_output, open_world
from trio.testing import wait_all_tasks_blocked

from trio_vllm.llm import GenerateRequest, Llm
from trio_vllm.llm.observers import Observer
from trio_vllm.protocol import EngineCoreSamplingParams, FinishReason

T = TypeVar("T")


@attrs.define
class Outcome(Generic[T]):
    """What becomes of a coroutine that runs beside the test."""

    result: T | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has returned or raised."""
        return self.result is not None or self.error is not None

    def get(self) -> T:
        """What it returned."""
        assert self.error is None
        assert self.result is not None
        return self.result


@attrs.define
class Clock:
    """A wall clock that moves when the test says so."""

    time: float = 1_000.0

    def now(self) -> float:
        """UNIX seconds."""
        return self.time


@attrs.define
class LlmWorld:
    """The facade, what is below it, and the wall clock."""

    llm: Llm
    world: World
    nursery: trio.Nursery
    _clock: Clock

    @property
    def engine(self) -> Engine:
        """The only engine."""
        return self.world.engine

    def pass_time(self, seconds: float) -> None:
        """Move the wall clock, which may go backwards."""
        self._clock.time += seconds

    async def start(self, function: Callable[[], Awaitable[T]]) -> Outcome[T]:
        """Run a coroutine beside the test, up to where it waits."""
        outcome = Outcome[T]()

        async def run() -> None:
            try:
                outcome.result = await function()
            except Exception as error:
                outcome.error = error

        self.nursery.start_soon(run)
        await wait_all_tasks_blocked()
        return outcome

    async def finish(self, request_id: str, token_ids: Sequence[int] = (7,), **fields: Any) -> None:
        """Let the only engine send the last output of a request."""
        values = {"finish_reason": FinishReason.LENGTH, **fields}
        await self.engine.send(make_output(token_ids, request_id, **values))

    def assert_tidy(self) -> None:
        """Nothing is left in any table."""
        self.world.assert_tidy()
        assert self.llm.in_flight_count == 0


@asynccontextmanager
async def open_llm_world(
    engine_count: int = 1,
    *,
    randomize_request_ids: bool = True,
    stream_interval: int = 1,
    observers: Sequence[Observer] = (),
    **ready: Any,
) -> AsyncIterator[LlmWorld]:
    """A running `Llm` and its engines, which registered with these values."""
    async with open_world(engine_count, **ready) as world:
        clock = Clock()
        llm = Llm(
            world.client,
            randomize_request_ids=randomize_request_ids,
            stream_interval=stream_interval,
            observers=observers,
            clock=clock.now,
        )
        async with trio.open_nursery() as nursery:
            yield LlmWorld(llm, world, nursery, clock)
            nursery.cancel_scope.cancel()


def make_prompt(request_id: str | None = "x", **params: Any) -> GenerateRequest:
    """A request with these sampling parameters; fields of its own that start with ``request_``."""
    fields = {
        name.removeprefix("request_"): params.pop(name)
        for name in list(params)
        if name.startswith("request_")
    }
    return GenerateRequest(
        request_id=request_id,
        **{"prompt_token_ids": [1, 2, 3], **fields},
        sampling_params=EngineCoreSamplingParams(**params),
    )
