"""`install_lazy_importer`: imports each public name of a package when it is first used."""

from __future__ import annotations

import sys
from importlib import import_module

from trio_vllm._help import add_field_help


def install_lazy_importer(package: str) -> bool:
    """Let ``package`` import its names when they are asked for; False if its source cannot be read.

    The names are those that its ``__init__`` imports as ``from module import Name as Name``, one a
    statement: the statements that type checkers read say what is imported from where, so that no second
    list can differ from them.
    """
    module = sys.modules[package]
    if (source := _read_source(package)) is None:
        return False
    homes = _find_homes(source)

    def import_name(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        add_field_help(value)
        setattr(module, name, value)  # the next use does not come here
        return value

    vars(module).update(
        __getattr__=import_name, __dir__=lambda: sorted({*vars(module), *homes}), __all__=[*homes]
    )
    return True


def _read_source(package: str) -> str | None:
    """Read the package's ``__init__``, from wherever it was loaded.

    ``loader.get_source`` would do, but it imports ``tokenize`` and with it ``re``.
    """
    spec = sys.modules[package].__spec__
    get_data = getattr(None if spec is None else spec.loader, "get_data", None)
    if spec is None or get_data is None:
        return None
    try:
        source: bytes = get_data(spec.origin)
    except OSError:
        return None
    return source.decode()


def _find_homes(source: str) -> dict[str, str]:
    """Map each name to the module it comes from; to parse this with ``ast`` would take 5 ms."""
    homes, home = {}, ""
    for line in source.splitlines():
        match line.split():
            case ["from", module, "import", name, "as", alias] if alias == name:
                homes[name] = module
            case ["from", home, "import", "("]:
                pass  # of a long name, which stands in the next line
            case [name, "as", alias] if home and alias == f"{name},":
                homes[name] = home
    return homes
