"""Wire forms: how a value and its MessagePack object turn into each other.

A `Codec` is a pair of functions. ``decode(raw, frames)`` checks an unpacked MessagePack object and
gives the value; ``frames`` are all frames of the message, so that arrays can find their auxiliary
frames. ``encode(value, aux)`` checks a value and gives the object to pack; arrays too large to stay
inline are appended to ``aux``. Readers take what upstream's readers take; writers, since an engine
does not survive what it cannot read, are stricter (`writing`).

The value classes know nothing of this. Each message module declares its classes first and their
forms below, one line per field, in wire order (``_structs.py``); forms nest.

A misfit raises `CodecError` with the path to the fault; the public functions of the message modules
turn it into a `DecodeError` (the peer's fault) or an `InvalidFieldError` (the caller's).
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import numpy as np

# MERGED protocol/_containers: Forms of containers: nil or something, lists, maps, and free values.


T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)

Buffer = bytes | memoryview
Frames = Sequence[Buffer]
AuxFrames = list[Buffer]


class CodecError(ValueError):
    """A value or an unpacked object does not fit its form."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def within(self, step: str) -> CodecError:
        """Note that the fault lies inside ``step``; containers call this on the way out."""
        self._steps.append(step)
        return self

    @property
    def where(self) -> str:
        """The path to the fault, outermost step first, such as ``outputs[3].events``."""
        return "".join(reversed(self._steps)).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.where or 'the value'} {self.reason}"


@attrs.frozen
class Codec(Generic[T]):
    """A two-way rule between values of type ``T`` and MessagePack objects."""

    expected: str
    """What the object must be, for error messages."""
    decode: Callable[[Any, Frames], T]
    encode: Callable[[T, AuxFrames], Any]


def misfit(expected: str, value: object) -> CodecError:
    """The error for a value that is not what it must be."""
    return CodecError(f"must be {expected}, not {brief(value)}")


def brief(value: object) -> str:
    """A few words for a value, however large, deep or foreign it is."""
    match value:
        case str():
            return repr(value[:40]) + ("…" if len(value) > 40 else "")
        case None:
            return "nil"
        case bool() | float():
            return repr(value)
        case int():
            return repr(value) if value.bit_length() <= 80 else "a huge integer"
        case _:
            return type(value).__name__


def check_both_ways(expected: str, check: Callable[[Any, object], T]) -> Codec[T]:
    return Codec(expected, check, check)


def writing(form: Codec[T], check: Callable[[T], None]) -> Codec[T]:
    """A form that reads like ``form``, but writes only values for which ``check`` does not raise."""
    inner_encode = form.encode

    def encode(value: T, aux: AuxFrames) -> Any:
        raw = inner_encode(value, aux)
        check(value)
        return raw

    return Codec(form.expected, form.decode, encode)


def only(expected: str, fits: Callable[[T], bool]) -> Callable[[T], None]:
    """A check for `writing`."""

    def check(value: T) -> None:
        if not fits(value):
            raise misfit(expected, value)

    return check


# Scalars ----------------------------------------------------------------------------------------


def integer(low: int, high: int, expected: str = "") -> Codec[int]:
    """An integer from ``low`` to ``high``, both included; booleans and floats are refused."""
    expected = expected or f"an integer from {low} to {high}"

    def check(value: Any, _: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise misfit(expected, value)
        return value

    return check_both_ways(expected, check)


def number(low: float, high: float, expected: str = "") -> Codec[float]:
    """Any number is read; only those from ``low`` to ``high``, both included, are written."""
    expected = expected or f"a number from {low:g} to {high:g}"

    def encode(value: Any, context: object) -> float:
        checked = _check_float(value, context)
        if not low <= checked <= high:
            raise misfit(expected, value)
        return checked

    return Codec(FLOAT.expected, _check_float, encode)


def _check_float(value: Any, _: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int and value.bit_length() <= 64:
        return float(value)
    raise misfit("a number", value)


def _check_bool(value: Any, _: object) -> bool:
    if value is True or value is False:
        return value
    raise misfit("a boolean", value)


def _check_str(value: Any, _: object) -> str:
    if type(value) is not str:
        raise misfit("a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CodecError("must not contain lone surrogates") from None
    return value


I32 = integer(-(2**31), 2**31 - 1, "a 32-bit integer")
I64 = integer(-(2**63), 2**63 - 1, "a 64-bit integer")
U16 = integer(0, 2**16 - 1, "an unsigned 16-bit integer")
U32 = integer(0, 2**32 - 1, "an unsigned 32-bit integer")
U64 = integer(0, 2**64 - 1, "an unsigned 64-bit integer")
INT64_OR_UINT64 = integer(-(2**63), 2**64 - 1, "a 64-bit integer, signed or unsigned")
FLOAT = check_both_ways("a number", _check_float)
BOOL = check_both_ways("a boolean", _check_bool)
STR = check_both_ways("a string", _check_str)
FINITE = number(-sys.float_info.max, sys.float_info.max, "a finite number")
TEXT = writing(STR, only("a string that is not empty", bool))


def one_of(*texts: str) -> Codec[str]:
    """Any string is read; only these are written."""
    return writing(STR, only(f"one of {', '.join(texts)}", texts.__contains__))


def read_write(read: Codec[T], write: Codec[T]) -> Codec[T]:
    """A form that reads like one and writes like another."""
    return Codec(read.expected, read.decode, write.encode)


def enumeration(members: type[E]) -> Codec[E]:
    """A member of an enumeration, by its value; unknown values are refused."""
    by_value: dict[object, E] = {member.value: member for member in members}
    expected = f"one of {', '.join(map(repr, by_value))}"

    def decode(raw: Any, _: Frames) -> E:
        if type(raw) in (int, str) and raw in by_value:
            return by_value[raw]
        raise misfit(expected, raw)

    def encode(value: E, _: AuxFrames) -> Any:
        if not isinstance(value, members):
            raise misfit(f"a {members.__name__}", value)
        return value.value

    return Codec(expected, decode, encode)


def pass_on(raw: Any, _: object) -> Any:
    """Convert nothing, check nothing."""
    return raw


K = TypeVar("K")

MAX_NESTING = 128
"""Levels of lists and maps in a free value that we send; MessagePack libraries allow a few more."""


def item_step(key: object) -> str:
    """The step of a path that leads to an item of a list or a map."""
    return f"[{brief(key)}]"


def optional(form: Codec[T]) -> Codec[T | None]:
    """Either nil or what ``form`` says."""
    inner_decode, inner_encode = form.decode, form.encode

    def decode(raw: Any, frames: Frames) -> T | None:
        return None if raw is None else inner_decode(raw, frames)

    def encode(value: T | None, aux: AuxFrames) -> Any:
        return None if value is None else inner_encode(value, aux)

    return Codec(f"{form.expected} or nil", decode, encode)


def list_of(form: Codec[T]) -> Codec[list[T]]:
    """An array whose items all have one form."""

    def decode(raw: Any, frames: Frames) -> list[T]:
        if type(raw) is not list:
            raise misfit("an array", raw)
        return each(form.decode, raw, frames)

    def encode(value: list[T], aux: AuxFrames) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise misfit("a list", value)
        return each(form.encode, value, aux)

    return Codec("an array", decode, encode)


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
    except CodecError as error:
        at = len(done)
        raise error.within(f".{names[at]}" if names else f"[{at}]") from None
    return done


def _integers(typecode: str, low: int, high: int) -> Codec[list[int]]:
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

    return Codec("an array of integers", decode, encode)


TOKEN_IDS = _integers("I", 0, 2**32 - 1)
"""Token ids: unsigned 32-bit, as upstream's strictest reader has them."""
U64S = _integers("Q", 0, 2**64 - 1)
I64S = _integers("q", -(2**63), 2**63 - 1)


def map_of(key: Codec[K], item: Codec[T]) -> Codec[dict[K, T]]:
    """A map whose keys have one form and whose values have another."""

    def convert(pairs: Any, context: Any, of_key: Any, of_item: Any) -> Any:
        if type(pairs) is not dict and not isinstance(pairs, Mapping):
            raise misfit("a map", pairs)
        done: Any = {}
        for name, value in pairs.items():
            try:
                done[of_key(name, context)] = of_item(value, context)
            except CodecError as error:
                raise error.within(item_step(name)) from None
        return done

    return Codec(
        "a map",
        lambda raw, frames: convert(raw, frames, key.decode, item.decode),
        lambda value, aux: convert(value, aux, key.encode, item.encode),
    )


# Free values ------------------------------------------------------------------------------------


def _check_free(value: Any, keys: Codec[Any], depth: int = 0) -> None:
    """Refuse what MessagePack, or a peer in another language, cannot express."""
    kind = type(value)
    if kind is str:
        STR.encode(value, [])
    elif kind is int:
        INT64_OR_UINT64.encode(value, [])
    elif kind is dict or kind is list or kind is tuple:
        if depth == MAX_NESTING:
            raise CodecError(f"nests deeper than {MAX_NESTING} levels")
        for key, item in value.items() if kind is dict else enumerate(value):
            try:
                if kind is dict:
                    keys.encode(key, [])
                _check_free(item, keys, depth + 1)
            except CodecError as error:
                if depth < 8:  # of a deep nest the outer steps are enough
                    error.within(item_step(key))
                raise
    elif value is not None and kind not in (bool, float, bytes):
        raise misfit("nil, a boolean, a number, a string, bytes, a list or a map", value)


def _check_key(key: Any, _: object) -> Any:
    return STR.encode(key, []) if type(key) is not int else INT64_OR_UINT64.encode(key, [])


def _free(keys: Codec[Any]) -> Codec[Any]:
    def encode(value: Any, _: AuxFrames) -> Any:
        _check_free(value, keys)
        return value

    return Codec("anything", pass_on, encode)


ANY = _free(check_both_ways("a string or an integer", _check_key))
"""Read: whatever MessagePack holds. Written: plain values."""
JSON_LIKE = _free(STR)
"""Read: the same. Written: plain values, the keys of their maps strings."""
ANY_MAP = map_of(STR, JSON_LIKE)
"""A map with string keys and free values."""
