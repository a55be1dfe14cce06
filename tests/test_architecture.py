"""What ARCHITECTURE.md and CONTRIBUTING.md name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "trio_vllm"

DOCUMENTS = ["ARCHITECTURE.md", "CONTRIBUTING.md"]
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.]+(/[\w.]*)+|\w+\.(py|md)")
NAME = re.compile(r"_?[A-Z]\w*[a-z]\w*(\.\w+)?")


def quoted(document: str, pattern: re.Pattern[str]) -> list[str]:
    """What stands in backticks and has this form."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return sorted({word for word in QUOTED.findall(text) if pattern.fullmatch(word)})


def defined_names() -> set[str]:
    """Classes of the package, and their members as ``Class.member``."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
                members = (item for item in node.body if hasattr(item, "name"))
                names |= {f"{node.name}.{member.name}" for member in members}
    return names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document: str) -> None:
    """From the root of the project, or from the package."""
    paths = quoted(document, PATH)

    assert [path for path in paths if not any((at / path).exists() for at in (ROOT, SOURCE))] == []


def test_paths_are_found() -> None:
    """The check above sees what it is there for."""
    assert len(quoted("ARCHITECTURE.md", PATH)) > 40


def test_every_class_exists() -> None:
    """And so do the methods that are named with it."""
    names = quoted("ARCHITECTURE.md", NAME)

    assert "FrontendCore.submit" in names
    assert set(names) - defined_names() == set()
