"""Our own client with mock engines in a process of their own: one, and four."""

import trio

from frontend_checks import (
    CROWD,
    PACE,
    REQUESTS,
    Log,
    check_summary,
    eventually,
    expect,
    mock_engine,
)
from peers import free_port
from processes import Process
from trio_vllm import (
    FinishReason,
    GenerateRequest,
    HandshakeOwner,
    Llm,
    SamplingParams,
    open_llm,
)


def request(request_id: str, max_tokens: int) -> GenerateRequest:
    """A request for tokens."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


async def main(engine_count: int) -> None:
    """Go through all checks."""
    port = free_port()
    mode = HandshakeOwner(
        handshake_address=f"tcp://127.0.0.1:{port}", engine_count=engine_count, ready_timeout=30
    )
    with mock_engine(port, "--engine-count", str(engine_count), *PACE) as mock:
        async with open_llm(mode) as llm:
            await many(llm, mock, engine_count)
            await leave_a_crowd(llm, mock)
        # leaves, and comes back
        async with open_llm(mode) as llm:
            await one(llm, mock)
        check_summary(mock)
    print(f"ok {engine_count} engines", flush=True)


async def many(llm: Llm, mock: Process, engine_count: int) -> None:
    """Hundreds of requests of mixed lengths, each with just the tokens that it asked for."""
    lengths = [1 + i * 7 % 200 for i in range(REQUESTS)]

    async def ask(length: int) -> None:
        output = await llm.generate(request("many", length))
        expect(
            "the end",
            (FinishReason.LENGTH, length),
            (output.finish_reason, output.usage.output_tokens),
        )
        expect("tokens", length, len(output.token_ids))

    async with trio.open_nursery() as nursery:
        for length in lengths:
            nursery.start_soon(ask, length)
    await eventually("all to be logged", lambda: Log(mock).finished == REQUESTS)
    expect("engines that served", set(range(engine_count)), set(Log(mock).served))
    expect("tokens", sum(lengths), Log(mock).tokens)


async def leave_a_crowd(llm: Llm, mock: Process) -> None:
    """Who leaves in the middle is aborted, and nothing is left of it."""

    async def read_some(begun: trio.Event) -> None:
        async with llm.stream(request("crowd", 1_000_000)) as deltas:
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
    expect("requests left", 0, Log(mock).started - Log(mock).finished - Log(mock).aborted)


async def one(llm: Llm, mock: Process) -> None:
    """A request to whom serves again."""
    before = Log(mock)
    output = await llm.generate(request("one", 5))
    expect("tokens", 5, len(output.token_ids))
    await eventually("it to be logged", lambda: Log(mock).finished - before.finished == 1)


for count in (1, 4):
    trio.run(main, count)
