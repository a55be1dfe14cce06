"""Steps in slices: they send what whole steps do, and what comes between two slices is taken behind them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.mock.driver import Driver
from tests.mock.small_slices import limit_steps
from tests.mock.test_deaths import MORTAL
from tests.mock.test_disaggregation import TO_DECODE, ask
from tests.mock.test_paths import ACTIONS, MANY, act, schedule

from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.protocol import FinishReason, Frames


@attrs.define
class Sliced(Driver):
    """A driver whose slices hold few requests; all slices of a step have one time."""

    size: int = 4
    bytes_sent: list[tuple[int, list[bytes]]] = attrs.field(factory=list)

    def keep(self, messages: list[tuple[int, Any]]) -> None:
        self.bytes_sent += [(to, [*map(bytes, frames)]) for to, frames in messages]
        Driver.keep(self, messages)

    def handle(self, frames: Frames) -> None:
        self.keep(self.engine.handle(frames, self.now))

    def is_in_step(self) -> bool:
        """Whether slices are left."""
        return self.engine._has_chores

    def go_on(self) -> None:
        """Do a slice, which is the first of a step if none is under way."""
        with pytest.MonkeyPatch.context() as patch:
            limit_steps(patch, self.size)
            self.keep(self.engine.step(self.now))

    def step_amid(self, actions: list[tuple[Any, ...]]) -> None:
        """Make a step, with actions between its slices, and the rest of them behind it."""
        due = self.engine.next_step_time(self.now)
        if due is not None:
            self.now = max(self.now + 0.001, due)
            self.go_on()
        for action in actions:
            act(self, action)
            if self.is_in_step():
                self.go_on()
        while self.is_in_step():
            self.go_on()


def drive_in_slices(size: int = 4, *, client_count: int = 1, **config: Any) -> Sliced:
    """A driver of a new engine."""
    fields = {name: config.pop(name) for name in ("has_coordinator", "fast_path") if name in config}
    engine = MockEngine(MockEngineConfig(**config), client_count=client_count, **fields)
    return Sliced(engine, size=size)


SCHEDULES = st.one_of(
    st.just({"client_count": 2}),
    st.builds(
        lambda times, *sizes: schedule(*sizes) | times,
        st.sampled_from([{}, {"step_time": 0.01}, {"inter_token_latency": 0.003}]),
        st.sampled_from([(3, 7), (100, 101), (100, 2048)]),
        st.sampled_from([30, 120, 1000]),
        st.sampled_from([3, 16]),
    ),
)
STEPS = st.tuples(st.just("amid"), st.lists(ACTIONS.filter(lambda a: a[0] != "step"), max_size=6))


@given(
    actions=st.lists(st.one_of(MANY, STEPS, STEPS, STEPS), min_size=2, max_size=25),
    config=SCHEDULES,
    size=st.integers(1, 9),
    has_coordinator=st.booleans(),
    fast_path=st.booleans(),
)
@examples(100)
def test_steps_in_slices_send_the_same_bytes(
    actions: list[tuple[Any, ...]],
    config: dict[str, Any],
    size: int,
    has_coordinator: bool,
    fast_path: bool,
) -> None:
    """As if what came in between had come behind the step."""
    config = {**config, "has_coordinator": has_coordinator, "fast_path": fast_path}
    whole, sliced = (drive_in_slices(limit, **config) for limit in (10_000, size))
    for driver in (whole, sliced):
        act(driver, ("many", 20, 3))
        for action in [*actions, ("amid", [("resume",)]), *[("amid", [])] * 1000]:
            if action[0] == "amid":
                driver.step_amid(action[1])
            else:
                act(driver, action)

    assert sliced.bytes_sent == whole.bytes_sent
    assert sliced.engine.summary == whole.engine.summary
    assert sliced.engine.counts == whole.engine.counts
    assert sliced.now == whole.now


KINDS: list[dict[str, Any]] = [
    {},
    {"fast_path": False},
    {"schedule": True},
    {"schedule": True, "inter_token_latency": 0.001},
]


def amid_the_last_step(**config: Any) -> Sliced:
    """An engine in the middle of the step that ends all of its requests."""
    driver = drive_in_slices(**config)
    for number in range(20):
        driver.add(f"r{number}", 1, params=ask(TO_DECODE) if "pd_role" in config else {})
    while driver.engine.counts[1] or driver.engine.counts[0] == 20:
        driver.now += 0.001
        driver.go_on()
    assert driver.is_in_step()
    return driver


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_a_request_that_comes_as_the_last_ones_end_is_run(config: dict[str, Any]) -> None:
    """The step that ends finds nothing more to do, but there is."""
    driver = amid_the_last_step(**config)
    driver.add("late", 3)
    assert driver.engine.has_unfinished
    driver.run()

    assert driver.finish_reason("late") is FinishReason.LENGTH
    assert not driver.engine.has_unfinished


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_a_pause_that_comes_in_a_step_holds_the_next_ones(config: dict[str, Any]) -> None:
    """Though without it they would make tokens and nothing else."""
    driver = drive_in_slices(max_num_seqs=1000, **config) if "schedule" in config else None
    driver = driver or drive_in_slices(**config)
    for number in range(40):
        driver.add(f"r{number}", 1 + 99 * (number % 2))
    while driver.engine.counts[0] in {0, 40} or not driver.is_in_step():
        driver.now += 0.001
        driver.go_on()
    call = driver.post("pause_scheduler", "keep")
    while driver.is_in_step():
        driver.go_on()
    assert driver.answer(call) is not None
    made = driver.engine.summary.tokens
    driver.step(5)

    assert driver.engine.summary.tokens == made


def test_a_shutdown_in_a_step_keeps_no_blocks_for_others() -> None:
    """Neither of requests that end in the same step: the process would wait for their leases."""
    driver = amid_the_last_step(schedule=True, pd_role="prefill", kv_lease_duration=1000.0)
    end = driver.now + 100
    driver.keep(driver.engine.shut_down(driver.now, drain=False))
    driver.run()

    assert driver.now < end


def test_what_cannot_be_read_waits_for_its_turn() -> None:
    """It is another request's id only behind the end of that one."""
    driver = amid_the_last_step()
    driver.add("twice", 1)
    driver.add("twice", "many")
    driver.run()

    assert driver.finish_reason("twice") is FinishReason.LENGTH
    assert driver.engine.summary.tokens == 21


def test_an_engine_that_goes_deaf_in_a_step_takes_nothing_behind_that() -> None:
    """As if each message had come behind the step."""
    driver = amid_the_last_step(**MORTAL)
    driver.add("before", 1)
    driver.handle([b"\x00", b"\xc1"])
    driver.add("behind", 1)
    driver.handle([b"\x00", b"\xc1"])
    driver.run()

    assert driver.engine.is_deaf
    assert driver.finish_reason("before") is FinishReason.LENGTH
    assert driver.finish_reason("behind") is None
