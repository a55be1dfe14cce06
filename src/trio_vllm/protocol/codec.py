"""`Codec`: converts a value to its MessagePack object and back, and checks it on the way.

``decode(raw, frames)`` checks an unpacked MessagePack object and gives the value; ``frames`` are all
frames of the message, so that arrays can find their auxiliary frames. ``encode(value, aux)`` checks a
value and gives the object to pack; arrays too large to stay inline are appended to ``aux``. Decoding
accepts what upstream's readers accept. Encoding is stricter (`strict_on_encode`), since an engine
does not survive a message that it cannot read.

Codecs of scalars and containers are defined here. Those of the message classes are derived from the
classes' annotations (``structs.py``); an integer's annotation says its width (`UInt32`).

A value that does not fit raises `CodecError` with the path to the fault. The public functions of the
message modules turn it into a `DecodeError` when they read.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import numpy as np

from trio_vllm.values import frozen

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)

Buffer = bytes | memoryview
Frames = Sequence[Buffer]
"""The frames of one message, or of its part that a function reads: the payload and arrays."""
AuxFrames = list[Buffer]
"""Where encoders put the arrays that travel in frames of their own."""


class CodecError(ValueError):
    """A value or an unpacked object is not what its codec expects."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def add_path(self, step: str) -> CodecError:
        """Prepend ``step`` to the path; containers call this while the error passes them."""
        self._steps.append(step)
        return self

    @property
    def where(self) -> str:
        """The path to the fault, outermost step first, such as ``outputs[3].events``."""
        return "".join(reversed(self._steps)).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.where or 'the value'} {self.reason}"


@frozen
class Codec(Generic[T]):
    """Converts values of type ``T`` to MessagePack objects and back."""

    expected: str
    """Names what the object must be, for error messages."""
    decode: Callable[[Any, Frames], T]
    encode: Callable[[T, AuxFrames], Any]
    encode_other: Callable[[Any, AuxFrames], Any] | None = None
    """Encodes values other than None, if None is a value of its own."""

    def encoder_besides(self, value: object) -> Callable[[T, AuxFrames], Any]:
        """What encodes all values but this one."""
        return self.encode_other if value is None and self.encode_other else self.encode


def wrong_type(expected: str, value: object) -> CodecError:
    """Make the error for a value of a wrong type or range."""
    return CodecError(f"must be {expected}, not {summarize(value)}")


def summarize(value: object) -> str:
    """Describe a value in a few words, however large or deep it is."""
    match value:
        case ForeignExtension():
            return str(value)
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


@frozen
class ForeignExtension:
    """Stands for a MessagePack extension of a type that is never loaded.

    Such may hold a pickle, and with it code of the sender's choice. Every codec refuses this mark, so
    that only what needs the value fails, not the whole message.
    """

    code: int

    def __str__(self) -> str:
        return f"an extension of type {self.code}, which is never loaded"


_LEAVES = {type(None), bool, int, float, str, bytes, memoryview}


def refuse_extensions(raw: Any) -> None:
    """Raise `CodecError` if a free value holds a `ForeignExtension`, at whatever depth."""
    pending = [raw]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is ForeignExtension:
            raise CodecError(f"must not hold {value}")
        if kind is dict:
            value = [*value, *value.values()]
        elif kind is not list and kind is not tuple:
            continue
        if not _LEAVES.issuperset(map(type, value)):
            pending += [item for item in value if type(item) not in _LEAVES]


def check_both_ways(expected: str, check: Callable[[Any, object], T]) -> Codec[T]:
    """Make a codec that converts nothing and checks the same in both directions."""
    return Codec(expected, check, check)


def strict_on_encode(codec: Codec[T], check: Callable[[T], None]) -> Codec[T]:
    """Make a codec that also calls ``check``, which may raise, before it encodes a value."""
    inner_encode = codec.encode

    def encode(value: T, aux: AuxFrames) -> Any:
        raw = inner_encode(value, aux)
        check(value)
        return raw

    return Codec(codec.expected, codec.decode, encode)


def satisfying(expected: str, fits: Callable[[T], bool]) -> Callable[[T], None]:
    """A check for `writing`."""

    def check(value: T) -> None:
        if not fits(value):
            raise wrong_type(expected, value)

    return check


# Scalars ----------------------------------------------------------------------------------------


def integer(low: int, high: int, expected: str = "") -> Codec[int]:
    """Make the codec of integers in ``low..high``, both included; refuses booleans and floats."""
    expected = expected or f"an integer from {low} to {high}"

    def check(value: Any, _: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong_type(expected, value)
        return value

    return check_both_ways(expected, check)


def number(low: float, high: float, expected: str = "") -> Codec[float]:
    """Make a codec that decodes any number and encodes only ``low..high``, both included."""
    expected = expected or f"a number from {low:g} to {high:g}"

    def encode(value: Any, context: object) -> float:
        checked = _check_float(value, context)
        if not low <= checked <= high:
            raise wrong_type(expected, value)
        return checked

    return Codec(FLOAT.expected, _check_float, encode)


def _check_float(value: Any, _: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int and value.bit_length() <= 64:
        return float(value)
    raise wrong_type("a number", value)


def _check_bool(value: Any, _: object) -> bool:
    if value is True or value is False:
        return value
    raise wrong_type("a boolean", value)


def _check_str(value: Any, _: object) -> str:
    if type(value) is not str:
        raise wrong_type("a string", value)
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
NON_EMPTY_STR = strict_on_encode(STR, satisfying("a string that is not empty", bool))


def known_string(*texts: str) -> Codec[str]:
    """Make a codec that decodes any string and encodes only these."""
    return strict_on_encode(STR, satisfying(f"one of {', '.join(texts)}", texts.__contains__))


def codec_from(*, decode: Codec[T], encode: Codec[T]) -> Codec[T]:
    """Combine the decoder of one codec with the encoder of another."""
    return Codec(decode.expected, decode.decode, encode.encode)


def enumeration(members: type[E]) -> Codec[E]:
    """Make the codec of an enumeration: members travel as their values."""
    by_value: dict[object, E] = {member.value: member for member in members}
    expected = f"one of {', '.join(map(repr, by_value))}"

    def decode(raw: Any, _: Frames) -> E:
        if type(raw) in (int, str) and raw in by_value:
            return by_value[raw]
        raise wrong_type(expected, raw)

    def encode(value: E, _: AuxFrames) -> Any:
        if not isinstance(value, members):
            raise wrong_type(f"a {members.__name__}", value)
        return value.value

    return Codec(expected, decode, encode)


def unchecked(raw: Any, _: object) -> Any:
    """Give the object as it is."""
    return raw


# Containers -------------------------------------------------------------------------------------

K = TypeVar("K")

MAX_NESTING = 128
"""How many levels of lists and maps a free value may have to be encoded."""


def item_step(key: object) -> str:
    """Write the step of a path to an item of a list or a map."""
    return f"[{summarize(key)}]"


def optional(codec: Codec[T]) -> Codec[T | None]:
    """Make a codec that also takes nil, for None."""
    inner_decode, inner_encode = codec.decode, codec.encode

    def decode(raw: Any, frames: Frames) -> T | None:
        return None if raw is None else inner_decode(raw, frames)

    def encode(value: T | None, aux: AuxFrames) -> Any:
        return None if value is None else inner_encode(value, aux)

    return Codec(f"{codec.expected} or nil", decode, encode, inner_encode)


def list_of(codec: Codec[T]) -> Codec[list[T]]:
    """Make the codec of an array whose items share one codec."""

    def decode(raw: Any, frames: Frames) -> list[T]:
        if type(raw) is not list:
            raise wrong_type("an array", raw)
        return map_with_path(codec.decode, raw, frames)

    def encode(value: list[T], aux: AuxFrames) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise wrong_type("a list", value)
        return map_with_path(codec.encode, value, aux)

    return Codec("an array", decode, encode)


def _list_of_strings() -> Codec[list[str]]:
    """Make the codec of an array of strings, checked at C speed: there may be a million of them."""
    one_by_one = list_of(STR)

    def are_plain(values: Any) -> bool:
        return set(map(type, values)) == {str} and "".join(values).isascii()

    def decode(raw: Any, frames: Frames) -> list[str]:
        return raw if type(raw) is list and are_plain(raw) else one_by_one.decode(raw, frames)

    def encode(value: Any, aux: AuxFrames) -> Any:
        return value if type(value) is list and are_plain(value) else one_by_one.encode(value, aux)

    return Codec(one_by_one.expected, decode, encode)


def map_with_path(
    convert: Callable[[Any, Any], Any],
    items: Iterable[Any],
    context: Any,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Convert all items; add the name or index of the one that fails to its error."""
    done: list[Any] = []
    try:
        for item in items:
            done.append(convert(item, context))  # noqa: PERF401 (its length is the error's place)
    except CodecError as error:
        at = len(done)
        raise error.add_path(f".{names[at]}" if names else f"[{at}]") from None
    return done


def _list_of_integers(typecode: str, low: int, high: int) -> Codec[list[int]]:
    """Make the codec of an array of integers, checked at C speed by an `array.array`.

    It also encodes tuples, ranges, sets and one-dimensional numpy arrays.
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
        return map_with_path(item.decode, values, ())

    def decode(raw: Any, _: Frames) -> list[int]:
        if type(raw) is not list:
            raise wrong_type("an array", raw)
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
        raise wrong_type("a list of integers", value)

    return Codec("an array of integers", decode, encode)


TOKEN_IDS = _list_of_integers("I", 0, 2**32 - 1)
"""Token ids: unsigned 32-bit, as upstream's Rust reader has them."""
U64S = _list_of_integers("Q", 0, 2**64 - 1)
I64S = _list_of_integers("q", -(2**63), 2**63 - 1)
STRS = _list_of_strings()
FAST_LISTS: dict[Codec[Any], Codec[Any]] = {U32: TOKEN_IDS, U64: U64S, I64: I64S, STR: STRS}
"""The fast codec of a list of integers or strings, by the codec of one."""


def map_of(key: Codec[K], item: Codec[T]) -> Codec[dict[K, T]]:
    """Make the codec of a map of a codec for keys and one for values."""

    def convert(pairs: Any, context: Any, of_key: Any, of_item: Any) -> Any:
        if type(pairs) is not dict and not isinstance(pairs, Mapping):
            raise wrong_type("a map", pairs)
        done: Any = {}
        for name, value in pairs.items():
            try:
                done[of_key(name, context)] = of_item(value, context)
            except CodecError as error:
                raise error.add_path(item_step(name)) from None
        return done

    return Codec(
        "a map",
        lambda raw, frames: convert(raw, frames, key.decode, item.decode),
        lambda value, aux: convert(value, aux, key.encode, item.encode),
    )


# Free values ------------------------------------------------------------------------------------


_MANY_ITEMS = 64
"""Items of a list from which on it pays to look at all of them together first."""


def _are_plain(items: Sequence[Any]) -> bool:
    """Whether all items of a list are good, as far as that can be told at C speed; they may be a million."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return bool(min(items) >= -(2**63) and max(items) < 2**64)
    return "".join(items).isascii() if kinds == {str} else kinds <= {float, bool, type(None), bytes}


def _check_free(value: Any, keys: Codec[Any], depth: int = 0) -> None:
    """Raise `CodecError` for what MessagePack, or a peer in another language, cannot express."""
    kind = type(value)
    if kind is str:
        STR.encode(value, [])
    elif kind is int:
        INT64_OR_UINT64.encode(value, [])
    elif kind is dict or kind is list or kind is tuple:
        if depth == MAX_NESTING:
            raise CodecError(f"nests deeper than {MAX_NESTING} levels")
        if kind is not dict and len(value) > _MANY_ITEMS and _are_plain(value):
            return
        for key, item in value.items() if kind is dict else enumerate(value):
            try:
                if kind is dict:
                    keys.encode(key, [])
                _check_free(item, keys, depth + 1)
            except CodecError as error:
                if depth < 8:  # of a deep nest the outer steps are enough
                    error.add_path(item_step(key))
                raise
    elif value is not None and kind not in (bool, float, bytes):
        raise wrong_type("nil, a boolean, a number, a string, bytes, a list or a map", value)


def _check_key(key: Any, _: object) -> Any:
    return STR.encode(key, []) if type(key) is not int else INT64_OR_UINT64.encode(key, [])


def _free(keys: Codec[Any]) -> Codec[Any]:
    def encode(value: Any, _: AuxFrames) -> Any:
        _check_free(value, keys)
        return value

    def decode(raw: Any, _: Frames) -> Any:
        if type(raw) not in _LEAVES:
            refuse_extensions(raw)
        return raw

    return Codec("anything", decode, encode)


ANY = _free(check_both_ways("a string or an integer", _check_key))
"""A free value whose maps may have integers as keys."""
JSON_LIKE = _free(STR)
"""A free value whose maps have strings as keys; decoding takes other keys too."""
ANY_MAP = map_of(STR, JSON_LIKE)
"""A map from strings to free values."""


# Types ------------------------------------------------------------------------------------------

# For annotations of fields: Python has one type of integers, the wire has several widths.
Int32 = Annotated[int, I32]
Int64 = Annotated[int, I64]
UInt32 = Annotated[int, U32]
UInt64 = Annotated[int, U64]
Count = Annotated[
    int, codec_from(decode=U32, encode=integer(1, 2**32 - 1, "an integer of at least 1"))
]
"""At least 1 when it is encoded; decoding takes 0 too."""
