"""Arrays on the wire: ``[dtype, shape, data]``.

``data`` is a raw view inside the payload for small arrays and the index of an auxiliary frame for
large ones (the payload is frame 0). Readers take either for any size. numpy arrays name their
dtype with a byte order (``<i4``), torch tensors bare (``int32``, little-endian); upstream does not
let one stand for the other, hence two forms. See ``vllm/v1/serial_utils.py``.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ._forms import AuxFrames, Buffer, Form, FormError, Frames, integers, misfit
from ._msgpack import raw_view

Array = npt.NDArray[Any]

INLINE_LIMIT = 256
"""Arrays of at least this many bytes travel in a frame of their own (upstream's default)."""

_NUMBERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "b1")
_TORCH_ITEM_TYPES = {
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
}
_TORCH_NAMES = {
    np.dtype(item): name for name, item in _TORCH_ITEM_TYPES.items() if name != "bfloat16"
}
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

_SHAPE = integers(0, 2**40)
_MAX_DIMENSIONS = 32


@attrs.frozen(eq=False, repr=False)
class Tensor:
    """A torch tensor as it travels: a dtype name, a shape, C-contiguous little-endian bytes.

    ``data`` may alias the message it came in (receiving) or the array it was made of (sending:
    do not change that array until the request has been sent).
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @classmethod
    def from_numpy(cls, array: Array) -> Tensor:
        """Wrap an array without copying it, if it is contiguous and little-endian already."""
        array = _plain(array)
        try:
            name = _TORCH_NAMES[array.dtype]
        except KeyError:
            raise TypeError(f"no torch dtype for numpy dtype {array.dtype}") from None
        return cls(name, array.shape, _bytes_of(array))

    def numpy(self) -> Array:
        """The values, read-only; bfloat16 is widened to float32, which loses nothing."""
        array = np.frombuffer(self.data, _TORCH_ITEM_TYPES[self.dtype]).reshape(self.shape)
        if self.dtype == "bfloat16":
            return (array.astype("<u4") << 16).view("<f4")
        return array

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, shape={self.shape})"


def _plain(array: Array) -> Array:
    """The same values, C-contiguous and little-endian."""
    dtype = array.dtype.newbyteorder("<")
    # ascontiguousarray would turn a scalar array into one of one dimension
    return (
        array
        if not array.ndim and array.dtype == dtype
        else np.ascontiguousarray(array, dtype).reshape(array.shape)
    )


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _find(data: Any, frames: Frames) -> Buffer:
    if type(data) is memoryview:
        return data
    if type(data) is not int:
        raise misfit("a raw view or the index of a frame", data)
    if not 1 <= data < len(frames):
        raise FormError(f"refers to frame {data} of a message of {len(frames)} frames")
    return frames[data]


def _place(data: Buffer, aux: AuxFrames, *, inline: bool) -> Any:
    if inline:
        return raw_view(data)
    aux.append(data)
    return len(aux)


def _open(raw: Any, frames: Frames, items: Any) -> tuple[str, Any, list[int], Buffer]:
    if type(raw) is not list or len(raw) != 3:
        raise misfit("an array [dtype, shape, data]", raw)
    name, shape, data = raw
    if type(name) is not str or name not in items:
        raise misfit("the name of a number type", name).within(".dtype")
    try:
        shape = _SHAPE.decode(shape, frames)
    except FormError as error:
        raise error.within(".shape") from None
    if len(shape) > _MAX_DIMENSIONS:
        raise FormError(f"has {len(shape)} dimensions").within(".shape")
    item = np.dtype(items[name])
    data = _find(data, frames)
    if len(data) != math.prod(shape) * item.itemsize:
        raise FormError(f"shape {shape} of {name} does not fit {len(data)} bytes")
    return name, item, shape, data


def _decode_numpy(raw: Any, frames: Frames) -> Array:
    _, dtype, shape, data = _open(raw, frames, _NUMPY_DTYPES)
    return _shaped(data, dtype, shape)


def _shaped(data: Buffer, dtype: Any, shape: list[int]) -> Array:
    try:
        return np.frombuffer(data, dtype).reshape(shape) if len(data) else np.empty(shape, dtype)
    except ValueError as error:
        raise FormError(f"shape {shape} is impossible: {error}") from None


def _encode_numpy(value: Any, aux: AuxFrames) -> Any:
    if not isinstance(value, np.ndarray):
        raise misfit("a numpy array", value)
    array = _plain(value)
    if array.dtype.str.lstrip("<>|=") not in _NUMBERS:
        raise misfit("an array of numbers", value.dtype)
    inline = array.nbytes < INLINE_LIMIT or array.ndim == 0
    return [array.dtype.str, list(array.shape), _place(_bytes_of(array), aux, inline=inline)]


def _decode_tensor(raw: Any, frames: Frames) -> Tensor:
    name, _, shape, data = _open(raw, frames, _TORCH_ITEM_TYPES)
    return Tensor(name, tuple(shape), data)


def _encode_tensor(value: Any, aux: AuxFrames) -> Any:
    if isinstance(value, np.ndarray):
        value = Tensor.from_numpy(value)
    if not isinstance(value, Tensor):
        raise misfit("a Tensor", value)
    data = _place(value.data, aux, inline=len(value.data) < INLINE_LIMIT)
    return [value.dtype, list(value.shape), data]


NUMPY_ARRAY: Form[Array] = Form("a numpy array", _decode_numpy, _encode_numpy)
TENSOR: Form[Tensor] = Form("a torch tensor", _decode_tensor, _encode_tensor)


def _decode_tensor_as_numpy(raw: Any, frames: Frames) -> Array:
    name, dtype, shape, data = _open(raw, frames, _TORCH_ITEM_TYPES)
    if name == "bfloat16":
        return Tensor(name, tuple(shape), data).numpy()
    return _shaped(data, dtype, shape)


TENSOR_AS_NUMPY: Form[Array] = Form("a torch tensor", _decode_tensor_as_numpy, _encode_tensor)
"""For tensors whose element type numpy knows: written as torch, given as numpy."""
