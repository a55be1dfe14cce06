"""Processes that are killed or frozen, and what the other side hears of it in what time."""

from __future__ import annotations

import math
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.ready import ready_response
from tests.wire.processes import PeerProcess, peer_process

from trio_vllm.client import open_client
from trio_vllm.errors import EngineDeadError
from trio_vllm.protocol import EngineCoreRequest, EngineId, SamplingParams
from trio_vllm.transport import Disconnect, EngineChannels, HandshakeOwner, join_frontend

LOSS_LIMIT = 10.0
"""Seconds in which the end of a process must be known. Promised are two, but a busy machine may take
longer; without what is tested here it would never be known."""


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/handshake"


@asynccontextmanager
async def engine_processes(address: str, count: int) -> AsyncIterator[list[PeerProcess]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(peer_process("engine", address, index))
            for index in range(count)
        ]


@asynccontextmanager
async def frontend_with_engines(
    address: str, count: int, heartbeat_timeout: float = math.inf
) -> AsyncIterator[tuple[EngineChannels, list[PeerProcess]]]:
    """Requests and outputs go over TCP."""
    mode = HandshakeOwner(
        handshake_address=address, engine_count=count, heartbeat_timeout=heartbeat_timeout
    )
    with trio.fail_after(60):
        async with engine_processes(address, count) as engines, mode.connect() as links:
            yield links, engines


async def test_killed_engine(address: str) -> None:
    """Its index is told, and no other; the others are there."""
    async with frontend_with_engines(address, 3) as (links, engines):
        engines[1].process.send_signal(signal.SIGKILL)

        with trio.fail_after(LOSS_LIMIT):
            assert await links.disconnects.receive() == Disconnect(engine_index=1)

        for index in (0, 2):
            links.requests.send_nowait([EngineId.of(index), b"\x01", b"\x90"])
            while (line := await engines[index].wait_for_line()) != "01":
                assert line == "joined"
        with trio.move_on_after(0.1):
            assert await links.disconnects.receive() is None


async def test_killed_engine_of_a_client(address: str) -> None:
    """Its request fails with the reason; requests go to the other one from then on."""
    mode = HandshakeOwner(handshake_address=address, engine_count=2)

    def request(request_id: str, rank: int | None = None) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[1],
            sampling_params=SamplingParams(max_tokens=5),
            data_parallel_rank=rank,
        )

    with trio.fail_after(60):
        async with (
            engine_processes(address, 2) as engines,
            open_client(mode, learning_timeout=0.0) as client,
        ):
            async with client.call(request("doomed", 0)) as outputs:
                engines[0].process.send_signal(signal.SIGKILL)
                with trio.fail_after(LOSS_LIMIT), pytest.raises(EngineDeadError) as caught:
                    await anext(outputs)
            async with client.call(request("safe")) as outputs:
                assert outputs.engine_index == 1

    assert (
        caught.value.engine_index,
        str(caught.value),
    ) == (0, "engine 0 is dead: its connection was lost")


async def test_frozen_engine(address: str) -> None:
    """Its connection stands, so nothing is told; what it was sent it gets when it is thawed."""
    async with frontend_with_engines(address, 1) as (links, engines):
        assert await engines[0].wait_for_line() == "joined"
        engines[0].process.send_signal(signal.SIGSTOP)
        links.requests.send_nowait([EngineId.of(0), b"\x01", b"\x90"])
        with trio.move_on_after(0.5):
            assert await links.disconnects.receive() is None

        engines[0].process.send_signal(signal.SIGCONT)

        assert await engines[0].wait_for_line() == "01"


async def test_heartbeats(address: str) -> None:
    """Who is frozen counts as lost, in the time that was asked for; who is only silent does not.

    Nor does who holds the GIL for long: ØMQ's own thread answers.
    """
    async with frontend_with_engines(address, 3, heartbeat_timeout=1.0) as (links, engines):
        _, frozen, computing = engines
        assert await computing.wait_for_line() == "joined"
        links.requests.send_nowait([EngineId.of(2), b"2"])
        begin = trio.current_time()
        frozen.process.send_signal(signal.SIGSTOP)

        with trio.fail_after(LOSS_LIMIT):
            assert await links.disconnects.receive() == Disconnect(engine_index=1)

        assert trio.current_time() - begin > 0.4
        assert b"2".hex() == await computing.wait_for_line()
        with trio.move_on_after(0.1):
            assert await links.disconnects.receive() is None


async def test_killed_frontend(address: str) -> None:
    with trio.fail_after(60):
        async with (
            peer_process("frontend", address) as frontend,
            join_frontend(
                address, engine_index=0, ready_response=lambda _: ready_response(0)
            ) as links,
        ):
            assert await frontend.wait_for_line() == "open"
            frontend.process.send_signal(signal.SIGKILL)

            with trio.fail_after(LOSS_LIMIT):
                await links.disconnects.receive()
