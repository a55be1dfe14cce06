"""Messages of every kind, for ``peers/wire_types.py``: what they say and how we write and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from trio_vllm.client.input_processing import RequestLimits, check_request, fill_defaults
from trio_vllm.protocol import (
    CoordinatorStats,
    EngineCoreRequest,
    EngineLoad,
    HandshakeReport,
    HandshakeStatus,
    StartDpWave,
    UtilityRequest,
    decode_coordinator_stats,
    decode_engine_message,
    decode_init,
    decode_outputs,
    decode_ready_response,
    decode_report,
    encode_abort,
    encode_add,
    encode_coordinator_stats,
    encode_init,
    encode_outputs,
    encode_ready_response,
    encode_report,
    encode_start_dp_wave,
    encode_utility,
)
from wire.outputs import INIT, REGISTRATION, outputs
from wire.requests import requests

Frames = list[bytes]


@attrs.frozen
class Case:
    """One message: what it says, and how we read and write it."""

    name: str
    type: str
    """The name of a type in ``vllm_types.py``."""
    value: Any
    frames: Frames
    read: Callable[[Frames], Any]


LIMITS = RequestLimits(
    max_model_len=512,
    vocab_size=32000,
    accepts_prompt_embeds=True,
    hidden_size=64,
    is_matryoshka=True,
    is_multimodal=True,
    has_reasoning_parser=True,
)
"""Of engines that can take whatever the cases need."""


def cases() -> Iterator[Case]:
    """All that must be understood."""
    for name, request in requests().items():
        resolved = fill_defaults(request)
        check_request(resolved, LIMITS)
        yield Case(name, "request", resolved, framed(encode_add(resolved)), read_as(b"\x00"))
    for name, value in outputs().items():
        yield Case(name, "outputs", value, framed(encode_outputs(value), 0), decode_outputs)
    yield Case(
        "registration",
        "ready",
        REGISTRATION,
        framed(encode_ready_response(REGISTRATION), 0),
        decode_ready_response,
    )
    for init in (INIT, attrs.evolve(INIT, parallel_config={"a": 1, "b": "c", "d": [1, 2]})):
        yield Case("init", "init", init, framed(encode_init(init), 0), decode_init)
    for status in HandshakeStatus:
        report = HandshakeReport(status=status, parallel_config_hash="abc")
        yield Case(status.name, "any", report, framed(encode_report(report), 0), decode_report)
    yield Case("abort", "any", ["a", "ü"], framed(encode_abort(["a", "ü"])), read_ids)
    for call in (
        UtilityRequest(0, 2**64 - 1, "sleep", [1, "abort"]),
        UtilityRequest(1, -(2**63), "collective_rpc", ["m", None, [1.5], {"k": [None, True]}]),
    ):
        value = attrs.astuple(call)
        yield Case(
            call.method, "any", value, framed(encode_utility(call)), as_array(read_as(b"\x03"))
        )
    wave = StartDpWave(3, 1)
    yield Case(
        "wave",
        "any",
        attrs.astuple(wave),
        framed(encode_start_dp_wave(wave)),
        as_array(read_as(b"\x02")),
    )
    stats = CoordinatorStats([EngineLoad(1, 2, 0.5)], 4, True)
    frames = framed(encode_coordinator_stats(stats), 0)
    yield Case(
        "coordinator stats", "any", attrs.astuple(stats), frames, as_array(decode_coordinator_stats)
    )


def framed(message: Any, skip: int = 1) -> Frames:
    """The frames from the payload on."""
    return [bytes(frame) for frame in message[skip:]]


def read_as(kind: bytes) -> Callable[[Frames], Any]:
    return lambda frames: decode_engine_message([kind, *frames])


def as_array(read: Callable[[Frames], Any]) -> Callable[[Frames], Any]:
    """A reader that gives its value without the names of the fields."""
    return lambda frames: attrs.astuple(read(frames))


def read_ids(frames: Frames) -> Any:
    return read_as(b"\x01")(frames).request_ids


def request_from(frames: Frames) -> EngineCoreRequest:
    """The same as our mock engine would read it."""
    request = read_as(b"\x00")(frames)
    assert isinstance(request, EngineCoreRequest)
    return request
