"""Values as plain JSON objects, to compare ours with vLLM's.

Runs in both virtual environments, so it imports neither side and goes by what values can do. Field
names lose a leading underscore; arrays and tensors become ``{"dtype", "shape", "values"}``.
"""

import enum
import math
from typing import Any

FACTORIES = {
    "MultiModalBatchedField": "batched",
    "MultiModalFlatField": "flat",
    "MultiModalSharedField": "shared",
}
"""vLLM's classes of multimodal fields, and what they are called on the wire."""


def view(value: Any) -> Any:
    """A value as JSON can hold it."""
    match value:
        case enum.Enum():
            return value.value
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return value.hex()
        case slice():
            return [value.start, value.stop, value.step]
        case set() | frozenset():
            return sorted(map(view, value))
        case list() | tuple():
            return [view(item) for item in value]
        case _ if hasattr(value, "items"):
            return {str(view(key)): view(item) for key, item in value.items()}
    return view_object(value)


def view_object(value: Any) -> Any:
    """A value of a class of its own."""
    name = type(value).__name__
    if hasattr(value, "tolist") or name == "Tensor":
        return view_array(value)
    if name == "Logprobs":  # ours; theirs is a tuple
        return [view(part) for part in (value.token_ids, value.logprobs, value.ranks)]
    if name == "SamplingMask":
        return [view(value.token_ids), view(value.offsets)]
    if name == "UtilityResult":
        return view(value.result)
    fields = {field.lstrip("_"): view(getattr(value, field)) for field in field_names(value)}
    if name in FACTORIES:
        return {"factory": FACTORIES[name], "kwargs": fields}
    return fields


def field_names(value: Any) -> list[str]:
    """The fields of an attrs, dataclass or msgspec value."""
    if hasattr(value, "__attrs_attrs__"):
        return [attribute.name for attribute in value.__attrs_attrs__]
    names = getattr(value, "__struct_fields__", None) or getattr(
        value, "__dataclass_fields__", None
    )
    if names is None:
        raise TypeError(f"no fields are known of {value!r}")
    return list(names)


def view_array(value: Any) -> Any:
    """An array of numpy, a tensor of torch, or one of ours."""
    dtype = getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")
    numbers = value.float() if dtype == "bfloat16" and hasattr(value, "float") else value
    numbers = numbers.numpy() if hasattr(numbers, "numpy") else numbers
    return {
        "dtype": dtype,
        "shape": list(value.shape),
        "values": view(numbers.reshape(-1).tolist()),
    }
