"""Which engine is lost when a connection breaks, in whatever order we hear of it."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.transport.zmq_monitor import EngineConnections, PeerEvent, PeerEventKind, PeerMonitor


class FakeMonitor:
    """Events as a test tells them."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[PeerEvent](100)

    def tell(self, kind: PeerEventKind, descriptor: int | None = None) -> None:
        self._send.send_nowait(PeerEvent(kind, descriptor, "tcp://127.0.0.1:1"))

    async def receive(self) -> PeerEvent:
        return await self._receive.receive()

    def receive_pending(self) -> list[PeerEvent]:
        count = self._receive.statistics().current_buffer_used
        return [self._receive.receive_nowait() for _ in range(count)]

    async def aclose(self) -> None:
        self._receive.close()
        await trio.lowlevel.checkpoint()


@attrs.define
class Rig:
    monitor: FakeMonitor
    connections: EngineConnections
    losses: list[int] = attrs.field(factory=list)

    def accept(self, descriptor: int) -> None:
        self.monitor.tell(PeerEventKind.ACCEPTED, descriptor)

    def disconnect(self, descriptor: int) -> None:
        self.monitor.tell(PeerEventKind.DISCONNECTED, descriptor)

    async def listen(self) -> None:
        async for engine_index in self.connections:
            self.losses.append(engine_index)


@pytest.fixture
async def rig(nursery: trio.Nursery) -> Rig:
    monitor = FakeMonitor()
    assert hasattr(PeerMonitor, "receive_pending")
    rig = Rig(monitor, EngineConnections(monitor))  # type: ignore[arg-type]
    nursery.start_soon(rig.listen)
    return rig


async def test_loss_after_registration(rig: Rig) -> None:
    rig.accept(12)
    rig.accept(13)
    rig.connections.watch(0, 12)
    rig.connections.watch(1, 13)
    await wait_all_tasks_blocked()

    rig.disconnect(13)
    await wait_all_tasks_blocked()

    assert rig.losses == [1]


async def test_loss_is_known_before_the_registration_is_read(rig: Rig) -> None:
    rig.accept(12)
    rig.disconnect(12)
    await wait_all_tasks_blocked()
    assert rig.losses == []

    rig.connections.watch(0, 12)
    await wait_all_tasks_blocked()

    assert rig.losses == [0]


async def test_loss_that_nobody_has_heard_of_when_the_registration_is_read(rig: Rig) -> None:
    rig.accept(12)
    await wait_all_tasks_blocked()

    rig.disconnect(12)
    rig.connections.watch(0, 12)
    await wait_all_tasks_blocked()

    assert rig.losses == [0]


async def test_descriptor_is_used_again(rig: Rig) -> None:
    rig.accept(12)
    rig.connections.watch(0, 12)
    rig.disconnect(12)
    rig.accept(12)
    rig.connections.watch(1, 12)
    await wait_all_tasks_blocked()
    assert rig.losses == [0]

    rig.disconnect(12)
    await wait_all_tasks_blocked()

    assert rig.losses == [0, 1]


async def test_descriptor_is_used_again_before_a_message_was_read(rig: Rig) -> None:
    """The first engine's registration is read when the second one's connection is up."""
    rig.accept(12)
    rig.disconnect(12)
    rig.accept(12)
    rig.connections.watch(0, 12)
    rig.connections.watch(1, 12)
    await wait_all_tasks_blocked()

    assert rig.losses == [0]


async def test_several_messages_of_one_engine(rig: Rig) -> None:
    """And garbage in between, of which it is not known whose it is."""
    rig.accept(12)
    for engine_index in (None, 0, 0, None, 0):
        rig.connections.watch(engine_index, 12)
    rig.disconnect(12)
    await wait_all_tasks_blocked()

    assert rig.losses == [0]


async def test_connections_that_end_without_a_word(rig: Rig) -> None:
    """Each counts, also if its number is in use again; not if its message is only read late."""
    for _ in range(3):
        rig.accept(12)
        rig.disconnect(12)
    assert rig.connections.mute_count == 3

    for _ in range(2):
        rig.connections.watch(None, 12)
    rig.accept(12)

    assert (rig.connections.mute_count, rig.connections.silent_count) == (2, 1)


async def test_end_is_told_before_the_beginning(rig: Rig) -> None:
    for _ in range(2):
        rig.disconnect(12)
        rig.accept(12)
    assert (rig.connections.silent_count, rig.connections.mute_count) == (0, 2)

    rig.accept(12)
    rig.connections.watch(0, 12)
    rig.disconnect(12)
    await wait_all_tasks_blocked()

    assert rig.losses == [0]


async def test_loss_of_somebody(rig: Rig) -> None:
    """Who never said who he is, is missed by nobody."""
    for descriptor in (12, 13):
        rig.accept(descriptor)
    rig.connections.watch(None, 13)
    assert rig.connections.silent_count == 1

    for descriptor in (12, 13):
        rig.disconnect(descriptor)

    assert (rig.connections.silent_count, rig.connections.mute_count) == (0, 1)
    await wait_all_tasks_blocked()
    assert rig.losses == []


async def test_cancelling_loses_no_loss() -> None:
    monitor = FakeMonitor()
    connections = EngineConnections(monitor)  # type: ignore[arg-type]
    for descriptor in (12, 13):
        monitor.tell(PeerEventKind.ACCEPTED, descriptor)
        connections.watch(descriptor, descriptor)
        monitor.tell(PeerEventKind.DISCONNECTED, descriptor)
    assert connections.silent_count == 0  # which looks at all events

    with trio.CancelScope() as scope:
        scope.cancel()
        await connections.receive()

    with assert_checkpoints():
        assert await connections.receive() == 12
    assert await connections.receive() == 13
    await connections.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await connections.receive()
