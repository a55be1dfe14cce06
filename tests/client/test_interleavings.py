"""Whatever happens in whatever order, every request ends exactly once, with the right tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio
from hypothesis import example, given, settings, strategies as st
from tests.client.pair import expected_tokens, step, take
from tests.client.world import World, make_request, open_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.errors import (
    ClientClosedError,
    DuplicateRequestIdError,
    EngineCoreError,
    EngineDeadError,
    InvalidDataParallelRankError,
)
from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.protocol import EngineCoreRequest, FinishReason

ENGINES = 3
IDS = 4

engine_indices = st.integers(0, ENGINES - 1)
numbers = st.integers(0, IDS - 1)

ACTIONS = st.one_of(
    st.tuples(st.just("add"), numbers, st.integers(1, 4), st.none() | engine_indices),
    st.tuples(st.just("step"), engine_indices),
    st.tuples(st.just("step"), engine_indices),
    st.tuples(st.just("abort"), st.lists(numbers, max_size=3)),
    st.tuples(st.just("drop"), numbers),
    st.tuples(st.just("settle")),
    st.tuples(st.just("settle")),
    st.tuples(st.just("read"), numbers),
    st.tuples(st.just("wait")),
    st.tuples(
        st.just("die"), engine_indices, st.sampled_from(["kill", "farewell", "garbage", "unheard"])
    ),
)


@attrs.define
class Play:
    """The client, its engines, and what is expected of each request."""

    world: World
    mocks: list[MockEngine]
    open: dict[str, Attempt] = attrs.field(factory=dict)
    attempts: list[Attempt] = attrs.field(factory=list)
    dead: set[int] = attrs.field(factory=set)

    async def act(self, action: Sequence[Any]) -> None:
        name, *args = action
        await getattr(self, name)(*args)

    async def add(self, number: int, max_tokens: int, rank: int | None) -> None:
        # An id is used again only after its request has finished: of one that was aborted, outputs
        # may still be on their way.
        generation = sum(attempt.number == number for attempt in self.attempts)
        request = make_request(f"r{number}.{generation}", max_tokens, data_parallel_rank=rank)
        client = self.world.client
        if (running := self.open.get(f"r{number}")) is not None and not running.is_over:
            with pytest.raises((DuplicateRequestIdError, EngineDeadError)):
                client.submit(make_request(running.request.request_id), OutputStream("x"))
            return
        attempt = Attempt(number, request, OutputStream(request.request_id))
        try:
            client.submit(request, attempt.stream)
        except EngineDeadError:
            assert len(self.dead) == ENGINES
        except InvalidDataParallelRankError:
            assert rank in self.dead
        else:
            self.open[f"r{number}"] = attempt
            self.attempts.append(attempt)

    async def step(self, index: int) -> None:
        if index not in self.dead:
            take(self.world.engines[index], self.mocks[index])
            step(self.world.engines[index], self.mocks[index])

    async def abort(self, numbers: list[int]) -> None:
        attempts = [self.open[f"r{n}"] for n in numbers if f"r{n}" in self.open]
        self.world.client.abort([a.request.request_id for a in attempts])

    async def drop(self, number: int) -> None:
        if attempt := self.open.pop(f"r{number}", None):
            attempt.was_dropped = True
            self.world.client.drop(attempt.stream)

    async def settle(self) -> None:
        await wait_all_tasks_blocked()

    async def wait(self) -> None:
        await trio.sleep(1)

    async def read(self, number: int) -> None:
        if attempt := self.open.get(f"r{number}"):
            await attempt.read()

    async def die(self, index: int, how: str) -> None:
        if index in self.dead:
            return
        self.dead.add(index)
        engine = self.world.engines[index]
        if how == "garbage":
            engine.outputs.send_nowait([b"\x92" + bytes([index]) + b"\xa1x"])
            return
        if how == "farewell":
            engine.outputs.send_nowait([b"ENGINE_CORE_DEAD"])
        engine.vanish()
        if how != "unheard":
            await engine.break_connection()


@attrs.define
class Attempt:
    """One request, and what has been read of it."""

    number: int
    request: EngineCoreRequest
    stream: OutputStream
    token_ids: list[int] = attrs.field(factory=list)
    reasons: list[FinishReason] = attrs.field(factory=list)
    errors: list[EngineCoreError] = attrs.field(factory=list)
    was_dropped: bool = False

    @property
    def is_over(self) -> bool:
        return self.stream._ended

    async def read(self) -> None:
        """Read what is there."""
        while (self.stream._outputs or self.is_over) and not self.reasons and not self.errors:
            try:
                output = (await anext(self.stream)).output
            except EngineCoreError as error:
                self.errors.append(error)
            else:
                self.token_ids += output.new_token_ids
                if output.finish_reason is not None:
                    self.reasons.append(output.finish_reason)

    def check(self, play: Play) -> None:
        """It has ended once, for a reason that it had."""
        index = self.stream.engine_index
        expected = expected_tokens(play.mocks[index], self.request)
        assert expected[: len(self.token_ids)] == self.token_ids
        assert self.was_dropped or len(self.reasons) + len(self.errors) == 1
        if self.reasons == [FinishReason.LENGTH]:
            assert self.token_ids == expected
        elif self.reasons:
            assert self.reasons == [FinishReason.ABORT]
        for error in self.errors:
            if isinstance(error, EngineDeadError):
                assert index in play.dead
                assert index == error.engine_index
            else:
                assert isinstance(error, ClientClosedError)


async def play_out(actions: Sequence[Sequence[Any]], chunk_size: int) -> None:
    config = MockEngineConfig(output_token_chunk_size=chunk_size, vocab_size=100)
    mocks = [MockEngine(config, index) for index in range(ENGINES)]
    async with open_world(ENGINES) as world:
        play = Play(world, mocks)
        for action in actions:
            await play.act(action)
        # The engines finish half of what is left; the rest ends with the client.
        for index in range(ENGINES - 1):
            for _ in range(20):
                await play.step(index)
        await trio.sleep(1)
        for attempt in play.attempts:
            await attempt.read()
    for attempt in play.attempts:
        await attempt.read()
        attempt.check(play)
    world.assert_tidy()
    for index, mock in enumerate(mocks):
        if index not in play.dead:
            take(world.engines[index], mock)
            assert not mock.has_unfinished


@settings(max_examples=100, deadline=None, derandomize=True)
@given(actions=st.lists(ACTIONS, max_size=25), chunk_size=st.sampled_from([1, 3]))
@example(actions=[("add", 0, 2, 1), ("die", 1, "unheard"), ("add", 1, 2, None)], chunk_size=1)
def test_every_request_ends_once(actions: list[tuple[Any, ...]], chunk_size: int) -> None:
    trio.run(play_out, actions, chunk_size, clock=MockClock(autojump_threshold=0))
