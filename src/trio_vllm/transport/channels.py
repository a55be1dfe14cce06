"""What the client and the mock engine ask of a connection; ØMQ is one way to give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Frames: TypeAlias = list[bytes]
"""One multipart message as it was received."""


class FrameReceiver(Protocol):
    """The receiving side of a connection; one task at a time."""

    async def receive_batch(self, limit: int) -> list[Frames]:
        """Wait for a message; return it and what else is there, ``limit`` messages at most."""
        ...

    def receive_batch_nowait(self, limit: int) -> list[Frames]:
        """Return what is there, ``limit`` messages at most; `trio.WouldBlock` if nothing is."""
        ...


class LabelledFrameReceiver(FrameReceiver, Protocol):
    """A receiver that many connections end in, and that can tell them apart."""

    async def receive_batch_with_descriptors(
        self, limit: int
    ) -> Sequence[tuple[Frames, int | None]]:
        """Like `receive_batch`, each message with the descriptor of the connection it came by.

        None is for a connection that is not known. A descriptor may be used again for another
        connection when the first one is gone.
        """
        ...

    def has_more(self) -> bool:
        """Whether a message is waiting; for the task that receives."""
        ...


class FrameSender(Protocol):
    """The sending side of a connection; one task at a time may wait in `send`."""

    def send_nowait(self, frames: Sequence[bytes | memoryview]) -> None:
        """Queue one message; `trio.WouldBlock` if the connection takes none now."""
        ...

    async def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Queue one message, waiting for room."""
        ...
