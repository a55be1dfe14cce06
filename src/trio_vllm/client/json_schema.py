"""`find_xgrammar_fault` and `find_guidance_fault` tell what of a JSON schema a backend cannot compile.

xgrammar drops some keywords without a word: a completion then breaks the schema. Upstream's
frontends refuse those, see ``has_xgrammar_unsupported_json_features`` in
``vllm/v1/structured_output/backend_xgrammar.py``, and compile each schema with the backend itself
for the rest. Of that rest, what the text of a schema tells is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trio_vllm.client.regex_syntax import ANY, find_fault
from trio_vllm.values import frozen

XGRAMMAR_FORMATS = frozenset(
    {
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
        "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    }
)  # fmt: skip
"""Values of ``format`` that xgrammar enforces; it drops others."""

GUIDANCE_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown",
        "uri", "uuid",
    }
)  # fmt: skip
"""Values of ``format`` that llguidance takes; it refuses others."""

GUIDANCE_UNIMPLEMENTED = frozenset(
    {
        "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains",
        "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
        "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
        "uniqueItems",
    }
)  # fmt: skip
"""Keywords for which llguidance refuses a schema, whatever their value."""


# What xgrammar drops ----------------------------------------------------------------------------


def find_dropped_keyword(schema: object) -> str | None:
    """The first keyword that xgrammar would not enforce; None if there is none.

    Like upstream, every map in a schema is taken for a schema, be it one of properties or a value.
    """
    if not isinstance(schema, dict):
        return None
    if keyword := _dropped_here(schema):
        return keyword
    for value in schema.values():
        for item in value if isinstance(value, list) else (value,):
            if keyword := find_dropped_keyword(item):
                return keyword
    return None


def _dropped_here(schema: dict[str, Any]) -> str | None:
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        types = {item for item in given if isinstance(item, str)}
    for type_name, find in _DROPPED.items():
        if type_name in types and (keyword := find(schema)):
            return keyword
    all_of = schema.get("allOf")
    return "allOf" if isinstance(all_of, list) and len(all_of) > 1 else None


def _first_of(*keywords: str) -> Callable[[dict[str, Any]], str | None]:
    return lambda schema: next(filter(schema.__contains__, keywords), None)


def _dropped_of_string(schema: dict[str, Any]) -> str | None:
    if "format" in schema and not _is_one_of(schema["format"], XGRAMMAR_FORMATS):
        return "format"
    return _bounded_pattern(schema)


def _bounded_pattern(schema: dict[str, Any]) -> str | None:
    """The length of a string whose form is given too."""
    has_form = "pattern" in schema or "format" in schema
    return _first_of("minLength", "maxLength")(schema) if has_form else None


def _dropped_of_object(schema: dict[str, Any]) -> str | None:
    if "propertyNames" in schema:
        names = schema["propertyNames"]
        if isinstance(names, dict) and _bounded_pattern(names):
            return "propertyNames"
        if "patternProperties" in schema or "properties" in schema:
            return "propertyNames"
        if schema.get("unevaluatedProperties", True) is not True:
            return "unevaluatedProperties"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and ("properties" in schema or len(patterns) > 1):
        return "patternProperties"
    return None


_DROPPED: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "integer": _first_of("multipleOf"),
    "number": _first_of("multipleOf"),
    "array": _first_of("uniqueItems", "contains", "minContains", "maxContains"),
    "string": _dropped_of_string,
    "object": _dropped_of_object,
}
"""By type: how to find a keyword that is dropped for it."""


def _is_one_of(value: object, texts: frozenset[str]) -> bool:
    return isinstance(value, str) and value in texts


def has_pattern_properties(schema: object) -> bool:
    """Whether a schema asks for ``patternProperties``, for which upstream does not choose guidance."""
    if not isinstance(schema, dict):
        return False
    return "patternProperties" in schema or any(
        has_pattern_properties(item)
        for value in schema.values()
        for item in (value if isinstance(value, list) else (value,))
    )


# What neither compiles --------------------------------------------------------------------------

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


@frozen
class _Misfit(Exception):  # noqa: N818 (never leaves this module)
    """Something in a schema is not what it must be."""

    path: str
    reason: str

    def within(self, step: str) -> _Misfit:
        return _Misfit(f"{step}.{self.path}" if self.path else step, self.reason)

    def __str__(self) -> str:
        return f"{self.path or 'the schema'} {self.reason}"


def find_xgrammar_fault(schema: object) -> str | None:
    """What in a schema makes xgrammar refuse it, as far as that shows; None if nothing is found."""
    return _find(schema, lambda schema: None)


def find_guidance_fault(schema: object) -> str | None:
    """The same for guidance."""
    return _find(schema, _check_guidance_keywords)


def _find(schema: object, check_keywords: Callable[[dict[str, Any]], None]) -> str | None:
    try:
        _check(schema, check_keywords)
    except _Misfit as misfit:
        return str(misfit)
    return None


def _check_guidance_keywords(schema: dict[str, Any]) -> None:
    for keyword in schema:
        if keyword in GUIDANCE_UNIMPLEMENTED:
            raise _Misfit(keyword, "is a keyword that guidance does not implement")
    is_string = schema.get("type", "string") == "string" and not _DECISIVE & schema.keys()
    if is_string and not _is_one_of(schema.get("format", "unknown"), GUIDANCE_FORMATS):
        raise _Misfit("format", "is one that guidance does not know")


_DECISIVE = frozenset({"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})
"""Keywords that say all; backends do not look at all others beside them."""


def _check(schema: object, check_keywords: Callable[[dict[str, Any]], None]) -> None:
    """Check a schema and the parts of it that any backend reads."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _Misfit("", "must be an object or a boolean")
    check_keywords(schema)
    if not _DECISIVE & schema.keys():
        _check_type(schema.get("type", ()))
        _check_limits(schema)
    elif "enum" in schema and not {"$ref", "const"} & schema.keys():
        _check_enum(schema["enum"])
    for step, part in _parts(schema):
        try:
            _check(part, check_keywords)
        except _Misfit as misfit:
            raise misfit.within(step) from None


def _check_type(given: object) -> None:
    names = given if isinstance(given, list | tuple) else (given,)
    if not all(_is_one_of(name, TYPES) for name in names):
        raise _Misfit("type", f"must be one of {', '.join(sorted(TYPES))}, or a list of them")


def _check_enum(values: object) -> None:
    if not isinstance(values, list) or not values:
        raise _Misfit("enum", "must be a list that is not empty")


_RANGES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "number": ("minimum", "maximum"),
    "integer": ("minimum", "maximum"),
}


def _check_limits(schema: dict[str, Any]) -> None:
    """Check what belongs to the type, if there is just one."""
    type_name = schema.get("type")
    if not isinstance(type_name, str):
        return
    least, most = _RANGES.get(type_name, ("", ""))
    low, high = schema.get(least, 0), schema.get(most, 0)
    for keyword, value in ((least, low), (most, high)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Misfit(keyword, "must be a number")
    if least in schema and most in schema and low > high:
        raise _Misfit(least, f"must be at most {most}")
    if type_name == "string" and "pattern" in schema and "format" not in schema:
        _check_pattern(schema["pattern"])


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        raise _Misfit("pattern", "must be a string")
    if reason := find_fault(pattern, ANY):
        raise _Misfit("pattern", reason)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The schemas inside a schema that any backend reads, each with the step to it."""
    if {"$ref", "const", "enum"} & schema.keys():
        return
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            if not isinstance(schema[keyword], list):
                raise _Misfit(keyword, "must be a list")
            if keyword != "allOf" or len(schema[keyword]) == 1:
                yield from ((f"{keyword}[{i}]", part) for i, part in enumerate(schema[keyword]))
            return
    if schema.get("type", "object") == "object" and "properties" in schema:
        if not isinstance(schema["properties"], dict):
            raise _Misfit("properties", "must be an object")
        yield from ((f"properties.{name}", part) for name, part in schema["properties"].items())
    if schema.get("type") == "object" and "additionalProperties" in schema:
        yield "additionalProperties", schema["additionalProperties"]
    if schema.get("type") == "array" and isinstance(schema.get("items", []), dict):
        yield "items", schema["items"]
