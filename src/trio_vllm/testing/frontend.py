"""`open_frontend`: a frontend double, for those who write engines.

It sends whatever it is told to, and keeps whatever comes; nothing is validated, balanced or repaired.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from trio_vllm.concurrency import explains_misuse, running
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineDead,
    EngineId,
    RequestBatchOutputs,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_outputs,
    encode_abort,
    encode_add,
    encode_utility,
)
from trio_vllm.transport import EngineChannels, EngineSource


class Frontend:
    """A frontend that does what the test says; made by `open_frontend`."""

    def __init__(self, channels: EngineChannels) -> None:
        self._channels = channels
        self.messages: list[EngineCoreOutputs | EngineDead] = []
        """All that has come from the engines, in order."""
        self._has_come = trio.Event()
        self._last_call_id = 0

    @property
    def ready_responses(self) -> Mapping[int, EngineCoreReadyResponse]:
        """What each engine has told of itself, by index."""
        return self._channels.ready_responses

    async def receive(self) -> None:
        """Task: keep what comes."""
        while True:
            for frames, _ in await self._channels.outputs.receive_batch(256):
                self.messages.append(decode_outputs(frames))
            self._has_come.set()
            self._has_come = trio.Event()

    async def send(self, request: EngineCoreRequest, engine_index: int = 0) -> None:
        """Send a request."""
        await self.send_frames(encode_add(request), engine_index)

    async def abort(self, request_ids: Sequence[str], engine_index: int = 0) -> None:
        """Abort requests."""
        await self.send_frames(encode_abort(request_ids), engine_index)

    async def send_frames(
        self, frames: Sequence[bytes | memoryview], engine_index: int = 0
    ) -> None:
        """Send any message, also one that no frontend would."""
        await self._channels.requests.send([EngineId.of(engine_index), *frames])

    def outputs_of(self, request_id: str) -> list[EngineCoreOutput]:
        """The outputs of a request that have come so far."""
        return [
            output
            for message in self.messages
            if isinstance(message, RequestBatchOutputs)
            for output in message.outputs
            if output.request_id == request_id
        ]

    async def collect(self, request_id: str) -> list[EngineCoreOutput]:
        """Wait for the end of a request; gives its outputs."""
        await trio.lowlevel.checkpoint()
        while True:
            outputs = self.outputs_of(request_id)
            if any(output.finish_reason is not None for output in outputs):
                return outputs
            await self._has_come.wait()

    async def call(self, method: str, *args: Any, engine_index: int = 0) -> UtilityOutput:
        """Call a method of an engine, and wait for the answer."""
        self._last_call_id += 1
        call = UtilityRequest(0, self._last_call_id, method, list(args))
        await self.send_frames(encode_utility(call), engine_index)
        while True:
            for message in self.messages:
                if (
                    isinstance(message, UtilityCallOutput)
                    and message.output.call_id == call.call_id
                ):
                    return message.output
            await self._has_come.wait()


@explains_misuse("open_frontend", instead="trio.run in a thread")
@asynccontextmanager
async def open_frontend(mode: EngineSource) -> AsyncIterator[Frontend]:
    """Let engines register; the block's value talks to them.

    Args:
      mode: Where they come from; `EngineSource` says which ways there are.

    Raises:
      StartupError: They have not come in the mode's time.
    """
    async with mode.connect() as channels:
        frontend = Frontend(channels)
        async with running(frontend.receive):
            yield frontend
