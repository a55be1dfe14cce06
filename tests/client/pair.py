"""The client against mock engines, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from tests.client.world import Engine, World, open_world

from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.protocol import (
    EngineCoreRequest,
    RequestBatchOutputs,
    decode_outputs,
    encode_add,
)


async def serve(
    engine: Engine,
    mock: MockEngine,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Let a mock engine answer, for ever; it makes a step whenever nothing else is to be done."""
    task_status.started()
    while True:
        if has_work(mock, trio.current_time()):
            await trio.lowlevel.checkpoint()
        else:
            relay(engine, mock.handle(await engine.inbox.receive(), trio.current_time()))
        take(engine, mock)
        step(engine, mock)


def has_work(mock: MockEngine, now: float) -> bool:
    """Whether a mock engine would make a step without another message."""
    return mock.next_step_time(now) is not None


def take(engine: Engine, mock: MockEngine) -> None:
    """Let a mock engine take what has come."""
    try:
        messages = engine.inbox.receive_batch_nowait(1_000_000)
    except (trio.WouldBlock, trio.EndOfChannel):
        return
    for frames, _ in messages:
        relay(engine, mock.handle(frames, trio.current_time()))


def step(engine: Engine, mock: MockEngine) -> None:
    """Let a mock engine make a step, if it has work."""
    if has_work(mock, trio.current_time()):
        relay(engine, mock.step(trio.current_time()))


def relay(engine: Engine, outgoing: list[tuple[int, Any]]) -> None:
    """Send what a mock engine gives."""
    for _, frames in outgoing:
        engine.outputs.send_nowait(frames)


@asynccontextmanager
async def open_pair(
    engine_count: int = 1, *, client_options: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[tuple[World, list[MockEngine]]]:
    """A running client, and mock engines that serve it."""
    mocks = [MockEngine(MockEngineConfig(**config), index) for index in range(engine_count)]
    async with open_world(engine_count, client_options=client_options) as world:
        async with trio.open_nursery() as nursery:
            for engine, mock in zip(world.engines, mocks, strict=True):
                await nursery.start(serve, engine, mock)
            yield world, mocks
            nursery.cancel_scope.cancel()


def expected_tokens(mock: MockEngine, request: EngineCoreRequest) -> list[int]:
    """What a mock engine like this one makes of a request."""
    twin = MockEngine(mock.config, mock.engine_index)
    token_ids: list[int] = []
    outgoing = twin.handle([bytes(frame) for frame in encode_add(request)], 1.0)
    while outgoing or twin.next_step_time(1.0) is not None:
        for _, frames in outgoing:
            outputs = decode_outputs([bytes(frame) for frame in frames])
            assert isinstance(outputs, RequestBatchOutputs)
            token_ids += [token for output in outputs.outputs for token in output.new_token_ids]
        outgoing = twin.step(1.0)
    return token_ids
