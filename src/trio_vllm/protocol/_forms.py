"""Wire forms: how a value and its MessagePack object turn into each other.

A `Form` is a pair of functions. ``decode(raw, frames)`` checks an unpacked MessagePack object and
gives the value; ``frames`` are all frames of the message, so that arrays can find their auxiliary
frames. ``encode(value, aux)`` checks a value and gives the object to pack; arrays too large to stay
inline are appended to ``aux``. Both check, so what we send is what we would accept.

The value classes know nothing of this. Each message module declares its classes first and their
forms below, one line per field, in wire order; forms nest.

A misfit raises `FormError` with the path to the fault; the public functions of the message modules
turn it into a `DecodeError` (the peer's fault) or an `InvalidFieldError` (the caller's).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import numpy as np

T = TypeVar("T")
K = TypeVar("K")
E = TypeVar("E", bound=enum.Enum)

Buffer = bytes | memoryview
Frames = Sequence[Buffer]
AuxFrames = list[Buffer]


class FormError(Exception):
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


@attrs.frozen
class Form(Generic[T]):
    """A two-way rule between values of type ``T`` and MessagePack objects."""

    expected: str
    """What the object must be, for error messages."""
    decode: Callable[[Any, Frames], T]
    encode: Callable[[T, AuxFrames], Any]


def misfit(expected: str, value: object) -> FormError:
    """The error for a value that is not what it must be; long values are cut."""
    text = repr(value) if not isinstance(value, list | dict | bytes) else type(value).__name__
    return FormError(f"must be {expected}, not {text if len(text) <= 60 else text[:57] + '...'}")


def _same_both_ways(expected: str, check: Callable[[Any, object], T]) -> Form[T]:
    return Form(expected, check, check)


# Scalars ----------------------------------------------------------------------------------------


def integer(low: int, high: int, expected: str = "") -> Form[int]:
    """An integer from ``low`` to ``high``, both included; booleans and floats are refused."""
    expected = expected or f"an integer from {low} to {high}"

    def check(value: Any, _: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise misfit(expected, value)
        return value

    return _same_both_ways(expected, check)


def _check_float(value: Any, _: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise misfit("a number", value)


def _check_bool(value: Any, _: object) -> bool:
    if value is True or value is False:
        return bool(value)
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


def _check_any(value: Any, _: object) -> Any:
    return value


I32 = integer(-(2**31), 2**31 - 1, "a 32-bit integer")
I64 = integer(-(2**63), 2**63 - 1, "a 64-bit integer")
U16 = integer(0, 2**16 - 1, "an unsigned 16-bit integer")
U32 = integer(0, 2**32 - 1, "an unsigned 32-bit integer")
U64 = integer(0, 2**64 - 1, "an unsigned 64-bit integer")
INT64_OR_UINT64 = integer(-(2**63), 2**64 - 1, "a 64-bit integer, signed or unsigned")
FLOAT = _same_both_ways("a number", _check_float)
BOOL = _same_both_ways("a boolean", _check_bool)
STR = _same_both_ways("a string", _check_str)
ANY: Form[Any] = _same_both_ways("anything", _check_any)


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


# Containers -------------------------------------------------------------------------------------


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
        return _each(form.decode, raw, frames)

    def encode(value: list[T], aux: AuxFrames) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise misfit("a list", value)
        return _each(form.encode, value, aux)

    return Form("an array", decode, encode)


def _each(convert: Callable[[Any, Any], Any], items: Any, context: object) -> list[Any]:
    done: list[Any] = []
    try:
        for item in items:
            done.append(convert(item, context))
    except FormError as error:
        raise error.within(f"[{len(done)}]") from None
    return done


def integers(low: int, high: int) -> Form[list[int]]:
    """An array of integers, checked at C speed; values may also be tuples, sets or numpy arrays."""
    item = integer(low, high)

    def check(values: list[int]) -> list[int]:
        if values and not (
            set(map(type, values)) == {int} and low <= min(values) <= max(values) <= high
        ):
            return _each(item.decode, values, ())
        return values

    def decode(raw: Any, _: Frames) -> list[int]:
        if type(raw) is not list:
            raise misfit("an array", raw)
        return check(raw)

    def encode(value: Any, _: AuxFrames) -> list[int]:
        if isinstance(value, np.ndarray) and value.ndim == 1:
            return check(value.tolist())
        if not isinstance(value, Sequence | set | frozenset) or isinstance(value, str | bytes):
            raise misfit("a list of integers", value)
        return check(list(value))

    return Form("an array of integers", decode, encode)


TOKEN_IDS = integers(0, 2**32 - 1)
"""Token ids: unsigned 32-bit, as upstream's strictest reader has them."""


def map_of(key: Form[K], item: Form[T]) -> Form[dict[K, T]]:
    """A map whose keys have one form and whose values have another."""

    def convert(pairs: Any, context: Any, of_key: Any, of_item: Any) -> Any:
        if not isinstance(pairs, Mapping):
            raise misfit("a map", pairs)
        done: Any = {}
        for name, value in pairs.items():
            try:
                done[of_key(name, context)] = of_item(value, context)
            except FormError as error:
                raise error.within(f"[{name!r}]") from None
        return done

    return Form(
        "a map",
        lambda raw, frames: convert(raw, frames, key.decode, item.decode),
        lambda value, aux: convert(value, aux, key.encode, item.encode),
    )


ANY_MAP = map_of(STR, ANY)
"""A map with string keys and free values."""


# Structs ----------------------------------------------------------------------------------------


def array_struct(cls: type[T], minimum: int, fields: Mapping[str, Form[Any]]) -> Form[T]:
    """An attrs class written as an array, one position per attribute, in the order declared.

    Readers take arrays from ``minimum`` positions up: what is missing has the class's default,
    what lies beyond the last known position is ignored. Writers write every position.
    """
    names = tuple(fields)
    _require_same_fields(cls, names)
    converters = [(name, form.decode) for name, form in fields.items()]
    encoders = [(name, form.encode) for name, form in fields.items()]

    def decode(raw: Any, frames: Frames) -> T:
        if type(raw) is not list:
            raise misfit(f"an array ({cls.__name__})", raw)
        if len(raw) < minimum:
            raise FormError(f"must have at least {minimum} elements, not {len(raw)}")
        values = {}
        name = ""
        try:
            for (name, convert), item in zip(converters, raw, strict=False):
                values[name] = convert(item, frames)
        except FormError as error:
            raise error.within(f".{name}") from None
        return cls(**values)

    def encode(value: T, aux: AuxFrames) -> Any:
        _require_instance(value, cls)
        items = []
        name = ""
        try:
            for name, convert in encoders:
                items.append(convert(getattr(value, name), aux))
        except FormError as error:
            raise error.within(f".{name}") from None
        return items

    return Form(cls.__name__, decode, encode)


def map_struct(
    cls: type[T],
    fields: Mapping[str, Form[Any]],
    *,
    required: Sequence[str] = (),
    omit_defaults: bool = False,
    keys: Mapping[str, str] | None = None,
) -> Form[T]:
    """An attrs class written as a map from attribute names (or their ``keys``) to values.

    Readers ignore unknown keys and give absent ones the class's default, except ``required``
    ones. Writers write every key, or with ``omit_defaults`` those that differ from the default.
    """
    _require_same_fields(cls, tuple(fields))
    key_of = {name: (keys or {}).get(name, name) for name in fields}
    decoders = {key_of[name]: (name, form.decode) for name, form in fields.items()}
    defaults = {a.name: a.default for a in attrs.fields(cls)} if omit_defaults else {}  # type: ignore[arg-type]
    encoders = [
        (name, key_of[name], form.encode, defaults.get(name, attrs.NOTHING))
        for name, form in fields.items()
    ]

    def decode(raw: Any, frames: Frames) -> T:
        if type(raw) is not dict:
            raise misfit(f"a map ({cls.__name__})", raw)
        values = {}
        for key, item in raw.items():
            known = decoders.get(key)
            if known is None:
                continue
            name, convert = known
            try:
                values[name] = convert(item, frames)
            except FormError as error:
                raise error.within(f".{name}") from None
        for name in required:
            if name not in values:
                raise FormError(f"must have the key {key_of[name]!r}")
        return cls(**values)

    def encode(value: T, aux: AuxFrames) -> Any:
        _require_instance(value, cls)
        items = {}
        for name, key, convert, default in encoders:
            item = getattr(value, name)
            if item is default or (type(item) is type(default) and item == default):
                continue
            try:
                items[key] = convert(item, aux)
            except FormError as error:
                raise error.within(f".{name}") from None
        return items

    return Form(cls.__name__, decode, encode)


def _require_same_fields(cls: type[Any], names: tuple[str, ...]) -> None:
    declared = tuple(attribute.name for attribute in attrs.fields(cls))
    if declared != names:
        raise TypeError(f"{cls.__name__} declares {declared}, its form has {names}")


def _require_instance(value: object, cls: type[Any]) -> None:
    if not isinstance(value, cls):
        raise misfit(f"a {cls.__name__}", value)
