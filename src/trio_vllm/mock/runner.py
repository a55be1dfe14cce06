"""`EngineRunner` drives one mock engine between the channels to its frontend.

Input is taken by one task per connection, which lets the engine handle it; the engine has a task of
its own, which makes steps, and sends. While steps are due it does not yield after each, which would
cost more than the step, but when its slice of time is over. While none is due it sleeps, and a task
that brings input takes a turn in its place: to wake it first would take longer than most answers.

An engine that dies as real ones do takes its connections with it: see ``deaths.py``.

A client that does not take its messages is *late*. Its requests stand still until it has caught up,
those of the other clients go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from functools import partial

import attrs
import trio

from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, EngineDeadError
from trio_vllm.mock.encoding import COORDINATOR, Outgoing
from trio_vllm.mock.engine import ABORTS_AT_ONCE, MockEngine
from trio_vllm.protocol import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    Buffer,
    EngineMessage,
    Frames,
    decode_coordinator_broadcast,
    decode_engine_message_in_pieces,
    is_short_add,
)
from trio_vllm.transport import FrameReceiver, FrameSender, FrontendChannels, Received
from trio_vllm.values import define, frozen

BATCH = 0.00005
"""Seconds of steps whose messages are sent together."""

STEPS = 32
"""Steps made at a time, if they are alike; they are small then, and take a fraction of a slice."""

INPUT_LIMIT = 256
"""Messages received at a time."""


@frozen(kw_only=True)
class RunnerLimits:
    """How a runner shares time and memory; the defaults are for real use."""

    slice_seconds: float = 0.0005
    """Seconds of work between two checkpoints, which others in this process have to wait."""
    late_messages: int = 1000
    """Messages that wait for a client, besides those in its connection, until its input waits too."""
    clock: Callable[[], float] = time.monotonic
    """Whose times an engine gets and sends; trio's clock has a zero of its own."""


@define
class Lockstep:
    """The engines of one process that end a wave together.

    Real ones agree by an all-reduce that no engine has work any more. These see each other; engines
    of other processes they do not.
    """

    runners: set[EngineRunner] = attrs.field(factory=set, init=False)

    def settle(self, now: float) -> None:
        """End the wave if there is one and no engine has work left in it."""
        running = [runner for runner in self.runners if runner.engine.is_in_wave]
        if running and not any(runner.engine.has_unfinished for runner in running):
            for runner in self.runners:
                runner.post(runner.engine.complete_wave(now))


class ClientSender:
    """The connection to one client, or to the coordinator, and what is late for it."""

    def __init__(self, channel: FrameSender) -> None:
        self.channel = channel
        # Bounded: there are no steps for a late client, and beyond a limit no input is taken from it.
        self.late: deque[Sequence[Buffer]] = deque()
        """Messages that the connection has had no room for yet."""
        self.waker = Waker()
        """For the task that sends what is late."""
        self.room = Waker()
        """For the task that takes this client's input."""


class EngineRunner:
    """One engine with the connections to its frontend.

    Args:
      engine: Whose messages and steps these are.
      channels: To its frontend.
      on_idle_check: Called whenever the engine may have become busy or idle.
      limits: See there.
    """

    def __init__(
        self,
        engine: MockEngine,
        channels: FrontendChannels,
        *,
        on_idle_check: Callable[[], None],
        limits: RunnerLimits = RunnerLimits(),  # noqa: B008  (frozen)
    ) -> None:
        self.engine = engine
        self._channels = channels
        self._on_idle_check = on_idle_check
        self._limits = limits
        self._clock = limits.clock
        self._senders = {i: ClientSender(sender) for i, sender in enumerate(channels.outputs)}
        if channels.coordinator is not None:
            self._senders[COORDINATOR] = ClientSender(channels.coordinator.notices)
        self._late: frozenset[int] = frozenset()
        self._waker = Waker()
        self._has_arrivals = False
        self._handling_count = 0  # input tasks with messages in hand
        self._is_ending = False
        self._is_hung_up = False  # connections are closed, of a thread that has died

    @property
    def late_clients(self) -> frozenset[int]:
        """Clients that do not take their messages at present; `COORDINATOR` may be among them."""
        return self._late

    # Input --------------------------------------------------------------------------------------

    def pumps(self) -> list[Callable[[], Awaitable[None]]]:
        """The tasks that take input, and those that send what is late, to be run beside `run`."""
        pumps = [
            partial(self._pump, receiver, self._handle_message, self._senders[client_index])
            for client_index, receiver in enumerate(self._channels.inputs)
        ]
        if self._channels.coordinator is not None:
            broadcasts = self._channels.coordinator.broadcasts
            sender = self._senders[COORDINATOR]
            pumps.append(partial(self._pump, broadcasts, self._handle_broadcast, sender))
        return [*pumps, *(partial(self._send_late, index) for index in self._senders)]

    async def _pump(
        self,
        receiver: FrameReceiver,
        handle: Callable[[Frames], Iterable[None]],
        sender: ClientSender,
    ) -> None:
        while True:  # noqa: ASYNC913 (receiving is a checkpoint)
            try:
                batch = await receiver.receive_batch(INPUT_LIMIT)
            except trio.ClosedResourceError:  # the engine has become deaf
                return  # noqa: ASYNC910
            end = self._clock() + self._limits.slice_seconds
            self._has_arrivals = True
            self._handling_count += 1
            for _ in self._handle_all(batch, handle):
                if self._clock() > end:
                    self._waker.wake()
                    await trio.lowlevel.checkpoint()
                    end = self._clock() + self._limits.slice_seconds
            self._handling_count -= 1
            if self._waker.is_waiting:
                self._work()
                if self._is_over or self.engine.is_dead or self._next_step_time() is not None:
                    self._waker.wake()
            while len(sender.late) > self._limits.late_messages:
                await sender.room.wait()

    def _handle_all(
        self, batch: Sequence[Received], handle: Callable[[Frames], Iterable[None]]
    ) -> Iterator[None]:
        """Handle messages; yields after each, and within those that take long."""
        for frames, _ in batch:
            yield from handle(frames)
            yield

    def _handle_message(self, frames: Frames) -> Iterable[None]:
        """Handle a message: most of them at once, the others as the iterable goes on."""
        if self._takes_long(frames):
            return self._handle_in_slices(frames)
        self._answer(self.engine.handle(frames, self._clock()))
        return ()

    def _takes_long(self, frames: Frames) -> bool:
        return self.engine.config.is_scheduled or not is_short_add(frames)

    def _handle_in_slices(self, frames: Frames) -> Iterator[None]:
        try:
            message = yield from decode_engine_message_in_pieces(frames)
        except DecodeError as error:
            messages = self.engine.refuse_undecodable(frames, error, self._clock())
        else:
            messages = yield from self._take(message)
        self._answer(messages)

    def _answer(self, messages: Sequence[Outgoing]) -> None:
        if messages:
            self.post(messages)
        if self.engine.death is not None:
            self._note_death()

    def _take(self, message: EngineMessage) -> Generator[None, None, list[Outgoing]]:
        """Let the engine take a message, in slices if that takes long."""
        engine, clock = self.engine, self._clock
        if not isinstance(message, AbortRequests):
            hashes = yield from engine.hash_prompt(message)
            return engine.take(message, clock(), hashes)
        messages: list[Outgoing] = []
        for start in range(0, len(message.request_ids), ABORTS_AT_ONCE):
            some = message.request_ids[start : start + ABORTS_AT_ONCE]
            messages += engine.take(AbortRequests(some), clock())
            yield
        return messages

    def _note_death(self) -> None:
        """Close the connections of the thread that has died."""
        if self.engine.is_dead or self._is_hung_up:
            return
        self._is_hung_up = True
        if self.engine.is_mute:
            for sender in self._senders.values():
                sender.late.clear()
                sender.room.wake()
            self._hold(frozenset())
            self._channels.close_outputs()
        else:
            self._channels.close_inputs()

    def _handle_broadcast(self, frames: Frames) -> Iterator[None]:
        yield
        try:
            notice = decode_coordinator_broadcast(frames)
        except DecodeError as error:
            self.engine.events.ignored(str(error))
        else:
            if notice is not None:
                self.engine.start_wave(notice, self._clock())

    def release(self, request_id: str) -> None:
        """Another engine has fetched the blocks that this one keeps of a request."""
        self.engine.release(request_id, self._clock())
        self._waker.wake()

    def shut_down(self, *, drain: bool) -> None:
        """Let `run` return once nothing is unfinished; abort what there is, unless ``drain``."""
        self._is_ending = True
        self.post(self.engine.shut_down(self._clock(), drain=drain))
        self._waker.wake()

    # Output -------------------------------------------------------------------------------------

    def post(self, messages: Sequence[Outgoing]) -> None:
        """Send messages, or keep them until they can be sent."""
        if self.engine.is_mute:
            return
        for to, frames in messages:
            sender = self._senders[to]
            if not sender.late:
                try:
                    sender.channel.send_nowait(frames)
                except trio.WouldBlock:
                    self._hold(self._late | {to})
                    sender.waker.wake()
                else:
                    continue
            sender.late.append(frames)

    def _hold(self, late: frozenset[int]) -> None:
        self._late = late
        self.engine.hold_clients(late, self._clock())

    async def _send_late(self, index: int) -> None:
        """Task: wait until a client takes what is late."""
        sender = self._senders[index]
        while True:
            await sender.waker.wait()
            while sender.late:
                try:
                    await sender.channel.send(sender.late[0])
                except trio.ClosedResourceError:  # the engine has become mute
                    return
                sender.late.popleft()
                if len(sender.late) <= self._limits.late_messages:
                    sender.room.wake()
            self._hold(self._late - {index})
            self._waker.wake()

    def send_dead_sentinel(self) -> None:
        """Tell all clients that the engine is dying."""
        for sender in self._channels.outputs:
            try:
                sender.send_nowait([ENGINE_CORE_DEAD])
            except trio.WouldBlock:  # it will notice in another way
                continue

    # Work ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make steps, and wait while none is due, until a shutdown is complete.

        Raises:
          EngineDeadError: The engine has died as a real one does.
        """
        await trio.lowlevel.checkpoint()
        while True:
            self._work()
            if self.engine.is_dead:
                raise EngineDeadError(self.engine.engine_index, str(self.engine.death))
            if self._is_over:
                return
            now = self._clock()
            due = self.engine.next_step_time(now)
            if due is None:
                await self._waker.wait()
            elif due > now:
                with trio.move_on_after(due - now):
                    await self._waker.wait()
            else:
                await trio.lowlevel.checkpoint()

    @property
    def _is_over(self) -> bool:
        if not self._is_ending:
            return False
        has_work = self._next_step_time() is not None or self.engine.has_unfinished
        return not (self._handling_count or has_work or self._late)

    def _next_step_time(self) -> float | None:
        return self.engine.next_step_time(self._clock())

    def _work(self) -> None:
        """Make steps for a slice of time, if they are due.

        Just one if something has arrived: what comes right behind it should be in the next.
        """
        now = self._clock()
        if self._is_due(now):
            self._make_steps(now, 0.0 if self._has_arrivals else self._limits.slice_seconds)
        self._has_arrivals = False
        self._on_idle_check()

    def _is_due(self, now: float) -> bool:
        due = self.engine.next_step_time(now)
        return due is not None and due <= now

    def _make_steps(self, now: float, seconds: float) -> None:
        engine, clock = self.engine, self._clock
        end = now + seconds
        limit = STEPS if seconds else 1
        while True:
            # ØMQ's own thread takes several messages at once for little more than one, but not
            # if each time it has to be woken for the first.
            made: list[Outgoing] = []
            batch_end = min(now + BATCH, end)
            while True:
                made += engine.steps(now, limit)
                now = clock()
                if now >= batch_end or not self._is_due(now):
                    break
            self.post(made)
            if now >= end or not self._is_due(now):
                return
