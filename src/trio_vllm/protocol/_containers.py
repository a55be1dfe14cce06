"""Forms of containers: nil or something, lists, maps, and free values."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from trio_vllm.protocol._forms import (
    INT64_OR_UINT64,
    STR,
    AuxFrames,
    Form,
    FormError,
    Frames,
    T,
    brief,
    check_both_ways,
    integer,
    misfit,
    pass_on,
)

K = TypeVar("K")

MAX_NESTING = 128
"""Levels of lists and maps in a free value that we send; MessagePack libraries allow a few more."""


def item_step(key: object) -> str:
    """The step of a path that leads to an item of a list or a map."""
    return f"[{brief(key)}]"


def optional(form: Form[T]) -> Form[T | None]:
    """Either nil or what ``form`` says."""
    inner_decode, inner_encode = form.decode, form.encode

    def decode(raw: Any, frames: Frames) -> T | None:
        return None if raw is None else inner_decode(raw, frames)

    def encode(value: T | None, aux: AuxFrames) -> Any:
        return None if value is None else inner_encode(value, aux)

    return Form(f"{form.expected} or nil", decode, encode)


def list_of(form: Form[T]) -> Form[list[T]]:
    """An array whose items all have one form."""

    def decode(raw: Any, frames: Frames) -> list[T]:
        if type(raw) is not list:
            raise misfit("an array", raw)
        return each(form.decode, raw, frames)

    def encode(value: list[T], aux: AuxFrames) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise misfit("a list", value)
        return each(form.encode, value, aux)

    return Form("an array", decode, encode)


def each(
    convert: Callable[[Any, Any], Any],
    items: Iterable[Any],
    context: Any,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Convert all items; of the one that does not fit, note its name or number."""
    done: list[Any] = []
    try:
        for item in items:
            done.append(convert(item, context))  # noqa: PERF401 (its length is the error's place)
    except FormError as error:
        at = len(done)
        raise error.within(f".{names[at]}" if names else f"[{at}]") from None
    return done


def _integers(typecode: str, low: int, high: int) -> Form[list[int]]:
    """An array of integers, checked at C speed: an `array.array` refuses what is out of range.

    Values may also be tuples, ranges, sets or one-dimensional numpy arrays.
    """

    item = integer(low, high)

    def check(values: list[int]) -> list[int]:
        if len(values) == 1 and type(values[0]) is int and low <= values[0] <= high:
            return values  # as in most outputs
        try:
            array(typecode, values)
            # It takes booleans, and foreign integers, for integers.
            if list(map(type, values)).count(int) == len(values):
                return values
        except (TypeError, ValueError, OverflowError):
            pass
        return each(item.decode, values, ())

    def decode(raw: Any, _: Frames) -> list[int]:
        if type(raw) is not list:
            raise misfit("an array", raw)
        return check(raw)

    def encode(value: Any, _: AuxFrames) -> list[int]:
        if type(value) is list:
            return check(value)
        if isinstance(value, np.ndarray) and value.ndim == 1:
            return check(value.tolist())
        if isinstance(value, set | frozenset):
            return sorted(check(list(value)))
        if isinstance(value, tuple | range | array):
            return check(list(value))
        raise misfit("a list of integers", value)

    return Form("an array of integers", decode, encode)


TOKEN_IDS = _integers("I", 0, 2**32 - 1)
"""Token ids: unsigned 32-bit, as upstream's strictest reader has them."""
U64S = _integers("Q", 0, 2**64 - 1)
I64S = _integers("q", -(2**63), 2**63 - 1)


def map_of(key: Form[K], item: Form[T]) -> Form[dict[K, T]]:
    """A map whose keys have one form and whose values have another."""

    def convert(pairs: Any, context: Any, of_key: Any, of_item: Any) -> Any:
        if type(pairs) is not dict and not isinstance(pairs, Mapping):
            raise misfit("a map", pairs)
        done: Any = {}
        for name, value in pairs.items():
            try:
                done[of_key(name, context)] = of_item(value, context)
            except FormError as error:
                raise error.within(item_step(name)) from None
        return done

    return Form(
        "a map",
        lambda raw, frames: convert(raw, frames, key.decode, item.decode),
        lambda value, aux: convert(value, aux, key.encode, item.encode),
    )


# Free values ------------------------------------------------------------------------------------


def _check_free(value: Any, keys: Form[Any], depth: int = 0) -> None:
    """Refuse what MessagePack, or a peer in another language, cannot express."""
    kind = type(value)
    if kind is str:
        STR.encode(value, [])
    elif kind is int:
        INT64_OR_UINT64.encode(value, [])
    elif kind is dict or kind is list or kind is tuple:
        if depth == MAX_NESTING:
            raise FormError(f"nests deeper than {MAX_NESTING} levels")
        for key, item in value.items() if kind is dict else enumerate(value):
            try:
                if kind is dict:
                    keys.encode(key, [])
                _check_free(item, keys, depth + 1)
            except FormError as error:
                if depth < 8:  # of a deep nest the outer steps are enough
                    error.within(item_step(key))
                raise
    elif value is not None and kind not in (bool, float, bytes):
        raise misfit("nil, a boolean, a number, a string, bytes, a list or a map", value)


def _check_key(key: Any, _: object) -> Any:
    return STR.encode(key, []) if type(key) is not int else INT64_OR_UINT64.encode(key, [])


def _free(keys: Form[Any]) -> Form[Any]:
    def encode(value: Any, _: AuxFrames) -> Any:
        _check_free(value, keys)
        return value

    return Form("anything", pass_on, encode)


ANY = _free(check_both_ways("a string or an integer", _check_key))
"""Read: whatever MessagePack holds. Written: plain values."""
JSON_LIKE = _free(STR)
"""Read: the same. Written: plain values, the keys of their maps strings."""
ANY_MAP = map_of(STR, JSON_LIKE)
"""A map with string keys and free values."""
