"""`define` and `frozen` make classes that behave like those of attrs."""

import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trio_vllm import values


def with_all_kinds_of_fields(decorate: Callable[[type[Any]], Any]) -> Any:
    """A class as others are, and one with options that few have."""

    class Value:
        number: float
        name: str | None = None
        hidden: int = attrs.field(default=0, repr=False)
        ignored: int = attrs.field(default=0, eq=False)
        folded: str = attrs.field(default="", eq=str.lower)
        unset: int = attrs.field(init=False)

    return decorate(Value)


def without_fields(decorate: Callable[[type[Any]], Any]) -> Any:
    """A class that is no more than its name."""

    class Value:
        pass

    return decorate(Value)


SAMPLES: list[tuple[float, dict[str, Any]]] = [
    (1, {}),
    (1.0, {}),
    (2, {}),
    (1, {"name": "a"}),
    (1, {"hidden": 1}),
    (1, {"ignored": 1}),
    (1, {"folded": "A"}),
    (1, {"folded": "a"}),
]


def samples(cls: Any) -> list[Any]:
    """Values that differ in one field from the first."""
    made = [cls(number, **others) for number, others in SAMPLES]
    for value in made:
        object.__setattr__(value, "unset", 7)
    return made


@pytest.mark.parametrize("options", [{}, {"slots": False}, {"eq": False}, {"repr": False}])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(values.define, attrs.define), (values.frozen, attrs.frozen)],
    ids=["define", "frozen"],
)
def test_values_compare_hash_and_show_as_those_of_attrs(
    ours: Any, theirs: Any, options: dict[str, Any]
) -> None:
    """Whatever the options of a class or of its fields are."""
    got = samples(with_all_kinds_of_fields(ours(**options)))
    expected = samples(with_all_kinds_of_fields(theirs(**options)))

    assert [[a == b for a in got] for b in got] == [[a == b for a in expected] for b in expected]
    assert [[a != b for a in got] for b in got] == [[a != b for a in expected] for b in expected]
    assert equal_hashes(got) == equal_hashes(expected)
    if options.get("repr", True):
        assert list(map(repr, got)) == list(map(repr, expected))


def equal_hashes(made: list[Any]) -> list[list[bool]] | None:
    """Which values have one hash, None if they have none."""
    if type(made[0]).__hash__ is None:
        return None
    return [[hash(a) == hash(b) for a in made] for b in made]


@pytest.mark.parametrize("decorate", [values.define, values.frozen])
def test_a_class_without_fields(decorate: Any) -> None:
    """All its values are equal."""
    cls = without_fields(decorate)

    assert cls() == cls()
    assert repr(cls()) == "Value()"


def test_values_of_other_classes_differ() -> None:
    """Also of a subclass, and whatever they hold."""
    cls = with_all_kinds_of_fields(values.frozen)

    class Sub(cls):  # type: ignore[misc, valid-type]
        pass

    value, sub, other = cls(1), Sub(1), with_all_kinds_of_fields(values.frozen)(1)

    assert value != sub
    assert value != other
    assert value != 1


@pytest.mark.parametrize("decorate", [values.define, values.frozen, attrs.frozen])
def test_exceptions_differ(decorate: Any) -> None:
    """Each is one that was raised somewhere, whatever it holds, and has a hash."""

    class FaultError(Exception):
        reasons: list[str]

    cls = decorate(FaultError)
    assert cls(["a"]) != cls(["a"])
    assert len({cls(["a"]), cls(["a"])}) == 2
    assert repr(cls(["a"])) == "FaultError(reasons=['a'])"


@values.define
class Own:
    """Has methods of its own, and a value that holds itself."""

    number: int
    inner: Any = None

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 5


@values.define
class Ring:
    """Holds itself."""

    inner: Any = None


def test_methods_of_a_class_stay() -> None:
    """Those that it has itself."""
    assert Own(1) == Own(2)
    assert hash(Own(1)) == 5
    assert repr(Own(1)) == "Own(number=1, inner=None)"


def test_a_value_in_itself_is_shown_once() -> None:
    """It would never end."""
    ring = Ring()
    ring.inner = ring

    assert repr(ring) == "Ring(inner=...)"


def test_a_field_without_a_value_is_shown_so() -> None:
    """As a class that is half made is shown in a debugger."""
    assert repr(with_all_kinds_of_fields(values.define)(1)).endswith("unset=NOTHING)")


def test_values_are_pickled() -> None:
    """With slots, which needs what attrs adds for that."""
    assert pickle.loads(pickle.dumps(Ring(3))) == Ring(3)


def test_what_is_not_to_be_written_is_not() -> None:
    """With ``eq=False`` a value is itself, with ``repr=False`` it is shown as any object."""

    @values.define(eq=False, repr=False)
    class Bare:
        number: int

    assert Bare(1) != Bare(1)
    assert hash(Bare(1)) is not None
    assert "object at" in repr(Bare(1))
