"""`AddDecoder` decodes what `decode_engine_message` does, and raises what that raises."""

from __future__ import annotations

from typing import Any

import attrs
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.protocol import strategies as some
from tests.protocol.comparing import same

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    AddDecoder,
    EngineCoreRequest,
    SamplingParams,
    decode_engine_message,
    encode_abort,
    encode_add,
)


def outcome(decode: Any, frames: list[bytes]) -> Any:
    """What a decoder gives, or the error that it raises."""
    try:
        return decode(frames)
    except DecodeError as error:
        return str(error), error.where, error.request_id


def assert_same(decoder: AddDecoder, frames: list[bytes]) -> None:
    expected = outcome(decode_engine_message, frames)
    for _ in range(2):  # for the second time from memory, if it is remembered
        assert same(outcome(decoder.decode, frames), expected)


def frames_of(request: EngineCoreRequest) -> list[bytes]:
    return [bytes(frame) for frame in encode_add(request)]


@given(st.lists(some.requests(), min_size=1, max_size=3))
@examples(200)
def test_good_requests_are_decoded_alike(requests: list[EngineCoreRequest]) -> None:
    decoder = AddDecoder()
    for request in requests:
        assert_same(decoder, frames_of(request))
        assert_same(decoder, frames_of(attrs.evolve(request, request_id="another")))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, -1, 2**32, 0.0, 1.0, 16.0, "", "text", b"", b"x", [], {}]),
    st.lists(st.sampled_from([0, 1, True, 1.0, 2**32, None]), max_size=3),
    st.dictionaries(
        st.sampled_from(["max_tokens", "temperature", "extra_args", "stop_token_ids", "unknown"]),
        st.sampled_from([0, 1, 1.0, True, [], [1], {}, {"a": b"1"}, {"a": [1]}, None]),
        max_size=3,
    ),
)
USUAL = EngineCoreRequest(
    request_id="r",
    prompt_token_ids=[1, 2],
    sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
    arrival_time=1.0,
    external_req_id="e",
)


@given(st.lists(st.dictionaries(st.integers(0, 22), VALUES, max_size=2), min_size=1, max_size=6))
@examples(300)
def test_a_field_of_another_type_makes_another_request(changes: list[dict[int, Any]]) -> None:
    """1 is not 1.0 nor True, whatever was there before; a field too many is ignored."""
    decoder = AddDecoder()
    assert_same(decoder, frames_of(USUAL))
    for change in changes:
        raw = [*ormsgpack.unpackb(frames_of(USUAL)[1]), None]
        for index, value in change.items():
            raw[index] = value
        assert_same(decoder, [b"\0", ormsgpack.packb(raw[: None if change.get(22) else 22])])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\0"],
        [b"\0", b""],
        [b"\0", b"\x91"],
        [b"\0", b"\x91\xa1r", b"aux"],
        [b"\0", frames_of(USUAL)[1] + b"\xc0"],
        [b"\7", b"\xc0"],
        [bytes(frame) for frame in encode_abort(["a"])],
    ],
)
def test_what_is_no_usual_request_is_decoded_alike(frames: list[bytes]) -> None:
    assert_same(AddDecoder(), frames)


def test_array_bytes_are_not_taken_for_a_view() -> None:
    """An extension and a binary of the same bytes are two things."""
    decoder = AddDecoder()
    raw = ormsgpack.unpackb(frames_of(USUAL)[1])
    for data in (ormsgpack.Ext(3, bytes(4)), bytes(4), ormsgpack.Ext(3, bytes(4))):
        raw[3] = {"max_tokens": 1, "prompt_logprob_token_ids": ["<i4", [1, 1], data]}
        assert_same(decoder, [b"\0", ormsgpack.packb(raw)])


def test_requests_that_are_alike_share_their_parameters() -> None:
    """Which is why it is fast; and it forgets kinds when there are too many."""
    decoder = AddDecoder(size=1)
    requests: list[Any] = [
        decoder.decode(frames_of(attrs.evolve(USUAL, request_id=f"r{number}", priority=priority)))
        for number, priority in enumerate([0, 0, 1, 0])
    ]
    first, second, _, last = (request.sampling_params for request in requests)

    assert first is second
    assert first is not last
    assert [request.priority for request in requests] == [0, 0, 1, 0]
