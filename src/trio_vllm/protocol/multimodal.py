"""`MultiModalFeatureSpec`: processed images, audio or video of a prompt, and their positions.

Mirrors upstream ``vllm/multimodal/inputs.py`` and its encoding in ``vllm/v1/serial_utils.py``.
Each field of a feature is a tensor, a number or a nested list of them, with a rule (`MultiModalField`)
that says how fields of several features batch. Large tensors travel in auxiliary frames uncopied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import attrs
import numpy as np

from trio_vllm.protocol.arrays import TENSOR, Tensor
from trio_vllm.protocol.codec import (
    BOOL,
    I64,
    AuxFrames,
    Codec,
    CodecError,
    Frames,
    UInt32,
    item_step,
    map_with_path,
    optional,
    wrong_type,
)
from trio_vllm.protocol.structs import set_codec
from trio_vllm.values import define

NestedTensors: TypeAlias = (
    "Tensor | np.ndarray[Any, Any] | int | float | Sequence[NestedTensors] | None"
)


@define
class MultiModalField:
    """How a field batches: ``factory`` is ``batched``, ``flat`` or ``shared``.

    ``kwargs`` are its arguments: ``keep_on_cpu`` for all, ``slices`` and ``dim`` for ``flat``,
    ``batch_size`` for ``shared``. A slice is a Python `slice`.
    """

    factory: str
    kwargs: dict[str, Any] = attrs.field(factory=dict)


@define
class MultiModalFieldElem:
    """The value of one field of one feature, and how it batches."""

    data: Annotated[NestedTensors, optional(NESTED_TENSORS)]
    field: MultiModalField


@define(kw_only=True)
class PlaceholderRange:
    """The prompt positions that a feature stands for."""

    offset: UInt32
    length: UInt32
    is_embed: Tensor | None = None
    """Boolean mask over the range: which positions take an embedding."""


@define(kw_only=True)
class MultiModalFeatureSpec:
    """One image, audio clip or video of a prompt, processed for the model."""

    data: dict[str, MultiModalFieldElem] | None
    """None if the engine already holds it under ``identifier``."""
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


_MAX_NESTING = 16


def _decode_nested(raw: Any, frames: Frames, depth: int = 0) -> NestedTensors:
    if type(raw) is int or type(raw) is float:
        return raw
    if type(raw) is not list:
        raise wrong_type("a tensor, a number or a list", raw)
    if raw and type(raw[0]) is str:
        tensor: Tensor = TENSOR.decode(raw, frames)
        return tensor
    _limit(depth)
    return map_with_path(lambda item, _: _decode_nested(item, frames, depth + 1), raw, None)


def _encode_nested(value: Any, aux: AuxFrames, depth: int = 0) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return TENSOR.encode(value, aux)
    if type(value) is int:
        return I64.encode(value, aux)
    if type(value) is float:
        return value
    if not isinstance(value, list | tuple):
        raise wrong_type("a tensor, a number or a list", value)
    _limit(depth)
    return map_with_path(lambda item, _: _encode_nested(item, aux, depth + 1), value, None)


def _limit(depth: int) -> None:
    if depth > _MAX_NESTING:
        raise CodecError(f"nests deeper than {_MAX_NESTING} levels")


NESTED_TENSORS: Codec[NestedTensors] = Codec("nested tensors", _decode_nested, _encode_nested)


def _decode_slices(raw: Any, _: Frames, depth: int = 0) -> Any:
    """Convert ``[start, stop, step]`` to a slice, and lists of such to lists of slices."""
    if type(raw) is not list:
        raise wrong_type("a slice or a list of slices", raw)
    if raw and type(raw[0]) is not list:
        if len(raw) != 3:
            raise CodecError("must be [start, stop, step]")
        return slice(*(_BOUND.decode(part, ()) for part in raw))
    _limit(depth)
    return map_with_path(lambda item, _: _decode_slices(item, (), depth + 1), raw, None)


def _encode_slices(value: Any, _: AuxFrames, depth: int = 0) -> Any:
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return [_BOUND.encode(bound, []) for bound in bounds]
    if not isinstance(value, list | tuple):
        raise wrong_type("a slice or a list of slices", value)
    _limit(depth)
    return map_with_path(lambda item, _: _encode_slices(item, [], depth + 1), value, None)


_BOUND = optional(I64)
_SLICES: Codec[Any] = Codec("slices", _decode_slices, _encode_slices)

# The strictest reader wants every argument of a factory and no other.
_ARGUMENTS: dict[str, dict[str, Codec[Any]]] = {
    "batched": {"keep_on_cpu": BOOL},
    "flat": {"keep_on_cpu": BOOL, "slices": _SLICES, "dim": I64},
    "shared": {"keep_on_cpu": BOOL, "batch_size": I64},
}
_ARGUMENT_DEFAULTS = {"keep_on_cpu": False, "dim": 0}
"""The defaults of upstream's factories."""


def _decode_field(raw: Any, frames: Frames) -> MultiModalField:
    if type(raw) is not list or len(raw) != 2 or type(raw[1]) is not dict:
        raise wrong_type("an array [factory, arguments]", raw)
    factory, given = raw
    return MultiModalField(factory, _arguments(factory, given, lambda codec: codec.decode, frames))


def _encode_field(value: Any, aux: AuxFrames) -> Any:
    if not isinstance(value, MultiModalField) or type(value.kwargs) is not dict:
        raise wrong_type("a MultiModalField", value)
    arguments = _arguments(value.factory, value.kwargs, lambda codec: codec.encode, aux)
    return [value.factory, arguments]


def _arguments(
    factory: Any, given: dict[Any, Any], way: Callable[[Codec[Any]], Any], context: Any
) -> dict[str, Any]:
    """All arguments of a factory, converted one way or the other."""
    codecs = _ARGUMENTS.get(factory) if type(factory) is str else None
    if codecs is None:
        raise wrong_type(f"one of {', '.join(_ARGUMENTS)}", factory)
    for name in given.keys() - codecs.keys():
        raise CodecError(f"is no argument of a {factory} field").add_path(item_step(name))
    done = {name: _ARGUMENT_DEFAULTS[name] for name in codecs if name in _ARGUMENT_DEFAULTS}
    for name, codec in codecs.items():
        if name not in given and name not in done:
            raise CodecError(f"must have the argument {name!r}")
        if name in given:
            try:
                done[name] = way(codec)(given[name], context)
            except CodecError as error:
                raise error.add_path(f".{name}") from None
    return done


set_codec(MultiModalField, Codec("a multimodal field", _decode_field, _encode_field))
