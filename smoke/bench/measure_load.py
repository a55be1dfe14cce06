"""Benchmarks of `Llm` on a mock engine, next to vLLM's own client."""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.engines import mock_engine, python, raw_engine
from bench.figures import Figure, Target
from bench.frontend import ENVIRONMENT, Command, connected
from bench.loads import ping
from bench.turns import Effort, take_turns
from bench.workers import Worker, working
from harness import free_port
from processes import running
from provision import BUILT_VERSION, find_peers

ASYNC_LLM = "AsyncLLM"
CONCURRENCY = 256


def measure_load(effort: Effort) -> list[Figure]:
    """256 requests in flight, final only and streamed, next to vLLM's own client."""
    figures: list[Figure] = []
    with ours() as worker, theirs() as yardstick:
        for max_tokens, target in ((64, Target(8, "ratio")), (512, Target(6, "ratio"))):
            both = load(effort, worker, yardstick, "generate", max_tokens)
            figures += load_figures(f"generate {max_tokens} tokens", *both, target)
        samples, compared = load(effort, worker, yardstick, "stream", 128)
    figures += load_figures("stream 128 tokens", samples, compared)
    per_delivery = Figure(
        "stream 128 tokens: tokens at a time",
        "tokens",
        "more",
        [sample.tokens_per_delivery for sample in samples],
        ASYNC_LLM,
        [sample.tokens_per_delivery for sample in compared],
    )
    return [*figures, per_delivery]


@contextlib.contextmanager
def ours() -> Iterator[Worker]:
    """An `Llm` on a mock engine."""
    with on_engine(
        "Llm", mock_engine(), lambda port: [*python("bench.work_llm"), address(port)]
    ) as worker:
        yield worker


@contextlib.contextmanager
def theirs() -> Iterator[Worker | None]:
    """vLLM's own client on another one, if vLLM is there."""
    peers = find_peers(BUILT_VERSION)
    if peers is None:
        bar = "!" * 100
        print(
            bar, "vLLM IS NOT HERE: NO COMPARISON WITH ITS CLIENT", bar, sep="\n", file=sys.stderr
        )
        yield None
        return
    script = str(Path(__file__).with_name("work_asyncllm.py"))
    with on_engine(
        ASYNC_LLM,
        mock_engine(),
        lambda port: [peers.python, script, str(port), peers.model],
        peers.environment,
    ) as worker:
        yield worker


@contextlib.contextmanager
def on_engine(
    name: str,
    engine: Command,
    command: Callable[[int], Sequence[str | Path]],
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[Worker]:
    """Run a worker that waits for an engine on a port, and the engine."""
    port = free_port()
    with (
        working(name, command(port), environment) as worker,
        running(f"the engine of {name}", engine(address(port)), environment=ENVIRONMENT),
    ):
        worker.receive()  # it is ready
        yield worker


def address(port: int) -> str:
    """A handshake address."""
    return f"tcp://127.0.0.1:{port}"


@dataclasses.dataclass(frozen=True)
class Load:
    """What came of one."""

    requests: int
    deliveries: int
    seconds: float
    cpu_seconds: float
    max_tokens: int

    @property
    def requests_per_second(self) -> float:
        """By the wall clock."""
        return self.requests / self.seconds

    @property
    def cpu_seconds_per_million(self) -> float:
        """Of the client, for a million tokens."""
        return self.cpu_seconds / self.requests / self.max_tokens * 1e6

    @property
    def tokens_per_delivery(self) -> float:
        """How many a reader gets at a time."""
        return self.requests * self.max_tokens / self.deliveries


def load(
    effort: Effort, worker: Worker, yardstick: Worker | None, task: str, max_tokens: int
) -> tuple[list[Load], list[Load]]:
    """Put a load on both clients in turns."""
    seconds = 3.0 * effort.scale
    order = {"task": task, "concurrency": CONCURRENCY, "max_tokens": max_tokens, "seconds": seconds}

    def put_on(client: Worker) -> Load:
        return Load(**client.ask(**order), max_tokens=max_tokens)

    if yardstick is None:
        return [put_on(worker) for _ in range(1 + effort.rounds)][1:], []
    return take_turns(effort, lambda: put_on(worker), lambda: put_on(yardstick))


def load_figures(
    name: str, samples: list[Load], yardstick: list[Load], target: Target | None = None
) -> list[Figure]:
    """Speed and price."""
    return [
        Figure(
            f"{name}: speed",
            "requests/s",
            "more",
            [sample.requests_per_second for sample in samples],
            ASYNC_LLM,
            [sample.requests_per_second for sample in yardstick],
            target,
        ),
        Figure(
            f"{name}: CPU",
            "s/M tokens",
            "less",
            [sample.cpu_seconds_per_million for sample in samples],
            ASYNC_LLM,
            [sample.cpu_seconds_per_million for sample in yardstick],
        ),
    ]


def measure_round_trip(effort: Effort) -> list[Figure]:
    """One request of one token after the other, next to bare sockets that wait for each other."""
    count = effort.part(2000)
    with (
        ours() as worker,
        connected("the bare engine", raw_engine("--echo")) as bare,
    ):
        samples, yardstick = take_turns(
            effort,
            lambda: statistics.median(worker.ask(task="ping", count=count)["times"]) * 1e6,
            lambda: statistics.median(ping(bare, count)) * 1e6,
        )
    return [
        Figure(
            "round trip of one token",
            "µs",
            "less",
            samples,
            "bare ping-pong",
            yardstick,
            Target(2, "ratio"),
        )
    ]
