"""`ZmqSocket`: a ØMQ socket as a trio channel.

Theory of operation. A ØMQ socket has one descriptor for both directions. It turns readable when
something happened to the socket, and any call on the socket may make it unreadable again, whatever
the call was for. So there are three rules, and `ZmqSocket` keeps them for its users:

- Try first, wait only after a failure, and expect to wake for nothing (`ZmqSocket._attempt_until`).
- After every call, pass on the wake-up that it may have used up (`ZmqSocket._notify`).
- One task watches the descriptor; the other direction's waits for that one (`ZmqSocket._wait`).

A message is taken, or handed over, in one synchronous step, after which nothing is cancelled.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Protocol, TypeVar

import attrs
import trio
import zmq

from trio_vllm.endpoint import parse_endpoint
from trio_vllm.errors import AddressInUseError, ConfigurationError, PeerGoneError
from trio_vllm.protocol import Buffer, Frames
from trio_vllm.transport.address import SocketFile, check_listener, prepare_path
from trio_vllm.transport.channels import Received
from trio_vllm.values import define, frozen

_log = logging.getLogger("trio_vllm.transport")

POLL_INTERVALS = (0.0005, 0.005)
"""Seconds between two checks for room, the first one and the longest: ØMQ gives lent memory back without
waking any task. A peer that keeps up has taken a budget in less than the first."""


class Tracker(Protocol):
    """Says whether ØMQ still needs the memory of a message."""

    @property
    def done(self) -> bool:
        """Whether it has given it back."""
        ...


@frozen
class _Lent:
    """A message whose memory is lent to ØMQ, with those that were copied before it."""

    tracker: Tracker
    size: int
    """Bytes of them all."""
    time: float


@define
class SendBudget:
    """The bytes of messages that may wait for the peer of one socket.

    They are as many as the peer takes in a short time, and some kilobytes in any case: for what is new
    comes behind them. A peer that keeps up so gets large batches.

    ØMQ bounds what waits by the number of messages, whatever their size, and does not report when
    one of them is out. But memory that is lent to it, it gives back. To lend costs twenty times as much
    as to copy some kilobytes, so only one message in so many bytes is lent: when it is out, all that
    were sent before are. There are more bytes to it the longer the peer keeps up. Whether
    there is room is asked each time that some have been copied.
    """

    _least: int
    """Bytes that may wait even if the peer takes nothing, and up to a quarter more."""
    _most: int = 16 * 1024 * 1024
    _delay: float = 0.02
    """Seconds in which the peer should take what waits, if it is more than the least."""
    _clock: Callable[[], float] = monotonic
    _lent: deque[_Lent] = attrs.field(factory=deque, init=False)
    _size: int = attrs.field(default=0, init=False)
    _copied: int = attrs.field(default=0, init=False)
    """Bytes since the last message that was lent."""
    _next_look: int = attrs.field(
        default=attrs.Factory(lambda self: self._least // 4, takes_self=True), init=False
    )
    """How many of them there are when it is to be asked again whether there is room."""
    _copied_most: int = attrs.field(
        default=attrs.Factory(lambda self: self._least // 2, takes_self=True), init=False
    )

    @property
    def is_full(self) -> bool:
        """Whether no more should be sent."""
        if self._size < self._least:
            return False
        self._forget_sent()
        if self._size < self._least or not self._lent:
            return False
        is_late = self._clock() - self._lent[0].time > self._delay
        if is_late:
            self._copied_most = self._least // 2
        return is_late or self._size >= self._most

    def _forget_sent(self) -> None:
        while self._lent and self._lent[0].tracker.done:
            self._size -= self._lent.popleft().size

    def may_copy(self, size: int) -> bool:
        """Whether a message of this size may be sent as it is, and none has to be lent now."""
        if size < BUDGETED_SIZE:
            return True
        copied = self._copied + size
        if size >= ZERO_COPY_SIZE or copied >= self._copied_most:
            return False
        if copied >= self._next_look:
            if self.is_full:
                return False
            self._next_look = copied + self._least // 4
        return True

    def add_copied(self, size: int) -> None:
        """Count a message that was copied."""
        if size >= BUDGETED_SIZE:
            self._copied += size
            self._size += size

    def add_lent(self, tracker: Tracker, size: int) -> None:
        """Count a message; it and those before are out when its tracker is done."""
        self._forget_sent()
        if not self._lent:
            self._copied_most = min(self._copied_most * 2, self._most // 16)
        self._lent.append(_Lent(tracker, self._copied + size, self._clock()))
        self._size += size
        self._copied, self._next_look = 0, self._least // 4


def track(frame: Buffer) -> tuple[zmq.Frame, zmq.MessageTracker]:
    """Make a frame that is lent whatever its size, and a tracker that is done with it."""
    lent = zmq.Frame(bytes(frame), track=True, copy=False, copy_threshold=0)
    tracker = lent.tracker
    assert isinstance(tracker, zmq.MessageTracker)
    return lent, tracker


T = TypeVar("T")

# Plain integers: the operators of enumerations cost more than receiving a message.
RECEIVABLE = int(zmq.POLLIN)
SENDABLE = int(zmq.POLLOUT)
EVENTS = int(zmq.EVENTS)
SOURCE_DESCRIPTOR = int(zmq.SRCFD)
DONT_WAIT = int(zmq.DONTWAIT)
MORE_FOLLOWS = int(zmq.SNDMORE)

REFUSE_ZMTP_1_2 = b"trio-vllm"
"""A domain for authentication, without any authentication in it. With one, ØMQ refuses peers that
speak ZMTP 1 or 2, out of use since 2013: any few bytes of junk would pass for messages of these."""

ZERO_COPY_SIZE = 64 * 1024
"""From here on lending the memory is cheaper than copying it (8 MiB: 10 µs against 3 ms)."""

LARGE_ARRAY = 1024 * 1024
"""Bytes of a received frame that are not copied any more: 200 MB would take some 60 ms."""

BUDGETED_SIZE = 2048
"""From here on messages count in a `SendBudget`. Of smaller ones a thousand are no burden."""


class ConnectionLabels(Protocol):
    """Gives a connection's number for its descriptor."""

    def process_events(self) -> None:
        """Process the events of connections so far."""
        ...

    def number_of(self, descriptor: int) -> int | None:
        """The number of the connection by which a message came."""
        ...


class ZmqSocket:
    """One ØMQ socket as a channel of multipart messages.

    One task may receive while another one sends. Made by `ZmqContext.socket`, which also closes it.
    """

    def __init__(self, raw: zmq.Socket[bytes], budget: SendBudget | None = None) -> None:
        self._raw = raw
        self._budget = budget
        self._descriptor: int = raw.FD
        self._labels: ConnectionLabels | None = None
        self._file: SocketFile | None = None
        self._waiting: dict[int, trio.CancelScope] = {}
        self._descriptor_is_watched = False
        self.address = ""
        """Where it is bound or connected to, with the port that was chosen."""

    def bind(self, address: str, *, listener: int | None = None) -> str:
        """Listen, and return the address with the port that was chosen.

        Args:
          address: ``tcp://host:port`` or ``ipc://path``. Port 0 lets the system choose one. The
            path is that of a socket which only this user may connect to, and which is removed at
            the end.
          listener: A descriptor that already listens there, inherited from a supervisor. It belongs
            to the socket from now on.

        Raises:
          AddressInUseError: Another socket listens there.
          ConfigurationError: The address has a wrong form or is not ours, there is a file that is no
            socket, or ``listener`` does not listen.
        """
        endpoint = parse_endpoint(address, port_required=False)
        if listener is not None:
            check_listener(listener, address)
        elif address.startswith("ipc://"):
            prepare_path(address)
        # ØMQ makes the file of a socket with the rights of any file.
        mask = os.umask(0o077)
        try:
            self._raw.setsockopt(zmq.IPV6, endpoint.is_ipv6)
            self._raw.setsockopt(zmq.ZAP_DOMAIN, REFUSE_ZMTP_1_2)
            if listener is not None:
                self._raw.setsockopt(zmq.USE_FD, listener)
            self._raw.bind(endpoint.text)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUseError(address) from error
            failure = f"cannot listen on {address}"
            if error.errno in {errno.EADDRNOTAVAIL, errno.ENODEV}:
                raise ConfigurationError(
                    f"{failure}: {zmq.strerror(error.errno)}; it must be an IP address of this host,"
                    " which the other side dials"
                ) from error
            raise translate_error(error, failure) from error
        finally:
            os.umask(mask)
        self.address = self._raw.get_string(zmq.LAST_ENDPOINT)
        if endpoint.is_wildcard:
            _log.warning("whoever reaches this machine can connect to %s", self.address)
        if self.address.startswith("ipc://") and listener is None:
            self._file = SocketFile.at(self.address)
        return self.address

    def connect(self, address: str) -> None:
        """Connect, now or once a socket listens there; ØMQ keeps trying.

        Raises:
          ConfigurationError: The address has a wrong form.
        """
        endpoint = parse_endpoint(address, port_required=True)
        try:
            self._raw.setsockopt(zmq.IPV6, endpoint.is_ipv6)
            self._raw.connect(endpoint.text)
        except zmq.ZMQError as error:
            raise translate_error(error, f"cannot connect to {address}") from error
        self.address = endpoint.text

    def close(self) -> None:
        """Close; idempotent. A task that waits in here gets `trio.ClosedResourceError`.

        What was sent goes on being delivered for the linger of this socket.
        """
        if self._raw.closed:
            return
        trio.lowlevel.notify_closing(self._descriptor)
        self._raw.close()
        if self._file is not None:
            self._file.remove()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._raw.closed

    def set_options(self, options: Mapping[int, int | bytes]) -> None:
        """Set ØMQ's own options; for `ZmqContext`, before the socket is bound or connected."""
        for option, value in options.items():
            try:
                self._raw.setsockopt(option, value)
            except zmq.ZMQError as error:
                failure = f"option {zmq.SocketOption(option).name} cannot be {value!r}"
                raise translate_error(error, failure) from error

    def start_monitor(self, address: str, events: int) -> None:
        """Send ``events`` to another socket of this context; for `ZmqContext`."""
        self._raw.monitor(address, events)

    def stop_monitor(self) -> None:
        """Send no more events; idempotent."""
        if not self._raw.closed:
            self._raw.disable_monitor()

    def receive_events(self, address: str) -> None:
        """Connect to the events that another socket sends here; for `ZmqContext`."""
        self._raw.connect(address)

    def label_messages(self, labels: ConnectionLabels) -> None:
        """Give the number of its connection with each message from now on; for `ZmqContext`."""
        self._labels = labels

    async def receive(self) -> Frames:
        """Wait for one message, whatever connection it comes by."""
        ((frames, _),) = await self.receive_batch(1)
        return frames

    async def receive_batch(self, limit: int) -> list[Received]:
        """Wait for a message; return it and what else is there, ``limit`` messages at most.

        One checkpoint pays for the whole batch, so ``limit`` is also how many messages other tasks
        may have to wait for.

        Raises:
          trio.BusyResourceError: Another task is receiving.
          trio.ClosedResourceError: The socket is closed.

        Cancellation:
          Loses no message.
        """
        return await self._attempt_until(RECEIVABLE, lambda: self._take(limit))

    async def wait_receivable(self) -> None:
        """Wait until there is a message to receive; like `receive_batch` otherwise."""
        await self._attempt_until(RECEIVABLE, self.is_receivable)

    def is_receivable(self) -> bool:
        """Whether there is a message; to ask costs a third of what it costs to find none by receiving."""
        try:
            return bool(self._process_events() & RECEIVABLE)
        except zmq.ZMQError as error:
            raise translate_error(error, "cannot receive") from error

    def receive_batch_nowait(self, limit: int) -> list[Received]:
        """Return what is there, ``limit`` messages at most; `trio.WouldBlock` if nothing is."""
        if batch := self._take(limit):
            return batch
        raise trio.WouldBlock

    async def send(self, frames: Frames) -> None:
        """Queue one message, waiting while the send high-water mark is reached.

        Args:
          frames: At least one. Large `bytes`, and views that are read-only, are lent to ØMQ.
            Everything else is copied, so that the memory behind a `memoryview` that can be written
            can be used again at once.

        Raises:
          PeerGoneError: A ROUTER has no connection with this id.
          trio.BusyResourceError: Another task waits in here.
          trio.ClosedResourceError: The socket is closed.

        Cancellation:
          The message was not sent.
        """
        await self._attempt_until(SENDABLE, lambda: self._put(frames))

    def send_nowait(self, frames: Frames) -> None:
        """Queue one message like `send`; `trio.WouldBlock` if the high-water mark is reached."""
        if len(frames) == 1 and not self._waiting:  # most of all messages, for half the price
            frame = frames[0]
            if type(frame) is bytes and self._may_copy(len(frame)):
                try:
                    self._raw.send(frame, DONT_WAIT)
                except zmq.ZMQError:
                    pass  # the long way does what there is to do
                else:
                    if self._budget is not None:
                        self._budget.add_copied(len(frame))
                    return
        if not self._put(frames):
            raise trio.WouldBlock

    async def _attempt_until(self, event: int, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` until it gives something true; wait for ``event`` in between."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if event in self._waiting:
            raise trio.BusyResourceError("another task is already waiting in this direction")
        if result := attempt():
            await trio.lowlevel.cancel_shielded_checkpoint()
            return result
        interval, longest = POLL_INTERVALS
        while not result:
            await self._wait(event, interval)
            interval = min(interval * 2, longest)
            result = attempt()
        return result

    async def _wait(self, event: int, poll_interval: float) -> None:
        """Wait until ``event`` may have become possible. Returns for nothing at times."""
        with trio.CancelScope() as scope:
            if event == SENDABLE and self._budget is not None and self._budget.is_full:
                scope.deadline = trio.current_time() + poll_interval
            self._waiting[event] = scope
            try:
                if self._descriptor_is_watched:
                    await trio.sleep_forever()
                else:
                    await self._watch_descriptor(event)
            finally:
                del self._waiting[event]

    async def _watch_descriptor(self, event: int) -> None:
        self._descriptor_is_watched = True
        try:
            # Readable, for sending as well: it only means that something has happened.
            await trio.lowlevel.wait_readable(self._descriptor)
        finally:
            self._descriptor_is_watched = False
            for other, scope in self._waiting.items():
                if other != event:  # whose task now looks, and watches in our place
                    scope.cancel()

    def _process_events(self) -> int:
        """Make ØMQ process what has happened; give what is possible now."""
        return int(self._raw.getsockopt(EVENTS))

    def _notify(self) -> None:
        """Wake the tasks whose wait is over; the call before this may have hidden that from them."""
        events = self._process_events() if self._waiting else 0
        for event, scope in self._waiting.items():
            if events & event:
                scope.cancel()

    @trio.lowlevel.enable_ki_protection
    def _take(self, limit: int) -> list[Received]:
        """Take up to ``limit`` messages that are there."""
        batch: list[Received] = []
        labels = self._labels
        receive = self._raw.recv
        while len(batch) < limit:
            try:
                frame = receive(DONT_WAIT, False)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                raise translate_error(error, "cannot receive") from error
            descriptor = None if labels is None else _descriptor_of(frame)
            frames: list[Buffer] = [frame.bytes]
            while frame.more:  # free, where asking the socket costs twice a receive
                frame = receive(copy=False)  # cannot block: messages arrive whole
                frames.append(_content(frame))
            batch.append((frames, descriptor))
        self._notify()
        return batch if labels is None or not batch else _label(batch, labels)

    def _may_copy(self, size: int) -> bool:
        return size < ZERO_COPY_SIZE if self._budget is None else self._budget.may_copy(size)

    @trio.lowlevel.enable_ki_protection
    def _put(self, frames: Frames) -> bool:
        """Hand over one message; False if ØMQ does not take it now."""
        _check_frames(frames)
        *head, last = frames
        if (budget := self._budget) is None:
            return self._hand_over(head, last)
        size = sum(memoryview(frame).nbytes for frame in frames)
        if not budget.may_copy(size):
            return self._put_lent(head, last, size, budget)
        accepted = self._hand_over(head, last)
        if accepted:
            budget.add_copied(size)
        return accepted

    def _put_lent(self, head: Frames, last: Buffer, size: int, budget: SendBudget) -> bool:
        if budget.is_full:
            return False
        lent, tracker = track(last)  # the others are out before it
        accepted = self._hand_over(head, lent)
        if accepted:
            budget.add_lent(tracker, size)
        return accepted

    def _hand_over(self, head: Frames, last: Buffer | zmq.Frame) -> bool:
        accepted = self._try_to_send(head, last)
        if not accepted:
            # Sending processes events only now and then. Now that all is processed, the descriptor
            # must become readable before a third attempt can succeed.
            self._process_events()
            accepted = self._try_to_send(head, last)
        self._notify()
        return accepted

    def _try_to_send(self, head: Frames, last: Buffer | zmq.Frame) -> bool:
        send = self._raw.send
        flags = DONT_WAIT
        try:
            for frame in head:
                send(frame, flags | MORE_FOLLOWS, copy=_must_copy(frame))
                flags = 0  # cannot block: ØMQ takes, or drops, the rest of what it has begun
            send(last, flags, copy=_must_copy(last))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # a ROUTER's messages begin with the peer's id
                raise PeerGoneError(bytes(head[0])) from error
            raise translate_error(error, "cannot send") from error
        return True


def _label(batch: list[Received], labels: ConnectionLabels) -> list[Received]:
    """Replace the descriptors of connections, which ØMQ knows them by, by their numbers."""
    labels.process_events()
    return [
        (frames, None if descriptor is None else labels.number_of(descriptor))
        for frames, descriptor in batch
    ]


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The connection that a message came by; none for what ØMQ itself says.

    An XPUB, for example, makes a message of its own when a subscriber's connection breaks.
    """
    try:
        return int(frame.get(SOURCE_DESCRIPTOR))
    except zmq.ZMQError:
        return None


def _must_copy(frame: Buffer | zmq.Frame) -> bool:
    if type(frame) is not bytes and not (type(frame) is memoryview and frame.readonly):
        return True
    return len(frame) < ZERO_COPY_SIZE


def _content(frame: zmq.Frame) -> Buffer:
    """What a received frame holds; a view of it if it is large."""
    return frame.bytes if len(frame) < LARGE_ARRAY else frame.buffer.toreadonly()


def _check_frames(frames: Frames) -> None:
    """Refuse what would fail halfway: the rest of it would be glued to the next message."""
    if not frames:
        raise ValueError("a message has at least one frame")
    for frame in frames:
        if type(frame) is not bytes and not memoryview(frame).contiguous:
            raise ValueError("a frame must be contiguous memory")


def translate_error(error: zmq.ZMQError, failure: str) -> Exception:
    """What to raise for an error of ØMQ that no caller handles in a special way."""
    if error.errno in {zmq.ENOTSOCK, zmq.ETERM}:
        return trio.ClosedResourceError("this socket is closed")
    return ConfigurationError(f"{failure}: {zmq.strerror(error.errno or 0)}")
