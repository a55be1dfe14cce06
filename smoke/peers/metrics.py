"""Our metrics have the names, types, labels and default buckets of both frontends' ``/metrics``."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from harness import expect, free_port, mock_engine, ok, python_frontend, rust_frontend
from http_client import get
from processes import Process
from provision import Peers
from trio_vllm.llm.metrics import LlmMetrics

CONTEXT = 32_768
"""The tiny model's, up to which the Python frontend's buckets of lengths go."""

Shapes = dict[str, tuple[str, set[tuple[str, ...]], list[float]]]
"""By name: type, sets of labels (none without a series), upper bounds."""


def main(peers: Peers) -> None:
    """Compare with each frontend in turn, behind a mock engine."""
    registry = CollectorRegistry()
    LlmMetrics(registry, model_name="tiny").start([0], CONTEXT, 0)
    ours = read_shapes(generate_latest(registry).decode())
    for name, frontend in (("Python", python_frontend), ("Rust", rust_frontend)):
        theirs = read_shapes(scrape(peers, frontend))
        differences = compare(ours, theirs, with_lengths=name == "Python")
        expect(f"differences from the {name} frontend", differences, [])
        ok(f"{len(ours.keys() & theirs.keys())} metrics of the {name} frontend")


def scrape(peers: Peers, frontend: Callable[..., AbstractContextManager[Process]]) -> str:
    """The text of a frontend's metrics."""
    handshake, http = free_port(), free_port()
    with mock_engine(handshake), frontend(peers, handshake, http) as process:
        process.wait_for_http(f"http://127.0.0.1:{http}/health", 180)
        return trio.run(get, http, "/metrics")


def read_shapes(text: str) -> Shapes:
    """What is not a value. The Rust frontend names counters as OpenMetrics does, without ``_total``."""
    text = re.sub(r"(?m)^# HELP .*\n", "", text)
    text = re.sub(r"(?m)^(# TYPE \S+?)(_total)? counter$", r"\1_total counter", text)
    families: list[Any] = [*text_string_to_metric_families(text)]
    return {
        family.name.removesuffix("_total") if family.type == "counter" else family.name: (
            family.type,
            {tuple(sorted({*sample.labels} - {"le"})) for sample in family.samples},
            sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels}),
        )
        for family in families
        if family.name.startswith("vllm:") and not family.name.endswith("_created")
    }


def compare(ours: Shapes, theirs: Shapes, *, with_lengths: bool) -> list[str]:
    """The metrics of both that differ; the Rust frontend's buckets of lengths know no model."""
    found = []
    for name in sorted(ours.keys() & theirs.keys()):
        (kind, labels, bounds), (kind2, labels2, bounds2) = ours[name], theirs[name]
        if not with_lengths and bounds2[-2:-1] == [1_000_000]:
            bounds2 = bounds
        if kind != kind2 or (labels and labels2 and (labels, bounds) != (labels2, bounds2)):
            found.append(name)
    return found
