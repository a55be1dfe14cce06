"""Forms of attrs classes: written as arrays, one position per attribute, or as maps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import attrs

from trio_vllm.protocol.codec import AuxFrames, Codec, CodecError, Frames, T, misfit

# This is the hottest code of the package: a request has 22 fields, its sampling parameters 31, and
# most have their default. So `compress` and `map` pick, at C speed, the few that *are* not the
# default; None, True, False and small integers are singletons, whoever made them.


def array_struct(cls: type[T], minimum: int, fields: Mapping[str, Codec[Any]]) -> Codec[T]:
    """An attrs class written as an array, one position per attribute, in the order declared.

    Readers take arrays from ``minimum`` positions up: what is missing has the class's default,
    what lies beyond the last known position is ignored. Writers write every position.
    """
    names = _names(cls, fields)
    indices = range(len(names))
    defaults = tuple(map(_its_own_form, _defaults(cls), fields.values()))
    decoders = tuple(form.decode for form in fields.values())
    encoders = tuple(form.encode for form in fields.values())
    values_of = _getter(names)

    def decode(raw: Any, frames: Frames) -> T:
        if type(raw) is not list:
            raise misfit(f"an array ({cls.__name__})", raw)
        if len(raw) < minimum:
            raise CodecError(f"must have at least {minimum} elements, not {len(raw)}")
        values = {}
        name = ""
        try:
            for index in compress(indices, map(operator.is_not, raw, defaults)):
                name = names[index]
                values[name] = decoders[index](raw[index], frames)
        except CodecError as error:
            raise error.within(f".{name}") from None
        return cls(**values)

    def encode(value: T, aux: AuxFrames) -> Any:
        if not isinstance(value, cls):
            raise misfit(f"a {cls.__name__}", value)
        raw = list(values_of(value))
        index = 0
        try:
            for index in compress(indices, map(operator.is_not, raw, defaults)):
                raw[index] = encoders[index](raw[index], aux)
        except CodecError as error:
            raise error.within(f".{names[index]}") from None
        return raw

    return Codec(cls.__name__, decode, encode)


def map_struct(
    cls: type[T],
    fields: Mapping[str, Codec[Any]],
    *,
    required: Sequence[str] = (),
    omit_defaults: bool = False,
    keys: Mapping[str, str] | None = None,
) -> Codec[T]:
    """An attrs class written as a map from attribute names (or their ``keys``) to values.

    Readers ignore unknown keys and give absent ones the class's default, except ``required``
    ones. Writers write every key, or with ``omit_defaults`` those that differ from the default.
    """
    names = _names(cls, fields)
    key_of = {name: (keys or {}).get(name, name) for name in names}
    defaults = map(_its_own_form, _defaults(cls), fields.values())
    decoders = {
        key_of[name]: (name, form.decode, attrs.NOTHING if name in required else default)
        for (name, form), default in zip(fields.items(), defaults, strict=True)
    }
    indices = range(len(names))
    omitted = _defaults(cls) if omit_defaults else (attrs.NOTHING,) * len(names)
    written = tuple(key_of.values())
    encoders = tuple(form.encode for form in fields.values())
    values_of = _getter(names)

    def decode(raw: Any, frames: Frames) -> T:
        if type(raw) is not dict:
            raise misfit(f"a map ({cls.__name__})", raw)
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
                raise error.within(f".{name}") from None
        for name in required:
            if name not in values:
                raise CodecError(f"must have the key {key_of[name]!r}")
        return cls(**values)

    def encode(value: T, aux: AuxFrames) -> Any:
        if not isinstance(value, cls):
            raise misfit(f"a {cls.__name__}", value)
        raw = {}
        items = values_of(value)
        index = 0
        try:
            for index in compress(indices, map(operator.is_not, items, omitted)):
                item, default = items[index], omitted[index]
                if type(item) is not type(default) or item != default:
                    raw[written[index]] = encoders[index](item, aux)
        except CodecError as error:
            raise error.within(f".{names[index]}") from None
        return raw

    return Codec(cls.__name__, decode, encode)


def _names(cls: type[Any], fields: Mapping[str, Codec[Any]] | None = None) -> tuple[str, ...]:
    """The attributes of ``cls``, which must be those of its form in the same order."""
    declared = tuple(attribute.name for attribute in attrs.fields(cls))
    if fields is not None and declared != tuple(fields):
        raise TypeError(f"{cls.__name__} declares {declared}, its form has {tuple(fields)}")
    return declared


def _defaults(cls: type[Any]) -> tuple[Any, ...]:
    return tuple(attribute.default for attribute in attrs.fields(cls))


def _its_own_form(default: Any, form: Codec[Any]) -> Any:
    """The default if it is read and written as it is, else `attrs.NOTHING`."""
    if default is attrs.NOTHING or isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return attrs.NOTHING
    try:
        same = form.decode(default, ()) is default and form.encode(default, []) is default
    except CodecError:  # such as a tuple, which is never read
        same = False
    return default if same else attrs.NOTHING


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives all these attributes of a value at once."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    (name,) = names
    return lambda value: (getattr(value, name),)
