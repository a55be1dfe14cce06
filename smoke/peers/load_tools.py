"""Behind both real frontends, two public load tools measure the times that mock engines were asked for.

Each frontend has three engines, one of which answers at once: what the tool measures there to the first token is
the frontend's own share and the tool's. To the others, which have the same way, it must add what they were
asked for, by the request and by the step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from harness import (
    PARSERS,
    CheckError,
    free_port,
    mock_engine,
    ok,
    python_frontend,
    rust_frontend,
)
from load_tools import PROMPT_TOKENS, GuideLlm, Load, LoadTool, Measured, Run, VllmBench
from processes import Process
from provision import Peers

TOLERANCES = (0.03, 0.03, 0.1)
"""Part of a time that it may be off, by the attempt: a machine with much else to do is not that exact."""

TTFT = 200.0
"""Milliseconds to the first token. Of much less, the tolerance would be what a busy machine needs to wake a
process."""

TPOT = 20.0
"""Milliseconds between two tokens, of all engines."""

STEP, REQUEST, PREFILL_TOKEN = 15.0, 5.0, 8.0
"""Milliseconds of a step, and more of it for each request that decodes and token of a prompt."""

BUDGET = 8
"""Tokens of a step, so that each prompt takes some."""

TOOL_TIMEOUT = 200.0

OPEN = Load(count=36, output_tokens=30, rate=6)
CLOSED = Load(count=15, output_tokens=12)


@dataclass(frozen=True)
class Engine:
    """A mock engine with its options, the load for it, and how long after it the first token comes."""

    what: str
    options: tuple[str, ...]
    load: Load
    ttft: float


ENGINES = (
    Engine("no time", ("--inter-token-latency", f"{TPOT}ms"), OPEN, 0.0),
    Engine(
        "times of a request",
        ("--time-to-first-token", f"{TTFT}ms", "--inter-token-latency", f"{TPOT}ms"),
        OPEN,
        TTFT,
    ),
    Engine(
        "times of a step",
        (
            *("--step-time", f"{STEP}ms", "--step-time-per-request", f"{REQUEST}ms"),
            *("--step-time-per-prefill-token", f"{PREFILL_TOKEN}ms"),
            *("--max-num-batched-tokens", f"{BUDGET}", "--max-num-seqs", "4"),
            "--no-enable-prefix-caching",
        ),
        CLOSED,
        STEP * -(-PROMPT_TOKENS // BUDGET) + PREFILL_TOKEN * PROMPT_TOKENS,
    ),
)


@dataclass(frozen=True)
class Server:
    """A frontend, and its engines."""

    name: str
    port: int
    mocks: tuple[Process, ...]

    def runs(self) -> list[Run]:
        """A load for each engine."""
        return [Run(self.port, rank, engine.load) for rank, engine in enumerate(ENGINES)]


def main(peers: Peers) -> None:
    """Start both frontends, then let each tool measure both."""
    with running_servers(peers) as servers:
        for tool in (VllmBench(peers), GuideLlm(peers)):
            begin = time.monotonic()
            check_tool(tool, servers)
            ok(tool.name, time.monotonic() - begin)


@contextmanager
def running_servers(peers: Peers) -> Iterator[list[Server]]:
    """Both frontends with their engines, ready."""
    with ExitStack() as until_end:
        servers, frontends = [], []
        for name, start, options in (
            ("Python", python_frontend, ("--api-server-count", "1")),
            ("Rust", rust_frontend, PARSERS),
        ):
            handshake, http = free_port(), free_port()
            size = ("--data-parallel-size", f"{len(ENGINES)}")
            frontend = start(peers, handshake, http, *options, *size)
            frontends.append(until_end.enter_context(frontend))
            mocks = [until_end.enter_context(engine) for engine in engines(handshake)]
            servers.append(Server(name, http, tuple(mocks)))
        for server, process in zip(servers, frontends, strict=True):
            process.wait_for_http(f"http://127.0.0.1:{server.port}/health", 180)
        yield servers


def engines(handshake: int) -> list[AbstractContextManager[Process]]:
    """The mock engines of one frontend, to be entered."""
    return [
        mock_engine(
            handshake,
            *("--engine-start-index", f"{rank}", "--max-model-len", "2048", *engine.options),
        )
        for rank, engine in enumerate(ENGINES)
    ]


def check_tool(tool: LoadTool, servers: list[Server]) -> None:
    """Measure, and again where something is wrong: other work on the machine can make a whole run late.

    Then it is also allowed for what the machine adds, as the tool measures it where nothing was asked for.
    """
    wrong, found = servers, list[str]()
    for attempt, tolerance in enumerate(TOLERANCES):
        runs = [run for server in wrong for run in server.runs()]
        measured = tool.measure(runs, TOOL_TIMEOUT)
        for server in wrong:
            print(f"{tool.name}, {server.name} frontend: {table(server, measured)}", flush=True)
        by_server = [
            (server, faults(server, measured, tolerance, with_jitter=attempt > 0))
            for server in wrong
        ]
        wrong = [server for server, its_faults in by_server if its_faults]
        found = [fault for _, its_faults in by_server for fault in its_faults]
        if not wrong:
            return
        print(f"attempt {attempt + 1}, {tool.name}: {'; '.join(found)}", flush=True)
    raise CheckError(f"{tool.name}: {'; '.join(found)}")


def faults(
    server: Server, measured: dict[Run, Measured], tolerance: float, *, with_jitter: bool
) -> list[str]:
    """What is not as it was asked for."""
    runs = server.runs()
    share = measured[runs[0]]
    jitter = share.jitter if with_jitter else 0.0
    found = []
    for engine, run, mock in zip(ENGINES, runs, server.mocks, strict=True):
        got, gaps = measured[run], engine.load.output_tokens - 1
        for what, value, expected, late in (
            ("TTFT without the frontend's", got.ttft - share.ttft, engine.ttft, jitter),
            ("TPOT", got.tpot, TPOT, jitter / gaps),
        ):
            if abs(value - expected) > tolerance * expected + late:
                found.append(
                    f"{server.name} frontend, {engine.what}: {what} {value:.2f} ms, not {expected:g}"
                    f" (the mock was {seconds_behind(mock):.3f} s behind)"
                )
    return found


def seconds_behind(mock: Process) -> float:
    """How much the machine was too slow for the mock, as that says."""
    return sum(float(seconds) for seconds in re.findall(r": ([\d.]+) s behind", mock.log()))


def table(server: Server, measured: dict[Run, Measured]) -> str:
    """What was measured of each engine, in one line."""
    figures = [
        (engine.what, measured[run]) for engine, run in zip(ENGINES, server.runs(), strict=True)
    ]
    return ", ".join(
        f"{what}: TTFT {got.ttft:.1f} (median {got.median_ttft:.1f}), TPOT {got.tpot:.2f} ms"
        for what, got in figures
    )
