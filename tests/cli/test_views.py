"""What is shown of mock engines while they run: metrics over HTTP, a table on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from trio.testing import memory_stream_pair

from trio_vllm import GenerateRequest, HandshakeOwner, SamplingParams, open_llm
from trio_vllm.cli.exporter import StateServer
from trio_vllm.cli.live_view import Rates, table_of
from trio_vllm.cli.mock_engine import main
from trio_vllm.cli.mock_processes import state_reports
from trio_vllm.mock import EngineStatus, EngineStatuses, Summary
from trio_vllm.processes import LONGEST_LINE

BUSY = EngineStatus(
    engine_index=3,
    is_joined=True,
    running=2,
    waiting=1,
    kv_cache_usage=0.25,
    summary=Summary(
        requests=9,
        tokens=50,
        errors=1,
        prompt_tokens=70,
        prefilled_tokens=60,
        preemptions=5,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
        tokens_asked=80,
        seconds_behind=1.5,
        finish_reasons={"length": 4, "abort": 2},
    ),
)
IDLE = EngineStatus(engine_index=4)


def states_of(*states: EngineStatus) -> EngineStatuses:
    """What is known of engines elsewhere."""
    known = EngineStatuses()
    known.take(states)
    return known


def samples(text: str) -> dict[tuple[str, ...], float]:
    """The numbers of a page of metrics, by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics() -> None:
    """Under vLLM's names where the thing is the same."""
    page = StateServer(states_of(BUSY, IDLE)).page("GET", "/metrics?name=x")

    got = samples(page.body.decode())
    assert page.status == 200
    assert {name[0]: value for name, value in got.items() if name[1:] == ("3",)} == {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 1,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 60,
        "vllm:num_preemptions_total": 5,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 40,
        "vllm:generation_tokens_total": 50,
        "mock_engine:joined": 1,
        "mock_engine:requests_total": 9,
        "mock_engine:asked_tokens_total": 80,
        "mock_engine:errors_total": 1,
        "mock_engine:seconds_behind_total": 1.5,
    }
    assert got["vllm:request_success_total", "3", "length"] == 4
    assert got["vllm:request_success_total", "3", "abort"] == 2
    assert got["mock_engine:joined", "4"] == 0


@pytest.mark.parametrize(
    ("path", "states", "status"),
    [("/healthz", [IDLE], 200), ("/readyz", [IDLE, BUSY], 503), ("/readyz", [BUSY], 200)],
)
def test_health(path: str, states: list[EngineStatus], status: int) -> None:
    """It lives if it answers, and is ready if all engines have a frontend."""
    page = StateServer(states_of(*states)).page("GET", path)

    joined = sum(state.is_joined for state in states)
    assert page.status == status
    assert json.loads(page.body) == {"engines": len(states), "joined": joined}


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"200", b'{"engines": 1, "joined": 0}\n'),
        (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"200", b""),
        (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n", b"404", b"there are /metrics"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"405", b"only GET\n"),
        (b"\x16\x03\x01\r\n\r\n", b"400", b"that is no HTTP request\n"),
    ],
)
async def test_http(request_bytes: bytes, status: bytes, body: bytes) -> None:
    """One answer for each connection."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(StateServer(states_of(IDLE)).answer, theirs)
        await ours.send_all(request_bytes)
        answer = b"".join([part async for part in ours])

    head, _, got = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert got.startswith(body)
    assert bool(got) == bool(body)


async def test_http_without_a_request(autojump_clock: trio.testing.MockClock) -> None:
    """Who connects and says nothing is not waited for, nor who leaves."""
    ours, theirs = memory_stream_pair()
    await StateServer(states_of(IDLE)).answer(theirs)
    assert trio.current_time() == 5
    await ours.aclose()

    ours, theirs = memory_stream_pair()
    await ours.aclose()
    await StateServer(states_of(IDLE)).answer(theirs)
    assert trio.current_time() == 5


def test_table() -> None:
    """A row for each engine that fits, and one for all."""
    rates = Rates()
    later = attrs.evolve(BUSY, summary=attrs.evolve(BUSY.summary, tokens=90))
    table_of([BUSY, IDLE], rates, 10.0, rows=9)
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of([later, IDLE], rates, 12.0, rows=1))
    assert isinstance(console.file, io.StringIO)

    rows = [re.findall(r"[^│┃\s]+", line) for line in console.file.getvalue().splitlines()]
    assert ["3", "yes", "2", "1", "20", "25.0%"] in rows
    assert ["all", "2", "1", "2", "1", "20", "25.0%", "at", "most"] in rows
    assert not any(row[:2] == ["4", "no"] for row in rows)


# The command --------------------------------------------------------------------------------------


@contextmanager
def mock_engine(*tokens: str, **options: int) -> Iterator[subprocess.Popen[str]]:
    """Run the command while the block runs."""
    command = [sys.executable, "-m", "trio_vllm", "mock-engine", *tokens]
    with subprocess.Popen(command, text=True, **{"stderr": subprocess.PIPE, **options}) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def get(url: str) -> tuple[int, str]:
    """The status and the page of a URL."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_metrics_of_the_command(address: str, processes: str) -> None:
    """At a port of the system's choice, also of engines in several processes."""
    tokens = ["--handshake-address", address, "--engine-count", "2", "--processes", processes]
    mode = HandshakeOwner(handshake_address=address, engine_count=2, ready_timeout=60)
    request = GenerateRequest(
        prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=7)
    )
    with mock_engine(*tokens, "--metrics-port", "0", "--metrics-host", "127.0.0.2") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        found = next(filter(None, (re.search("http://127.0.0.2:[0-9]+", line) for line in lines)))

        async def fetch(path: str) -> tuple[int, str]:
            return await trio.to_thread.run_sync(get, found[0] + path)

        assert (await fetch("/healthz"))[0] == 200
        async with open_llm(mode) as llm:
            for _ in range(4):
                await llm.generate(request)
            status = 503
            while status != 200:
                status, _page = await fetch("/readyz")
            tokens_made = 0.0
            while tokens_made < 28:
                _, page = await fetch("/metrics")
                got = samples(page)
                tokens_made = sum(got["vllm:generation_tokens_total", str(n)] for n in range(2))
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()

    assert tokens_made == 28
    assert sum(got["vllm:prompt_tokens_total", str(n)] for n in range(2)) == 12
    assert "summary: requests=4 tokens=28 " in rest
    assert " prompt_tokens=12 tokens_asked=28 seconds_behind=0.000" in rest


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Is a failure, in one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tokens = ["--handshake-address", "tcp://127.0.0.1:1", "--metrics-port", str(port)]

        assert main(tokens) == 1

    assert "mock-engine: [Errno 98]" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_live(address: str, processes: str) -> None:
    """One table on the terminal, with the log of all processes above it."""
    ours, theirs = pty.openpty()
    tokens = ["--handshake-address", address, "--engine-count", "2", "--live"]
    shown = b""
    with mock_engine(*tokens, "--processes", processes, stderr=theirs) as process:
        os.close(theirs)
        while shown.count(b"joining the frontend") < int(processes) or b"all 2" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGTERM)
        process.wait()
    os.close(ours)

    text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", shown.decode())  # without colours and cursor moves
    for heading in ("running", "waiting", "tokens/s", "KV cache"):
        assert heading in text
    for line in re.findall("[^\r\n]*joining the frontend", text):
        assert re.match(r"\d{4}-\d\d-\d\d \S+ INFO engine", line)


def test_states_of_many_engines() -> None:
    """Each line of another process is short enough to be kept until it is whole."""
    states = [attrs.evolve(BUSY, engine_index=index) for index in range(1000)]

    reports = list(state_reports(states))

    assert [state["engine_index"] for report in reports for state in report["states"]] == list(
        range(1000)
    )
    assert max(len(json.dumps(report)) for report in reports) < LONGEST_LINE


def test_live_without_a_terminal(address: str) -> None:
    """It says so, and serves."""
    with mock_engine("--handshake-address", address, "--live") as process:
        assert process.stderr is not None
        text = "--live shows nothing, since standard error is no terminal"
        assert any(text in line for line in iter(process.stderr.readline, ""))
