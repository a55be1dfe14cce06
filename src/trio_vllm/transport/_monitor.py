"""What happens to the connections of a ØMQ socket: who came, and above all who was lost."""

from __future__ import annotations

import enum
import struct

import attrs
import trio
import zmq

from trio_vllm.transport._channels import Frames
from trio_vllm.transport._socket import ZmqSocket

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
