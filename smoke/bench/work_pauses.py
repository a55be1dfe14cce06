"""A worker that measures for how long the client keeps other tasks waiting.

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
from trio_vllm.protocol import encode_outputs


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
    tasks = (pause_by_prompt, pause_by_logprobs, pause_by_outputs)
    answer_orders({task.__name__: in_trio(task) for task in tasks})
