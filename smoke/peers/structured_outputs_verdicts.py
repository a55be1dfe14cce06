"""Compare what we refuse of structured outputs with what vLLM's own validation refuses.

    python smoke/peers/structured_outputs_verdicts.py PYTHON_OF_VLLM [--count N] [--seed S] [--save FILE]

Random schemas, expressions, grammars and tags are judged on both sides. Ours knows no grammar
compiler and may let pass what theirs refuses, but never the other way round; which keywords xgrammar
drops must agree exactly. ``--save`` writes a selection, with vLLM's verdicts, as data for tests.
"""

import argparse
import json
import random
import re
import subprocess
import sys
from typing import Any

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")


# Drawn -------------------------------------------------------------------------------------------


def draw_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema, mostly one that makes sense."""
    if depth > 3 or rng.random() < 0.05:
        return rng.choice([{}, True, {"type": "string"}, {"type": "nonsense"}])
    types = [
        "string",
        "integer",
        "number",
        "array",
        "object",
        "boolean",
        "null",
        ["string", "null"],
    ]
    schema: dict[str, Any] = {"type": rng.choice(types)} if rng.random() < 0.8 else {}
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])):
        keyword = rng.choice(list(KEYWORDS))
        schema[keyword] = KEYWORDS[keyword](rng, depth + 1)
    return schema


def value(*values: Any) -> Any:
    return lambda rng, depth: rng.choice(values)


def schemas(least: int, most: int) -> Any:
    return lambda rng, depth: [draw_schema(rng, depth) for _ in range(rng.randint(least, most))]


def properties(rng: random.Random, depth: int) -> Any:
    names = ("a", "b", "type", "format", "pattern")
    return {rng.choice(names): draw_schema(rng, depth) for _ in range(rng.randint(0, 3))}


KEYWORDS: dict[str, Any] = {
    "type": value("nonsense", 5, [], "string"),
    "multipleOf": value(3),
    "uniqueItems": value(True, False),
    "contains": draw_schema,
    "minContains": value(1),
    "maxContains": value(2),
    "format": value("email", "foo", "date", "regex", "uri-reference", "uuid"),
    "pattern": value("a+", "(", "[0-9]+", 5),
    "minLength": value(-1, 0, 2, 4),
    "maxLength": value(0, 3),
    "propertyNames": value({"pattern": "a"}, {"pattern": "a", "minLength": 1}, True),
    "patternProperties": value({"a": {}}, {"a": {}, "b": {}}, {}),
    "properties": properties,
    "unevaluatedProperties": value(True, False, {}),
    "additionalProperties": draw_schema,
    "items": draw_schema,
    "minItems": value(0, 1, 5, "a"),
    "maxItems": value(0, 4),
    "minimum": value(0, 5, 1.5, None),
    "maximum": value(3, 9.5, -1),
    "minProperties": value(1, 2, "a"),
    "maxProperties": value(1),
    "allOf": schemas(0, 2),
    "anyOf": schemas(1, 2),
    "oneOf": schemas(1, 1),
    "enum": value([1, "a"], [], 5, [{"type": "array", "contains": 1}]),
    "const": value(1, {"type": "string", "format": "x"}),
    "not": value({}),
    "title": value("x"),
    "default": value({"type": "number", "multipleOf": 1}),
}

ATOMS = re.findall(
    r"\S+",
    r"a b ( ) (?: [a-z] [^a] [ ] \d \ \b \1 * + ? {2} {1,3} {3,1} { } | . ^ $ (?=a) (?<n> (?P<n> (?i)"
    r" \p{L} - \. []a] [[:alpha:]] \u0041 \x41 (?!a) \q [\d-] (a) (ab|c) é {,2} {2,} a b a b",
)

PIECES = (
    "root ::= ", '"a"', " | ", "b", "\nb ::= ", "start: ", "\n", "root", "::=", " # start", '"open', "A: /x/",
)  # fmt: skip


def draw_tag(rng: random.Random) -> Any:
    structure = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}
    tag: dict[str, Any] = {"structures": [structure], "triggers": ["<a"]}
    for key in rng.sample(["structures", "triggers", "format", "type"], rng.randint(0, 2)):
        tag[key] = rng.choice(
            [[], 5, [{}], ["<b"], ["<a"], {"type": "any_text"}, "structural_tag", [5]]
        )
        if rng.random() < 0.3:
            del tag[key]
    return tag


def draw(rng: random.Random) -> list[str]:
    """A kind of constraint, and its text."""
    kind = rng.choice(["json", "regex", "grammar", "structural_tag"])
    if kind == "json":
        return [kind, json.dumps(draw_schema(rng))]
    if kind == "structural_tag":
        return [kind, json.dumps(draw_tag(rng))]
    parts = ATOMS if kind == "regex" else PIECES
    return [kind, "".join(rng.choice(parts) for _ in range(rng.randint(1, 7)))]


# Judged ------------------------------------------------------------------------------------------


def judge_as_vllm() -> None:
    """Runs in vLLM's Python: cases come in as JSON, verdicts go out."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import (
        backend_guidance,
        backend_lm_format_enforcer,
        backend_outlines,
        backend_xgrammar,
    )

    judges = (
        backend_xgrammar.validate_xgrammar_grammar,
        backend_guidance.validate_guidance_grammar,
        backend_outlines.validate_structured_output_request_outlines,
        backend_lm_format_enforcer.validate_structured_output_request_lm_format_enforcer,
    )

    def takes(judge: Any, kind: str, text: str) -> bool:
        try:
            judge(SamplingParams(structured_outputs=StructuredOutputsParams(**{kind: text})))
        except Exception:
            return False
        return True

    def drops(text: str) -> bool:
        return bool(backend_xgrammar.has_xgrammar_unsupported_json_features(json.loads(text)))

    for line in sys.stdin:
        kind, text = json.loads(line)
        verdict = [takes(judge, kind, text) for judge in judges]
        print("VERDICT", json.dumps([kind, text, verdict, kind == "json" and drops(text)]))


def our_verdict(kind: str, text: str) -> tuple[list[bool], bool]:
    from trio_vllm.client.json_schema import find_dropped_keyword
    from trio_vllm.client.structured_outputs import check
    from trio_vllm.protocol import CodecError, StructuredOutputsParams

    def takes(backend: str) -> bool:
        try:
            check(StructuredOutputsParams(backend=backend, **{kind: text}))  # type: ignore[arg-type]
        except CodecError:
            return False
        return True

    dropped = kind == "json" and find_dropped_keyword(json.loads(text)) is not None
    return [takes(backend) for backend in BACKENDS], dropped


def compare(judged: list[list[Any]]) -> int:
    """Print where we differ in a way that we must not; gives how often."""
    faults = 0
    for kind, text, theirs, drops in judged:
        ours, we_drop = our_verdict(kind, text)
        strict = [
            backend
            for backend, we_take, they_take in zip(BACKENDS, ours, theirs, strict=True)
            if they_take and not we_take
        ]
        # A number is no schema, which lm-format-enforcer finds out later.
        if strict and not (strict == ["lm-format-enforcer"] and not text.startswith("{")):
            print(f"refused only by us for {', '.join(strict)}: {kind} {text}")
            faults += 1
        if drops != we_drop:
            print(f"xgrammar drops a keyword: {drops}, for us: {we_drop}: {text}")
            faults += 1
    return faults


def save(judged: list[list[Any]], path: str) -> None:
    """Write a few hundred short cases, and some more of dropped keywords, each once."""
    distinct = {(kind, text): case for case in judged for kind, text in [case[:2]]}
    short = sorted(distinct.values(), key=lambda case: (case[0], len(case[1]), case[1]))
    short = [case for case in short if len(case[1]) < 90 and case[0] != "grammar"]
    dropped = [case for case in distinct.values() if case[3] and len(case[1]) < 200][:30]
    chosen = [*short[:: max(1, len(short) // 250)], *dropped]
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in chosen) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="vLLM's interpreter")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default=None)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cases = "".join(json.dumps(draw(rng)) + "\n" for _ in range(options.count))
    process = subprocess.run(
        [options.python, __file__, "--judge"],
        input=cases,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("VERDICT ")]
    judged = [json.loads(line.removeprefix("VERDICT ")) for line in lines]
    if len(judged) != options.count:
        raise SystemExit(f"{len(judged)} verdicts of {options.count}")
    if options.save:
        save(judged, options.save)
    if faults := compare(judged):
        raise SystemExit(f"{faults} of {len(judged)} differ")
    print(f"{len(judged)} judged, none refused by us alone")


if __name__ == "__main__":
    if sys.argv[1:] == ["--judge"]:
        judge_as_vllm()
    else:
        main()
