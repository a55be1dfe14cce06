"""The door for asyncio: the same `Llm`, with trio as the guest of an asyncio loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
import trio

import trio_vllm.asyncio
from trio_vllm import (
    ClientClosedError,
    EncodeRequest,
    EngineCommandError,
    EngineDeadError,
    FinishReason,
    GenerateOutput,
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
from trio_vllm.testing import mock_llm, open_frontend

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
async def test_what_is_no_function_of_trio(address: str) -> None:
    """It is said what to do instead."""
    async with opened(address) as llm:
        with pytest.raises(TypeError, match="does not wait, so call it directly"):
            await llm.run_in_trio(llm.trio.client.statistics)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a coroutine function and its arguments"):
            await llm.run_in_trio(llm.trio.client.sleep(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"write `async with llm\.stream"):
            await llm.run_in_trio(llm.trio.stream, request())


@on_asyncio
async def test_what_is_no_request(address: str) -> None:
    """Each method says what it takes."""
    wrong: Any = [1, 2]
    async with opened(address) as llm:
        with pytest.raises(TypeError, match=r"generate takes a GenerateRequest\(...\), not a list"):
            await llm.generate(wrong)
        with pytest.raises(TypeError, match=r"encode takes an EncodeRequest\(...\), not a Gen"):
            await llm.encode(request())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="stream takes a GenerateRequest"):
            async with llm.stream(wrong):
                pytest.fail("there is no stream")
        with pytest.raises(TypeError, match="map takes a GenerateRequest"):
            async with llm.map([wrong]) as results:
                await anext(results)
        with pytest.raises(TypeError, match=r"write map\(\[request\]\)"):
            async with llm.map(request()):  # type: ignore[arg-type]
                pytest.fail("there is no map")
        with pytest.raises(TypeError, match=r"write `async with llm\.stream"):
            async for _ in llm.stream(request()):  # type: ignore[attr-defined]
                pytest.fail("there is no stream")


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


@pytest.mark.parametrize("name", ["open_llm", "spawn_engine"])
async def test_under_trio_it_says_so(name: str, address: str) -> None:
    """Trio's own programs have a function of the same name."""
    text = rf"{name}\(\.\.\.\) is for asyncio: under trio use trio_vllm\.{name}"
    with pytest.raises(RuntimeError, match=text):
        async with getattr(trio_vllm.asyncio, name)(HandshakeOwner(handshake_address=address)):
            pytest.fail("there is no asyncio loop")


@on_asyncio
async def test_doors_of_trio_under_asyncio(address: str) -> None:
    """Each says what to use instead, and leaves nothing open, also beside a guest run of trio's."""
    mode = HandshakeOwner(handshake_address=f"{address}2")
    doors: list[tuple[AbstractAsyncContextManager[object], str]] = [
        (trio_vllm.open_llm(mode), "use trio_vllm.asyncio.open_llm"),
        (trio_vllm.open_client(mode), "use trio_vllm.asyncio.open_llm, and its `llm.trio.client`"),
        (trio_vllm.spawn_engine(["engine", "{port}"]), "use trio_vllm.asyncio.spawn_engine"),
        (open_frontend(mode), "use trio.run in a thread"),
        (mock_llm(), "use trio_vllm.testing.mock_engine"),
    ]
    async with opened(address) as llm:
        doors.append((llm.trio.stream(request()), "use the Llm of trio_vllm.asyncio.open_llm"))
        doors.append((llm.trio.map([]), "use the Llm of trio_vllm.asyncio.open_llm"))
        for door, instead in doors:
            with pytest.raises(RuntimeError) as caught:
                async with door:
                    pytest.fail("this is not trio")
            assert str(caught.value).endswith(instead)
        options = ServeOptions(handshake_address=f"{address}2")
        with pytest.raises(RuntimeError, match=r"use trio_vllm\.testing\.mock_engine"):
            await serve_mock_engines(MockEngineConfig(), options)
    async with opened(f"{address}2") as llm:
        assert len((await llm.generate(request())).token_ids) == 4


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
async def test_a_map_without_engines(address: str) -> None:
    """It takes no further request once the client is closed."""
    requests = asynchronous([request(n) for n in (1, 1_000_000, 1_000_000, 1)])
    with mock_engines(address):
        mode = HandshakeOwner(handshake_address=address, ready_timeout=LIMIT)
        async with trio_vllm.asyncio.open_llm(mode) as llm:
            async with llm.map(requests, limit=2) as results:
                await anext(results)
                while llm.trio.client.in_flight_count < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await llm.shutdown()
                ends = [(await anext(results))[1] for _ in range(2)]
                with pytest.raises(ClientClosedError):
                    await anext(results)
                assert results.unanswered == []
    left = [each async for each in requests]

    assert [type(end) for end in ends] == [GenerateOutput, GenerateOutput]
    assert [each.sampling_params.max_tokens for each in left] == [1]


@on_asyncio
async def test_a_request_that_comes_as_the_map_ends(address: str) -> None:
    """What was taken too late to be sent is told, and so is what a cancelled wait had got."""
    late = request(1, "late")

    async def arriving() -> AsyncIterator[GenerateRequest]:
        yield request(1, "first")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # noqa: ASYNC103
            yield late  # noqa: ASYNC104

    async with opened(address) as llm:
        async with llm.map(arriving()) as results:
            while not llm.statistics().engines[0].totals.output_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(anext(results))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert [each.request_id for each in results.unanswered] == ["first"]
            first, _ = await anext(results)
            await llm.shutdown()
            with pytest.raises(ClientClosedError):
                await anext(results)
            assert results.unanswered == [late]

    assert first.request_id == "first"


@on_asyncio
async def test_a_map_whose_engine_is_killed(address: str) -> None:
    """The command is started again, and answers what was left."""
    command = [sys.executable, "-m", "trio_vllm", "mock-engine", "--step-interval", "2ms"]
    command += ["--handshake-address", "{address}", "--no-reconnect"]
    requests = [request(9, str(number)) for number in range(60)]
    done: list[str | None] = []
    starts = 0
    async with trio_vllm.asyncio.spawn_engine(command, restart=True) as mode:
        while len(done) < len(requests) and starts < 3:
            starts += 1
            left = [each for each in requests if each.request_id not in done]
            try:
                async with trio_vllm.asyncio.open_llm(mode) as llm, llm.map(left, limit=7) as got:
                    async for each, output in got:
                        assert isinstance(output, GenerateOutput)
                        done.append(each.request_id)
                        if len(done) == 20:
                            os.kill(mode.pid, signal.SIGKILL)
            except EngineDeadError:
                assert 1 <= len(got.unanswered) <= 7

    assert (sorted(map(int, filter(None, done))), starts) == ([*range(60)], 2)


@on_asyncio
async def test_a_map_in_order_whose_engine_is_killed(address: str) -> None:
    """What has come is the beginning of the requests; all others are unanswered, or not taken."""
    command = [sys.executable, "-m", "trio_vllm", "mock-engine", "--step-interval", "2ms"]
    command += ["--handshake-address", "{address}", "--no-reconnect"]
    # The third is under way for long, while those behind it are answered.
    requests = [request(1_000_000 if number == 2 else 1, str(number)) for number in range(9)]
    given = iter(requests)
    done: list[str | None] = []
    async with trio_vllm.asyncio.spawn_engine(command) as mode:
        with pytest.raises(EngineDeadError):
            async with trio_vllm.asyncio.open_llm(mode) as llm:
                async with llm.map(given, limit=5, ordered=True) as got:
                    async for each, _ in got:
                        done.append(each.request_id)
                        if len(done) == 2:
                            while llm.statistics().in_flight > 1:  # noqa: ASYNC110
                                await asyncio.sleep(0.001)
                            os.kill(mode.pid, signal.SIGKILL)

    assert done == ["0", "1"]
    assert [each.request_id for each in [*got.unanswered, *given]] == [*"2345678"]


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
        assert (engine.handshake_address, [*engine.engine_indices]) == (address, [0])
        assert engine.is_for_one_client
        os.kill(engine.pid, signal.SIGKILL)
        assert (await engine.wait_ended()).startswith("the engine command died of SIGKILL")
        assert any("serving 1 client(s)" in line for line in engine.log)

    assert len(asyncio.all_tasks()) == 1


@on_asyncio
async def test_a_command_that_cannot_start(address: str) -> None:
    """The error is that of trio's side."""
    with pytest.raises(EngineCommandError):
        async with trio_vllm.asyncio.spawn_engine(["/no/such/program", address]):
            pytest.fail("there is nothing to start")


def test_the_signature_is_that_of_trio() -> None:
    """Options and their defaults; but for the value."""
    ours, theirs = map(inspect.signature, (trio_vllm.asyncio.open_llm, trio_vllm.open_llm))

    assert ours.parameters == theirs.parameters
    assert ours.return_annotation == "AbstractAsyncContextManager[Llm]"


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
