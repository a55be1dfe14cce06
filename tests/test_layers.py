"""Who may import whom, checked on the syntax tree.

An arrow that is not in the table needs an argument, not only a new entry.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

PACKAGE = "trio_vllm"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

WAITING = frozenset({"asyncio", "select", "selectors", "socket", "subprocess", "threading"})
HIDDEN_INPUTS = frozenset({"datetime", "logging", "os", "random", "secrets", "time", "uuid"})
IMPURE = WAITING - {"asyncio"} | HIDDEN_INPUTS
"""What of the standard library a sans-IO module has no business with, and others have."""

WATCHED = WAITING | HIDDEN_INPUTS | {"anyio", "cyclopts", "ormsgpack", "rich", "trio", "zmq"}
"""Top-level names of others that only some layers may import; all else is free."""

PUBLIC_NAMES = "__init__"
"""The layer that ``import trio_vllm`` and ``from trio_vllm import Llm`` reach for."""


@attrs.frozen
class Allowed:
    """What a layer may import, besides itself."""

    ours: frozenset[str]
    watched: frozenset[str] = frozenset()


PUBLIC_PACKAGES = frozenset({"client", "errors", "llm", "mock", "protocol", "spawn"})
"""What the commands use, like any other program."""

FOR_COMMANDS = frozenset({"_help", "concurrency", "endpoint", "limits", "monitor", "processes"})
"""And what is shared with them."""

BELOW_CLIENT = frozenset({"transport", "protocol", "endpoint", "errors", "concurrency", "limits"})

FOR_ALL = frozenset({"values"})
"""What any layer may import: how classes are declared."""

RULES = {
    "values": Allowed(frozenset()),
    "errors": Allowed(frozenset()),
    "limits": Allowed(frozenset()),
    # The form of addresses, for the commands too, which show their help without zmq.
    "endpoint": Allowed(frozenset({"errors"}), frozenset({"os"})),
    # Logs what a crashed task raised beside the failure that is kept.
    "concurrency": Allowed(frozenset({"errors"}), frozenset({"logging", "trio"})),
    # The wire without IO: frames in, values out, so that any reader of frames can use it.
    "protocol": Allowed(frozenset({"errors", "limits"}), frozenset({"ormsgpack"})),
    # The only layer that knows ØMQ: whatever else carries frames needs no other to change.
    "transport": Allowed(BELOW_CLIENT - {"transport"}, IMPURE | {"trio", "zmq"}),
    "transport/__init__": Allowed(frozenset({"_lazy"})),
    "client": Allowed(BELOW_CLIENT, IMPURE | {"trio"}),
    # Knows engines by the client alone, so it cannot depend on how they are connected.
    "llm": Allowed(BELOW_CLIENT - {"transport"} | {"client"}, IMPURE | {"trio"}),
    # An engine core is a function of messages and the time; two modules run it, over any transport.
    "mock": Allowed(frozenset({"protocol", "endpoint", "errors", "limits"}), frozenset({"random"})),
    # The command shows its help without numpy and trio.
    "mock/__init__": Allowed(frozenset({"_lazy"})),
    "mock/publishing": Allowed(BELOW_CLIENT, IMPURE | {"trio"}),
    "mock/runner": Allowed(BELOW_CLIENT, IMPURE | {"trio"}),
    "mock/serve": Allowed(BELOW_CLIENT, IMPURE | {"trio"}),
    "mock/transfers": Allowed(BELOW_CLIENT, IMPURE | {"trio"}),
    # What starts processes knows nothing of engines, so that the commands can use it for their own.
    "processes": Allowed(frozenset({"concurrency"}), IMPURE | {"trio"}),
    # Beside the client, not in it: it makes an `EngineSource`, which is all that a client asks for.
    "spawn": Allowed(BELOW_CLIENT - {"protocol"} | {"processes"}, IMPURE | {"trio"}),
    # A double of either side: it puts itself between an engine or a client and their channels.
    "testing": Allowed(BELOW_CLIENT | {"client", "llm", "mock"}, IMPURE | {"trio"}),
    "testing/__init__": Allowed(frozenset({"_lazy"})),
    # A facade over the facade; nothing else may import asyncio.
    "asyncio": Allowed(
        frozenset({"concurrency", "errors", "llm", "spawn"}), frozenset({"asyncio", "trio"})
    ),
    # Beside the facade, which so needs no terminal.
    "monitor": Allowed(frozenset({"llm", "errors", "concurrency"}), frozenset({"rich", "trio"})),
    # A user like any other: public packages only, besides the rules for background tasks.
    "cli": Allowed(
        frozenset({PUBLIC_NAMES, *PUBLIC_PACKAGES, *FOR_COMMANDS}),
        IMPURE | {"cyclopts", "rich", "trio"},
    ),
    PUBLIC_NAMES: Allowed(frozenset({"_lazy", "llm", "client", "protocol", "errors", "spawn"})),
    "_lazy": Allowed(frozenset({"_help"})),
    "_help": Allowed(frozenset()),
    "__main__": Allowed(frozenset({"cli"})),
}
"""By layer, that is by the name of a folder or module at the root; a longer path wins."""


@attrs.frozen
class Imported:
    """One module that a file imports, and the name it takes out of it, if any."""

    module: tuple[str, ...]
    name: str = ""


def imports(path: Path, root: Path) -> Iterator[Imported]:
    """What the file at ``path`` imports, at its top or further in.

    Raises:
      ImportError: a relative import leaves the package at ``root``.
    """
    package = (PACKAGE, *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package):
                raise ImportError(f"line {node.lineno}: the import leaves {PACKAGE}")
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                if module == (PACKAGE,) and alias.name in RULES:
                    yield Imported((PACKAGE, alias.name))
                else:
                    yield Imported(module, alias.name)


def violations(path: Path, root: Path) -> Iterator[str]:
    """What is wrong with the imports of the file at ``path``."""
    place = path.relative_to(root).with_suffix("")
    layer = place.parts[0]
    keys = (folder.as_posix() for folder in (place, *place.parents))
    rule = next((RULES[key] for key in keys if key in RULES), None)
    if rule is None:
        yield f"{layer} has no rule"
        return
    for imported in imports(path, root):
        top, *inner = imported.module
        if top != PACKAGE:
            if top in WATCHED - rule.watched:
                yield f"{place} may not import {top}"
            continue
        target = inner[0] if inner else PUBLIC_NAMES
        if target == layer or target in FOR_ALL:
            continue
        if target not in rule.ours:
            yield f"{place} may not import {target}"
        elif len(inner) > 1 or imported.name.startswith("_"):
            yield f"{place} reaches into {target}"


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix()
)
def test_imports_point_downwards(path: Path) -> None:
    """No file of the package imports what its layer may not."""
    assert list(violations(path, SOURCE)) == []


@pytest.mark.parametrize(
    ("place", "line", "violation"),
    [
        ("protocol/_x.py", "import trio", "protocol/_x may not import trio"),
        ("protocol/_x.py", "import os.path as p", "protocol/_x may not import os"),
        ("protocol/_x.py", "def f():\n from time import time", "protocol/_x may not import time"),
        ("protocol/_x.py", "from ..client import A", "protocol/_x may not import client"),
        ("protocol/_x.py", "from .. import concurrency", "protocol/_x may not import concurrency"),
        ("protocol/deep/_x.py", "import random", "protocol/deep/_x may not import random"),
        ("client/_x.py", "import zmq.asyncio", "client/_x may not import zmq"),
        ("client/_x.py", "import asyncio", "client/_x may not import asyncio"),
        ("client/_x.py", "from trio_vllm.mock import A", "client/_x may not import mock"),
        ("client/_x.py", "from trio_vllm import A", "client/_x may not import __init__"),
        ("client/_x.py", "import trio_vllm", "client/_x may not import __init__"),
        ("client/_x.py", "from trio_vllm.protocol._y import A", "client/_x reaches into protocol"),
        ("client/_x.py", "from ..protocol import _y", "client/_x reaches into protocol"),
        ("client/_x.py", "import trio_vllm.protocol._y", "client/_x reaches into protocol"),
        ("llm/_x.py", "from trio_vllm import mock", "llm/_x may not import mock"),
        ("llm/_x.py", "from trio_vllm import transport", "llm/_x may not import transport"),
        ("mock/_x.py", "from trio_vllm.client import A", "mock/_x may not import client"),
        ("mock/_x.py", "from ..llm import A", "mock/_x may not import llm"),
        ("mock/engine.py", "import trio", "mock/engine may not import trio"),
        ("mock/engine.py", "import time", "mock/engine may not import time"),
        ("mock/runner.py", "import zmq", "mock/runner may not import zmq"),
        ("transport/_x.py", "from trio_vllm.client import A", "transport/_x may not import client"),
        ("cli/_x.py", "from trio_vllm.transport import A", "cli/_x may not import transport"),
        ("cli/_x.py", "from trio_vllm.mock._y import A", "cli/_x reaches into mock"),
        ("__init__.py", "from .cli import A", "__init__ may not import cli"),
        ("__init__.py", "from .mock import A", "__init__ may not import mock"),
        ("errors.py", "from .protocol import A", "errors may not import protocol"),
        ("_stray.py", "", "_stray has no rule"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, place: str, line: str, violation: str) -> None:
    """The check above sees what it is there for."""
    assert list(violations(plant(tmp_path, place, line), tmp_path)) == [violation]


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("protocol/_x.py", "from ._y import _z"),
        ("protocol/_x.py", "from ..errors import DecodeError"),
        ("protocol/_x.py", "import ormsgpack, numpy, attrs, math"),
        ("protocol/deep/_x.py", "from .._y import A"),
        ("transport/_x.py", "import zmq"),
        ("client/_x.py", "from trio_vllm.client._y import A"),
        ("client/_x.py", "from trio_vllm.protocol import A"),
        ("client/_x.py", "from trio_vllm import errors, protocol"),
        ("mock/_x.py", "from .engine import A"),
        ("cli/_x.py", "import trio_vllm\nfrom trio_vllm import A\nfrom trio_vllm.mock import B"),
        ("__main__.py", "from trio_vllm.cli import main"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, line: str) -> None:
    """Either way to write an import downwards is fine."""
    assert list(violations(plant(tmp_path, place, line), tmp_path)) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("errors.py", "from .. import os"),
        ("client/_x.py", "from ...other import A"),
    ],
)
def test_a_relative_import_does_not_leave_the_package(
    tmp_path: Path, place: str, line: str
) -> None:
    """Two dots at the root lead out of the package, three do one folder further in."""
    path = plant(tmp_path, place, line)

    with pytest.raises(ImportError, match="line 1: the import leaves trio_vllm"):
        list(violations(path, tmp_path))


def plant(root: Path, place: str, source: str) -> Path:
    """Write a module into a package at ``root``."""
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path
