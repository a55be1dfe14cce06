"""Connections in memory: the transport's channels without ØMQ, for tests under an autojump clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import trio

from trio_vllm.errors import PeerGoneError
from trio_vllm.transport.channels import Frames

Labelled: TypeAlias = tuple[Frames, int | None]


def open_memory_connection(
    high_water_mark: float = math.inf,
) -> tuple[MemorySender, MemoryReceiver]:
    """Give both ends of a connection; several tasks may share the sender, like engines a PULL."""
    send, receive = trio.open_memory_channel[Labelled](high_water_mark)
    return MemorySender(send), MemoryReceiver(receive)


@attrs.define
class MemorySender:
    """A `FrameSender`. Copies at once, so that nobody can change what was sent."""

    _channel: trio.MemorySendChannel[Labelled]
    descriptor: int | None = None
    """Of the connection, as the receiver sees it."""

    def send_nowait(self, frames: Sequence[bytes | memoryview]) -> None:
        self._channel.send_nowait(([bytes(frame) for frame in frames], self.descriptor))

    async def send(self, frames: Sequence[bytes | memoryview]) -> None:
        await self._channel.send(([bytes(frame) for frame in frames], self.descriptor))

    def close(self) -> None:
        self._channel.close()


@attrs.define
class MemoryReceiver:
    """A `LabelledFrameReceiver`."""

    _channel: trio.MemoryReceiveChannel[Labelled]

    async def receive(self) -> Frames:
        frames, _ = await self._channel.receive()
        return frames

    async def receive_batch(self, limit: int) -> list[Frames]:
        return [frames for frames, _ in await self.receive_batch_with_descriptors(limit)]

    async def receive_batch_with_descriptors(self, limit: int) -> list[Labelled]:
        return [await self._channel.receive(), *self._take(limit - 1)]

    def receive_batch_nowait(self, limit: int) -> list[Frames]:
        received = [self._channel.receive_nowait(), *self._take(limit - 1)]
        return [frames for frames, _ in received]

    def has_more(self) -> bool:
        return self._channel.statistics().current_buffer_used > 0

    def _take(self, limit: int) -> list[Labelled]:
        waiting = self._channel.statistics().current_buffer_used
        return [self._channel.receive_nowait() for _ in range(min(limit, waiting))]

    def close(self) -> None:
        self._channel.close()


@attrs.define
class MemoryRouter:
    """A `FrameSender` whose first frame says to whom; like a ROUTER, it knows who is gone."""

    _peers: dict[bytes, MemorySender] = attrs.field(factory=dict, init=False)

    def connect(self, identity: bytes) -> MemoryReceiver:
        """Let a peer join; gives what it receives from."""
        self._peers[identity], receiver = open_memory_connection()
        return receiver

    def disconnect(self, identity: bytes) -> None:
        """Lose a peer; what it was sent before it can still receive."""
        self._peers.pop(identity).close()

    def send_nowait(self, frames: Sequence[bytes | memoryview]) -> None:
        identity, *rest = frames
        if (peer := self._peers.get(bytes(identity))) is None:
            raise PeerGoneError(bytes(identity))
        peer.send_nowait(rest)

    async def send(self, frames: Sequence[bytes | memoryview]) -> None:
        await trio.lowlevel.checkpoint()
        self.send_nowait(frames)
