"""`PeerMonitor` reports the events of a socket's connections; two watchers follow which of them break.

`ConnectionTable` watches a bound socket, `OutgoingConnection` a connecting one.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import trio
import zmq

from trio_vllm.concurrency import Waker
from trio_vllm.protocol import Frames
from trio_vllm.transport.channels import Disconnect
from trio_vllm.transport.zmq_socket import ZmqSocket
from trio_vllm.values import define, frozen

EVENT_HEAD = struct.Struct("=HI")
"""An event's first frame: its number and its value. The second one is the address."""


POLL_INTERVAL = 0.005
"""Seconds between two looks whether a socket has ended, if another task waits for its events."""

MAX_EVENTS = 10_000
"""Events taken at once; more than any socket has connections that change at a time."""

MAX_GONE = MAX_EVENTS
"""Connections that are gone and of which messages may still have to be handled. That is done soon after
they were received: so many connections do not begin and end in between."""


class PeerEventKind(enum.Enum):
    """What happened to a connection."""

    ACCEPTED = enum.auto()
    """A peer connected to us. Whether it speaks ØMQ is not known yet."""
    CONNECTED = enum.auto()
    """A peer let us connect. Whether it speaks ØMQ is not known yet."""
    HANDSHAKE_SUCCEEDED = enum.auto()
    """The other side speaks ØMQ."""
    HANDSHAKE_FAILED = enum.auto()
    """The other side speaks something else, or left before it had said enough."""
    CONNECT_RETRIED = enum.auto()
    """No socket listens where we want to connect; ØMQ will try again."""
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


@frozen
class PeerEvent:
    """One event of one connection.

    ``descriptor`` is the one that ØMQ gives with each message of this connection, where it tells it: when it begins and when it is lost. After that the same
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

    async def wait_pending(self) -> None:
        """Wait until there are events for `receive_pending`.

        Raises:
          trio.BusyResourceError: Another task is receiving.
          trio.ClosedResourceError: The monitor is closed.
        """
        await self._source.wait_receivable()

    def receive_pending(self) -> list[PeerEvent]:
        """Give the events that have happened and were not received, maybe none.

        Raises:
          trio.ClosedResourceError: The monitor is closed, or the events had ended before.
        """
        if not self._source.is_receivable():  # as nearly always
            return []
        received = self._source.receive_batch_nowait(MAX_EVENTS)
        events = [event for frames, _ in received if (event := _decode(frames)) is not None]
        if len(events) < len(received):  # the watched socket was closed
            self.close()
        return events

    async def wait_ended(self) -> None:
        """Wait until the watched socket is closed and its last messages are out, or given up."""
        await trio.lowlevel.checkpoint()
        with suppress(trio.ClosedResourceError):
            while not self._source.is_closed:
                self.receive_pending()
                try:
                    await self.wait_pending()
                except trio.BusyResourceError:  # the other task may be the one that sees the end
                    await trio.sleep(POLL_INTERVAL)

    def has_ended(self) -> bool:
        """Whether it is closed, as it is once the watched socket has ended."""
        with suppress(trio.ClosedResourceError):
            self.receive_pending()
        return self._source.is_closed

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
    return PeerEvent(kind, value if kind in HAVE_DESCRIPTOR else None, bytes(address).decode())


@define(eq=False)
class Connection:
    """One accepted connection of a bound socket."""

    number: int
    is_open: bool = True
    is_announced: bool = True
    """Whether ØMQ has reported its beginning: of a short one, it may report the end first."""
    has_spoken: bool = False
    """Whether a message came by it."""
    engine_index: int | None = None
    """Whose it is, if that engine has said so."""


class ConnectionTable(trio.abc.ReceiveChannel[Disconnect]):
    """The accepted connections of a bound socket, and a channel of those that broke.

    ØMQ knows a connection by its descriptor, which is used again for another one. Here each gets a
    number when ØMQ reports its beginning, which is before a message can come by it. Its end may be
    reported before the last message by it was received, so a broken connection is kept until its
    descriptor is used again; and if engines register here and it has spoken, a while longer, for
    whose it is may be known only when its messages have been handled.

    A break is passed on once it is known to be of interest: for a socket where engines register
    (``of_engines``) when the connection's engine is known, else when a message has come by it.
    """

    def __init__(
        self, monitor: PeerMonitor, numbers: Iterator[int], *, of_engines: bool = False
    ) -> None:
        self._monitor = monitor
        self._numbers = numbers
        self._of_engines = of_engines
        self._newest: dict[int, Connection] = {}  # by descriptor
        self._speakers: dict[int, Connection] = {}  # by number, if engines register here
        self._gone: deque[int] = deque()  # those of them whose descriptors are used again
        self._forgotten_count = 0
        self._forgotten_silent_count = 0
        self._disconnects: deque[Disconnect] = deque()
        self._waker = Waker()
        self._is_closed = False

    @property
    def connection_count(self) -> int:
        """How many connections there have been."""
        self.process_events()
        return self._forgotten_count + len(self._newest)

    @property
    def known_count(self) -> int:
        """How many of them are in the tables: those that are open, and some that are gone.

        This is what the tables take of memory; however many there were, it stays small.
        """
        return len(self._newest) + len(self._gone)

    @property
    def idle_connections(self) -> int:
        """How many open connections no message has come by."""
        self.process_events()
        return sum(c.is_open and not c.has_spoken for c in self._newest.values())

    @property
    def non_zmq_connections(self) -> int:
        """How many connections ended before a message came by: of peers that do not speak ØMQ."""
        self.process_events()
        known = sum(not c.is_open and not c.has_spoken for c in self._newest.values())
        return self._forgotten_silent_count + known

    async def run(self) -> None:
        """Task: follow the monitor until the socket is closed."""
        await trio.lowlevel.checkpoint()
        with suppress(trio.ClosedResourceError):
            while True:
                # To receive an event here would take it across a checkpoint, in which a message of
                # the new connection could be received.
                await self._monitor.wait_pending()
                self.process_events()

    def process_events(self) -> None:
        """Process the events that the monitor has reported so far."""
        with suppress(trio.ClosedResourceError):
            for event in self._monitor.receive_pending():
                self._process(event)

    def number_of(self, descriptor: int) -> int | None:
        """The number of the connection by which a message came."""
        connection = self._newest.get(descriptor)
        if connection is None:
            return None
        if not connection.has_spoken:
            connection.has_spoken = True
            if self._of_engines:
                self._speakers[connection.number] = connection
            elif not connection.is_open:
                self._report(Disconnect(connection=connection.number))
        return connection.number

    def identify(self, number: int | None, engine_index: int) -> None:
        """Note whose a connection is, which an engine has said by a message."""
        connection = None if number is None else self._speakers.get(number)
        if connection is None or connection.engine_index == engine_index:
            return
        previous, connection.engine_index = connection.engine_index, engine_index
        if previous is not None:
            self._report(Disconnect(engine_index=previous))
        if not connection.is_open:
            self._report(Disconnect(engine_index=engine_index))

    def _process(self, event: PeerEvent) -> None:
        if event.descriptor is None:
            return
        if event.kind is PeerEventKind.ACCEPTED:
            self._begin(event.descriptor)
        elif event.kind is PeerEventKind.DISCONNECTED:
            self._end(event.descriptor)

    def _begin(self, descriptor: int) -> None:
        newest = self._newest.get(descriptor)
        if newest is not None and not newest.is_announced:
            newest.is_announced = True
        else:
            self._add(descriptor)

    def _end(self, descriptor: int) -> None:
        connection = self._newest.get(descriptor)
        if connection is None or not connection.is_open:
            connection = self._add(descriptor)
            connection.is_announced = False
        connection.is_open = False
        if self._of_engines:
            if connection.engine_index is not None:
                self._report(Disconnect(engine_index=connection.engine_index))
        elif connection.has_spoken:
            self._report(Disconnect(connection=connection.number))

    def _add(self, descriptor: int) -> Connection:
        if (previous := self._newest.get(descriptor)) is not None:
            self._forget(previous)
        connection = self._newest[descriptor] = Connection(next(self._numbers))
        return connection

    def _forget(self, connection: Connection) -> None:
        """No message can come by this connection any more."""
        self._forgotten_count += 1
        self._forgotten_silent_count += not connection.has_spoken
        if connection.number in self._speakers:
            self._gone.append(connection.number)
        if len(self._gone) > MAX_GONE:
            del self._speakers[self._gone.popleft()]

    def _report(self, disconnect: Disconnect) -> None:
        self._disconnects.append(disconnect)
        self._waker.wake()

    async def receive(self) -> Disconnect:
        """Wait for the next break. `run` must run meanwhile.

        Cancellation:
          Loses none.
        """
        await trio.lowlevel.checkpoint()
        while not self._disconnects:
            if self._is_closed:
                raise trio.ClosedResourceError("the connections are watched no longer")
            await self._waker.wait()
        return self._disconnects.popleft()

    def receive_pending(self) -> list[Disconnect]:
        """Give the breaks that are known and were not received, maybe none."""
        disconnects = list(self._disconnects)
        self._disconnects.clear()
        return disconnects

    async def aclose(self) -> None:
        """Watch no longer."""
        self._is_closed = True
        self._waker.wake()
        await self._monitor.aclose()


_log = logging.getLogger("trio_vllm.transport")


class OutgoingConnection:
    """Follows one connection of a connecting socket: whether it was open, and has broken.

    One task at a time may wait. ØMQ itself connects again without end. But a peer that comes back has
    no memory of what it was sent before, so here a lost connection stays lost.
    """

    def __init__(self, address: str, monitor: PeerMonitor) -> None:
        self.address = address
        self.state = f"nobody listens at {address}"
        """Where it stands, in words."""
        self._monitor = monitor
        self._times_open = 0
        self._is_open = False
        self._is_lost = False
        self._is_foreign = False

    def close(self) -> None:
        """Watch it no longer."""
        self._monitor.close()

    @property
    def is_lost(self) -> bool:
        """Whether it was open and broke."""
        with suppress(trio.ClosedResourceError):  # we have closed it
            for event in self._monitor.receive_pending():
                self._take(event)
        return self._is_lost

    async def wait_open(self) -> None:
        """Wait until a peer that speaks ZeroMQ is at the other end, or was."""
        await trio.lowlevel.checkpoint()
        while not self._times_open:
            self._take(await self._monitor.receive())

    async def wait_reopened(self) -> None:
        """Wait until a peer, another one or the same, is at the other end for the second time."""
        await trio.lowlevel.checkpoint()
        while self._times_open < 2:
            self._take(await self._monitor.receive())

    async def wait_lost(self) -> None:
        """Wait until it has been open and has broken."""
        await trio.lowlevel.checkpoint()
        while not self._is_lost:
            self._take(await self._monitor.receive())

    async def wait_change(self) -> bool:
        """Wait until it opens or breaks, for the first time or again; whether it is open now."""
        await trio.lowlevel.checkpoint()
        was_open = self._is_open
        while self._is_open is was_open:
            self._take(await self._monitor.receive())
        return self._is_open

    def _take(self, event: PeerEvent) -> None:
        state = self.state
        match event.kind:
            case PeerEventKind.CONNECTED if not self._is_foreign:
                self.state = f"{self.address} is open, but says nothing"
            case PeerEventKind.HANDSHAKE_FAILED:
                self._is_foreign = True
                # ØMQ says the same of one whose process listens, and takes 30 s to get to it.
                self.state = (
                    f"who listens at {self.address} has not answered in ZeroMQ's protocol: another"
                    " program, or one that is still starting"
                )
            case PeerEventKind.HANDSHAKE_SUCCEEDED:
                self._times_open += 1
                self._is_open = True
                again = " again" if self._times_open > 1 else ""
                self.state = f"{self.address} is connected{again}"
            case PeerEventKind.DISCONNECTED if self._times_open:
                self._is_lost, self._is_open = True, False
                self.state = f"{self.address} closed the connection"
        if self.state != state:
            # That it is open goes without saying if it is connected in a moment.
            is_passing = event.kind is PeerEventKind.CONNECTED
            _log.log(logging.DEBUG if is_passing else logging.INFO, "%s", self.state)


def set_linger(socket: ZmqSocket, seconds: float) -> None:
    """Set for how many seconds after closing a message may still go out."""
    socket.set_options({zmq.LINGER: round(seconds * 1000)})
