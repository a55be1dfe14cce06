"""Wire forms: how a value and its MessagePack object turn into each other.

A `Form` is a pair of functions. ``decode(raw, frames)`` checks an unpacked MessagePack object and
gives the value; ``frames`` are all frames of the message, so that arrays can find their auxiliary
frames. ``encode(value, aux)`` checks a value and gives the object to pack; arrays too large to stay
inline are appended to ``aux``. Readers take what upstream's readers take; writers, since an engine
does not survive what it cannot read, are stricter (`writing`).

The value classes know nothing of this. Each message module declares its classes first and their
forms below, one line per field, in wire order (``_structs.py``); forms nest.

A misfit raises `FormError` with the path to the fault; the public functions of the message modules
turn it into a `DecodeError` (the peer's fault) or an `InvalidFieldError` (the caller's).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)

Buffer = bytes | memoryview
Frames = Sequence[Buffer]
AuxFrames = list[Buffer]


class FormError(ValueError):
    """A value or an unpacked object does not fit its form."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def within(self, step: str) -> FormError:
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
class Form(Generic[T]):
    """A two-way rule between values of type ``T`` and MessagePack objects."""

    expected: str
    """What the object must be, for error messages."""
    decode: Callable[[Any, Frames], T]
    encode: Callable[[T, AuxFrames], Any]


def misfit(expected: str, value: object) -> FormError:
    """The error for a value that is not what it must be."""
    return FormError(f"must be {expected}, not {brief(value)}")


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


def check_both_ways(expected: str, check: Callable[[Any, object], T]) -> Form[T]:
    return Form(expected, check, check)


def writing(form: Form[T], check: Callable[[T], None]) -> Form[T]:
    """A form that reads like ``form``, but writes only values for which ``check`` does not raise."""
    inner_encode = form.encode

    def encode(value: T, aux: AuxFrames) -> Any:
        raw = inner_encode(value, aux)
        check(value)
        return raw

    return Form(form.expected, form.decode, encode)


def only(expected: str, fits: Callable[[T], bool]) -> Callable[[T], None]:
    """A check for `writing`."""

    def check(value: T) -> None:
        if not fits(value):
            raise misfit(expected, value)

    return check


# Scalars ----------------------------------------------------------------------------------------


def integer(low: int, high: int, expected: str = "") -> Form[int]:
    """An integer from ``low`` to ``high``, both included; booleans and floats are refused."""
    expected = expected or f"an integer from {low} to {high}"

    def check(value: Any, _: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise misfit(expected, value)
        return value

    return check_both_ways(expected, check)


def number(low: float, high: float, expected: str = "") -> Form[float]:
    """Any number is read; only those from ``low`` to ``high``, both included, are written."""
    expected = expected or f"a number from {low:g} to {high:g}"

    def encode(value: Any, context: object) -> float:
        checked = _check_float(value, context)
        if not low <= checked <= high:
            raise misfit(expected, value)
        return checked

    return Form(FLOAT.expected, _check_float, encode)


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
            raise FormError("must not contain lone surrogates") from None
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


def one_of(*texts: str) -> Form[str]:
    """Any string is read; only these are written."""
    return writing(STR, only(f"one of {', '.join(texts)}", texts.__contains__))


def read_write(read: Form[T], write: Form[T]) -> Form[T]:
    """A form that reads like one and writes like another."""
    return Form(read.expected, read.decode, write.encode)


def enumeration(members: type[E]) -> Form[E]:
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

    return Form(expected, decode, encode)


def pass_on(raw: Any, _: object) -> Any:
    """Convert nothing, check nothing."""
    return raw
