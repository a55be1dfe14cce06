"""The loop around an engine, over connections in memory."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from tests.memory import MemoryReceiver, MemorySender, open_memory_connection
from tests.mock.driver import pack_add, raw_request
from trio.testing import wait_all_tasks_blocked

from trio_vllm.concurrency import running
from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.mock.encoding import Outgoing
from trio_vllm.mock.runner import EngineRunner, Lockstep, RunnerLimits
from trio_vllm.mock.unlimited import MAX_LAG
from trio_vllm.protocol import (
    COORDINATOR_READY,
    DpControlOutput,
    EngineCoreOutput,
    EngineDead,
    EngineMessage,
    FinishReason,
    RequestBatchOutputs,
    StartDpWave,
    UtilityCallOutput,
    UtilityRequest,
    decode_outputs,
    encode_abort,
    encode_start_dp_wave,
    encode_utility,
)
from trio_vllm.transport import CoordinatorChannels, FrontendChannels, FrontendDisconnect


@attrs.define
class Frontend:
    """The other ends of an engine's connections."""

    runner: EngineRunner
    inputs: list[MemorySender]
    outputs: list[MemoryReceiver]
    broadcasts: MemorySender
    notices: MemoryReceiver
    ended: trio.Event

    def add(self, request_id: str, max_tokens: int = 4, client_index: int = 0) -> None:
        raw = raw_request(request_id, max_tokens, client_index=client_index)
        self.inputs[client_index].send_nowait(pack_add(raw))

    async def receive(self, client_index: int = 0) -> object:
        return decode_outputs(await self.outputs[client_index].receive())

    async def until_finished(self, request_id: str) -> list[EngineCoreOutput]:
        """The outputs of a request of the first client, up to its last."""
        outputs: list[EngineCoreOutput] = []
        while not outputs or not outputs[-1].finished:
            batch = await self.receive()
            assert isinstance(batch, RequestBatchOutputs)
            outputs += [o for o in batch.outputs if o.request_id == request_id]
        return outputs


@asynccontextmanager
async def engine_behind(
    client_count: int = 1,
    *,
    high_water_mark: float = math.inf,
    lockstep: Lockstep | None = None,
    step_interval: float = 0.0,
    limits: RunnerLimits | None = None,
    engine_index: int = 0,
    schedule: bool | None = None,
) -> AsyncIterator[Frontend]:
    """Run an engine beside the block; gives the frontend's side."""
    inputs = [open_memory_connection() for _ in range(client_count)]
    outputs = [open_memory_connection(high_water_mark) for _ in range(client_count)]
    broadcasts, notices = open_memory_connection(), open_memory_connection()
    _, disconnects = trio.open_memory_channel[FrontendDisconnect](0)
    channels = FrontendChannels(
        [receiver for _, receiver in inputs],
        [sender for sender, _ in outputs],
        disconnects,
        CoordinatorChannels(broadcasts[1], notices[0]) if lockstep else None,
    )
    engine = MockEngine(
        MockEngineConfig(
            lockstep=lockstep is not None, step_interval=step_interval, schedule=schedule
        ),
        engine_index,
        client_count=client_count,
        has_coordinator=lockstep is not None,
    )

    def settle() -> None:
        if lockstep is not None:
            lockstep.settle(0.0)

    runner = EngineRunner(engine, channels, on_idle_check=settle, limits=limits or RunnerLimits())
    if lockstep is not None:
        lockstep.runners.add(runner)
    ended = trio.Event()

    async def run() -> None:
        async with running(*runner.pumps()):
            await runner.run()
        ended.set()

    async with running(run):
        yield Frontend(
            runner,
            [sender for sender, _ in inputs],
            [receiver for _, receiver in outputs],
            broadcasts[0],
            notices[1],
            ended,
        )


NO_SLICE = RunnerLimits(slice_seconds=0.0)


async def test_a_request_is_served() -> None:
    """From its ADD to its last output."""
    async with engine_behind() as frontend:
        frontend.add("a", 6)

        outputs = await frontend.until_finished("a")

    assert len(outputs) == 6
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_the_answers_go_where_they_belong() -> None:
    """Each client has an output of its own; a call of one is not seen by the other."""
    async with engine_behind(2) as frontend:
        frontend.add("a", 1)
        frontend.add("b", 1, client_index=1)
        # not on "its own" input, which does not matter
        frontend.inputs[0].send_nowait(encode_utility(UtilityRequest(1, 7, "is_sleeping")))
        first = await frontend.receive(0)
        second = [await frontend.receive(1), await frontend.receive(1)]

    assert isinstance(first, RequestBatchOutputs)
    assert [output.request_id for output in first.outputs] == ["a"]
    assert set(map(type, second)) == {RequestBatchOutputs, UtilityCallOutput}


async def test_work_goes_on_in_slices() -> None:
    """Others get their turn while a request runs, and what arrives is handled in between."""
    async with engine_behind(limits=NO_SLICE) as frontend:
        frontend.add("endless", 1_000_000)
        frontend.add("a", 3)
        assert len(await frontend.until_finished("a")) == 3
        frontend.inputs[0].send_nowait(encode_abort(["endless"]))
        await wait_all_tasks_blocked()

        assert not frontend.runner.engine.has_unfinished


async def test_a_flood_is_handled_in_slices() -> None:
    """Others do not have to wait for all that has arrived at once."""
    async with engine_behind(limits=NO_SLICE) as frontend:
        for i in range(50):
            frontend.add(f"r{i}", 1_000_000)
        seen = set()
        while 50 not in seen:
            seen.add(sum(frontend.runner.engine.counts))
            await trio.lowlevel.checkpoint()

    assert len(seen) > 10


async def test_a_long_prompt_is_taken_in_slices() -> None:
    """What its client sends behind it is handled behind it; others have their turns meanwhile."""
    raw = [*raw_request("long", 1)]
    raw[1] = [70_000] * 200_000
    async with engine_behind(limits=NO_SLICE) as frontend:
        frontend.inputs[0].send_nowait(pack_add(raw))
        frontend.add("short", 1)
        turns = 0
        while frontend.runner.engine.summary.finished < 2:
            await trio.lowlevel.checkpoint()
            turns += 1
        finished = [output.request_id for output in await frontend.until_finished("long")]

    assert finished == ["long"]
    assert turns > 40


async def test_a_long_prompt_is_hashed_before_it_is_taken() -> None:
    """Its 4000 blocks in slices, in which others have their turns."""
    async with engine_behind(limits=NO_SLICE, schedule=True) as frontend:
        engine, counts = frontend.runner.engine, list[int]()
        take = engine.take

        def watched(
            message: EngineMessage, now: float, hashes: list[bytes] | None = None
        ) -> list[Outgoing]:
            counts.append(len(hashes or ()))
            return take(message, now, hashes)

        engine.take = watched  # type: ignore[method-assign]
        raw = raw_request("long", 1, prompt_token_ids=[7] * 64_000)
        frontend.inputs[0].send_nowait(pack_add(raw))
        turns = 0
        while not counts:
            await trio.lowlevel.checkpoint()
            turns += 1
        await frontend.until_finished("long")

    assert counts == [4000]
    assert turns > 60


async def test_many_aborts_at_once_are_handled_in_slices() -> None:
    """Others have their turns meanwhile."""
    async with engine_behind(limits=NO_SLICE) as frontend:
        ids = [f"r{number}" for number in range(3000)]
        for request_id in ids:
            frontend.add(request_id, 1_000_000)
        summary = frontend.runner.engine.summary
        while summary.requests < len(ids):  # noqa: ASYNC110
            await trio.lowlevel.checkpoint()
        frontend.inputs[0].send_nowait([bytes(frame) for frame in encode_abort(ids)])
        seen = set[int]()
        while summary.aborted < len(ids):
            await trio.lowlevel.checkpoint()
            seen.add(summary.aborted)

    assert len(seen) > 8
    assert not frontend.runner.engine.has_unfinished


async def test_two_engines_take_turns() -> None:
    """The one with much to do does not hold up the other."""
    async with engine_behind() as busy, engine_behind() as other:
        busy.add("endless", 100_000_000)
        for i in range(20):
            other.add(f"r{i}", 2)
            assert len(await other.until_finished(f"r{i}")) == 2
        assert busy.runner.engine.has_unfinished


async def test_a_frontend_that_does_not_read_stops_its_engine() -> None:
    """It can still abort, and goes on reading where it was."""
    async with engine_behind(high_water_mark=3) as frontend:
        frontend.add("a", 1_000_000)
        await wait_all_tasks_blocked()
        made = frontend.runner.engine.summary.tokens
        frontend.add("b", 5)
        await wait_all_tasks_blocked()
        assert made == frontend.runner.engine.summary.tokens

        frontend.inputs[0].send_nowait(encode_abort(["a"]))
        frontend.inputs[0].send_nowait(encode_utility(UtilityRequest(0, 7, "is_sleeping")))
        await wait_all_tasks_blocked()
        assert frontend.runner.engine.summary.aborted == 1

        seen: list[EngineCoreOutput] = []
        answers = 0
        while not any(output.request_id == "b" and output.finished for output in seen):
            outputs = await frontend.receive()
            if isinstance(outputs, RequestBatchOutputs):
                seen += outputs.outputs
            else:
                answers += 1
    assert answers == 1
    assert made == sum(output.request_id == "a" for output in seen)


async def test_a_client_that_does_not_read_delays_its_own_requests_only() -> None:
    """The other gets its tokens; what was held goes on when it is read."""
    async with engine_behind(2, high_water_mark=3) as frontend:
        frontend.add("a", 50)
        await wait_all_tasks_blocked()
        made = frontend.runner.engine.summary.tokens
        frontend.add("b", 20, client_index=1)
        received: list[EngineCoreOutput] = []
        while not any(output.finished for output in received):
            batch = await frontend.receive(1)
            assert isinstance(batch, RequestBatchOutputs)
            received += batch.outputs
        assert len(received) == 20
        assert frontend.runner.engine.summary.tokens == made + 20
        assert frontend.runner.late_clients == {0}

        assert len(await frontend.until_finished("a")) == 50


async def test_the_memory_for_a_client_that_does_not_read_is_bounded() -> None:
    """Beyond a limit its input is not taken either, the other's is."""
    limits = RunnerLimits(late_messages=5)
    async with engine_behind(2, high_water_mark=3, limits=limits) as frontend:
        for call_id in range(21):
            call = encode_utility(UtilityRequest(0, call_id, "set_weight_version", ["v"]))
            frontend.inputs[0].send_nowait(call)
            await wait_all_tasks_blocked()
        frontend.inputs[0].send_nowait(encode_utility(UtilityRequest(1, 21, "is_scheduler_paused")))
        await wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):  # the call has not been taken
            frontend.outputs[1].receive_batch_nowait(1)
        frontend.add("b", 2, client_index=1)
        assert isinstance(await frontend.receive(1), RequestBatchOutputs)

        answers = [await frontend.receive(0) for _ in range(21)]
        assert all(isinstance(answer, UtilityCallOutput) for answer in answers)


async def test_steps_keep_their_pace(autojump_clock: trio.testing.MockClock) -> None:
    """A step that comes late does not delay those that follow."""
    limits = RunnerLimits(clock=trio.current_time)
    async with engine_behind(step_interval=0.01, limits=limits) as frontend:
        begin = trio.current_time()
        frontend.add("a", 1001)
        await trio.sleep(0.005)
        autojump_clock.jump(0.032)
        await frontend.until_finished("a")

        assert trio.current_time() - begin == pytest.approx(10.0, abs=1e-6)


async def test_a_process_that_stood_still_does_not_catch_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A minute's steps at once would be a flood."""
    limits = RunnerLimits(clock=trio.current_time)
    async with engine_behind(step_interval=0.01, limits=limits) as frontend:
        begin = trio.current_time()
        frontend.add("a", 1001)
        await trio.sleep(0.005)
        autojump_clock.jump(60)
        await frontend.until_finished("a")

        assert trio.current_time() - begin == pytest.approx(70.0, abs=MAX_LAG + 0.01)


async def test_steps_can_be_slowed_down(autojump_clock: trio.testing.MockClock) -> None:
    """The interval is between steps, not before the first; what arrives need not wait."""
    async with engine_behind(
        step_interval=0.5, limits=RunnerLimits(clock=trio.current_time)
    ) as frontend:
        begin = trio.current_time()
        frontend.add("a", 4)
        await frontend.until_finished("a")
        assert trio.current_time() - begin == 1.5

        frontend.add("b", 100)
        await trio.sleep(0.7)
        frontend.inputs[0].send_nowait(encode_utility(UtilityRequest(0, 7, "is_sleeping")))
        await wait_all_tasks_blocked(0.01)
        kinds = set()
        with trio.move_on_after(0.01):
            while True:
                kinds.add(type(await frontend.receive()))
        assert UtilityCallOutput in kinds


@pytest.mark.parametrize("drain", [True, False])
async def test_shutting_down_ends_the_loop(drain: bool) -> None:
    """After what runs, or at once."""
    async with engine_behind(high_water_mark=2) as frontend:
        frontend.add("a", 500)
        assert isinstance(await frontend.receive(), RequestBatchOutputs)
        frontend.runner.shut_down(drain=drain)
        frontend.runner.shut_down(drain=drain)
        outputs = await frontend.until_finished("a")
        await frontend.ended.wait()

    reason = FinishReason.LENGTH if drain else FinishReason.ABORT
    assert reason is outputs[-1].finish_reason


@pytest.mark.parametrize("drain", [True, False])
async def test_what_has_arrived_before_the_end_is_answered(
    drain: bool,
) -> None:
    """Though the loop has come to only some of it when it is to end."""
    async with engine_behind(limits=NO_SLICE) as frontend:
        for i in range(50):
            frontend.add(f"r{i}", 1)
        while True:
            await trio.lowlevel.checkpoint()
            if frontend.runner.engine.summary.requests:
                break
        frontend.runner.shut_down(drain=drain)
        await frontend.ended.wait()

        received = frontend.outputs[0].receive_batch_nowait(1000)
        answers = [decode_outputs(frames) for frames, _ in received]
        outputs = [
            o for batch in answers if isinstance(batch, RequestBatchOutputs) for o in batch.outputs
        ]
        assert {f"r{i}" for i in range(50)} == {o.request_id for o in outputs if o.finished}


async def test_an_idle_loop_shuts_down_at_once() -> None:
    """There is nothing to wait for."""
    async with engine_behind() as frontend:
        frontend.runner.shut_down(drain=True)
        await frontend.ended.wait()


@pytest.mark.parametrize("other_is_late", [False, True])
async def test_a_client_that_does_not_read_leaves_the_other_its_calls(other_is_late: bool) -> None:
    """Steps wait for it, but utility calls of the other are answered, as soon as that has caught up."""
    async with engine_behind(2, high_water_mark=5) as frontend:
        frontend.add("a", 500)
        if other_is_late:
            frontend.add("b", 500, client_index=1)
        await wait_all_tasks_blocked()
        frontend.inputs[1].send_nowait(encode_utility(UtilityRequest(1, 7, "is_sleeping")))

        with trio.fail_after(5):
            while not isinstance(await frontend.receive(1), UtilityCallOutput):
                pass
        assert frontend.runner.engine.has_unfinished


async def test_a_farewell_reaches_every_client_that_reads() -> None:
    """Who does not read has to notice in another way."""
    async with engine_behind(2, high_water_mark=1) as frontend:
        frontend.add("a", 500)
        await wait_all_tasks_blocked()
        frontend.runner.send_dead_sentinel()

        assert isinstance(await frontend.receive(1), EngineDead)


async def test_a_wave_ends_when_nobody_has_work() -> None:
    """The first engine tells the coordinator, for all of this process."""
    lockstep = Lockstep()
    async with (
        engine_behind(lockstep=lockstep) as first,
        engine_behind(lockstep=lockstep, engine_index=1) as second,
    ):
        for frontend in (first, second):
            frontend.broadcasts.send_nowait([COORDINATOR_READY])
        second.add("a", 3)
        told: list[DpControlOutput] = []
        while not (told and told[-1].start_wave == 0):
            outputs = decode_outputs(await second.notices.receive())
            told += [outputs] if isinstance(outputs, DpControlOutput) else []
        first.broadcasts.send_nowait(encode_start_dp_wave(StartDpWave(0, 1)))
        await second.until_finished("a")
        while not isinstance(
            outputs := decode_outputs(await first.notices.receive()), DpControlOutput
        ):
            pass

    assert outputs.wave_complete == 0
    assert [notice.start_wave for notice in told] == [0]


async def test_garbage_from_the_coordinator_is_noted() -> None:
    """It ends nobody."""
    async with engine_behind(lockstep=Lockstep()) as frontend:
        frontend.broadcasts.send_nowait([b"\x02", b"\xc1"])
        frontend.broadcasts.send_nowait([b"?"])
        frontend.add("a")
        await frontend.until_finished("a")

        assert frontend.runner.engine.summary.errors == 2
