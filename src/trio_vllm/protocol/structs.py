"""`codec_of`: derives the codec of an attrs class from the annotations of its fields.

A class travels as a map from names to values, or as an array in the order of its fields (`as_array`).
Each field is declared once, in the class::

    @as_array()
    @define
    class EngineLoad:
        num_waiting_reqs: UInt32
        num_running_reqs: UInt32
        kv_cache_usage: float = 0.0

Strings, booleans, floats, enumerations, other attrs classes and ``None``, lists and maps of these
follow from the annotation alone. ``Annotated[X, codec]`` names another codec, `Key` another key of a
map. A field without a default is required, and so is one that is annotated with `REQUIRED`.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from trio_vllm.protocol.codec import (
    BOOL,
    FAST_LISTS,
    FLOAT,
    JSON_LIKE,
    STR,
    AuxFrames,
    Codec,
    CodecError,
    Frames,
    T,
    enumeration,
    list_of,
    map_of,
    optional,
    strict_on_encode,
    wrong_type,
)
from trio_vllm.values import frozen


@frozen
class Key:
    """Annotates a field whose key in a map is not its name."""

    name: str


REQUIRED = "required"
"""Annotates a field that must be on the wire although its attribute has a default."""


C = TypeVar("C", bound=type[Any])

_CODECS: dict[Any, Codec[Any]] = {str: STR, bool: BOOL, float: FLOAT, Any: JSON_LIKE}
_LAYOUTS: dict[type[Any], Callable[[type[Any]], Codec[Any]]] = {}


def as_array(*, minimum: int | None = None) -> Callable[[C], C]:
    """Decorate an attrs class that travels as an array of its fields.

    ``minimum`` is the least length that is decoded; by default all required fields must be there.
    """

    def decorate(cls: C) -> C:
        _LAYOUTS[cls] = functools.partial(_array_codec, minimum=minimum)
        return cls

    return decorate


def as_map(
    *, omit_defaults: bool = False, check: Callable[[Any], None] | None = None
) -> Callable[[C], C]:
    """Decorate an attrs class that travels as a map other than a plain one.

    Args:
      omit_defaults: Encode only fields that differ from their default.
      check: Raises `CodecError` for a value that is not to be encoded.
    """

    def decorate(cls: C) -> C:
        def derive(cls: type[Any]) -> Codec[Any]:
            codec = _map_codec(cls, omit_defaults=omit_defaults)
            return codec if check is None else strict_on_encode(codec, check)

        _LAYOUTS[cls] = derive
        return cls

    return decorate


def set_codec(cls: type[T], codec: Codec[T]) -> Codec[T]:
    """Let fields of a class that is no plain array or map have this codec."""
    _CODECS[cls] = codec
    return codec


def codec_of(cls: type[T]) -> Codec[T]:
    """Derive the codec of a class, once."""
    if cls not in _CODECS:
        if issubclass(cls, enum.Enum):
            _CODECS[cls] = enumeration(cls)
        elif attrs.has(cls):
            _CODECS[cls] = _on_first_use(cls, _LAYOUTS.get(cls, _map_codec))
        else:
            raise TypeError(f"no codec follows from {cls}: name one with Annotated")
    return _CODECS[cls]


def _on_first_use(cls: type[T], derive: Callable[[type[T]], Codec[T]]) -> Codec[T]:
    """A codec that is derived when it is used: at the start of a program few are."""
    derived: Codec[T] | None = None

    def get() -> Codec[T]:
        nonlocal derived
        derived = derive(cls)
        return derived

    return Codec(
        cls.__name__,
        lambda raw, frames: (derived or get()).decode(raw, frames),
        lambda value, aux: (derived or get()).encode(value, aux),
    )


def index_of(cls: type[Any], name: str) -> int:
    """Find the position of a field in the array that its class travels as."""
    return [attribute.name for attribute in attrs.fields(cls)].index(name)


def defaults_of(cls: type[Any]) -> list[Any]:
    """List the default of each field, `attrs.NOTHING` for a required one."""
    return [
        field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
        for field in attrs.fields(cls)
    ]


# Fields -----------------------------------------------------------------------------------------


@frozen
class Field:
    """A field of a class: its place in a map, its codec and its default."""

    name: str
    key: str
    codec: Codec[Any]
    required: bool
    default: Any
    """`attrs.NOTHING` if there is none, or if each value has its own."""

    @property
    def skippable(self) -> Any:
        """The default if it is decoded and encoded as it is, else `attrs.NOTHING`."""
        default, codec = self.default, self.codec
        if default is attrs.NOTHING:
            return default
        try:
            same = codec.decode(default, ()) is default and codec.encode(default, []) is default
        except CodecError:  # such as a tuple, which is never decoded
            same = False
        return default if same else attrs.NOTHING


def fields_of(cls: type[Any]) -> list[Field]:
    """Derive the fields of a class from its annotations, in order."""
    annotations = get_type_hints(cls, include_extras=True)
    return [_field_of(attribute, annotations[attribute.name]) for attribute in attrs.fields(cls)]


def _field_of(attribute: attrs.Attribute[Any], annotation: Any) -> Field:
    default: Any = attribute.default
    notes = getattr(annotation, "__metadata__", ())
    return Field(
        name=attribute.name,
        key=next((note.name for note in notes if isinstance(note, Key)), attribute.name),
        codec=_derive(annotation),
        required=default is attrs.NOTHING or REQUIRED in notes,
        default=attrs.NOTHING if isinstance(default, attrs.Factory) else default,  # type: ignore[arg-type]
    )


def _derive(annotation: Any) -> Codec[Any]:
    """The codec of a type expression."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        named = [note for note in annotation.__metadata__ if isinstance(note, Codec)]
        return named[-1] if named else _derive(arguments[0])
    if origin in (Union, types.UnionType):
        others = [argument for argument in arguments if argument is not type(None)]
        if len(others) == 1:
            return optional(_derive(others[0]))
    elif origin in (list, Sequence):
        item = _derive(arguments[0])
        return FAST_LISTS.get(item) or list_of(item)
    elif origin in (dict, Mapping):
        return map_of(*map(_derive, arguments))
    elif annotation is Any or isinstance(annotation, type):
        return codec_of(annotation)
    raise TypeError(f"no codec follows from {annotation}: name one with Annotated")


# Coding -----------------------------------------------------------------------------------------

# These are the hottest functions of the codecs: a request has 22 fields, its sampling parameters 31,
# and most have their default. To decode, `compress` and `map` pick, at C speed, the few that *are* not
# the default; None, True, False and small integers are singletons, whoever made them. To encode, a
# function with a line for each field is compiled, as attrs compiles constructors: it reads an attribute
# faster than anything that is handed the names.


def _array_codec(cls: type[T], minimum: int | None) -> Codec[T]:
    """Make the codec of a class that travels as an array.

    Decoding takes arrays from ``minimum`` elements up: what is missing has the class's default,
    what lies beyond the last known field is ignored. Encoding writes every field.
    """
    fields = fields_of(cls)
    least = sum(field.required for field in fields) if minimum is None else minimum
    names = tuple(field.name for field in fields)
    indices = range(len(names))
    defaults = tuple(field.skippable for field in fields)
    decoders = tuple(field.codec.decode for field in fields)

    def decode(raw: Any, frames: Frames) -> T:
        if type(raw) is not list:
            raise wrong_type(f"an array ({cls.__name__})", raw)
        if len(raw) < least:
            raise CodecError(f"must have at least {least} elements, not {len(raw)}")
        values = {}
        name = ""
        try:
            for index in compress(indices, map(operator.is_not, raw, defaults)):
                name = names[index]
                values[name] = decoders[index](raw[index], frames)
        except CodecError as error:
            raise error.add_path(f".{name}") from None
        return cls(**values)

    start = f"[{', '.join(f'value.{name}' for name in names)}]"
    encode = _encoder(cls, fields, start, _ARRAY_STEP, defaults)
    return Codec(cls.__name__, decode, encode)


def _map_codec(cls: type[T], *, omit_defaults: bool = False) -> Codec[T]:
    """Make the codec of a class that travels as a map.

    Decoding ignores unknown keys; fields whose key is absent have the class's default, if they are
    not required. Encoding writes every key, or with ``omit_defaults`` those of other values.
    """
    fields = fields_of(cls)
    # Of a required field the default must be seen too, to know that it was there.
    decoders = {
        field.key: (
            field.name,
            field.codec.decode,
            attrs.NOTHING if field.required else field.skippable,
        )
        for field in fields
    }
    required = tuple((field.name, field.key) for field in fields if field.required)
    omitted = tuple(field.default if omit_defaults else attrs.NOTHING for field in fields)

    def decode(raw: Any, frames: Frames) -> T:
        if type(raw) is not dict:
            raise wrong_type(f"a map ({cls.__name__})", raw)
        values = {}
        for key, item in raw.items():
            known = decoders.get(key)
            if known is None:
                continue
            name, convert, default = known
            if item is default:
                continue
            try:
                values[name] = convert(item, frames)
            except CodecError as error:
                raise error.add_path(f".{name}") from None
        for name, key in required:
            if name not in values:
                raise CodecError(f"must have the key {key!r}")
        return cls(**values)

    encode = _encoder(cls, fields, "{}", _MAP_STEP, omitted)
    return Codec(cls.__name__, decode, encode)


_ENCODER = """
def encode(value, aux):
    if not isinstance(value, cls):
        raise wrong_type(f"a {{cls.__name__}}", value)
    index = 0
    raw = {start}
    try:
{steps}
    except CodecError as error:
        raise error.add_path(f".{{names[index]}}") from None
    return raw
"""
_ARRAY_STEP = """
        if raw[{0}] is not default_{0}:
            index = {0}
            raw[{0}] = encode_{0}(raw[{0}], aux)
"""
_MAP_STEP = """
        item = value.{name}
        if item is not default_{0} and (type(item) is not type(default_{0}) or item != default_{0}):
            index = {0}
            raw[keys[{0}]] = encode_{0}(item, aux)
"""


def _encoder(
    cls: type[T], fields: Sequence[Field], start: str, step: str, defaults: Sequence[Any]
) -> Callable[[T, AuxFrames], Any]:
    """Make the function that encodes a value field by field, but for those that are the default."""
    steps = (step.format(index, name=field.name) for index, field in enumerate(fields))
    namespace: dict[str, Any] = {
        "cls": cls,
        "names": [field.name for field in fields],
        "keys": [field.key for field in fields],
        "wrong_type": wrong_type,
        "CodecError": CodecError,
    }
    for index, (field, default) in enumerate(zip(fields, defaults, strict=True)):
        namespace[f"default_{index}"] = default
        namespace[f"encode_{index}"] = field.codec.encoder_besides(default)
    exec(_ENCODER.format(start=start, steps="".join(steps)), namespace)
    encode: Callable[[T, AuxFrames], Any] = namespace["encode"]
    return encode
