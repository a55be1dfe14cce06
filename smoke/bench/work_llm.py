"""A worker with an `Llm` on connected engines: ``python -m bench.work_llm ADDRESS [ENGINES]``.

It keeps a number of requests in flight for some seconds, or sends one after the other.
"""

import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import trio

from bench.workers import Answer, read_order, reply
from trio_vllm import GenerateRequest, HandshakeOwner, Llm, SamplingParams, open_llm

PROMPT_LENGTH = 32


async def main() -> None:
    """Connect, say so, and do what is ordered until there are no more orders."""
    address, count = sys.argv[1], int([*sys.argv, "1"][2])
    mode = HandshakeOwner(handshake_address=address, engine_count=count)
    async with open_llm(mode) as llm, trio.open_nursery() as nursery:
        await llm.generate(request(max_tokens=1))
        reply(ready=True)
        tasks: dict[str, Callable[..., Awaitable[Answer]]] = {
            "generate": lambda **order: keep_busy(llm, generate, **order),
            "stream": lambda **order: keep_busy(llm, stream, **order),
            "ping": lambda **order: ping(llm, **order),
            "hold": lambda **order: hold(llm, nursery, **order),
        }
        while (order := await trio.to_thread.run_sync(read_order)) is not None:
            reply(**await tasks[order.pop("task")](**order))
        nursery.cancel_scope.cancel()


def request(
    *,
    max_tokens: int,
    prompt_length: int = PROMPT_LENGTH,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    extra_args: Mapping[str, Any] | None = None,
) -> GenerateRequest:
    """Always the same for the same arguments."""
    params = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        extra_args=extra_args,
    )
    prompt = list(range(1, prompt_length + 1))
    return GenerateRequest(prompt_token_ids=prompt, sampling_params=params)


async def generate(llm: Llm, wanted: GenerateRequest) -> int:
    """Complete a prompt; gives how often we were woken."""
    output, params = await llm.generate(wanted), wanted.sampling_params
    assert len(output.token_ids) == params.max_tokens
    for asked, logprobs, rows in (
        (params.logprobs, output.logprobs, params.max_tokens),
        (params.prompt_logprobs, output.prompt_logprobs, len(wanted.prompt_token_ids) - 1),
    ):
        assert asked is None or (logprobs is not None and len(logprobs) == rows)
    return 1


async def stream(llm: Llm, wanted: GenerateRequest) -> int:
    """Complete a prompt token by token; gives how often we were woken."""
    tokens = deliveries = 0
    async with llm.stream(wanted) as stream:
        async for delta in stream:
            tokens += len(delta.token_ids)
            deliveries += 1
    assert tokens == wanted.sampling_params.max_tokens
    return deliveries


async def keep_busy(
    llm: Llm,
    complete: Callable[[Llm, GenerateRequest], Awaitable[int]],
    *,
    concurrency: int,
    seconds: float,
    **asked: Any,
) -> dict[str, Any]:
    """Keep ``concurrency`` requests in flight, and start no more after ``seconds``."""
    wanted = request(**asked)
    requests = deliveries = 0
    begin, cpu = time.perf_counter(), time.process_time()

    async def one_after_another() -> None:
        nonlocal requests, deliveries
        while time.perf_counter() - begin < seconds:
            count = await complete(llm, wanted)  # += would read its old value too early
            deliveries += count
            requests += 1

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(one_after_another)
    return {
        "requests": requests,
        "deliveries": deliveries,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }


async def hold(
    llm: Llm, nursery: trio.Nursery, *, concurrency: int, seconds: float
) -> dict[str, Any]:
    """Have ``concurrency`` requests that do not end; gives what so many seconds of them cost."""
    if not llm.in_flight_count:
        # Pinned: to choose among hundreds of engines is not what is measured here.
        engines = itertools.cycle(llm.client.engine_indices)
        for index in itertools.islice(engines, concurrency):
            endless = attrs.evolve(request(max_tokens=1_000_000), data_parallel_rank=index)
            nursery.start_soon(llm.generate, endless)
        while llm.in_flight_count < concurrency:  # noqa: ASYNC110  (nothing tells of that)
            await trio.sleep(0.1)
    await trio.sleep(seconds)  # until all have their first tokens
    before, cpu = output_tokens(llm), time.process_time()
    await trio.sleep(seconds)
    cpu = time.process_time() - cpu
    return {"tokens": output_tokens(llm) - before, "cpu_seconds": cpu}


def output_tokens(llm: Llm) -> int:
    """Tokens so far, of all requests."""
    return sum(engine.totals.output_tokens for engine in llm.statistics().engines.values())


async def ping(llm: Llm, *, count: int) -> dict[str, Any]:
    """Complete prompts of one token one after the other; gives the time of each."""
    times = []
    one = request(max_tokens=1)
    for _ in range(count):
        begin = time.perf_counter()
        await llm.generate(one)
        times.append(time.perf_counter() - begin)
    return {"times": times}


if __name__ == "__main__":
    trio.run(main)
