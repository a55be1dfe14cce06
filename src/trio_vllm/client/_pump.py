"""The task that hands out what the engines send."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import trio

from trio_vllm.client._dispatch import Dispatcher
from trio_vllm.client._outbox import Outbox
from trio_vllm.protocol import Frames
from trio_vllm.transport import EngineLinks

BATCH = 64
"""Messages received at once."""

SLICE = 0.002
"""Seconds of handing out outputs between two checkpoints; a message of 1,000 takes about 1 ms."""


class OutputPump:
    """Gives the outputs of all engines to the dispatcher."""

    def __init__(self, links: EngineLinks, dispatcher: Dispatcher, outbox: Outbox) -> None:
        """While it is behind with that, ``outbox`` is held."""
        self._outputs = links.outputs
        self._is_alone = len(links.ready_responses) == 1
        self._dispatcher = dispatcher
        self._outbox = outbox

    async def run(self) -> None:
        """Task: hand out what comes, for ever."""
        while True:
            batch = await self._receive()
            end = perf_counter() + SLICE
            for frames, descriptor in batch:
                if perf_counter() > end:
                    await trio.lowlevel.checkpoint()
                    end = perf_counter() + SLICE
                self._dispatcher.take(frames, descriptor)
            if len(batch) == BATCH and self._outputs.has_more():
                self._outbox.hold()
            else:
                self._outbox.release()

    async def _receive(self) -> Sequence[tuple[Frames, int | None]]:
        """Messages, and the connections that they came by where there are several."""
        if self._is_alone:  # then the sender is known, and asking costs half a microsecond
            return [(frames, None) for frames in await self._outputs.receive_batch(BATCH)]
        return await self._outputs.receive_batch_with_descriptors(BATCH)
