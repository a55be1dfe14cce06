"""Utility calls: every outcome is waited for, and nothing is left of a call that is over."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from tests.client.world import World, open_world
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.errors import (
    ClientClosedError,
    EngineDeadError,
    UtilityCallFailedError,
    UtilityTimeoutError,
)
from trio_vllm.protocol import UtilityCallOutput, UtilityOutput, encode_outputs


class Outcome:
    """What becomes of a call that runs beside the test."""

    result: dict[int, Any] | None = None
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.error is not None

    async def run(self, call: Callable[[], Awaitable[dict[int, Any]]]) -> None:
        try:
            self.result = await call()
        except Exception as error:
            self.error = error


async def call(world: World, nursery: trio.Nursery, **options: Any) -> tuple[Outcome, int]:
    """Start a call; gives its outcome and its id."""
    outcome = Outcome()
    nursery.start_soon(outcome.run, lambda: world.client.call_utility("is_sleeping", **options))
    await wait_all_tasks_blocked()
    (call_id,) = {engine.call().call_id for engine in world.engines}
    return outcome, call_id


async def test_results_come_by_engine_whatever_the_order() -> None:
    async with open_world(3) as world, trio.open_nursery() as nursery:
        outcome, call_id = await call(world, nursery)
        for index in (2, 0, 1):
            assert not outcome.is_over
            await world.engines[index].answer(call_id, index * 10)

        assert list((outcome.result or {}).items()) == [(0, 0), (1, 10), (2, 20)]
        world.assert_tidy()


async def test_what_an_engine_is_sent() -> None:
    async with open_world(client_options={"client_index": 3}) as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.client.call_utility, "sleep", 1, "abort")
            await wait_all_tasks_blocked()
            request = world.engine.call()
            await world.engine.answer(request.call_id)

        assert (request.client_index, request.method, request.args) == (3, "sleep", [1, "abort"])


async def test_all_outcomes_are_waited_for_before_a_failure_is_raised() -> None:
    async with open_world(3) as world, trio.open_nursery() as nursery:
        outcome, call_id = await call(world, nursery)
        await world.engines[1].answer(call_id, failure_message="boom")
        await world.engines[0].answer(call_id, True)
        assert not outcome.is_over
        await world.engines[2].answer(call_id, failure_message="")

        error = outcome.error
        assert isinstance(error, UtilityCallFailedError)
        assert ("is_sleeping", call_id) == (error.method, error.call_id)
        assert (error.failures, error.succeeded) == ({1: "boom", 2: ""}, [0])
        assert "engine 1: boom" in str(error)
        assert "succeeded on engine 0" in str(error)
        world.assert_tidy()


async def test_an_engine_dies_under_a_call(autojump_clock: MockClock) -> None:
    async with open_world(2) as world, trio.open_nursery() as nursery:
        outcome, call_id = await call(world, nursery)
        await world.engines[1].die()
        await world.engines[0].answer(call_id, True)
        await trio.sleep(1)

        error = outcome.error
        assert isinstance(error, UtilityCallFailedError)
        assert list(error.failures) == [1]
        assert "engine 1 is dead" in error.failures[1]
        assert error.succeeded == [0]
        assert error.__cause__ is world.client.dead_engines[1]
        world.assert_tidy()


async def test_the_only_engine_dies_under_a_call(autojump_clock: MockClock) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        outcome, _ = await call(world, nursery)
        await world.engine.die()
        await trio.sleep(1)

        error = outcome.error
        assert isinstance(error, EngineDeadError)
        assert error.engine_index == 0
        assert error.reason == world.client.dead_engines[0].reason
        assert error.__cause__ is None  # it would say the same once more
        world.assert_tidy()


async def test_an_engine_is_found_dead_by_the_call(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.engine.vanish()

        with assert_checkpoints(), pytest.raises(EngineDeadError):
            await world.client.call_utility("is_sleeping")


async def test_a_dead_engine_is_not_asked(autojump_clock: MockClock) -> None:
    async with open_world(2) as world:
        await world.engines[0].die()
        async with trio.open_nursery() as nursery:
            outcome = Outcome()
            nursery.start_soon(outcome.run, lambda: world.client.call_utility("is_sleeping"))
            await wait_all_tasks_blocked()
            await world.engines[1].answer(world.engines[1].call().call_id, False)

        assert outcome.result == {1: False}


async def test_a_timeout_names_the_silent_engines(autojump_clock: MockClock) -> None:
    async with open_world(3) as world, trio.open_nursery() as nursery:
        start = trio.current_time()
        outcome, call_id = await call(world, nursery, timeout=7)
        await world.engines[1].answer(call_id, True)
        await trio.sleep(8)

        error = outcome.error
        assert isinstance(error, UtilityTimeoutError)
        assert ([0, 2], 7, call_id) == (error.missing_engines, error.seconds, error.call_id)
        assert start + 8 == trio.current_time()
        assert "no answer from engine 0, 2 after 7 s" in str(error)
        world.assert_tidy()


async def test_an_answer_in_the_moment_of_the_timeout(autojump_clock: MockClock) -> None:
    """Whichever comes first: a timeout without a silent engine there is not."""
    results = []
    for _ in range(20):
        async with open_world() as world, trio.open_nursery() as nursery:
            outcome, call_id = await call(world, nursery, timeout=1)
            await trio.sleep(1)
            answer = UtilityCallOutput(output=UtilityOutput(call_id, None, True))
            frames = [bytes(frame) for frame in encode_outputs(answer)]
            world.client.driver.core.receive(frames, None, trio.current_time())
            await wait_all_tasks_blocked()

            error = outcome.error
            results.append(outcome.result)
            assert isinstance(error, UtilityTimeoutError) == (outcome.result is None)
            assert error is None or "no answer from engine 0 after 1 s" in str(error)

    assert {0: True} in results


@pytest.mark.parametrize("timeout", [-1, math.nan, None, "5"])
async def test_nothing_is_sent_with_an_impossible_timeout(timeout: Any) -> None:
    async with open_world() as world:
        with pytest.raises((TypeError, ValueError)):
            await world.client.call_utility("sleep", timeout=timeout)

        assert world.engine.received() == []
        world.assert_tidy()


async def test_late_and_strange_answers_are_dropped(autojump_clock: MockClock) -> None:
    async with open_world(2) as world, trio.open_nursery() as nursery:
        outcome, call_id = await call(world, nursery, timeout=1)
        await trio.sleep(2)
        assert isinstance(outcome.error, UtilityTimeoutError)
        await world.engines[0].answer(call_id, True)

        outcome, call_id = await call(world, nursery)
        for strange in (-1, -2, 0, call_id + 1, -(2**63), 2**63, 2**64 - 1):
            await world.engines[0].answer(strange, "strange")
        await world.engines[0].answer(call_id, "first")
        await world.engines[0].answer(call_id, "again")
        output = UtilityOutput(call_id, None, "stranger")
        await world.engines[0].say(
            *map(bytes, encode_outputs(UtilityCallOutput(engine_index=9, output=output)))
        )
        assert not outcome.is_over
        await world.engines[1].answer(call_id, "second")

        assert outcome.result == {0: "first", 1: "second"}
        assert world.client.is_healthy
        world.assert_tidy()


async def test_cancelling_forgets_the_call() -> None:
    async with open_world() as world:
        async with trio.open_nursery() as nursery:
            _, call_id = await call(world, nursery, timeout=math.inf)
            nursery.cancel_scope.cancel()

        world.assert_tidy()
        await world.engine.answer(call_id, True)
        assert world.client.is_healthy


async def test_closing_the_client_ends_the_call() -> None:
    async with open_world(2) as world, trio.open_nursery() as nursery:
        outcome, call_id = await call(world, nursery)
        await world.engines[0].answer(call_id, True)
        world.client.close()
        await wait_all_tasks_blocked()

        assert isinstance(outcome.error, ClientClosedError)
        with pytest.raises(ClientClosedError):
            await world.client.call_utility("is_sleeping")
        world.assert_tidy()


async def test_engines_in_lockstep_end_the_call_together(autojump_clock: MockClock) -> None:
    async with open_world(2, data_parallel_size=2) as world, trio.open_nursery() as nursery:
        outcome, _ = await call(world, nursery)
        await world.engines[1].die()
        await trio.sleep(1)

        assert isinstance(outcome.error, EngineDeadError)
        assert outcome.error.engine_index == 1


async def test_an_argument_without_a_wire_form_is_a_type_error() -> None:
    async with open_world() as world:
        with pytest.raises(TypeError):
            await world.client.call_utility("is_sleeping", object())

        assert world.engine.received() == []
        world.assert_tidy()


async def test_a_method_is_a_string() -> None:
    async with open_world() as world:
        with pytest.raises(TypeError, match="method"):
            await world.client.call_utility(5)  # type: ignore[arg-type]

        assert world.engine.received() == []


async def test_calls_do_not_mix() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        first, first_id = await call(world, nursery)
        second, second_id = await call(world, nursery)
        assert first_id != second_id
        await world.engine.answer(second_id, "second")
        assert (first.result, second.result) == (None, {0: "second"})
        await world.engine.answer(first_id, "first")

        assert first.result == {0: "first"}


async def test_a_call_always_checkpoints() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:

        async def answer() -> None:
            await wait_all_tasks_blocked()
            await world.engine.answer(world.engine.call().call_id, True)

        nursery.start_soon(answer)
        with assert_checkpoints():
            await world.client.call_utility("is_sleeping")


BAD_RESULTS = {
    "no-envelope": b"\x07",
    "long-envelope": b"\x93\xc0\xc0\xc0",
    "pickle": b"\x92\xc0\x91\xc7\x01\x02x",
}


@pytest.mark.parametrize("result", BAD_RESULTS.values(), ids=BAD_RESULTS)
async def test_an_answer_that_cannot_be_read_fails_its_call_only(result: bytes) -> None:
    """FAULTS B4."""
    async with open_world(2) as world, trio.open_nursery() as nursery:
        outcome, call_id = await call(world, nursery)
        head = b"\x95\x00\x90\xc0\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x93"
        await world.engines[0].say(head + bytes([call_id]) + b"\xc0" + result)
        await world.engines[1].answer(call_id, True)

        error = outcome.error
        assert isinstance(error, UtilityCallFailedError)
        assert list(error.failures) == [0]
        assert error.succeeded == [1]
        assert world.client.is_healthy
        world.assert_tidy()
