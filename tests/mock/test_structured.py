"""Structured outputs of the mock match what is asked for, with a small tokenizer made here."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.mock.driver import Driver, drive

from trio_vllm import ConfigurationError, GenerateRequest, SamplingParams, StructuredOutputsParams
from trio_vllm.cli.mock_engine import main
from trio_vllm.mock import MockEngineConfig
from trio_vllm.protocol import FinishReason
from trio_vllm.testing import mock_llm

HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None
needs_llguidance = pytest.mark.skipif(not HAS_LLGUIDANCE, reason="needs the extra structured")

WORDS = ["hello", "Ġworld", "Paris", "42", '",', '{"', "<tool>"]
"""Tokens besides those of single bytes; ``Ġ`` is a space in such files."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


def byte_letters() -> list[str]:
    """The letters that stand for the 256 bytes in a byte-level vocabulary."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer; its end-of-text token is the last one."""
    vocabulary = [*byte_letters(), *WORDS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": len(vocabulary), "content": "<|end|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(vocabulary)},
            "merges": [],
        },
    }
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


EOS = 256 + len(WORDS)


def text_of(tokens: list[int]) -> str:
    """What tokens of that tokenizer say."""
    texts = [*byte_letters(), *WORDS]
    bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return bytes(bytes_of[letter] for token in tokens for letter in texts[token]).decode()


def ask(driver: Driver, request_id: str = "a", max_tokens: int = 300, **params: Any) -> str:
    """What a request with these structured outputs gets, which must end by itself."""
    params = {"_eos_token_id": EOS, "structured_outputs": params}
    driver.add(request_id, max_tokens, params=params)
    driver.run()
    assert driver.finish_reason(request_id) is FinishReason.STOP, driver.outputs(request_id)[-1]
    *tokens, last = driver.tokens(request_id)
    assert last == EOS
    return text_of(tokens)


def check(found: Any) -> None:
    """Hold a value against the schema."""
    assert found.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert isinstance(found["name"], str)
    assert isinstance(found["count"], int)
    assert set(found["tags"]) <= {"red", "blue"}


@needs_llguidance
@pytest.mark.parametrize("schedule", [{}, {"max_num_seqs": 8}, {"num_speculative_tokens": 3}])
def test_answers_match_a_schema(folder: Path, schedule: dict[str, Any]) -> None:
    """All of many, and they differ."""
    driver = drive(tokenizer=str(folder), **schedule)
    answers = [ask(driver, f"r{i}", json=SCHEMA) for i in range(20)]
    for answer in answers:
        check(json.loads(answer))
    assert len(set(answers)) == 20


@needs_llguidance
def test_answers_match_other_constraints(folder: Path) -> None:
    """Regular expression, choice, grammars of both kinds, any object, structural tags."""
    driver = drive(tokenizer=str(folder))
    for i in range(10):
        assert re.fullmatch(
            r"[a-z]{3,8}-[0-9]+!", ask(driver, f"r{i}", regex=r"[a-z]{3,8}-[0-9]+!")
        )
        assert ask(driver, f"c{i}", choice=["yes", "no"]) in {"yes", "no"}
        assert re.fullmatch("x[0-9]+y", ask(driver, f"g{i}", grammar='root ::= "x" [0-9]+ "y"'))
        lark = 'start: "a" NUMBER\nNUMBER: /[0-9]+/'
        assert re.fullmatch("a[0-9]+", ask(driver, f"l{i}", grammar=lark))
        assert isinstance(json.loads(ask(driver, f"o{i}", json_object=True)), dict)
    assert {ask(driver, f"d{i}", choice=["yes", "no"]) for i in range(10)} == {"yes", "no"}


@needs_llguidance
def test_a_structural_tag_is_used(folder: Path) -> None:
    """As by a model that calls a tool."""
    tag = {"begin": "<function=get>", "schema": SCHEMA, "end": "</function>"}
    tags = json.dumps({"structures": [tag], "triggers": ["<function="]})
    driver = drive(tokenizer=str(folder))
    for i in range(5):
        found = re.match(
            "<function=get>(.*?)</function>", ask(driver, f"r{i}", structural_tag=tags)
        )
        assert found is not None
        check(json.loads(found[1]))


SCHEMA_TAG = {"type": "json_schema", "json_schema": SCHEMA}


@needs_llguidance
@pytest.mark.parametrize(
    ("tree", "pattern"),
    [
        (SCHEMA_TAG, r"\{.*\}"),
        ({"type": "const_string", "value": 'a "b"'}, 'a "b"'),
        ({"type": "regex", "pattern": "[0-9]/x"}, "[0-9]/x"),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "say "}, SCHEMA_TAG],
            },
            r"say \{.*\}",
        ),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": v} for v in "xy"]},
            "x|y",
        ),
        ({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["!"]}, "<t>.*!"),
        (
            {"type": "triggered_tags", "tags": [{"begin": "<", "content": SCHEMA_TAG, "end": ">"}]},
            r"<\{.*\}>",
        ),
    ],
)
def test_structural_tags_of_the_other_form_match(
    folder: Path, tree: dict[str, Any], pattern: str
) -> None:
    """A tree of parts."""
    driver = drive(tokenizer=str(folder))
    tag = json.dumps({"type": "structural_tag", "format": tree})
    for i in range(5):
        answer = ask(driver, f"r{i}", structural_tag=tag)
        assert re.fullmatch(pattern, answer, re.DOTALL), answer


@needs_llguidance
def test_special_tokens_of_a_tag_are_tokens(folder: Path) -> None:
    """Not what their names are spelled with."""
    content = {"type": "const_string", "value": "hi"}
    tree = {"type": "tag", "begin": "<|end|>", "content": content, "end": ""}
    driver = drive(tokenizer=str(folder))
    params = {"structured_outputs": {"structural_tag": json.dumps({"format": tree})}}
    driver.add("a", 100, params=params)
    driver.run()
    first, *others = driver.tokens("a")
    assert first == EOS
    assert text_of(others) == "hi"


@needs_llguidance
def test_whitespace_can_be_left_out(folder: Path) -> None:
    """Outside of strings."""
    driver = drive(tokenizer=str(folder))
    answer = ask(driver, json={"const": {"a": [1, 2]}}, disable_any_whitespace=True)
    assert answer == '{"a":[1,2]}'


@needs_llguidance
def test_max_tokens_cut_an_answer(folder: Path) -> None:
    """As of a real engine, it is not whole then."""
    driver = drive(tokenizer=str(folder))
    driver.add("a", 5, params={"structured_outputs": {"json": SCHEMA}})
    driver.run()
    assert driver.finish_reason("a") is FinishReason.LENGTH
    assert len(driver.tokens("a")) == 5
    whole = ask(drive(tokenizer=str(folder)), json=SCHEMA)
    assert whole.startswith(text_of(driver.tokens("a")))


@needs_llguidance
def test_what_is_no_grammar_is_refused(folder: Path) -> None:
    """With the whole reason of the library, in one line."""
    driver = drive(tokenizer=str(folder))
    driver.add("a", params={"structured_outputs": {"regex": "("}})
    driver.add("b", params={"structured_outputs": {"structural_tag": '{"format": {}}'}})
    schema = {"type": "string", "pattern": "(?=a)"}
    driver.add("c", params={"structured_outputs": {"json": schema}})
    for request_id, reason in (
        ("a", "unclosed group"),
        ("b", "no structural tag"),
        (
            "c",
            "(?=a) ^^^ error: look-around, including look-ahead and look-behind, is not supported",
        ),
    ):
        (output,) = driver.outputs(request_id)
        assert output.finish_reason is FinishReason.ERROR
        assert output.error is not None
        assert reason in output.error.message
        assert "\n" not in output.error.message


@needs_llguidance
def test_without_constraints_nothing_changes(folder: Path, tmp_path: Path) -> None:
    """Nor if a file has the answer, or if there is no tokenizer."""
    structured = {"structured_outputs": {"choice": ["yes"]}}
    tokens = []
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"tokenizer": str(folder)}, {}),
        ({}, {}),
        ({}, structured),
        ({"tokenizer": str(folder)}, structured),
    ]
    for config, params in cases:
        driver = drive(**config)
        driver.add("a", params=params)
        driver.run()
        tokens.append(driver.tokens("a"))
    assert tokens[0] == tokens[1] == tokens[2] != tokens[3]

    path = tmp_path / "answers"
    path.write_text('{"tokens": [7]}')
    driver = drive(tokenizer=str(folder), output=str(path))
    for request_id in "ab":
        driver.add(request_id, params=structured)
        driver.run()
    assert driver.tokens("a") == [7]
    assert text_of(driver.tokens("b")) == "yes"


@needs_llguidance
async def test_an_answer_behind_our_client_parses(folder: Path) -> None:
    """From the request of a user to the text."""
    params = SamplingParams(
        max_tokens=300,
        eos_token_id=EOS,
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
    )
    async with mock_llm(MockEngineConfig(tokenizer=str(folder))) as mock:
        output = await mock.llm.generate(
            GenerateRequest(prompt_token_ids=[1, 2, 3], sampling_params=params)
        )
    assert output.token_ids[-1] == EOS
    check(json.loads(text_of(list(output.token_ids[:-1]))))


@needs_llguidance
def test_a_file_of_answers_may_have_texts(folder: Path, tmp_path: Path) -> None:
    """In the tokens of the model, and its end of text follows."""
    path = tmp_path / "answers"
    path.write_text(json.dumps({"text": "hello world, {}"}))
    driver = drive(tokenizer=str(folder), output=str(path))
    driver.add("a", 100, params={"_eos_token_id": EOS})
    driver.run()
    *tokens, last = driver.tokens("a")
    assert text_of(tokens) == "hello world, {}"
    assert last == EOS


def test_without_the_extra_there_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"tokenizer takes .*trio-vllm\[structured\]"):
        MockEngineConfig(tokenizer=str(folder))


def test_a_folder_without_a_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    with pytest.raises(ConfigurationError, match=r"a folder with a tokenizer\.json"):
        MockEngineConfig(tokenizer=str(tmp_path))


@needs_llguidance
def test_a_tokenizer_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    """When the engine is made."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        drive(tokenizer=str(tmp_path))


@needs_llguidance
def test_the_command_reads_the_tokenizer_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for a frontend to find that it cannot."""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json cannot be read" in capsys.readouterr().err
