"""One connection that we make, and what its monitor tells of it."""

from __future__ import annotations

import logging

import trio
import zmq

from trio_vllm.transport._monitor import PeerEvent, PeerEventKind, PeerMonitor
from trio_vllm.transport._socket import ZmqSocket

_log = logging.getLogger("trio_vllm.transport")


class OutgoingConnection:
    """Whether a connecting socket has reached somebody, and has lost it again.

    One task at a time may wait. ØMQ itself would connect again for ever; but who was lost does not
    know any more what it was told, so what is lost stays lost here.
    """

    def __init__(self, address: str, monitor: PeerMonitor) -> None:
        self.address = address
        self.state = f"nobody listens at {address}"
        """Where it stands, in words."""
        self._monitor = monitor
        self._times_open = 0
        self._is_lost = False
        self._is_foreign = False

    @property
    def is_lost(self) -> bool:
        """Whether it was open and broke."""
        for event in self._monitor.receive_pending():
            self._take(event)
        return self._is_lost

    async def wait_open(self) -> None:
        """Wait until somebody who speaks ZeroMQ is at the other end, or was."""
        await trio.lowlevel.checkpoint()
        while not self._times_open:
            self._take(await self._monitor.receive())

    async def wait_reopened(self) -> None:
        """Wait until somebody else, or somebody once more, is at the other end."""
        await trio.lowlevel.checkpoint()
        while self._times_open < 2:
            self._take(await self._monitor.receive())

    async def wait_lost(self) -> None:
        """Wait until it has been open and has broken."""
        await trio.lowlevel.checkpoint()
        while not self._is_lost:
            self._take(await self._monitor.receive())

    def _take(self, event: PeerEvent) -> None:
        state = self.state
        match event.kind:
            case PeerEventKind.CONNECTED if not self._is_foreign:
                self.state = f"{self.address} is open, but says nothing"
            case PeerEventKind.HANDSHAKE_FAILED:
                self._is_foreign = True
                self.state = f"who listens at {self.address} does not speak ZeroMQ"
            case PeerEventKind.HANDSHAKE_SUCCEEDED:
                self._times_open += 1
                again = " again" if self._times_open > 1 else ""
                self.state = f"{self.address} is connected{again}"
            case PeerEventKind.DISCONNECTED if self._times_open:
                self._is_lost = True
                self.state = f"{self.address} closed the connection"
        if self.state != state:
            # That it is open goes without saying if it is connected in a moment.
            is_passing = event.kind is PeerEventKind.CONNECTED
            _log.log(logging.DEBUG if is_passing else logging.INFO, "%s", self.state)


def set_linger(socket: ZmqSocket, seconds: float) -> None:
    """Change how long a message may still be under way after closing."""
    socket.set_options({zmq.LINGER: round(seconds * 1000)})
