"""`FieldHelp`: lets ``help()`` of a class of values say what each field means."""

from __future__ import annotations

import sys


class FieldHelp:
    """The docstring of an attrs class, followed by those of its fields.

    Python keeps no docstrings of fields, so they are read from the source, when somebody asks.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | None) -> None:
        self._text = text or ""

    def __get__(self, instance: object, owner: type) -> str:
        lines = [f"  {name}: {' '.join(doc.split())}" for name, doc in _field_docs(owner).items()]
        return "\n".join([self._text, "", "Fields:", *lines]) if lines else self._text


def add_field_help(value: object) -> None:
    """Let a class of values explain its fields; others stay as they are."""
    if isinstance(value, type) and "__attrs_attrs__" in vars(value):
        text = vars(value).get("__doc__")
        if not isinstance(text, FieldHelp):
            value.__doc__ = FieldHelp(text)  # type: ignore[assignment]


def _field_docs(owner: type) -> dict[str, str]:
    """The docstrings of the fields, by name, in the order of the constructor."""
    found: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        found |= field_docs_in_source(cls)
    names = [field.name for field in getattr(owner, "__attrs_attrs__", ())]
    return {name: found[name] for name in names if name in found}


def field_docs_in_source(*classes: type) -> dict[str, str]:
    """The docstrings of the fields of some classes of one module, by name, from its source.

    To parse that with ``ast`` would take 12 ms for the options of the mock, at each of its starts.
    """
    import re  # noqa: PLC0415  (that only help needs)

    module = classes[0].__module__
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or not module.startswith("trio_vllm"):
        return {}
    with open(path, encoding="utf-8") as source:
        parts = re.finditer(
            r'''^(?:class (?P<cls>\w+)|\S|    (?P<field>\w+): |    """(?P<doc>(?s:.*?))""")''',
            source.read(),
            re.MULTILINE,
        )
    names = {cls.__name__ for cls in classes}
    docs: dict[str, str] = {}
    cls = field = None
    for part in parts:
        match part.lastgroup:
            case "field":
                field = part["field"]
            case "doc" if cls in names and field is not None:
                docs[field], field = part["doc"], None
            case "doc":
                pass  # of the class
            case _:
                cls, field = part["cls"], None
    return docs
