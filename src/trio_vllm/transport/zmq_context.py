"""The owner of ØMQ sockets: makes them, and sees to it that they end."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import zmq
from zmq import SocketType

from trio_vllm.transport.zmq_monitor import WATCHED_EVENTS, ConnectionTable, PeerMonitor
from trio_vllm.transport.zmq_socket import ZmqSocket, translated

__all__ = ["SocketType", "ZmqContext", "open_context"]

TERMINATION_GRACE = 1.0
"""Seconds that ØMQ may take to end a context after the longest linger has passed."""

ALWAYS: dict[SocketType, dict[int, int | bytes]] = {
    SocketType.ROUTER: {zmq.ROUTER_MANDATORY: 1},  # tell that the peer is gone, do not drop
    SocketType.XPUB: {zmq.XPUB_VERBOSE: 1},  # tell of each subscription, repeated ones too
}


class ZmqContext:
    """Makes sockets that live no longer than the block of `open_context`."""

    def __init__(self, raw: zmq.Context[zmq.Socket[bytes]]) -> None:
        # As many as there are descriptors; by itself ØMQ stops at 1023 sockets.
        raw.set(zmq.MAX_SOCKETS, raw.get(zmq.SOCKET_LIMIT))
        self._raw = raw
        self._sockets: list[ZmqSocket] = []
        self._longest_linger = 0.0
        self._connection_numbers = itertools.count()

    def socket(
        self,
        socket_type: SocketType,
        *,
        identity: bytes = b"",
        linger: float = 0.0,
        send_high_water_mark: int = 0,
    ) -> ZmqSocket:
        """Make a socket, to be bound or connected.

        Nothing bounds how many received messages may pile up in it.

        Args:
          socket_type: What it does, for example ``SocketType.ROUTER``.
          identity: What a ROUTER at the other end shall know us by.
          linger: Seconds from closing in which messages under way may still get out.
          send_high_water_mark: How many messages a peer may be behind before sending waits, or
            fewer that are large (`BACKLOG_SIZE`); 0 is any number.

        Raises:
          ConfigurationError: There is no descriptor left, or an option has an impossible value.
          trio.ClosedResourceError: The context is closed.
        """
        if not 0 <= linger < math.inf:
            raise ValueError("a linger is a finite number of seconds")
        options: dict[int, int | bytes] = {
            zmq.LINGER: round(linger * 1000),
            zmq.SNDHWM: send_high_water_mark,
            zmq.RCVHWM: 0,
            **ALWAYS.get(socket_type, {}),
        }
        if identity:
            options[zmq.IDENTITY] = identity
        self._longest_linger = max(self._longest_linger, linger)
        return self._make(socket_type, options, is_bounded=send_high_water_mark > 0)

    def open_monitor(self, watched: ZmqSocket) -> PeerMonitor:
        """Watch the connections of a socket; before it is bound, to miss none."""
        address = f"inproc://monitor-{len(self._sockets)}"
        source = self._make(SocketType.PAIR, {zmq.LINGER: 0, zmq.RCVHWM: 0})
        watched.start_monitor(address, WATCHED_EVENTS)
        source.receive_events(address)
        return PeerMonitor(watched, source)

    def track_connections(self, socket: ZmqSocket, *, of_engines: bool = False) -> ConnectionTable:
        """Number the connections of a socket; before it is bound, to miss none."""
        table = ConnectionTable(
            self.open_monitor(socket), self._connection_numbers, of_engines=of_engines
        )
        socket.label_messages(table)
        return table

    def _make(
        self,
        socket_type: SocketType,
        options: dict[int, int | bytes],
        *,
        is_bounded: bool = False,
    ) -> ZmqSocket:
        if self._raw.closed:
            raise trio.ClosedResourceError("this context is closed")
        try:
            raw = self._raw.socket(socket_type)
        except zmq.ZMQError as error:
            raise translated(error, "cannot make another socket") from error
        socket = ZmqSocket(raw, is_bounded=is_bounded)
        self._sockets.append(socket)
        socket.set_options(options)
        return socket

    async def aclose(self) -> None:
        """Close all sockets, and wait until their last messages are out or their lingers over."""
        for socket in self._sockets:
            socket.close()
        with trio.move_on_after(self._longest_linger + TERMINATION_GRACE, shield=True):
            # A limiter of its own: the default one may be used up by the application.
            limiter = trio.CapacityLimiter(1)
            await trio.to_thread.run_sync(self._raw.term, abandon_on_cancel=True, limiter=limiter)


@asynccontextmanager
async def open_context(*, io_threads: int = 1) -> AsyncIterator[ZmqContext]:
    """Open a ØMQ context; leaving the block closes all its sockets.

    Args:
      io_threads: How many threads ØMQ uses for the network; one is good for about 1 GB/s.

    Cancellation:
      Leaving takes as long as the longest linger at most (and a second more, should ØMQ hang), and
      cannot be cancelled, since the last messages would be lost.
    """
    context = ZmqContext(zmq.Context(io_threads))
    try:
        yield context
    finally:
        await context.aclose()
