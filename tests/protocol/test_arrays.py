"""Arrays: what travels, what is copied, what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from tests.protocol.comparing import same

from trio_vllm.protocol import Array, Frames, Tensor
from trio_vllm.protocol.arrays import INLINE_LIMIT, NUMPY_ARRAY, TENSOR, TENSOR_AS_NUMPY
from trio_vllm.protocol.codec import Codec, CodecError
from trio_vllm.protocol.msgpack import pack, unpack

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]


def sent(form: Codec[Any], value: Any) -> tuple[Any, list[Any]]:
    """What comes out at the other end, and the auxiliary frames."""
    aux: list[Any] = []
    payload = pack(form.encode(value, aux))
    frames = [payload, *map(bytes, aux)]
    return form.decode(unpack(payload), frames), aux


@pytest.mark.parametrize("form", [NUMPY_ARRAY, TENSOR_AS_NUMPY], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_values_arrive(form: Codec[Array], dtype: str) -> None:
    for shape in [(), (0,), (3,), (2, 3), (0, 5), (2, 0, 3), (40, 10)]:
        values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)

        arrived, _ = sent(form, values)

        assert same(values, arrived)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(12, dtype="<i4").reshape(3, 4)[:, ::2],
        np.arange(12, dtype="<i4").reshape(3, 4).T,
        np.arange(12, dtype="<i4")[::-1],
        np.asfortranarray(np.arange(12, dtype="<i4").reshape(3, 4)),
        np.arange(12, dtype=">i4"),
        np.array(7, ">i4"),
        np.broadcast_to(np.int32(3), (2, 2)),
        np.ma.masked_array(np.arange(3, dtype="<i4")),
    ],
    ids=lambda values: f"{type(values).__name__}{values.shape}{values.dtype.str}",
)
@pytest.mark.parametrize("form", [NUMPY_ARRAY, TENSOR_AS_NUMPY], ids=["numpy", "torch"])
def test_arrays_of_any_layout_arrive_plain(form: Codec[Array], values: Array) -> None:
    arrived, _ = sent(form, values)

    assert arrived.dtype.str == "<i4"
    assert arrived.flags.c_contiguous
    assert arrived.tolist() == values.tolist()


@pytest.mark.parametrize("form", [NUMPY_ARRAY, TENSOR_AS_NUMPY], ids=["numpy", "torch"])
def test_small_arrays_stay_in_the_payload(form: Codec[Array]) -> None:
    small, large = np.zeros(INLINE_LIMIT - 1, np.uint8), np.zeros(INLINE_LIMIT, np.uint8)

    assert sent(form, small)[1] == []
    assert list(map(len, sent(form, large)[1])) == [INLINE_LIMIT]


def test_scalar_arrays_of_numpy_always_stay_in_the_payload() -> None:
    assert sent(NUMPY_ARRAY, np.array(1.5))[1] == []


@pytest.mark.parametrize("form", [NUMPY_ARRAY, TENSOR_AS_NUMPY, TENSOR])
def test_large_arrays_are_not_copied(form: Codec[Any]) -> None:
    values = np.arange(1000, dtype="<i4").reshape(10, 100)
    value = Tensor.from_numpy(values) if form is TENSOR else values
    aux: list[Any] = []
    raw = form.encode(value, aux)
    raw[2] = 1

    arrived = form.decode(raw, [b"", *aux])

    (frame,) = aux
    assert np.shares_memory(values, np.frombuffer(frame, np.uint8))
    arrived_array = arrived.numpy() if form is TENSOR else arrived
    assert np.shares_memory(values, arrived_array)


@pytest.mark.parametrize("size", [0, 4, 4000])
@pytest.mark.parametrize("kind", [bytes, lambda b: memoryview(bytearray(b))], ids=["ro", "rw"])
@pytest.mark.parametrize("form", [NUMPY_ARRAY, TENSOR_AS_NUMPY], ids=["numpy", "torch"])
def test_what_was_read_cannot_be_written(form: Codec[Array], size: int, kind: Any) -> None:
    dtype = "<i4" if form is NUMPY_ARRAY else "int32"

    arrived = form.decode([dtype, [size // 4], 1], [b"", kind(bytes(size))])

    assert not arrived.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        arrived[...] = 1


def test_views_of_other_items_count_bytes() -> None:
    floats = np.ones(100, np.float32).data
    tensor = Tensor("float32", (100,), floats)

    arrived, aux = sent(TENSOR, tensor)

    assert len(aux[0]) == 400
    assert arrived.numpy().tolist() == [1.0] * 100


def test_bfloat16_is_widened() -> None:
    values = np.array([1.0, -2.5, np.inf, np.nan, 0.0], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensor = Tensor("bfloat16", (5,), bits.tobytes())

    arrived, _ = sent(TENSOR, tensor)

    assert same(arrived, tensor)
    np.testing.assert_array_equal(arrived.numpy(), values)
    assert same(
        arrived.numpy(), TENSOR_AS_NUMPY.decode(["bfloat16", [5], memoryview(bits.tobytes())], [])
    )


@pytest.mark.parametrize("dtype", ["=i4", "i4", "|i4", "<i4", "int32"])
def test_numpy_dtypes_of_other_writers_are_read(dtype: str) -> None:
    assert NUMPY_ARRAY.decode([dtype, [1], memoryview(b"\x05\0\0\0")], []).tolist() == [5]


def test_big_endian_arrays_are_read() -> None:
    assert NUMPY_ARRAY.decode([">i4", [1], memoryview(b"\0\0\0\x05")], []).tolist() == [5]


RAW = memoryview(bytes(8))
FRAMES: Frames = [b"payload", bytes(8)]
BAD: list[tuple[Any, str]] = [
    (None, ""),
    ({}, ""),
    ([], ""),
    (["<i4", [2]], ""),
    (["<i4", [2], RAW, None], ""),
    ([None, [2], RAW], "dtype"),
    (["O", [1], RAW], "dtype"),
    (["V8", [1], RAW], "dtype"),
    (["<U2", [1], RAW], "dtype"),
    (["<M8[s]", [1], RAW], "dtype"),
    (["<c8", [1], RAW], "dtype"),
    ([["<i4"], [1], RAW], "dtype"),
    (["i4,i4", [1], RAW], "dtype"),
    (["<i4", 2, RAW], "shape"),
    (["<i4", None, RAW], "shape"),
    (["<i4", [-2], RAW], "shape[0]"),
    (["<i4", [1, -2], RAW], "shape[1]"),
    (["<i4", [True, 2], RAW], "shape[0]"),
    (["<i4", [2.0], RAW], "shape[0]"),
    (["<i4", [2**63], RAW], "shape[0]"),
    (["<i4", [2**40] * 3, RAW], "shape"),
    (["<i4", [1] * 33, RAW], "shape"),
    (["<i4", [0, 2**40, 2**40], memoryview(b"")], "shape"),
    (["<i4", [2**20, 2**40, 0], memoryview(b"")], "shape"),
    (["<i4", [3], RAW], ""),
    (["<i4", [1], RAW], ""),
    (["<i4", [], RAW], ""),
    (["<i4", [2], 0], "data"),
    (["<i4", [2], -1], "data"),
    (["<i4", [2], 2], "data"),
    (["<i4", [2], 99], "data"),
    (["<i4", [2], 2**63], "data"),
    (["<i4", [2], 1.0], "data"),
    (["<i4", [2], True], "data"),
    (["<i4", [2], bytes(8)], "data"),
    (["<i4", [2], None], "data"),
    (["<i4", [2], {}], "data"),
]


@pytest.mark.parametrize(("raw", "where"), BAD)
@pytest.mark.parametrize(
    "form", [NUMPY_ARRAY, TENSOR, TENSOR_AS_NUMPY], ids=["numpy", "torch", "as"]
)
def test_bad_array_is_refused(form: Codec[Any], raw: Any, where: str) -> None:
    if form is not NUMPY_ARRAY and type(raw) is list and raw[:1] == ["<i4"]:
        raw = ["int32", *raw[1:]]

    with pytest.raises(CodecError) as caught:
        form.decode(raw, FRAMES)

    assert caught.value.where == where


@pytest.mark.parametrize("shape", [[0, 2**19, 2**40], [2**40, 0], [0] * 32], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "float64", "bfloat16"])
def test_empty_tensor_of_any_shape_has_its_values(dtype: str, shape: list[int]) -> None:
    assert TENSOR.decode([dtype, shape, memoryview(b"")], []).numpy().shape == tuple(shape)


def test_torch_and_numpy_names_are_not_mixed_up() -> None:
    with pytest.raises(CodecError, match="name of a number type"):
        TENSOR.decode(["<i4", [2], RAW], [])
    with pytest.raises(CodecError, match="name of a number type"):
        NUMPY_ARRAY.decode(["bfloat16", [4], RAW], [])


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2],
        b"bytes",
        np.float32(1),
        np.array(["text"]),
        np.array([object()]),
        np.array(["2026-01-01"], "M8[D]"),
        np.zeros(2, complex),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, "V3"),
    ],
)
@pytest.mark.parametrize("form", [NUMPY_ARRAY, TENSOR], ids=["numpy", "torch"])
def test_what_is_no_array_of_numbers_is_not_written(form: Codec[Any], value: Any) -> None:
    with pytest.raises(CodecError, match=r"must be (a|an) "):
        form.encode(value, [])


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        (Tensor("float31", (1,), b"1234"), "dtype"),
        (Tensor("float32", (2,), b"1234"), ""),
        (Tensor("float32", (-1,), b""), "shape[0]"),
        (Tensor("float32", [1], b"1234"), "shape"),  # type: ignore[arg-type]
        (Tensor("float32", (1,), "1234"), "data"),  # type: ignore[arg-type]
        (Tensor("float32", (1,), memoryview(b"12345678")[::2]), "data"),
        (Tensor(None, (1,), b"1234"), "dtype"),  # type: ignore[arg-type]
    ],
)
def test_inconsistent_tensor_is_not_written(tensor: Tensor, where: str) -> None:
    with pytest.raises(CodecError) as caught:
        TENSOR.encode(tensor, [])

    assert caught.value.where == where


@pytest.mark.parametrize(
    "values", [np.array(["a"]), np.zeros(1, complex), np.zeros(1, object)], ids=str
)
def test_tensor_of_no_numbers_cannot_be_made(values: Array) -> None:
    with pytest.raises(TypeError, match="must be an array of numbers"):
        Tensor.from_numpy(values)


def test_tensor_can_be_copied_and_pickled() -> None:
    tensor = Tensor.from_numpy(np.arange(4, dtype=np.float32))

    assert same(tensor, copy.deepcopy(tensor))
    assert same(tensor, pickle.loads(pickle.dumps(tensor)))
    assert repr(tensor) == "Tensor(float32, shape=(4,))"
