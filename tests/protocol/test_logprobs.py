"""Log probabilities and sampling masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import ormsgpack
import pytest
from tests.protocol.comparing import same, unpacked
from tests.protocol.packing import pack
from tests.protocol.test_outputs import full_output, row

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    CodecError,
    EngineCoreOutput,
    Logprobs,
    RequestBatchOutputs,
    SamplingMask,
    decode_outputs,
    encode_outputs,
)


def logprobs(ids: Any, values: Any, ranks: Any) -> EngineCoreOutput:
    return EngineCoreOutput("r", new_logprobs=Logprobs(ids, values, ranks))


@pytest.mark.parametrize(
    ("ids", "values", "ranks", "where"),
    [
        (np.zeros((1, 1), np.int16), np.zeros((1, 1), "f4"), np.zeros(1, int), ".token_ids"),
        (np.zeros(1, int), np.zeros((1, 1), "f4"), np.zeros(1, int), ".token_ids"),
        (np.zeros((1, 1), int), np.zeros((1, 1), "f8"), np.zeros(1, int), ".logprobs"),
        (np.zeros((1, 1), int), np.zeros((1, 1), "f4"), np.zeros((1, 1), int), ".ranks"),
        (np.zeros((1, 1), int), np.zeros((1, 1), "f4"), np.zeros(1, "u4"), ".ranks"),
        (np.full((1, 1), -1), np.zeros((1, 1), "f4"), np.zeros(1, int), ".token_ids"),
        (np.zeros((1, 1), int), np.zeros((1, 1), "f4"), np.full(1, -1), ".ranks"),
        (np.zeros((1, 2), int), np.zeros((1, 1), "f4"), np.zeros(1, int), ""),
        (np.zeros((2, 1), int), np.zeros((2, 1), "f4"), np.zeros(1, int), ""),
        (np.zeros((1, 0), int), np.zeros((1, 0), "f4"), np.zeros(1, int), ""),
        ([[1]], np.zeros((1, 1), "f4"), np.zeros(1, int), ".token_ids"),
    ],
)
def test_log_probabilities_that_do_not_fit_are_not_written(
    ids: Any, values: Any, ranks: Any, where: str
) -> None:
    with pytest.raises(CodecError) as caught:
        encode_outputs(RequestBatchOutputs(outputs=[logprobs(ids, values, ranks)]))

    assert caught.value.where == f"outputs[0].new_logprobs{where}"


def test_log_probabilities_without_rows_arrive() -> None:
    for columns in (0, 2):
        empty = logprobs(
            np.zeros((0, columns), "i4"), np.zeros((0, columns), "f4"), np.zeros(0, "i8")
        )
        batch = RequestBatchOutputs(outputs=[empty])
        assert same(batch, decode_outputs(encode_outputs(batch)))


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_log_probabilities_of_any_length_are_read(length: int) -> None:
    arrays = [["<i4", [1, 1], _raw("<i4")], ["<f4", [1, 1], _raw("<f4")], ["<i8", [1], _raw("<i8")]]
    raw = row(new_logprobs=[*arrays, *[None] * (length - 3)])

    batch = decode_outputs([pack([0, [raw]])])

    assert isinstance(batch, RequestBatchOutputs)
    (output,) = batch.outputs
    assert output.new_logprobs is not None
    (position,) = output.new_logprobs.positions
    assert (position.token.token_id, position.token.logprob, position.token.rank) == (1, 1.0, 1)


def _raw(dtype: str) -> ormsgpack.Ext:
    return ormsgpack.Ext(3, np.ones(1, dtype).tobytes())


def test_cumulative_counts_are_refused() -> None:
    arrays = [["<i4", [1, 1], _raw("<i4")], ["<f4", [1, 1], _raw("<f4")], ["<i8", [1], _raw("<i8")]]

    with pytest.raises(DecodeError, match="cumulative"):
        decode_outputs([pack([0, [row(new_logprobs=[*arrays, [0, 1]])]])])


def test_records_cut_and_joined() -> None:
    wide = full_output().new_logprobs
    assert wide is not None
    narrow = wide.cut(1)

    assert [len(p.entries) for p in wide] == [2, 2]
    assert [[(e.token_id, e.rank) for e in p.entries] for p in wide] == [
        [(5, 1), (5, 1)],
        [(6, 0), (7, 1)],
    ]
    assert math.isnan(wide.positions[1].token.logprob)
    assert [len(p.entries) for p in narrow] == [1, 1]
    assert wide.cut(5) is wide
    assert np.shares_memory(narrow.token_ids, wide.token_ids)
    joined = Logprobs.concatenate([narrow, wide])
    assert len(joined) == 4
    assert joined.token_ids.tolist() == [[5, 0], [6, 0], [5, 5], [6, 7]]
    assert joined.logprobs[0].tolist() == [-0.5, -math.inf]
    assert Logprobs.concatenate([wide]) is wide


@pytest.mark.parametrize(
    ("mask", "where"),
    [
        (SamplingMask(np.zeros((1, 1), int)), ".token_ids"),
        (SamplingMask(np.zeros(1)), ".token_ids"),
        (SamplingMask(np.zeros(2, int), np.zeros((1, 2), int)), ".offsets"),
        (SamplingMask(np.zeros(2, int), np.zeros(0, int)), ".offsets"),
        (SamplingMask(np.zeros(2, int), np.array([1, 2])), ".offsets"),
        (SamplingMask(np.zeros(2, int), np.array([0, 3])), ".offsets"),
        (SamplingMask(np.zeros(2, int), np.array([0, 2, 1, 2])), ".offsets"),
        (SamplingMask(np.zeros(2, int), np.array([0.0, 2.0])), ".offsets"),
    ],
)
def test_sampling_mask_that_does_not_fit_is_not_written(mask: SamplingMask, where: str) -> None:
    output = EngineCoreOutput("r", new_sampling_mask=mask)

    with pytest.raises(CodecError) as caught:
        encode_outputs(RequestBatchOutputs(outputs=[output]))

    assert caught.value.where == f"outputs[0].new_sampling_mask{where}"


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("integers", ["<i8", "<i4", ">i8", "int64", "i8"])
@pytest.mark.parametrize("floats", ["<f4", "float32", "f4"])
def test_prompt_logprobs_with_numpy_descriptors(integers: str, floats: str, inline: bool) -> None:
    """Engines that are written with upstream's Rust crate send them; what we write is torch's."""
    expected = Logprobs(
        np.array([[1, 2], [3, 4]]), np.array([[-0.5, -1], [-2, -3]], "<f4"), np.array([1, 5])
    )
    by_id = np.array([[0.5, -np.inf]], "<f4")
    aux: list[bytes] = []

    def array(values: Any, dtype: str) -> list[Any]:
        data = values.astype(dtype).tobytes()
        if inline:
            return [dtype, list(values.shape), ormsgpack.Ext(3, data)]
        aux.append(data)
        return [dtype, list(values.shape), len(aux)]

    arrays = [
        array(expected.token_ids, integers),
        array(expected.logprobs, floats),
        array(expected.ranks, integers),
    ]
    raw = row(
        new_prompt_logprobs_tensors=[*arrays, None, None],
        prompt_token_id_logprobs=array(by_id, floats),
    )

    message = decode_outputs([pack([0, [raw]]), *aux])

    assert isinstance(message, RequestBatchOutputs)
    (output,) = message.outputs
    assert output.new_prompt_logprobs_tensors == expected
    assert np.array_equal(output.prompt_token_id_logprobs, by_id)  # type: ignore[arg-type]
    written = unpacked(bytes(encode_outputs(message)[0]))[1][0]
    names = {dtype for dtype, *_ in [*written[3][:3], written[17]]}
    assert names == {"float32", "int32" if integers == "<i4" else "int64"}


def test_rows_of_sampling_masks() -> None:
    ids = np.array([4, 5, 6])

    assert [r.tolist() for r in SamplingMask(ids).rows] == [[4, 5, 6]]
    offsets = np.array([0, 1, 1, 3])
    assert [r.tolist() for r in SamplingMask(ids, offsets).rows] == [[4], [], [5, 6]]
