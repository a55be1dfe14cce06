"""`CoreDriver`: the tasks around a `FrontendCore` that receive, send and keep time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any

import attrs
import trio

from trio_vllm.client.core import ClientStatistics, FrontendCore
from trio_vllm.client.engines import QueuedMessage
from trio_vllm.client.large_arrays import has_large_arrays, with_own_arrays
from trio_vllm.client.learning import Learner
from trio_vllm.client.streams import Sink
from trio_vllm.client.utility_calls import UTILITY_TIMEOUT
from trio_vllm.concurrency import Turns, Waker, running
from trio_vllm.errors import (
    ClientClosedError,
    EngineCoreError,
    PeerGoneError,
    UtilityTimeoutError,
)
from trio_vllm.protocol import EngineCoreRequest, Frames
from trio_vllm.transport import (
    EngineChannels,
    FollowerChannels,
    FrameReceiver,
    LeaderChannels,
    Link,
    Received,
)

COORDINATION_BATCH = 100
"""Messages of a coordinator, or to ours, that are handled between two checkpoints."""


class CoreDriver:
    """Connects a `FrontendCore` to the channels of its engines.

    Made by `open_client`. `EngineCoreClient` and `Llm` are built of its methods, and other facades
    with a `Sink` of their own can be.

    Its tasks receive outputs, send what can go together, keep the core's deadlines, take note of
    broken connections and, if there is a coordinator, keep up with the waves. Submitting a request
    is a plain function call in the caller's task: the input socket takes any number of messages and
    never blocks.
    """

    def __init__(
        self,
        channels: EngineChannels,
        core: FrontendCore,
        *,
        batch_size: int = 64,
        slice_time: float = 0.004,
        most_ends: int = 32,
    ) -> None:
        """
        Args:
          channels: The ways to the engines and from them.
          core: Decides what is done; has no other driver.
          batch_size: Messages received at once.
          slice_time: Seconds of handing out outputs between two checkpoints, and of submitting
            requests that come all at once. A message of 1,000 outputs takes about 1 ms.
          most_ends: Requests that end between two checkpoints.
        """
        self.channels = channels
        self.core = core
        self._batch_size = batch_size
        self._slice_time = slice_time
        self._most_ends = most_ends
        self._sender = Waker()
        self._timer = Waker()
        self._ender = Waker()
        self._timer_end = 0.0
        self._failed = trio.Event()
        self._learning_tasks = trio.Lock()
        self.turns = Turns(slice_time, perf_counter)
        """Shares out turns to submit requests; see `wait_turn`."""
        self._learner = Learner(self)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks while the block runs, then `close`."""
        core, receive = self.core, self._receive_coordination
        tasks: list[Callable[[], Awaitable[None]]] = [
            self._receive_outputs,
            self._send_queued,
            self._watch_connections,
            self._keep_deadlines,
            self._end_requests,
        ]
        match self.channels.coordination:
            case LeaderChannels(subscriptions=subscriptions, notices=notices):
                tasks += [
                    partial(receive, subscriptions, core.receive_subscription),
                    partial(receive, notices, core.receive_notice),
                ]
            case FollowerChannels(publications=publications, link=link):
                tasks.append(partial(receive, publications, core.receive_publication))
                if link is not None:
                    tasks.append(partial(self._watch_coordinator, link))
        async with running(*tasks):
            try:
                yield
            finally:
                self.close()
                with trio.CancelScope(shield=True):
                    await self._end_all()
                self._send_all()

    # Requests -----------------------------------------------------------------------------------

    async def wait_turn(self) -> None:  # noqa: ASYNC910
        """Wait if so many requests come at once that other tasks would not get their turn.

        That is to be done before anything for a request; as a rule it is no checkpoint.

        Cancellation:
          Nothing has happened.
        """
        await self.turns.wait()

    def has_large_arrays(self, request: EngineCoreRequest) -> bool:
        """Whether `own_arrays` has anything to copy."""
        return has_large_arrays(request)

    async def own_arrays(  # noqa: ASYNC910
        self, requests: Sequence[EngineCoreRequest]
    ) -> Sequence[EngineCoreRequest]:
        """Give requests with the same arrays as they are sent; see `with_own_arrays`."""
        return await with_own_arrays(requests)

    def submit(self, request: EngineCoreRequest, sink: Sink) -> None:
        """Send a request whose outputs go to ``sink``.

        The request is checked first, completed (stop ids, structured-output backend, client index)
        in a copy, and sent to the pinned or else the least loaded engine: at once if that is idle,
        else together with what other tasks submit in this turn of trio's, or in the 5 ms for which a
        client that is behind with handing out outputs waits. An id should not be used
        again after an abort: outputs for the old request may still be on their way. Requests that
        `lacks_facts` have to be prepared first; what was not found out cannot be checked.

        Raises:
          RequestError: The request was refused, nothing was sent.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
        """
        self.core.submit(request, sink)
        self._send_urgent()
        self.core.confirm(sink)
        self._follow_up()

    def drop(self, sink: Sink) -> None:
        """Forget a request and abort it, if it is still in flight; its sink hears nothing more."""
        if self.core.drop(sink):
            self._follow_up()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each gets a last output with `FinishReason.ABORT`, the engines are told."""
        self.core.abort(request_ids)
        self._follow_up()

    def abort_sinks(self, sinks: Iterable[Sink]) -> None:
        """End the requests of these sinks like `abort`; ``sinks`` may be gone through in pieces."""
        self.core.abort_sinks(sinks)
        self._follow_up()

    def abort_all(self) -> None:
        """Abort every request in flight."""
        self.core.abort_all()
        self._follow_up()

    # Utility calls ------------------------------------------------------------------------------

    async def call_utility(self, method: str, *args: Any, timeout: float) -> dict[int, Any]:
        """Run a method on every living engine; see `EngineCoreClient.call_utility`."""
        self._send_all()  # engines may turn out to be gone
        waiter = Waker()
        with trio.move_on_after(timeout):  # a senseless one is refused before anything is sent
            call = self.core.call_utility(method, args, waiter)
            try:
                self._send_urgent()
                self._follow_up()
                await waiter.wait()
            finally:
                self.core.close_call(call)
        if not call.is_settled:
            raise UtilityTimeoutError(method, call.call_id, sorted(call.missing), timeout)
        results = call.outcome()
        self.core.note_results(method, args, results)
        return results

    async def learn_supported_tasks(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Ask the engines what the model can do, once; from then on requests must keep to it.

        An engine dies of a pooling task that it has not, and a pooling one of a request to
        generate.

        Raises:
          UtilityError: They would not say.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.

        Cancellation:
          The next call asks again.
        """
        if self.core.facts.limits.supported_tasks is not None:
            await trio.lowlevel.checkpoint()
            return
        async with self._learning_tasks:
            await self._learner.learn_supported_tasks(timeout=timeout)

    def lacks_facts(self, request: EngineCoreRequest) -> bool:
        """Whether `prepare` has anything to find out before a request is submitted."""
        return self.core.facts.lacks(request)

    async def prepare(self, request: EngineCoreRequest) -> None:
        """Learn what a request depends on and is not known of the engines yet.

        That is which tasks the model supports, for a request to pool; how many token ids it has, for
        one to generate whose sampling parameters name an id from 256 on, or so many log
        probabilities (a prompt's ids are no reason to ask); and whether its adapter loads, which is
        loaded into every engine. What several requests need is asked for once.

        Raises:
          RequestError: The request is refused for what was found out.
          UtilityError: The engines would not say what they support.
          DecodeError: What an engine answered cannot be read.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.

        Cancellation:
          The next request asks again.
        """
        await trio.lowlevel.checkpoint()
        await self._learner.learn_for(request)

    # The end ------------------------------------------------------------------------------------

    def statistics(self) -> ClientStatistics:
        """What is in the tables now."""
        waiting = self._failed.statistics().tasks_waiting
        return attrs.evolve(self.core.statistics(), tasks_waiting_for_failure=waiting)

    async def wait_failed(self) -> EngineCoreError:
        """Wait until no request is served any more; gives the reason."""
        await self._failed.wait()
        assert self.core.failure is not None
        return self.core.failure

    def close(self) -> None:
        """Abort what is in flight and serve no request any more; idempotent."""
        self.core.fail(ClientClosedError())
        self._follow_up()

    # What the core wants done -------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Do, or have a task do, what the core wants done after it was told something."""
        core = self.core
        if core.failure is not None and not self._failed.is_set():
            self._send_all()
            self._failed.set()
        if core.has_sends:
            self._sender.wake()
        if core.has_endings:
            self._ender.wake()
        if core.next_deadline < self._timer_end:
            self._timer.wake()
        for message in core.coordination_sends():
            match self.channels.coordination:
                case LeaderChannels(broadcasts=sender) | FollowerChannels(notices=sender):
                    sender.send_nowait(message)

    def _send_urgent(self) -> None:
        while messages := self.core.urgent_sends():
            for message in messages:
                self._send(message)

    def _send_all(self) -> None:
        # An engine that turns out to be gone leaves its requests to others.
        while messages := self.core.sends():
            for message in messages:
                self._send(message)

    def _send(self, message: QueuedMessage) -> None:
        try:
            self.channels.requests.send_nowait([message.engine.engine_id, *message.frames])
        except PeerGoneError as error:
            self.core.undeliverable(message, error, trio.current_time())

    # Tasks --------------------------------------------------------------------------------------

    async def _receive_outputs(self) -> None:
        """Task: hand out what engines send; while more is waiting, requests are held back."""
        outputs, limit = self.channels.outputs, self._batch_size
        while True:
            batch = await outputs.receive_batch(limit)
            while batch:
                rest = self._hand_out(batch)
                while self._is_more_than_a_slice(rest):
                    self._follow_up()
                    await trio.lowlevel.checkpoint()
                batch = self._receive_more(outputs) if len(batch) == limit else []
                if batch:
                    self.core.pause_sending(trio.current_time())
                    self._follow_up()
                    await trio.lowlevel.checkpoint()
            self.core.resume_sending()
            self._follow_up()

    def _hand_out(self, batch: list[Received]) -> Iterator[None]:
        """Give messages to the core; yields after each, and within those that take long."""
        core, receive_small, now = self.core, self.core.receive_small, trio.current_time()
        for frames, connection in batch:
            if not receive_small(frames, connection, now):
                yield from core.receive_in_pieces(frames, connection, now)
            yield

    def _is_more_than_a_slice(self, work: Iterator[None]) -> bool:
        """Go on with some work for one slice of time; whether that was too short for all of it.

        Tasks whose requests have ended have work as well, before it is our turn again: the end of
        many requests ends a slice.
        """
        core, end = self.core, perf_counter() + self._slice_time
        most = core.ended_count + self._most_ends
        return any(perf_counter() > end or core.ended_count >= most for _ in work)

    def _receive_more(self, receiver: FrameReceiver) -> list[Received]:
        try:
            return receiver.receive_batch_nowait(self._batch_size)
        except trio.WouldBlock:
            return []

    async def _send_queued(self) -> None:
        """Task: send what can wait until all tasks that are due now have had their turn."""
        core = self.core
        while True:
            await trio.lowlevel.checkpoint()
            if not core.has_sends:
                await self._sender.wait()
            while core.send_time > trio.current_time():
                with trio.move_on_at(core.send_time):
                    await self._sender.wait()
            self._send_all()
            self._follow_up()

    async def _keep_deadlines(self) -> None:
        """Task: call the core when the time has come that it waits for."""
        while True:
            self._timer_end = self.core.next_deadline
            with trio.move_on_at(self._timer_end):
                await self._timer.wait()
            self.core.tick(trio.current_time())
            self._follow_up()

    async def _end_requests(self) -> None:
        """Task: end requests where more have to end than others can wait for."""
        while True:
            await self._end_all()
            await self._ender.wait()

    async def _end_all(self) -> None:
        """End all that have to end, with turns for others in between."""
        await trio.lowlevel.checkpoint()
        while self.core.has_endings:
            self.core.end_some()
            self._follow_up()
            await trio.lowlevel.checkpoint()

    async def _watch_connections(self) -> None:
        """Task: tell the core of broken connections."""
        await trio.lowlevel.checkpoint()
        async for broken in self.channels.disconnects:
            now = trio.current_time()
            self.core.disconnected(
                now, engine_index=broken.engine_index, connection=broken.connection
            )
            self._follow_up()

    async def _watch_coordinator(self, link: Link) -> None:
        """Task: tell the core when the connection to the coordinator breaks, and is back."""
        while True:
            is_open = await link.wait_change()
            self.core.coordinator_changed(trio.current_time(), is_open=is_open)
            self._follow_up()

    async def _receive_coordination(
        self, receiver: FrameReceiver, handle: Callable[[Frames, int | None], None]
    ) -> None:
        """Task: hand over the messages of a coordinator, or those that come to ours."""
        while True:
            for frames, connection in await receiver.receive_batch(COORDINATION_BATCH):
                handle(frames, connection)
            self._follow_up()
