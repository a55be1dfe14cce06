"""Any frames give a value or a `DecodeError`, and take little memory to do so."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import attrs
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.comparing import Ext, unpacked
from tests.protocol.packing import pack
from tests.protocol.strategies import packable
from tests.protocol.test_vectors import MESSAGES, read
from tests.recorded import Message

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    UndecodedBatch,
    bare_token_ids,
    decode_coordinator_broadcast,
    decode_coordinator_stats,
    decode_engine_message,
    decode_init,
    decode_outputs,
    decode_outputs_lazily,
    decode_ready_response,
    decode_report,
)

Frames = list[bytes]


def read_rows(frames: Frames) -> None:
    """Read outputs as a client does."""
    batch = decode_outputs_lazily(frames)
    if isinstance(batch, UndecodedBatch):
        batch.decode_stats()
        for row in batch.rows:
            if bare_token_ids(row) is None:
                batch.decode_row(row)


READERS: list[Callable[[Frames], Any]] = [
    lambda frames: decode_engine_message([b"\x00", *frames]),
    lambda frames: decode_engine_message([b"\x01", *frames]),
    lambda frames: decode_engine_message([b"\x02", *frames]),
    lambda frames: decode_engine_message([b"\x03", *frames]),
    decode_engine_message,
    decode_outputs,
    read_rows,
    decode_coordinator_broadcast,
    decode_coordinator_stats,
    decode_init,
    decode_report,
    decode_ready_response,
]


def value_or_decode_error(reader: Callable[[Any], Any], message: Any) -> None:
    try:
        reader(message)
    except DecodeError as error:
        text = str(error)
        assert text
        assert len(text) < 1000


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_random_bytes_raise_only_decode_errors(frames: Frames) -> None:
    for reader in READERS:
        value_or_decode_error(reader, frames)


@given(packable(), st.lists(st.binary(max_size=8), max_size=2))
def test_random_objects_raise_only_decode_errors(raw: Any, aux: Frames) -> None:
    for reader in READERS:
        value_or_decode_error(reader, [pack(raw), *aux])


SAMPLES = list(MESSAGES.values())


@given(st.sampled_from(SAMPLES), st.data())
def test_good_messages_with_changed_bytes(message: Message, data: st.DataObject) -> None:
    frames = list(message.frames)
    index = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[index]
    at = data.draw(st.integers(0, len(frame)))
    match data.draw(st.sampled_from(["cut", "insert", "replace", "append"])):
        case "cut":
            frames[index] = frame[:at]
        case "insert":
            frames[index] = frame[:at] + data.draw(st.binary(min_size=1, max_size=5)) + frame[at:]
        case "replace":
            frames[index] = (
                frame[:at] + data.draw(st.binary(min_size=1, max_size=1)) + frame[at + 1 :]
            )
        case "append":
            frames[index] = frame + data.draw(st.binary(min_size=1, max_size=5))

    value_or_decode_error(read, attrs.evolve(message, frames=frames))


@given(st.sampled_from(SAMPLES), st.data())
def test_good_messages_with_garbage_in_one_place(message: Message, data: st.DataObject) -> None:
    if message.payload is None or message.payload_frame is None:
        return
    raw = packable_again(unpacked(message.payload))
    garbage = data.draw(packable())
    at: Any = raw
    while True:
        keys = list(range(len(at)) if isinstance(at, list) else at)
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], list | dict) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = garbage
    frames = list(message.frames)
    frames[message.payload_frame] = pack(raw)

    value_or_decode_error(read, attrs.evolve(message, frames=frames))


def packable_again(raw: Any) -> Any:
    if isinstance(raw, Ext):
        return ormsgpack.Ext(raw.code, raw.data)
    if isinstance(raw, dict):
        return {key: packable_again(item) for key, item in raw.items()}
    return list(map(packable_again, raw)) if isinstance(raw, list) else raw


@pytest.mark.parametrize("message", SAMPLES[::20])
def test_truncated_messages_are_refused(message: Message) -> None:
    if message.payload is None or message.payload_frame is None:
        return
    for length in range(0, len(message.payload), max(1, len(message.payload) // 50)):
        frames = list(message.frames)
        frames[message.payload_frame] = message.payload[:length]
        with pytest.raises(DecodeError):
            read(attrs.evolve(message, frames=frames))


MARK, OTHER_MARK = (
    b"\xcf" + mark.to_bytes(8, "big") for mark in (0x9D1C77A35E02B4F1, 0xC3A54E960B7D182F)
)
"""What the reader puts behind a payload to find its end: no secret, and no way around the check."""

TAILS = [
    b"\xc0",
    b"\x00",
    b"\xc1",
    MARK,
    b"\xc0" + MARK,
    MARK + b"\xc0",
    MARK + OTHER_MARK + b"\xc0",
]


@pytest.mark.parametrize("message", SAMPLES[::40])
def test_bytes_behind_the_payload_are_refused(message: Message) -> None:
    if message.payload is None or message.payload_frame is None:
        return
    for tail in TAILS:
        frames = list(message.frames)
        frames[message.payload_frame] = message.payload + tail

        with pytest.raises(DecodeError):
            read(attrs.evolve(message, frames=frames))


@pytest.mark.parametrize("mark", [MARK, OTHER_MARK])
def test_payload_that_holds_a_mark_is_read(mark: bytes) -> None:
    number = int.from_bytes(mark[1:], "big")
    for args in ([number], [number, 1]):
        payload = pack([0, number, "is_sleeping", args])
        assert mark in payload

        message = decode_engine_message([b"\x03", payload])

        assert message.args == args  # type: ignore[union-attr]


BOMBS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x03",
    b"\x91" * 100_000,
    b"\x81\xa1a" * 50_000,
    b"\x91" * 1000 + b"\x01",
    b"\x81" + b"\x91" * 1000 + b"\x01\x02",
    b"\x92\x00\xdd\xff\xff\xff\xff\x00",
    pack([0, [["r", [1], None, None, ["float32", [2**40] * 30, 1]]]]),
    pack([0, [["r", [1], None, None, ["float32", [0] + [2**40] * 30, ormsgpack.Ext(3, b"")]]]]),
    pack([0, [["r", [1], [["<i4", [0, 2**40], ormsgpack.Ext(3, b"")]] * 3]]]),
]


@pytest.mark.parametrize(
    "payload", BOMBS, ids=lambda payload: f"{len(payload)}-{payload[:8].hex()}"
)
def test_announced_sizes_are_not_believed(payload: bytes) -> None:
    tracemalloc.start()
    for reader in READERS:
        value_or_decode_error(reader, [payload])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 3_000_000


@pytest.mark.parametrize("code", [0, 1, 2, 4, 127])
@pytest.mark.parametrize("size", [0, 1, 4, 16, 300])
def test_extensions_where_a_value_is_needed_are_refused(code: int, size: int) -> None:
    """Alone, in arrays and maps, whole or cut."""
    ext = ormsgpack.Ext(code, b"\x80\x04." * 100)
    for raw in (ext, [ext], {"a": ext}, [0, [["r", [1], ext]]], [0, "m", 1, [ext]]):
        for reader in READERS:
            with pytest.raises(DecodeError):
                reader([pack(raw)[: size or None]])


@pytest.mark.parametrize(
    "key",
    [None, True, 1, -1, 2**64 - 1, 1.5, float("nan"), b"bytes", (1,), ("a", (2,)), ""],
    ids=repr,
)
def test_odd_map_keys(key: Any) -> None:
    """Unknown keys are skipped, whatever they are; where keys have a form, they are refused."""
    assert decode_report([pack({"status": "HELLO", key: 1})]).local is False
    for raw in ({key: 1}, [{key: 1}], ["r", [1], None, {key: 1}, None, 1.0], [0, [], {key: 1}]):
        for reader in READERS:
            value_or_decode_error(reader, [pack(raw)])


def test_bad_utf8_is_refused() -> None:
    for payload in (b"\xa1\xff", b"\x91\xa2\xc3\x28", b"\x81\xa1\x80\x01", b"\x91\xa3\xed\xa0\x80"):
        for reader in READERS:
            with pytest.raises(DecodeError):
                reader([payload])
