"""The building blocks of the wire forms."""

from __future__ import annotations

import math
from array import array
from typing import Any

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
    enumeration,
    integer,
    list_of,
    map_of,
    number,
    one_of,
    optional,
    read_write,
)
from trio_vllm.protocol.msgpack import pack, unpack
from trio_vllm.protocol.multimodal import FIELD
from trio_vllm.protocol.output import ENGINE_CORE_OUTPUT
from trio_vllm.protocol.request import POOLING_PARAMS, REQUEST_FIELDS, EngineCoreRequest
from trio_vllm.protocol.sampling import (
    REPETITION_DETECTION,
    SAMPLING_FIELDS,
    SAMPLING_PARAMS,
    RepetitionDetectionParams,
)
from trio_vllm.protocol.stats import PREFILL_STATS, SCHEDULER_STATS, PrefillStats, SchedulerStats
from trio_vllm.protocol.structs import array_struct, map_struct


@pytest.mark.parametrize(
    ("form", "good", "bad"),
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
def test_scalars_and_containers(form: Codec[Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert same(value, form.decode(form.encode(value, []), []))
    for value in bad:
        with pytest.raises(CodecError):
            form.decode(value, [])
        with pytest.raises(CodecError):
            form.encode(value, [])


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
    ("form", "read", "written", "refused"),
    [
        (number(0, 1), [2.0, math.nan], [0.0, 1, 0.5], [-0.1, 1.1, math.nan, math.inf]),
        (FINITE, [math.nan], [0.0, -1e308], [math.nan, math.inf, -math.inf]),
        (one_of("a", "b"), ["c"], ["a"], ["c", "", 1]),
        (read_write(U32, integer(1, 9)), [0, 10], [1, 9], [0, 10]),
    ],
)
def test_writing_is_stricter_than_reading(
    form: Codec[Any], read: list[Any], written: list[Any], refused: list[Any]
) -> None:
    for value in read:
        form.decode(value, [])
    for value in written:
        form.encode(value, [])
    for value in refused:
        with pytest.raises(CodecError):
            form.encode(value, [])


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
    for form, value in refused:
        with pytest.raises(CodecError):
            form.encode(value, [])


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
    form = map_of(STR, list_of(map_of(U32, BOOL)))

    with pytest.raises(CodecError) as caught:
        form.decode({"a": [{}, {7: 1}]}, [])

    assert caught.value.where == "['a'][1][7]"
    assert str(caught.value) == "['a'][1][7] must be a boolean, not 1"


@attrs.define
class Point:
    x: int
    y: int = 5
    label: str | None = None
    tags: list[str] = attrs.field(factory=list)


FIELDS: dict[str, Codec[Any]] = {"x": U32, "y": U32, "label": optional(STR), "tags": list_of(STR)}
AS_ARRAY = array_struct(Point, 1, FIELDS)
AS_MAP = map_struct(Point, FIELDS, required=("x",), keys={"label": "_label"})
SPARSE = map_struct(Point, FIELDS, omit_defaults=True)


def test_structs() -> None:
    bare, full = Point(1), Point(1, 2, "l", ["t"])

    assert AS_ARRAY.encode(bare, []) == [1, 5, None, []]
    assert AS_ARRAY.encode(full, []) == [1, 2, "l", ["t"]]
    assert AS_MAP.encode(bare, []) == {"x": 1, "y": 5, "_label": None, "tags": []}
    assert SPARSE.encode(bare, []) == {"x": 1, "tags": []}
    assert AS_ARRAY.decode([1], []) == AS_MAP.decode({"x": 1}, []) == bare
    assert AS_ARRAY.decode([1, 2, "l", ["t"], "new", {}], []) == full
    assert AS_MAP.decode({"x": 1, "y": 2, "_label": "l", "tags": ["t"], "new": 1, 7: 8}, []) == full


@pytest.mark.parametrize(
    ("form", "raw", "where"),
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
def test_bad_structs(form: Codec[Point], raw: Any, where: str) -> None:
    with pytest.raises(CodecError) as caught:
        form.decode(raw, [])

    assert where == caught.value.where


@pytest.mark.parametrize("form", [AS_ARRAY, AS_MAP, SPARSE])
def test_values_of_structs_are_checked(form: Codec[Point]) -> None:
    for value, where in (
        (None, ""),
        ([1], ""),
        (Point("1"), "x"),  # type: ignore[arg-type]
        (Point(1, None), "y"),  # type: ignore[arg-type]
        (Point(1, label=2), "label"),  # type: ignore[arg-type]
        (Point(1, tags=["a", 2]), "tags[1]"),  # type: ignore[list-item]
    ):
        with pytest.raises(CodecError) as caught:
            form.encode(value, [])  # type: ignore[arg-type]
        assert where == caught.value.where


def test_form_must_name_the_fields_of_its_class() -> None:
    with pytest.raises(TypeError, match="declares"):
        array_struct(Point, 1, {"x": U32})


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (SamplingParams(), SAMPLING_PARAMS),
        (PoolingParams(), POOLING_PARAMS),
        (RepetitionDetectionParams(), REPETITION_DETECTION),
        (SchedulerStats(), SCHEDULER_STATS),
        (PrefillStats(), PREFILL_STATS),
    ],
)
def test_defaults_fit_their_forms(value: Any, form: Codec[Any]) -> None:
    assert same(value, form.decode(form.encode(value, []), []))


@pytest.mark.parametrize(
    ("cls", "fields"), [(SamplingParams, SAMPLING_FIELDS), (EngineCoreRequest, REQUEST_FIELDS)]
)
def test_every_default_is_written_as_it_is(cls: type[Any], fields: dict[str, Codec[Any]]) -> None:
    """Since what has its default is skipped."""
    for attribute in attrs.fields(cls):
        if attribute.default is not attrs.NOTHING and attribute.default != ():
            assert attribute.default == fields[attribute.name].encode(attribute.default, [])


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
        FIELD.encode(MultiModalField("flat", kwargs), [])

    assert where == caught.value.where


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
