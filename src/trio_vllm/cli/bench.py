"""`bench` (``llm-smoke bench``) sends a load to the engines and reports latencies and throughput.

A command of ``llm-smoke`` and not one of its own: it finds, starts and ends its engines just so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import trio

from trio_vllm import Llm
from trio_vllm.cli.app import write_output
from trio_vllm.cli.load import (
    LoadPlan,
    LoadResult,
    PlannedRequest,
    RequestRecord,
    TraceError,
    read_trace,
    run_load,
)
from trio_vllm.cli.smoke_options import BenchOptions
from trio_vllm.cli.smoke_report import Report
from trio_vllm.cli.smokes import SmokeError, check

COUNT = 1000
"""Requests if neither a number nor a time is given."""


def check_files(options: BenchOptions) -> None:
    """Refuse, by `ValueError`, what could not be read, or drawn at the end."""
    trace, path = options.trace, options.plot
    if trace is not None and not os.access(trace, os.R_OK):
        raise ValueError(f"--trace {trace} cannot be read.")
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"--plot {path} must end with one of .{', .'.join(kinds)}.")


async def bench(llm: Llm, report: Report, options: BenchOptions) -> None:
    """Send the load, and report its figures; requests that fail are a failure."""
    report.awaited = "the outputs of the load"
    try:
        requests = planned_requests(options)
        await _warm_up(llm, options)
        result = await _measure(llm, requests, options)
        figures = result.summary(options.percentiles, options.limits)
        _put(report, figures)
        _write_files(result, figures, options, llm)
    except (OSError, TraceError) as error:
        raise SmokeError(str(error)) from error
    failed = [record.error for record in result.records if record.error]
    check(not failed, f"{len(failed)} of {len(result.records)} requests failed: {failed[:1]}")
    check(bool(result.records), "there was no request in the time given")


def planned_requests(options: BenchOptions) -> Iterator[PlannedRequest]:
    """The load that the options ask for."""
    if options.trace is not None:
        return read_trace(
            options.trace,
            vocab_size=options.vocab_size,
            seed=options.seed,
            speed=options.trace_speed,
        )
    plan = LoadPlan(
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        prefix_len=options.prefix_len,
        vocab_size=options.vocab_size,
        seed=options.seed,
    )
    return plan.requests()


async def _warm_up(llm: Llm, options: BenchOptions) -> None:
    """Requests that are not counted; their seed is another, so that no prefix of ours is cached."""
    await trio.lowlevel.checkpoint()
    if options.num_warmups:
        other = attrs.evolve(options, seed=options.seed + 1, request_rate=float("inf"))
        await run_load(
            llm,
            planned_requests(other),
            count=options.num_warmups,
            max_concurrency=options.max_concurrency or 1,
        )


async def _measure(
    llm: Llm, requests: Iterator[PlannedRequest], options: BenchOptions
) -> LoadResult:
    count = options.num_prompts
    if count is None and options.trace is None and options.duration == float("inf"):
        count = COUNT
    async with _progress(llm, count, shown=not options.quiet and sys.stderr.isatty()) as on_end:
        return await run_load(
            llm,
            requests if count is None else islice(requests, count),
            duration=options.duration,
            max_concurrency=options.max_concurrency,
            on_end=on_end,
        )


@asynccontextmanager
async def _progress(
    llm: Llm, count: int | None, *, shown: bool
) -> AsyncIterator[Callable[[RequestRecord], None]]:
    """A table of the engines and a bar on standard error."""
    if not shown:
        yield lambda _record: None
        return
    from rich.console import Console
    from rich.progress import Progress

    from trio_vllm.monitor import show_statistics

    console = Console(stderr=True)
    progress = Progress(console=console)
    task = progress.add_task("requests", total=count)
    async with show_statistics(llm, console=console, below=progress):
        yield lambda _record: progress.advance(task)


# Results ------------------------------------------------------------------------------------------


def _put(report: Report, figures: dict[str, Any]) -> None:
    """Note the figures, and print them as a table."""
    report.findings.update(figures)
    report.figures.update(figures)
    if report.quiet:
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        if value is not None:
            text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            write_output(f"{name:{width}} {text:>14}")


def _write_files(
    result: LoadResult, figures: dict[str, Any], options: BenchOptions, llm: Llm
) -> None:
    if options.result_file is not None:
        document = {**_setting(options, llm), **figures, **result.details()}
        text = json.dumps(document, allow_nan=False)
        options.result_file.write_text(text + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(result, options.plot)


def _setting(options: BenchOptions, llm: Llm) -> dict[str, Any]:
    """What was measured, under the names that ``vllm bench serve`` writes."""
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "trio-vllm",
        "vllm_version": llm.client.vllm_version,
        "engine_count": len(llm.client.engine_indices),
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": "inf" if options.burstiness == float("inf") else options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def plot(result: LoadResult, path: Path) -> None:
    """Draw latencies over time; that matplotlib is there was checked with the options."""
    from matplotlib.figure import Figure

    completed = result.completed
    figure = Figure(figsize=(9, 6))
    first, second = figure.subplots(2, 1, sharex=True)
    starts = [record.start_time for record in completed]
    first.plot(starts, [record.ttft * 1000 for record in completed], ".", markersize=2)
    first.set_ylabel("time to first token (ms)")
    second.plot(starts, [record.latency * 1000 for record in completed], ".", markersize=2)
    second.set_ylabel("latency (ms)")
    second.set_xlabel("seconds since the start")
    figure.savefig(path)
