"""Checks the tables of faults in ``tests/README.md``: they are complete, and the tests they name exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")

FAULTS = """SIGKILL, SIGSTOP, farewell, cut of the handshake, cut of the input, cut of the output,
cut of the coordinator's broadcasts, cut of the notices to the coordinator, half-open handshake,
half-open input, half-open output, half-open broadcasts, half-open notices, restart on the same port,
stranger, garbage, oversize, slow reader, slow writer, clock jump, full disk, descriptors gone"""
PHASES = """HELLO, INIT, registration, READY, idle, first token, mid-stream, utility call, abort,
shutdown"""


def words(text: str) -> list[str]:
    return [word.strip() for word in text.replace("\n", " ").split(",")]


def table(title: str) -> list[list[str]]:
    """The cells of the first table below a heading, row by row, without the line of dashes."""
    section = README.partition(f"\n### {title}\n")[2]
    rows = [line for line in section.partition("\n### ")[0].splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in rows if "---" not in row
    ]


PHASE_TABLES = [
    "Our client, with mock engines and scripted ones",
    "Mock engines, with our client and scripted frontends",
]
NAMED = re.findall(r"`((?:\w|/|\.)+\.py)::(\w+)`", README)
LETTERS = dict(re.findall(r"^\* `([A-Z][a-z])` `([^`]+)`$", README, re.MULTILINE))
REASONS = set(re.findall(r"^\* `(-\d)` ", README, re.MULTILINE))


@functools.cache
def functions(path: Path) -> set[str]:
    """The functions of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("title", PHASE_TABLES)
def test_every_fault_has_a_row_and_every_phase_a_column(title: str) -> None:
    head, *rows = table(title)

    assert head[1:] == words(PHASES)
    assert [row[0] for row in rows] == words(FAULTS)
    assert {len(row) for row in rows} == {len(head)}


def test_real_peers_have_a_column_each() -> None:
    head, *rows = table("Real peers")

    assert len(head) == 4
    assert {len(row) for row in rows} == {4}


@pytest.mark.parametrize("title", [*PHASE_TABLES, "Real peers"])
def test_every_cell_is_a_test_or_a_reason(title: str) -> None:
    _, *rows = table(title)
    cells = [cell.split() for row in rows for cell in row[1:]]

    assert all(cells)
    assert {word for cell in cells for word in cell} - LETTERS.keys() - REASONS == set()
    assert all(cell[0] not in REASONS or len(cell) == 1 for cell in cells)


def test_every_letter_and_reason_is_used() -> None:
    titles = [*PHASE_TABLES, "Real peers"]
    used = {
        word for title in titles for row in table(title) for cell in row for word in cell.split()
    }

    assert {*LETTERS, *REASONS} - used == set()


def test_what_is_named_exists() -> None:
    assert len(NAMED) > len(LETTERS) > 50
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (FOLDER / path).exists() or name not in functions(FOLDER / path)
    ]
    assert missing == []


def test_nothing_is_named_in_another_form() -> None:
    assert len(re.findall(r"\.py::", README)) == len(NAMED)
