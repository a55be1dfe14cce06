"""`define` and `frozen`: the decorators of attrs, with methods that all classes share.

For each class attrs writes the source of its methods and compiles it, as the class is defined. That was
most of what importing this package took. Constructors are worth it. To compare, hash and show values,
functions that ask a class for its fields do as well. A class whose values are compared or hashed for
each token is better off with those of `attrs.frozen`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

import attrs


def _equals(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    compared = _compared(self.__class__)
    return compared(self) == compared(other)


def _hash(self: Any) -> int:
    return hash((self.__class__, _compared(self.__class__)(self)))


@recursive_repr()
def _show(self: Any) -> str:
    cls = self.__class__
    fields = (field for field in cls.__attrs_attrs__ if field.repr)
    shown = (f"{field.name}={getattr(self, field.name, attrs.NOTHING)!r}" for field in fields)
    return f"{cls.__qualname__.rsplit('>.', 1)[-1]}({', '.join(shown)})"


@functools.cache
def _compared(cls: type[Any]) -> Callable[[Any], Any]:
    """Make the function that gives, of a value, the fields that count when it is compared."""
    fields = [field for field in cls.__attrs_attrs__ if field.eq]
    if any(field.eq_key for field in fields):
        keys = [(field.name, field.eq_key or (lambda value: value)) for field in fields]
        return lambda value: tuple(key(getattr(value, name)) for name, key in keys)
    return attrgetter(*(field.name for field in fields)) if fields else lambda value: None


def _share_methods(cls: type[Any], *, eq: bool, repr: bool, frozen: bool) -> None:  # noqa: A002
    """Give a class the methods that attrs would write for it; it leaves alone what is there."""
    methods: dict[str, Any] = {"__repr__": _show} if repr else {}
    if eq and not issubclass(cls, BaseException):  # each exception is one of its own
        methods |= {"__eq__": _equals, "__hash__": _hash if frozen else None}
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)


if TYPE_CHECKING:
    from attrs import define as define
    from attrs import frozen as frozen
else:

    def define(
        cls: type[Any] | None = None,
        *,
        eq: bool = True,
        repr: bool = True,  # noqa: A002  (what attrs calls it)
        frozen: bool = False,
        **options: Any,
    ) -> Any:
        """Decorate a class as `attrs.define` does."""
        if cls is None:
            return functools.partial(define, eq=eq, repr=repr, frozen=frozen, **options)
        _share_methods(cls, eq=eq, repr=repr, frozen=frozen)
        return attrs.define(
            cls, eq=eq and None, repr=repr and None, frozen=frozen, **options
        )  # None: unless the class has it

    frozen = functools.partial(define, frozen=True)
