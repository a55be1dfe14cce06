"""`ZmqContext`: makes ØMQ sockets, and ends them when its block is left.

All in a process share one ØMQ context, with its threads and descriptors: it is made for the first
`open_context` and ended with the last. Only hundreds of them, as of many engines in one process, share
several (`ContextPool`). A process that was forked makes its own, since threads do not survive a fork.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
import zmq
from zmq import SocketType

from trio_vllm.transport.descriptors import PER_CONTEXT, PER_SOCKET, require_descriptors
from trio_vllm.transport.zmq_monitor import WATCHED_EVENTS, ConnectionTable, PeerMonitor
from trio_vllm.transport.zmq_socket import SendBudget, ZmqSocket, translate_error
from trio_vllm.values import define

__all__ = ["SocketType", "ZmqContext", "heartbeat_options", "open_context"]

IO_THREADS = 1
"""Threads that ØMQ uses for the network; one is good for about 1 GB/s.

With a second one a message could be read by the one thread before the other has told of its
connection. Then the message would be taken for one of an earlier connection, of the same descriptor.
"""

TERMINATION_GRACE = 1.0
"""Seconds that ØMQ may take to end sockets after the longest linger has passed."""

ACCEPT_QUEUE = 4096
"""Connections that may wait to be accepted. Of more, as when thousands of engines start together, some
learn only seconds later that they were not accepted."""

ALWAYS: dict[SocketType, dict[int, int | bytes]] = {
    SocketType.ROUTER: {zmq.ROUTER_MANDATORY: 1},  # tell that the peer is gone, do not drop
    SocketType.XPUB: {zmq.XPUB_VERBOSE: 1},  # tell of each subscription, repeated ones too
}

PLACES = 256
"""How many `ZmqContext` may share a context of ØMQ's. As a socket is closed, ØMQ walks over the monitors of
all sockets of its context, so the end of thousands of engines would take time in the square of their number:
seconds for 2,000. A context costs two threads and five descriptors."""

RawContext = zmq.Context[zmq.Socket[bytes]]


@define(eq=False)
class SharedContext:
    """A ØMQ context, and how many use it."""

    raw: RawContext
    users: int = 0
    overdue: list[PeerMonitor] = attrs.field(factory=list, init=False)
    """Watch sockets that had not ended in time. To close them earlier would block a thread of ØMQ's."""


@define
class ContextPool:
    """The ØMQ contexts of this process: as few as there can be with ``places`` users each."""

    _places: int = PLACES
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _contexts: list[SharedContext] = attrs.field(factory=list, init=False)

    def acquire(self) -> SharedContext:
        """Count one more user of the first context with room; make one if none has."""
        with self._lock:
            context = next((one for one in self._contexts if one.users < self._places), None)
            if context is None:
                self._contexts.append(context := SharedContext(_make_raw_context()))
            context.users += 1
            return context

    def release(self, context: SharedContext) -> bool:
        """Count one user less; whether that was the last, so that the context is to be ended."""
        with self._lock:
            context.users -= 1
            if context.users:
                return False
            self._contexts.remove(context)
            return True


def _make_raw_context() -> RawContext:
    require_descriptors(PER_CONTEXT, "connections")
    raw = zmq.Context(IO_THREADS)
    # As many as there are descriptors; by itself ØMQ stops at 1023 sockets.
    raw.set(zmq.MAX_SOCKETS, raw.get(zmq.SOCKET_LIMIT))
    return raw


_pools: dict[int, ContextPool] = {}
"""By process. What was inherited by a fork is kept, but not touched: to end it would wait for threads
that are not there."""


class ZmqContext:
    """Makes sockets that live no longer than the block of `open_context`."""

    def __init__(self, *, termination_grace: float = TERMINATION_GRACE) -> None:
        self._pool = _pools.setdefault(os.getpid(), ContextPool())
        self._shared = self._pool.acquire()
        self._termination_grace = termination_grace
        self._sockets: list[ZmqSocket] = []
        self._monitors: list[PeerMonitor] = []
        self._longest_linger = 0.0
        self._connection_numbers = itertools.count()
        self._is_closed = False

    def socket(
        self,
        socket_type: SocketType,
        *,
        identity: bytes = b"",
        linger: float = 0.0,
        send_high_water_mark: int = 0,
        send_budget: int | None = None,
    ) -> ZmqSocket:
        """Make a socket, to be bound or connected.

        Nothing bounds how many received messages may pile up in it, unless an option is set.

        Args:
          socket_type: What it does, for example ``SocketType.ROUTER``.
          identity: What a ROUTER at the other end shall know us by.
          linger: Seconds from closing in which messages under way may still get out.
          send_high_water_mark: How many messages a peer may be behind before sending waits; 0 is any
            number.
          send_budget: About how many bytes the only peer may be behind; None is any number.

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
            zmq.BACKLOG: ACCEPT_QUEUE,
            **ALWAYS.get(socket_type, {}),
        }
        if identity:
            options[zmq.IDENTITY] = identity
        self._longest_linger = max(self._longest_linger, linger)
        budget = None if send_budget is None else SendBudget(send_budget)
        return self._make(socket_type, options, budget)

    def open_monitor(self, watched: ZmqSocket) -> PeerMonitor:
        """Watch the connections of a socket; before it is bound, to miss none."""
        source = self._make(SocketType.PAIR, {zmq.LINGER: 0, zmq.RCVHWM: 0})
        self._sockets.remove(source)
        address = f"inproc://monitor-{id(source)}"
        watched.start_monitor(address, WATCHED_EVENTS)
        source.receive_events(address)
        monitor = PeerMonitor(watched, source)
        self._monitors.append(monitor)
        return monitor

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
        budget: SendBudget | None = None,
    ) -> ZmqSocket:
        if self._is_closed:
            raise trio.ClosedResourceError("this context is closed")
        # ØMQ opens its own in the background, and does not survive it everywhere if there is none.
        require_descriptors(PER_CONTEXT + PER_SOCKET, "connections")
        try:
            raw = self._shared.raw.socket(socket_type)
        except zmq.ZMQError as error:
            raise translate_error(error, "cannot make another socket") from error
        socket = ZmqSocket(raw, budget)
        self._sockets.append(socket)
        socket.set_options(options)
        return socket

    async def aclose(self) -> None:  # noqa: ASYNC910
        """Close all sockets, and wait until their last messages are out or their lingers over."""
        if self._is_closed:
            return  # noqa: ASYNC910
        self._is_closed = True
        for socket in self._sockets:
            socket.close()
        with trio.move_on_after(self._longest_linger + self._termination_grace, shield=True):  # noqa: ASYNC912
            # Others may use the context that the sockets are in, so we wait for those that are
            # watched; unless it is to end, when ØMQ waits for all.
            for monitor in self._monitors:
                await monitor.wait_ended()
        shared = self._shared
        shared.overdue = [m for m in (*shared.overdue, *self._monitors) if not m.has_ended()]
        if self._pool.release(shared):
            for monitor in shared.overdue:
                monitor.close()
            await self._terminate(shared.raw)

    async def _terminate(self, raw: RawContext) -> None:
        with trio.move_on_after(self._longest_linger + self._termination_grace, shield=True):
            # A limiter of its own: the default one may be used up by the application.
            limiter = trio.CapacityLimiter(1)
            await trio.to_thread.run_sync(raw.term, abandon_on_cancel=True, limiter=limiter)


@asynccontextmanager
async def open_context(
    *, termination_grace: float = TERMINATION_GRACE
) -> AsyncIterator[ZmqContext]:
    """Open a place for sockets; leaving the block closes them all.

    Args:
      termination_grace: Seconds that ØMQ may take to end them after the longest linger has passed.

    Raises:
      ConfigurationError: There are too few file descriptors left.

    Cancellation:
      Leaving takes as long as the longest linger at most (and the grace, should ØMQ hang), and
      cannot be cancelled, since the last messages would be lost.
    """
    context = ZmqContext(termination_grace=termination_grace)
    try:
        yield context
    finally:
        await context.aclose()


def heartbeat_options(timeout: float) -> dict[int, int | bytes]:
    """Give the options that break a connection whose peer is silent for so many seconds."""
    if timeout == math.inf:
        return {}
    half = max(round(timeout * 500), 1)  # milliseconds: of sending one, and of waiting for it
    # Heartbeats begin only after the handshake of ZeroMQ, which may take 30 s by itself.
    handshake = min(2 * half, 30_000)
    return {zmq.HEARTBEAT_IVL: half, zmq.HEARTBEAT_TIMEOUT: half, zmq.HANDSHAKE_IVL: handshake}
