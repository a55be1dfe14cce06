"""Peers with a fault, over real sockets: who has it is hurt, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import ormsgpack
import pytest
import trio
import zmq
from tests.transport.startup import READY, RawEngine, RawFrontend, beside
from tests.wire.test_losses import LOSS_LIMIT

from trio_vllm.client import EngineCoreClient, open_client
from trio_vllm.errors import EngineDeadError, UtilityCallFailedError
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Frames,
    RequestBatchOutputs,
    SamplingParams,
    UtilityOutput,
    encode_abort,
    encode_add,
    encode_init,
    encode_outputs,
)
from trio_vllm.protocol.output import UtilityCallOutput
from trio_vllm.transport import HandshakeOwner
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context

LIMIT = 20.0


@pytest.fixture
async def context() -> AsyncIterator[ZmqContext]:
    async with open_context() as context:
        yield context


def request(
    request_id: str, max_tokens: int = 9, rank: int | None = None, client_index: int = 0
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        data_parallel_rank=rank,
        client_index=client_index,
    )


@asynccontextmanager
async def client_of(
    context: ZmqContext, folder: Path, count: int
) -> AsyncIterator[tuple[EngineCoreClient, list[RawEngine]]]:
    """A client, and engines that do what the test has them do."""
    address = f"ipc://{folder}/handshake"
    engines = [RawEngine(context, address, index) for index in range(count)]
    mode = HandshakeOwner(handshake_address=address, engine_count=count)

    async def start() -> None:
        for engine in engines:
            await engine.start()

    with trio.fail_after(LIMIT):
        async with beside(start), open_client(mode, learning_timeout=0.0) as client:
            for engine in engines:
                say(engine, EngineCoreOutput("greeting", [1]))
            yield client, engines


def say(engine: RawEngine, *rows: EngineCoreOutput) -> None:
    outputs = RequestBatchOutputs(engine_index=engine.engine_index, outputs=[*rows])
    engine.output.send_nowait(encode_outputs(outputs))


async def next_message(engine: RawEngine, kind: bytes) -> Frames:
    """The next message of a kind, without its kind."""
    while True:
        frames = await engine.input.receive()
        if frames[0] == kind:
            return frames[1:]


async def test_output_connection_ends_and_its_engine_lives_on(
    context: ZmqContext, tmp_path: Path
) -> None:
    """Its output thread has died: the request fails, though the engine hears everything."""
    async with client_of(context, tmp_path, 1) as (client, (engine,)):
        async with client.call(request("a")) as outputs:
            await next_message(engine, b"\x00")
            say(engine, EngineCoreOutput("a", [1]))
            assert (await anext(outputs)).output.new_token_ids == [1]
            engine.output.close()

            with trio.fail_after(LOSS_LIMIT), pytest.raises(EngineDeadError):
                await anext(outputs)

        assert not client.is_healthy


@pytest.mark.parametrize("result", [[None, [ormsgpack.Ext(2, b"a cloudpickle")]], 7, ["no pair"]])
async def test_answer_that_cannot_be_read(
    context: ZmqContext, tmp_path: Path, result: object
) -> None:
    """The call fails, and says whose answer it was; the requests of that engine go on."""
    async with client_of(context, tmp_path, 2) as (client, engines):
        async with client.call(request("a", rank=0)) as outputs, trio.open_nursery() as nursery:

            async def answer() -> None:
                method = ""
                while method != "is_sleeping":  # before, the client asks for the model's tasks
                    (payload,) = await next_message(engines[0], b"\x03")
                    _, call_id, method, _ = ormsgpack.unpackb(payload)
                raw = [0, [], None, 1.0, [call_id, None, result]]
                engines[0].output.send_nowait([ormsgpack.packb(raw)])
                good = UtilityCallOutput(engine_index=1, output=UtilityOutput(call_id, None, True))
                engines[1].output.send_nowait(encode_outputs(good))

            nursery.start_soon(answer)
            with pytest.raises(UtilityCallFailedError) as caught:
                await client.call_utility("is_sleeping")
            say(engines[0], EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP))
            received = [item.output.new_token_ids async for item in outputs]

        assert (list(caught.value.failures), received) == ([0], [[5]])
        assert client.engine_indices == [0, 1]


@pytest.mark.parametrize("word", [b"\xc1", b"ENGINE_CORE_DEAD", b"\x92\x00\xa1x", b""])
async def test_stranger_on_the_output_socket(
    context: ZmqContext, tmp_path: Path, word: bytes
) -> None:
    """Even beside the only engine it counts for nothing, and is counted."""
    async with client_of(context, tmp_path, 1) as (client, (engine,)):
        async with client.call(request("a")) as outputs:
            await next_message(engine, b"\x00")
            say(engine, EngineCoreOutput("a", [1]))
            await anext(outputs)
            stranger = context.socket(SocketType.PUSH, linger=1)
            stranger.connect(client.output_address)
            stranger.send_nowait([word])
            while not client.statistics().dropped:  # noqa: ASYNC110  (nobody tells)
                await trio.sleep(0.01)
            stranger.close()
            say(engine, EngineCoreOutput("a", [2], finish_reason=FinishReason.STOP))
            received = [item.output.new_token_ids async for item in outputs]

        assert received == [[2]]
        assert client.is_healthy


async def test_client_that_does_not_read(context: ZmqContext, tmp_path: Path) -> None:
    """The other client of a mock engine is answered, while the one is behind and after it aborts."""
    frontend = RawFrontend.bind(context, tmp_path, clients=2)
    slow = context.socket(SocketType.PULL)
    slow.set_options({zmq.RCVHWM: 1})
    slow_address = slow.bind(f"ipc://{tmp_path}/slow")
    options = ServeOptions(handshake_address=f"ipc://{tmp_path}/handshake")
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_mock_engines, MockEngineConfig(), options)
            identity, _ = await frontend.handshake.receive()
            outputs = [slow_address, frontend.outputs[1].address]
            init = encode_init(frontend.init(outputs=outputs))
            frontend.handshake.send_nowait([identity, *init])
            for client_input in frontend.inputs:
                await client_input.receive()
            assert (await frontend.handshake.receive())[1] == READY

            for number in range(64):
                add = encode_add(request(f"slow-{number}", 1_000_000))
                frontend.inputs[0].send_nowait([identity, *add])
            await trio.sleep(0.5)  # it fills what lies between
            assert await completed(frontend, bytes(identity), "during") == 5
            aborts = encode_abort([f"slow-{number}" for number in range(64)])
            frontend.inputs[0].send_nowait([identity, *aborts])
            assert await completed(frontend, bytes(identity), "after") == 5
            slow.close()
            frontend.close()
            await trio.sleep(0.2)  # so that nothing lingers for them
            nursery.cancel_scope.cancel()


async def completed(frontend: RawFrontend, identity: bytes, request_id: str) -> int:
    """The tokens that client 1 gets for a request of five."""
    add = encode_add(request(request_id, 5, client_index=1))
    frontend.inputs[1].send_nowait([identity, *add])
    count = 0
    with trio.fail_after(LOSS_LIMIT):
        while True:
            payload, *_ = await frontend.outputs[1].receive()
            for row in ormsgpack.unpackb(payload)[1]:
                if row[0] == request_id:
                    count += len(row[1])
                    if count >= 5:
                        return count
