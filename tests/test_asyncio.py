"""The door for asyncio: the same `Llm`, with trio as the guest of an asyncio loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
import trio

import trio_vllm.asyncio
from trio_vllm import (
    EncodeRequest,
    EngineCommandError,
    FinishReason,
    GenerateRequest,
    HandshakeOwner,
    InternalError,
    PoolingParams,
    RequestError,
    SamplingParams,
    StartupError,
)
from trio_vllm.asyncio import Llm
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines

UNENDING = SamplingParams(max_tokens=1_000_000)
LIMIT = 30.0


@contextmanager
def mock_engines(address: str, **config: Any) -> Iterator[None]:
    """Serve a mock engine in a thread of its own."""
    options = ServeOptions(handshake_address=address)
    token: list[trio.lowlevel.TrioToken] = []
    started, shutdown = threading.Event(), trio.Event()

    async def serve() -> None:
        token.append(trio.lowlevel.current_trio_token())
        started.set()
        await serve_mock_engines(
            MockEngineConfig(step_interval=0.001, **config), options, shutdown=shutdown
        )

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        token[0].run_sync_soon(shutdown.set)
        thread.join()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a frontend and its engine meet; its path is short enough."""
    return f"ipc://{tmp_path_factory.mktemp('a')}/h"


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Llm]:
    """An `Llm` on asyncio with one mock engine."""
    mode = HandshakeOwner(handshake_address=address, ready_timeout=LIMIT)
    with mock_engines(address, supported_tasks=("generate", "embed")):
        async with trio_vllm.asyncio.open_llm(mode) as llm:
            yield llm


def request(max_tokens: int = 4, request_id: str | None = None) -> GenerateRequest:
    """A prompt of three tokens."""
    return GenerateRequest(
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        request_id=request_id,
    )


def on_asyncio(test: Callable[..., Awaitable[None]]) -> Callable[[str], None]:
    """Run an asyncio test to its end, with a limit."""

    async def limited(address: str) -> None:
        async with asyncio.timeout(LIMIT):
            await test(address)

    def run(address: str) -> None:
        asyncio.run(limited(address))

    run.__doc__ = test.__doc__
    return run


async def until_sent(llm: Llm) -> None:
    """Wait until a request is in flight."""
    while not llm.trio.client.in_flight_count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@on_asyncio
async def test_many_completions_at_once(address: str) -> None:
    """Asyncio tasks wait for completions side by side."""
    async with opened(address) as llm:
        outputs = await asyncio.gather(*[llm.generate(request(n % 7 + 1)) for n in range(50)])

    assert [len(output.token_ids) for output in outputs] == [n % 7 + 1 for n in range(50)]


@on_asyncio
async def test_stream(address: str) -> None:
    """A stream gives what `generate` gives, in pieces."""
    async with opened(address) as llm:
        tokens: list[int] = []
        async with llm.stream(request(5, "a")) as deltas:
            assert deltas.request_id == "a"
            async for delta in deltas:
                tokens += delta.token_ids

        assert len(tokens) == 5
        assert llm.trio.client.in_flight_count == 0


@on_asyncio
async def test_encode(address: str) -> None:
    """Pooling goes the same way."""
    async with opened(address) as llm:
        output = await llm.encode(
            EncodeRequest(prompt_token_ids=[1], pooling_params=PoolingParams(task="embed"))
        )

    assert output.data is not None
    assert output.data.shape == (64,)


@on_asyncio
async def test_a_request_that_is_refused(address: str) -> None:
    """Errors come out bare."""
    async with opened(address) as llm:
        with pytest.raises(RequestError):
            await llm.generate(request(-1))


@on_asyncio
async def test_cancelling_a_task_aborts_its_request(address: str) -> None:
    """The request is over when the task is, and others go on."""
    async with opened(address) as llm:
        task = asyncio.create_task(llm.generate(request(1_000_000)))
        await until_sent(llm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert llm.trio.client.in_flight_count == 0
        assert len((await llm.generate(request(3))).token_ids) == 3


@on_asyncio
async def test_a_timeout_aborts_the_request(address: str) -> None:
    """`asyncio.timeout` is a cancellation like any other."""
    async with opened(address) as llm:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.generate(request(1_000_000))

        assert llm.trio.client.in_flight_count == 0


@on_asyncio
async def test_a_stream_that_matched_a_stop_string(address: str) -> None:
    """The reader stops it, and its last delta says so, with counts and times so far."""
    async with opened(address) as llm:
        async with llm.stream(request(1_000_000)) as deltas:
            count = len((await anext(deltas)).token_ids)
            deltas.stop("###", index=0)
            *_, last = [delta async for delta in deltas]
            count += len(last.token_ids)
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "###")
        assert last.usage.output_tokens >= count
        assert last.timings.e2e_latency > 0
        first = llm.statistics()
        second = llm.statistics(first)
        assert first.engines[0].totals.output_tokens >= count
        assert (second.in_flight, second.engines[0].generation_throughput) == (0, 0.0)


@on_asyncio
async def test_leaving_a_stream_early_aborts(address: str) -> None:
    """With `break`, as with an error."""
    async with opened(address) as llm:
        async with llm.stream(request(1_000_000)) as deltas:
            async for _ in deltas:
                break
        with pytest.raises(ZeroDivisionError):
            async with llm.stream(request(1_000_000)):
                raise ZeroDivisionError

        assert llm.trio.client.in_flight_count == 0


@on_asyncio
async def test_cancelling_the_wait_for_a_delivery_loses_nothing(address: str) -> None:
    """Whoever gives up on one delivery finds its tokens in the next."""
    async with opened(address) as llm:
        tokens: list[int] = []
        async with llm.stream(request(200)) as deltas:
            while len(tokens) < 200:
                try:
                    async with asyncio.timeout(0.0005):
                        tokens += (await anext(deltas)).token_ids
                except TimeoutError:
                    pass
        whole = await llm.generate(request(200))

    assert len(tokens) == len(whole.token_ids)


@on_asyncio
async def test_abort_by_id(address: str) -> None:
    """Who waits for an aborted request gets what there is."""
    async with opened(address) as llm:
        task = asyncio.create_task(llm.generate(request(1_000_000, "a")))
        await until_sent(llm)
        llm.abort(["a"])

        assert (await task).finish_reason is FinishReason.ABORT


@on_asyncio
async def test_shutdown(address: str) -> None:
    """It ends what is in flight."""
    async with opened(address) as llm:
        task = asyncio.create_task(llm.generate(request(1_000_000)))
        await until_sent(llm)
        await llm.shutdown()

        assert (await task).finish_reason is FinishReason.ABORT


@on_asyncio
async def test_functions_of_trio(address: str) -> None:
    """The client's own methods can be called."""
    async with opened(address) as llm:
        await llm.run_in_trio(partial(llm.trio.client.sleep, 1))

        assert await llm.run_in_trio(llm.trio.client.is_sleeping) is True


@on_asyncio
async def test_several_at_once_in_one_loop(address: str) -> None:
    """They share one run of trio, which ends with the last of them."""
    async with opened(address + "1") as first:
        async with opened(address + "2") as second:
            await asyncio.gather(first.generate(request()), second.generate(request()))
        assert len((await first.generate(request())).token_ids) == 4
    async with opened(address + "3") as third:
        assert len((await third.generate(request())).token_ids) == 4


@on_asyncio
async def test_opening_while_the_last_one_closes(address: str) -> None:
    """Who comes as trio's run ends waits for the next one."""

    async def once(number: int) -> int:
        async with opened(f"{address}{number}") as llm:
            return len((await llm.generate(request(number))).token_ids)

    assert await asyncio.gather(*map(once, range(1, 5))) == [1, 2, 3, 4]
    for number in range(1, 4):
        assert await once(number) == number


def test_several_loops_in_threads(address: str) -> None:
    """Each loop has a run of trio of its own."""
    counts: list[int] = []

    async def once(number: int) -> None:
        async with opened(f"{address}{number}") as llm:
            counts.append(len((await llm.generate(request(number))).token_ids))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(once(n))) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(counts) == [1, 2, 3]


def test_uvloop(address: str) -> None:
    """The loop need not be asyncio's own."""
    uvloop = pytest.importorskip("uvloop")

    async def once() -> int:
        async with opened(address) as llm:
            return len((await llm.generate(request(5))).token_ids)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(once()) == 5


@on_asyncio
async def test_a_startup_that_fails(address: str) -> None:
    """The error comes out bare, and nothing is left behind."""
    mode = HandshakeOwner(handshake_address=address, ready_timeout=0.05)
    with pytest.raises(StartupError):
        async with trio_vllm.asyncio.open_llm(mode):
            pytest.fail("no engine has come")

    async with opened(address) as llm:
        assert len((await llm.generate(request())).token_ids) == 4


@on_asyncio
async def test_a_startup_that_is_cancelled(address: str) -> None:
    """The address is free again afterwards."""

    async def wait_for_engines() -> None:
        async with trio_vllm.asyncio.open_llm(HandshakeOwner(handshake_address=address)):
            pytest.fail("no engine has come")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_for_engines(), 0.05)
    async with opened(address) as llm:
        assert len((await llm.generate(request())).token_ids) == 4


@on_asyncio
async def test_an_error_of_the_block(address: str) -> None:
    """It comes out as it is."""
    with pytest.raises(ZeroDivisionError):
        async with opened(address):
            raise ZeroDivisionError


@on_asyncio
async def test_cancelling_the_block(address: str) -> None:
    """All of it ends."""

    async def work() -> None:
        async with opened(address) as llm:
            await llm.generate(request(1_000_000))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work(), 0.5)
    assert len(asyncio.all_tasks()) == 1


@on_asyncio
async def test_a_crash_behind_the_block(address: str) -> None:
    """A bug in a background task cancels the block, and is raised in its place."""

    with pytest.raises(InternalError):
        async with opened(address) as llm:
            llm.trio.client.on_scheduler_stats(lambda _index, _stats: 1 / 0)  # type: ignore[arg-type]
            await llm.generate(request(1_000_000))


async def test_under_trio_it_says_so(address: str) -> None:
    """Trio's own programs have `trio_vllm.open_llm`."""
    with pytest.raises(RuntimeError):
        async with trio_vllm.asyncio.open_llm(HandshakeOwner(handshake_address=address)):
            pytest.fail("there is no asyncio loop")


# Many requests, and engines of one's own ------------------------------------------------------------


async def asynchronous(requests: list[GenerateRequest]) -> AsyncIterator[GenerateRequest]:
    """Give them one by one, with a wait of asyncio's between."""
    for each in requests:
        await asyncio.sleep(0)
        yield each


@pytest.mark.parametrize("source", [list, asynchronous])
def test_map(address: str, source: Callable[[list[GenerateRequest]], Any]) -> None:
    """Pairs come in the order asked for; a request that fails does not end the others."""
    requests = [request(n) for n in (3, -1, 1, 2)]

    async def once() -> list[int | str]:
        async with opened(address) as llm:
            async with llm.map(source(requests), limit=2, ordered=True) as results:
                return [
                    type(output).__name__
                    if isinstance(output, Exception)
                    else len(output.token_ids) * (given is requests[position])
                    async for position, (given, output) in enumerated(results)
                ]

    assert asyncio.run(once()) == [3, "InvalidFieldError", 1, 2]


async def enumerated(items: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    """What `enumerate` is for other iterators."""
    position = 0
    async for item in items:
        yield position, item
        position += 1


@on_asyncio
async def test_leaving_a_map_early_aborts(address: str) -> None:
    """What is in flight, and the wait for further requests; the loop goes on."""

    async def endless() -> AsyncIterator[GenerateRequest]:
        yield request(1)
        yield request(1_000_000)
        await asyncio.Event().wait()

    async with opened(address) as llm:
        async with llm.map(endless()) as results:
            async for _, output in results:
                assert not isinstance(output, Exception)
                assert len(output.token_ids) == 1
                break

        assert llm.trio.client.in_flight_count == 0
        assert len((await llm.generate(request(3))).token_ids) == 3


@on_asyncio
async def test_an_error_of_the_requests(address: str) -> None:
    """It comes out of the iteration, bare."""

    async def broken() -> AsyncIterator[GenerateRequest]:
        yield request(1)
        raise ZeroDivisionError

    async with opened(address) as llm:
        with pytest.raises(ZeroDivisionError):
            async with llm.map(broken()) as results:
                async for _ in results:
                    pass


@on_asyncio
async def test_spawned_engines(address: str) -> None:
    """They are for `open_llm`, and end with the block."""
    command = [sys.executable, "-m", "trio_vllm", "mock-engine", "--handshake-address", "{address}"]
    async with trio_vllm.asyncio.spawn_engine(command, handshake_address=address) as engine:
        async with trio_vllm.asyncio.open_llm(engine) as llm:
            assert len((await llm.generate(request())).token_ids) == 4

    assert len(asyncio.all_tasks()) == 1


@on_asyncio
async def test_a_command_that_cannot_start(address: str) -> None:
    """The error is that of trio's side."""
    with pytest.raises(EngineCommandError):
        async with trio_vllm.asyncio.spawn_engine(["/no/such/program", address]):
            pytest.fail("there is nothing to start")


@pytest.mark.parametrize(
    "door",
    [trio_vllm.asyncio.open_llm, trio_vllm.open_llm, trio_vllm.open_client],
    ids=["asyncio", "trio", "client"],
)
def test_opening_without_async_with(address: str, door: Callable[..., Any]) -> None:
    """What was forgotten is in the error."""
    opening = door(HandshakeOwner(handshake_address=address))

    async def wait() -> None:
        await opening

    name = door.__name__
    with pytest.raises(
        TypeError, match=rf"cannot be awaited: write `async with {name}\(\.\.\.\) as"
    ):
        asyncio.run(wait())
