"""Engines of one process that run in lockstep.

Real ones agree by an all-reduce that nobody has work any more. These see each other; engines of other
processes they do not.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio

from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError
from trio_vllm.mock.encoding import COORDINATOR, Outgoing
from trio_vllm.mock.engine import MockEngine
from trio_vllm.protocol import ENGINE_CORE_DEAD, Buffer, decode_coordinator_broadcast
from trio_vllm.transport import FrameReceiver, FrameSender, FrontendChannels

# MERGED mock/_engine_loop: Drives one mock engine between the channels to its frontend.
#
# Input is taken by one task per connection, which lets the engine handle it; the engine has a task of
# its own, which makes steps, and sends. While there is work it does not yield after each step, which
# would cost more than the step, but when its slice of time is over. While there is none it sleeps, and
# whoever brings some takes a turn in its place: to wake it first would take longer than most answers.


@attrs.define
class Lockstep:
    """The engines that end a wave together."""

    loops: set[EngineLoop] = attrs.field(factory=set, init=False)

    def settle(self, now: float) -> None:
        """End the wave if there is one and nobody has work left in it."""
        running = [loop for loop in self.loops if loop.engine.is_in_wave]
        if running and not any(loop.engine.has_unfinished for loop in running):
            for loop in self.loops:
                loop.post(loop.engine.complete_wave(now))


SLICE = 0.0005
"""Seconds of work between two checkpoints, that is what others in this process have to wait."""

BATCH = 0.00005
"""Seconds of steps whose messages are sent together."""

STEPS = 32
"""Steps made at a time, if they are alike; they are small then, and take a fraction of a slice."""

INPUT_LIMIT = 256
"""Messages received at a time."""

clock = time.monotonic
"""Whose times an engine sends; trio's clock has a zero of its own."""

Frames = Sequence[bytes]


class Outlet:
    """The way to one client, or to the coordinator."""

    def __init__(self, sender: FrameSender) -> None:
        self.sender = sender
        # Bounded by the answers to what arrives: while anything is late, there are no steps.
        self.late: deque[Sequence[Buffer]] = deque()
        """What it has had no room for yet."""
        self.waker = Waker()
        """For the task that sends what is late."""


class EngineLoop:
    """One engine with the connections to its frontend."""

    def __init__(
        self,
        engine: MockEngine,
        links: FrontendChannels,
        *,
        after_slice: Callable[[], None],
        step_interval: float = 0.0,
    ) -> None:
        """``after_slice`` is called whenever the engine may have become busy or idle."""
        self.engine = engine
        self._links = links
        self._after_slice = after_slice
        self._step_interval = step_interval
        self._next_step = -math.inf
        self._outlets = {i: Outlet(sender) for i, sender in enumerate(links.outputs)}
        if links.coordinator is not None:
            self._outlets[COORDINATOR] = Outlet(links.coordinator.notices)
        self._late: set[Outlet] = set()
        self._waker = Waker()
        self._has_news = False
        self._handling_count = 0  # input tasks with messages in hand
        self._is_ending = False

    # Input --------------------------------------------------------------------------------------

    def pumps(self) -> list[Callable[[], Awaitable[None]]]:
        """The tasks that take input, and those that send what is late, to be run beside `run`."""
        pumps = [
            partial(self._pump, receiver, self._handle_message) for receiver in self._links.inputs
        ]
        if self._links.coordinator is not None:
            broadcasts = self._links.coordinator.broadcasts
            pumps.append(partial(self._pump, broadcasts, self._handle_broadcast))
        return [*pumps, *(partial(self._send_late, outlet) for outlet in self._outlets.values())]

    async def _pump(self, receiver: FrameReceiver, handle: Callable[[Frames], None]) -> None:
        while True:
            batch = await receiver.receive_batch(INPUT_LIMIT)
            end = clock() + SLICE
            self._has_news = True
            self._handling_count += 1
            for frames, _ in batch:
                handle(frames)
                if clock() > end:
                    self._waker.wake()
                    await trio.lowlevel.checkpoint()
                    end = clock() + SLICE
            self._handling_count -= 1
            if self._waker.is_waiting:
                self._work()
                if not self._has_nothing_to_do:
                    self._waker.wake()

    def _handle_message(self, frames: Frames) -> None:
        if messages := self.engine.handle(frames, clock()):
            self.post(messages)

    def _handle_broadcast(self, frames: Frames) -> None:
        try:
            notice = decode_coordinator_broadcast(frames)
        except DecodeError as error:
            self.engine.journal.ignored(str(error))
        else:
            if notice is not None:
                self.engine.start_wave(notice, clock())

    def shut_down(self, *, drain: bool) -> None:
        """Let `run` return once nothing is unfinished; abort what there is, unless ``drain``."""
        self._is_ending = True
        self.post(self.engine.shut_down(clock(), drain=drain))
        self._waker.wake()

    # Output -------------------------------------------------------------------------------------

    def post(self, messages: Sequence[Outgoing]) -> None:
        """Send messages, or keep them until they can be sent."""
        for to, frames in messages:
            outlet = self._outlets[to]
            if not outlet.late:
                try:
                    outlet.sender.send_nowait(frames)
                except trio.WouldBlock:
                    pass
                else:
                    continue
            outlet.late.append(frames)
            outlet.waker.wake()
            self._late.add(outlet)

    async def _send_late(self, outlet: Outlet) -> None:
        """Task: wait until somebody takes what is late; the others get answers meanwhile."""
        while True:
            while outlet.late:
                await outlet.sender.send(outlet.late[0])
                outlet.late.popleft()
            self._late.discard(outlet)
            self._waker.wake()
            await outlet.waker.wait()

    def say_farewell(self) -> None:
        """Tell all clients that the engine is dying."""
        for sender in self._links.outputs:
            try:
                sender.send_nowait([ENGINE_CORE_DEAD])
            except trio.WouldBlock:  # it will notice in another way
                continue

    # Work ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make steps, and wait while there are none to make, until a shutdown is complete."""
        await trio.lowlevel.checkpoint()
        while not self._is_over:
            self._work()
            if self._has_nothing_to_do:
                await self._waker.wait()
            elif self._step_interval and not self._is_over:
                with trio.move_on_at(self._next_step):
                    await self._waker.wait()
            else:
                await trio.lowlevel.checkpoint()

    @property
    def _is_over(self) -> bool:
        is_busy = self._handling_count or self.engine.has_work or self.engine.has_unfinished
        return self._is_ending and not (is_busy or self._late)

    @property
    def _has_nothing_to_do(self) -> bool:
        return bool(self._late) or not (self.engine.has_work or self._is_over)

    def _work(self) -> None:
        """Make steps for a slice of time, if there is work.

        Just one if something has arrived: what comes right behind it should be in the next.
        """
        if self.engine.has_work and not self._late:
            self._make_steps(0.0 if self._has_news else SLICE)
        self._has_news = False
        self._after_slice()

    def _make_steps(self, seconds: float) -> None:
        if self._step_interval:
            if trio.current_time() >= self._next_step:
                self._next_step = trio.current_time() + self._step_interval
                self.post(self.engine.step(clock()))
            return
        engine = self.engine
        now = clock()
        end = now + seconds
        limit = STEPS if seconds else 1
        while True:
            # ØMQ's own thread takes several messages at once for little more than one, but not
            # if each time it has to be woken for the first.
            made: list[Outgoing] = []
            batch_end = min(now + BATCH, end)
            while engine.has_work:
                made += engine.steps(now, limit)
                now = clock()
                if now >= batch_end:
                    break
            self.post(made)
            if now >= end or self._late or not engine.has_work:
                return
