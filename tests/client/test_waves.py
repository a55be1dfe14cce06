"""Leading engines through their waves, and following who leads them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import attrs
import ormsgpack
import pytest
import trio
from tests.client.world import make_request
from tests.memory import MemoryReceiver, MemoryRouter, MemorySender, open_memory_connection
from tests.ready import ready_response
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import EngineCoreClient, OutputStream, run_client
from trio_vllm.client.waves import RESUBSCRIBE_GRACE, WaveLeader
from trio_vllm.errors import DecodeError, EngineDeadError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    SUBSCRIBE,
    CoordinatorStats,
    DpControlOutput,
    EngineCoreRequest,
    EngineId,
    EngineLoad,
    Frames,
    RequestBatchOutputs,
    SchedulerStats,
    StartDpWave,
    decode_coordinator_broadcast,
    decode_engine_message,
    encode_coordinator_stats,
    encode_outputs,
)
from trio_vllm.transport import Disconnect, EngineChannels, FollowerChannels, LeaderChannels


@attrs.define
class Lockstep:
    """A client of two engines, and what goes to and fro between it and them."""

    client: EngineCoreClient
    inboxes: list[MemoryReceiver]
    disconnects: trio.MemorySendChannel[Disconnect]
    to_client: MemorySender
    """Notices of engines, or publications of a coordinator."""
    from_client: MemoryReceiver
    """Broadcasts to engines, or notices to a coordinator."""
    subscriptions: MemorySender
    link: trio.MemorySendChannel[bool]
    """Whether the connection to a coordinator is open, from now on."""

    async def submit(self, request_id: str, rank: int) -> EngineCoreRequest:
        """Send a request; gives what the engine got."""
        request = make_request(request_id, data_parallel_rank=rank)
        self.client.driver.submit(request, OutputStream(request_id))
        await wait_all_tasks_blocked()
        assert request.current_wave == 0  # the caller's is not changed
        ((frames, _),) = self.inboxes[rank].receive_batch_nowait(10)
        message = decode_engine_message(frames)
        assert isinstance(message, EngineCoreRequest)
        return message

    async def say(self, *frames: bytes | memoryview, connection: int | None = None) -> None:
        attrs.evolve(self.to_client, connection=connection).send_nowait(frames)
        await wait_all_tasks_blocked()

    async def notify(self, notice: DpControlOutput) -> None:
        await self.say(*encode_outputs(notice), connection=30 + notice.engine_index)

    async def publish(self, wave: int, *, running: bool) -> None:
        loads = [EngineLoad(1, 2, 0.5), EngineLoad(0, 0)]
        await self.say(*encode_coordinator_stats(CoordinatorStats(loads, wave, running)))

    def sent(self) -> list[Frames]:
        try:
            return [frames for frames, _ in self.from_client.receive_batch_nowait(100)]
        except trio.WouldBlock:
            return []

    def broadcasts(self) -> list[StartDpWave | None]:
        return [decode_coordinator_broadcast(frames) for frames in self.sent()]


@attrs.define
class FakeLink:
    """A connection that opens and breaks as a test tells it."""

    changes: trio.MemoryReceiveChannel[bool]

    async def wait_change(self) -> bool:
        return await self.changes.receive()


@asynccontextmanager
async def open_lockstep(
    *, leads: bool, version: str = "0.33.0", data_parallel_size: int = 2
) -> AsyncIterator[Lockstep]:
    router = MemoryRouter()
    _, outputs = open_memory_connection()
    send_disconnects, disconnects = trio.open_memory_channel[Disconnect](math.inf)
    to_client, client_receives = open_memory_connection()
    client_sends, from_client = open_memory_connection()
    subscribe, subscriptions = open_memory_connection()
    link, changes = trio.open_memory_channel[bool](math.inf)
    responses = {
        index: ready_response(index, vllm_version=version, data_parallel_size=data_parallel_size)
        for index in range(2)
    }
    coordination: LeaderChannels | FollowerChannels = (
        LeaderChannels(client_sends, subscriptions, client_receives, frozenset({40, 41}))
        if leads
        else FollowerChannels(client_receives, client_sends, FakeLink(changes))
    )
    channels = EngineChannels("in", "out", responses, router, outputs, disconnects, coordination)
    inboxes = [router.connect(EngineId.of(index)) for index in responses]
    async with run_client(channels) as client:
        await wait_all_tasks_blocked()
        yield Lockstep(client, inboxes, send_disconnects, to_client, from_client, subscribe, link)


async def test_leader_wakes_the_others(autojump_clock: MockClock) -> None:
    """For each request to seemingly idle engines; not for those to running ones."""
    async with open_lockstep(leads=True) as world:
        assert (await world.submit("a", 1)).current_wave == 0
        assert (await world.submit("b", 0)).current_wave == 0
        assert world.broadcasts() == [StartDpWave(0, 1), StartDpWave(0, 0)]

        await world.notify(DpControlOutput(engine_index=0, start_wave=0))
        assert world.broadcasts() == [StartDpWave(0, 0)]
        await world.submit("c", 1)
        assert world.broadcasts() == []

        await world.notify(DpControlOutput(engine_index=0, wave_complete=0))
        assert world.broadcasts() == []
        assert (await world.submit("d", 1)).current_wave == 1
        assert world.broadcasts() == [StartDpWave(1, 1)]


async def test_leader_ignores_statistics(autojump_clock: MockClock) -> None:
    async with open_lockstep(leads=True) as world:
        statistics = RequestBatchOutputs(scheduler_stats=SchedulerStats(num_running_reqs=1))
        await world.say(*encode_outputs(statistics))

        assert world.broadcasts() == []
        assert world.client.is_healthy


async def test_connection_of_an_engine_that_is_back(autojump_clock: MockClock) -> None:
    """It hears of the gate, and of the wave that it may have missed."""
    async with open_lockstep(leads=True) as world:
        await world.notify(DpControlOutput(engine_index=1, start_wave=3))
        world.sent()
        for frames in ([b"\x00"], [SUBSCRIBE]):
            world.subscriptions.send_nowait(frames)
        await wait_all_tasks_blocked()

        ready, wave = world.sent()
        assert ready == [COORDINATOR_READY]
        assert decode_coordinator_broadcast(wave) == StartDpWave(3, None)


async def test_an_engine_that_hears_no_broadcasts_is_lost_with_all(
    autojump_clock: MockClock,
) -> None:
    """It would not be woken, and the others would wait for it."""
    async with open_lockstep(leads=True) as world:
        begin = trio.current_time()
        world.disconnects.send_nowait(Disconnect(connection=40))
        await trio.sleep(RESUBSCRIBE_GRACE / 2)
        assert world.client.is_healthy

        error = await world.client.wait_failed()

        assert trio.current_time() - begin == pytest.approx(RESUBSCRIBE_GRACE)
        assert isinstance(error, EngineDeadError)
        assert "coordinator" in str(error)


@pytest.mark.parametrize("is_first", [False, True])
async def test_an_engine_that_subscribes_again_is_not_lost(
    autojump_clock: MockClock, is_first: bool
) -> None:
    """Whichever of the two is heard of first: the break, or the new connection."""
    async with open_lockstep(leads=True) as world:

        async def lose(connection: int) -> None:
            world.disconnects.send_nowait(Disconnect(connection=connection))
            await wait_all_tasks_blocked()

        if not is_first:
            await lose(40)
        attrs.evolve(world.subscriptions, connection=42).send_nowait([SUBSCRIBE])
        await wait_all_tasks_blocked()
        if is_first:
            await lose(40)
        await trio.sleep(2 * RESUBSCRIBE_GRACE)

        assert world.client.is_healthy


async def test_a_stranger_that_subscribes_and_leaves_hurts_nobody(
    autojump_clock: MockClock,
) -> None:
    async with open_lockstep(leads=True) as world:
        attrs.evolve(world.subscriptions, connection=99).send_nowait([SUBSCRIBE])
        await wait_all_tasks_blocked()
        for connection in (99, 98):
            world.disconnects.send_nowait(Disconnect(connection=connection))
        await trio.sleep(2 * RESUBSCRIBE_GRACE)

        assert world.client.is_healthy


@pytest.mark.parametrize("is_lockstep", [True, False])
def test_subscribers_that_are_gone_are_not_kept(is_lockstep: bool) -> None:
    leader = WaveLeader([0, 1], is_lockstep=is_lockstep, subscribers=[40, 41])
    for stranger in range(100, 30_000):
        leader.receive_subscription([SUBSCRIBE], stranger)
        leader.lose_connection(stranger, 0.0)

    assert leader.subscriber_count == 2
    assert leader.next_deadline == math.inf


@pytest.mark.parametrize("size", [1, 2])
async def test_engines_without_waves_need_no_broadcasts(
    autojump_clock: MockClock, size: int
) -> None:
    """Only in lockstep does one wait for the other."""
    async with open_lockstep(leads=True, data_parallel_size=size) as world:
        world.disconnects.send_nowait(Disconnect(connection=40))
        await trio.sleep(2 * RESUBSCRIBE_GRACE)

        assert world.client.is_healthy == (size == 1)


BAD_NOTICES: dict[str, Sequence[bytes]] = {
    "garbage": [b"\xc1"],
    "sentinel": [b"ENGINE_CORE_DEAD"],
    "outputs": [*map(bytes, encode_outputs(RequestBatchOutputs(finished_requests=["a"])))],
    "far-wave": [*map(bytes, encode_outputs(DpControlOutput(start_wave=2**32 - 1)))],
    "far-end": [*map(bytes, encode_outputs(DpControlOutput(wave_complete=2**32 - 1)))],
}


@pytest.mark.parametrize("frames", BAD_NOTICES.values(), ids=BAD_NOTICES)
async def test_a_notice_that_cannot_be_read_ends_its_engine_and_so_the_client(
    autojump_clock: MockClock, frames: Sequence[bytes]
) -> None:
    async with open_lockstep(leads=True) as world:
        stream = OutputStream("a")
        world.client.driver.submit(make_request("a"), stream)
        await world.notify(DpControlOutput(engine_index=1, start_wave=0))
        await world.say(*frames, connection=31)

        failure = await world.client.wait_failed()
        assert isinstance(failure, EngineDeadError)
        assert (failure.engine_index, type(failure.__cause__)) == (1, DecodeError)
        with pytest.raises(EngineDeadError):
            await anext(stream)
        with pytest.raises(EngineDeadError):
            world.client.driver.submit(make_request("b"), OutputStream("b"))


@pytest.mark.parametrize("frames", BAD_NOTICES.values(), ids=BAD_NOTICES)
async def test_a_notice_of_a_stranger_changes_nothing(
    autojump_clock: MockClock, frames: Sequence[bytes]
) -> None:
    async with open_lockstep(leads=True) as world:
        await world.say(*frames, connection=99)
        stolen = DpControlOutput(engine_index=1, start_wave=5)
        await world.notify(DpControlOutput(engine_index=1, start_wave=0))
        await world.say(*encode_outputs(stolen), connection=98)

        assert (await world.submit("a", 1)).current_wave == 0
        assert world.broadcasts() == [StartDpWave(0, 1)]
        assert world.client.is_healthy
        assert sum(world.client.statistics().dropped.values()) == 2


async def test_the_loss_of_the_connection_for_notices_is_the_loss_of_the_engine(
    autojump_clock: MockClock,
) -> None:
    async with open_lockstep(leads=True) as world:
        await world.notify(DpControlOutput(engine_index=1, start_wave=0))
        world.disconnects.send_nowait(Disconnect(connection=99))
        await trio.sleep(1)
        assert world.client.is_healthy
        world.disconnects.send_nowait(Disconnect(connection=31))

        failure = await world.client.wait_failed()
        assert str(failure) == "engine 1 is dead: its connection was lost"


@pytest.mark.parametrize("leads", [True, False])
async def test_loss_of_one_engine_fails_the_client(autojump_clock: MockClock, leads: bool) -> None:
    async with open_lockstep(leads=leads) as world:
        world.disconnects.send_nowait(Disconnect(engine_index=1))

        failure = await world.client.wait_failed()

        assert str(failure) == "engine 1 is dead: its connection was lost"


async def test_engines_without_waves_are_not_woken(autojump_clock: MockClock) -> None:
    """They would log an error each time."""
    async with open_lockstep(leads=True, data_parallel_size=1) as world:
        await world.submit("a", 0)
        assert world.broadcasts() == []

    async with open_lockstep(leads=False, data_parallel_size=1, version="0.32.0") as world:
        await world.submit("a", 0)
        assert world.sent() == []
        await world.say(b"\xc1")
        assert world.client.is_healthy


async def test_follower_stamps_the_published_wave(autojump_clock: MockClock) -> None:
    async with open_lockstep(leads=False) as world:
        assert (await world.submit("a", 0)).current_wave == 0

        await world.publish(7, running=False)

        assert (await world.submit("b", 1)).current_wave == 7
        assert world.sent() == []


@pytest.mark.parametrize("size", [1, 2])
async def test_a_follower_that_loses_its_coordinator_is_lost_with_the_engines(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """They wake each other by way of it; those without waves need none, and there it is only told."""
    async with open_lockstep(leads=False, data_parallel_size=size) as world:
        world.link.send_nowait(False)
        await trio.sleep(RESUBSCRIBE_GRACE * 0.9)
        assert world.client.is_healthy
        assert [record.message for record in caplog.records] == [
            "the connection to the coordinator was lost"
        ]
        await trio.sleep(RESUBSCRIBE_GRACE * 0.2)

        assert world.client.is_healthy == (size == 1)
        if size == 2:
            failure = await world.client.wait_failed()
            assert str(failure) == "an engine is dead: the coordinator is gone"


async def test_a_coordinator_that_is_back_soon_is_followed(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have started anew meanwhile, so that its first wave may be any."""
    async with open_lockstep(leads=False) as world:
        await world.publish(7, running=False)
        for _ in range(2):
            for is_open in (False, True):
                world.link.send_nowait(is_open)
                await trio.sleep(RESUBSCRIBE_GRACE / 2)
        await trio.sleep(2 * RESUBSCRIBE_GRACE)
        await world.publish(2**31, running=False)

        assert (await world.submit("a", 0)).current_wave == 2**31
        assert caplog.messages.count("the coordinator is connected again") == 2


async def test_follower_tells_an_old_coordinator_of_first_requests(
    autojump_clock: MockClock,
) -> None:
    """A newer one takes that for an error, and does not need it."""
    async with open_lockstep(leads=False, version="0.32.0") as world:
        await world.publish(2, running=False)
        await world.submit("a", 1)
        await world.publish(2, running=True)
        await world.submit("b", 0)

        ((notice,),) = world.sent()
        assert ormsgpack.unpackb(notice) == [b"\x01\x00", 2]


async def test_coordinator_that_cannot_be_understood(autojump_clock: MockClock) -> None:
    async with open_lockstep(leads=False) as world:
        await world.say(b"\xc1")

        assert isinstance(await world.client.wait_failed(), DecodeError)


async def test_a_published_wave_far_ahead_is_not_believed(autojump_clock: MockClock) -> None:
    """But the first may be any: the coordinator may be older than we are."""
    async with open_lockstep(leads=False) as world:
        await world.publish(2**31, running=False)
        assert (await world.submit("a", 0)).current_wave == 2**31
        await world.publish(2**32 - 1, running=False)

        assert "far ahead" in str(await world.client.wait_failed())
