"""Structured outputs: what is rewritten, what each backend refuses, and what ``auto`` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trio_vllm.client.input_processing import RequestLimits, check_request, fill_defaults
from trio_vllm.client.json_schema import find_dropped_keyword
from trio_vllm.client.structured_outputs import choices_as_grammar, is_likely_lark
from trio_vllm.errors import InvalidFieldError, UnsupportedFieldError
from trio_vllm.protocol import EngineCoreRequest, SamplingParams, StructuredOutputsParams

LIMITS = RequestLimits(max_model_len=16)
BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
TAG = json.dumps(
    {
        "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
        "triggers": ["<a"],
    }
)
FORMAT_TAG = '{"type": "structural_tag", "format": {"type": "any_text"}}'


def request(params: StructuredOutputsParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(structured_outputs=params),
    )


def filled(backend: str = "xgrammar", **fields: Any) -> StructuredOutputsParams:
    params = fill_defaults(request(StructuredOutputsParams(**fields)), 0, backend).sampling_params
    assert params is not None
    assert params.structured_outputs is not None
    return params.structured_outputs


def refusal(backend: str, **fields: Any) -> InvalidFieldError | None:
    """The error of a request for this backend, or of the one that ``auto`` takes."""
    sent = fill_defaults(request(StructuredOutputsParams(**fields)), 0, backend)
    try:
        check_request(sent, LIMITS)
    except InvalidFieldError as error:
        return error
    return None


# Choices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "grammar"),
    [
        (["yes", "no"], 'root ::= "yes" | "no"'),
        ([""], 'root ::= ""'),
        (['say "no"', "a\\b"], r'root ::= "say \"no\"" | "a\\b"'),
        (["a\nb", "\r", "\t"], r'root ::= "a\nb" | "\r" | "\t"'),
        (["\0", "\x1f", "\x7f"], r'root ::= "\u0000" | "\u001f" | "\u007f"'),
        (["ja", "n\u00e9", "\U0001f600"], 'root ::= "ja" | "n\u00e9" | "\U0001f600"'),
    ],
)
def test_choices_are_a_grammar_for_xgrammar(choices: list[str], grammar: str) -> None:
    params = filled(choice=choices)

    assert (params.choice, params.grammar) == (None, grammar)
    assert choices_as_grammar(choices) == grammar
    assert refusal("xgrammar", choice=choices) is None


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_other_backends_know_choices(backend: str) -> None:
    params = filled(backend, choice=["yes"])

    assert (params.choice, params.grammar) == (["yes"], None)


@pytest.mark.parametrize("choice", [[], "ab", [1], ["\ud800"], [None]])
def test_choices_that_are_none_are_refused_as_they_are(choice: Any) -> None:
    error = refuse(filled(choice=choice))

    assert error.field.startswith("sampling_params.structured_outputs.choice")


def test_choices_beside_another_constraint_stay() -> None:
    assert filled(choice=["a"], regex="a").choice == ["a"]


def refuse(params: StructuredOutputsParams) -> InvalidFieldError:
    with pytest.raises(InvalidFieldError) as caught:
        check_request(request(params), LIMITS)
    return caught.value


# Backends ----------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a",
    "choice": ["a"],
    "grammar": 'root ::= "a"',
    "json_object": True,
    "structural_tag": TAG,
}
NOT_DONE = {
    "outlines": {"json_object", "grammar", "structural_tag"},
    "lm-format-enforcer": {"grammar", "structural_tag"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_backend_does_some_kinds_of_constraints(backend: str, kind: str) -> None:
    error = refusal(backend, **{kind: KINDS[kind]})

    assert isinstance(error, UnsupportedFieldError) == (kind in NOT_DONE.get(backend, ()))


REFUSED: list[tuple[str, str, Any]] = [
    ("xgrammar", "regex", "("),
    ("guidance", "regex", "("),
    ("outlines", "regex", "("),
    ("lm-format-enforcer", "regex", "("),
    ("xgrammar", "regex", "(?i)a"),
    ("guidance", "regex", "(?=a)"),
    ("outlines", "regex", "^a$"),
    ("xgrammar", "json", {"type": "nonsense"}),
    ("guidance", "json", {"type": "nonsense"}),
    ("xgrammar", "json", '{"type": '),
    ("guidance", "json", '{"type": '),
    ("outlines", "json", '{"type": '),
    ("lm-format-enforcer", "json", '{"type": '),
    ("xgrammar", "json", "[]"),
    ("xgrammar", "json", "5"),
    ("xgrammar", "json", "false"),
    ("xgrammar", "json", '{"const": NaN}'),
    ("xgrammar", "json", {"const": float("inf")}),
    ("xgrammar", "json", {"const": b"bytes"}),
    ("xgrammar", "json", {"type": "integer", "multipleOf": 1000}),
    ("guidance", "json", {"type": "array", "uniqueItems": True}),
    ("xgrammar", "grammar", 'a ::= "b"'),
    ("guidance", "grammar", 'a ::= "b"'),
    ("xgrammar", "grammar", "hello"),
    ("xgrammar", "structural_tag", "no JSON"),
    ("xgrammar", "structural_tag", "5"),
    ("xgrammar", "structural_tag", "{}"),
    ("xgrammar", "structural_tag", '{"type": "x", "format": {"type": "any_text"}}'),
    ("xgrammar", "structural_tag", '{"format": {}}'),
    ("guidance", "structural_tag", FORMAT_TAG),
    ("guidance", "structural_tag", TAG.replace('["<a"]', "[]")),
    ("guidance", "structural_tag", TAG.replace('["<a"]', "[5]")),
    ("guidance", "structural_tag", TAG.replace('["<a"]', '["<b"]')),
    ("xgrammar", "structural_tag", '{"structures": [5], "triggers": ["a"]}'),
    ("xgrammar", "structural_tag", TAG.replace('"<a>"', "7")),
    ("xgrammar", "structural_tag", TAG.replace('"schema"', '"scheme"')),
]


@pytest.mark.parametrize(("backend", "kind", "value"), REFUSED)
def test_what_the_backend_cannot_compile_is_refused(backend: str, kind: str, value: Any) -> None:
    error = refusal(backend, **{kind: value})

    assert error is not None
    assert error.field == f"sampling_params.structured_outputs.{kind}"


PASSES: list[tuple[str, str, Any]] = [
    ("guidance", "regex", "(?i)a"),
    ("guidance", "json", {"type": "integer", "multipleOf": 1000}),
    ("guidance", "json", {"type": "string", "pattern": "a", "minLength": 1}),
    ("guidance", "json", {"allOf": [{"type": "string"}, {"enum": ["a"]}]}),
    ("outlines", "json", {"type": "integer", "multipleOf": 1000}),
    ("xgrammar", "json", "true"),
    ("xgrammar", "json", {}),
    ("xgrammar", "grammar", 'start: "a"'),
    ("xgrammar", "grammar", '# ::= is how others write it\nstart: "a"'),
    ("guidance", "grammar", 'start: "a"'),
    ("xgrammar", "structural_tag", FORMAT_TAG),
    ("xgrammar", "regex", ""),
]


@pytest.mark.parametrize(("backend", "kind", "value"), PASSES)
def test_what_the_backend_can_do_passes(backend: str, kind: str, value: Any) -> None:
    assert refusal(backend, **{kind: value}) is None


@pytest.mark.parametrize(
    ("grammar", "is_lark"),
    [
        ('start: "a"', True),
        ('root ::= "a"', False),
        ("# root ::= x", True),
        ("// root ::= x\n", True),
        ('a: "b"\nroot ::= a', False),
    ],
)
def test_syntax_of_a_grammar(grammar: str, is_lark: bool) -> None:
    assert is_likely_lark(grammar) == is_lark


# vLLM's verdicts ---------------------------------------------------------------------------------

VERDICTS = json.loads(Path(__file__).with_name("structured_outputs_verdicts.json").read_text())
"""Kind, text, whether each backend's validation in vLLM 0.33.0 takes it, and whether xgrammar would
drop a keyword; from ``smoke/peers/structured_outputs_verdicts.py``."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_refused_that_upstream_takes(backend: str) -> None:
    column = BACKENDS.index(backend)
    taken = [(kind, text) for kind, text, verdict, _ in VERDICTS if verdict[column]]

    refused = [(kind, text) for kind, text in taken if refusal(backend, **{kind: text}) is not None]

    assert len(taken) > 30
    assert refused == []


def test_most_of_what_upstream_refuses_is_refused() -> None:
    missed = [
        (backend, text)
        for kind, text, verdict, _ in VERDICTS
        for backend, is_taken in zip(BACKENDS, verdict, strict=True)
        if not is_taken and refusal(backend, **{kind: text}) is None
    ]
    refusals = sum(verdict.count(False) for _, _, verdict, _ in VERDICTS)

    assert len(missed) < refusals / 5


def test_dropped_keywords_are_those_of_upstream() -> None:
    schemas = [(text, drops) for kind, text, _, drops in VERDICTS if kind == "json"]

    assert [find_dropped_keyword(json.loads(text)) is not None for text, _ in schemas] == [
        drops for _, drops in schemas
    ]
    assert sum(drops for _, drops in schemas) > 5


# auto --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("xgrammar", {"json": {"type": "object"}}),
        ("xgrammar", {"json": '{"type": "object"}'}),
        ("xgrammar", {"choice": ["a"]}),
        ("xgrammar", {"json_object": True}),
        ("xgrammar", {"structural_tag": TAG}),
        ("guidance", {"json": {"type": "integer", "multipleOf": 5}}),
        ("guidance", {"json": '{"items": [{"type": "integer", "multipleOf": 5}]}'}),
        ("guidance", {"regex": "(?i)a"}),
        (
            "outlines",
            {"json": {"type": "object", "patternProperties": {"a": {}}, "properties": {}}},
        ),
    ],
)
def test_auto_takes_the_backend_that_can_do_it(backend: str, fields: dict[str, Any]) -> None:
    params = filled("auto", **fields)

    assert (params.backend, params.backend_was_auto) == (backend, True)
    assert refusal("auto", **fields) is None


@pytest.mark.parametrize("fields", [{"json": "{"}, {"json": "[" * 100_000}, {"regex": 5}, {}])
def test_auto_leaves_junk_for_the_check(fields: dict[str, Any]) -> None:
    params = filled("auto", **fields)

    assert params.backend == "xgrammar"
    assert refuse(params).field.startswith("sampling_params.structured_outputs")


def test_backend_that_the_request_names_stays() -> None:
    given = StructuredOutputsParams(choice=["a"], backend="outlines")

    sent = fill_defaults(request(given), 0, "auto").sampling_params

    assert sent is not None
    assert sent.structured_outputs is given
