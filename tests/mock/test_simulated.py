"""Engines with a schedule: what was recorded from real ones, message by message."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.mock.driver import Driver, drive
from tests.mock.replay import _OPTIONS, Json, load
from tests.mock.small_slices import limit_steps
from tests.mock.test_schedules import RECORDED, without_ids
from tests.protocol.test_outputs import FULL_STATS
from tests.slices import finish

from trio_vllm.mock.encoding import MessageBuilder, MessageTemplate, SchedulerStatsEncoder
from trio_vllm.mock.events import ScheduleCounts
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    EventType,
    FinishReason,
    PrefixCacheStats,
    RequestBatchOutputs,
    SchedulerStats,
    decode_outputs,
)


def driver_for(recording: Json, **config: Any) -> Driver:
    """An engine with the options of the recorded one."""
    options, ready = _OPTIONS.parse_args(recording["engine_args"]), recording["ready"]
    return drive(
        **{name: ready[name] for name in ("max_model_len", "max_num_seqs", "num_gpu_blocks")},
        **{name: ready[name] for name in ("block_size", "max_num_batched_tokens")},
        enable_chunked_prefill=options.enable_chunked_prefill,
        enable_prefix_caching=options.enable_prefix_caching,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        scheduling_policy=options.scheduling_policy,
        prefix_caching_hash_algo=options.prefix_caching_hash_algo,
        enable_logging_iteration_details=True,
        **config,
    )


def run_phase(driver: Driver, phase: Json) -> Iterator[Json]:
    """Add what was added while the scheduler was paused, and let it run; each message."""
    driver.call("pause_scheduler", "keep", False)
    if phase["before"] is not None:
        assert driver.call(*phase["before"])
    for request in phase["requests"]:
        driver.add(
            request["id"],
            request["max_tokens"],
            prompt_token_ids=request["prompt"],
            priority=request.get("priority", 0),
            cache_salt=request.get("cache_salt"),
            arrival_time=1_700_000_000 + request["arrival"],
        )
    driver.sent.clear()
    driver.step()
    assert driver.batches() == []
    driver.call("resume_scheduler")
    driver.sent.clear()
    driver.run()
    for batch in driver.batches():
        yield message(batch)


def message(batch: RequestBatchOutputs) -> Json:
    """A message in the form of the recordings."""
    told: Json = {}
    if batch.outputs:
        told["rows"] = [row(output) for output in batch.outputs]
    assert batch.scheduler_stats is not None
    stats = attrs.asdict(batch.scheduler_stats)
    told["stats"] = {
        name: stats[name]
        for name in ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs")
    }
    told["stats"]["kv_cache_usage"] = pytest.approx(stats["kv_cache_usage"], abs=1e-9)
    told["stats"]["prefix_cache_stats"] = stats["prefix_cache_stats"]
    if stats["iteration_details"] is not None:
        told["stats"]["iteration_details"] = stats["iteration_details"]
        del told["stats"]["iteration_details"]["elapsed_ms"]
    return told


def row(output: EngineCoreOutput) -> Json:
    """An output in the form of the recordings."""
    told: Json = {"id": output.request_id, "tokens": len(output.new_token_ids)}
    if output.finish_reason is not None:
        told["finish"] = str(output.finish_reason)
    if output.events is not None:
        told["events"] = [event.type.name.lower() for event in output.events]
    if output.prefill_stats is not None:
        told["prefill"] = attrs.asdict(output.prefill_stats)
    return told


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_messages_are_those_of_a_real_engine(path: Path, *, fast_path: bool) -> None:
    """Rows, ends, events, prefill statistics and scheduler statistics of each step."""
    recording = load(path)
    driver = driver_for(recording, fast_path=fast_path)
    for phase in recording["phases"]:
        got = list(run_phase(driver, phase))
        expected = [without_ids(step) for step in phase["steps"]]
        for number, (mine, real) in enumerate(zip(got, expected, strict=False)):
            assert mine == real, f"step {number}"
        assert len(got) == len(expected)


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that differ from those with another ``first``."""
    return list(range(first, first + length))


def first_steps(driver: Driver) -> dict[str, int]:
    """In which message each request got its first token."""
    return {
        output.request_id: number
        for number, batch in reversed(list(enumerate(driver.batches())))
        for output in batch.outputs
    }


def stats_of(driver: Driver) -> list[tuple[int, int]]:
    """Running and waiting requests after each step."""
    stats = [batch.scheduler_stats for batch in driver.batches()]
    return [(one.num_running_reqs, one.num_waiting_reqs) for one in stats if one is not None]


def test_without_options_nothing_waits() -> None:
    """The ceiling engine runs all at once; a schedule has 256 seats."""
    for schedule, waiting in ((None, 0), (True, 44)):
        driver = drive(schedule=schedule)
        for number in range(300):
            driver.add(f"r{number}", 2)
        driver.step()
        assert driver.engine.counts == (300 - waiting, waiting)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": True}, {"a": 0, "b": 0, "c": 0}),
        ({"max_num_seqs": 2}, {"a": 0, "b": 0, "c": 2}),
        ({"max_num_batched_tokens": 256}, {"a": 0, "b": 0, "c": 1}),
        ({"long_prefill_token_threshold": 50}, {"a": 1, "b": 1, "c": 1}),
        ({"scheduling_policy": "priority", "max_num_seqs": 1}, {"c": 0, "b": 2, "a": 4}),
        (
            {"num_gpu_blocks": 17, "max_model_len": 256, "enable_prefix_caching": False},
            {"a": 0, "b": 0, "c": 2},
        ),
        ({"block_size": 128, "num_gpu_blocks": 3, "max_model_len": 256}, {"a": 0, "b": 0, "c": 2}),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 256,
                "max_model_len": 256,
            },
            {"a": 0, "b": 0, "c": 1},
        ),
    ],
)
def test_each_option_of_the_schedule_counts(
    options: dict[str, Any], expected: dict[str, int]
) -> None:
    """It decides in which step requests get their first tokens."""
    driver = drive(**options)
    for name, priority in (("a", 3), ("b", 2), ("c", 1)):
        driver.add(name, 2, prompt_token_ids=prompt(100, first=1000 * ord(name)), priority=priority)
    driver.run()
    assert first_steps(driver) == expected


def test_cached_tokens_are_told() -> None:
    """Unless the cache is off, reset, or the prompt is salted."""
    driver = drive(schedule=True)

    def cached(request_id: str, **fields: Any) -> int:
        driver.add(request_id, 1, prompt_token_ids=prompt(64), **fields)
        driver.run()
        stats = driver.outputs(request_id)[0].prefill_stats
        assert stats is not None
        return stats.num_cached_tokens

    assert [cached("a"), cached("b")] == [0, 48]
    assert cached("c", cache_salt="salt") == 0
    assert cached("d", params={"skip_reading_prefix_cache": True}) == 0
    assert driver.call("reset_prefix_cache")
    assert cached("e") == 0
    driver.call("pause_scheduler", "abort", True)
    driver.call("resume_scheduler")
    assert cached("f") == 0
    driver.call("pause_scheduler", "abort", False)
    driver.call("resume_scheduler")
    assert cached("g") == 48


def chunk(request_id: str, *, resumable: bool = False, count: int = 4096) -> EngineCoreRequest:
    """A request for a token after a prompt of 256 blocks."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt(count),
        sampling_params=EngineCoreSamplingParams(max_tokens=1),
        resumable=resumable,
    )


def test_blocks_are_hashed_before_a_prompt_is_taken() -> None:
    """They are found by these hashes as by those that are computed as it is scheduled."""
    driver = drive(schedule=True, max_num_batched_tokens=8192)
    driver.keep(driver.engine.take(chunk("a"), 0.0))
    driver.run()
    hashes, slices = finish(driver.engine.hash_prompt(chunk("b")))
    driver.keep(driver.engine.take(chunk("b"), 0.0, hashes))
    driver.run()
    driver.keep(driver.engine.take(chunk("c"), 0.0, [bytes(32)] * 256))
    driver.run()

    assert slices == 3
    assert len(hashes) == 256
    stats = [driver.outputs(name)[0].prefill_stats for name in "abc"]
    assert [one and one.num_cached_tokens for one in stats] == [0, 4080, 0]


def test_what_is_not_cached_is_not_hashed() -> None:
    driver, off = drive(schedule=True), drive(schedule=True, enable_prefix_caching=False)
    unlimited, small = drive(), drive(schedule=True, max_model_len=100)
    assert finish(driver.engine.hash_prompt(AbortRequests(["a"]))) == ([], 0)
    assert finish(off.engine.hash_prompt(chunk("a"))) == ([], 0)
    assert finish(small.engine.hash_prompt(chunk("a"))) == ([], 0)
    assert finish(unlimited.engine.hash_prompt(chunk("a"))) == ([], 0)
    assert finish(driver.engine.hash_prompt(chunk("a", count=15))) == ([], 0)


def test_hashes_of_a_chunk_that_has_to_wait_are_not_those_of_the_one_before() -> None:
    driver = drive(schedule=True, max_num_batched_tokens=8192)
    for request_id, hashes in (("a", None), ("a", [bytes(32)] * 256)):
        driver.engine.take(chunk(request_id, resumable=True), 0.0, hashes)
    driver.run()
    driver.keep(driver.engine.take(chunk("b"), 0.0))
    driver.run()
    (output,) = driver.outputs("b")
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_cached_tokens == 4080


def test_resets_are_answered_as_the_engine_does() -> None:
    """While requests run it is refused, unless these may be preempted."""
    driver = drive(schedule=True)
    driver.add("a", 10)
    driver.step(2)
    assert driver.call("reset_prefix_cache") is False
    assert driver.call("reset_prefix_cache", True) is True
    assert driver.engine.counts == (0, 1)
    driver.run()
    assert len(driver.tokens("a")) == 10
    assert [event.type.name for output in driver.outputs("a") for event in output.events or ()] == [
        "QUEUED",
        "SCHEDULED",
        "PREEMPTED",
        "SCHEDULED",
    ]


@pytest.mark.parametrize(
    "options", [{}, {"inter_token_latency": 0.001}, {"fast_path": False}], ids=str
)
def test_a_step_of_many_requests_is_made_in_slices(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To admit them, and to end them; what comes meanwhile is taken after the step."""
    whole = drive(schedule=True, max_num_seqs=1000, **options)
    sliced = drive(schedule=True, max_num_seqs=1000, **options)
    for driver in (whole, sliced):
        if driver is sliced:
            limit_steps(monkeypatch, 8)
        for number in range(100):
            driver.add(f"r{number}", 2)
    whole.run()
    seen: list[int] = []
    question = 0
    while sliced.has_work:
        sliced.step()
        seen.append(sliced.engine.counts[0])
        if not question and 0 < seen[-1] < 100:
            question = sliced.post("get_supported_tasks")
            assert sliced.answer(question) is None

    assert sliced.answer(question) is not None
    assert max(after - before for before, after in itertools.pairwise([0, *seen])) <= 9
    assert {abs(after - before) for before, after in itertools.pairwise(seen)} >= {0, 8}
    assert [[o.request_id for o in b.outputs] for b in sliced.batches()] == [
        [o.request_id for o in b.outputs] for b in whole.batches()
    ]
    for number in range(100):
        assert sliced.tokens(f"r{number}") == whole.tokens(f"r{number}")
        assert sliced.finish_reason(f"r{number}") is FinishReason.LENGTH


def test_adapters_are_limited_in_a_step() -> None:
    """A request with one adapter too many waits for the first."""
    driver = drive(schedule=True, max_loras=1)
    for name, number in (("a", 1), ("b", 2)):
        driver.add(name, 2, lora_request=[name, number, f"/{name}", None, False, False])
    driver.run()
    assert first_steps(driver) == {"a": 0, "b": 2}


def test_pauses_hold_back_what_they_say() -> None:
    """``wait`` lets run what runs, and answers then."""
    driver = drive(schedule=True)
    driver.add("a", 3)
    driver.step()
    call_id = driver.post("pause_scheduler", "wait", True)
    driver.add("b", 1)
    assert driver.answer(call_id) is None
    driver.run()
    assert driver.answer(call_id) is not None
    assert (len(driver.tokens("a")), driver.tokens("b")) == (3, [])
    driver.call("resume_scheduler")
    driver.run()
    assert len(driver.tokens("b")) == 1


def test_aborted_requests_leave_their_seats() -> None:
    """In the queue and while they run."""
    driver = drive(max_num_seqs=1)
    for name in ("a", "b", "c"):
        driver.add(name, 10)
    driver.step()
    driver.abort("b")
    driver.abort("a")
    driver.run()
    assert (len(driver.tokens("a")), driver.tokens("b"), len(driver.tokens("c"))) == (1, [], 10)
    assert stats_of(driver)[-1] == (0, 0)


def test_iteration_details_are_told_on_wish() -> None:
    """They are off by default, as in vLLM."""
    for wished in (False, True):
        driver = drive(schedule=True, enable_logging_iteration_details=wished)
        driver.add("a", 2)
        driver.run()
        stats = driver.batches()[0].scheduler_stats
        assert stats is not None
        assert (stats.iteration_details is not None) is wished


def test_a_late_client_stops_the_engine() -> None:
    """A schedule cannot go on without some of its requests; when the client is back it goes on."""
    driver = drive(schedule=True, client_count=2)
    driver.add("a", 5)
    driver.add("b", 5, client_index=1)
    driver.step()
    driver.engine.hold_clients(frozenset({1}), driver.now)
    driver.step(3)
    assert len(driver.tokens("a")) == 1
    driver.engine.hold_clients(frozenset(), driver.now)
    driver.run()
    assert (len(driver.tokens("a")), len(driver.tokens("b"))) == (5, 5)
    assert {output.request_id for batch in driver.batches(1) for output in batch.outputs} == {"b"}


def test_tokens_are_those_of_an_engine_without_a_schedule() -> None:
    """Long outputs, many requests that come and go, and log probabilities among them."""
    drivers = [drive(), drive(schedule=True), drive(schedule=True, fast_path=False)]
    for driver in drivers:
        for number in range(100):
            params = {"logprobs": 1} if number % 7 == 0 else {}
            driver.add(f"r{number}", 1 + number * 3, params=params)
            driver.step()
        driver.run()
    tokens = [{f"r{n}": driver.tokens(f"r{n}") for n in range(100)} for driver in drivers]
    assert tokens[0] == tokens[1] == tokens[2]
    assert [len(tokens[1][f"r{n}"]) for n in range(100)] == [1 + n * 3 for n in range(100)]


def test_pooling_and_embeddings_are_scheduled() -> None:
    """A pooling request ends with its prompt."""
    driver = drive(max_num_batched_tokens=256, supported_tasks=("generate", "embed"))
    driver.add("a", 1, prompt_token_ids=prompt(600))
    driver.add("p", sampling_params=None, pooling_params=[None, None, None, None, "embed"])
    driver.run()
    assert first_steps(driver) == {"a": 2, "p": 2}
    assert driver.outputs("p")[0].pooling_output is not None


CACHE_STATS = PrefixCacheStats(
    reset=True,
    requests=6,
    queries=7,
    hits=8,
    preempted_requests=9,
    preempted_queries=10,
    preempted_hits=11,
    hits_by_source={"host": 12},
)
STATS = attrs.evolve(
    FULL_STATS,
    num_running_reqs=1,
    num_waiting_reqs=2,
    num_skipped_waiting_reqs=3,
    step_counter=4,
    current_wave=5,
    kv_cache_usage=0.625,
    prefix_cache_stats=CACHE_STATS,
    running_lora_adapters={"b": 2},
)
NUMBERS = SchedulerStats(
    **{
        field.name: getattr(STATS, field.name)
        for field in attrs.fields(SchedulerStats)
        if isinstance(getattr(STATS, field.name), int | float)
    },
    prefix_cache_stats=attrs.evolve(CACHE_STATS, reset=False, hits_by_source={}),
)
"""What is a number in any statistics, each another one."""


def decoded_stats(encoded: bytes) -> SchedulerStats | None:
    frames = MessageTemplate(0, "default").build(MessageBuilder(), encoded, 1.0)
    outputs = decode_outputs([bytes(frame) for frame in frames])
    assert isinstance(outputs, RequestBatchOutputs)
    return outputs.scheduler_stats


def test_statistics_from_the_template_are_whole() -> None:
    """Each number is in its place, and nothing is left of the statistics before."""
    encoder = SchedulerStatsEncoder()

    assert decoded_stats(encoder.encode(NUMBERS)) == NUMBERS
    assert decoded_stats(encoder.encode(SchedulerStats())) == SchedulerStats()


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(SchedulerStats)])
def test_each_field_of_the_statistics_is_sent(name: str) -> None:
    """Alone, also if it is no number."""
    stats = attrs.evolve(SchedulerStats(), **{name: getattr(STATS, name)})

    assert stats != SchedulerStats()
    assert decoded_stats(SchedulerStatsEncoder().encode(stats)) == stats


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(PrefixCacheStats)])
def test_each_field_of_the_prefix_cache_statistics_is_sent(name: str) -> None:
    cache_stats = attrs.evolve(PrefixCacheStats(), **{name: getattr(CACHE_STATS, name)})
    stats = SchedulerStats(prefix_cache_stats=cache_stats)

    assert stats != SchedulerStats()
    assert decoded_stats(SchedulerStatsEncoder().encode(stats)) == stats


@pytest.mark.parametrize("times", [{}, {"inter_token_latency": 2.0}])
def test_counts_are_those_of_a_frontend(times: dict[str, Any]) -> None:
    """At each moment: prompts count with their first token, preemptions with the next one."""
    driver = drive(
        max_num_seqs=3, num_gpu_blocks=8, block_size=2, max_model_len=14, max_num_batched_tokens=5,
        **times,
    )  # fmt: skip
    for name in ("a", "b", "c", "d"):
        driver.add(name, max_tokens=6, prompt_token_ids=[1, 2, 3, 4, 5, 6])
    assert driver.engine.summary.prompt_tokens == 24
    assert driver.engine.summary.prefilled_tokens == 0
    while driver.has_work:
        driver.step()
        summary, told = driver.engine.summary, told_to_frontends(driver.batches())
        assert told == ScheduleCounts(
            summary.prefilled_tokens,
            summary.preemptions,
            summary.prefix_cache_queries,
            summary.prefix_cache_hits,
        )

    assert (told.prompt_tokens, told.preemptions > 0, told.prefix_cache_hits > 0) == (
        24,
        True,
        True,
    )


def test_without_a_schedule_a_prompt_is_prefilled_at_once() -> None:
    driver = drive()
    driver.add("a", prompt_token_ids=[1, 2, 3])

    assert driver.engine.summary.prefilled_tokens == 3


def told_to_frontends(batches: list[RequestBatchOutputs]) -> ScheduleCounts:
    """What messages add up to, counted as vLLM's frontends do."""
    outputs = [output for batch in batches for output in batch.outputs]
    stats = [batch.scheduler_stats for batch in batches if batch.scheduler_stats is not None]
    return ScheduleCounts(
        sum(
            one.prefill_stats.num_prompt_tokens for one in outputs if one.prefill_stats is not None
        ),
        sum(event.type is EventType.PREEMPTED for one in outputs for event in one.events or ()),
        sum(one.prefix_cache_stats.queries for one in stats),
        sum(one.prefix_cache_stats.hits for one in stats),
    )
