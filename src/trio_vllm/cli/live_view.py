"""`show_live`: what mock engines do, as a table on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

import attrs
import trio
from rich.console import Console
from rich.live import Live
from rich.table import Table

from trio_vllm.mock import EngineStatus, EngineStatuses
from trio_vllm.values import define

log = logging.getLogger("trio_vllm.mock")

LIVE_INTERVAL = 0.5
"""Seconds between two tables."""


async def show_live(states: EngineStatuses, interval: float = LIVE_INTERVAL) -> None:
    """Task: keep a table on standard error up to date; elsewhere than on a terminal, say so."""
    await trio.lowlevel.checkpoint()
    if not sys.stderr.isatty():
        log.warning("--live shows nothing, since standard error is no terminal")
        return
    console = Console(stderr=True)
    rates = Rates()
    with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            rows = max(console.height - 6, 1)
            now = time.monotonic()
            live.update(table_of(states.read(), rates, now, rows=rows), refresh=True)
            await trio.sleep(interval)


@define
class Rates:
    """Tokens per second of each engine, since it was last asked for."""

    _last: dict[int, tuple[float, int]] = attrs.field(factory=dict, init=False)

    def of(self, state: EngineStatus, now: float) -> float:
        """Tokens per second of an engine since the last call; 0 the first time."""
        tokens = state.summary.tokens
        time_before, tokens_before = self._last.get(state.engine_index, (now, tokens))
        self._last[state.engine_index] = now, tokens
        return (tokens - tokens_before) / (now - time_before) if now > time_before else 0.0


def table_of(states: Sequence[EngineStatus], rates: Rates, now: float, *, rows: int) -> Table:
    """A row for each engine, as many as fit, and one for them all."""
    table = Table("engine", title="mock-engine")
    for heading in ("frontend", "running", "waiting", "tokens/s", "KV cache"):
        table.add_column(heading, justify="right")
    speeds = [rates.of(state, now) for state in states]
    for state, speed in list(zip(states, speeds, strict=True))[:rows]:
        table.add_row(
            str(state.engine_index),
            "yes" if state.is_joined else "no",
            f"{state.running:,}",
            f"{state.waiting:,}",
            f"{speed:,.0f}",
            f"{state.kv_cache_usage:.1%}",
        )
    table.add_section()
    table.add_row(
        f"all {len(states)}",
        str(sum(state.is_joined for state in states)),
        f"{sum(state.running for state in states):,}",
        f"{sum(state.waiting for state in states):,}",
        f"{sum(speeds):,.0f}",
        f"{max((state.kv_cache_usage for state in states), default=0.0):.1%} at most",
    )
    return table
