"""Data-parallel waves, for engines that run in lockstep."""

from __future__ import annotations

from tests.mock.driver import Driver, drive

from trio_vllm.protocol import StartDpWave, encode_start_dp_wave


def is_out_of_work(driver: Driver) -> bool:
    return driver.engine.is_in_wave and not driver.engine.has_unfinished


def test_an_idle_engine_announces_the_wave() -> None:
    """Once, with the number that the frontend knows, if that is ahead."""
    driver = drive(1, lockstep=True, has_coordinator=True)
    driver.add("a", current_wave=3)
    driver.add("b", current_wave=2)
    driver.run()

    assert [notice.start_wave for notice in driver.waves()] == [3]
    assert is_out_of_work(driver)


def test_an_engine_that_was_woken_announces_nothing() -> None:
    """The coordinator knows already."""
    driver = drive(1, lockstep=True, has_coordinator=True)
    driver.handle(encode_start_dp_wave(StartDpWave(2, 0)))
    driver.add("a", current_wave=2)
    driver.run()

    assert driver.waves() == []
    assert is_out_of_work(driver)


def test_stale_and_excluding_notices_wake_nobody() -> None:
    """A wave that is over, or one that this engine has begun itself."""
    driver = drive(1, lockstep=True, has_coordinator=True)
    driver.keep(driver.engine.complete_wave(driver.now))
    driver.engine.start_wave(StartDpWave(0, None), driver.now)
    driver.engine.start_wave(StartDpWave(1, 1), driver.now)
    assert not is_out_of_work(driver)

    driver.engine.start_wave(StartDpWave(1, None), driver.now)
    assert is_out_of_work(driver)


def test_the_first_engine_reports_the_end_of_a_wave() -> None:
    """The next wave has the next number."""
    engines = [drive(index, lockstep=True, has_coordinator=True) for index in (0, 1)]
    for driver in engines:
        driver.add("a")
        assert not is_out_of_work(driver)
        driver.run()
        assert is_out_of_work(driver)
        driver.keep(driver.engine.complete_wave(driver.now))
        assert not is_out_of_work(driver)

    first, second = engines
    assert [(w.wave_complete, w.start_wave) for w in first.waves()] == [(None, 0), (0, None)]
    assert [(w.wave_complete, w.start_wave) for w in second.waves()] == [(None, 0)]
    second.add("b")
    assert second.waves()[-1].start_wave == 1


def test_statistics_for_the_coordinator_tell_step_and_wave() -> None:
    """They order what several engines say."""
    driver = drive(lockstep=True, has_coordinator=True)
    driver.add("a", current_wave=5)
    driver.run()

    told = [o.scheduler_stats for o in driver.told_coordinator() if hasattr(o, "scheduler_stats")]
    assert {stats.current_wave for stats in told if stats} == {5}
    steps = [stats.step_counter for stats in told if stats]
    assert sorted(steps) == steps
    assert steps[-1] > steps[0]


def test_a_dense_engine_has_no_waves() -> None:
    """It notes the notice and goes on."""
    driver = drive(has_coordinator=True)
    driver.handle(encode_start_dp_wave(StartDpWave(2)))
    driver.add("a", current_wave=9)
    driver.run()

    assert driver.waves() == []
    assert not is_out_of_work(driver)
    assert driver.engine.complete_wave(driver.now) == []
    assert driver.engine.summary.errors == 1
    assert len(driver.tokens("a")) == 4


def test_a_paused_engine_is_not_woken() -> None:
    """Nor does it announce anything."""
    driver = drive(lockstep=True, has_coordinator=True)
    driver.call("pause_scheduler")
    driver.handle(encode_start_dp_wave(StartDpWave(2)))
    driver.add("a")

    assert driver.waves() == []
    assert not is_out_of_work(driver)
