"""Equality of values that hold arrays, and of values with the MessagePack objects they came from."""

from __future__ import annotations

import enum
import math
from typing import Any

import attrs
import numpy as np
import ormsgpack

from trio_vllm.protocol import Logprobs, SamplingMask, Tensor


def same(a: Any, b: Any) -> bool:
    """Deep equality: of one class, NaN equals NaN, arrays by dtype, shape and values."""
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data))
    if attrs.has(type(a)):
        names = [attribute.name for attribute in attrs.fields(type(a))]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def unpacked(payload: bytes) -> Any:
    """What MessagePack says, by another way than ours; raw views become `ormsgpack.Ext`."""
    return ormsgpack.unpackb(payload, ext_hook=Ext, option=ormsgpack.OPT_NON_STR_KEYS)


@attrs.frozen
class Ext:
    code: int
    data: bytes


def json_view(raw: Any, frames: list[bytes]) -> Any:
    """An unpacked object as the vectors show it; ``frames`` begin with the payload."""
    if isinstance(raw, Ext):
        return {"ext": raw.code, "len": len(raw.data)}
    if isinstance(raw, bytes):
        return {"bin": raw.hex()}
    if isinstance(raw, float) and not math.isfinite(raw):
        return {"float": str(raw)}
    if isinstance(raw, dict):
        items = {key: json_view(item, frames) for key, item in raw.items()}
        if any(type(key) is not str for key in raw):
            return {"map": [list(item) for item in items.items()]}
        return items
    if isinstance(raw, list):
        if _is_array(raw) and type(raw[2]) is int:
            return [raw[0], raw[1], {"aux": raw[2], "len": len(frames[raw[2]])}]
        return [json_view(item, frames) for item in raw]
    return raw


def _is_array(raw: list[Any]) -> bool:
    return len(raw) == 3 and type(raw[0]) is str and type(raw[1]) is list


def reflects(
    value: Any, raw: Any, frames: list[bytes], keys: dict[str, str], ignored: frozenset[str]
) -> None:
    """Assert that ``value`` says what the unpacked object says, field by field, and no more.

    ``keys`` are the attribute names of wire keys that differ, ``ignored`` the keys that no
    attribute stands for.
    """

    def check(value: Any, raw: Any, path: str) -> None:
        match value:
            case np.ndarray() | Tensor():
                check_array(value, raw, path)
            case Logprobs():
                check_parts([value.token_ids, value.logprobs, value.ranks], raw, path)
            case SamplingMask():
                check_parts([value.token_ids, value.offsets], raw, path)
            case enum.Enum():
                assert raw == value.value, path
            case list():
                assert len(value) == len(raw), path
                for index, item in enumerate(value):
                    check(item, raw[index], f"{path}[{index}]")
            case dict():
                assert value.keys() == raw.keys(), path
                for key, item in value.items():
                    check(item, raw[key], f"{path}[{key}]")
            case _ if attrs.has(type(value)):
                check_struct(value, raw, path)
            case _:
                assert type(value) is type(raw), path
                assert value == raw, path

    def check_struct(value: Any, raw: Any, path: str) -> None:
        fields = attrs.fields(type(value))
        if isinstance(raw, list):  # by position
            given = dict(zip([field.name for field in fields], raw, strict=False))
            assert not any(item is not None for item in raw[len(fields) :]), path
        else:
            given = {keys.get(key, key): item for key, item in raw.items() if key not in ignored}
        assert given.keys() <= {field.name for field in fields}, path
        for field in fields:
            item = getattr(value, field.name)
            if field.name in given:
                check(item, given[field.name], f"{path}.{field.name}")
            elif isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
                assert item == field.default.factory(), path
            else:
                assert item == field.default, path

    def check_parts(parts: list[Any], raw: Any, path: str) -> None:
        for index, part in enumerate(parts):
            check(part, raw[index], f"{path}[{index}]")
        assert not any(item is not None for item in raw[len(parts) :]), path

    def check_array(value: Any, raw: Any, path: str) -> None:
        dtype, shape, data = raw
        data = frames[data] if type(data) is int else data.data
        assert list(value.shape) == shape, path
        if isinstance(value, Tensor):
            assert (value.dtype, bytes(value.data)) == (dtype, data), path
        else:
            assert np.dtype(dtype) == value.dtype, path
            assert value.tobytes() == data, path

    check(value, raw, type(value).__name__)
