"""Codecs of scalars and containers, and those that are derived from classes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs
import numpy as np
import pytest
from tests.protocol.comparing import same

from trio_vllm.protocol import FinishReason, MultiModalField, PoolingParams, SamplingParams
from trio_vllm.protocol.codec import (
    ANY,
    ANY_MAP,
    BOOL,
    FINITE,
    FLOAT,
    I64,
    MAX_NESTING,
    STR,
    TOKEN_IDS,
    U32,
    U64S,
    Codec,
    CodecError,
    UInt32,
    UInt64,
    codec_from,
    enumeration,
    integer,
    known_string,
    list_of,
    map_of,
    number,
    optional,
)
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.output import ENGINE_CORE_OUTPUT
from trio_vllm.protocol.request import EngineCoreRequest
from trio_vllm.protocol.sampling import RepetitionDetectionParams
from trio_vllm.protocol.stats import PrefillStats, SchedulerStats
from trio_vllm.protocol.structs import (
    REQUIRED,
    Key,
    as_array,
    as_map,
    codec_of,
    defaults_of,
    fields_of,
    index_of,
)


@pytest.mark.parametrize(
    ("codec", "good", "bad"),
    [
        (U32, [0, 2**32 - 1], [-1, 2**32, True, 1.0, None, "1", np.int64(1), 10**5000]),
        (I64, [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        (integer(1, 2), [1, 2], [0, 3]),
        (FLOAT, [0.5, math.inf], [True, None, "1", 2**65, np.float64(1)]),
        (BOOL, [True, False], [0, 1, None, "true", np.True_]),
        (STR, ["", "é", "a\0b", "😀"], [None, b"a", "\ud800", 1, np.str_("a")]),
        (enumeration(FinishReason), [], [None, 5, -1, True, "stop", [], {}]),
        (TOKEN_IDS, [[], [0], [1, 2, 2**32 - 1]], [None, {}, "ab", b"ab", [True], [1, None]]),
        (U64S, [[2**64 - 1, 0]], [[2**64], [-1, 1]]),
        (list_of(STR), [[], ["a"]], [None, "ab", {}, {"a": 1}]),
        (map_of(U32, FLOAT), [{}, {1: 0.5}], [None, [], {"1": 0.5}, {1: "x"}, {-1: 0.5}]),
        (optional(STR), [None, "a"], [1]),
    ],
)
def test_scalars_and_containers(codec: Codec[Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert same(value, codec.decode(codec.encode(value, []), []))
    for value in bad:
        with pytest.raises(CodecError):
            codec.decode(value, [])
        with pytest.raises(CodecError):
            codec.encode(value, [])


def test_integers_are_numbers() -> None:
    """Writers of dynamic languages leave the point out."""
    assert same(2.0, FLOAT.decode(2, []))
    assert same(2.0, FLOAT.encode(2, []))


@pytest.mark.parametrize(
    "values", [(1, 2), range(1, 3), {2, 1}, frozenset({1, 2}), np.array([1, 2]), array("H", [1, 2])]
)
def test_kinds_of_token_id_lists(values: Any) -> None:
    assert TOKEN_IDS.encode(values, []) == [1, 2]


@pytest.mark.parametrize(
    "values",
    [np.array([[1]]), np.array([0.5]), np.array(1), bytearray(b"a"), array("d", [1.0]), "1"],
)
def test_other_kinds_are_refused(values: Any) -> None:
    with pytest.raises(CodecError):
        TOKEN_IDS.encode(values, [])


@pytest.mark.parametrize(
    ("codec", "read", "written", "refused"),
    [
        (number(0, 1), [2.0, math.nan], [0.0, 1, 0.5], [-0.1, 1.1, math.nan, math.inf]),
        (FINITE, [math.nan], [0.0, -1e308], [math.nan, math.inf, -math.inf]),
        (known_string("a", "b"), ["c"], ["a"], ["c", "", 1]),
        (codec_from(decode=U32, encode=integer(1, 9)), [0, 10], [1, 9], [0, 10]),
    ],
)
def test_writing_is_stricter_than_reading(
    codec: Codec[Any], read: list[Any], written: list[Any], refused: list[Any]
) -> None:
    for value in read:
        codec.decode(value, [])
    for value in written:
        codec.encode(value, [])
    for value in refused:
        with pytest.raises(CodecError):
            codec.encode(value, [])


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_depth_of_free_values() -> None:
    assert unpack(pack(ANY.encode(deep(MAX_NESTING), []))) == deep(MAX_NESTING)
    with pytest.raises(CodecError, match="nests deeper than 128 levels") as caught:
        ANY.encode(deep(MAX_NESTING + 1), [])
    assert caught.value.where == "[0]" * 8


def test_keys_of_free_values() -> None:
    """An engine's utility methods may take integers as keys, a request's free values may not."""
    assert ANY.encode([{1: {"a": 2}}], []) == [{1: {"a": 2}}]
    refused: list[tuple[Codec[Any], Any]] = [
        (ANY, {1.5: 1}),
        (ANY, {2**64: 1}),
        (ANY_MAP, {"a": [{1: 2}]}),
    ]
    for codec, value in refused:
        with pytest.raises(CodecError):
            codec.encode(value, [])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 50, "must be an unsigned 32-bit integer, not 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'…"),
        (1 << 90, "must be an unsigned 32-bit integer, not a huge integer"),
        (-1, "must be an unsigned 32-bit integer, not -1"),
        (None, "must be an unsigned 32-bit integer, not nil"),
        (True, "must be an unsigned 32-bit integer, not True"),
        ([1] * 1000, "must be an unsigned 32-bit integer, not list"),
    ],
)  # fmt: skip
def test_text_of_an_error_is_short(value: Any, text: str) -> None:
    with pytest.raises(CodecError) as caught:
        U32.encode(value, [])

    assert str(caught.value) == f"the value {text}"


def test_path_of_an_error() -> None:
    codec = map_of(STR, list_of(map_of(U32, BOOL)))

    with pytest.raises(CodecError) as caught:
        codec.decode({"a": [{}, {7: 1}]}, [])

    assert caught.value.where == "['a'][1][7]"
    assert str(caught.value) == "['a'][1][7] must be a boolean, not 1"


@attrs.define
class Point:
    x: UInt32
    y: UInt32 = 5
    label: Annotated[str | None, Key("_label")] = None
    tags: list[str] = attrs.field(factory=list)


@as_array()
@attrs.define
class ArrayPoint(Point):
    pass


@as_map(omit_defaults=True)
@attrs.define
class SparsePoint(Point):
    pass


AS_ARRAY = codec_of(ArrayPoint)
AS_MAP = codec_of(Point)
SPARSE = codec_of(SparsePoint)


def test_structs() -> None:
    """A class travels as an array, a map or a map without defaults, and fields have keys."""
    full = 1, 2, "l", ["t"]

    assert AS_ARRAY.encode(ArrayPoint(1), []) == [1, 5, None, []]
    assert AS_ARRAY.encode(ArrayPoint(*full), []) == list(full)
    assert AS_MAP.encode(Point(1), []) == {"x": 1, "y": 5, "_label": None, "tags": []}
    assert SPARSE.encode(SparsePoint(1), []) == {"x": 1, "tags": []}
    assert AS_ARRAY.decode([1], []) == ArrayPoint(1)
    assert AS_MAP.decode({"x": 1}, []) == Point(1)
    assert AS_ARRAY.decode([*full, "new", {}], []) == ArrayPoint(*full)
    assert AS_MAP.decode(
        {"x": 1, "y": 2, "_label": "l", "tags": ["t"], "new": 1, 7: 8}, []
    ) == Point(*full)


@pytest.mark.parametrize(
    ("codec", "raw", "where"),
    [
        (AS_ARRAY, [], ""),
        (AS_ARRAY, {}, ""),
        (AS_ARRAY, None, ""),
        (AS_ARRAY, [None], "x"),
        (AS_ARRAY, [1, None], "y"),
        (AS_ARRAY, [1, 2, 3], "label"),
        (AS_ARRAY, [1, 2, None, None], "tags"),
        (AS_ARRAY, [1, 2, None, ["a", 1]], "tags[1]"),
        (AS_MAP, [], ""),
        (AS_MAP, {}, ""),
        (AS_MAP, {"x": None}, "x"),
        (AS_MAP, {"x": 1, "y": None}, "y"),
        (AS_MAP, {"x": 1, "_label": 3}, "label"),
    ],
)
def test_bad_structs(codec: Codec[Point], raw: Any, where: str) -> None:
    with pytest.raises(CodecError) as caught:
        codec.decode(raw, [])

    assert caught.value.where == where


@pytest.mark.parametrize("cls", [ArrayPoint, Point, SparsePoint])
def test_values_of_structs_are_checked(cls: Any) -> None:
    """Each field is checked, and the error has its path."""
    for value, where in (
        (None, ""),
        ([1], ""),
        (cls("1"), "x"),
        (cls(1, None), "y"),
        (cls(1, label=2), "label"),
        (cls(1, tags=["a", 2]), "tags[1]"),
    ):
        with pytest.raises(CodecError) as caught:
            codec_of(cls).encode(value, [])
        assert caught.value.where == where


@as_map(omit_defaults=True)
@attrs.define
class Limits:
    most: UInt32 | None = 16
    is_hard: bool = False


def test_only_defaults_are_omitted() -> None:
    """Neither None, where it is a value of its own, nor what only equals the default."""
    codec = codec_of(Limits)

    assert codec.encode(Limits(), []) == {}
    assert codec.encode(Limits(most=None, is_hard=True), []) == {"most": None, "is_hard": True}
    with pytest.raises(CodecError) as caught:
        codec.encode(Limits(is_hard=0), [])  # type: ignore[arg-type]
    assert caught.value.where == "is_hard"


@attrs.define
class Everything:
    """A field of every type of which a codec follows."""

    text: str
    flag: bool
    number: float
    reason: FinishReason
    free: Any
    ids: Sequence[UInt32]
    big: list[UInt64]
    counts: dict[str, UInt64]
    bias: Mapping[UInt32, float]
    points: list[Point]
    nested: dict[str, list[Point] | None]
    positive: Annotated[int, integer(1, 9)] | None
    here: Annotated[bool, REQUIRED] = False


def test_types_of_which_a_codec_follows() -> None:
    """Annotations are enough, and those of integers name a width."""
    raw = {
        "text": "a",
        "flag": True,
        "number": 0.5,
        "reason": 1,
        "free": [{"a": None}],
        "ids": [1],
        "big": [2**64 - 1],
        "counts": {"a": 1},
        "bias": {1: 0.5},
        "points": [{"x": 1, "y": 5, "_label": None, "tags": []}],
        "nested": {"a": None, "b": []},
        "positive": 9,
        "here": False,
    }
    codec = codec_of(Everything)
    value = codec.decode(raw, [])

    assert value.reason is FinishReason.LENGTH
    assert value.points == [Point(1)]
    assert codec.encode(value, []) == raw
    for name, bad in (
        ("ids", [2**32]),
        ("big", [-1]),
        ("counts", {"a": -1}),
        ("bias", {"a": 1.0}),
        ("points", [{}]),
        ("nested", {"b": [None]}),
        ("positive", 10),
    ):
        with pytest.raises(CodecError, match=rf"^{name}"):
            codec.decode(raw | {name: bad}, [])
    for name in raw:
        with pytest.raises(CodecError, match=f"must have the key '{name}'"):
            codec.decode({key: item for key, item in raw.items() if key != name}, [])


@attrs.define
class WithoutWidth:
    number: int


@attrs.define
class WithoutRule:
    value: int | str


@pytest.mark.parametrize("cls", [WithoutWidth, WithoutRule, object])
def test_types_of_which_no_codec_follows(cls: type[Any]) -> None:
    """The error says what to do, as soon as the codec is used."""
    with pytest.raises(TypeError, match="name one with Annotated"):
        codec_of(cls).decode({}, ())


def test_a_codec_is_derived_once() -> None:
    """Asking again gives the same."""
    assert codec_of(Point) is AS_MAP


def test_positions_and_defaults_follow_the_declaration() -> None:
    """Who reads or writes single elements of an array asks the class for them."""
    assert defaults_of(ArrayPoint) == [attrs.NOTHING, 5, None, []]
    assert [index_of(ArrayPoint, name) for name in ("x", "y", "label", "tags")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [
        SamplingParams(),
        PoolingParams(),
        RepetitionDetectionParams(),
        SchedulerStats(),
        PrefillStats(),
    ],
)
def test_defaults_fit_their_codecs(value: Any) -> None:
    """A value of nothing but defaults is written and read again."""
    codec: Codec[Any] = codec_of(type(value))
    assert same(value, codec.decode(codec.encode(value, []), []))


@pytest.mark.parametrize("cls", [SamplingParams, EngineCoreRequest])
def test_every_default_is_written_as_it_is(cls: type[Any]) -> None:
    """Since what has its default is skipped."""
    for field in fields_of(cls):
        if field.default is not attrs.NOTHING and field.default != ():
            assert field.codec.encode(field.default, []) == field.default


def test_shortest_output() -> None:
    output = ENGINE_CORE_OUTPUT.decode(["r", []], [])

    assert (output.request_id, output.finished, output.num_nans_in_logits) == ("r", False, 0)


@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"slices": 5}, "slices"),
        ({"slices": [5]}, "slices[0]"),
        ({"slices": [[slice(0, "a")]]}, "slices[0][0]"),
        ({"slices": [slice(0, 2**63)]}, "slices[0]"),
        ({"slices": [], "dim": None}, "dim"),
        ({}, ""),
    ],
)
def test_bad_multimodal_field_is_not_written(kwargs: dict[str, Any], where: str) -> None:
    with pytest.raises(CodecError) as caught:
        codec_of(MultiModalField).encode(MultiModalField("flat", kwargs), [])

    assert caught.value.where == where


def test_what_cannot_be_packed_is_a_form_error() -> None:
    with pytest.raises(CodecError, match="cannot be packed"):
        pack({1, 2})


def test_finish_reasons_read_like_words() -> None:
    assert [str(reason) for reason in FinishReason] == [
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    ]


@pytest.mark.parametrize("bad", [2**64, -(2**63) - 1, "\ud800", object(), {1.5: 2}])
@pytest.mark.parametrize("good", [7, "x", 1.5, None])
def test_a_bad_item_of_a_long_free_list_is_found(good: Any, bad: Any) -> None:
    """Long lists are looked at in another way."""
    ANY.encode([good] * 100, [])
    with pytest.raises(CodecError) as caught:
        ANY.encode([*[good] * 100, bad], [])
    assert caught.value.where.startswith("[100]")


def test_integers_of_a_long_free_list_may_be_of_either_sign() -> None:
    values = [*range(-50, 50), 2**64 - 1, -(2**63)]
    assert ANY.encode(values, []) == values
