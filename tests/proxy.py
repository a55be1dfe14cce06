"""A TCP proxy whose single connections a test can reset or freeze."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import attrs
import trio

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing resets the connection."""


@attrs.define(eq=False)
class ProxiedConnection:
    """One connection through the proxy."""

    _near: trio.SocketStream
    _far: trio.SocketStream
    _flow: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._flow.set()

    def freeze(self) -> None:
        """Carry nothing more in either direction, though both ends stay open."""
        self._flow = trio.Event()

    def thaw(self) -> None:
        """Carry what has come and comes."""
        self._flow.set()

    async def reset(self) -> None:
        """Reset both ends."""
        ends = (self._near, self._far)
        for stream in ends:  # of both first: when one is closed, the tasks close the other
            stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, RESET_ON_CLOSE)
        for stream in ends:
            await trio.aclose_forcefully(stream)

    async def run(self) -> None:
        """Task: carry bytes in both directions until one end closes."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, self._near, self._far)
            nursery.start_soon(self._carry, self._far, self._near)

    async def _carry(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                await self._flow.wait()
                await target.send_all(data)
            await target.send_eof()


@attrs.define(eq=False)
class Proxy:
    """Listens at ``address`` and connects to ``target`` for each connection."""

    address: str
    target: str
    connections: list[ProxiedConnection] = attrs.field(factory=list, init=False)

    async def handle(self, near: trio.SocketStream) -> None:
        """Carry one connection."""
        host, port = self.target.removeprefix("tcp://").split(":")
        try:
            far = await trio.open_tcp_stream(host, int(port))
        except (
            OSError
        ):  # the target has gone, and who connects again hears of it by the end of this
            await trio.aclose_forcefully(near)
            return
        async with near, far:
            connection = ProxiedConnection(near, far)
            self.connections.append(connection)
            await connection.run()


@asynccontextmanager
async def open_proxy(target: str) -> AsyncIterator[Proxy]:
    """Run a proxy of a ``tcp://`` address while the block runs."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
    proxy = Proxy(address, target)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, proxy.handle, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
