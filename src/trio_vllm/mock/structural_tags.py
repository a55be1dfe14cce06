"""`TagGrammar` writes structural tags as a grammar for llguidance.

Tags may stand in free text, which a model may also leave without any. The grammar leaves out the free
text around tags and takes at least one tag, since an answer is wanted that shows them.
Both forms are read: ``structures`` with ``triggers``, and a tree under ``format``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]

_ANY_TEXT = "/[A-Za-z0-9 ]*/"
"""Of any text that which cannot be taken for the end of a tag."""


class TagGrammar:
    """Writes the grammar.

    Args:
      special_tokens: Their texts; where one stands in the text of a tag, the token is meant.
      whitespace_flexible: Whether JSON may have whitespace.
    """

    def __init__(self, special_tokens: Iterable[str], *, whitespace_flexible: bool) -> None:
        names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._whitespace_flexible = whitespace_flexible

    def grammar(self, text: str) -> str:
        """The grammar in Lark's language.

        Raises:
          ValueError: The text is no structural tag, or of a kind that is not known here.
        """
        try:
            given = json.loads(text)
            tree = given["format"] if "format" in given else _tree_of_structures(given)
            return f"%llguidance {{}}\nstart: {self._rule(tree)}\n"
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no structural tag: {error!r}") from None

    def _rule(self, tree: Json) -> str:
        kinds: dict[str, Callable[[Json], str]] = {
            "const_string": lambda tree: self._text(tree["value"]),
            "json_schema": lambda tree: self._json(tree["json_schema"]),
            "regex": lambda tree: f"/{tree['pattern'].replace('/', chr(92) + '/')}/",
            "any_text": lambda _tree: _ANY_TEXT,
            "sequence": lambda tree: " ".join(map(self._rule, tree["elements"])),
            "or": lambda tree: self._any_of(tree["elements"]),
            "tag": self._tag,
            "triggered_tags": lambda tree: self._any_of(tree["tags"]),
            "tags_with_separator": lambda tree: self._any_of(tree["tags"]),
        }
        kind = tree["type"]
        if kind not in kinds:
            raise ValueError(f"structural tags of type {kind!r} are not known to the mock")
        return kinds[kind](tree)

    def _any_of(self, trees: Iterable[Json]) -> str:
        rules = [self._rule({"type": "tag", **tree}) for tree in trees]
        if not rules:
            raise ValueError("there is nothing to choose from")
        return "(" + " | ".join(f"({rule})" for rule in rules) + ")"

    def _tag(self, tree: Json) -> str:
        end = tree["end"]
        end = end[0] if isinstance(end, list) else end
        return " ".join((self._text(tree["begin"]), self._rule(tree["content"]), self._text(end)))

    def _json(self, schema: Any) -> str:
        given = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(given, bool):
            given = {} if given else {"not": {}}
        options = {"whitespace_flexible": self._whitespace_flexible}
        return "%json " + json.dumps({**given, "x-guidance": options})

    def _text(self, text: str) -> str:
        """A text, in which special tokens have names of their own."""
        parts = [text] if self._special is None else self._special.split(text)
        # Every second part is a special token.
        written = [
            self._token(part) if number % 2 else json.dumps(part)
            for number, part in enumerate(parts)
            if part
        ]
        return " ".join(written) or '""'

    @staticmethod
    def _token(text: str) -> str:
        return text if text.startswith("<") and text.endswith(">") else json.dumps(text)


def _tree_of_structures(given: Json) -> Json:
    tags = [
        {
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for tag in given["structures"]
    ]
    return {"type": "triggered_tags", "tags": tags}
