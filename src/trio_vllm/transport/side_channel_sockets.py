"""`SideChannelSockets` lets mock engines tell each other that KV blocks were fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import attrs
import trio

from trio_vllm.protocol import Frames
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context
from trio_vllm.transport.zmq_socket import ZmqSocket
from trio_vllm.values import define

MAX_PEERS = 1000
"""Addresses that are connected to at a time; it is requests that name them."""


@define
class SideChannelSockets:
    """A PULL socket, unless nobody has to tell us anything, and a PUSH for each address."""

    _context: ZmqContext
    _pull: ZmqSocket | None
    _peers: dict[str, ZmqSocket] = attrs.field(factory=dict, init=False)

    @property
    def is_bound(self) -> bool:
        """Whether there is anything to receive."""
        return self._pull is not None

    async def receive(self) -> Frames:
        """Wait for a message."""
        assert self._pull is not None
        return await self._pull.receive()

    def send(self, address: str, frames: Sequence[bytes]) -> None:
        """Send a message; it is lost if too many wait for this peer.

        Raises:
          ConfigurationError: The address is unusable.
        """
        if (peer := self._peers.pop(address, None)) is None:
            peer = self._connect(address)
        self._peers[address] = peer
        with suppress(trio.WouldBlock):
            peer.send_nowait(frames)

    def _connect(self, address: str) -> ZmqSocket:
        if len(self._peers) >= MAX_PEERS:
            self._peers.pop(next(iter(self._peers))).close()
        peer = self._context.socket(SocketType.PUSH, send_high_water_mark=1000)
        try:
            peer.connect(address)
        except BaseException:
            peer.close()
            raise
        return peer


@asynccontextmanager
async def open_side_channel_sockets(address: str | None) -> AsyncIterator[SideChannelSockets]:
    """Open the sockets for the time of a block.

    Args:
      address: Where to be told; None if there is nothing.

    Raises:
      ConfigurationError: The address is unusable.
      AddressInUseError: The address is taken.
    """
    async with open_context() as context:
        pull = None
        if address is not None:
            pull = context.socket(SocketType.PULL)
            pull.bind(address)
        yield SideChannelSockets(context, pull)
