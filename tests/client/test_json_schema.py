"""Schemas that xgrammar would enforce in part, and what makes a backend refuse one."""

from __future__ import annotations

from typing import Any

import pytest

from trio_vllm.client.json_schema import (
    find_dropped_keyword,
    find_guidance_fault,
    find_xgrammar_fault,
    has_pattern_properties,
)

STRING: dict[str, Any] = {"type": "string"}

DROPPED: list[tuple[str, dict[str, Any]]] = [
    ("multipleOf", {"type": "integer", "multipleOf": 3}),
    ("multipleOf", {"type": ["number", "null"], "multipleOf": 0.5}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {}}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("maxContains", {"type": "array", "maxContains": 1}),
    ("format", {"type": "string", "format": "regex"}),
    ("format", {"type": "string", "format": ["email"]}),
    ("minLength", {"type": "string", "pattern": "a", "minLength": 1}),
    ("maxLength", {"type": "string", "format": "email", "maxLength": 1}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a", "maxLength": 1}}),
    ("propertyNames", {"type": "object", "propertyNames": {}, "patternProperties": {}}),
    ("propertyNames", {"type": "object", "propertyNames": {}, "properties": {}}),
    (
        "unevaluatedProperties",
        {"type": "object", "propertyNames": {}, "unevaluatedProperties": False},
    ),
    ("patternProperties", {"type": "object", "patternProperties": {"a": {}, "b": {}}}),
    ("patternProperties", {"type": "object", "patternProperties": {"a": {}}, "properties": {}}),
    ("allOf", {"allOf": [STRING, {"enum": ["a"]}]}),
]


@pytest.mark.parametrize(("keyword", "schema"), DROPPED)
def test_keyword_that_xgrammar_drops(keyword: str, schema: dict[str, Any]) -> None:
    assert find_dropped_keyword(schema) == keyword
    assert find_dropped_keyword({"properties": {"a": schema}}) == keyword
    assert find_dropped_keyword({"anyOf": [{}, {"items": schema}]}) == keyword


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"multipleOf": 3},
        {"type": "string", "multipleOf": 3},
        {"type": "string", "format": "email"},
        {"type": "string", "pattern": "a"},
        {"type": "string", "minLength": 1, "maxLength": 2},
        {"type": "object", "propertyNames": {"pattern": "a"}},
        {"type": "object", "patternProperties": {"a": {}}},
        {"type": "object", "unevaluatedProperties": False},
        {"allOf": [STRING]},
        {"type": 5},
    ],
)
def test_schema_that_xgrammar_enforces(schema: Any) -> None:
    assert find_dropped_keyword(schema) is None


FAULTS: list[tuple[str, Any]] = [
    ("the schema must be an object or a boolean", 5),
    ("type must be one of", {"type": "nonsense"}),
    ("type must be one of", {"type": ["string", "text"]}),
    ("type must be one of", {"type": None}),
    ("enum must be a list", {"enum": []}),
    ("anyOf must be a list", {"anyOf": {}}),
    ("anyOf[1].type must be", {"anyOf": [{}, {"type": 1}]}),
    ("allOf[0].type must be", {"allOf": [{"type": 1}]}),
    ("properties must be an object", {"properties": []}),
    ("properties.a.properties.b.type must", {"properties": {"a": {"properties": {"b": {"type": 1}}}}}),
    ("items.type must be", {"type": "array", "items": {"type": 1}}),
    ("additionalProperties.type must", {"type": "object", "additionalProperties": {"type": 1}}),
    ("minLength must be at most maxLength", {"type": "string", "minLength": 2, "maxLength": 1}),
    ("minItems must be at most maxItems", {"type": "array", "minItems": 2, "maxItems": 1}),
    ("minimum must be at most maximum", {"type": "integer", "minimum": 2, "maximum": 1}),
    ("maximum must be a number", {"type": "number", "maximum": "2"}),
    ("pattern has a group that is not closed", {"type": "string", "pattern": "("}),
    ("pattern must be a string", {"type": "string", "pattern": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("said", "schema"), FAULTS)
def test_fault_that_both_backends_find(said: str, schema: Any) -> None:
    for find in (find_xgrammar_fault, find_guidance_fault):
        assert (find(schema) or "").startswith(said)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#", "type": "nonsense"},
        {"const": 1, "type": "nonsense"},
        {"enum": [1], "properties": 5},
        {"type": "string", "properties": {"a": {"type": "nonsense"}}},
        {"$defs": {"a": {"type": "nonsense"}}},
        {"properties": {"type": {"type": "string"}}},
        {"default": {"type": "nonsense"}, "examples": [{"enum": []}]},
    ],
)
def test_what_xgrammar_does_not_read_is_not_checked(schema: Any) -> None:
    assert find_xgrammar_fault(schema) is None


GUIDANCE: list[tuple[str | None, Any]] = [
    ("uniqueItems is a keyword that guidance", {"uniqueItems": False}),
    ("properties.a.not is a keyword", {"properties": {"a": {"not": {}}}}),
    ("format is one that guidance", {"type": "string", "format": "regex"}),
    ("format is one that guidance", {"format": "regex"}),
    (None, {"type": "integer", "format": "regex"}),
    (None, {"type": "string", "format": "email"}),
    (None, {"type": "integer", "multipleOf": 3}),
    (None, {"$defs": {"a": {"not": {}}}}),
    (None, {"x-unknown": 1}),
]


@pytest.mark.parametrize(("said", "schema"), GUIDANCE)
def test_keyword_that_guidance_refuses(said: str | None, schema: Any) -> None:
    found = find_guidance_fault(schema)

    assert (found or "").startswith(said or "")
    assert (found is None) == (said is None)
    assert find_xgrammar_fault(schema) is None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"patternProperties": {}}, True),
        ({"items": [{"patternProperties": {}}]}, True),
        ({"items": {"properties": {}}}, False),
        (True, False),
    ],
)
def test_pattern_properties_are_found_anywhere(schema: Any, expected: bool) -> None:
    assert has_pattern_properties(schema) == expected
