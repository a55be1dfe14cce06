"""`LogprobsCollector`: rows kept as bytes are the rows that decoding gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llm.logprobs import make_logprobs
from tests.protocol.comparing import same
from tests.protocol.packing import pack

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    CodecError,
    EngineCoreOutput,
    FinishReason,
    Frames,
    Logprobs,
    LogprobsCollector,
    PrefillStats,
    RequestBatchOutputs,
    SamplingMask,
    UndecodedBatch,
    decode_outputs_lazily,
    encode_outputs,
    raw_logprobs_of,
    rest_of,
)


def received(*outputs: EngineCoreOutput) -> UndecodedBatch:
    """The message of an engine with these outputs, as a client gets it."""
    frames = [bytes(frame) for frame in encode_outputs(RequestBatchOutputs(outputs=list(outputs)))]
    batch = decode_outputs_lazily(frames)
    assert isinstance(batch, UndecodedBatch)
    return batch


@st.composite
def rows(draw: st.DrawFn) -> Logprobs:
    """One or two tokens with log probabilities of any layout; wide ones travel in other frames."""
    count = draw(st.sampled_from([1, 1, 1, 2]))
    shape = count, draw(st.sampled_from([1, 2, 2, 3, 70]))
    integers: st.SearchStrategy[Any] = st.sampled_from(["<i4", "<i8"])
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    return Logprobs(
        seed.integers(0, 2**31, shape).astype(draw(integers)),
        seed.normal(size=shape).astype("<f4"),
        seed.integers(0, 2**31, count).astype(draw(integers)),
    )


@settings(deadline=None)
@given(st.lists(rows(), max_size=6), st.sampled_from([None, 1, 2, 5]))
def test_rows_are_collected_as_they_are_decoded(parts: list[Logprobs], columns: int | None) -> None:
    """Whatever their layouts, in whatever order."""
    outputs = [EngineCoreOutput("r", [7] * len(part), new_logprobs=part) for part in parts]
    batch = received(*outputs)
    collector = LogprobsCollector(columns)
    for row in batch.rows:
        raw = raw_logprobs_of(row)
        if raw is None or not collector.add_raw(raw, batch.frames):
            decoded = batch.decode_row(row).new_logprobs
            assert decoded is not None
            collector.add(decoded)

    collected = collector.take()

    if not parts:
        assert collected is None
    else:
        expected = Logprobs.concatenate(
            [part if columns is None else part.cut(columns) for part in parts]
        )
        assert same(collected, expected)
    assert collector.take() is None


def test_the_usual_row_is_not_decoded() -> None:
    """One token with the layout of vLLM's engine, inline or in other frames."""
    collector = LogprobsCollector(None)
    for width in (2, 100):
        batch = received(EngineCoreOutput("r", [7], new_logprobs=make_logprobs([7], width)))
        (row,) = batch.rows

        assert collector.add_raw(raw_logprobs_of(row), batch.frames)


@pytest.mark.parametrize(
    "output",
    [
        EngineCoreOutput("r", [7]),
        EngineCoreOutput("r", [7, 8], new_logprobs=make_logprobs([7, 8], 2)),
        EngineCoreOutput("r", [], new_logprobs=make_logprobs([], 2)),
        EngineCoreOutput(
            "r",
            [7],
            new_logprobs=make_logprobs([7], 2),
            new_sampling_mask=SamplingMask(np.array([7, 9], np.int32)),
        ),
    ],
)
def test_other_rows_are_decoded(output: EngineCoreOutput) -> None:
    """They have not one token, no logprobs, or other things for each token."""
    (row,) = received(output).rows

    assert raw_logprobs_of(row) is None


@pytest.mark.parametrize(
    ("fields", "is_all"),
    [
        ({}, True),
        ({"num_nans_in_logits": 1}, False),
        ({"stop_reason": 7}, False),
        ({"prefill_stats": PrefillStats()}, False),
        ({"finish_reason": FinishReason.LENGTH}, False),
    ],
)
def test_what_else_a_row_has(fields: dict[str, Any], is_all: bool) -> None:
    """Without the token it is a row that says the rest."""
    batch = received(EngineCoreOutput("r", [7], new_logprobs=make_logprobs([7], 2), **fields))
    (row,) = batch.rows
    rest = rest_of(row)

    assert raw_logprobs_of(row) is row[2]
    assert (rest is None) is is_all
    if rest is not None:
        assert same(batch.decode_row(rest), EngineCoreOutput("r", [], **fields))


@settings(deadline=None)
@given(st.lists(rows(), max_size=6), st.sampled_from([1, 70, 10_000]))
def test_room_only_says_when_arrays_are_made(parts: list[Logprobs], room: int) -> None:
    """What comes out is the same."""
    batch = received(*(EngineCoreOutput("r", [7] * len(p), new_logprobs=p) for p in parts))
    collected = []
    for collector in (LogprobsCollector(2, room=room), LogprobsCollector(2)):
        for row in batch.rows:
            raw = raw_logprobs_of(row)
            if raw is not None:
                collector.add_raw(raw, batch.frames)
        collected.append(collector.take())

    assert same(*collected)


IDS, VALUES, RANKS = b"\x07\0\0\0" * 2, b"\0\0\0\0" * 2, b"\x01" + bytes(7)


def raw_logprobs(**changes: Any) -> list[Any]:
    """Raw log probabilities, with another value in the place of some."""
    parts: dict[str, Any] = {
        "id_type": "<i4",
        "shape": [1, 2],
        "ids": memoryview(IDS),
        "value_type": "<f4",
        "value_shape": [1, 2],
        "values": memoryview(VALUES),
        "rank_type": "<i8",
        "rank_shape": [1],
        "ranks": memoryview(RANKS),
        "counts": None,
    }
    changed = {**parts, **changes}
    assert changed.keys() == parts.keys()
    flat = list(changed.values())
    return [flat[0:3], flat[3:6], flat[6:9], flat[9]]


@pytest.mark.parametrize(
    "changes",
    [
        {"id_type": "<i2"},
        {"id_type": ["<i4"]},
        {"id_type": None},
        {"shape": [1, 3]},
        {"shape": [2, 1], "value_shape": [2, 1]},
        {"shape": [1, 2, 1]},
        {"shape": 2},
        {"shape": [1, 0], "value_shape": [1, 0], "ids": b"", "values": b""},
        {"ids": memoryview(IDS[:-1])},
        {"ids": 0},
        {"ids": 2},
        {"ids": -1},
        {"ids": None},
        {"ids": IDS},
        {"value_type": "<f8"},
        {"value_shape": [1, 1]},
        {"values": memoryview(VALUES * 2)},
        {"rank_type": "<u4"},
        {"rank_shape": [2]},
        {"ranks": memoryview(RANKS * 2)},
        {"counts": [1]},
    ],
)
def test_what_is_unusual_is_left_to_the_decoder(changes: dict[str, Any]) -> None:
    """Which takes it, or says what is wrong."""
    frames: Frames = [b"payload", b"\0" * 3]

    assert LogprobsCollector(None).add_raw(raw_logprobs(), frames)
    assert not LogprobsCollector(None).add_raw(raw_logprobs(**changes), frames)


@pytest.mark.parametrize("raw", [None, 5, "abc", [], [1, 2, 3, 4], [[1, 2, 3]] * 3, {}, [{}] * 4])
def test_garbage_is_left_to_the_decoder(raw: Any) -> None:
    """Of any shape."""
    assert not LogprobsCollector(None).add_raw(raw, [])


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"ids": memoryview(b"\xff" * 8)}, "token_ids"),
        ({"ranks": memoryview(b"\xff" * 8)}, "ranks"),
    ],
)
def test_negative_ids_are_found_at_the_end(changes: dict[str, Any], where: str) -> None:
    """All rows of a request are checked at once."""
    collector = LogprobsCollector(None)
    assert collector.add_raw(raw_logprobs(**changes), [])

    with pytest.raises(CodecError) as caught:
        collector.take()

    assert caught.value.where == where


def test_a_row_whose_arrays_are_not_there() -> None:
    """The decoder's error is the request's."""
    raw = ["r", [7], raw_logprobs(ids=9)]
    frames = [pack([0, [raw + [None] * 10 + [0] + [None] * 5]])]
    batch = decode_outputs_lazily(frames)
    assert isinstance(batch, UndecodedBatch)
    (row,) = batch.rows

    assert not LogprobsCollector(None).add_raw(raw_logprobs_of(row), frames)
    with pytest.raises(DecodeError):
        batch.decode_row(row)
