"""Every recorded message is read for what it says, and written again."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.protocol.comparing import json_view, reflects, same, unpacked
from tests.recorded import Message, recordings

from trio_vllm.errors import InvalidFieldError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    ENGINE_CORE_DEAD,
    SUBSCRIBE,
    AbortRequests,
    CoordinatorStats,
    DpControlOutput,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineDead,
    HandshakeInit,
    HandshakeReport,
    RequestBatchOutputs,
    StartDpWave,
    UtilityCallOutput,
    UtilityRequest,
    decode_coordinator_broadcast,
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

ATTRIBUTES = {
    "_eos_token_id": "eos_token_id",
    "_all_stop_token_ids": "all_stop_token_ids",
    "_bad_words_token_ids": "bad_words_token_ids",
    "_backend": "backend",
    "_backend_was_auto": "backend_was_auto",
}
"""Attribute names of the wire keys that are called otherwise."""

FRONTEND_ONLY = frozenset(
    {
        "_watermarking_skipped",
        "bad_words",
        "detokenize",
        "flat_logprobs",
        "ignore_eos",
        "include_stop_str_in_output",
        "output_kind",
        "output_text_buffer_length",
        "skip_clone",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
    }
)
"""Keys of sampling parameters that only frontends with a tokenizer act on: we have none of them."""


def read(message: Message) -> Any:
    """Decode a message as its receiver would."""
    frames = message.frames
    match message.channel, message.sender.rstrip("0123456789[]"):
        case "handshake", "frontend":
            return decode_init(frames)
        case "handshake", _:
            return decode_report(frames)
        case "input", "frontend":
            return decode_engine_message(frames)
        case "input", _:
            return decode_ready_response(frames)
        case "coordinator_input", "frontend" | "coordinator":
            return decode_coordinator_broadcast(frames)
        case "frontend_stats_publish", "coordinator":
            return decode_coordinator_stats(frames)
        case "output" | "coordinator_output", _:
            return decode_outputs(frames)
    raise AssertionError(message)


def write(value: Any) -> list[bytes]:
    """Encode a value as its sender would."""
    match value:
        case None:
            return [COORDINATOR_READY]
        case EngineDead():
            return [ENGINE_CORE_DEAD]
        case HandshakeInit():
            return list(map(bytes, encode_init(value)))
        case HandshakeReport():
            return list(map(bytes, encode_report(value)))
        case EngineCoreReadyResponse():
            return list(map(bytes, encode_ready_response(value)))
        case EngineCoreRequest():
            return list(map(bytes, encode_add(value)))
        case AbortRequests():
            return list(map(bytes, encode_abort(value.request_ids)))
        case UtilityRequest():
            return list(map(bytes, encode_utility(value)))
        case StartDpWave():
            return list(map(bytes, encode_start_dp_wave(value)))
        case CoordinatorStats():
            return list(map(bytes, encode_coordinator_stats(value)))
        case _:
            return list(map(bytes, encode_outputs(value)))


def is_ours_to_read(message: Message) -> bool:
    """Whether a frontend or an engine of ours could receive this message.

    Subscriptions, and first-request notices of 0.32 frontends, go to a coordinator process.
    """
    to_coordinator = message.channel == "frontend_stats_publish" and not message.sender.startswith(
        "coordinator"
    )
    is_malformed = message.decoded == ["x", "not-a-list"]  # in stuck_malformed_add
    return message.frames != [SUBSCRIBE] and not to_coordinator and not is_malformed


MESSAGES = {
    f"{recording.label}-{message.seq}": message
    for recording in recordings()
    for message in recording.messages
    if is_ours_to_read(message)
}

each_recording = pytest.mark.parametrize(
    "messages",
    [list(filter(is_ours_to_read, recording.messages)) for recording in recordings()],
    ids=[recording.label for recording in recordings()],
)


@each_recording
def test_messages_are_read_for_what_they_say(messages: list[Message]) -> None:
    for message in messages:
        check_reading(message, read(message))


def check_reading(message: Message, value: Any) -> None:
    """The value is what the message says, and all that it says."""
    if message.payload is None:
        assert value == (None if message.frames == [COORDINATOR_READY] else EngineDead())
        return
    frames = message.frames[message.payload_frame :]
    raw = unpacked(message.payload)
    assert message.decoded == json_view(raw, frames)
    reflects(value, as_declared(value, raw), frames, ATTRIBUTES, FRONTEND_ONLY)


OUTPUTS_POSITIONS = (
    "engine_index",
    "outputs",
    "scheduler_stats",
    "timestamp",
    "utility_output",
    "finished_requests",
    "wave_complete",
    "start_wave",
    "weight_version",
)


def as_declared(value: Any, raw: Any) -> Any:
    """The unpacked object as our classes cut it, where that differs from the wire."""
    match value:
        case AbortRequests():
            return [raw]
        case StartDpWave() if type(raw[1]) is bytes:  # "nobody", see the decoder
            return [raw[0], None]
        case UtilityCallOutput():
            call_id, failure_message, result = raw[4]
            output = [call_id, failure_message, result and result[1]]
            assert raw[1:3] == [[], None]
            assert raw[5:] == [None] * 4
            return {"engine_index": raw[0], "output": output, "timestamp": raw[3]}
        case RequestBatchOutputs() | DpControlOutput():
            given = dict(zip(OUTPUTS_POSITIONS, raw, strict=True))
            names = {attribute.name for attribute in attrs.fields(type(value))}
            others = [given.pop(name) for name in OUTPUTS_POSITIONS if name not in names]
            assert not any(others)
            return given
    return raw


def names_unknown_backend(message: Message) -> bool:
    """Whether this is the one request that the recording script made to be refused by a frontend."""
    return "'_backend': 'nope'" in str(message.decoded)


@each_recording
def test_messages_are_written_again(messages: list[Message]) -> None:
    """What we write reads the same; of a real program's message it is what that program wrote."""
    for message in messages:
        value = read(message)
        if names_unknown_backend(message):
            with pytest.raises(InvalidFieldError, match=r"structured_outputs\.backend"):
                write(value)
            continue

        frames = write(value)

        assert same(value, read(attrs.evolve(message, frames=frames)))
        if message.is_golden:
            check_form(message, frames)


def check_form(message: Message, frames: list[bytes]) -> None:
    """The frames unpack to what the message's do, but for what `form` evens out."""
    assert len(message.frames) == len(frames)
    for index, (golden, ours) in enumerate(zip(message.frames, frames, strict=True)):
        if index == message.payload_frame:
            assert form(unpacked(golden)) == form(unpacked(ours))
        else:
            assert golden == ours


def form(raw: Any) -> Any:
    """An unpacked object without what may differ between two writers of the same message.

    * Keys that only frontends act on; we have none of them.
    * Keys whose value is the default: the Python frontend leaves a default out only if it is the
      very same object, the Rust frontend has a list of keys that it always writes, dataclasses are
      always written whole. Of a map we keep what is not nil, false, zero, one or empty, which is
      every default there is but ``max_tokens``.
    * Trailing nils: 0.33 has longer arrays than 0.32, and the recording script wrote short ones.
    * The order of a set of stop ids, and -1 for "all" of ``top_k``.
    * The `bytes` in START_DP_WAVE that stand for "nobody", and the padding of shorter results.
    """
    if isinstance(raw, dict):
        items = {key: form(item) for key, item in raw.items() if key not in FRONTEND_ONLY}
        if items.get("max_tokens") == 16:
            del items["max_tokens"]
        if "_all_stop_token_ids" in items:
            items["_all_stop_token_ids"].sort()
        return {key: item for key, item in items.items() if item not in (None, [], {}, "", 0, 1)}
    if isinstance(raw, list):
        parts = [form(item) for item in raw]
        while parts and (parts[-1] is None or type(parts[-1]) is bytes):
            parts.pop()
        return parts
    return raw
