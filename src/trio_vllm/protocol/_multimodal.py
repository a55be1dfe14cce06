"""Multimodal features of a prompt: processed inputs and where they stand in it.

Mirrors upstream ``vllm/multimodal/inputs.py`` and its encoding in ``vllm/v1/serial_utils.py``.
Each field of a feature is a tensor, a number or a nested list of them, with a rule (`MultiModalField`)
that says how fields of several features batch. Large tensors travel in auxiliary frames uncopied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from ._arrays import TENSOR, Tensor
from ._forms import (
    STR,
    U32,
    AuxFrames,
    Form,
    FormError,
    Frames,
    map_of,
    map_struct,
    misfit,
    optional,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NestedTensors: TypeAlias = (
    "Tensor | np.ndarray[Any, Any] | int | float | Sequence[NestedTensors] | None"
)


@attrs.define
class MultiModalField:
    """How a field batches: ``factory`` is ``batched``, ``flat`` or ``shared``.

    ``kwargs`` are its arguments: ``keep_on_cpu`` for all, ``slices`` and ``dim`` for ``flat``,
    ``batch_size`` for ``shared``. A slice is a Python `slice`.
    """

    factory: str
    kwargs: dict[str, Any] = attrs.field(factory=dict)


@attrs.define
class MultiModalFieldElem:
    """The value of one field of one feature, and how it batches."""

    data: NestedTensors
    field: MultiModalField


@attrs.define(kw_only=True)
class PlaceholderRange:
    """The prompt positions that a feature stands for."""

    offset: int
    length: int
    is_embed: Tensor | None = None
    """Boolean mask over the range: which positions take an embedding."""


@attrs.define(kw_only=True)
class MultiModalFeatureSpec:
    """One image, audio clip or video of a prompt, processed for the model."""

    data: dict[str, MultiModalFieldElem] | None
    """None if the engine already holds it under ``identifier``."""
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


_FACTORY_KWARGS = {
    "batched": ("keep_on_cpu",),
    "flat": ("keep_on_cpu", "slices", "dim"),
    "shared": ("keep_on_cpu", "batch_size"),
}
_MAX_NESTING = 16


def _decode_nested(raw: Any, frames: Frames, depth: int = 0) -> NestedTensors:
    if depth > _MAX_NESTING:
        raise FormError(f"nests deeper than {_MAX_NESTING} levels")
    if raw is None or type(raw) in (int, float):
        return raw  # type: ignore[no-any-return]
    if type(raw) is not list:
        raise misfit("a tensor, a number or a list", raw)
    if len(raw) == 3 and type(raw[0]) is str:
        return TENSOR.decode(raw, frames)
    return [_decode_nested(item, frames, depth + 1) for item in raw]


def _encode_nested(value: Any, aux: AuxFrames) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return TENSOR.encode(value, aux)  # type: ignore[arg-type]
    if isinstance(value, list | tuple):
        return [_encode_nested(item, aux) for item in value]
    if value is None or type(value) in (int, float):
        return value
    raise misfit("a tensor, a number or a list", value)


NESTED_TENSORS: Form[NestedTensors] = Form("nested tensors", _decode_nested, _encode_nested)


def _slice_from(raw: Any) -> Any:
    """``[start, stop, step]`` to a slice, and lists of such to lists of slices."""
    if type(raw) is not list:
        raise misfit("a slice or a list of slices", raw)
    if len(raw) == 3 and all(part is None or type(part) is int for part in raw):
        return slice(*raw)
    return [_slice_from(item) for item in raw]


def _slice_to(value: Any) -> Any:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [_slice_to(item) for item in value]


def _decode_field(raw: Any, _: Frames) -> MultiModalField:
    if type(raw) is not list or len(raw) != 2 or type(raw[1]) is not dict:
        raise misfit("an array [factory, arguments]", raw)
    factory, kwargs = raw
    if type(factory) is not str or factory not in _FACTORY_KWARGS:
        raise misfit(f"one of {', '.join(_FACTORY_KWARGS)}", factory)
    if "slices" in kwargs:
        kwargs = {**kwargs, "slices": _slice_from(kwargs["slices"])}
    return MultiModalField(factory, kwargs)


def _encode_field(value: MultiModalField, _: AuxFrames) -> Any:
    if value.factory not in _FACTORY_KWARGS:
        raise misfit(f"one of {', '.join(_FACTORY_KWARGS)}", value.factory)
    # The strictest reader wants every argument of the factory and no other.
    names = _FACTORY_KWARGS[value.factory]
    kwargs = {"keep_on_cpu": False, **value.kwargs}
    if set(kwargs) != set(names):
        raise FormError(
            f"field {value.factory!r} takes {', '.join(names)}, not {', '.join(kwargs)}"
        )
    if "slices" in kwargs:
        kwargs["slices"] = _slice_to(kwargs["slices"])
    return [value.factory, {name: kwargs[name] for name in names}]


FIELD: Form[MultiModalField] = Form("a multimodal field", _decode_field, _encode_field)

MULTIMODAL_FEATURE: Form[MultiModalFeatureSpec] = map_struct(
    MultiModalFeatureSpec,
    {
        "data": optional(
            map_of(
                STR,
                map_struct(
                    MultiModalFieldElem,
                    {"data": NESTED_TENSORS, "field": FIELD},
                    required=("data", "field"),
                ),
            )
        ),
        "modality": STR,
        "identifier": STR,
        "mm_position": map_struct(
            PlaceholderRange,
            {"offset": U32, "length": U32, "is_embed": optional(TENSOR)},
            required=("offset", "length"),
        ),
        "mm_hash": optional(STR),
    },
    required=("data", "modality", "identifier", "mm_position"),
)
