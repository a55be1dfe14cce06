"""`find_logprob_rows`: what is read by its bytes is what the decoder reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llm.logprobs import make_logprobs
from tests.protocol.comparing import same

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    CodecError,
    EngineCoreOutput,
    FinishReason,
    Frames,
    Logprobs,
    LogprobsCollector,
    LogprobsPattern,
    PrefillStats,
    RequestBatchOutputs,
    Tensor,
    UndecodedBatch,
    decode_outputs_lazily,
    encode_outputs,
    find_logprob_rows,
    logprobs_pattern,
    unpacked_row,
)
from trio_vllm.protocol.logprob_rows import FEWEST, MOST, MOST_BYTES, PACKED_MARK

IDS = ("r", "request-7", "", "x" * 31, "x" * 32, "y" * 255, "z" * 256, "é", "a\x01b")


def frames_of(*outputs: EngineCoreOutput, **fields: Any) -> list[bytes]:
    """The message of an engine with these outputs."""
    batch = RequestBatchOutputs(outputs=list(outputs), **{"timestamp": 1.5, **fields})
    return [bytes(frame) for frame in encode_outputs(batch)]


def decoded(frames: Frames) -> UndecodedBatch:
    """The same, as the decoder reads it."""
    batch = decode_outputs_lazily(frames)
    assert isinstance(batch, UndecodedBatch)
    return batch


def pattern_of(logprobs: Logprobs) -> LogprobsPattern:
    """Of rows with such logprobs."""
    (row,) = decoded(frames_of(EngineCoreOutput("r", [7], new_logprobs=logprobs))).rows
    pattern = logprobs_pattern(row)
    assert pattern is not None
    return pattern


@st.composite
def logprobs(draw: st.DrawFn, count: int) -> Logprobs:
    """Of so many tokens, in one of some layouts; any bytes may stand in an array."""
    shape = count, draw(st.sampled_from([1, 2, 2, 2, 6, 70]))
    ids, ranks = (draw(st.sampled_from(["<i4", "<i4", "<i8"])) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return Logprobs(
        random.integers(0, 2**31, shape).astype(ids),
        random.normal(size=shape).astype("<f4"),
        random.integers(0, 2**31, count).astype(ranks),
    )


USUAL = make_logprobs([7], 2)
A_ROW = frames_of(EngineCoreOutput("r", [7], new_logprobs=USUAL))[0][3:-15]
assert pattern_of(USUAL).fullmatch(A_ROW)


@st.composite
def outputs(draw: st.DrawFn) -> EngineCoreOutput:
    """Most are a token with its logprobs, some more or less, or one within the other."""
    token = st.one_of(st.sampled_from([0, 127, 128, 255, 256, 2**16]), st.integers(0, 2**32 - 1))
    count = draw(st.sampled_from([1, 1, 1, 1, 1, 0, 2]))
    fields: dict[str, Any] = {}
    if draw(st.sampled_from([True, True, True, False])):
        fields["new_logprobs"] = draw(st.just(USUAL) if count == 1 else logprobs(count))
    if draw(st.sampled_from([False, False, False, True])):
        fields |= draw(
            st.sampled_from(
                [
                    {"new_logprobs": draw(logprobs(count))},
                    {"finish_reason": FinishReason.LENGTH},
                    {"prefill_stats": PrefillStats(num_prompt_tokens=3)},
                    {"pooling_output": Tensor("uint8", (len(A_ROW),), A_ROW)},
                    {"pooling_output": Tensor("uint8", (2 * len(A_ROW),), A_ROW * 2)},
                ]
            )
        )
    tokens = [draw(token) for _ in range(count)]
    return EngineCoreOutput(draw(st.sampled_from(IDS)), tokens, **fields)


def assert_same(found: UndecodedBatch, plain: UndecodedBatch) -> None:
    """Rows in this order, and all that is beside them."""
    rows = [unpacked_row(row) if type(row) is tuple else row for row in found.rows]
    assert len(rows) == len(plain.rows)
    for row, expected in zip(rows, plain.rows, strict=True):
        assert same(result_of(found, row), result_of(plain, expected))
    assert (found.engine_index, found.timestamp, found.finished_requests) == (
        plain.engine_index,
        plain.timestamp,
        plain.finished_requests,
    )
    assert (found.weight_version, found.frames) == (plain.weight_version, plain.frames)
    assert same(found.decode_stats(), plain.decode_stats())


def result_of(batch: UndecodedBatch, row: Any) -> EngineCoreOutput | str:
    """What a row says, or what is wrong with it."""
    try:
        return batch.decode_row(row)
    except DecodeError as error:
        return str(error)


@settings(deadline=None)
@given(st.lists(outputs(), max_size=12), st.booleans())
def test_messages_are_read_as_they_are_decoded(
    sent: list[EngineCoreOutput], has_finished: bool
) -> None:
    """Whatever else is in them, in whatever order."""
    frames = frames_of(*sent, finished_requests=["r"] if has_finished else None)
    found = find_logprob_rows(frames, pattern_of(USUAL))

    if found is not None:
        assert_same(found, decoded(frames))


@settings(deadline=None)
@given(st.lists(outputs(), min_size=4, max_size=8), st.data())
def test_broken_messages_are_not_read_otherwise(
    sent: list[EngineCoreOutput], data: st.DataObject
) -> None:
    """Bytes are changed, removed, doubled or moved."""
    payload = bytearray(frames_of(*sent)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(payload) - 1))
        end = start + data.draw(st.sampled_from([0, 1, 1, 2, len(A_ROW)]))
        payload[start:end] = data.draw(
            st.one_of(st.binary(max_size=2), st.just(A_ROW), st.just(bytes(payload[start:end] * 2)))
        )
    frames = [bytes(payload)]
    found = find_logprob_rows(frames, pattern_of(USUAL))

    if found is not None:
        assert_same(found, decoded(frames))


@settings(deadline=None)
@given(logprobs(1), st.integers(FEWEST, 80))
def test_usual_messages_are_read(shown: Logprobs, count: int) -> None:
    """All rows but the first and the last of a request, in one layout if its arrays are inline."""
    usual = EngineCoreOutput("request", [31_999], new_logprobs=shown)
    first = EngineCoreOutput("first", [5], new_logprobs=shown, prefill_stats=PrefillStats())
    last = EngineCoreOutput("last", [6], new_logprobs=shown, finish_reason=FinishReason.STOP)
    (row,) = decoded(frames_of(usual)).rows
    if shown.token_ids.shape[1] > 63:
        assert logprobs_pattern(row) is None
        return
    frames = frames_of(first, *[usual] * count, last, usual)
    found = find_logprob_rows(frames, pattern_of(shown))

    assert found is not None
    assert found.has_logprob_rows
    assert [type(row) for row in found.rows] == [list, *[tuple] * count, list, tuple]
    assert_same(found, decoded(frames))


def test_rows_may_end_with_their_logprobs() -> None:
    """Our mock engine leaves out what is nil behind them."""
    row = b"\x93" + A_ROW[3:-16]
    frames = packed_message([row] * 5, 5)
    plain = decoded(frames)
    assert [len(row) for row in plain.rows] == [3] * 5
    pattern = logprobs_pattern(plain.rows[0])
    assert pattern is not None
    found = find_logprob_rows(frames, pattern)

    assert found is not None
    assert [type(row) for row in found.rows] == [tuple] * 5
    assert_same(found, plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"finish_reason": FinishReason.LENGTH},
        {"num_nans_in_logits": 1},
        {"prefill_stats": PrefillStats()},
        {"new_logprobs": None},
        {"new_token_ids": [1, 2], "new_logprobs": make_logprobs([1, 2], 2)},
    ],
)
def test_no_pattern_is_made_of_other_rows(fields: dict[str, Any]) -> None:
    """Of such that have more, or less, than a token and its logprobs."""
    output = EngineCoreOutput(
        "r", **{"new_token_ids": [7], "new_logprobs": make_logprobs([7], 2), **fields}
    )
    (row,) = decoded(frames_of(output)).rows

    assert logprobs_pattern(row) is None


@pytest.mark.parametrize("row", [None, [], ["r", [7], []], ["r", [7], [[1, 2, 3]] * 4], {}])
def test_no_pattern_is_made_of_garbage(row: Any) -> None:
    """Of any shape."""
    assert logprobs_pattern(row) is None


def test_other_messages() -> None:
    """None with such rows, too few or too many, too large, or not in the usual form."""
    usual = EngineCoreOutput("r", [7], new_logprobs=USUAL)
    pattern = pattern_of(USUAL)

    def finds(*frames: bytes | memoryview) -> bool:
        return find_logprob_rows(frames, pattern) is not None

    payload = frames_of(*[usual] * FEWEST)[0]
    assert finds(payload)
    assert finds(frames_of(*[usual] * MOST)[0])
    assert not finds()
    assert not finds(b"")
    assert not finds(b"\x99")
    assert not finds(b"ENGINE_CORE_DEAD")
    assert not finds(memoryview(payload))
    assert not finds(frames_of(*[usual] * (FEWEST - 1))[0])
    assert not finds(frames_of(*[usual] * (MOST + 1))[0])
    assert not finds(frames_of(*[EngineCoreOutput("r", [7])] * 9)[0])
    assert not finds(
        frames_of(*[EngineCoreOutput("r", [7], new_logprobs=make_logprobs([7], 3))] * 9)[0]
    )
    assert not finds(payload + b"\xc0")
    assert not finds(payload[:-1])
    version = "v" * MOST_BYTES
    assert not finds(frames_of(*[usual] * FEWEST, weight_version=version)[0])


def packed_message(rows: list[bytes], count: int) -> list[bytes]:
    """A message of packed rows that says how many there are."""
    head = bytes([0x99, 0, 0x90 | count])
    return [head + b"".join(rows) + b"\xc0\xcb" + bytes(8) + b"\xc0" * 5]


SWALLOWING = b"\x95\xa1s\x90\xc0\xc0\x93\xa5uint8\x91\x09\xc7\x09\x03"
"""What of a row stands before the bytes of an array of 9, which is what a mark has."""


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([A_ROW] * 6, 4),
        ([A_ROW] * 4, 6),
        ([A_ROW, SWALLOWING + A_ROW, *[A_ROW] * 4], 6),
        ([SWALLOWING + A_ROW, *[A_ROW] * 4], 5),
        ([SWALLOWING + A_ROW, *[A_ROW] * 4, PACKED_MARK], 6),
        ([SWALLOWING + A_ROW, PACKED_MARK, *[A_ROW] * 4], 6),
        ([PACKED_MARK, *[A_ROW] * 4], 5),
    ],
)
def test_messages_that_were_made_to_deceive(rows: list[bytes], count: int) -> None:
    """Rows that are none for the decoder, or marks of their own."""
    assert find_logprob_rows(packed_message([A_ROW] * 4, 4), pattern_of(USUAL)) is not None
    assert find_logprob_rows(packed_message(rows, count), pattern_of(USUAL)) is None


def test_a_row_in_place_of_the_rows() -> None:
    """Which are no rows."""
    tail = packed_message([], 0)[0][3:]
    frames = [b"\x99\x00" + A_ROW + tail]

    assert len(decoded(frames).rows) >= FEWEST
    assert find_logprob_rows(frames, pattern_of(USUAL)) is None


def test_an_id_that_is_not_as_long_as_it_says() -> None:
    """Reading goes by what is written before it, as decoding does."""
    rows = [EngineCoreOutput(name, [7], new_logprobs=USUAL) for name in ("aaaa", "bbbb") * 2]
    payload = frames_of(*rows)[0]
    assert payload.count(b"\xa4aaaa") == 2

    for lead in (b"\xa3", b"\xa5", b"\xd9"):
        frames = [payload.replace(b"\xa4aaaa", lead + b"aaaa", 1)]
        assert find_logprob_rows(frames, pattern_of(USUAL)) is None


@settings(deadline=None)
@given(st.lists(logprobs(1), min_size=1, max_size=8), st.sampled_from([None, 1, 2, 5]))
def test_packed_rows_are_collected_as_they_are_decoded(
    parts: list[Logprobs], columns: int | None
) -> None:
    """In any mix of layouts, with decoded ones between."""
    collector, kept = LogprobsCollector(columns), []
    for part in parts:
        frames = frames_of(*[EngineCoreOutput("r", [7], new_logprobs=part)] * FEWEST)
        width = part.token_ids.shape[1]
        if width > 63:
            collector.add(part)
        else:
            found = find_logprob_rows(frames, pattern_of(part))
            assert found is not None
            _, _, packed = found.rows[0]
            is_narrow = columns is not None and width < columns
            assert collector.add_packed(packed) is not is_narrow
            if is_narrow:
                continue
        kept.append(part if columns is None else part.cut(columns))

    collected = collector.take()

    if kept:
        assert same(collected, Logprobs.concatenate(kept))
    else:
        assert collected is None
    assert collector.take() is None


@pytest.mark.parametrize("name", ["token_ids", "ranks"])
def test_negative_numbers_are_found_at_the_end(name: str) -> None:
    """All rows of a request are checked at once."""
    bad = make_logprobs([7], 2)
    payload = frames_of(*[EngineCoreOutput("r", [7], new_logprobs=bad)] * FEWEST)[0]
    number = {"token_ids": b"\x07\0\0\0", "ranks": b"\x03" + bytes(7)}[name]
    frames = [payload.replace(number, b"\xff" * len(number))]
    found = find_logprob_rows(frames, pattern_of(bad))
    assert found is not None
    collector = LogprobsCollector(None)
    for _, _, packed in found.rows:
        assert collector.add_packed(packed)

    with pytest.raises(CodecError) as caught:
        collector.take()

    assert caught.value.where == name
