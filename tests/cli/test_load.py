"""Planning, sending and measuring a load."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
import trio
from tests.client.world import make_output
from tests.llm.world import LlmWorld, open_llm_world

from trio_vllm.cli.load import (
    LoadPlan,
    LoadResult,
    PlannedRequest,
    RequestRecord,
    TraceError,
    read_trace,
    run_load,
)
from trio_vllm.protocol import FinishReason


def planned(plan: LoadPlan, count: int) -> list[PlannedRequest]:
    """The first requests of a plan."""
    return list(itertools.islice(plan.requests(), count))


def intervals(plan: LoadPlan, count: int) -> list[float]:
    """The times between requests."""
    times = [request.time for request in planned(plan, count)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


# Plans --------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_plan() -> None:
    """Another one another."""
    plan = LoadPlan(request_rate=10, range_ratio=0.5, prefix_len=3, seed=7)

    assert planned(plan, 50) == planned(plan, 50)
    assert planned(plan, 50) != planned(LoadPlan(request_rate=10, range_ratio=0.5, seed=8), 50)


def test_all_at_once() -> None:
    """An infinite rate has no times between."""
    assert intervals(LoadPlan(), 9) == [0.0] * 8


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_rate_and_burstiness(burstiness: float, variation: float) -> None:
    """The mean interval is that of the rate, and its variation that of the gamma distribution."""
    plan = LoadPlan(request_rate=20, burstiness=burstiness, input_len=1, output_len=1)
    gaps = intervals(plan, 5000)

    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert statistics.stdev(gaps) * 20 == pytest.approx(variation, rel=0.1)


def test_fixed_intervals() -> None:
    """An infinite burstiness is a metronome."""
    plan = LoadPlan(request_rate=4, burstiness=math.inf)

    assert intervals(plan, 5) == [0.25] * 4


def test_lengths_and_vocabulary() -> None:
    """All lengths of the range come, and none beyond it."""
    plan = LoadPlan(input_len=10, output_len=4, range_ratio=0.5, vocab_size=7)
    requests = planned(plan, 500)

    assert {len(request.prompt_token_ids) for request in requests} == set(range(5, 16))
    assert {request.output_len for request in requests} == {2, 3, 4, 5, 6}
    assert {token for r in requests for token in r.prompt_token_ids} == set(range(7))


def test_a_common_prefix() -> None:
    """It comes before the random tokens, which differ."""
    first, second = planned(LoadPlan(prefix_len=20, input_len=30), 2)

    assert len(first.prompt_token_ids) == 50
    assert first.prompt_token_ids[:20] == second.prompt_token_ids[:20]
    assert first.prompt_token_ids[20:] != second.prompt_token_ids[20:]


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    """Equal hash ids are equal blocks of the prompts."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [3, 4]},
        {"timestamp": 3000, "input_length": 600, "output_length": 6, "hash_ids": [3, 9]},
        {"timestamp": 4000, "input_length": 20, "output_length": 7},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    first, second, third = read_trace(path, vocab_size=100, seed=1, speed=2)

    assert [request.time for request in (first, second, third)] == [0, 1.5, 2]
    assert [request.output_len for request in (first, second, third)] == [5, 6, 7]
    assert [len(r.prompt_token_ids) for r in (first, second, third)] == [1000, 600, 20]
    assert first.prompt_token_ids[:512] == second.prompt_token_ids[:512]
    assert first.prompt_token_ids[512:600] != second.prompt_token_ids[512:600]


def test_a_trace_of_burstgpt(tmp_path: Path) -> None:
    """What failed when it was recorded is left out."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n",
        encoding="utf-8",
    )
    first, second = read_trace(path, vocab_size=100, seed=1, speed=1)

    assert (first.time, len(first.prompt_token_ids), first.output_len) == (5, 472, 18)
    assert (second.time, len(second.prompt_token_ids), second.output_len) == (118, 417, 276)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"timestamp": 0, "input_length": 1}', "line 1 of .*no 'output_length'"),
        ("t.jsonl", '\n{"timestamp"', "line 2 of"),
        ("t.jsonl", "[1]", "line 1 of"),
        ("t.csv", "Timestamp,Request tokens,Response tokens\n1,x,3\n", "line 2 of .*'x'"),
        ("t.csv", "a,b\n1,2\n", "line 2 of .*no 'Timestamp'"),
    ],
)
def test_a_trace_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    """The error says which line."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")

    with pytest.raises(TraceError, match=message):
        list(read_trace(path, vocab_size=10, seed=0, speed=1))


# Sending and measuring ----------------------------------------------------------------------------


def request_at(time: float, output_len: int = 2) -> PlannedRequest:
    """A request of three tokens."""
    return PlannedRequest(time, [1, 2, 3], output_len)


async def answer_all(world: LlmWorld, first: float, rest: float) -> None:
    """Be the engine: a token after ``first`` seconds, another one after ``rest`` more."""
    seen = 0
    async with trio.open_nursery() as nursery:

        async def answer(request_id: str) -> None:
            await trio.sleep(first)
            await world.engine.send(make_output([1], request_id))
            await trio.sleep(rest)
            await world.engine.send(make_output([2], request_id, finish_reason=FinishReason.LENGTH))

        while True:
            requests = world.engine.requests()
            for request in requests[seen:]:
                nursery.start_soon(answer, request.request_id)
            seen = len(requests)
            await trio.sleep(0.01)


async def load(
    requests: list[PlannedRequest], first: float = 1.0, rest: float = 0.5, **options: float
) -> LoadResult:
    """Send requests to an engine that takes its time."""
    async with open_llm_world() as world:
        world.nursery.start_soon(answer_all, world, first, rest)
        return await run_load(world.llm, iter(requests), **options)  # type: ignore[arg-type]


async def test_latencies(autojump_clock: trio.testing.MockClock) -> None:
    """They are the engine's."""
    result = await load([request_at(0), request_at(0.25)])
    summary = result.summary()

    assert summary["completed"] == 2
    assert summary["mean_ttft_ms"] == pytest.approx(1000, abs=12)
    assert summary["p99_itl_ms"] == pytest.approx(500, abs=12)
    assert summary["median_tpot_ms"] == pytest.approx(500, abs=12)
    assert summary["mean_e2el_ms"] == pytest.approx(1500, abs=12)
    assert summary["duration"] == pytest.approx(1.75, abs=0.02)
    assert summary["total_input_tokens"] == 6
    assert summary["total_output_tokens"] == 4
    assert summary["request_throughput"] == pytest.approx(2 / 1.75, rel=0.02)
    assert summary["max_concurrent_requests"] == 2


async def test_requests_leave_at_their_times(autojump_clock: trio.testing.MockClock) -> None:
    """Whatever became of those before."""
    result = await load([request_at(time) for time in (0, 0.1, 0.2, 5)])

    starts = sorted(record.start_time for record in result.records)
    assert starts == pytest.approx([0, 0.1, 0.2, 5])


async def test_a_limit_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    """The next one leaves when one has ended."""
    result = await load([request_at(0)] * 4, max_concurrency=1)

    assert result.summary()["max_concurrent_requests"] == 1
    assert result.duration == pytest.approx(6, abs=0.1)


async def test_a_number_of_requests(autojump_clock: trio.testing.MockClock) -> None:
    """No more are sent."""
    result = await load([request_at(0)] * 10, count=3)

    assert len(result.records) == 3


async def test_a_duration(autojump_clock: trio.testing.MockClock) -> None:
    """What was sent before its end is waited for."""
    result = await load([request_at(time) for time in range(10)], duration=2.5)

    assert len(result.records) == 3
    assert result.duration == pytest.approx(3.5, abs=0.03)


async def test_a_duration_with_a_limit_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    """What had to wait too long is not sent."""
    result = await load([request_at(0)] * 10, duration=2, max_concurrency=1)

    assert len(result.records) == 2


async def test_what_fails(autojump_clock: trio.testing.MockClock) -> None:
    """It is counted, and its reason kept."""
    result = await load([request_at(0), PlannedRequest(0, [], 2)])

    assert result.summary()["failed"] == 1
    assert sorted(map(bool, result.details()["errors"])) == [False, True]


# Figures ------------------------------------------------------------------------------------------


def record(ttft: float, tpot: float, output_len: int = 11) -> RequestRecord:
    """A request that began at 0."""
    times = [ttft + tpot * number for number in range(output_len)]
    return RequestRecord(5, 0.0, output_len, times, [1] * output_len, times[-1])


def test_goodput() -> None:
    """Those count that keep all limits."""
    result = LoadResult([record(0.1, 0.01), record(0.3, 0.01), record(0.1, 0.05)], 10.0)

    assert result.summary()["request_goodput"] is None
    assert result.summary(goodput={"ttft": 200})["request_goodput"] == 0.2
    assert result.summary(goodput={"ttft": 200, "tpot": 20})["request_goodput"] == 0.1
    assert result.summary(goodput={"e2el": 350})["request_goodput"] == 0.1


def test_percentiles() -> None:
    """Those that are asked for."""
    result = LoadResult([record(number / 100, 0) for number in range(101)], 1.0)
    summary = result.summary([50, 99.9])

    assert summary["p50_ttft_ms"] == pytest.approx(500)
    assert summary["p99.9_ttft_ms"] == pytest.approx(999)
    assert "p99_ttft_ms" not in summary


def test_nothing_completed() -> None:
    """There are figures all the same."""
    summary = LoadResult([], 1.0).summary()

    assert (summary["completed"], summary["mean_ttft_ms"]) == (0, 0.0)


def test_peak_of_tokens() -> None:
    """The most of one second."""
    result = LoadResult([record(0.5, 0.1), record(0.95, 0.1)], 3.0)

    assert result.summary()["max_output_tokens_per_s"] == 16.0
