"""A client that closes at once: what its engines still hear."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import trio
from tests.ready import ready_response

from trio_vllm.client import EngineCoreClient, OutputStream, open_client
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreRequest,
    EngineMessage,
    SamplingParams,
    decode_engine_message,
)
from trio_vllm.transport import HandshakeOwner, join_frontend

REQUESTS = 500


class Engine:
    """Collects what it receives until all requests are aborted."""

    def __init__(self, index: int, address: str) -> None:
        self.index = index
        self._address = address
        self.added: set[str] = set()
        self.aborted: set[str] = set()

    async def run(self) -> None:
        async with join_frontend(
            self._address,
            engine_index=self.index,
            ready_response=lambda _: ready_response(self.index),
        ) as links:
            while not self.added or self.added != self.aborted:
                for frames, _ in await links.inputs[0].receive_batch(100):
                    self.take(decode_engine_message(frames))
            await links.disconnects.receive()

    def take(self, message: EngineMessage) -> None:
        if isinstance(message, EngineCoreRequest):
            self.added.add(message.request_id)
        elif isinstance(message, AbortRequests):
            self.aborted.update(message.request_ids)


def submit(client: EngineCoreClient) -> None:
    for number in range(REQUESTS):
        request = EngineCoreRequest(
            request_id=f"request-{number}",
            prompt_token_ids=[1],
            sampling_params=SamplingParams(max_tokens=100),
        )
        client.driver.submit(request, OutputStream(request.request_id))


class Mistake(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("way", ["leaving", "raising", "cancelling"])
async def test_last_aborts_reach_the_engines(tmp_path: Path, way: str) -> None:
    """There is no checkpoint between the requests and the end."""
    address = f"ipc://{tmp_path}/handshake"
    engines = [Engine(index, address) for index in range(2)]
    mode = HandshakeOwner(handshake_address=address, engine_count=2)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(engine.run)
            with suppress(Mistake), trio.CancelScope() as scope:
                async with open_client(mode, learning_timeout=0.0) as client:
                    submit(client)
                    if way == "raising":
                        raise Mistake
                    if way == "cancelling":
                        scope.cancel()

    assert sum(len(engine.aborted) for engine in engines) == REQUESTS
    assert [len(engine.added) for engine in engines] == [REQUESTS // 2] * 2
