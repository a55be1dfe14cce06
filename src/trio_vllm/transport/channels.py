"""`EngineChannels` and `FrontendChannels`: what a client and an engine need of their connections.

They are made of two protocols, `FrameReceiver` and `FrameSender`, which a transport implements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

from trio_vllm.protocol import EngineCoreReadyResponse, Frames
from trio_vllm.values import frozen

Received = tuple[Frames, int | None]
"""A multipart message, and the number of the connection it came by; None where the transport cannot tell.

Connections are counted as they are accepted, so a number is never given to another one.
"""


class FrameReceiver(Protocol):
    """The receiving side of one or many connections; one task at a time."""

    async def receive_batch(self, limit: int) -> list[Received]:
        """Wait for a message; return it and what else is there, ``limit`` messages at most."""
        ...

    def receive_batch_nowait(self, limit: int) -> list[Received]:
        """Return what is there, ``limit`` messages at most; `trio.WouldBlock` if nothing is."""
        ...


class FrameSender(Protocol):
    """The sending side of a connection; one task at a time may wait in `send`.

    Where there are several peers, the first frame is the id of the one that gets the message. Both
    methods raise `PeerGoneError` if that one is not there.
    """

    def send_nowait(self, frames: Frames) -> None:
        """Queue one message; `trio.WouldBlock` if the connection takes none now."""
        ...

    async def send(self, frames: Frames) -> None:
        """Queue one message, waiting for room."""
        ...


# The frontend's side ----------------------------------------------------------------------------


@frozen(kw_only=True)
class Disconnect:
    """A connection of an engine broke. One of the two fields is set.

    What had been delivered by it before may still have to be received.
    """

    engine_index: int | None = None
    """Whose connection to the input socket it was."""
    connection: int | None = None
    """Which connection it was, if to another socket: the number of messages that came by it."""


@frozen
class LeaderChannels:
    """What the coordinator in our process needs of the engines."""

    broadcasts: FrameSender
    subscriptions: FrameReceiver
    """Receives a message from each engine whose connection to the broadcasts is new."""
    notices: FrameReceiver
    subscribers: frozenset[int] = frozenset()
    """The connections to the broadcasts that subscribed during the startup."""


class Link(Protocol):
    """A connection that is made anew whenever it breaks."""

    async def wait_change(self) -> bool:
        """Wait until it opens or breaks; whether it is open now."""
        ...


@frozen
class FollowerChannels:
    """The connection to a coordinator in another process."""

    publications: FrameReceiver
    notices: FrameSender
    link: Link | None = None
    """The connection of both, open at first; None where it cannot break."""


@frozen
class EngineChannels:
    """What a client needs of its connected engines."""

    input_address: str
    output_address: str
    ready_responses: Mapping[int, EngineCoreReadyResponse]
    """What each engine registered with, by engine index."""
    requests: FrameSender
    """Messages to engines; the first frame is the engine id. Never blocks."""
    outputs: FrameReceiver
    """Messages of all engines."""
    disconnects: trio.abc.ReceiveChannel[Disconnect]
    """Each connection of an engine that breaks."""
    coordination: LeaderChannels | FollowerChannels | None = None


class EngineSource(Protocol):
    """Where a client gets its engines from: the transport *mode* in vLLM's term, so functions call it.

    There are `HandshakeOwner`, if we do the startup handshake, `Bootstrapped`, if a supervisor has done it, what
    `trio_vllm.spawn_engine` gives, and, inside of a process, ``InMemory``. Of your own it is any class with these
    two members.
    """

    @property
    def is_for_one_client(self) -> bool:
        """Whether the engines are told one output address: that of client 0."""
        ...

    def connect(self) -> AbstractAsyncContextManager[EngineChannels]:
        """Wait for the engines to start; the block's value are the channels to them."""
        ...


# The engine's side ------------------------------------------------------------------------------


@frozen
class FrontendDisconnect:
    """A connection to the frontend that an engine has joined broke."""

    address: str
    client_index: int | None
    """Which client it led to; None for the coordinator."""


@frozen
class CoordinatorChannels:
    """The connections of an engine to its data-parallel coordinator."""

    broadcasts: FrameReceiver
    notices: FrameSender


@frozen
class FrontendChannels:
    """What an engine needs of the frontend it has joined."""

    inputs: Sequence[FrameReceiver]
    """One per client of the frontend."""
    outputs: Sequence[FrameSender]
    """One per client; a message goes to the one with the request's ``client_index``."""
    disconnects: trio.abc.ReceiveChannel[FrontendDisconnect]
    """Each connection that breaks."""
    coordinator: CoordinatorChannels | None = None
    close_inputs: Callable[[], None] = lambda: None
    """Closes all inputs, for good; who receives from one gets `trio.ClosedResourceError`."""
    close_outputs: Callable[[], None] = lambda: None
    """Closes all outputs, for good."""
