"""Engines in memory that answer utility calls as they are told, and a client connected to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio
from tests.memory import MemoryReceiver, MemoryRouter, MemorySender, open_memory_connection
from tests.ready import ready_response

from trio_vllm.client import EngineCoreClient, run_client
from trio_vllm.concurrency import running
from trio_vllm.protocol import (
    EngineId,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_engine_message,
    encode_outputs,
)
from trio_vllm.transport import Disconnect, EngineChannels


@attrs.frozen
class Failure:
    """An engine's answer that is none."""

    text: str


NEVER = object()
"""Instead of an answer: the engine gives none."""

Answer: TypeAlias = "object | Failure | Callable[[int], object]"
"""The result of every engine, or a function from the engine's index to it."""


@attrs.define
class ScriptedEngines:
    """What they answer by method, and what each was asked."""

    answers: Mapping[str, Answer]
    calls: dict[int, list[tuple[str, list[Any]]]] = attrs.field(factory=dict)

    async def serve(self, engine_index: int, inputs: MemoryReceiver, outputs: MemorySender) -> None:
        """Answer for one engine, for ever. A method without an answer is unknown to it."""
        while True:
            request = decode_engine_message(await inputs.receive())
            if not isinstance(request, UtilityRequest):
                continue
            self.calls[engine_index].append((request.method, request.args))
            lack = Failure(f"'EngineCoreProc' object has no attribute '{request.method}'")
            answer = self.answers.get(request.method, lack)
            if callable(answer):
                answer = answer(engine_index)
            if answer is NEVER:
                continue
            output = UtilityOutput(request.call_id, result=answer)
            if isinstance(answer, Failure):
                text = f"Call to {request.method} method failed: {answer.text}"
                output = UtilityOutput(request.call_id, failure_message=text)
            message = UtilityCallOutput(engine_index=engine_index, output=output)
            outputs.send_nowait(encode_outputs(message))


@asynccontextmanager
async def scripted_engines(
    answers: Mapping[str, Answer], versions: Sequence[str] = ("0.33.0",)
) -> AsyncIterator[tuple[EngineCoreClient, ScriptedEngines]]:
    """Run one engine for each version, and a client of them."""
    engines = ScriptedEngines(answers, {index: [] for index, _ in enumerate(versions)})
    router = MemoryRouter()
    send_output, outputs = open_memory_connection()
    _, disconnects = trio.open_memory_channel[Disconnect](0)
    responses = {i: ready_response(i, vllm_version=version) for i, version in enumerate(versions)}
    channels = EngineChannels("memory:in", "memory:out", responses, router, outputs, disconnects)
    servers = [
        partial(engines.serve, index, router.connect(EngineId.of(index)), send_output)
        for index in responses
    ]
    async with running(*servers), run_client(channels) as client:
        yield client, engines
