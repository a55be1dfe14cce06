"""Our own client with mock engines in a process of their own: one, and four."""

import trio

from frontend_checks import CROWD, PACE, REQUESTS, Log, check_summary
from harness import eventually, expect, free_port, generate, mock_engine, ok, owner
from processes import Process
from trio_vllm import FinishReason, GenerateRequest, HandshakeOwner, Llm, SamplingParams, open_llm


def main() -> None:
    """Go through all checks with each number of engines."""
    for engine_count in (1, 4):
        port = free_port()
        mode = owner(port, engine_count=engine_count, ready_timeout=30)
        with mock_engine(port, "--engine-count", str(engine_count), *PACE) as mock:
            trio.run(check, mode, mock, engine_count)
            check_summary(mock)
        ok(f"{engine_count} engines")


async def check(mode: HandshakeOwner, mock: Process, engine_count: int) -> None:
    """Serve many, be left, and serve again who comes back."""
    async with open_llm(mode) as llm:
        await many(llm, mock, engine_count)
        await leave_a_crowd(llm, mock)
    async with open_llm(mode) as llm:
        before = Log(mock)
        await generate(llm, 5)
        await eventually("it to be logged", lambda: Log(mock).finished - before.finished == 1)


async def many(llm: Llm, mock: Process, engine_count: int) -> None:
    """Hundreds of requests of mixed lengths, each with just the tokens that it asked for."""
    lengths = [1 + i * 7 % 200 for i in range(REQUESTS)]

    async def ask(length: int) -> None:
        output = await generate(llm, length)
        end = output.finish_reason, output.usage.output_tokens
        expect("the end", end, (FinishReason.LENGTH, length))

    async with trio.open_nursery() as nursery:
        for length in lengths:
            nursery.start_soon(ask, length)
    await eventually("all to be logged", lambda: Log(mock).finished == REQUESTS)
    expect("engines that served", set(Log(mock).served), set(range(engine_count)))
    expect("tokens", Log(mock).tokens, sum(lengths))


async def leave_a_crowd(llm: Llm, mock: Process) -> None:
    """Who leaves in the middle is aborted, and nothing is left of it."""
    request = GenerateRequest(
        prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=1_000_000)
    )

    async def read_some(begun: trio.Event) -> None:
        async with llm.stream(request) as deltas:
            async for _ in deltas:
                begun.set()
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(CROWD):
            begun = trio.Event()
            nursery.start_soon(read_some, begun)
            await begun.wait()
        nursery.cancel_scope.cancel()
    await eventually("all to be aborted", lambda: Log(mock).aborted == CROWD)
    log = Log(mock)
    expect("requests left", log.started - log.finished - log.aborted, 0)
