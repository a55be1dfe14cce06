"""Benchmarks of `Llm` on a mock engine, next to vLLM's own client."""

import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engines import mock_engine, python, raw_engine, step_engine
from bench.figures import Figure, Target
from bench.frontend import ENVIRONMENT, Command, connected
from bench.loads import ping
from bench.turns import Effort, in_turns, take_turns
from bench.workers import Worker, working
from harness import free_port
from processes import running
from provision import BUILT_VERSION, find_peers

ASYNC_LLM = "AsyncLLM"
MOCK = mock_engine()
CONCURRENCY = 256


def measure_load(effort: Effort) -> list[Figure]:
    """256 requests in flight, final only and streamed, next to vLLM's own client."""
    figures: list[Figure] = []
    with ours() as worker, theirs() as yardstick:
        for max_tokens, target in ((64, Target(8, "ratio")), (512, Target(6, "ratio"))):
            loads = load(effort, worker, yardstick, "generate", max_tokens)
            figures += load_figures(f"generate {max_tokens} tokens", *loads, target)
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
def ours(engine: Command = MOCK) -> Iterator[Worker]:
    """An `Llm` on an engine."""
    with on_engine(
        "Llm", engine, lambda port: [*python("bench.work_llm"), address(port)]
    ) as worker:
        yield worker


@contextlib.contextmanager
def theirs(engine: Command = MOCK) -> Iterator[Worker | None]:
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
        engine,
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
    positions: int
    """Tokens of a request that are counted."""

    @property
    def requests_per_second(self) -> float:
        """By the wall clock."""
        return self.requests / self.seconds

    @property
    def cpu_seconds_per_million(self) -> float:
        """Of the client, for a million tokens."""
        return self.cpu_seconds / self.requests / self.positions * 1e6

    @property
    def tokens_per_delivery(self) -> float:
        """How many a reader gets at a time."""
        return self.requests * self.positions / self.deliveries


Order = Mapping[str, Any]


def put_on(client: Worker, order: Order, positions: int) -> Load:
    """Give a client an order; of each request so many tokens are counted."""
    return Load(**client.ask(**order), positions=positions)


def both(
    effort: Effort, order: Order, worker: Worker, yardstick: Worker | None, positions: int
) -> tuple[list[Load], list[Load]]:
    """Give both clients the same order, in turns."""
    if yardstick is None:
        return [put_on(worker, order, positions) for _ in range(1 + effort.rounds)][1:], []
    return take_turns(
        effort,
        lambda: put_on(worker, order, positions),
        lambda: put_on(yardstick, order, positions),
    )


def load(
    effort: Effort, worker: Worker, yardstick: Worker | None, task: str, max_tokens: int
) -> tuple[list[Load], list[Load]]:
    """Put a load on both clients in turns."""
    seconds = 3.0 * effort.scale
    order = {"task": task, "concurrency": CONCURRENCY, "max_tokens": max_tokens, "seconds": seconds}
    return both(effort, order, worker, yardstick, max_tokens)


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
        cpu_figure(name, samples, yardstick, ASYNC_LLM),
    ]


def measure_rows(effort: Effort) -> list[Figure]:
    """Log probabilities, and messages of one row, next to vLLM's own client."""
    with ours(step_engine()) as worker, theirs(step_engine()) as yardstick:
        return [
            *logprobs_figures(effort, worker, yardstick),
            *prompt_logprobs_figures(effort, worker, yardstick),
            *single_row_figures(effort, worker, yardstick),
        ]


LOGPROBS = (0, 1, 5)
LOGPROBS_QUICKLY = (1,)
LOGPROBS_TOKENS = 64
LOGPROBS_SECONDS = 1.0


def logprobs_figures(effort: Effort, worker: Worker, yardstick: Worker | None) -> list[Figure]:
    """Tokens with log probabilities, next to those of vLLM's client, and to the same without."""
    figures: list[Figure] = []
    plain: Order = {
        "task": "generate",
        "concurrency": CONCURRENCY,
        "seconds": LOGPROBS_SECONDS * effort.scale,
        "max_tokens": LOGPROBS_TOKENS,
    }
    for count in LOGPROBS_QUICKLY if effort.is_quick else LOGPROBS:
        name, order = f"generate 64 tokens, logprobs={count}", {**plain, "logprobs": count}
        turns = [(worker, order), (worker, plain)]
        turns += [(yardstick, order)] if yardstick else []
        loads, without, *others = in_turns(
            effort, *(functools.partial(put_on, *turn, LOGPROBS_TOKENS) for turn in turns)
        )
        compared = others[0] if others else []
        figures += [
            cpu_figure(name, loads, compared, ASYNC_LLM, Target(0.15, "ratio")),
            cpu_figure(f"{name}, again", loads, without, "without", Target(2.5, "ratio")),
        ]
    return figures


PROMPT_LENGTH = 4000
PROMPT_CONCURRENCY = 16


def prompt_logprobs_figures(
    effort: Effort, worker: Worker, yardstick: Worker | None
) -> list[Figure]:
    """Log probabilities of long prompts."""
    order: Order = {
        "task": "generate",
        "concurrency": PROMPT_CONCURRENCY,
        "seconds": LOGPROBS_SECONDS * effort.scale,
        "max_tokens": 1,
        "prompt_length": PROMPT_LENGTH,
        "prompt_logprobs": 1,
    }
    loads = both(effort, order, worker, yardstick, PROMPT_LENGTH)
    name = "generate, prompts of 4,000 tokens, prompt_logprobs=1"
    return [cpu_figure(name, *loads, ASYNC_LLM, Target(0.15, "ratio"))]


STREAMS = 1024
STREAM_TOKENS = 32


def single_row_figures(effort: Effort, worker: Worker, yardstick: Worker | None) -> list[Figure]:
    """1,024 streams where each message has the token of one."""
    order: Order = {
        "task": "stream",
        "concurrency": STREAMS,
        "seconds": 2.0 * effort.scale,
        "max_tokens": STREAM_TOKENS,
        "extra_args": {"is_alone": True},
    }
    loads = both(effort, order, worker, yardstick, STREAM_TOKENS)
    return load_figures("1,024 streams, a token a message", *loads, Target(10, "ratio"))


ENGINES = (8, 64, 512)
MOST_QUICKLY = 64
"""More engines take a minute to get their requests."""

ROWS = 256
MESSAGES = 50
"""Rows of a message, and messages a second, that 64 engines shall need one core for."""


def measure_engines(effort: Effort) -> list[Figure]:
    """What a row costs if it comes from one of 8, 64 or 512 engines that answer like vLLM's."""
    rows, seconds = effort.part(ROWS), 4.0 * effort.scale
    figures: list[Figure] = []
    for count in ENGINES:
        if count > MOST_QUICKLY and effort.is_quick:
            continue
        # As many rows a second from all together: the engines share the machine with the client.
        interval = count / ENGINES[0] / MESSAGES * rows / ROWS
        engine = step_engine("--engines", str(count), "--interval", str(interval))
        command = [*python("bench.work_llm"), "{}", str(count)]
        with on_engine(
            f"Llm with {count} engines",
            engine,
            lambda port: [*command[:-2], address(port), command[-1]],  # noqa: B023  (called at once)
        ) as worker:
            answers = [
                worker.ask(task="hold", concurrency=rows * count, seconds=seconds)
                for _ in range(effort.rounds)
            ]
        costs = [answer["cpu_seconds"] / answer["tokens"] * 1e6 for answer in answers]
        first = figures[0].samples if figures else []
        target = Target(1.2, "ratio") if figures else None
        name = f"{count} engines, {rows} rows a message: CPU"
        figures.append(Figure(name, "µs/row", "less", costs, "8 engines", first, target))
    share = [cost * 64 * ROWS * MESSAGES / 1e4 for cost in figures[1].samples]
    name = f"64 engines, {MESSAGES} messages a second each: CPU"
    return [*figures, Figure(name, "% of a core", "less", share, target=Target(100.0))]


def cpu_figure(
    name: str,
    samples: Sequence[Load],
    compared: Sequence[Load],
    yardstick: str,
    target: Target | None = None,
) -> Figure:
    """What a token costs the client, or a position of the prompt."""
    return Figure(
        f"{name}: CPU",
        "s/M tokens",
        "less",
        [sample.cpu_seconds_per_million for sample in samples],
        yardstick,
        [sample.cpu_seconds_per_million for sample in compared],
        target,
    )


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
