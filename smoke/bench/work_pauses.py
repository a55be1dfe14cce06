"""A worker that measures for how long the client, or a mock engine, keeps other tasks waiting.

``python -m bench.work_pauses``. Each task opens an `Llm` on messages made in advance, huge ones.
"""

import functools
import time
from collections.abc import Awaitable, Callable

import numpy as np
import ormsgpack
import trio

from bench.meters import cpu_time_of
from bench.unwired import Message, in_trio, unwired_llm
from bench.workers import Answer, answer_orders
from trio_vllm import (
    EngineCoreOutput,
    FinishReason,
    GenerateRequest,
    Logprobs,
    RequestBatchOutputs,
    SamplingParams,
)
from trio_vllm.concurrency import running
from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.mock.runner import EngineRunner
from trio_vllm.protocol import (
    EngineCoreRequest,
    EngineCoreSamplingParams,
    encode_add,
    encode_outputs,
)
from trio_vllm.protocol.multimodal import (
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
)
from trio_vllm.transport import FrontendChannels, FrontendDisconnect
from trio_vllm.transport.memory import open_memory_connection
from trio_vllm.transport.zmq_context import SocketType, open_context


async def pause_by_prompt(*, prompt_length: int = 100_000) -> Answer:
    """Send a huge prompt; the yardstick only packs it."""
    prompt = list(range(1, prompt_length + 1))
    wanted = GenerateRequest(prompt_token_ids=prompt, sampling_params=SamplingParams())
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:

        async def submit() -> None:
            nursery.start_soon(llm.generate, wanted)
            await feed.wait_sent(1)

        pause = await longest_turn(submit)
        yardstick = cpu_time_of(lambda: ormsgpack.packb(prompt), 1)
        nursery.cancel_scope.cancel()
    return {"value": pause * 1e3, "yardstick": yardstick * 1e3}


async def pause_by_logprobs(*, positions: int = 128, vocab_size: int = 32_000) -> Answer:
    """Receive all logprobs of a prompt and of a token; the yardstick copies their bytes."""
    params = SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    prompt = list(range(1, positions + 2))
    wanted = GenerateRequest(prompt_token_ids=prompt, sampling_params=params)
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:
        nursery.start_soon(llm.generate, wanted)
        (request_id,) = await feed.settled(1)
        output = EngineCoreOutput(
            request_id,
            [1],
            new_logprobs=some_logprobs(1, vocab_size),
            new_prompt_logprobs_tensors=some_logprobs(positions, vocab_size),
            finish_reason=FinishReason.LENGTH,
        )
        frames = encoded([output])
        pause = await longest_turn(lambda: feed.feed([frames]))
        yardstick = cpu_time_of(lambda: [bytearray(frame) for frame in frames], 1)
    return {"value": pause * 1e3, "yardstick": yardstick * 1e3}


async def pause_by_outputs(*, concurrency: int = 1024) -> Answer:
    """Receive a token with 20 logprobs for each of many requests; the yardstick only unpacks."""
    params = SamplingParams(max_tokens=1, logprobs=20)
    wanted = GenerateRequest(prompt_token_ids=[1], sampling_params=params)
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(llm.generate, wanted)
        logprobs = some_logprobs(1, 21)
        outputs = [
            EngineCoreOutput(i, [1], new_logprobs=logprobs, finish_reason=FinishReason.LENGTH)
            for i in await feed.settled(concurrency)
        ]
        frames = encoded(outputs)
        pause = await longest_turn(lambda: feed.feed([frames]))
        unpack = functools.partial(ormsgpack.unpackb, frames[0], ext_hook=lambda _, data: data)
        yardstick = cpu_time_of(unpack, 1)
    return {"value": pause * 1e3, "yardstick": yardstick * 1e3}


async def pause_by_strangers(*, rows: int) -> Answer:
    """Receive rows for requests that nobody waits for; the yardstick only unpacks them."""
    payload = ormsgpack.packb(
        [0, [[f"unknown-{row:07}", [1]] for row in range(rows)], None, 1.0, *[None] * 5]
    )
    async with unwired_llm() as (_, feed):
        pause = await longest_turn(lambda: feed.feed([[payload]]))
    yardstick = cpu_time_of(lambda: ormsgpack.unpackb(payload), 1)
    return {"value": pause * 1e3, "yardstick": yardstick * 1e3}


async def pause_by_requests(*, requests: int) -> Answer:
    """Ask for so many completions at once; the yardstick starts tasks that only wait."""
    wanted = GenerateRequest(prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1))
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:

        async def submit() -> None:
            for _ in range(requests):
                nursery.start_soon(llm.generate, wanted)
            await feed.wait_sent(requests)

        async def only_wait() -> None:
            for _ in range(requests):
                nursery.start_soon(trio.sleep_forever)
            await trio.lowlevel.checkpoint()

        pause, yardstick = await longest_turn(submit), await longest_turn(only_wait)
        nursery.cancel_scope.cancel()
    return {"value": pause * 1e3, "yardstick": yardstick * 1e3}


TENSOR_SIZE = 200 * 1024 * 1024


async def pause_by_sent_tensor() -> Answer:
    """Send an array that could be changed meanwhile; the yardstick copies it."""
    pixels = np.zeros(TENSOR_SIZE // 4, np.float32)
    feature = MultiModalFeatureSpec(
        data={"pixels": MultiModalFieldElem(pixels, MultiModalField("batched"))},
        modality="image",
        identifier="a",
        mm_position=PlaceholderRange(offset=0, length=1),
    )
    wanted = GenerateRequest(prompt_token_ids=[1], mm_features=[feature])
    async with unwired_llm(is_multimodal=True) as (llm, feed), trio.open_nursery() as nursery:

        async def submit() -> None:
            nursery.start_soon(llm.generate, wanted)
            await feed.wait_sent(1)

        pause = await longest_turn(submit)
        nursery.cancel_scope.cancel()
    return {"value": pause * 1e3, "yardstick": cpu_time_of(pixels.copy) * 1e3}


async def pause_by_received_tensor() -> Answer:
    """Receive an array in a frame of its own; the yardstick copies it."""
    array = bytes(TENSOR_SIZE)
    received = []  # to give so much memory back takes a while, too, but that is its owner's
    async with open_context() as context:
        pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
        push.connect(pull.bind("tcp://127.0.0.1:0"))

        async def transfer() -> None:
            push.send_nowait([b"payload", array])
            received.append(await pull.receive())

        pause = await longest_turn(transfer)
    return {"value": pause * 1e3, "yardstick": cpu_time_of(lambda: bytearray(array)) * 1e3}


async def pause_of_the_mock(*, prompt_length: int = 1_000_000) -> Answer:
    """Give a mock engine a huge prompt; the yardstick only unpacks it."""
    request = EngineCoreRequest(
        request_id="huge",
        prompt_token_ids=range(1, prompt_length + 1),
        sampling_params=EngineCoreSamplingParams(max_tokens=1),
    )
    frames = [bytes(frame) for frame in encode_add(request)]
    to_engine, inbox = open_memory_connection()
    outbox, from_engine = open_memory_connection()
    _, disconnects = trio.open_memory_channel[FrontendDisconnect](0)
    channels = FrontendChannels([inbox], [outbox], disconnects)
    engine = MockEngine(MockEngineConfig(max_model_len=2 * prompt_length))
    runner = EngineRunner(engine, channels, on_idle_check=lambda: None)

    async def ask() -> None:
        to_engine.send_nowait(frames)
        await from_engine.receive()

    async with running(*runner.pumps(), runner.run):
        pause = await longest_turn(ask)
    yardstick = cpu_time_of(lambda: ormsgpack.unpackb(frames[1]), 1)
    return {"value": pause * 1e3, "yardstick": yardstick * 1e3}


def some_logprobs(rows: int, columns: int) -> Logprobs:
    """So many positions with so many candidates."""
    ids = np.tile(np.arange(columns, dtype=np.int32), (rows, 1))
    return Logprobs(ids, -ids.astype(np.float32), np.ones(rows, np.int32))


def encoded(outputs: list[EngineCoreOutput]) -> Message:
    """A message of these outputs."""
    finished = [output.request_id for output in outputs]
    batch = RequestBatchOutputs(outputs=outputs, timestamp=1.0, finished_requests=finished)
    return [bytes(frame) for frame in encode_outputs(batch)]


async def longest_turn(work: Callable[[], Awaitable[None]]) -> float:
    """CPU seconds of this thread that another task has to wait for its turn meanwhile, at most."""
    longest = 0.0

    async def take_turns() -> None:
        nonlocal longest
        last = time.thread_time()
        while True:
            await trio.lowlevel.checkpoint()
            now = time.thread_time()
            longest = max(longest, now - last)
            last = now

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await trio.lowlevel.checkpoint()
        await work()
        for _ in range(10):  # who was woken has a turn too
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    return longest


if __name__ == "__main__":
    tasks = (
        pause_by_prompt,
        pause_by_logprobs,
        pause_by_outputs,
        pause_by_strangers,
        pause_by_requests,
        pause_by_sent_tensor,
        pause_by_received_tensor,
        pause_of_the_mock,
    )
    answer_orders({task.__name__: in_trio(task) for task in tasks})
