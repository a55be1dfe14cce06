"""`show_statistics`: a live table of an `Llm`'s engines; needs the extra ``trio-vllm[monitor]``.

from trio_vllm.monitor import show_statistics

async with open_llm(mode) as llm, show_statistics(llm): ...
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import trio

from trio_vllm.errors import ConfigurationError, how_to_install

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the monitor needs rich: {how_to_install('monitor')}", name=error.name
    ) from error

from trio_vllm.concurrency import explains_misuse, running
from trio_vllm.llm import EngineStatistics, Llm, LlmStatistics
from trio_vllm.values import define

COLUMNS = (
    "engine", "state", "in flight", "running", "waiting", "KV cache", "cache hits", "prompt tok/s",
    "output tok/s", "oldest", "statistics",
)  # fmt: skip


def statistics_table(statistics: LlmStatistics) -> Table:
    """Lay out statistics as a table: a row for each engine and, if there are several, one for all.

    What is not known is a dash. The last two columns are ages, in seconds.
    """
    table = Table(title=f"{statistics.in_flight} requests in flight", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("engine", "state") else "right")
    for index, engine in statistics.engines.items():
        table.add_row(str(index), _state(engine), *_cells(engine))
    if len(statistics.engines) > 1:
        table.add_section()
        table.add_row("all", "", *_sums(list(statistics.engines.values())))
    return table


def _state(engine: EngineStatistics) -> str:
    if not engine.is_alive:
        return "lost"
    return "stalled" if engine.is_stalled else "alive"


def _cells(engine: EngineStatistics) -> list[str]:
    return [
        _text(engine.in_flight),
        _text(engine.running),
        _text(engine.waiting),
        _text(engine.kv_cache_usage, "{:.1%}"),
        _text(engine.prefix_cache_hit_rate, "{:.1%}"),
        _text(engine.prompt_throughput, "{:,.1f}"),
        _text(engine.generation_throughput, "{:,.1f}"),
        _text(engine.oldest_request_age, "{:.1f}"),
        _text(engine.statistics_age, "{:.1f}"),
    ]


def _sums(engines: list[EngineStatistics]) -> list[str]:
    return [
        _text(_sum(e.in_flight for e in engines)),
        _text(_sum(e.running for e in engines)),
        _text(_sum(e.waiting for e in engines)),
        *["", ""],
        _text(_sum(e.prompt_throughput for e in engines), "{:,.1f}"),
        _text(_sum(e.generation_throughput for e in engines), "{:,.1f}"),
    ]


def _sum(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _text(number: float | None, layout: str = "{:,}") -> str:
    return "-" if number is None else layout.format(number)


@define
class _View:
    """What is on the terminal; rates are over the time since the last look."""

    llm: Llm
    live: Live
    below: RenderableType
    last: LlmStatistics | None = None

    def draw(self) -> None:
        self.last = self.llm.statistics(self.last)
        self.live.update(Group(statistics_table(self.last), self.below), refresh=True)

    async def run(self, interval: float) -> None:
        while True:
            self.draw()
            await trio.sleep(interval)


@explains_misuse("show_statistics", instead="llm.statistics()")
@asynccontextmanager
async def show_statistics(
    llm: Llm, *, console: Console | None = None, interval: float = 0.5, below: RenderableType = ""
) -> AsyncIterator[None]:
    """Show the statistics of ``llm`` while the block runs; the table then goes away.

    Nothing is shown where there is no terminal. What the program prints meanwhile stands above.

    Args:
      llm: Whose engines are shown.
      console: Where to; standard error if None.
      interval: Seconds between two looks, over which rates are taken.
      below: What else is shown, such as a progress bar.

    Raises:
      ConfigurationError: ``interval`` is not above 0.
    """
    if not 0 < interval < math.inf:
        raise ConfigurationError("interval must be above 0")
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield
        return
    # Without its thread: a table that is drawn in the midst of a change could be torn.
    live = Live(console=console, auto_refresh=False, transient=True)
    view = _View(llm, live, below)
    with live:
        async with running(partial(view.run, interval)):
            yield
