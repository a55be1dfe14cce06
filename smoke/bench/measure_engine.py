"""Benchmarks of ``mock-engine``, from the other side of the wire."""

import time
from typing import Any

from bench.engines import mock_engine, raw_engine
from bench.figures import Figure, Target
from bench.frontend import Command, connected
from bench.loads import Burst, burst, churn, pace
from bench.meters import cpu_seconds, resident_bytes
from bench.turns import Effort, take_turns

BURSTS = {
    1: (0.35, 8.0),
    16: (0.5, None),
    64: (0.5, 0.15),
    256: (0.6, 0.06),
    1024: (0.6, 0.04),
}
"""By concurrency: of the bare engine's tokens per second, and CPU seconds per million tokens."""

GROUP = 1000
"""Requests that are sent before it is looked whether the engine has got them."""

BARE_ENGINE = "bare engine"


def measure_burst(effort: Effort) -> list[Figure]:
    """All requests at once: how fast tokens come, and what a million of them costs."""
    figures: list[Figure] = []
    with (
        connected("mock-engine", mock_engine()) as ours,
        connected("the bare engine", raw_engine("--gather", "0.1")) as bare,
    ):
        for concurrency, (share, cpu) in BURSTS.items():
            tokens = effort.part(200_000 if concurrency == 1 else 2_000_000)
            samples, yardstick = take_turns(
                effort,
                lambda: burst(ours, concurrency, tokens),  # noqa: B023  (called at once)
                lambda: burst(bare, concurrency, tokens),  # noqa: B023
            )
            figures += [
                burst_figure(f"burst of {concurrency}", samples, BARE_ENGINE, yardstick, share),
                Figure(
                    f"burst of {concurrency}: CPU",
                    "s/M tokens",
                    "less",
                    [sample.cpu_seconds_per_million for sample in samples],
                    BARE_ENGINE,
                    [sample.cpu_seconds_per_million for sample in yardstick],
                    Target(cpu) if cpu else None,
                ),
            ]
    return figures


def measure_churn(effort: Effort) -> list[Figure]:
    """Short requests that come and go, 256 at a time."""
    seconds = 2.0 * effort.scale
    with (
        connected("mock-engine", mock_engine()) as ours,
        connected("the bare engine", raw_engine()) as bare,
    ):
        samples, yardstick = take_turns(
            effort,
            lambda: churn(ours, 256, 16, seconds),
            lambda: churn(bare, 256, 16, seconds),
        )
    return [
        Figure(
            "churn of 256, 16 tokens: speed",
            "requests/s",
            "more",
            [sample.requests_per_second for sample in samples],
            BARE_ENGINE,
            [sample.requests_per_second for sample in yardstick],
            Target(15_000),
        ),
        Figure(
            "churn of 256, 16 tokens: CPU",
            "ms/request",
            "less",
            [sample.cpu_milliseconds_per_request for sample in samples],
            BARE_ENGINE,
            [sample.cpu_milliseconds_per_request for sample in yardstick],
            Target(0.06),
        ),
    ]


# A stop token that is never drawn: all requests shall have the same length.
MIXED: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"stop_token_ids": [32_000]},
    {"presence_penalty": 1.0},
)


def mixed(number: int) -> dict[str, Any]:
    """Every tenth request asks for something besides its tokens."""
    return MIXED[number // 10 % len(MIXED)] if number % 10 == 0 else {}


def measure_engine_logprobs(effort: Effort) -> list[Figure]:
    """Tokens with log probabilities, and a tenth of such requests beside others."""
    tokens = effort.part(400_000)  # to unpack them takes longest
    figures: list[Figure] = []
    with (
        connected("mock-engine", mock_engine()) as ours,
        connected("the bare engine", raw_engine("--gather", "0.1")) as bare,
    ):
        for concurrency in (64, 256):
            samples, yardstick = take_turns(
                effort,
                lambda: burst(ours, concurrency, tokens, lambda _: {"logprobs": 1}),  # noqa: B023
                lambda: burst(bare, concurrency, tokens, lambda _: {"logprobs": 1}),  # noqa: B023
            )
            figures.append(
                burst_figure(
                    f"mock with logprobs, {concurrency}", samples, BARE_ENGINE, yardstick, 0.4
                )
            )
        samples, yardstick = take_turns(
            effort, lambda: burst(ours, 256, tokens, mixed), lambda: burst(ours, 256, tokens)
        )
    return [*figures, burst_figure("mixed, 256", samples, "only tokens", yardstick, 0.8)]


def burst_figure(
    name: str, samples: list[Burst], yardstick: str, compared: list[Burst], share: float
) -> Figure:
    """The speed of bursts."""
    return Figure(
        f"{name}: speed",
        "tokens/s",
        "more",
        [sample.tokens_per_second for sample in samples],
        yardstick,
        [sample.tokens_per_second for sample in compared],
        Target(share, "ratio"),
    )


SCHEDULED = ("--schedule", "--max-num-seqs", "1000", "--max-num-batched-tokens", "8192")


def measure_schedule(effort: Effort) -> list[Figure]:
    """256 requests that are scheduled and cached, all at once and of 128 tokens that come and go."""
    tokens, seconds = effort.part(2_000_000), 2.0 * effort.scale
    with (
        connected("with a schedule", mock_engine(1, *SCHEDULED)) as scheduled,
        connected("without", mock_engine()) as unlimited,
    ):
        bursts = take_turns(
            effort, lambda: burst(scheduled, 256, tokens), lambda: burst(unlimited, 256, tokens)
        )
        churns = take_turns(
            effort,
            lambda: churn(scheduled, 256, 128, seconds),
            lambda: churn(unlimited, 256, 128, seconds),
        )
    return [
        Figure(
            "scheduled burst of 256: speed",
            "tokens/s",
            "more",
            [sample.tokens_per_second for sample in bursts[0]],
            "without a schedule",
            [sample.tokens_per_second for sample in bursts[1]],
            Target(1e6),
        ),
        Figure(
            "scheduled burst of 256: CPU",
            "s/M tokens",
            "less",
            [sample.cpu_seconds_per_million for sample in bursts[0]],
            "without a schedule",
            [sample.cpu_seconds_per_million for sample in bursts[1]],
        ),
        Figure(
            "scheduled churn of 256, 128 tokens: speed",
            "tokens/s",
            "more",
            [128 * sample.requests_per_second for sample in churns[0]],
            "without a schedule",
            [128 * sample.requests_per_second for sample in churns[1]],
        ),
    ]


GAP = 0.020
"""Seconds between two tokens that are asked for."""


def measure_pace(effort: Effort) -> list[Figure]:
    """1,000 streams at 20 ms a token, scheduled and cached: how regular they are, what they cost."""
    figures: list[Figure] = []
    for option in ("--inter-token-latency", "--step-time"):
        command = mock_engine(1, *SCHEDULED, option, "20ms")
        with connected(f"mock-engine {option}", command) as frontend:
            # Not fewer tokens with less effort: how late the last one is would weigh more.
            samples = [pace(frontend, 1000, 250) for _ in range(effort.rounds)]
        name = f"1,000 streams, {option} 20ms"
        figures += [
            Figure(
                f"{name}: mean gap off by",
                "%",
                "less",
                [abs(sample.mean / GAP - 1) * 100 for sample in samples],
                target=Target(1.0),
            ),
            Figure(f"{name}: P99 gap", "ms", "less", [sample.p99 * 1e3 for sample in samples]),
            Figure(
                f"{name}: CPU",
                "% of a core",
                "less",
                [sample.cpu_share * 100 for sample in samples],
                target=Target(50.0),
            ),
        ]
    return figures


INTERVALS = {"10ms": (0.010, 300, (1, 64, 1000)), "1ms": (0.001, 2000, (1, 64))}
"""Of ``--step-interval``: seconds between two tokens, tokens of each request, and how many requests.

To look at the tokens of 1,000 requests takes longer than a millisecond.
"""


def measure_steps(effort: Effort) -> list[Figure]:
    """1, 64 and 1,000 streams with --step-interval: how regular they are."""
    figures: list[Figure] = []
    for option, (gap, tokens, concurrencies) in INTERVALS.items():
        with connected("mock-engine", mock_engine(1, "--step-interval", option)) as frontend:
            for concurrency in concurrencies:
                samples = [
                    pace(frontend, concurrency, effort.part(tokens)) for _ in range(effort.rounds)
                ]
                name = f"{concurrency} streams, --step-interval {option}"
                figures += [
                    Figure(
                        f"{name}: mean gap off by",
                        "%",
                        "less",
                        [abs(sample.mean / gap - 1) * 100 for sample in samples],
                        target=Target(1.0),
                    ),
                    Figure(
                        f"{name}: P99 gap over it",
                        "ms",
                        "less",
                        [(sample.p99 - gap) * 1e3 for sample in samples],
                        target=Target(1.0),
                    ),
                ]
    return figures


def measure_processes(effort: Effort) -> list[Figure]:
    """Four engines in two processes, next to four in one."""
    tokens = effort.part(2_000_000)
    with (
        connected("two processes", mock_engine(4, "--processes", "2"), 4) as ours,
        connected("one process", mock_engine(4), 4) as one,
    ):
        samples, yardstick = take_turns(
            effort, lambda: burst(ours, 256, tokens), lambda: burst(one, 256, tokens)
        )
    return [
        Figure(
            "4 engines, --processes 2: CPU",
            "s/M tokens",
            "less",
            [sample.cpu_seconds_per_million for sample in samples],
            "one process",
            [sample.cpu_seconds_per_million for sample in yardstick],
            Target(1.1, "ratio"),
        ),
        Figure(
            "4 engines, --processes 2: speed",
            "tokens/s",
            "more",
            [sample.tokens_per_second for sample in samples],
            "one process",
            [sample.tokens_per_second for sample in yardstick],
        ),
    ]


def measure_startup(effort: Effort) -> list[Figure]:
    """From the start of the process to its HELLO, and what the whole startup costs."""

    def start(name: str, command: Command) -> tuple[float, float]:
        with connected(name, command) as frontend:
            return frontend.hello_seconds, cpu_seconds(frontend.pids())

    samples, yardstick = take_turns(
        effort.times(2),
        lambda: start("mock-engine", mock_engine()),
        lambda: start("the bare engine", raw_engine()),
    )
    return [
        Figure(
            name,
            "s",
            "less",
            [sample[index] for sample in samples],
            BARE_ENGINE,
            [sample[index] for sample in yardstick],
            target,
        )
        for index, (name, target) in enumerate(
            (("mock-engine, start to HELLO", Target(0.5)), ("mock-engine, start: CPU", None))
        )
    ]


def measure_idle(effort: Effort) -> list[Figure]:
    """What eight engines use while nothing happens."""
    seconds = 4.0 * effort.scale
    samples = []
    with connected("mock-engine", mock_engine(8), 8) as frontend:
        time.sleep(1.0)
        pids = frontend.pids()
        for _ in range(effort.rounds):
            cpu, begin = cpu_seconds(pids), time.perf_counter()
            time.sleep(seconds)
            cpu = cpu_seconds(pids) - cpu
            samples.append(cpu / (time.perf_counter() - begin) * 100)
    return [Figure("8 idle engines: CPU", "% of a core", "less", samples, target=Target(0.1))]


def measure_engine_memory(_effort: Effort) -> list[Figure]:
    """What an engine needs for a request that has its first token."""
    count = 100_000
    with connected("mock-engine", mock_engine()) as frontend:
        pids = frontend.pids()
        burst(frontend, 256, 100_000)
        before = resident_bytes(pids)
        frontend.call("pause_scheduler", "keep", False)
        for _ in range(count // GROUP):
            for _ in range(GROUP):
                frontend.add(100_000)
            frontend.call("is_sleeping")
        frontend.call("resume_scheduler")
        missing = count
        while missing > 0:
            missing -= len(frontend.rows())
        frontend.call("pause_scheduler", "keep", False)
        frontend.drain()
        grown = resident_bytes(pids) - before
    return [
        Figure(
            "mock engine, 100,000 requests: memory",
            "B/request",
            "less",
            [grown / count],
            target=Target(2048),
        )
    ]
