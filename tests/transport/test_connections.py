"""The numbers of connections, and which break is told, in whatever order ØMQ tells of things."""

from __future__ import annotations

import itertools

import attrs
import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.concurrency import Waker
from trio_vllm.transport import Disconnect
from trio_vllm.transport.zmq_monitor import (
    MAX_GONE,
    ConnectionTable,
    PeerEvent,
    PeerEventKind,
    PeerMonitor,
)


class FakeMonitor(PeerMonitor):
    """Events as a test tells them."""

    def __init__(self) -> None:
        self._events: list[PeerEvent] = []
        self._waker = Waker()

    def tell(self, kind: PeerEventKind, descriptor: int | None = None) -> None:
        self._events.append(PeerEvent(kind, descriptor, "tcp://127.0.0.1:1"))
        self._waker.wake()

    async def wait_pending(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self._events:
            await self._waker.wait()

    def receive_pending(self) -> list[PeerEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        pass


@attrs.define
class Rig:
    """A table of connections, the events that it hears, and what it tells."""

    monitor: FakeMonitor
    table: ConnectionTable
    disconnects: list[Disconnect] = attrs.field(factory=list)

    def accept(self, descriptor: int) -> None:
        self.monitor.tell(PeerEventKind.ACCEPTED, descriptor)

    def disconnect(self, descriptor: int) -> None:
        self.monitor.tell(PeerEventKind.DISCONNECTED, descriptor)

    def receive(self, descriptor: int) -> int | None:
        """A message comes by a connection; gives the connection's number."""
        self.table.process_events()
        return self.table.number_of(descriptor)

    def register(self, engine_index: int, descriptor: int) -> None:
        """A message comes by a connection, and says from which engine."""
        self.table.identify(self.receive(descriptor), engine_index)

    async def listen(self) -> None:
        async for disconnect in self.table:
            self.disconnects.append(disconnect)

    @property
    def lost_engines(self) -> list[int | None]:
        return [disconnect.engine_index for disconnect in self.disconnects]


def make_rig(nursery: trio.Nursery, *, of_engines: bool) -> Rig:
    monitor = FakeMonitor()
    rig = Rig(monitor, ConnectionTable(monitor, itertools.count(), of_engines=of_engines))
    nursery.start_soon(rig.table.run)
    nursery.start_soon(rig.listen)
    return rig


@pytest.fixture
async def engines(nursery: trio.Nursery) -> Rig:
    """Of a socket where engines register."""
    return make_rig(nursery, of_engines=True)


@pytest.fixture
async def outputs(nursery: trio.Nursery) -> Rig:
    """Of another socket."""
    return make_rig(nursery, of_engines=False)


# Where engines register -------------------------------------------------------------------------


async def test_loss_after_registration(engines: Rig) -> None:
    engines.accept(12)
    engines.accept(13)
    engines.register(0, 12)
    engines.register(1, 13)
    await wait_all_tasks_blocked()

    engines.disconnect(13)
    await wait_all_tasks_blocked()

    assert engines.disconnects == [Disconnect(engine_index=1)]


async def test_loss_is_known_before_the_registration_is_read(engines: Rig) -> None:
    engines.accept(12)
    engines.disconnect(12)
    await wait_all_tasks_blocked()
    assert engines.disconnects == []

    engines.register(0, 12)
    await wait_all_tasks_blocked()

    assert engines.lost_engines == [0]


async def test_loss_is_pending_when_the_registration_is_read(engines: Rig) -> None:
    engines.accept(12)
    await wait_all_tasks_blocked()

    engines.disconnect(12)
    engines.register(0, 12)
    await wait_all_tasks_blocked()

    assert engines.lost_engines == [0]


async def test_descriptor_is_used_again(engines: Rig) -> None:
    engines.accept(12)
    engines.register(0, 12)
    engines.disconnect(12)
    engines.accept(12)
    engines.register(1, 12)
    await wait_all_tasks_blocked()
    assert engines.lost_engines == [0]

    engines.disconnect(12)
    await wait_all_tasks_blocked()

    assert engines.lost_engines == [0, 1]


async def test_descriptor_is_used_again_before_a_message_was_read(engines: Rig) -> None:
    """The first engine's registration is read when the second one's connection is up."""
    engines.accept(12)
    engines.disconnect(12)
    engines.accept(12)
    engines.register(0, 12)
    engines.register(1, 12)
    await wait_all_tasks_blocked()

    assert engines.lost_engines == [0]


async def test_several_messages_of_one_engine(engines: Rig) -> None:
    """And garbage in between, of which it is not known whose it is."""
    engines.accept(12)
    for engine_index in (None, 0, 0, None, 0):
        if engine_index is None:
            engines.receive(12)
        else:
            engines.register(engine_index, 12)
    engines.disconnect(12)
    await wait_all_tasks_blocked()

    assert engines.lost_engines == [0]


async def test_stranger_is_not_told(engines: Rig) -> None:
    for descriptor in (12, 13):
        engines.accept(descriptor)
    engines.receive(13)
    assert engines.table.idle_connections == 1

    for descriptor in (12, 13):
        engines.disconnect(descriptor)

    assert (engines.table.idle_connections, engines.table.non_zmq_connections) == (0, 1)
    await wait_all_tasks_blocked()
    assert engines.disconnects == []


# Where they do not ------------------------------------------------------------------------------


async def test_number_is_never_used_again(outputs: Rig) -> None:
    numbers = []
    for _ in range(3):
        outputs.accept(12)
        numbers += [outputs.receive(12), outputs.receive(12)]
        outputs.disconnect(12)
    await wait_all_tasks_blocked()

    assert numbers == [0, 0, 1, 1, 2, 2]
    assert outputs.disconnects == [Disconnect(connection=number) for number in range(3)]


async def test_connection_without_a_message_is_not_told(outputs: Rig) -> None:
    outputs.accept(12)
    outputs.disconnect(12)
    await wait_all_tasks_blocked()
    assert outputs.disconnects == []

    assert outputs.receive(12) == 0  # which was under way
    await wait_all_tasks_blocked()

    assert outputs.disconnects == [Disconnect(connection=0)]


# Counts -----------------------------------------------------------------------------------------


async def test_connections_that_end_without_a_message(engines: Rig) -> None:
    """Each counts, also if its descriptor is in use again; not if its message is only read late."""
    for _ in range(3):
        engines.accept(12)
        engines.disconnect(12)
    assert engines.table.non_zmq_connections == 3

    for _ in range(2):
        engines.receive(12)
    engines.accept(12)

    assert (engines.table.non_zmq_connections, engines.table.idle_connections) == (2, 1)


async def test_end_is_told_before_the_beginning(engines: Rig) -> None:
    for _ in range(2):
        engines.disconnect(12)
        engines.accept(12)
    assert (engines.table.idle_connections, engines.table.non_zmq_connections) == (0, 2)

    engines.accept(12)
    engines.register(0, 12)
    engines.disconnect(12)
    await wait_all_tasks_blocked()

    assert engines.lost_engines == [0]


@pytest.mark.parametrize("of_engines", [True, False])
async def test_strangers_that_come_and_go_are_forgotten(
    of_engines: bool, nursery: trio.Nursery
) -> None:
    """Whatever they said; an engine that came before them is still known."""
    rig = make_rig(nursery, of_engines=of_engines)
    rig.accept(11)
    if of_engines:
        rig.register(0, 11)
    for number in range(30_000):
        rig.accept(12 + number % 3)
        if number % 2:
            rig.receive(12 + number % 3)
        rig.disconnect(12 + number % 3)
    await wait_all_tasks_blocked()

    assert rig.table.connection_count == 30_001
    assert rig.table.known_count <= 4 + MAX_GONE
    assert rig.table.non_zmq_connections == 15_000
    rig.disconnects.clear()
    rig.disconnect(11)
    await wait_all_tasks_blocked()
    assert rig.lost_engines == ([0] if of_engines else [])


# Receiving --------------------------------------------------------------------------------------


async def test_cancelling_loses_no_disconnect() -> None:
    monitor = FakeMonitor()
    table = ConnectionTable(monitor, itertools.count(), of_engines=True)
    for descriptor in (12, 13):
        monitor.tell(PeerEventKind.ACCEPTED, descriptor)
        table.process_events()
        table.identify(table.number_of(descriptor), descriptor)
        monitor.tell(PeerEventKind.DISCONNECTED, descriptor)
    table.process_events()

    with trio.CancelScope() as scope:
        scope.cancel()
        await table.receive()

    with assert_checkpoints():
        assert await table.receive() == Disconnect(engine_index=12)
    assert await table.receive() == Disconnect(engine_index=13)
    await table.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await table.receive()
