"""The table of the docs, what `LlmMetrics` exports, and the series of vLLM's own frontends agree.

``upstream_metrics.json`` lists the series of both frontends of vLLM 0.33, from their ``/metrics`` and, for those that
need a feature, from the Python frontend's source; a smoke check compares it with both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from trio_vllm.llm.metrics import LlmMetrics

UPSTREAM: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("upstream_metrics.json").read_text(encoding="utf-8")
)
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "metric_names.md"


def documented() -> dict[str, list[str]]:
    """The rows of the table by series: type, labels, whether Rust and Python have it, ours."""
    rows = re.findall(r"(?m)^\| `(\w+)` \|(.*)\|$", TABLE.read_text(encoding="utf-8"))
    assert len(rows) == len(dict(rows))
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def exported() -> dict[str, tuple[str, list[str]]]:
    """Our series before there is an engine's message: type, and further labels if there is one."""
    registry = CollectorRegistry()
    LlmMetrics(registry, model_name="m", watermarking=True).start([0], 1000, 0)
    return {
        metric.name.removeprefix("vllm:"): (
            metric.type,
            [",".join(sorted(sample.labels.keys())) for sample in metric.samples],
        )
        for metric in registry.collect()
    }


def test_the_table_lists_upstream_s_series() -> None:
    expected = {
        name: [
            series["type"],
            ", ".join(f"`{label}`" for label in series["labels"]),
            *("yes" if frontend in series["frontends"] else "" for frontend in ("Rust", "Python")),
        ]
        for name, series in UPSTREAM.items()
    }
    assert {name: cells[:4] for name, cells in documented().items()} == expected


def test_the_table_says_which_are_ours() -> None:
    ours = {name for name, cells in documented().items() if not cells[4].startswith("no: ")}
    assert ours == exported().keys()


def test_all_of_the_rust_frontend_s_are_ours_but_those_of_its_endpoints() -> None:
    rust = {name for name, series in UPSTREAM.items() if "Rust" in series["frontends"]}
    others = {name for name in rust if name.startswith(("sleep_mode_", "rl_weight_update_"))}
    assert rust - exported().keys() == others


@pytest.mark.parametrize("name", exported())
def test_a_series_has_upstream_s_type_and_labels(name: str) -> None:
    kind, labels = exported()[name]
    assert kind == UPSTREAM[name]["type"]
    own = {"le"} if kind == "histogram" else set()
    further = sorted({*"".join(f"{text}," for text in labels).split(",")} - {"", *own})
    assert further in ([], sorted(["engine", "model_name", *UPSTREAM[name]["labels"]]))


@pytest.mark.parametrize("name", exported())
def test_the_table_says_since_when(name: str) -> None:
    _, samples = exported()[name]
    assert bool(samples) == documented()[name][4].startswith("the start")
