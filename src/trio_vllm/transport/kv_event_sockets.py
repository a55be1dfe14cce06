"""`KvEventSockets` publishes KV-cache events, and repeats them, as vLLM's ``ZmqEventPublisher``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import trio

from trio_vllm.errors import PeerGoneError
from trio_vllm.protocol import Frames
from trio_vllm.transport.zmq_context import SocketType, open_context
from trio_vllm.transport.zmq_socket import ZmqSocket
from trio_vllm.values import frozen


@frozen
class KvEventSockets:
    """A PUB socket, and perhaps a ROUTER that is asked for what somebody has missed."""

    _publisher: ZmqSocket
    _replayer: ZmqSocket | None

    @property
    def repeats(self) -> bool:
        """Whether there is a replay socket."""
        return self._replayer is not None

    def publish(self, frames: Sequence[bytes]) -> None:
        """Send to all subscribers; one that is too slow loses messages."""
        with suppress(trio.WouldBlock):
            self._publisher.send_nowait(frames)

    async def receive_request(self) -> Frames:
        """Wait for somebody to ask for a replay."""
        assert self._replayer is not None
        return await self._replayer.receive()

    async def answer(self, frames: Sequence[bytes]) -> None:  # noqa: ASYNC910
        """Send a part of a replay; nothing if who asked for it has gone."""
        assert self._replayer is not None
        with suppress(PeerGoneError):
            await self._replayer.send(frames)


@asynccontextmanager
async def open_kv_event_sockets(
    endpoint: str, replay_endpoint: str | None = None, *, high_water_mark: int, replay_limit: int
) -> AsyncIterator[KvEventSockets]:
    """Open the sockets for the time of a block.

    Args:
      endpoint: Where events are published. As upstream has it, an address with a wildcard, such as
        ``tcp://*:5557``, or of ``ipc://`` is bound, another one is connected to.
      replay_endpoint: Where they can be asked for again; always bound.
      high_water_mark: Messages that a subscriber may be behind.
      replay_limit: Messages of a replay that may wait for somebody.

    Raises:
      ConfigurationError: An address is unusable.
      AddressInUseError: An address is taken.
    """
    async with open_context() as context:
        publisher = context.socket(SocketType.PUB, send_high_water_mark=high_water_mark)
        if _is_to_be_bound(endpoint):
            publisher.bind(endpoint)
        else:
            publisher.connect(endpoint)
        replayer = None
        if replay_endpoint is not None:
            replayer = context.socket(SocketType.ROUTER, send_high_water_mark=replay_limit)
            replayer.bind(replay_endpoint)
        yield KvEventSockets(publisher, replayer)


def _is_to_be_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
