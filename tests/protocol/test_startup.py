"""The startup of the frontend side, message by message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ready import ready_response
from tests.recorded import each_version, recording

from trio_vllm.protocol import (
    EngineId,
    FrontendStartup,
    HandshakeReport,
    HandshakeStatus,
    Phase,
    encode_ready_response,
    encode_report,
)

(HELLO,) = encode_report(HandshakeReport(status=HandshakeStatus.HELLO))
(READY,) = encode_report(HandshakeReport(status=HandshakeStatus.READY))


def frames(engine_index: int, payload: bytes) -> list[bytes]:
    return [EngineId.of(engine_index), payload]


def registration(engine_index: int) -> list[bytes]:
    return frames(engine_index, *encode_ready_response(ready_response(engine_index)))


def state(startup: FrontendStartup) -> tuple[Phase | None, int]:
    return startup.phase, startup.steps_missing


def test_one_engine_as_it_should_be() -> None:
    startup = FrontendStartup([0])
    assert state(startup) == (Phase.HELLO, 3)

    assert startup.receive_report(frames(0, HELLO)) == EngineId.of(0)
    assert state(startup) == (Phase.READY, 2)

    assert startup.receive_registration(registration(0)) == 0
    assert state(startup) == (Phase.READY, 1)

    assert startup.receive_report(frames(0, READY)) is None
    assert state(startup) == (None, 0)
    assert startup.ready_responses == {0: ready_response(0)}
    assert startup.notes == []


def test_ready_may_be_seen_before_the_registration() -> None:
    startup = FrontendStartup([0])
    startup.receive_report(frames(0, HELLO))
    startup.receive_report(frames(0, READY))
    assert startup.phase is Phase.REGISTRATION

    startup.receive_registration(registration(0))

    assert startup.phase is None


@each_version
@pytest.mark.parametrize("name", ["engine_handshake_dp1", "dp2_handshake", "moe2_handshake"])
def test_recorded_engines(name: str, version: str) -> None:
    """What real engines sent brings the startup to its end, in the recorded order."""
    startup = FrontendStartup(range(1 if name == "engine_handshake_dp1" else 2))

    for message in recording(name, version).messages:
        assert startup.phase is not None
        if message.receiver != "frontend" or message.channel not in {"handshake", "input"}:
            continue
        index = int(message.sender.removeprefix("engine"))
        received: list[bytes] = [EngineId.of(index), *message.frames]
        if message.channel == "handshake":
            startup.receive_report(received)
        else:
            startup.receive_registration(received)

    assert (startup.phase, startup.notes) == (None, [])
    assert {r.vllm_version for r in startup.ready_responses.values()} == {f"{version}.0"}


@given(data=st.data(), count=st.integers(1, 4))
def test_any_interleaving_ends(data: st.DataObject, count: int) -> None:
    """Each engine keeps its own order, but for its last two messages; theirs mix as they like."""
    startup = FrontendStartup(range(count))
    to_send: dict[int, list[Any]] = {}
    for index in range(count):
        last = [
            (startup.receive_report, frames(index, READY)),
            (startup.receive_registration, registration(index)),
        ]
        hello = (startup.receive_report, frames(index, HELLO))
        to_send[index] = [hello, *data.draw(st.permutations(last))]
    while to_send:
        assert startup.phase is not None
        assert startup.steps_missing == sum(map(len, to_send.values()))
        index = data.draw(st.sampled_from(sorted(to_send)))
        receive, message = to_send[index].pop(0)
        receive(message)
        if not to_send[index]:
            del to_send[index]

    assert (startup.phase, startup.notes) == (None, [])
    assert list(range(count)) == list(startup.ready_responses)


def test_missing_engines_are_those_of_the_phase() -> None:
    startup = FrontendStartup(range(3))
    for index in (0, 2):
        startup.receive_report(frames(index, HELLO))
    assert (startup.phase, startup.missing(Phase.HELLO)) == (Phase.HELLO, [1])

    startup.receive_report(frames(1, HELLO))
    startup.receive_report(frames(1, READY))

    assert (startup.phase, startup.missing(Phase.READY)) == (Phase.READY, [0, 2])
    assert startup.missing(Phase.REGISTRATION) == [0, 1, 2]


def test_only_registrations_if_a_supervisor_does_the_handshake() -> None:
    startup = FrontendStartup(range(4, 6), handshake=False)
    assert (startup.phase, startup.steps_missing) == (Phase.REGISTRATION, 2)

    assert startup.receive_registration(registration(5)) == 5
    assert startup.receive_registration(registration(4)) == 4

    assert (startup.phase, list(startup.ready_responses)) == (None, [4, 5])


def test_restart_before_ready_gets_init_again() -> None:
    startup = FrontendStartup([0])
    startup.receive_report(frames(0, HELLO))
    startup.lose_handshake(0)

    assert startup.receive_report(frames(0, HELLO)) == EngineId.of(0)

    assert startup.notes == ["engine 0 left before it was READY", "engine 0 said HELLO again"]
    assert startup.steps_missing == 2


def test_end_of_the_handshake_connection_after_ready_is_no_news() -> None:
    startup = FrontendStartup([0])
    startup.receive_report(frames(0, HELLO))
    startup.receive_report(frames(0, READY))

    startup.lose_handshake(0)

    assert startup.notes == []


def test_lost_engine_starts_over() -> None:
    startup = FrontendStartup([0, 1])
    startup.receive_report(frames(0, HELLO))
    startup.receive_registration(registration(0))
    startup.receive_report(frames(0, READY))

    startup.lose(0)

    assert (startup.phase, startup.missing(Phase.HELLO)) == (Phase.HELLO, [0, 1])
    assert startup.ready_responses == {}
    assert startup.notes == ["engine 0 was lost during startup"]
    assert startup.receive_report(frames(0, HELLO)) == EngineId.of(0)


# The coordinator's gate --------------------------------------------------------------------------


def gated_startup(count: int) -> FrontendStartup:
    """Up to the gate."""
    startup = FrontendStartup(range(count), coordinator=True)
    for index in range(count):
        startup.receive_report(frames(index, HELLO))
    return startup


def test_gate_opens_when_all_have_subscribed() -> None:
    startup = gated_startup(2)
    assert state(startup) == (Phase.SUBSCRIPTION, 6)
    assert startup.missing(Phase.SUBSCRIPTION) == [0, 1]

    assert not startup.receive_subscription([b"\x01"])
    startup.receive_registration(registration(1))
    assert startup.missing(Phase.SUBSCRIPTION) == [0]

    startup.receive_registration(registration(0))
    # One of them has not subscribed; it is not known which.
    assert startup.missing(Phase.SUBSCRIPTION) == [0, 1]

    assert startup.receive_subscription([b"\x01"])
    assert state(startup) == (Phase.READY, 2)


def test_gate_opens_again_for_who_comes_late() -> None:
    startup = gated_startup(1)
    assert startup.receive_subscription([b"\x01"])

    assert startup.receive_subscription([b"\x01"])

    assert startup.steps_missing == 2


def test_engine_that_is_lost_before_the_gate_opens() -> None:
    startup = gated_startup(2)
    startup.receive_subscription([b"\x01"])
    startup.receive_registration(registration(0))
    startup.lose(0)
    startup.receive_report(frames(0, HELLO))

    assert not startup.receive_subscription([b"\x01"])
    assert startup.receive_subscription([b"\x01"])


@pytest.mark.parametrize("message", [[b"\x00"], [b"\x01", b""], [b"\x01topic"], []])
def test_other_messages_open_no_gate(message: list[bytes]) -> None:
    startup = gated_startup(1)

    assert not startup.receive_subscription(message)

    assert startup.phase is Phase.SUBSCRIPTION


# What should not be there -----------------------------------------------------------------------

UNEXPECTED = {
    "garbled HELLO": (frames(0, b"\xc1"), "engine 0 sent garbage: cannot decode"),
    "HELLO with something behind it": (frames(0, HELLO + b"\0"), "engine 0 sent garbage"),
    "unknown status": (frames(0, b"\x81\xa6status\xa3BYE"), "engine 0 sent garbage"),
    "READY first": (frames(0, READY), "engine 0 said READY out of turn"),
    "index beyond": (frames(2, HELLO), "engine 2, which is not expected, spoke on the handshake"),
    "index far beyond": (frames(65535, HELLO), "engine 65535, which is not expected"),
    "no engine id": ([b"\x80abc", HELLO], "a peer with the id 80616263, which is no engine id"),
    "long id": ([b"x" * 255, HELLO], f"id {'78' * 16}, which"),
    "one frame": ([EngineId.of(0)], "a message of 1 frames came on the handshake socket"),
    "three frames": ([*frames(0, HELLO), b""], "a message of 3 frames came on the handshake"),
}


@pytest.mark.parametrize(("message", "note"), UNEXPECTED.values(), ids=UNEXPECTED)
def test_unexpected_report(message: list[bytes], note: str) -> None:
    """It is noted once and not answered, and brings nothing forward."""
    startup = FrontendStartup([0, 1])

    for _ in range(3):
        assert startup.receive_report(message) is None

    (noted,) = startup.notes
    assert note in noted
    assert startup.steps_missing == 6
    assert startup.receive_report(frames(0, HELLO)) == EngineId.of(0)


UNEXPECTED_REGISTRATIONS = {
    "garbled": (frames(0, b"\xc1"), "engine 0 sent garbage: cannot decode"),
    "empty": (frames(0, b""), "engine 0 sent garbage"),
    "incomplete": (frames(0, b"\x80"), "engine 0 sent garbage"),
    "stranger": (registration(7), "engine 7, which is not expected, spoke on the input socket"),
    "three frames": ([*registration(0), b""], "a message of 3 frames came on the input socket"),
}


@pytest.mark.parametrize(
    ("message", "note"), UNEXPECTED_REGISTRATIONS.values(), ids=UNEXPECTED_REGISTRATIONS
)
def test_unexpected_registration(message: list[bytes], note: str) -> None:
    startup = FrontendStartup([0])

    for _ in range(3):
        assert startup.receive_registration(message) is None

    (noted,) = startup.notes
    assert note in noted
    assert startup.receive_registration(registration(0)) == 0


def test_messages_out_of_turn() -> None:
    startup = FrontendStartup([0])
    startup.receive_report(frames(0, HELLO))
    startup.receive_report(frames(0, READY))
    startup.receive_registration(registration(0))

    assert startup.receive_report(frames(0, READY)) is None
    assert startup.receive_report(frames(0, HELLO)) is None
    assert startup.receive_registration(registration(0)) is None

    assert startup.phase is None
    assert startup.notes == [
        "engine 0 said READY out of turn",
        "engine 0 said HELLO after READY: are there two of it?",
        "engine 0 registered again",
    ]


def test_an_engine_starts_again_whose_registration_was_lost() -> None:
    """Its READY came by another connection, and is no reason not to answer it."""
    startup = FrontendStartup([0])
    startup.receive_report(frames(0, HELLO))
    startup.receive_report(frames(0, READY))

    assert startup.receive_report(frames(0, HELLO)) is not None
    assert startup.receive_registration(registration(0)) == 0
    assert startup.phase is None
    assert startup.notes == ["engine 0 said HELLO again"]


def test_notes_have_an_end() -> None:
    startup = FrontendStartup([0])

    for index in range(1, 1000):
        startup.receive_report(frames(index, HELLO))

    assert len(startup.notes) == 20


@given(
    messages=st.lists(
        st.tuples(st.booleans(), st.lists(st.binary(max_size=40) | st.just(HELLO), max_size=4))
    )
)
def test_garbage_raises_nothing(messages: list[tuple[bool, list[bytes]]]) -> None:
    startup = FrontendStartup([0])

    for is_report, message in messages:
        if is_report:
            startup.receive_report(message)
        else:
            startup.receive_registration(message)
