"""`find_fault` tells what of a regular expression a grammar backend cannot compile.

Upstream's frontends compile them with the backend itself, which is no dependency of this package.
What is found here, the backend refuses; it may refuse more.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

from trio_vllm.values import frozen

_TOKEN = re.compile(
    r"""
      (?P<backreference> \\[1-9] )
    | (?P<boundary> \\[bB] )
    | (?P<property> \\[pP] (?:\{[^}]*\})? )
    | (?P<trailing> \\\Z )
    | (?P<escape> \\. )
    | (?P<set> \[ \^? (?:[^\]\[\\]|\\.)+ \] )
    | (?P<open_set> \[ (?:[^\]\\]|\\.)* \Z )
    | (?P<unclear> \[ )
    | (?P<look_around> \(\?<?[=!] )
    | (?P<group> \( (?: \?: | \?<[A-Za-z_]\w*> )? (?!\?) )
    | (?P<extension> \(\? )
    | (?P<close> \) )
    | (?P<bar> \| )
    | (?P<count> \{ (?P<low>\d+) (?: , (?P<high>\d*) )? \} )
    | (?P<brace> \{ )
    | (?P<repeat> [*+?] )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)

_ALWAYS = {
    "open_set": "has a set of characters that is not closed",
}
"""Kinds of tokens that no engine of regular expressions takes, and why."""


@frozen
class Dialect:
    """What a backend does not take, by the kind of the token, besides what none takes."""

    refused: dict[str, str]
    repeats_repetitions: bool = True
    """Whether ``a**`` means something."""
    checks_counts: bool = True
    """Whether braces around numbers are always a count, never themselves."""


_NEITHER = {
    "look_around": "must not look around",
    "backreference": "must not refer back to a group",
    "boundary": "must not match word boundaries",
    "brace": "has a brace that is neither escaped nor a count",
}

XGRAMMAR = Dialect(
    _NEITHER
    | {
        "extension": "has a group of a kind that xgrammar does not know",
        "property": "must not match Unicode properties",
        "trailing": "ends in a backslash",
    },
    repeats_repetitions=False,
)
GUIDANCE = Dialect(_NEITHER)
ANY = Dialect({}, checks_counts=False)


def find_fault(pattern: str, dialect: Dialect) -> str | None:
    """What is wrong with a regular expression, to follow "the expression"; None if nothing is found.

    Sets such as ``[]a]``, which mean different things in different dialects, end the search.
    """
    depth = 0
    before = "nothing"  # or a repeatable "item", a "repeat" or a "lazy" one
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup if token.lastgroup not in ("low", "high") else "count"
        assert kind is not None
        if kind == "unclear":
            return None
        if reason := _ALWAYS.get(kind) or dialect.refused.get(kind):
            return reason
        if kind in ("group", "extension", "look_around"):
            depth += 1
            before = "nothing" if kind == "group" else "item"
        elif kind == "bar":
            before = "nothing"
        elif kind in ("repeat", "count"):
            if reason := _repetition_fault(token, before, dialect):
                return reason
            before = "lazy" if before == "repeat" else "repeat"
        else:
            before = "item"
            depth -= kind == "close"
            if depth < 0:
                return "closes a group that is not open"
    return "has a group that is not closed" if depth else None


def _repetition_fault(token: re.Match[str], before: str, dialect: Dialect) -> str | None:
    if token["count"] and not dialect.checks_counts:
        return None
    if before == "nothing":
        return "repeats nothing"
    if token["high"] and int(token["low"]) > int(token["high"]):
        return "repeats at least more often than at most"
    again = before == "lazy" or (before == "repeat" and token[0] != "?")
    if again and not dialect.repeats_repetitions:
        return "repeats a repetition"
    return None


# outlines ---------------------------------------------------------------------------------------

_parser: Any = importlib.import_module("re._parser")
"""Upstream judges expressions for outlines by Python's own parser, which has no public name."""


def find_outlines_fault(pattern: str) -> str | None:
    """The same for outlines, which must know at the first character where it stands.

    See ``validate_regex_is_buildable`` in ``vllm/v1/structured_output/backend_outlines.py``.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            parsed = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        return f"is not one: {error}"
    except RecursionError:
        return "nests too deeply"
    if any(_is_unsupported(operation, argument) for operation, argument in _everything(parsed)):
        return "must not look around, refer back to a group or match word boundaries"
    if _starts_with_anchor(parsed):
        return "must not begin with an anchor"
    return None


def _everything(parsed: Any) -> Iterator[tuple[str, Any]]:
    """All operations of a parsed expression, by name, with what belongs to each."""
    for operation, argument in parsed:
        yield str(operation), argument
        for inner in _inner(operation, argument):
            yield from _everything(inner)


def _inner(operation: Any, argument: Any) -> list[Any]:
    if str(operation) == "BRANCH":
        return list(argument[1])
    parts = argument if isinstance(argument, tuple) else (argument,)
    return [part for part in parts if isinstance(part, _parser.SubPattern)]


def _is_unsupported(operation: str, argument: Any) -> bool:
    return operation in ("GROUPREF", "GROUPREF_EXISTS", "ASSERT", "ASSERT_NOT") or (
        operation == "AT" and str(argument) in ("AT_BOUNDARY", "AT_NON_BOUNDARY")
    )


def _starts_with_anchor(parsed: Any) -> bool:
    for operation, argument in parsed:
        if str(operation) == "AT":
            return True
        inner = _inner(operation, argument) if str(operation) in _TRANSPARENT else ()
        if any(_starts_with_anchor(part) for part in inner):
            return True
        if str(operation) in _CONSUMERS or any(_consumes(part) for part in inner):
            return False
    return False


_CONSUMERS = ("LITERAL", "IN", "ANY")
_TRANSPARENT = ("BRANCH", "SUBPATTERN", "MAX_REPEAT")


def _consumes(parsed: Any) -> bool:
    """Whether an expression can match a character at all; may be one that is optional."""
    return any(
        str(operation) in _CONSUMERS
        or (_is_entered(operation, argument) and any(map(_consumes, _inner(operation, argument))))
        for operation, argument in parsed
    )


def _is_entered(operation: Any, argument: Any) -> bool:
    return str(operation) in _TRANSPARENT and (str(operation) != "MAX_REPEAT" or argument[1] != 0)
