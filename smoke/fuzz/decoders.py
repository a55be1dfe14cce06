"""Targets: each decoder of `trio_vllm.protocol`, and `FrontendStartup`.

A decoder gives a value or a `DecodeError`. What it gives can be written again, unless an engine would
not survive that, and says the same then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fuzz.framing import join, split
from fuzz.vectors import Frames, recorded
from trio_vllm.client.engines import EngineInfo
from trio_vllm.endpoint import parse_endpoint
from trio_vllm.errors import ConfigurationError, DecodeError, InvalidFieldError, StartupError
from trio_vllm.mock import MockEngineConfig
from trio_vllm.mock.engine import data_parallel_size, ready_response
from trio_vllm.protocol import (
    AbortRequests,
    Buffer,
    CodecError,
    EngineCoreRequest,
    EngineDead,
    FrontendStartup,
    Phase,
    StartDpWave,
    UndecodedBatch,
    UtilityRequest,
    bare_token_ids,
    decode_coordinator_broadcast,
    decode_coordinator_notice,
    decode_coordinator_stats,
    decode_engine_message,
    decode_init,
    decode_outputs,
    decode_outputs_lazily,
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
    in_one_go,
)
from trio_vllm.protocol.msgpack import unpack
from trio_vllm.protocol.pieces import array_at, skip
from trio_vllm.protocol.pieces import split as split_array
from trio_vllm.protocol.startup import MAX_NOTES
from trio_vllm.transport.engine import read_init

MAX_TEXT = 1000
"""Characters that an error, or a note, may have at most: its message may have millions."""

Decode = Callable[[Frames], Any]
Encode = Callable[[Any], Sequence[Buffer] | None]


def _encode_engine_message(message: Any) -> Sequence[Buffer]:
    match message:
        case EngineCoreRequest():
            return encode_add(message)
        case AbortRequests():
            return encode_abort(message.request_ids)
        case UtilityRequest():
            return encode_utility(message)
        case _:
            assert isinstance(message, StartDpWave)
            return encode_start_dp_wave(message)


def _encode_outputs(outputs: Any) -> Sequence[Buffer] | None:
    return None if isinstance(outputs, EngineDead) else encode_outputs(outputs)


def _decode_rows(frames: Frames) -> None:
    """Read outputs as a client does, row by row."""
    batch = decode_outputs_lazily(frames)
    if not isinstance(batch, UndecodedBatch):
        return
    for row in batch.rows:
        plain = bare_token_ids(row)
        try:
            output = batch.decode_row(row)
        except DecodeError as error:
            check_text(str(error))
        else:
            assert plain in (None, output.new_token_ids)
    batch.decode_stats()


def _split_payload(frames: Frames) -> None:
    """Find the ends of objects as it is done in large messages: where unpacking finds them."""
    if not frames:
        return
    payload = frames[0]
    try:
        whole = unpack(payload)
    except CodecError:
        whole = None
    try:
        end = in_one_go(skip(payload, 0, 1))
    except CodecError:
        assert whole is None
        return
    assert whole is None or end == len(payload)
    if type(whole) is list:
        found = array_at(payload, 0)
        assert found is not None
        pieces, end = in_one_go(split_array(payload, found[1], found[0], 3))
        assert (sum(len(piece.unpack()) for piece in pieces), end) == (len(whole), len(payload))


def _encode_nothing(_: object) -> None:
    return None


DECODERS: list[tuple[Decode, Encode]] = [
    (decode_engine_message, _encode_engine_message),
    (decode_outputs, _encode_outputs),
    (_decode_rows, _encode_nothing),
    (decode_report, encode_report),
    (decode_init, encode_init),
    (decode_ready_response, encode_ready_response),
    (decode_coordinator_broadcast, _encode_nothing),
    (decode_coordinator_notice, _encode_nothing),
    (decode_coordinator_stats, encode_coordinator_stats),
    (_split_payload, _encode_nothing),
]


def check_text(text: str) -> None:
    """A text for operators is there, and is no longer than they can read."""
    assert text
    assert len(text) < MAX_TEXT, f"a text of {len(text)} characters"


def fuzz_decoders(data: bytes) -> None:
    """The first byte says which decoder reads the rest, which is one message."""
    if not data:
        return
    decode, encode = DECODERS[data[0] % len(DECODERS)]
    frames = split(data[1:])[0]
    try:
        value = decode(frames)
    except DecodeError as error:
        check_text(str(error))
        return
    try:
        encoded = encode(value)
    except (CodecError, InvalidFieldError) as error:
        check_text(str(error))
        return
    if encoded is not None:
        # A value may be written in a way of ours (top_k of -1 as 0, which then is left out as what is
        # meant anyway). What is ours stays as it is.
        ours = encode(decode(list(map(bytes, encoded))))
        assert ours is not None
        again = encode(decode(list(map(bytes, ours))))
        assert again is not None
        assert [*map(bytes, again)] == [*map(bytes, ours)], "encoding changes the value"


def decoder_seeds() -> list[bytes]:
    """Recorded messages, each for the decoder that reads it in earnest."""
    groups: list[tuple[int, list[Frames]]] = [
        (0, [frames for frames in recorded("input") if len(frames[0]) == 1]),
        (1, recorded("output", "coordinator_output")),
        (2, recorded("output")[::4]),
        (3, [frames for frames in recorded("handshake") if b"status" in frames[0]]),
        (4, [frames for frames in recorded("handshake") if b"addresses" in frames[0]]),
        (5, [frames for frames in recorded("input") if b"max_model_len" in frames[0]]),
        (6, recorded("coordinator_input")),
        (7, recorded("coordinator_output")),
        (8, recorded("frontend_stats_publish")),
    ]
    return [bytes([number]) + join([frames]) for number, group in groups for frames in group]


# The startup ----------------------------------------------------------------------------------------


def fuzz_engine_startup(data: bytes) -> None:
    """An engine reads INIT, looks at the addresses, and registers."""
    try:
        init = read_init(split(data)[0], "INIT")
    except StartupError as error:
        check_text(str(error))
        return
    for address in (*init.addresses.inputs, *init.addresses.outputs):
        try:
            parse_endpoint(address, port_required=True)
        except ConfigurationError as error:
            check_text(str(error))
    response = ready_response(
        MockEngineConfig(),
        1,
        data_parallel_size=data_parallel_size(init, 2),
        dp_stats_address=init.addresses.frontend_stats_publish_address,
    )
    assert decode_ready_response(encode_ready_response(response)) == response


def engine_startup_seeds() -> list[bytes]:
    """The recorded answers to HELLO."""
    return [join([frames]) for frames in recorded("handshake") if b"addresses" in frames[0]]


ENGINES = 2


def fuzz_startup(data: bytes) -> None:
    """The first byte says how a frontend starts; messages follow, named by their first frames."""
    if not data:
        return
    startup = FrontendStartup(
        range(ENGINES), handshake=data[0] & 1 == 0, coordinator=data[0] & 2 == 2
    )
    for name, *frames in split(data[1:]):
        _startup_event(startup, name, frames)
        assert len(startup.notes) <= MAX_NOTES
        assert (startup.phase is None) == (startup.steps_missing == 0)
        assert startup.steps_missing >= 0
    for note in startup.notes:
        check_text(note)
    for phase in Phase:
        assert set(startup.missing(phase)) <= set(range(ENGINES))
    if responses := startup.ready_responses:
        info = EngineInfo.of(responses)
        info.is_older_than((0, 33))
        info.limits(vocab_size=None)


def _startup_event(startup: FrontendStartup, name: bytes, frames: Frames) -> None:
    match name:
        case b"report":
            answered = startup.receive_report(frames)
            assert answered is None or answered.engine_index < ENGINES
        case b"registration":
            registered = startup.receive_registration(frames)
            assert registered in (None, *range(ENGINES))
        case b"subscription":
            startup.receive_subscription(frames)
        case b"leave":
            startup.lose_handshake(len(frames) % ENGINES)
        case b"lose":
            startup.lose(len(frames) % ENGINES)


def startup_seeds() -> list[bytes]:
    """Startups of engines, with and without a coordinator, and with losses."""
    reports = [frames[0] for frames in recorded("handshake") if b"status" in frames[0]]
    hello, ready = (
        [frame for frame in reports if status in frame] for status in (b"HELLO", b"READY")
    )
    registrations = [frames[0] for frames in recorded("input") if b"max_model_len" in frames[0]]
    seeds = []
    for number, (first, last, response) in enumerate(
        zip(hello, ready, registrations, strict=False)
    ):
        events: list[Frames] = []
        for index in range(ENGINES):
            engine_id = bytes([index, 0])
            events += [
                [b"report", engine_id, first],
                [b"subscription", b"\x01"],
                [b"registration", engine_id, response],
                [b"report", engine_id, last],
            ]
        if number % 2:
            events.insert(3, [b"lose"])
            events.insert(2, [b"leave"])
        seeds.append(bytes([number % 4]) + join(events))
    return seeds
