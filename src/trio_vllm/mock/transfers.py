"""`TransferHub` and `open_side_channel`: how engines learn that blocks they keep have been fetched.

vLLM's NIXL connector sends a notification along with the transfer. Engines in one process and in memory
are told directly. Between processes it is a message, the request's id, to the side channel whose address
stands in ``kv_transfer_params``. It is sent once: if it is lost, the loan ends by its time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import attrs
import trio

from trio_vllm.concurrency import running
from trio_vllm.errors import ConfigurationError
from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.connector import Fetched
from trio_vllm.transport import SideChannelSockets, open_side_channel_sockets
from trio_vllm.values import define

Release = Callable[[str], None]
"""Ends the loan of a request's blocks."""

MAX_PORT = 65_535


@define
class TransferHub:
    """The engines of one process that are connected in memory, by the address of their side channel."""

    _releases: dict[tuple[str, int], Release] = attrs.field(factory=dict, init=False)

    def join(self, config: MockEngineConfig, engine_index: int, release: Release) -> None:
        """Make an engine known."""
        address = config.kv_side_channel_host, config.kv_side_channel_port + engine_index
        self._releases[address] = release

    def tell(self, fetched: Iterable[Fetched]) -> None:
        """Tell the engines that keep these blocks; others are not there."""
        for one in fetched:
            if (release := self._releases.get((one.host, one.port))) is not None:
                release(one.request_id)


@define(eq=False)
class SideChannel:
    """The side channel of one engine, for the `MockEngine` of the moment."""

    _sockets: SideChannelSockets
    release: Release | None = None
    """What is called for each request whose blocks were fetched."""

    def tell(self, fetched: Iterable[Fetched]) -> None:
        """Tell the engines that keep these blocks."""
        for one in fetched:
            with suppress(ConfigurationError):  # an address that is none
                self._sockets.send(f"tcp://{one.host}:{one.port}", [one.request_id.encode()])

    async def receive(self) -> None:
        """Task: pass on what other engines tell."""
        await trio.lowlevel.checkpoint()
        while self._sockets.is_bound:
            frames = await self._sockets.receive()
            if self.release is not None:
                self.release(bytes(frames[0]).decode(errors="replace"))


@asynccontextmanager
async def open_side_channel(
    config: MockEngineConfig, engine_index: int
) -> AsyncIterator[SideChannel | None]:
    """Open the side channel of one engine, if it has a part in prefill/decode disaggregation.

    Raises:
      ConfigurationError: There is no such port.
      AddressInUseError: The port is taken.
    """
    if config.pd_role is None:
        yield None
        return
    port = config.kv_side_channel_port + engine_index
    if port > MAX_PORT:
        raise ConfigurationError(f"kv_side_channel_port: engine {engine_index} would have {port}")
    address = None if config.pd_role == "decode" else f"tcp://*:{port}"
    async with open_side_channel_sockets(address) as sockets:
        channel = SideChannel(sockets)
        async with running(channel.receive):
            yield channel
