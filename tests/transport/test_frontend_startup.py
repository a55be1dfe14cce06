"""The run of a startup without ØMQ: what depends on the order in which tasks hear of things."""

from __future__ import annotations

import itertools
import math

import pytest
import trio
from tests.ready import ready_response
from tests.transport.test_connections import FakeMonitor
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.concurrency import running
from trio_vllm.errors import StartupError
from trio_vllm.protocol import EngineId, encode_ready_response
from trio_vllm.transport import Disconnect
from trio_vllm.transport.channels import Received
from trio_vllm.transport.frontend_startup import StartupLimits, StartupRun
from trio_vllm.transport.zmq_monitor import ConnectionTable, PeerEventKind

TIMEOUT = 10.0


class FakeInput:
    """An input socket on which engines register as a test says."""

    address = "memory"

    def __init__(self, connections: ConnectionTable) -> None:
        self._connections = connections
        self._send, self._receive = trio.open_memory_channel[Received](10)

    def register(self, engine_index: int, descriptor: int) -> None:
        (payload,) = encode_ready_response(ready_response(engine_index))
        self._send.send_nowait(([EngineId.of(engine_index), payload], descriptor))

    async def receive_batch(self, limit: int) -> list[Received]:
        frames, descriptor = await self._receive.receive()
        self._connections.process_events()
        return [(frames, self._connections.number_of(descriptor or 0))]


class Rig:
    def __init__(self, engine_count: int = 1) -> None:
        self.monitor = FakeMonitor()
        self.connections = ConnectionTable(self.monitor, itertools.count(), of_engines=True)
        self.input = FakeInput(self.connections)
        self.run = StartupRun(
            range(engine_count),
            StartupLimits(message=TIMEOUT, restart_grace=math.inf, report_interval=4.0),
            requests=self.input,  # type: ignore[arg-type]
            connections=self.connections,
        )
        self.engines: list[int] = []

    async def wait(self) -> None:
        async with running(self.connections.run):
            self.engines = list(await self.run.wait())


@pytest.mark.parametrize("attempt", range(10))
async def test_last_engine_is_lost_as_it_registers(autojump_clock: MockClock, attempt: int) -> None:
    """Whoever hears of it first: it is waited for again, or told as lost afterwards."""
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.wait)
        await wait_all_tasks_blocked()
        rig.monitor.tell(PeerEventKind.ACCEPTED, 12)
        rig.monitor.tell(PeerEventKind.DISCONNECTED, 12)
        rig.input.register(0, 12)
        await wait_all_tasks_blocked()
        if not rig.engines:
            rig.monitor.tell(PeerEventKind.ACCEPTED, 13)
            rig.input.register(0, 13)
            await wait_all_tasks_blocked()
            rig.monitor.tell(PeerEventKind.DISCONNECTED, 13)
    assert rig.engines == [0]

    with trio.fail_after(1):
        rig.connections.process_events()
        assert await rig.connections.receive() == Disconnect(engine_index=0)


async def test_restarts_do_not_prolong_it(autojump_clock: MockClock) -> None:
    """Two of three engines come and go for ever; the third one is missed in time."""
    rig = Rig(engine_count=3)
    begin = trio.current_time()

    async def come_and_go() -> None:
        for descriptor in range(100):
            for index in range(2):
                rig.monitor.tell(PeerEventKind.ACCEPTED, 2 * descriptor + index)
                rig.input.register(index, 2 * descriptor + index)
            await trio.sleep(TIMEOUT / 4)
            for index in range(2):
                rig.monitor.tell(PeerEventKind.DISCONNECTED, 2 * descriptor + index)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_and_go)
        with pytest.raises(StartupError) as caught:
            await rig.wait()
        nursery.cancel_scope.cancel()

    assert trio.current_time() == begin + TIMEOUT
    assert 2 in caught.value.missing_engines


async def test_what_is_waited_for_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig = Rig(engine_count=2)
    with pytest.raises(StartupError):
        await rig.wait()

    assert caplog.text.count("still waiting for registration of engines [0, 1]") == 2
