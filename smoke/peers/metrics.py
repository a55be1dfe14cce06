"""Our metrics are those of both frontends: names, types, labels, buckets, and the counts of a whole run."""

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from harness import (
    expect,
    free_port,
    headless_engine,
    mock_engine,
    ok,
    owner,
    python_frontend,
    rust_frontend,
)
from http_client import get
from peers.metrics_plan import END_OF_TEXT, Step, generation_plan, pooling_plan
from processes import Process, running
from provision import Peers
from trio_vllm import (
    EncodeRequest,
    EngineCoreError,
    FinishReason,
    GenerateRequest,
    Llm,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    open_llm,
)
from trio_vllm.client import PauseMode
from trio_vllm.llm.metrics import LlmMetrics

CONTEXT = 32_768
"""The tiny model's, up to which the Python frontend's buckets of lengths go."""

UPSTREAM = Path(__file__).parents[2] / "tests" / "llm" / "upstream_metrics.json"

VOCAB_SIZE = 32_000
"""The tiny model's, too."""

SETTLE = 0.5
"""Seconds in which requests have reached the engine, and its last statistics us."""

Shapes = dict[str, tuple[str, set[tuple[str, ...]], list[float]]]
"""By name: type, sets of labels (none without a series), upper bounds."""

Values = dict[str, float]
"""By name and labels, without the model's name."""

FRONTEND_ONLY = re.compile("vllm:(mm_cache|admission_rejections|sleep_mode|rl_weight|websocket)")
"""Counters of what a frontend of HTTP does."""


def main(peers: Peers) -> None:
    """Compare with each frontend in turn, behind a mock engine; then go through a whole run."""
    compare_shapes(peers)
    trio.run(compare_runs, peers, generation_plan(), "generate")
    trio.run(compare_runs, peers, pooling_plan(), "pooling")


# Names, types, labels, buckets --------------------------------------------------------------------


def compare_shapes(peers: Peers) -> None:
    """What is not a value."""
    registry = CollectorRegistry()
    LlmMetrics(registry, model_name="tiny").start([0], CONTEXT, 0)
    ours = read_shapes(generate_latest(registry).decode())
    for name, frontend in (("Python", python_frontend), ("Rust", rust_frontend)):
        theirs = read_shapes(scrape(peers, frontend))
        expect(
            f"series of the {name} frontend that are not listed",
            theirs.keys() - listed(name),
            set(),
        )
        differences = compare(ours, theirs, with_lengths=name == "Python")
        expect(f"differences from the {name} frontend", differences, [])
        ok(f"{len(ours.keys() & theirs.keys())} metrics of the {name} frontend")


def listed(frontend: str) -> set[str]:
    """The series that the table of the docs has for a frontend."""
    series = json.loads(UPSTREAM.read_text(encoding="utf-8"))
    return {f"vllm:{name}" for name, one in series.items() if frontend in one["frontends"]}


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


# Values -------------------------------------------------------------------------------------------


async def compare_runs(peers: Peers, plan: list[Step], runner: str) -> None:
    """Let vLLM's own frontend and us do the same, each with an engine of its own."""
    with running_reference(peers, plan, runner) as (reference, result):
        port = free_port()
        with headless_engine(peers, port, "--block-size", "32", "--runner", runner):
            before, ours, surplus = await run_plan(port, plan)
        await trio.to_thread.run_sync(
            reference.wait_until, "writing its result", result.exists, 240
        )
        theirs = read_values(result.read_text())
    left = sum(len(step["requests"]) for step in plan if step.get("leave"))
    aborted = sum(len(step["requests"]) for step in plan if step.get("abort"))
    check_counters(before, theirs, surplus)
    check_counters(ours, theirs, surplus, left)
    check_histograms(before, theirs, surplus, aborted)
    count = sum(len(step["requests"]) for step in plan)
    ok(f"{count} requests to {runner} are counted as AsyncLLM counts them")


@contextlib.contextmanager
def running_reference(
    peers: Peers, plan: list[Step], runner: str
) -> Iterator[tuple[Process, Path]]:
    """Let vLLM's own frontend go through the plan; gives the process and where it writes to."""
    script = Path(__file__).with_name("vllm_metrics.py")
    with tempfile.TemporaryDirectory(prefix="trio-vllm-smoke-") as folder:
        steps, result = Path(folder, "plan.json"), Path(folder, "result.txt")
        steps.write_text(json.dumps(plan))
        command: list[str | Path] = [peers.python, script, peers.model, steps, result, runner]
        with running("vLLM's AsyncLLM", command, environment=peers.environment) as process:
            yield process, result


async def run_plan(port: int, plan: list[Step]) -> tuple[Values, Values, int]:
    """What we count up to the first that leave, and in all; how many tokens came after a stop."""
    registry = CollectorRegistry()
    surplus = 0

    def look() -> Values:
        return read_values(generate_latest(registry).decode())

    # To learn the size of the vocabulary costs a request, which the engine counts in its statistics.
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "observers": [LlmMetrics(registry)]}
    async with open_llm(owner(port), **options) as llm:
        before: Values = {}
        for step in plan:
            if step.get("leave"):
                await trio.sleep(SETTLE)
                before = look()
            surplus += await take(llm, step)
        await trio.sleep(SETTLE)
        return before or look(), look(), surplus


async def take(llm: Llm, step: Step) -> int:
    """One step; gives how many tokens came after a stop."""
    if mode := step.get("paused"):
        await llm.client.pause_generation(PauseMode(mode), clear_cache=False)
    surplus = 0

    async def run(request: dict[str, Any]) -> None:
        nonlocal surplus
        refused, more = await ask(llm, request)
        expect(f"that {request} is refused", refused, bool(step.get("refused")))
        surplus += more

    async with trio.open_nursery() as nursery:
        for request in step["requests"]:
            nursery.start_soon(run, request)
        if step.get("leave"):
            await trio.sleep(SETTLE)
            nursery.cancel_scope.cancel()
        if step.get("abort"):
            await trio.sleep(SETTLE)
            await llm.client.pause_generation(PauseMode.ABORT, clear_cache=False)
    if mode:
        await llm.client.resume_scheduler()
    return surplus


async def ask(llm: Llm, request: dict[str, Any]) -> tuple[bool, int]:
    """One request; whether it was refused, and how many tokens came after its stop."""
    prompt, params = request["prompt"], dict(request["params"])
    try:
        if request.get("pool"):
            pooling = EncodeRequest(prompt_token_ids=prompt, pooling_params=PoolingParams(**params))
            await llm.encode(pooling)
            return False, 0
        stop = params.pop("stop", [""])[0]
        wanted = GenerateRequest(prompt_token_ids=prompt, sampling_params=sampling(params))
        if stop:
            return False, await read_to_stop(llm, wanted, stop)
        output = await llm.generate(wanted)
    except EngineCoreError:
        return True, 0
    return output.completions[0].finish_reason is FinishReason.ERROR, 0


def sampling(params: dict[str, Any]) -> SamplingParams:
    """What vLLM's frontend makes of the parameters, too."""
    if choice := params.pop("choice", None):
        params["structured_outputs"] = StructuredOutputsParams(choice=choice)
    if params.pop("ends", False):
        params["eos_token_id"] = END_OF_TEXT
    if bias := params.get("logit_bias"):
        params["logit_bias"] = {int(token): value for token, value in bias.items()}
    params.pop("bad_words", None)
    return SamplingParams(**params)


async def read_to_stop(llm: Llm, request: GenerateRequest, stop: str) -> int:
    """Read until there is a token for each character of the stop string; gives how many are more."""
    count = 0
    async with llm.stream(request) as stream:
        async for delta in stream:
            count += len(delta.token_ids)
            if count >= len(stop):
                stream.stop(stop)
    return count - len(stop)


def read_values(text: str) -> Values:
    """Counters, and counts and sums of histograms."""
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:") and family.type in ("counter", "histogram")
        for sample in family.samples
    ]
    return {
        name_of(sample): sample.value
        for sample in samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def name_of(sample: Any) -> str:
    """With its labels, but for the model's name."""
    labels = sorted({**sample.labels, "model_name": ""}.items())
    return f"{sample.name}{{{','.join(f'{key}={value}' for key, value in labels if value)}}}"


def check_counters(ours: Values, theirs: Values, surplus: int, left: int = 0) -> None:
    """All of theirs; only requests that their callers leave they do not count, and Rust does."""
    expected = {
        name: value
        for name, value in theirs.items()
        if re.search("_total{", name) and not FRONTEND_ONLY.match(name)
    }
    expected["vllm:generation_tokens_total{engine=0}"] += surplus
    expected["vllm:request_success_total{engine=0,finished_reason=abort}"] += left
    expect("counters", differences(ours, expected), {})
    ok(f"{len(expected)} counters")


NEVER_RAN = re.compile(
    "vllm:(time_to_first_token_seconds|request_(queue|prefill|decode|inference)_time_seconds"
    "|request_num_preemptions)_count"
)
"""They take a sample of a request that an engine has aborted before it ran; we do not."""

LENGTHS = re.compile(
    "vllm:(request_(max_num_)?generation_tokens_sum|iteration_tokens_total_sum"
    "|inter_token_latency_seconds_count)"
)
"""They count tokens, of which each comes in an output of its own here."""


def check_histograms(ours: Values, theirs: Values, surplus: int, aborted: int) -> None:
    """Counts of all, sums of those of tokens."""
    expected = {
        name: value - aborted * bool(NEVER_RAN.match(name)) + surplus * bool(LENGTHS.match(name))
        for name, value in theirs.items()
        if re.search("_count{", name) or (re.search("_sum{", name) and "_seconds" not in name)
    }
    del expected["vllm:iteration_tokens_total_count{engine=0}"]  # it depends on who came when
    expect("histograms", differences(ours, expected), {})
    ok(f"{len(expected)} counts and sums of histograms")


def differences(ours: Values, expected: Values) -> dict[str, tuple[float | None, float]]:
    """Ours and theirs, where they differ."""
    return {
        name: (ours.get(name), value)
        for name, value in expected.items()
        if not math.isclose(ours.get(name, math.nan), value)
    }
