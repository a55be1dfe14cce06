"""The fast path and the plain path send the same, whatever happens in whatever order."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.mock.driver import Driver, drive

from trio_vllm.mock.fast_batch import MADE_AT_ONCE
from trio_vllm.mock.unlimited import STARTS_AT_ONCE

IDS = [*"abcdefgh", "a longer id", "ü" * 40, "x" * 300, "y" * 5000, ""]

LOGPROBS = st.one_of(
    st.fixed_dictionaries(
        {"logprobs": st.sampled_from([0, 1, 1, 5, 62, 63, 70])},
        optional={
            "temperature": st.sampled_from([0.0, 1.0]),
            "top_k": st.sampled_from([1, 3, 100_000]),
            "stop_token_ids": st.lists(st.integers(0, 30), max_size=2),
            "_eos_token_id": st.sampled_from([2, 100_000]),
        },
    ),
    st.sampled_from(
        [
            {"logprob_token_ids": [1] * 40},
            {"logprobs": 1, "logprob_token_ids": [3]},
            {"logprobs": 2, "min_tokens": 5, "stop_token_ids": [*range(20)]},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"trace_decode_token_ids": [1, 2, 3], "logprobs": 1},
        ]
    ),
)

ACTIONS = st.one_of(
    st.tuples(st.just("logprobs"), st.sampled_from(IDS), st.integers(1, 40), LOGPROBS),
    st.tuples(st.just("add"), st.sampled_from(IDS), st.integers(0, 40), st.integers(0, 1)),
    st.tuples(st.just("stop"), st.sampled_from(IDS), st.lists(st.integers(0, 30), max_size=3)),
    st.tuples(st.just("abort"), st.lists(st.sampled_from(IDS), max_size=4)),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("pause"), st.sampled_from(["abort", "wait", "keep"])),
    st.tuples(st.just("resume")),
    st.tuples(st.just("reset"), st.booleans()),
    st.tuples(st.just("version"), st.sampled_from(["v1", "v2"])),
)


def act(driver: Driver, action: tuple[Any, ...]) -> None:
    match action:
        case ("add", request_id, max_tokens, client_index):
            driver.add(request_id, max_tokens, client_index=client_index)
        case ("logprobs", request_id, max_tokens, params):
            driver.add(request_id, max_tokens, client_index=max_tokens % 2, params=params)
        case ("many", count, max_tokens):
            for number in range(count):
                driver.add(f"{number} of {count}", max_tokens, client_index=number % 2)
        case ("stop", request_id, stop_token_ids):
            params = {"stop_token_ids": stop_token_ids}
            driver.add(request_id, 60, params=params)
        case ("abort", request_ids):
            driver.abort(*request_ids)
        case ("step", count):
            driver.step(count)
        case ("pause", mode):
            driver.post("pause_scheduler", mode)
        case ("resume",):
            driver.post("resume_scheduler")
        case ("reset", running):
            driver.post("reset_prefix_cache", running)
        case ("version", version):
            driver.post("set_weight_version", version)


def without_arrays(_: object, __: object, value: Any) -> Any:
    """What can be compared, and tells the same."""
    is_array = isinstance(value, np.ndarray)
    return (value.dtype.str, value.shape, value.tobytes()) if is_array else value


def comparable(driver: Driver) -> list[Any]:
    """All that was sent, without the order of the rows in a message, which is free."""
    sent = []
    for client_index, outputs in driver.sent:
        fields = attrs.asdict(outputs, value_serializer=without_arrays)
        if "outputs" in fields:
            fields["outputs"] = sorted(fields["outputs"], key=lambda o: str(o["request_id"]))
            fields["finished_requests"] = sorted(fields["finished_requests"] or ())
        sent.append((client_index, fields))
    return sent


@given(
    actions=st.lists(ACTIONS, max_size=30),
    chunk_size=st.sampled_from([1, 1, 2, 7]),
    vocab_size=st.sampled_from([32, 70_000]),
    has_coordinator=st.booleans(),
    lengths=st.sampled_from([{}, {"output_tokens_mean": 8.0}]),
)
@examples(300)
def test_both_paths_send_the_same(
    actions: list[tuple[Any, ...]],
    chunk_size: int,
    vocab_size: int,
    has_coordinator: bool,
    lengths: dict[str, Any],
) -> None:
    """Message by message: outputs, statistics, times, finished requests, answers."""
    drivers = [
        drive(
            client_count=2,
            fast_path=fast_path,
            output_token_chunk_size=chunk_size,
            vocab_size=vocab_size,
            max_model_len=1000,
            has_coordinator=has_coordinator,
            **lengths,
        )
        for fast_path in (True, False)
    ]
    for driver in drivers:
        for action in actions:
            act(driver, action)
        driver.post("resume_scheduler")
        driver.run()

    fast, plain = drivers
    assert comparable(fast) == comparable(plain)
    assert fast.engine.summary == plain.engine.summary
    assert not fast.engine.has_unfinished


MANY = st.tuples(st.just("many"), st.integers(2, 40), st.integers(1, 60))


def schedule(
    seats_and_budget: tuple[int, int], num_gpu_blocks: int, block_size: int
) -> dict[str, Any]:
    """A schedule for two clients; the blocks are counted in those of 16 tokens."""
    blocks = num_gpu_blocks * 16 // block_size
    return {
        "client_count": 2,
        "max_num_seqs": seats_and_budget[0],
        "max_num_batched_tokens": seats_and_budget[1],
        "num_gpu_blocks": blocks,
        "block_size": block_size,
        "max_model_len": min(400, (blocks - 1) * block_size),
        "vocab_size": 70_000,
    }


@given(
    actions=st.lists(st.one_of(ACTIONS, MANY), max_size=15),
    seats_and_budget=st.sampled_from([(3, 7), (100, 101), (100, 2048)]),
    num_gpu_blocks=st.sampled_from([30, 1000]),
    times=st.sampled_from([{}, {"step_time": 2.5}, {"inter_token_latency": 2.5}]),
)
@examples(40)
def test_both_paths_of_a_schedule_send_the_same(
    actions: list[tuple[Any, ...]],
    seats_and_budget: tuple[int, int],
    num_gpu_blocks: int,
    times: dict[str, Any],
) -> None:
    """With preemptions, prompts in chunks, two clients, and many requests that end at once."""
    drivers = [
        drive(
            client_count=2,
            fast_path=fast_path,
            max_num_seqs=seats_and_budget[0],
            max_num_batched_tokens=seats_and_budget[1],
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=400,
            vocab_size=70_000,
            **times,
        )
        for fast_path in (True, False)
    ]
    for driver in drivers:
        for action in actions:
            act(driver, action)
        driver.post("resume_scheduler")
        driver.run()

    fast, plain = drivers
    assert comparable(fast) == comparable(plain)
    assert not fast.engine.has_unfinished


@given(
    actions=st.lists(ACTIONS, max_size=30),
    chunk_size=st.sampled_from([1, 1, 2, 7]),
    vocab_size=st.sampled_from([32, 70_000]),
    client_count=st.integers(1, 2),
)
@examples(300)
def test_several_steps_at_once_send_the_same(
    actions: list[tuple[Any, ...]], chunk_size: int, vocab_size: int, client_count: int
) -> None:
    """For each client the same messages in the same order, but for their times."""
    config = {"output_token_chunk_size": chunk_size, "vocab_size": vocab_size}
    single, several = (drive(client_count=client_count, **config) for _ in range(2))
    for action in actions:
        act(single, action)
        if action[0] == "step":
            several.step_at_once(action[1])
        else:
            act(several, action)
    single.step(200)
    several.step_at_once(200)

    for client_index in range(client_count):
        assert messages_for(client_index, single) == messages_for(client_index, several)
    assert attrs.evolve(single.engine.summary, end=0) == attrs.evolve(several.engine.summary, end=0)


@given(
    actions=st.lists(st.one_of(ACTIONS, MANY), max_size=15),
    seats_and_budget=st.sampled_from([(3, 7), (100, 101), (40, 40), (100, 2048)]),
    num_gpu_blocks=st.sampled_from([30, 120, 1000]),
    block_size=st.sampled_from([1, 3, 16]),
    enable_prefix_caching=st.booleans(),
    has_events=st.booleans(),
    has_coordinator=st.booleans(),
)
@examples(60)
def test_several_steps_of_a_schedule_at_once_are_those_of_the_scheduler(
    actions: list[tuple[Any, ...]],
    seats_and_budget: tuple[int, int],
    num_gpu_blocks: int,
    block_size: int,
    enable_prefix_caching: bool,
    has_events: bool,
    has_coordinator: bool,
) -> None:
    """The same messages, statistics and KV-cache events as one by one on the plain path."""
    config: dict[str, Any] = {
        **schedule(seats_and_budget, num_gpu_blocks, block_size),
        "has_coordinator": has_coordinator,
        "enable_prefix_caching": enable_prefix_caching,
    }
    if has_events and enable_prefix_caching:
        config["kv_events_config"] = '{"enable_kv_cache_events": true}'
    several, plain = drive(**config), drive(fast_path=False, **config)
    for action in [*actions, ("resume",), ("step", 1000)]:
        act(plain, action)
        if action[0] == "step":
            several.step_at_once(action[1])
        else:
            act(several, action)

    for client_index in range(2):
        assert messages_for(client_index, several) == messages_for(client_index, plain)
    assert several.engine.pop_kv_events() == plain.engine.pop_kv_events()
    assert not any(several.engine.counts) or several.engine.counts == plain.engine.counts


@given(
    actions=st.lists(st.one_of(ACTIONS, MANY), max_size=15),
    seats_and_budget=st.sampled_from([(3, 7), (40, 40), (100, 100), (100, 2048)]),
    num_gpu_blocks=st.sampled_from([30, 120, 1000]),
    block_size=st.sampled_from([1, 2, 3, 16]),
    times=st.fixed_dictionaries(
        {"inter_token_latency": st.sampled_from([0.0, 0.003, 0.02])},
        optional={
            "inter_token_latency_std_dev": st.just(0.0005),
            "time_to_first_token": st.just(0.05),
            "time_factor_under_load": st.just(3.0),
        },
    ),
    has_events=st.booleans(),
    delay=st.sampled_from([0.0, 0.004, 0.3]),
)
@examples(100)
def test_both_paths_of_requests_with_their_own_times_send_the_same(
    actions: list[tuple[Any, ...]],
    seats_and_budget: tuple[int, int],
    num_gpu_blocks: int,
    block_size: int,
    times: dict[str, float],
    has_events: bool,
    delay: float,
) -> None:
    """At the same times: in steps that are made when they are due, or some time later."""
    config = schedule(seats_and_budget, num_gpu_blocks, block_size) | times
    if times["inter_token_latency"] == 0.0:
        config |= {"time_to_first_token": 0.01, "inter_token_latency_std_dev": 0.0}
    if has_events:
        config["kv_events_config"] = '{"enable_kv_cache_events": true}'
    drivers = [drive(fast_path=fast_path, **config) for fast_path in (True, False)]
    for driver in drivers:
        for action in [*actions, ("resume",), ("step", 10_000)]:
            if action[0] == "step":
                step_when_due(driver, action[1], delay)
            else:
                act(driver, action)
                driver.now -= 0.249

    fast, plain = drivers
    assert comparable(fast) == comparable(plain)
    assert fast.engine.pop_kv_events() == plain.engine.pop_kv_events()
    lost = [summary.seconds_behind for summary in (fast.engine.summary, plain.engine.summary)]
    assert lost[0] == pytest.approx(lost[1])
    assert attrs.evolve(fast.engine.summary, seconds_behind=0) == attrs.evolve(
        plain.engine.summary, seconds_behind=0
    )


def step_when_due(driver: Driver, count: int, delay: float) -> None:
    """Make steps when they are due, or some time later, while there are any."""
    for _ in range(count):
        due = driver.engine.next_step_time(driver.now)
        if due is None:
            return
        driver.now = max(driver.now, due) + delay
        driver.keep(driver.engine.step(driver.now))


def test_steps_of_a_schedule_are_made_at_once_where_that_is_possible() -> None:
    """Until a request ends, and not while one could be admitted, or steps take time."""
    driver = drive(schedule=True, max_num_seqs=2)
    driver.add("a", 40)
    driver.add("b", 200)
    driver.step(2)

    assert len(driver.engine.steps(200.0, 32)) == 32
    assert len(driver.engine.steps(201.0, 32)) == 5
    driver.step()
    driver.step()
    assert len(driver.engine.steps(202.0, 32)) == 32
    assert len(driver.engine.steps(202.0, 1)) == 1
    assert len(made_at_once(step_time=0.1)) == 1
    assert len(made_at_once(inter_token_latency=0.1)) == 1
    assert len(made_at_once(schedule=True, enable_logging_iteration_details=True)) == 1


def test_steps_are_made_at_once_while_a_waiting_request_lacks_blocks() -> None:
    """It is admitted in the same step as on the plain path."""
    config: dict[str, Any] = {"num_gpu_blocks": 12, "max_model_len": 160}
    several, plain = drive(**config), drive(fast_path=False, **config)
    for driver in (several, plain):
        driver.add("a", 80, prompt_token_ids=[*range(60)])
        driver.step(2)
        driver.add("b", 2, prompt_token_ids=[*range(100, 258)])
        driver.step(2)
    assert len(several.engine.steps(200.0, 32)) == 32
    plain.step(32)
    several.sent.clear()
    plain.sent.clear()
    several.step_at_once(60)
    plain.step(60)

    assert messages_for(0, several) == messages_for(0, plain)
    assert len(several.tokens("b")) == 2


def made_at_once(**config: Any) -> list[Any]:
    """What an engine with one request makes when it is asked for several steps."""
    driver = drive(**config)
    driver.add("a", 100)
    driver.step(2)
    return driver.engine.steps(driver.now + 1.0, 32)


def messages_for(client_index: int, driver: Driver) -> list[Any]:
    """What one client got, without times."""
    messages = []
    for to, fields in comparable(driver):
        if to == client_index:
            for output in fields.get("outputs", ()):
                for event in output["events"] or ():
                    event["timestamp"] = 0.0
            messages.append(fields | {"timestamp": 0.0})
    return messages


@pytest.mark.parametrize(
    ("request_count", "id_length", "step_counts"),
    [
        pytest.param(8, 500, (32, 5), id="written at once"),
        pytest.param(16, 500, (1 + MADE_AT_ONCE // (16 * 508),) * 2, id="one by one"),
        pytest.param(400, 500, (1, 1), id="large"),
    ],
)
@pytest.mark.parametrize("client_count", [1, 2])
def test_steps_are_made_at_once_where_that_pays(
    request_count: int, id_length: int, step_counts: tuple[int, int], client_count: int
) -> None:
    """Up to the next end, and as many as there may be; not if they are large."""
    driver = drive(client_count=client_count)
    for i in range(request_count):
        driver.add(f"{i:0{id_length}}", 40, client_index=i % client_count)
    driver.step(2)
    counts = [len(driver.engine.steps(now, 32)) for now in (200.0, 201.0)]

    assert [count * client_count for count in step_counts] == counts
    assert client_count == len(driver.engine.steps(202.0, 1))


def test_many_requests_come_and_go() -> None:
    """Batches that grow and shrink by hundreds, with ids of several lengths."""
    drivers = [drive(fast_path=fast_path) for fast_path in (True, False)]
    for driver in drivers:
        for wave in range(4):
            for i in range(200):
                driver.add(f"r{wave}-{i}", 1 + i % 37)
            driver.step(11)
            driver.abort(*(f"r{wave}-{i}" for i in range(0, 200, 7)))
        driver.run()

    fast, plain = drivers
    assert comparable(fast) == comparable(plain)


def test_a_long_run_draws_ahead_many_times() -> None:
    """Thousands of steps for a few requests, whose tokens come in larger and larger blocks."""
    driver = drive(vocab_size=1000)
    driver.add("a", 3000)
    driver.step(100)
    driver.add("b", 2000)
    driver.run()
    plain = drive(vocab_size=1000, fast_path=False)
    plain.add("a", 3000)
    plain.add("b", 2000)
    plain.run()

    assert plain.tokens("a") == driver.tokens("a")
    assert plain.tokens("b") == driver.tokens("b")

    driver.add("a", 20)
    driver.run()
    assert plain.tokens("a")[:20] == driver.tokens("a")[3000:]


def test_batches_that_grow_large_and_empty_again() -> None:
    """What was kept for a crowd is given up when it has gone, and the next request is served."""
    for chunk_size in (1, 40):
        driver = drive(output_token_chunk_size=chunk_size)
        for i in range(2000):
            driver.add(f"{i:06}", 200)
        driver.step(3)
        driver.abort(*(f"{i:06}" for i in range(2000)))
        driver.run()
        for i in range(30):
            driver.add("x" * i, 100)
            driver.run()
        driver.add("000000", 200)
        driver.run()

        whole = drive()
        whole.add("000000", 200)
        whole.run()
        assert whole.tokens("000000") == driver.tokens("000000")[-200:]
        assert len(driver.tokens("x" * 29)) == 100


@pytest.mark.parametrize("params", [{}, {"logprob_token_ids": [1]}], ids=["fast", "plain"])
def test_thousands_that_come_together_start_some_at_a_time(params: dict[str, Any]) -> None:
    """The first step starts as many as it has time for, the next one the others."""
    driver, count = drive(), STARTS_AT_ONCE + 3
    for number in range(count):
        driver.add(f"r{number}", 2, params=params)
    driver.step()
    counts = driver.engine.counts
    driver.run()

    assert counts == (STARTS_AT_ONCE, 3)
    assert driver.engine.summary.finished == count
    assert all(len(driver.tokens(f"r{number}")) == 2 for number in (0, count - 1))
