"""Large payloads in pieces: the same as whole, with turns for others in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.llm.logprobs import make_logprobs
from tests.slices import finish

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    Buffer,
    CodecError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    RequestBatchOutputs,
    UndecodedBatch,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_engine_message,
    decode_engine_message_in_pieces,
    decode_outputs_in_pieces,
    decode_outputs_lazily,
    encode_add,
    encode_outputs,
    encode_utility,
    pieces,
)
from trio_vllm.protocol.msgpack import unpack
from trio_vllm.protocol.pieces import (
    LARGE,
    OBJECTS_AT_ONCE,
    array_at,
    array_head,
    skip,
    split,
    unpack_in_pieces,
)

T = TypeVar("T")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@examples(60)
@given(st.lists(OBJECTS, max_size=12), st.integers(1, 7))
def test_split_arrays_have_the_same_elements(elements: list[Any], size: int) -> None:
    payload = ormsgpack.packb([elements, "end"])
    found = array_at(payload, 1)
    assert found is not None
    count, first = found
    (pieces, end), _ = finish(split(payload, first, count, size))

    assert [element for piece in pieces for element in piece.unpack()] == elements
    assert payload[end:] == ormsgpack.packb("end")


@pytest.mark.parametrize("size", [0, 1, 16, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("kind", ["str", "bin", "ext", "array", "map", "integers"])
def test_each_length_is_skipped(kind: str, size: int) -> None:
    """Also of extensions, of any type, which are never loaded."""
    made: dict[str, Any] = {
        "str": "x" * size,
        "bin": b"x" * size,
        "ext": ormsgpack.Ext(1, b"x" * size),
        "array": [None] * size,
        "map": {str(number): number for number in range(size)},
        "integers": [2**32 - 1, 2**64 - 1, -1, -(2**31), 1.5, 200, 40_000][: size % 8],
    }
    payload = ormsgpack.packb(made[kind])
    end, _ = finish(skip(payload + b"\xc0", 0, 1))
    assert end == len(payload)


@given(OBJECTS, st.integers(1, 10))
def test_what_ends_early_is_refused(value: Any, missing: int) -> None:
    payload = ormsgpack.packb(value)[:-missing]
    with pytest.raises(CodecError, match="ends early"):
        finish(skip(payload, 0, 1))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(CodecError, match="0xc1"):
        finish(skip(b"\x92\x01\xc1", 0, 1))
    assert array_head(3) + b"\x01\x02\x03" == b"\xdd\x00\x00\x00\x03\x01\x02\x03"
    assert array_at(b"\xdd\x00\x00\x00\x03", 0) == (3, 5)
    assert array_at(b"\x81", 0) is None
    assert array_at(b"", 0) is None


def test_a_count_that_is_a_lie_costs_nothing() -> None:
    with pytest.raises(CodecError):
        finish(skip(b"\xdd\xff\xff\xff\xff" * 3, 0, 1))


# Outputs ----------------------------------------------------------------------------------------


def large_batch(**fields: Any) -> list[bytes]:
    outputs = [EngineCoreOutput(f"request-{number:06}", [number]) for number in range(5_000)]
    batch = RequestBatchOutputs(engine_index=3, outputs=outputs, timestamp=1.5, **fields)
    frames = [bytes(frame) for frame in encode_outputs(batch)]
    assert len(frames[0]) > LARGE
    return frames


def test_pieces_have_fewer_rows_where_these_are_long() -> None:
    """Who waits for them has more to do, too."""
    row = EngineCoreOutput("r", [7], new_logprobs=make_logprobs([7], 21))
    frames = encode_outputs(RequestBatchOutputs(outputs=[row] * 1000))
    batch, _ = finish(decode_outputs_in_pieces(frames))
    assert isinstance(batch, UndecodedBatch)

    assert 8 < max(map(len, batch.row_pieces())) < 20


def test_outputs_are_the_same_in_pieces() -> None:
    frames = large_batch(finished_requests=["a"], weight_version="v")
    whole = decode_outputs_lazily(frames)
    batch, turns = finish(decode_outputs_in_pieces(frames))
    assert isinstance(whole, UndecodedBatch)
    assert isinstance(batch, UndecodedBatch)

    assert [row for rows in batch.row_pieces() for row in rows] == whole.rows
    assert attrs.evolve(batch, packed_rows=(), rows=whole.rows) == whole
    assert turns > 10
    assert max(map(len, batch.row_pieces())) == 64


def test_small_messages_are_decoded_at_once() -> None:
    small = RequestBatchOutputs(outputs=[EngineCoreOutput("a", [1])] * 100)
    frames = [bytes(frame) for frame in encode_outputs(small)]
    batch, turns = finish(decode_outputs_in_pieces(frames))

    assert turns == 0
    assert batch == decode_outputs_lazily(frames)


def test_a_large_answer_is_decoded_as_before() -> None:
    answer = UtilityCallOutput(output=UtilityOutput(7, None, "x" * 2 * LARGE))
    frames = [bytes(frame) for frame in encode_outputs(answer)]
    message, turns = finish(decode_outputs_in_pieces(frames))
    assert isinstance(message, UtilityCallOutput)
    assert message.output.call_id == 7
    assert turns == 3  # behind the text, before the answer is decoded, and before it is handled


def test_rows_beside_an_answer_are_refused() -> None:
    raw = ormsgpack.unpackb(large_batch()[0])
    raw[4] = [1, None, [None, None]]
    with pytest.raises(DecodeError, match="several kinds"):
        finish(decode_outputs_in_pieces([ormsgpack.packb(raw)]))


def test_a_piece_that_cannot_be_unpacked_is_told_when_it_is_reached() -> None:
    frames = large_batch()
    payload = frames[0].replace(b"request-004999", b"request-00499\xff")
    batch, _ = finish(decode_outputs_in_pieces([payload]))
    assert isinstance(batch, UndecodedBatch)
    rows: list[Any] = []
    with pytest.raises(DecodeError):
        for some in batch.row_pieces():
            rows += some
    assert len(rows) == 5_000 // 64 * 64


@pytest.mark.parametrize("cut", [1, 1_000, 50_000])
def test_a_large_message_that_ends_early_is_told(cut: int) -> None:
    with pytest.raises(DecodeError, match="outputs"):
        finish(decode_outputs_in_pieces([large_batch()[0][:-cut]]))


# Requests ---------------------------------------------------------------------------------------


def long_request(last: Any = 7) -> list[bytes]:
    prompt = [5, 200, 40_000, 150_000] * 20_000
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=EngineCoreSamplingParams(max_tokens=3),
        priority=4,
    )
    kind, payload = map(bytes, encode_add(request))
    raw = ormsgpack.unpackb(payload)
    raw[1].append(last)
    return [kind, ormsgpack.packb(raw)]


def test_a_long_prompt_is_the_same_in_pieces() -> None:
    frames = long_request()
    request, turns = finish(decode_engine_message_in_pieces(frames))
    whole = decode_engine_message(frames)
    assert isinstance(request, EngineCoreRequest)
    assert isinstance(whole, EngineCoreRequest)

    assert encode_add(request) == encode_add(whole)
    assert turns > 10


@pytest.mark.parametrize("last", [None, -1, 2**32, 1.5, "x", True])
def test_a_bad_token_of_a_long_prompt_is_refused_with_its_id(last: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        finish(decode_engine_message_in_pieces(long_request(last)))
    assert (caught.value.request_id, caught.value.where) == ("r", ".prompt_token_ids")


def test_a_long_prompt_that_ends_early_is_told() -> None:
    kind, payload = long_request()
    with pytest.raises(DecodeError, match="an ADD message"):
        finish(decode_engine_message_in_pieces([kind, payload[:200_000]]))


def long_abort(*more: Any) -> list[bytes]:
    """An ABORT of 12,000 ids, and of some values that may be none."""
    ids = [f"request-{number}" for number in range(12_000)]
    return [b"\x01", ormsgpack.packb([*ids, *more])]


def test_a_long_abort_is_the_same_in_pieces() -> None:
    message, turns = finish(decode_engine_message_in_pieces(long_abort("last")))

    assert message == decode_engine_message(long_abort("last"))
    assert turns > 5


LARGE_TEXT = ormsgpack.packb("x" * LARGE)


@pytest.mark.parametrize(
    "frames",
    [
        long_abort(1),
        [b"\x01", long_abort()[1][:-3]],
        [b"\x01", long_abort()[1] + b"\x01"],
        [b"\x01", LARGE_TEXT],
        [b"\x01", b"\x90" + LARGE_TEXT],
    ],
    ids=["a number", "ends early", "goes on", "a text", "goes on after nothing"],
)
def test_a_long_abort_that_cannot_be_read_is_told_as_a_short_one(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError) as whole:
        decode_engine_message(frames)
    with pytest.raises(DecodeError) as caught:
        finish(decode_engine_message_in_pieces(frames))

    assert str(caught.value) == str(whole.value)


def test_others_have_a_turn_between_decoding_and_taking_a_large_message() -> None:
    """Whatever it is that makes it large."""
    params = EngineCoreSamplingParams(max_tokens=3, trace_decode_token_ids=[70_000] * 50_000)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params)
    call = UtilityRequest(0, 1, "echo", ["x" * LARGE])
    for frames, kind in (
        (encode_add(request), EngineCoreRequest),
        (encode_utility(call), UtilityRequest),
    ):
        message, turns = finish(decode_engine_message_in_pieces([bytes(one) for one in frames]))
        assert (type(message), turns >= 1) == (kind, True)


@examples(60)
@given(OBJECTS)
def test_objects_are_unpacked_in_pieces_as_whole(value: Any) -> None:
    payload = ormsgpack.packb(
        [value, list(range(12_000)), [["x"] * 100, value], {"few": value, "more": [value]}]
    )
    unpacked, turns = finish(unpack_in_pieces(payload))
    assert unpacked == ormsgpack.unpackb(payload)
    assert turns >= 3
    with pytest.raises(CodecError, match="follow the end"):
        finish(unpack_in_pieces(payload + b"\x01"))
    with pytest.raises(CodecError):
        finish(unpack_in_pieces(payload[:-1]))


@pytest.mark.parametrize(
    "pack", [list, lambda items: dict(enumerate(items))], ids=["lists", "maps"]
)
def test_many_objects_in_few_elements_take_turns(
    pack: Callable[[list[Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep they are; those that are few are unpacked together."""
    value: Any = 1
    for _ in range(4):
        value = pack([value] * 15)
    counts: list[int] = []

    def count(payload: Buffer) -> Any:
        counts[-1] += len(payload)
        return unpack(payload)

    monkeypatch.setattr(pieces, "unpack", count)
    payload = ormsgpack.packb([value] * 3, option=ormsgpack.OPT_NON_STR_KEYS)
    work = unpack_in_pieces(payload)
    with pytest.raises(StopIteration) as end:
        while True:
            counts.append(0)
            next(work)

    assert end.value.value == [value] * 3
    assert max(counts) < 2 * OBJECTS_AT_ONCE
    assert len(counts) < 150


def test_a_large_call_and_its_answer_are_unpacked_in_pieces() -> None:
    values = [*range(70_000, 130_000), "x"]
    call = [bytes(one) for one in encode_utility(UtilityRequest(0, 1, "echo", [values]))]
    request, turns = finish(decode_engine_message_in_pieces(call))
    assert request == decode_engine_message(call)
    assert turns > 12
    answer = UtilityCallOutput(output=UtilityOutput(7, None, values))
    frames = [bytes(frame) for frame in encode_outputs(answer)]
    message, turns = finish(decode_outputs_in_pieces(frames))
    assert message == decode_outputs_lazily(frames)
    assert turns > 12
