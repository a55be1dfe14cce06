"""What happens to the connections of a ØMQ socket: who came, and above all who was lost."""

from __future__ import annotations

import enum
import logging
import struct
from collections import deque

import attrs
import trio
import zmq

from trio_vllm.transport.channels import Frames
from trio_vllm.transport.zmq_socket import ZmqSocket

# MERGED transport/_connections: Which engine is at the other end of each connection of a bound socket, and which one is lost.
# MERGED transport/_outgoing: One connection that we make, and what its monitor tells of it.


EVENT_HEAD = struct.Struct("=HI")
"""An event's first frame: its number and its value. The second one is the address."""


MANY = 10_000
"""Events taken at once; more than any socket has connections that change at a time."""


class PeerEventKind(enum.Enum):
    """What happened to a connection."""

    ACCEPTED = enum.auto()
    """Somebody connected to us. Whether it speaks ØMQ is not known yet."""
    CONNECTED = enum.auto()
    """Somebody let us connect. Whether it speaks ØMQ is not known yet."""
    HANDSHAKE_SUCCEEDED = enum.auto()
    """The other side speaks ØMQ."""
    HANDSHAKE_FAILED = enum.auto()
    """The other side speaks something else, or left before it had said enough."""
    CONNECT_RETRIED = enum.auto()
    """Nobody listens where we want to connect; ØMQ will try again."""
    DISCONNECTED = enum.auto()
    """The connection is lost. What it had delivered before can still be received."""


KIND_OF_EVENT = {
    int(zmq.EVENT_ACCEPTED): PeerEventKind.ACCEPTED,
    int(zmq.EVENT_CONNECTED): PeerEventKind.CONNECTED,
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): PeerEventKind.HANDSHAKE_SUCCEEDED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): PeerEventKind.HANDSHAKE_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): PeerEventKind.HANDSHAKE_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): PeerEventKind.HANDSHAKE_FAILED,
    int(zmq.EVENT_CONNECT_RETRIED): PeerEventKind.CONNECT_RETRIED,
    int(zmq.EVENT_DISCONNECTED): PeerEventKind.DISCONNECTED,
}
WATCHED_EVENTS = sum(KIND_OF_EVENT) | int(zmq.EVENT_MONITOR_STOPPED)

HAVE_DESCRIPTOR = {PeerEventKind.ACCEPTED, PeerEventKind.CONNECTED, PeerEventKind.DISCONNECTED}


@attrs.frozen
class PeerEvent:
    """One event of one connection.

    ``descriptor`` is the one that `ZmqSocket.receive_with_descriptor` gives with each message of
    this connection, where ØMQ tells it: when it begins and when it is lost. After that the same
    number may be given to another connection. ``address`` is the bound or connected one.
    """

    kind: PeerEventKind
    descriptor: int | None
    address: str


class PeerMonitor(trio.abc.ReceiveChannel[PeerEvent]):
    """The events of one socket, as a channel that ends when that socket is closed.

    Made by `ZmqContext.open_monitor`, and closed with the context if not before.
    """

    def __init__(self, watched: ZmqSocket, source: ZmqSocket) -> None:
        self._watched = watched
        self._source = source

    async def receive(self) -> PeerEvent:
        """Wait for the next event.

        Raises:
          trio.EndOfChannel: The socket is closed.
          trio.BusyResourceError: Another task is receiving.
          trio.ClosedResourceError: The monitor is closed.

        Cancellation:
          Loses no event.
        """
        event = _decode(await self._source.receive())
        if event is None:
            self.close()
            raise trio.EndOfChannel
        return event

    def receive_pending(self) -> list[PeerEvent]:
        """Give the events that have happened and were not received, maybe none.

        Raises:
          trio.ClosedResourceError: The monitor is closed, or the events had ended before.
        """
        try:
            batch = self._source.receive_batch_nowait(MANY)
        except trio.WouldBlock:
            return []
        events = [event for event in map(_decode, batch) if event is not None]
        if len(events) < len(batch):  # the watched socket was closed
            self.close()
        return events

    def close(self) -> None:
        """Watch no longer; idempotent."""
        self._watched.stop_monitor()  # first: ØMQ's own thread would block on a closed monitor
        self._source.close()

    async def aclose(self) -> None:
        """Like `close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


def _decode(frames: Frames) -> PeerEvent | None:
    """Give the event, or None for the one that says that there are no more."""
    head, address = frames
    number, value = EVENT_HEAD.unpack(head)
    kind = KIND_OF_EVENT.get(number)
    if kind is None:
        return None
    return PeerEvent(kind, value if kind in HAVE_DESCRIPTOR else None, address.decode())


class EngineConnections(trio.abc.ReceiveChannel[int]):
    """A channel of the engines whose connection broke, by index.

    ØMQ tells only the descriptor of a broken connection, so each engine's is kept from a message
    that came by it. The number may be given to another connection afterwards, so it is forgotten
    with the loss.
    """

    def __init__(self, monitor: PeerMonitor) -> None:
        self._monitor = monitor
        self._engine_of: dict[int, int | None] = {}
        self._open: set[int] = set()
        self._broken: set[int] = set()  # whose number is not in use again
        self._lost: deque[int] = deque()
        self._waiting = trio.CancelScope()
        # Two threads of ØMQ tell of the beginning and the end, so a short one may end first.
        self._ended_early: set[int] = set()
        self._mute: set[int] = set()  # the broken ones nothing had come by
        self._earlier_mute = 0  # those whose number is in use again

    @property
    def silent_count(self) -> int:
        """How many connections nothing has come by."""
        self._take_pending()
        return len(self._open - self._engine_of.keys())

    @property
    def mute_count(self) -> int:
        """How many connections ended before anything came by them: of those who do not speak ØMQ."""
        self._take_pending()
        return self._earlier_mute + len(self._mute)

    def watch(self, engine_index: int | None, descriptor: int) -> None:
        """A message came by this connection; from an engine, or from we do not know whom."""
        self._take_pending()
        self._mute.discard(descriptor)
        previous = self._engine_of.get(descriptor)
        if descriptor in self._broken:
            self._lose(engine_index)
        elif previous is None:
            self._engine_of[descriptor] = engine_index
        elif engine_index not in (None, previous):
            self._engine_of[descriptor] = engine_index
            self._lose(previous)

    def _take_pending(self) -> None:
        # The monitor has told of the beginning of a connection before a message can come by it.
        for event in self._monitor.receive_pending():
            self._take(event)

    def _take(self, event: PeerEvent) -> None:
        descriptor = event.descriptor
        if event.kind is PeerEventKind.ACCEPTED and descriptor is not None:
            if descriptor in self._ended_early:
                self._ended_early.remove(descriptor)
                return
            self._open.add(descriptor)
            self._broken.discard(descriptor)
            self._reuse(descriptor)
        elif event.kind is PeerEventKind.DISCONNECTED and descriptor is not None:
            if descriptor not in self._open:
                self._ended_early.add(descriptor)
            self._open.discard(descriptor)
            self._broken.add(descriptor)
            if descriptor not in self._engine_of:
                self._reuse(descriptor)
                self._mute.add(descriptor)
            self._lose(self._engine_of.pop(descriptor, None))

    def _reuse(self, descriptor: int) -> None:
        """The number is that of another connection than before."""
        if descriptor in self._mute:
            self._mute.remove(descriptor)
            self._earlier_mute += 1

    def _lose(self, engine_index: int | None) -> None:
        if engine_index is not None:
            self._lost.append(engine_index)
            self._waiting.cancel()

    async def receive(self) -> int:
        """Wait for the next loss; gives the engine's index. Cancelling loses none."""
        await trio.lowlevel.checkpoint()
        while not self._lost:
            with trio.CancelScope() as self._waiting:
                self._take(await self._monitor.receive())
        return self._lost.popleft()

    async def aclose(self) -> None:
        """Watch no longer."""
        await self._monitor.aclose()


_log = logging.getLogger("trio_vllm.transport")


class OutgoingConnection:
    """Whether a connecting socket has reached somebody, and has lost it again.

    One task at a time may wait. ØMQ itself would connect again for ever; but who was lost does not
    know any more what it was told, so what is lost stays lost here.
    """

    def __init__(self, address: str, monitor: PeerMonitor) -> None:
        self.address = address
        self.state = f"nobody listens at {address}"
        """Where it stands, in words."""
        self._monitor = monitor
        self._times_open = 0
        self._is_lost = False
        self._is_foreign = False

    @property
    def is_lost(self) -> bool:
        """Whether it was open and broke."""
        for event in self._monitor.receive_pending():
            self._take(event)
        return self._is_lost

    async def wait_open(self) -> None:
        """Wait until somebody who speaks ZeroMQ is at the other end, or was."""
        await trio.lowlevel.checkpoint()
        while not self._times_open:
            self._take(await self._monitor.receive())

    async def wait_reopened(self) -> None:
        """Wait until somebody else, or somebody once more, is at the other end."""
        await trio.lowlevel.checkpoint()
        while self._times_open < 2:
            self._take(await self._monitor.receive())

    async def wait_lost(self) -> None:
        """Wait until it has been open and has broken."""
        await trio.lowlevel.checkpoint()
        while not self._is_lost:
            self._take(await self._monitor.receive())

    def _take(self, event: PeerEvent) -> None:
        state = self.state
        match event.kind:
            case PeerEventKind.CONNECTED if not self._is_foreign:
                self.state = f"{self.address} is open, but says nothing"
            case PeerEventKind.HANDSHAKE_FAILED:
                self._is_foreign = True
                self.state = f"who listens at {self.address} does not speak ZeroMQ"
            case PeerEventKind.HANDSHAKE_SUCCEEDED:
                self._times_open += 1
                again = " again" if self._times_open > 1 else ""
                self.state = f"{self.address} is connected{again}"
            case PeerEventKind.DISCONNECTED if self._times_open:
                self._is_lost = True
                self.state = f"{self.address} closed the connection"
        if self.state != state:
            # That it is open goes without saying if it is connected in a moment.
            is_passing = event.kind is PeerEventKind.CONNECTED
            _log.log(logging.DEBUG if is_passing else logging.INFO, "%s", self.state)


def set_linger(socket: ZmqSocket, seconds: float) -> None:
    """Change how long a message may still be under way after closing."""
    socket.set_options({zmq.LINGER: round(seconds * 1000)})
