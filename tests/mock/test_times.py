"""Engines that take time, in virtual time: nothing waits."""

import itertools
import re
import statistics
from typing import Any

import attrs
import pytest
from tests.mock.driver import Driver, drive

from trio_vllm.errors import ConfigurationError
from trio_vllm.mock import MockEngineConfig, ServeOptions
from trio_vllm.mock.config import DEVIATIONS, parse_duration
from trio_vllm.mock.events import PaceLost
from trio_vllm.mock.spread import Spread

START = 1000.0


def add(driver: Driver, request_id: str, max_tokens: int = 3, **fields: Any) -> None:
    """Add a request without letting time pass."""
    driver.now -= 0.25
    driver.add(request_id, max_tokens, **fields)


def run(driver: Driver, *, delay: float = 0.0, until: float = 1e9) -> dict[str, list[float]]:
    """Make each step when it is due, or some time later; when each token of each request came."""
    times: dict[str, list[float]] = {}
    while (due := driver.engine.next_step_time(driver.now)) is not None and due <= until:
        driver.now = max(driver.now, due) + delay
        driver.sent.clear()
        driver.keep(driver.engine.step(driver.now))
        for batch in driver.batches():
            for output in batch.outputs:
                times.setdefault(output.request_id, []).append(driver.now - START)
    return times


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that differ from those with another ``first``."""
    return list(range(first, first + length))


def timed(**config: Any) -> Driver:
    """An engine at the start of time."""
    driver = drive(**config)
    driver.now = START
    return driver


def test_a_step_takes_what_it_computes() -> None:
    """A base, and something for each request, each token of prompts and each of the context."""
    driver = timed(
        step_time=0.01,
        step_time_per_request=0.001,
        step_time_per_prefill_token=0.0001,
        step_time_per_context_token=0.00001,
    )
    add(driver, "a", prompt_token_ids=prompt(100))
    first = 0.01 + 100 * 0.0001 + 100 * 0.00001
    second = first + 0.01 + 0.001 + 101 * 0.00001
    third = second + 0.01 + 0.001 + 102 * 0.00001
    assert run(driver)["a"] == pytest.approx([first, second, third])


def test_cached_tokens_cost_nothing() -> None:
    """All full blocks but the one of the last token."""
    driver = timed(step_time_per_prefill_token=0.001)
    add(driver, "a", 1, prompt_token_ids=prompt(64))
    assert run(driver)["a"] == pytest.approx([0.064])
    add(driver, "b", 1, prompt_token_ids=prompt(64))
    assert run(driver)["b"] == pytest.approx([0.064 + 0.016])


def test_prompts_share_the_steps_of_others() -> None:
    """What comes during a step waits for its end."""
    driver = timed(step_time=0.01, step_time_per_prefill_token=0.001, max_num_batched_tokens=300)
    add(driver, "a", 3, prompt_token_ids=prompt(10))
    run(driver, until=START + 0.015)
    driver.now = START + 0.015
    add(driver, "b", 1, prompt_token_ids=prompt(20, first=50))
    times = run(driver)
    assert times["a"] == pytest.approx([0.02, 0.05, 0.06])
    assert times["b"] == pytest.approx([0.05])


def test_late_steps_do_not_add_up() -> None:
    """Each deadline follows from the one before it."""
    driver = timed(step_time=0.01)
    add(driver, "a", 100)
    assert run(driver, delay=0.004)["a"][-1] == pytest.approx(1.008)
    assert driver.engine.events.pop_entries() == []


def test_lost_pace_is_told_now_and_then() -> None:
    """With how much it is."""
    driver = timed(step_time=0.01)
    add(driver, "a", 100)
    run(driver, delay=0.5)
    lost = [entry for entry in driver.engine.events.pop_entries() if isinstance(entry, PaceLost)]
    assert 1 < len(lost) < 8
    assert lost[0].seconds == pytest.approx(0.4)
    assert lost[1].seconds > 5


@pytest.mark.parametrize("times", [{"step_time": 1.0}, {"inter_token_latency": 1.0}])
def test_time_scale_applies_to_all(times: dict[str, Any]) -> None:
    """A day in a minute."""
    driver = timed(time_scale=0.01, **times)
    add(driver, "a", 11)
    came = run(driver)["a"]
    assert came[-1] - came[0] == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize("schedule", [False, True])
def test_time_scale_applies_to_the_step_interval(schedule: bool) -> None:
    """Whether there is a schedule or not."""
    driver = timed(schedule=schedule, step_interval=1.0, time_scale=0.01)
    add(driver, "a", 11)
    came = run(driver)["a"]
    assert came[-1] - came[0] == pytest.approx(0.1, abs=0.001)


def test_step_interval_is_the_least_time_of_a_step() -> None:
    """With a schedule, too."""
    driver = timed(schedule=True, step_interval=0.5)
    add(driver, "a", 2)
    assert run(driver)["a"] == pytest.approx([0.5, 1.0])


def test_tokens_come_at_times_of_their_own() -> None:
    """Each request has its own first, whenever others come."""
    driver = timed(time_to_first_token=0.1, inter_token_latency=0.02)
    add(driver, "a", 4)
    run(driver, until=START + 0.05)
    driver.now = START + 0.05
    add(driver, "b", 3)
    times = run(driver)
    assert times["a"] == pytest.approx([0.1, 0.12, 0.14, 0.16], abs=0.001)
    assert times["b"] == pytest.approx([0.15, 0.17, 0.19], abs=0.001)


def test_seats_are_limited_for_requests_with_times_of_their_own() -> None:
    """The second is admitted when the first has ended."""
    driver = timed(time_to_first_token=0.1, max_num_seqs=1)
    add(driver, "a", 1)
    add(driver, "b", 1)
    assert run(driver)["b"] == pytest.approx([0.2], abs=0.002)


def test_prefill_takes_time_by_what_is_not_cached() -> None:
    """Unless a time to the first token is given."""
    driver = timed(prefill_overhead=0.1, prefill_time_per_token=0.001)
    add(driver, "a", 1, prompt_token_ids=prompt(64))
    assert run(driver)["a"] == pytest.approx([0.164])
    driver.now = START
    add(driver, "b", 1, prompt_token_ids=prompt(64))
    assert run(driver)["b"] == pytest.approx([0.116])


def test_a_prompt_prefilled_elsewhere_takes_the_transfer() -> None:
    """As its parameters say."""
    driver = timed(time_to_first_token=1.0, kv_cache_transfer_latency=0.25)
    extra = {"kv_transfer_params": {"do_remote_prefill": True}}
    add(driver, "a", 1, params={"extra_args": extra})
    assert run(driver)["a"] == pytest.approx([0.25])


def test_load_makes_requests_slower() -> None:
    """Alone as fast as asked, and at max_num_seqs slower by the factor."""
    for count, expected in ((1, 0.1), (5, 0.3)):
        driver = timed(inter_token_latency=0.1, time_factor_under_load=3.0, max_num_seqs=5)
        for number in range(count):
            add(driver, f"r{number}", 2)
        came = run(driver)["r0"]
        assert came[1] - came[0] == pytest.approx(expected, abs=0.001)


def test_preempted_requests_get_all_their_tokens() -> None:
    """Though their rows were withheld when they lost their blocks."""
    driver = timed(
        inter_token_latency=0.01, num_gpu_blocks=5, block_size=4, max_model_len=16, schedule=True
    )
    for name in ("a", "b"):
        add(driver, name, 10, prompt_token_ids=prompt(5, first=ord(name)))
    times = run(driver)
    assert [len(times[name]) for name in ("a", "b")] == [10, 10]
    assert times["b"][-1] > times["a"][-1]


def test_a_wait_for_blocks_is_not_the_machines() -> None:
    """The times of a preempted request begin anew with its admission."""
    driver = timed(
        time_to_first_token=0.1,
        inter_token_latency=0.02,
        max_num_seqs=2,
        num_gpu_blocks=5,
        block_size=16,
        max_model_len=64,
    )
    add(driver, "a", 40, prompt_token_ids=prompt(20))
    add(driver, "b", 40, prompt_token_ids=prompt(20, first=100))
    times = run(driver)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times["b"])]
    assert driver.engine.summary.seconds_behind == 0
    assert driver.engine.summary.preemptions > 0
    assert times["b"][-1] > times["a"][-1]
    assert min(gaps) == pytest.approx(0.02)
    assert sum(gap > 0.021 for gap in gaps) == 1


PACES: list[dict[str, Any]] = [{"inter_token_latency": 0.02}, {"step_time": 0.02}]
"""Of a request and of a step."""


@pytest.mark.parametrize("times", PACES, ids=["request", "step"])
@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        (("pause_scheduler", "keep", False), "resume_scheduler"),
        (("pause_scheduler", "keep", True), "resume_scheduler"),  # which preempts all
        (("sleep", 1, "keep"), "wake_up"),
    ],
    ids=["paused", "preempted", "asleep"],
)
def test_a_pause_is_not_the_machines(
    times: dict[str, Any], stop: tuple[Any, ...], go_on: str
) -> None:
    """What runs goes on after it with the gaps that were asked for."""
    driver = timed(**times)
    add(driver, "a", 10)
    run(driver, until=START + 0.05)
    driver.now -= 0.25
    driver.post(*stop)
    run(driver)
    driver.now += 10
    driver.post(go_on)
    resumed = driver.now - START
    came = run(driver)["a"]
    assert driver.engine.summary.seconds_behind == 0
    assert len(came) > 5
    assert came == pytest.approx([resumed + 0.02 * n for n in range(1, 1 + len(came))])


@pytest.mark.parametrize("times", PACES, ids=["request", "step"])
@pytest.mark.parametrize("is_aborted", [False, True], ids=["released", "aborted"])
def test_a_wait_for_a_client_is_not_the_machines(times: dict[str, Any], is_aborted: bool) -> None:
    """It ends when the client has caught up, or when its requests are aborted."""
    driver = timed(client_count=2, **times)
    add(driver, "a", 10)
    add(driver, "b", 10, client_index=1)
    run(driver, until=START + 0.05)
    driver.engine.hold_clients(frozenset({1}), driver.now)
    run(driver)
    driver.now += 10
    if is_aborted:
        driver.abort("b")
    else:
        driver.engine.hold_clients(frozenset(), driver.now)
    released = driver.now - START
    came = run(driver)["a"]
    assert driver.engine.summary.seconds_behind == 0
    assert len(came) > 5
    assert came == pytest.approx([released + 0.02 * n for n in range(len(came))])


def test_pauses_during_a_step_lose_nothing() -> None:
    """A reset that preempts waits for the end of the step."""
    driver = timed(step_time=0.01)
    add(driver, "a", 4)
    run(driver, until=START + 0.015)
    driver.now = START + 0.015 - 0.25
    driver.post("reset_prefix_cache", True)
    came = run(driver)["a"]
    assert len(came) == 3
    assert driver.engine.next_step_time(driver.now) is None


def test_spread_is_as_documented() -> None:
    """Normal, cut off, and the same for the same request."""
    spread = Spread(0.02, 0.006)
    drawn = [spread.draw(7, position) for position in range(5000)]
    assert statistics.mean(drawn) == pytest.approx(0.02, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(0.006, rel=0.05)
    assert drawn == [spread.draw(7, position) for position in range(5000)]
    wide = [Spread(0.02, 0.02).draw(7, position) for position in range(5000)]
    assert (min(wide), max(wide)) == pytest.approx((0.006, 0.034))


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("time_to_first_token_std_dev", {"time_to_first_token": 1.0}),
        ("inter_token_latency_std_dev", {"inter_token_latency": 1.0}),
        ("prefill_time_std_dev", {"prefill_time_per_token": 1.0}),
        ("kv_cache_transfer_latency_std_dev", {"kv_cache_transfer_latency": 1.0}),
    ],
)
def test_each_deviation_is_drawn(name: str, mean: dict[str, Any]) -> None:
    """And at most 30 % of its mean."""
    driver = timed(**mean, **{name: 0.2})
    extra = {"kv_transfer_params": {"do_remote_prefill": True}}
    params = {"extra_args": extra} if "transfer" in name else {}
    for number in range(5):
        add(driver, f"r{number}", 2, params=params, prompt_token_ids=[number])
    came = run(driver)
    lengths = [last - first for first, last in came.values()]
    starts = [first for first, _ in came.values()]
    assert statistics.stdev(lengths if name.startswith("inter") else starts) > 0.05
    with pytest.raises(ConfigurationError, match="more than 30%"):
        MockEngineConfig(**{**mean, name: 0.31})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step_time": 1.0, "inter_token_latency": 1.0}, "there can be one kind only"),
        ({"step_interval": 1.0, "inter_token_latency": 1.0}, "there can be one kind only"),
        (
            {"num_speculative_tokens": 2, "kv_cache_transfer_latency": 1.0},
            "num_speculative_tokens takes times of a step",
        ),
        ({"step_time": 1.0, "schedule": False}, "takes a schedule"),
        ({"step_time": float("inf")}, "step_time must be finite"),
        ({"time_factor_under_load": 0.5}, "must be at least 1"),
        ({"time_scale": 0.0}, "must be more than 0"),
    ],
)
def test_times_without_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    """In one line that names the option."""
    with pytest.raises(ConfigurationError, match=reason):
        MockEngineConfig(**options)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("1.5s", 1.5),
        ("2", 2.0),
        ("50us", 5e-5),
        ("50µs", 5e-5),
        ("1ns", 1e-9),
        ("2 min", 120.0),
        ("1e-3", 0.001),
        ("inf", float("inf")),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """A number, and perhaps a unit."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "1 parsec", "1,5s", "nan"])
def test_no_durations(text: str) -> None:
    """Anything else."""
    with pytest.raises(ValueError, match=r"no duration|could not convert"):
        parse_duration(text)


TIMES = [
    (cls, field.name)
    for cls in (MockEngineConfig, ServeOptions)
    for field in attrs.fields(cls)
    if re.search("time|latency|interval|duration|prefill_overhead", field.name)
    and field.name not in {"time_factor_under_load", "time_scale"}
]


@pytest.mark.parametrize(("cls", "name"), TIMES)
def test_each_time_may_be_a_text(cls: type[MockEngineConfig | ServeOptions], name: str) -> None:
    needed: dict[str, Any] = {"pd_role": "prefill"} if name == "kv_lease_duration" else {}
    if name in DEVIATIONS:
        needed = {DEVIATIONS[name]: "100ms"}
    given: dict[str, Any] = {name: "20ms"}

    assert getattr(cls(**needed, **given), name) == 0.02
    given = {name: "20 parsecs"}
    with pytest.raises(
        ConfigurationError, match=f"{name} must be a time such as 20ms, .*'20 parsecs'"
    ):
        cls(**given)


def test_there_are_times() -> None:
    assert len(TIMES) == 19


def test_what_is_no_time_takes_no_unit() -> None:
    with pytest.raises(ConfigurationError, match="time_scale must be more than 0"):
        MockEngineConfig(time_scale="20ms")  # type: ignore[arg-type]


def test_rows_of_requests_with_their_own_times_stand_in_the_order_of_admission() -> None:
    """Also if a request has the place in memory of one that was admitted before the others."""
    driver = timed(inter_token_latency=0.02)
    for name in ("a", "b", "c"):
        add(driver, name, 2 if name == "a" else 30)
    run(driver, until=START + 0.05)
    driver.now = START + 0.06
    add(driver, "d", 30)
    driver.sent.clear()
    for _ in range(4):
        driver.now += 0.02
        driver.keep(driver.engine.step(driver.now))
    rows = [[output.request_id for output in batch.outputs] for batch in driver.batches()]

    assert rows[-1] == ["b", "c", "d"]
