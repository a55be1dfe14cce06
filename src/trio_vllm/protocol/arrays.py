"""Codecs of numpy arrays and of `Tensor`, which travel as ``[dtype, shape, data]``.

``data`` is a raw view inside the payload for small arrays and the index of an auxiliary frame for
large ones (the payload is frame 0). Decoding takes either for any size. numpy arrays name their
dtype with a byte order (``<i4``), torch tensors bare (``int32``, little-endian); since upstream's
engine does not let one stand for the other, there are two codecs. See ``vllm/v1/serial_utils.py``.

Only what travels inline is copied: arrays that were decoded alias the message and are read-only,
auxiliary frames alias the array that was encoded.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from trio_vllm.protocol.codec import (
    AuxFrames,
    Buffer,
    Codec,
    CodecError,
    Frames,
    integer,
    list_of,
    wrong_type,
)
from trio_vllm.protocol.msgpack import raw_view
from trio_vllm.protocol.structs import set_codec
from trio_vllm.values import frozen

Array = npt.NDArray[Any]

INLINE_LIMIT = 256
"""Arrays of at least this many bytes travel in a frame of their own (upstream's default)."""

_NUMBERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "b1")
_TORCH_DTYPES = {
    name: np.dtype(item)
    for name, item in {
        "bool": "|b1",
        "uint8": "|u1",
        "int8": "|i1",
        "int16": "<i2",
        "int32": "<i4",
        "int64": "<i8",
        "uint16": "<u2",
        "uint32": "<u4",
        "uint64": "<u8",
        "float16": "<f2",
        "bfloat16": "<u2",  # numpy has no bfloat16: its bits are the upper half of a float32
        "float32": "<f4",
        "float64": "<f8",
    }.items()
}
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items() if name != "bfloat16"}
_NUMPY_NAMES = {dtype: dtype.str for dtype in _TORCH_NAMES}
# The reader's list of acceptable numpy dtypes: numbers and booleans, with or without byte order,
# and the plain names. Nothing else reaches `np.dtype`, so no object or structured types.
_NUMPY_DTYPES = {
    **{
        order + code: np.dtype(order + code)
        for code in _NUMBERS
        for order in ("", "<", ">", "=", "|")
    },
    **{dtype.name: dtype for dtype in _TORCH_NAMES},
}

_ANY_DTYPES = _NUMPY_DTYPES | _TORCH_DTYPES

_SHAPE = list_of(integer(0, 2**40, "a length"))
_MAX_DIMENSIONS = 32
_MAX_ITEMS = 2**59
"""What numpy takes for 8-byte numbers, even if a length of 0 leaves none."""


@frozen(eq=False, repr=False)
class Tensor:
    """A torch tensor as it travels: a dtype name, a shape, C-contiguous little-endian bytes.

    ``data`` may alias the message it came in (receiving) or the array it was made of (sending:
    do not change that array until the request has been submitted).
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @classmethod
    def from_numpy(cls, array: Array) -> Tensor:
        """Wrap an array without copying it, if it is contiguous and little-endian already."""
        try:
            array = _plain(array)
        except CodecError as error:
            raise TypeError(f"a tensor {error.reason}") from None
        return cls(_TORCH_NAMES[array.dtype], array.shape, _bytes_of(array))

    def numpy(self) -> Array:
        """The values, read-only; bfloat16 is widened to float32, which loses nothing."""
        return _tensor_values(self.dtype, list(self.shape), self.data)

    def __reduce__(self) -> tuple[type[Tensor], tuple[str, tuple[int, ...], bytes]]:
        # A memoryview can be neither copied nor pickled.
        return Tensor, (self.dtype, self.shape, bytes(self.data))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, shape={self.shape})"


def _plain(array: Array) -> Array:
    """The same values, C-contiguous and little-endian; `CodecError` if they are not numbers."""
    dtype = array.dtype
    if dtype not in _NUMPY_NAMES:
        dtype = dtype.newbyteorder("<")
        if dtype not in _NUMPY_NAMES:
            raise CodecError(f"must be an array of numbers, not of {dtype}")
    # ascontiguousarray would turn a scalar array into one of one dimension
    return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# Reading ----------------------------------------------------------------------------------------


def _open(
    raw: Any, frames: Frames, dtypes: dict[str, np.dtype[Any]]
) -> tuple[str, list[int], Buffer]:
    """The dtype's name, the shape and the bytes, all checked against each other."""
    if type(raw) is not list or len(raw) != 3:
        raise wrong_type("an array [dtype, shape, data]", raw)
    name, shape, data = raw
    if type(name) is not str or name not in dtypes:
        raise wrong_type("the name of a number type", name).add_path(".dtype")
    try:
        shape = _SHAPE.decode(shape, frames)
    except CodecError as error:
        raise error.add_path(".shape") from None
    if len(shape) > _MAX_DIMENSIONS:
        raise CodecError(f"has {len(shape)} dimensions").add_path(".shape")
    if math.prod(length or 1 for length in shape) > _MAX_ITEMS:
        raise CodecError(f"is impossible: {shape}").add_path(".shape")
    data = _find(data, frames)
    if len(data) != math.prod(shape) * dtypes[name].itemsize:
        raise CodecError(f"shape {shape} of {name} does not fit {len(data)} bytes")
    return name, shape, data


def _find(data: Any, frames: Frames) -> Buffer:
    if type(data) is memoryview:
        return data
    if type(data) is not int:
        raise wrong_type("a raw view or the index of a frame", data).add_path(".data")
    if not 1 <= data < len(frames):
        reason = f"refers to frame {data} of a message of {len(frames)} frames"
        raise CodecError(reason).add_path(".data")
    return frames[data]


def _values(dtype: np.dtype[Any], shape: list[int], data: Buffer) -> Array:
    """A read-only view of the bytes."""
    if not len(data):  # which np.frombuffer refuses
        array = np.empty(shape, dtype)
    elif len(shape) == 1:
        array = np.frombuffer(data, dtype)
    else:
        array = np.frombuffer(data, dtype).reshape(shape)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _tensor_values(name: str, shape: list[int], data: Buffer) -> Array:
    bits = _values(_ANY_DTYPES[name], shape, data)
    if name != "bfloat16":
        return bits
    values: Array = (bits.astype("<u4") << 16).view("<f4")
    values.flags.writeable = False
    return values


def _decode_numpy(raw: Any, frames: Frames) -> Array:
    name, shape, data = _open(raw, frames, _NUMPY_DTYPES)
    return _values(_NUMPY_DTYPES[name], shape, data)


def _decode_tensor(raw: Any, frames: Frames) -> Tensor:
    name, shape, data = _open(raw, frames, _TORCH_DTYPES)
    return Tensor(name, tuple(shape), data)


def _decode_tensor_as_numpy(raw: Any, frames: Frames) -> Array:
    return _tensor_values(*_open(raw, frames, _ANY_DTYPES))


# Writing ----------------------------------------------------------------------------------------


def _place(data: Buffer, aux: AuxFrames, *, inline: bool) -> Any:
    if inline:
        return raw_view(data)
    aux.append(data)
    return len(aux)


def _encode_numpy(value: Any, aux: AuxFrames) -> Any:
    if not isinstance(value, np.ndarray):
        raise wrong_type("a numpy array", value)
    array = _plain(value)
    inline = array.nbytes < INLINE_LIMIT or array.ndim == 0
    data = _place(_bytes_of(array), aux, inline=inline)
    return [_NUMPY_NAMES[array.dtype], list(array.shape), data]


def _encode_tensor(value: Any, aux: AuxFrames) -> Any:
    if isinstance(value, np.ndarray):
        array = _plain(value)
        name, shape, data = _TORCH_NAMES[array.dtype], list(array.shape), _bytes_of(array)
    elif isinstance(value, Tensor):
        if type(value.shape) is not tuple:
            raise wrong_type("a tuple", value.shape).add_path(".shape")
        name, shape, data = value.dtype, list(value.shape), _flat(value.data)
        _open([name, shape, data], (), _TORCH_DTYPES)
    else:
        raise wrong_type("a Tensor", value)
    return [name, shape, _place(data, aux, inline=len(data) < INLINE_LIMIT)]


def _flat(data: Any) -> memoryview:
    """The bytes of a buffer of whatever item type."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise CodecError(f"must be contiguous bytes: {error}").add_path(".data") from None


NUMPY_ARRAY: Codec[Array] = Codec("a numpy array", _decode_numpy, _encode_numpy)
TENSOR = set_codec(Tensor, Codec("a torch tensor", _decode_tensor, _encode_tensor))
TENSOR_AS_NUMPY: Codec[Array] = Codec("a torch tensor", _decode_tensor_as_numpy, _encode_tensor)
"""For tensors whose values we use: encoded as torch names them, decoded also as numpy does.

Engines that are written with upstream's Rust crate send numpy's descriptors here.
"""

NumpyArray = Annotated[Array, NUMPY_ARRAY]
TensorArray = Annotated[Array, TENSOR_AS_NUMPY]
