"""Engines that ``llm-smoke`` starts itself: their end ends what needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from trio_vllm import EngineCoreError
from trio_vllm.concurrency import running
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines


class EnginesEndedError(Exception):
    """Engines of ours could not be started, or ended while they were needed."""


class Need:
    """A block's need for something that runs beside it."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._reason = ""
        self._is_over = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Run the block; `EnginesEndedError` if its engines end before the need is over."""
        with self._scope:
            yield
        if self._scope.cancelled_caught and self._reason:
            raise EnginesEndedError(self._reason)

    def engines_ended(self, reason: str) -> None:
        """End the block, unless the need is over."""
        if not self._is_over:
            self._reason = reason
            self._scope.cancel(reason=reason)

    def end(self) -> None:
        """From now on the engines may end: some do when their frontend goes."""
        self._is_over = True


@asynccontextmanager
async def mock_engines(
    address: str, engine_count: int, on_end: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve the frontend at ``address`` while the block runs; an earlier end is told ``on_end``."""
    options = ServeOptions(handshake_address=address, engine_count=engine_count, reconnect=False)

    async def serve() -> None:
        await trio.lowlevel.checkpoint()
        try:
            await serve_mock_engines(MockEngineConfig(), options)
        except EngineCoreError as error:
            on_end(f"mock engine: {error}")

    async with running(serve):
        yield
