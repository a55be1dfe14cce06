"""The data-parallel waves as a coordinator sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recorded import recording

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    CoordinatorStats,
    DpControlOutput,
    EngineCoreOutput,
    EngineId,
    RequestBatchOutputs,
    SchedulerStats,
    StartDpWave,
    UtilityCallOutput,
    UtilityOutput,
    Waves,
    decode_coordinator_notice,
    encode_first_request_notice,
    encode_outputs,
    encode_start_dp_wave,
)


def start(wave: int, engine_index: int = 0) -> DpControlOutput:
    return DpControlOutput(engine_index=engine_index, start_wave=wave)


def complete(wave: int) -> DpControlOutput:
    return DpControlOutput(wave_complete=wave)


def test_idle_engines_are_woken_for_a_request() -> None:
    """Again and again, until one of them says that it runs."""
    waves = Waves()

    assert waves.send_request(1) == StartDpWave(0, 1)
    assert waves.send_request(0) == StartDpWave(0, 0)
    assert waves == Waves(0, engines_running=False)

    assert waves.receive_notice(start(0, engine_index=1)) == StartDpWave(0, 1)
    assert waves == Waves(0, engines_running=True)
    assert waves.send_request(0) is None


def test_second_notice_of_a_wave_is_old() -> None:
    """Engine 0 tells of the start, whoever has told of it before."""
    waves = Waves()
    waves.receive_notice(start(0, engine_index=1))

    assert waves.receive_notice(start(0, engine_index=0)) is None


def test_end_of_a_wave() -> None:
    waves = Waves()
    waves.receive_notice(start(0))

    assert waves.receive_notice(complete(0)) is None

    assert (waves.current_wave, waves.engines_running) == (1, False)
    assert waves.send_request(1) == StartDpWave(1, 1)


def test_old_notices_change_nothing() -> None:
    waves = Waves(current_wave=5, engines_running=True)

    for notice in (complete(4), start(4), start(5)):
        assert waves.receive_notice(notice) is None

    assert waves == Waves(5, engines_running=True)


def test_request_that_missed_the_end_of_a_wave() -> None:
    """An idle engine got it and begins the next wave; its notice and the end may cross."""
    waves = Waves(current_wave=3, engines_running=True)

    assert waves.receive_notice(start(4, engine_index=1)) == StartDpWave(4, 1)
    assert waves.receive_notice(complete(3)) is None

    assert waves == Waves(4, engines_running=True)


def test_connection_that_is_back() -> None:
    """It may have missed the start of the wave that runs."""
    waves = Waves()
    assert waves.receive_subscription() is None

    waves.receive_notice(start(0))

    assert waves.receive_subscription() == StartDpWave(0, None)


def test_another_process_is_the_coordinator() -> None:
    waves = Waves()

    waves.follow(CoordinatorStats(None, current_wave=7, engines_running=True))

    assert waves == Waves(7, engines_running=True)


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "complete", "request"]), st.integers(0, 4)),
        max_size=40,
    )
)
def test_wave_never_falls(steps: list[tuple[str, int]]) -> None:
    """And whoever is woken is woken for the current one."""
    waves = Waves()
    for kind, number in steps:
        before = waves.current_wave
        if kind == "request":
            woken = waves.send_request(number)
            assert (woken is None) == waves.engines_running
        else:
            woken = waves.receive_notice(start(number) if kind == "start" else complete(number))
        assert before <= waves.current_wave
        assert woken is None or woken.wave == waves.current_wave


# Messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version"), [("moe2_wave", "0.32"), ("moe2_wave", "0.33"), ("rs_moe2_waves", "0.33")]
)
def test_recorded_notices(name: str, version: str) -> None:
    """One wave of real engines; what a real coordinator broadcast is what ours does."""
    waves = Waves()
    course = []
    broadcasts = []
    for message in recording(name, version).messages:
        if message.channel == "coordinator_output":
            notice = decode_coordinator_notice(message.frames)
            woken = None if notice is None else waves.receive_notice(notice)
            if woken is not None:
                broadcasts.append([bytes(frame) for frame in encode_start_dp_wave(woken)])
            course.append((waves.current_wave, waves.engines_running))
        elif message.channel == "coordinator_input" and message.is_golden:
            assert message.frames in broadcasts

    assert (0, True) in course
    assert course[-1] == (1, False)
    assert broadcasts == [[b"\x02", b"\x92\x00\x00"]]


def test_recorded_first_request_notices() -> None:
    recorded = [
        message.frames
        for message in recording("py_moe2_frontend_coordinator", "0.32").messages
        if message.sender.startswith("api_server") and message.payload is not None
    ]

    ours = [encode_first_request_notice(0, wave) for wave in (0, 1)]

    assert ours == recorded
    assert [encode_first_request_notice(257, 5)] == [[b"\x92\xc4\x02\x01\x01\x05"]]
    assert EngineId.of(257) == b"\x01\x01"


def test_statistics_are_no_notice() -> None:
    message = RequestBatchOutputs(engine_index=1, scheduler_stats=SchedulerStats())

    assert decode_coordinator_notice([bytes(f) for f in encode_outputs(message)]) is None


UNEXPECTED = {
    "outputs": RequestBatchOutputs(engine_index=1, outputs=[EngineCoreOutput("r", [1])]),
    "finished": RequestBatchOutputs(engine_index=1, finished_requests=["r"]),
    "utility": UtilityCallOutput(engine_index=1, output=UtilityOutput(1)),
}


@pytest.mark.parametrize("message", UNEXPECTED.values(), ids=UNEXPECTED)
def test_notice_that_has_no_business_there(
    message: RequestBatchOutputs | UtilityCallOutput,
) -> None:
    with pytest.raises(DecodeError, match="statistics or waves") as caught:
        decode_coordinator_notice([bytes(frame) for frame in encode_outputs(message)])

    assert caught.value.engine_index == 1


@pytest.mark.parametrize("frames", [[b"ENGINE_CORE_DEAD"], [b"\xc1"], [b""], []], ids=str)
def test_garbled_notice(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        decode_coordinator_notice(frames)
