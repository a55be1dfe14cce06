"""``mock-engine --processes``: the same engines, and they live and die together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.cli.test_mock_engine import end, mock_engine, owner, parsed, refused, until
from tests.proc import children_of, is_alive, started

from trio_vllm import (
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    SamplingParams,
    open_client,
)
from trio_vllm.cli.mock_options import MockOptions
from trio_vllm.cli.mock_processes import serve_in_processes, shares
from trio_vllm.client import OutputStream
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines
from trio_vllm.processes import ProcessFailedError

SUMMARY = re.compile(r"(?m)^\S+ \S+ INFO summary: (.*) tokens_per_second=\d+ (.* errors=\d+) .*$")


def request_for(request_id: str, engine: int, max_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        data_parallel_rank=engine,
    )


async def tokens_of(
    client: EngineCoreClient, request_id: str, engine: int, max_tokens: int = 5
) -> list[int]:
    """What an engine generates."""
    tokens: list[int] = []
    async with client.call(request_for(request_id, engine, max_tokens)) as outputs:
        async for delivered in outputs:
            tokens += delivered.output.new_token_ids
    return tokens


@asynccontextmanager
async def begun(
    client: EngineCoreClient, engine: int, max_tokens: int
) -> AsyncIterator[OutputStream]:
    """A request that is being served."""
    async with client.call(request_for(f"request of {engine}", engine, max_tokens)) as outputs:
        await anext(outputs)
        yield outputs


@asynccontextmanager
async def serving(
    address: str, processes: int, *tokens: str, engines: int = 3
) -> AsyncIterator[tuple[subprocess.Popen[str], EngineCoreClient]]:
    """The command, and a frontend that all its engines have joined."""
    count = ("--engine-count", str(engines), "--processes", str(processes))
    with mock_engine("--handshake-address", address, *count, *tokens) as process:
        async with open_client(owner(address, engines)) as client:
            yield process, client


async def ended(process: subprocess.Popen[str], *signals: int) -> tuple[int, str]:
    """Exit code and log, after signals."""
    return await trio.to_thread.run_sync(end, process, *signals)


# What they are ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "count", "processes", "expected"),
    [
        (0, 4, 2, ["engines 0 to 1", "engines 2 to 3"]),
        (4, 5, 2, ["engines 4 to 6", "engines 7 to 8"]),
        (0, 3, 3, ["engine 0", "engine 1", "engine 2"]),
        (0, 7, 3, ["engines 0 to 2", "engines 3 to 4", "engines 5 to 6"]),
    ],
)
def test_engines_are_spread_evenly(
    start: int, count: int, processes: int, expected: list[str]
) -> None:
    """Neighbours stay together; all else is the same for all."""
    options = MockOptions.of(
        engine_start_index=start, engine_count=count, processes=processes, seed=7, max_loras=2
    )

    found = list(shares(options))

    assert [share.serving.engines_in_words for share in found] == expected
    assert {(share.engine.seed, share.engine.max_loras, share.processes) for share in found} == {
        (7, 2, 1)
    }


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["--processes", "2"], "--processes 2 is more than --engine-count"),
        (["--processes", "5", "--engine-count", "4"], "--processes 5 is more than --engine-count"),
        (["--processes", "0"], "--processes"),
        (["--processes", "2", "--engine-count", "2", "--lockstep"], "--lockstep"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], tokens: Sequence[str], reason: str
) -> None:
    """Is refused before anything is started."""
    assert reason in refused(capsys, *tokens)


def test_one_process_may_be_in_lockstep() -> None:
    """And as many processes as engines are not too many."""
    assert parsed("--engine-count", "2", "--lockstep").engine.lockstep
    assert parsed("--engine-count", "2", "--processes", "2").processes == 2


async def test_the_same_tokens_from_any_number_of_processes(address: str) -> None:
    """Every engine is there once, under its index, and in a process that was asked for."""
    options = ServeOptions(handshake_address=address, engine_count=3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_mock_engines, MockEngineConfig(seed=7), options)
        async with open_client(owner(address, 3)) as client:
            expected = [await tokens_of(client, "a", engine) for engine in range(3)]
        nursery.cancel_scope.cancel()
    assert len({tuple(tokens) for tokens in expected}) == 3

    for processes in (2, 3):
        async with serving(address, processes, "--seed", "7") as (process, client):
            assert processes == len(children_of(process.pid))
            assert [await tokens_of(client, "a", engine) for engine in range(3)] == expected


async def test_workers_get_the_options_and_nothing_else(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the environment is read again, nor the folder searched for modules."""
    file = tmp_path / "mock.toml"
    file.write_text("processes = 3\nengine-start-index = 2\nvocab-size = 1\nlog-requests = true\n")
    (tmp_path / "trio.py").write_text("raise ImportError")
    monkeypatch.setenv("MOCK_ENGINE_CONFIG", str(file))
    monkeypatch.setenv("MOCK_ENGINE_PROCESSES", "2")
    monkeypatch.setenv("MOCK_ENGINE_ENGINE_START_INDEX", "0")
    command = [
        sys.executable,
        "-P",
        "-c",
        "from trio_vllm.cli import run_mock_engine as run; run()",
    ]
    tokens = ["--handshake-address", address, "--engine-count", "2"]
    with started([*command, *tokens], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        async with open_client(owner(address, 2)) as client:
            assert len(children_of(process.pid)) == 2
            assert await tokens_of(client, "a", 0, 3) == [0, 0, 0]
            assert await tokens_of(client, "b", 1, 3) == [0, 0, 0]
            exit_code, log = await ended(process, signal.SIGINT)

    assert exit_code == 0
    assert "engine 1: request finished request_id=b" in log


# How they end -----------------------------------------------------------------------------------


async def test_a_signal_ends_all_with_one_summary(address: str) -> None:
    """Its counts are the sums, and log lines are whole. Workers leave signals to their parent."""
    async with serving(address, 2, "--log-requests") as (process, client):
        workers = children_of(process.pid)
        for worker in workers:
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(tokens_of, client, f"r{number}", number % 3)
        code, log = await ended(process, signal.SIGINT)

    assert code == 0
    assert SUMMARY.findall(log) == [("requests=30 tokens=150", "finished=30 aborted=0 errors=0")]
    assert all(re.match(r"\d{4}-\d\d-\d\d \S+ INFO ", line) for line in log.splitlines())
    for engine in range(3):
        assert len(re.findall(f"(?m)INFO engine {engine}: request finished .*length$", log)) == 10
    assert not any(map(is_alive, workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_whole_group(address: str, number: signal.Signals) -> None:
    """As from Ctrl-C; even the youngest worker leaves it to its parent."""
    tokens = ("--handshake-address", address, "--engine-count", "2", "--processes", "2")
    with mock_engine(*tokens, start_new_session=True) as process:
        assert process.stderr is not None
        assert "engine 0: in process" in process.stderr.readline()
        assert "engine 1: in process" in process.stderr.readline()
        os.killpg(process.pid, number)
        code, log = end(process)

    assert code == 0
    assert len(SUMMARY.findall(log)) == 1
    assert "Traceback" not in log


async def test_requests_may_end_first(address: str) -> None:
    """A closed pipe asks for what a signal does to one process."""
    life = ("--step-interval", "0.01", "--shutdown-timeout", "60")
    async with serving(address, 2, *life) as (process, client):
        async with begun(client, 0, 20) as first, begun(client, 2, 20) as last:
            code, log = await ended(process, signal.SIGTERM)
            for outputs in (first, last):
                *_, final = [delivered.output async for delivered in outputs]
                assert final.finish_reason is FinishReason.LENGTH

    assert code == 0
    assert SUMMARY.findall(log) == [("requests=2 tokens=40", "finished=2 aborted=0 errors=0")]


async def test_a_second_signal_ends_all_at_once(address: str) -> None:
    """Nothing is waited for, so there is no summary."""
    life = ("--step-interval", "0.01", "--shutdown-timeout", "600")
    async with serving(address, 2, *life) as (process, client):
        workers = children_of(process.pid)
        async with begun(client, 0, 1_000_000):
            process.send_signal(signal.SIGINT)
            # That the worker without requests ends tells that the first signal has come.
            await until(lambda: not all(map(is_alive, workers)))
            assert any(map(is_alive, workers))
            code, log = await ended(process, signal.SIGINT)

    assert code == 0
    assert SUMMARY.findall(log) == []
    assert not any(map(is_alive, workers))


async def test_a_worker_that_is_killed_ends_all(address: str) -> None:
    """One line says which engines that were, and what of."""
    async with serving(address, 2) as (process, _):
        workers = children_of(process.pid)
        os.kill(workers[1], signal.SIGKILL)
        code, log = await ended(process)

    assert code == 1
    assert log.splitlines()[-1] == "mock-engine: the process of engine 2 died of SIGKILL"
    assert log.count("mock-engine: ") == 1
    assert not any(map(is_alive, workers))


async def test_no_worker_survives_its_parent(address: str) -> None:
    """They are killed with it: requests are not ended in order, their engines are dead."""
    async with serving(address, 2, "--step-interval", "0.01") as (process, client):
        workers = children_of(process.pid)
        async with begun(client, 0, 1_000_000) as outputs:
            assert [is_alive(worker) for worker in workers] == [True, True]
            process.kill()
            await until(lambda: not any(map(is_alive, workers)))
            with pytest.raises(EngineDeadError, match="engine 0 is dead: its connection was lost"):
                async for _ in outputs:
                    pass
        code, log = await ended(process)

    assert code == -signal.SIGKILL
    assert "Traceback" not in log


async def test_the_failure_of_an_engine_ends_all(address: str) -> None:
    """It is told as one process would tell it: which engine, and why."""
    tokens = ("--handshake-address", address, "--engine-count", "3", "--no-reconnect")
    with mock_engine(*tokens, "--processes", "2") as process:
        async with open_client(owner(address, 3)) as client:
            assert len(await tokens_of(client, "a", 2)) == 5
        code, log = await ended(process)

    assert code == 1
    last = log.splitlines()[-1]
    assert re.fullmatch(r"mock-engine: engine [012] is dead: the frontend has gone \(.*\)", last)
    assert log.count("mock-engine: ") == 1


def options_for(address: str, **options: Any) -> MockOptions:
    return MockOptions.of(handshake_address=address, engine_count=3, processes=2, **options)


@pytest.mark.parametrize("is_ending", [False, True])
async def test_a_worker_that_does_not_get_to_its_engines(address: str, is_ending: bool) -> None:
    """Has failed, also if it was to end anyway."""
    shutdown = trio.Event()
    if is_ending:
        shutdown.set()

    with pytest.raises(ProcessFailedError, match=r"the process of engines? [0-9 to]+ ended with 1"):
        await serve_in_processes(
            options_for(address), shutdown=shutdown, worker=(sys.executable, "-c", "exit(1)")
        )


async def test_a_worker_that_cannot_be_started(address: str) -> None:
    """Has failed; signals get through again."""
    reason = "cannot start the process of engines 0 to 1: No such file or directory"

    with pytest.raises(ProcessFailedError, match=reason):
        await serve_in_processes(
            options_for(address), shutdown=trio.Event(), worker=["/no/such/python"]
        )

    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


async def test_a_worker_that_does_not_end_is_killed(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When its time is over."""
    caplog.set_level("INFO", "trio_vllm.mock")
    shutdown = trio.Event()
    workers: list[int] = []
    async with trio.open_nursery() as nursery:

        async def freeze() -> None:
            async with open_client(owner(address, 3)):
                workers.extend(map(int, re.findall(r"in process (\d+)", caplog.text)))
                os.kill(workers[0], signal.SIGSTOP)
                shutdown.set()
                await until(lambda: not any(map(is_alive, workers)))

        nursery.start_soon(freeze)
        with pytest.raises(ProcessFailedError, match="the process of engines 0 to 1 did not end"):
            await serve_in_processes(options_for(address), shutdown=shutdown, grace=0.1)

    assert len(workers) == 2
