"""`InMemory`: a frontend and engines of one process, connected without sockets.

For tests and for whatever runs under a virtual clock. Messages are copied when they are sent, as by a
network, and arrive at once and in order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from trio_vllm.errors import PeerGoneError
from trio_vllm.protocol import EngineCoreReadyResponse, EngineId, Frames
from trio_vllm.transport.channels import (
    CoordinatorChannels,
    Disconnect,
    EngineChannels,
    FrontendChannels,
    FrontendDisconnect,
    LeaderChannels,
    Received,
)
from trio_vllm.values import define

ADDRESS = "memory"


def open_memory_connection(
    high_water_mark: float = math.inf,
) -> tuple[MemorySender, MemoryReceiver]:
    """Give both ends of a connection; several senders may lead to one receiver, as to a PULL."""
    send, receive = trio.open_memory_channel[Received](high_water_mark)
    return MemorySender(send), MemoryReceiver(receive)


@define
class MemorySender:
    """A `FrameSender` in memory."""

    _channel: trio.MemorySendChannel[Received]
    connection: int | None = None
    """The number that the receiver sees with each message."""

    def send_nowait(self, frames: Frames) -> None:
        """Queue a copy of a message; `trio.WouldBlock` if there is no room."""
        self._channel.send_nowait((_copy(frames), self.connection))

    async def send(self, frames: Frames) -> None:
        """Queue a copy of a message, waiting for room."""
        await self._channel.send((_copy(frames), self.connection))

    def close(self) -> None:
        """Send no more; what was sent can still be received."""
        self._channel.close()


@define
class MemoryReceiver:
    """A `FrameReceiver` in memory."""

    _channel: trio.MemoryReceiveChannel[Received]

    async def receive(self) -> Frames:
        """Wait for one message."""
        frames, _ = await self._channel.receive()
        return frames

    async def receive_batch(self, limit: int) -> list[Received]:
        """Wait for a message; return it and what else is there, ``limit`` messages at most."""
        return [await self._channel.receive(), *self._take(limit - 1)]

    def receive_batch_nowait(self, limit: int) -> list[Received]:
        """Return what is there, ``limit`` messages at most; `trio.WouldBlock` if nothing is."""
        return [self._channel.receive_nowait(), *self._take(limit - 1)]

    def _take(self, limit: int) -> list[Received]:
        waiting = self._channel.statistics().current_buffer_used
        return [self._channel.receive_nowait() for _ in range(min(limit, waiting))]

    def close(self) -> None:
        """Receive no more."""
        self._channel.close()


@define
class MemoryRouter:
    """A `FrameSender` whose first frame names the peer; like a ROUTER, it knows who is gone."""

    _peers: dict[bytes, MemorySender] = attrs.field(factory=dict, init=False)

    def connect(self, identity: bytes) -> MemoryReceiver:
        """Let a peer join; gives what it receives from."""
        self._peers[identity], receiver = open_memory_connection()
        return receiver

    def disconnect(self, identity: bytes) -> None:
        """Lose a peer; what it was sent before it can still receive."""
        if (peer := self._peers.pop(identity, None)) is not None:
            peer.close()

    def send_nowait(self, frames: Frames) -> None:
        """Send a message to a peer; `PeerGoneError` if it is not there."""
        identity, *rest = frames
        if (peer := self._peers.get(bytes(identity))) is None:
            raise PeerGoneError(bytes(identity))
        peer.send_nowait(rest)

    async def send(self, frames: Frames) -> None:
        """Like `send_nowait`; there is always room."""
        await trio.lowlevel.checkpoint()
        self.send_nowait(frames)


@define
class MemoryPublisher:
    """A `FrameSender` that sends to all its subscribers."""

    _subscribers: list[MemorySender] = attrs.field(factory=list, init=False)

    def subscribe(self) -> MemoryReceiver:
        """Add a subscriber; gives what it receives from."""
        sender, receiver = open_memory_connection()
        self._subscribers.append(sender)
        return receiver

    def send_nowait(self, frames: Frames) -> None:
        """Send a message to all."""
        for subscriber in self._subscribers:
            subscriber.send_nowait(frames)

    async def send(self, frames: Frames) -> None:
        """Like `send_nowait`; there is always room."""
        await trio.lowlevel.checkpoint()
        self.send_nowait(frames)


def _copy(frames: Frames) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@define(eq=False)
class _Member:
    """An engine that has joined."""

    output: MemorySender
    notices: MemorySender
    disconnects: trio.MemorySendChannel[FrontendDisconnect]


class InMemory:
    """Where a frontend and the engines of its process meet; an `EngineSource`.

    The frontend enters `connect`, or is given to ``open_llm``; each engine calls `join`, in whatever
    order. One frontend at a time.
    """

    def __init__(
        self,
        engine_count: int = 1,
        *,
        coordinator: bool = False,
        output_high_water_mark: float = math.inf,
    ) -> None:
        """
        Args:
          engine_count: Engines 0 to ``engine_count - 1`` are expected.
          coordinator: Whether the frontend leads the engines through their waves.
          output_high_water_mark: Messages that the frontend may be behind, of all engines together,
            before their senders wait.
        """
        self.engine_indices = range(engine_count)
        self._has_coordinator = coordinator
        self._numbers = itertools.count()
        self._members: dict[int, _Member] = {}
        self._responses: dict[int, EngineCoreReadyResponse] = {}
        self._router = MemoryRouter()
        self._output, self._outputs = open_memory_connection(output_high_water_mark)
        self._broadcasts = MemoryPublisher()
        self._subscribe, self._subscriptions = open_memory_connection()
        self._notice, self._notices = open_memory_connection()
        self._disconnect, self._disconnects = trio.open_memory_channel[Disconnect](math.inf)
        self._joined = trio.Event()

    @property
    def is_for_one_client(self) -> bool:
        """Whether the engines know one output address only; there is but one."""
        return True

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[EngineChannels]:
        """Wait for all engines to join; the block's value are the channels to them.

        When the block is left, all engines see a disconnect.
        """
        await self._joined.wait()
        leader = LeaderChannels(self._broadcasts, self._subscriptions, self._notices)
        try:
            yield EngineChannels(
                input_address=ADDRESS,
                output_address=ADDRESS,
                ready_responses=dict(sorted(self._responses.items())),
                requests=self._router,
                outputs=self._outputs,
                disconnects=self._disconnects,
                coordination=leader if self._has_coordinator else None,
            )
        finally:
            for member in self._members.values():
                member.disconnects.send_nowait(FrontendDisconnect(ADDRESS, 0))

    def join(self, engine_index: int, ready_response: EngineCoreReadyResponse) -> FrontendChannels:
        """Register an engine; gives its channels to the frontend."""
        disconnect, disconnects = trio.open_memory_channel[FrontendDisconnect](math.inf)
        output = attrs.evolve(self._output, connection=next(self._numbers))
        notices = attrs.evolve(self._notice, connection=next(self._numbers))
        self._members[engine_index] = _Member(output, notices, disconnect)
        self._responses[engine_index] = ready_response
        inputs = self._router.connect(EngineId.of(engine_index))
        coordinator = None
        if self._has_coordinator:
            coordinator = CoordinatorChannels(self._broadcasts.subscribe(), notices)

        def close_inputs() -> None:
            inputs.close()
            self._lose_input(engine_index)

        def close_outputs() -> None:
            self._lose_output(engine_index)

        if self._members.keys() >= set(self.engine_indices):
            self._joined.set()
        return FrontendChannels(
            [inputs], [output], disconnects, coordinator, close_inputs, close_outputs
        )

    def output_connection(self, engine_index: int) -> int | None:
        """The number of the connection by which this engine's outputs come."""
        return self._members[engine_index].output.connection

    def leave(self, engine_index: int) -> None:
        """Break all connections of an engine, as its end does."""
        self.break_input(engine_index)
        self.break_output(engine_index)
        del self._members[engine_index]

    def break_input(self, engine_index: int) -> None:
        """Break the connection by which an engine gets requests; what is under way arrives."""
        self._lose_input(engine_index)
        self._tell_engine(engine_index)

    def _lose_input(self, engine_index: int) -> None:
        self._router.disconnect(EngineId.of(engine_index))
        self._disconnect.send_nowait(Disconnect(engine_index=engine_index))

    def break_output(self, engine_index: int) -> None:
        """Break the connection by which outputs of an engine come; what is under way arrives."""
        self._lose_output(engine_index)
        self._tell_engine(engine_index)

    def _lose_output(self, engine_index: int) -> None:
        connection = self.output_connection(engine_index)
        self._disconnect.send_nowait(Disconnect(connection=connection))

    def _tell_engine(self, engine_index: int) -> None:
        self._members[engine_index].disconnects.send_nowait(FrontendDisconnect(ADDRESS, 0))
