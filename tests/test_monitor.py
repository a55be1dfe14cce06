"""The live table of engines on a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import attrs
import pytest
import trio
from rich.console import Console
from tests.client.world import make_output
from tests.llm.test_statistics import IDLE, PREFILL
from tests.llm.world import make_prompt, open_llm_world
from trio.testing import MockClock

from trio_vllm.errors import ConfigurationError
from trio_vllm.llm import EngineStatistics, LlmStatistics
from trio_vllm.monitor import show_statistics, statistics_table

BUSY = attrs.evolve(
    IDLE,
    in_flight=3,
    running=2,
    waiting=1,
    kv_cache_usage=0.5,
    prompt_throughput=1234.5,
    generation_throughput=10.0,
    prefix_cache_hit_rate=0.25,
    oldest_request_age=7.0,
    statistics_age=0.125,
)


def rows(*engines: EngineStatistics) -> list[list[str]]:
    """The cells of the table of these engines, below its heads."""
    statistics = LlmStatistics(time=0.0, engines=dict(enumerate(engines)), in_flight=3)
    console = Console(file=io.StringIO(), width=200)
    console.print(statistics_table(statistics))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line[0] == "│"]


def test_the_row_of_an_engine() -> None:
    assert rows(BUSY) == [
        ["0", "alive", "3", "2", "1", "50.0%", "25.0%", "1,234.5", "10.0", "7.0", "0.1"]
    ]


def test_what_is_not_known_is_a_dash() -> None:
    assert rows(IDLE) == [["0", "alive", "0", "-", "-", "-", "-", "0.0", "0.0", "-", "-"]]


def test_several_engines_and_their_sum() -> None:
    stalled = attrs.evolve(IDLE, is_stalled=True, in_flight=1)
    lost = attrs.evolve(IDLE, is_alive=False)

    got = rows(BUSY, BUSY, stalled, lost)
    assert [row[1] for row in got] == ["alive", "alive", "stalled", "lost", ""]
    assert got[-1] == ["all", "", "7", "4", "2", "", "", "2,469.0", "20.0", "", ""]


def terminal(**options: Any) -> Console:
    """A terminal that keeps what is written to it."""
    return Console(file=io.StringIO(), width=200, force_terminal=True, **options)


def written(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


async def test_the_table_lives(autojump_clock: MockClock) -> None:
    """Rates are over the time between two looks."""
    console = terminal()
    async with open_llm_world() as world:
        async with show_statistics(world.llm, console=console, interval=2.0, below="a bar"):
            await trio.sleep(1)
            assert "0 requests in flight" in written(console)
            assert "a bar" in written(console)
            await world.start(lambda: world.llm.generate(make_prompt(max_tokens=9)))
            (request,) = world.engine.requests()
            await world.engine.send(make_output([7] * 6, request.request_id, prefill_stats=PREFILL))
            await world.engine.report(running=1, kv_cache_usage=0.125)
            await trio.sleep(2)
            (line,) = [line for line in written(console).splitlines() if "12.5%" in line]
            assert [cell.strip() for cell in line.split("│")[6:9]] == ["12.5%", "40.0%", "2.5"]
            assert line.split("│")[9].strip() == "3.0"
            before = len(written(console))
            await trio.sleep(2)
            assert len(written(console)) > before
        after = len(written(console))
        await trio.sleep(10)
        assert len(written(console)) == after


async def test_nothing_is_shown_where_there_is_no_terminal(autojump_clock: MockClock) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    async with open_llm_world() as world:
        async with show_statistics(world.llm, console=console):
            await trio.sleep(5)

    assert written(console) == ""


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
async def test_an_interval_that_makes_no_sense(interval: float) -> None:
    async with open_llm_world() as world:
        with pytest.raises(ConfigurationError, match="interval"):
            async with show_statistics(world.llm, console=terminal(), interval=interval):
                raise AssertionError("it was shown")


def test_rich_is_imported_only_when_asked_for() -> None:
    program = "import sys, trio_vllm, trio_vllm.llm; print('rich' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
