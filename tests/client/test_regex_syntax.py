"""Regular expressions that a backend is known not to compile."""

from __future__ import annotations

import pytest

from trio_vllm.client.regex_syntax import ANY, GUIDANCE, XGRAMMAR, find_fault, find_outlines_fault

NOBODY_TAKES = ["(", ")", "a)", "(?:a", "((a)", "[", "[a", "[^a-z", "*", "+a", "a|?", "(*a)"]


@pytest.mark.parametrize("pattern", NOBODY_TAKES)
def test_expression_that_nobody_takes(pattern: str) -> None:
    for dialect in (ANY, GUIDANCE, XGRAMMAR):
        assert find_fault(pattern, dialect) is not None
    assert find_outlines_fault(pattern) is not None


ONLY_SOME_TAKE = [
    # expression, taken by xgrammar, guidance, Python
    ("a{", False, False, True),
    ("{2}", False, False, True),
    ("a{3,1}", False, False, True),
    ("(?=a)", False, False, True),
    ("(?<!a)b", False, False, True),
    (r"(a)\1", False, False, True),
    (r"\bword\b", False, False, True),
    ("(?i)a", False, True, True),
    ("(?P<n>a)", False, True, True),
    (r"\p{L}", False, True, True),
    ("a**", False, True, True),
    ("a???", False, True, True),
    ("a\\", False, True, True),
    ("(?<n>a)", True, True, True),
    ("a*?b+?c??d{1,2}?", True, True, True),
    ("", True, True, True),
    ("|", True, True, True),
    ("^a$", True, True, True),
    (r"\d{3}-[0-9a-f]{2,}", True, True, True),
    (r"\[\(\*\{", True, True, True),
    (r"[()*+?{}|]", True, True, True),
    ("[]a](", True, True, True),  # where the set ends depends on the dialect
    ("[[:alpha:]]", True, True, True),
]


@pytest.mark.parametrize(("pattern", "xgrammar", "guidance", "python"), ONLY_SOME_TAKE)
def test_expression_that_some_take(
    pattern: str, xgrammar: bool, guidance: bool, python: bool
) -> None:
    found = [find_fault(pattern, dialect) is None for dialect in (XGRAMMAR, GUIDANCE, ANY)]

    assert found == [xgrammar, guidance, python]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?=a)b", "look around"),
        (r"(a)\1", "look around"),
        (r"(a)(?(1)b|c)", "look around"),
        (r"a\b", "look around"),
        (r"(a|\Bb)", "look around"),
        ("^a", "anchor"),
        ("(^a|b)", "anchor"),
        ("(^)*a", "anchor"),
        ("(?:)^", "anchor"),
        ("(a{0})^", "anchor"),
        ("a{99999999999}", "is not one"),
        ("(" * 5000 + ")" * 5000, "nests too deeply"),
    ],
)
def test_expression_that_outlines_does_not_take(pattern: str, said: str) -> None:
    assert said in (find_outlines_fault(pattern) or "")


@pytest.mark.parametrize(
    "pattern", ["", "a", "a^", "a$", "(b|c)^", "a*^", "a{0}^", "[[:alpha:]]", r"\d+"]
)
def test_expression_that_outlines_takes(pattern: str) -> None:
    assert find_outlines_fault(pattern) is None
