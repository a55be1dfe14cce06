"""Structured outputs: chooses a backend, writes what it can use, and refuses what it cannot do.

Mirrors ``SamplingParams._validate_structured_outputs`` upstream and the validating functions of
``vllm/v1/structured_output/backend_*.py``, without the backends themselves. What only they find out
(a grammar with an unknown rule, say) an engine answers with an error of that request alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trio_vllm.client.field_errors import invalid, unsupported
from trio_vllm.client.json_schema import (
    find_dropped_keyword,
    find_guidance_fault,
    find_xgrammar_fault,
    has_pattern_properties,
)
from trio_vllm.client.regex_syntax import ANY, GUIDANCE, XGRAMMAR, find_fault, find_outlines_fault
from trio_vllm.protocol import CodecError, StructuredOutputsParams

AUTO = "auto"
"""The name of no backend: each request gets one that can do what it asks for."""

JSON_NESTING = 64
"""Levels of a JSON schema; each makes its conversion to a grammar much more expensive."""
STRUCTURAL_TAG_NESTING = 80


# Filled in ---------------------------------------------------------------------------------------


def choose_backend(params: StructuredOutputsParams) -> str:
    """The backend that upstream's ``auto`` takes for a request; xgrammar for one that is no good."""
    if not _has_types(params) or not _is_refused(params, "xgrammar"):
        return "xgrammar"
    if params.json is None:
        return "guidance"
    try:
        return "outlines" if has_pattern_properties(_parsed(params.json)) else "guidance"
    except CodecError:
        return "xgrammar"


def _is_refused(params: StructuredOutputsParams, backend: str) -> bool:
    try:
        _check_kind(attrs.evolve(params, backend=backend))
    except CodecError:
        return True
    return False


def _has_types(params: StructuredOutputsParams) -> bool:
    """Whether the constraints can be looked at before the fields are checked one by one."""
    schema: Any = params.json
    texts: tuple[Any, ...] = (params.regex, params.grammar, params.structural_tag)
    return isinstance(schema, str | dict | None) and all(
        isinstance(text, str | None) for text in texts
    )


def resolve(params: StructuredOutputsParams, backend: str) -> StructuredOutputsParams:
    """Fill in the backend, unless the request names one, and put choices in the form it takes.

    xgrammar has no choices: engines before 0.33 end such a request with an error, so upstream's
    frontend sends a grammar.
    """
    if params.backend is None:
        chosen = choose_backend(params) if backend == AUTO else backend
        params = attrs.evolve(params, backend=chosen, backend_was_auto=backend == AUTO)
    if _is_xgrammar(params.backend) and _are_texts(params.choice) and _only(params, "choice"):
        return attrs.evolve(params, choice=None, grammar=choices_as_grammar(params.choice or ()))
    return params


def _is_xgrammar(backend: object) -> bool:
    return isinstance(backend, str) and backend == "xgrammar"


def _are_texts(choice: object) -> bool:
    """Whether choices can be a grammar; others are refused as they are."""
    return (
        isinstance(choice, list | tuple)
        and len(choice) > 0
        and all(type(text) is str and _is_unicode(text) for text in choice)
    )


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _only(params: StructuredOutputsParams, kind: str) -> bool:
    return [name for name in params.CONSTRAINTS if getattr(params, name) is not None] == [kind]


_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)} | {
    ord("\\"): r"\\",
    ord('"'): r"\"",
    ord("\n"): r"\n",
    ord("\r"): r"\r",
    ord("\t"): r"\t",
}


def choices_as_grammar(choices: list[str] | tuple[str, ...]) -> str:
    """An EBNF grammar of nothing but these texts, such as ``root ::= "yes" | "no"``."""
    return "root ::= " + " | ".join(f'"{text.translate(_ESCAPES)}"' for text in choices)


# Checked -----------------------------------------------------------------------------------------


def check(params: StructuredOutputsParams) -> None:
    """Refuse what the backend cannot do."""
    if params.backend is None:
        raise invalid("backend", "must be set")
    _check_kind(params)


def _check_kind(params: StructuredOutputsParams) -> None:
    """Check a constraint on its own, then for its backend."""
    for kind in params.CONSTRAINTS:
        value = getattr(params, kind)
        if value is None:
            continue
        if isinstance(value, str) and kind in _TEXTS and not value.strip():
            raise invalid(kind, "must not be blank")
        if kind in _NESTING and _nests_deeper(_parsed(value, kind), _NESTING[kind]):
            raise invalid(kind, f"must not nest deeper than {_NESTING[kind]} levels")
        if kind == "regex" and "\0" in value:
            raise invalid(kind, "must not contain NUL")
        check_kind = _BACKENDS[params.backend or ""].get(kind)
        if check_kind is None:
            raise unsupported(kind, f"cannot be done by the backend {params.backend}")
        check_kind(value)


_TEXTS = ("json", "grammar", "structural_tag")
_NESTING = {"json": JSON_NESTING, "structural_tag": STRUCTURAL_TAG_NESTING}


def _parsed(value: object, kind: str = "json") -> object:
    """A JSON document as Python has it; `CodecError` if it is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid(kind, f"must not nest deeper than {_NESTING[kind]} levels") from None
    except ValueError as error:
        raise invalid(kind, f"must be JSON ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


_CONTAINERS = (dict, list, tuple)


def _nests_deeper(document: object, limit: int) -> bool:
    """Whether a JSON document nests lists and maps more than ``limit`` levels deep."""
    level = [document] if isinstance(document, _CONTAINERS) else []
    for _ in range(limit):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, _CONTAINERS)
        ]
    return bool(level)


def _anything(_: object) -> None:
    """Nothing more to check before it is sent."""


def _check_schema(value: object) -> object:
    """Check that a JSON schema is one; gives it as Python has it."""
    schema = _parsed(value)
    if not isinstance(value, str):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise invalid("json", f"must be JSON ({error})") from None
    if schema is not True and not isinstance(schema, dict):
        raise invalid("json", "must be a schema, an object")
    return schema


def _check_xgrammar_schema(value: object) -> None:
    schema = _check_schema(value)
    if keyword := find_dropped_keyword(schema):
        raise unsupported("json", f"has {keyword!r} where xgrammar would not enforce it")
    if reason := find_xgrammar_fault(schema):
        raise invalid("json", f"is no schema: {reason}")


def _check_guidance_schema(value: object) -> None:
    if reason := find_guidance_fault(_check_schema(value)):
        raise invalid("json", f"is no schema for guidance: {reason}")


def _check_plain_schema(value: object) -> None:
    _check_schema(value)


def _regex_check(find: Callable[[str], str | None]) -> Callable[[str], None]:
    def check_regex(pattern: str) -> None:
        if reason := find(pattern):
            raise invalid("regex", reason)

    return check_regex


def is_likely_lark(grammar: str) -> bool:
    """Whether a grammar is written for Lark; engines decide it like this and compile either."""
    lines = (re.sub(r"(#|//).*", "", line) for line in grammar.split("\n"))
    return not any("::=" in line for line in lines)


def _check_grammar(grammar: str) -> None:
    """Both syntaxes begin with a rule of a certain name; for more a compiler is needed."""
    if is_likely_lark(grammar):
        if "start" not in grammar:
            raise invalid("grammar", "must have a rule start, as Lark has it, or root ::= …")
    elif not re.search(r"\broot\s*::=", grammar):
        raise invalid("grammar", "must have a rule root ::= …")


def _check_xgrammar_tag(text: str) -> None:
    tag = _tag(text)
    if "structures" in tag:
        _check_structures(tag)
    elif tag.get("type", "structural_tag") != "structural_tag":
        raise invalid("structural_tag", "must be of type 'structural_tag'")
    elif not isinstance(tag.get("format"), dict) or not tag["format"]:
        raise invalid("structural_tag", "must have a format, an object that is not empty")


def _check_guidance_tag(text: str) -> None:
    tag = _tag(text)
    if "structures" not in tag:
        raise unsupported("structural_tag", "must have structures: guidance knows no other form")
    _check_structures(tag)


def _tag(text: str) -> dict[str, Any]:
    tag = _parsed(text, "structural_tag")
    if not isinstance(tag, dict):
        raise invalid("structural_tag", "must be an object")
    return tag


def _check_structures(tag: dict[str, Any]) -> None:
    """Check a structural tag of the older form: structures and what triggers them."""
    for key in ("structures", "triggers"):
        if not isinstance(tag.get(key), list) or not tag[key]:
            raise invalid("structural_tag", f"must have {key}, a list that is not empty")
    triggers = [trigger for trigger in tag["triggers"] if isinstance(trigger, str)]
    if len(triggers) < len(tag["triggers"]):
        raise invalid("structural_tag", "must have strings as triggers")
    for structure in tag["structures"]:
        _check_structure(structure, triggers)


def _check_structure(structure: Any, triggers: list[str]) -> None:
    if not isinstance(structure, dict) or not all(
        isinstance(structure.get(key), str) for key in ("begin", "end")
    ):
        raise invalid("structural_tag", "must have structures with a begin and an end, strings")
    if not isinstance(structure.get("schema"), dict | bool):
        raise invalid("structural_tag", "must have structures with a schema")
    if not any(structure["begin"].startswith(trigger) for trigger in triggers):
        raise invalid("structural_tag", f"has no trigger for {structure['begin']!r}")


_BACKENDS: Mapping[str, Mapping[str, Callable[[Any], None]]] = {
    "xgrammar": {
        "json": _check_xgrammar_schema,
        "regex": _regex_check(lambda pattern: find_fault(pattern, XGRAMMAR)),
        "choice": _anything,
        "grammar": _check_grammar,
        "json_object": _anything,
        "structural_tag": _check_xgrammar_tag,
    },
    "guidance": {
        "json": _check_guidance_schema,
        "regex": _regex_check(lambda pattern: find_fault(pattern, GUIDANCE)),
        "choice": _anything,
        "grammar": _check_grammar,
        "json_object": _anything,
        "structural_tag": _check_guidance_tag,
    },
    "outlines": {
        "json": _check_plain_schema,
        "regex": _regex_check(find_outlines_fault),
        "choice": _anything,
    },
    "lm-format-enforcer": {
        "json": _check_plain_schema,
        "regex": _regex_check(lambda pattern: find_fault(pattern, ANY)),
        "choice": _anything,
        "json_object": _anything,
    },
}
"""Which kinds of constraints each backend does, and what else it wants of them."""
