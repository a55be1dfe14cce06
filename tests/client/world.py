"""A client and engines that do what the test says, connected in memory."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from tests.memory import MemoryReceiver, MemoryRouter, MemorySender, open_memory_connection
from tests.ready import ready_response
from trio.testing import wait_all_tasks_blocked

from trio_vllm.client import CoreDriver, EngineCoreClient, FrontendCore
from trio_vllm.protocol import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    EngineId,
    EngineMessage,
    FinishReason,
    RequestBatchOutputs,
    SchedulerStats,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_engine_message,
    encode_outputs,
)
from trio_vllm.transport import Disconnect, EngineChannels


@attrs.define
class Engine:
    """One engine, by hand."""

    index: int
    inbox: MemoryReceiver
    outputs: MemorySender
    _router: MemoryRouter
    _disconnects: trio.MemorySendChannel[Disconnect]

    # What it got

    def received(self) -> list[EngineMessage]:
        """The messages that came since the last call."""
        try:
            batch = self.inbox.receive_batch_nowait(1_000_000)
        except (trio.WouldBlock, trio.EndOfChannel):
            return []
        return [decode_engine_message(frames) for frames, _ in batch]

    def requests(self) -> list[EngineCoreRequest]:
        """The same; there must be nothing but requests among them."""
        return [message for message in self.received() if isinstance(message, EngineCoreRequest)]

    def aborts(self) -> list[list[str]]:
        """The request ids of each ABORT message among them."""
        return [
            message.request_ids for message in self.received() if isinstance(message, AbortRequests)
        ]

    def call(self) -> UtilityRequest:
        """The one utility call that came since the last call."""
        (message,) = self.received()
        assert isinstance(message, UtilityRequest)
        return message

    # What it sends

    async def say(self, *frames: bytes) -> None:
        """Send any message, and let the client take it."""
        self.outputs.send_nowait(frames)
        await wait_all_tasks_blocked()

    async def send(self, *outputs: EngineCoreOutput, **batch: Any) -> None:
        """Send outputs in one message, and let the client take them."""
        values = {"engine_index": self.index, "timestamp": 1.0, **batch}
        message = RequestBatchOutputs(outputs=list(outputs), **values)
        await self.say(*map(bytes, encode_outputs(message)))

    async def emit(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        **fields: Any,
    ) -> None:
        """Send an output of one request."""
        await self.send(make_output(token_ids, request_id, finish_reason=finish_reason, **fields))

    async def report(self, running: int, waiting: int = 0, **stats: Any) -> None:
        """Send statistics."""
        values = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, **stats)
        await self.send(scheduler_stats=values)

    async def answer(
        self, call_id: int, result: Any = None, failure_message: str | None = None
    ) -> None:
        """Answer a utility call."""
        output = UtilityOutput(call_id, failure_message, result)
        message = UtilityCallOutput(engine_index=self.index, output=output)
        await self.say(*map(bytes, encode_outputs(message)))

    # How it ends

    def vanish(self) -> None:
        """Be gone, before the client hears of it."""
        self._router.disconnect(EngineId.of(self.index))

    async def break_output(self) -> None:
        """Let the client hear that the connection for outputs is lost."""
        self._disconnects.send_nowait(Disconnect(connection=self.outputs.connection))
        await wait_all_tasks_blocked()

    async def break_connection(self) -> None:
        """Let the client hear that the connection for requests is lost."""
        self._disconnects.send_nowait(Disconnect(engine_index=self.index))
        await wait_all_tasks_blocked()

    async def die(self) -> None:
        """Be killed."""
        self.vanish()
        await self.break_connection()

    async def send_sentinel(self) -> None:
        """Report its death."""
        await self.say(ENGINE_CORE_DEAD)


@attrs.define
class World:
    """The client, and what it is connected to."""

    client: EngineCoreClient
    engines: list[Engine]
    stranger: MemorySender
    """A connection for outputs that no engine has made."""

    @property
    def engine(self) -> Engine:
        """The only engine."""
        (engine,) = self.engines
        return engine

    async def round_trip(self) -> None:
        """The client still serves requests."""
        request = make_request("round-trip")
        async with self.client.call(request) as stream:
            engine = self.engines[stream.engine_index]
            await engine.emit(request.request_id, [7], FinishReason.LENGTH)
            assert [item.output.new_token_ids async for item in stream] == [[7]]

    def assert_tidy(self) -> None:
        """Nothing is left in any table of the client."""
        tables = self.client.statistics()
        assert not any(tables.requests_in_flight.values())
        assert (tables.utility_calls, tables.unsent_messages, tables.unsent_aborts) == (0, 0, 0)
        assert tables.tasks_waiting_for_failure == 0


@attrs.define
class HandDriven:
    """Engines that do what the test says; an `EngineSource`."""

    engines: list[Engine]
    channels: EngineChannels
    stranger: MemorySender

    @property
    def is_for_one_client(self) -> bool:
        """They answer any client."""
        return False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[EngineChannels]:
        """Give the channels to them."""
        yield self.channels


def hand_driven(engine_count: int = 1, **ready: Any) -> HandDriven:
    """So many engines, which registered with these values."""
    router = MemoryRouter()
    send_outputs, outputs = open_memory_connection()
    send_disconnects, disconnects = trio.open_memory_channel[Disconnect](math.inf)
    responses = {index: ready_response(index, **ready) for index in range(engine_count)}
    engines = [
        Engine(
            index,
            router.connect(EngineId.of(index)),
            attrs.evolve(send_outputs, connection=20 + index),
            router,
            send_disconnects,
        )
        for index in responses
    ]
    channels = EngineChannels("memory:in", "memory:out", responses, router, outputs, disconnects)
    return HandDriven(engines, channels, attrs.evolve(send_outputs, connection=99))


@asynccontextmanager
async def open_world(
    engine_count: int = 1,
    *,
    connections_are_known: bool = True,
    client_options: dict[str, Any] | None = None,
    driver_options: dict[str, Any] | None = None,
    **ready: Any,
) -> AsyncIterator[World]:
    """A running client of so many engines, which registered with these values.

    Unless ``connections_are_known`` is false, each engine has sent a message.
    """
    source = hand_driven(engine_count, **ready)
    core = FrontendCore(source.channels.ready_responses, **(client_options or {}))
    driver = CoreDriver(source.channels, core, **(driver_options or {}))
    async with driver.running():
        if connections_are_known:
            for engine in source.engines:
                await engine.send()
        yield World(EngineCoreClient(driver), source.engines, source.stranger)


def make_request(request_id: str = "r", max_tokens: int = 16, **fields: Any) -> EngineCoreRequest:
    """A request that any engine takes."""
    values: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": EngineCoreSamplingParams(max_tokens=max_tokens),
    }
    return EngineCoreRequest(request_id=request_id, **{**values, **fields})


def make_output(
    token_ids: Sequence[int] = (), request_id: str = "r", **fields: Any
) -> EngineCoreOutput:
    """An output of the request that `make_request` makes."""
    return EngineCoreOutput(request_id, list(token_ids), **fields)
