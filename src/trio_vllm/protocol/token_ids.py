"""`as_token_ids`: converts any iterable of integers, Python's or numpy's, to a list of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trio_vllm.errors import with_article


def as_token_ids(value: Iterable[int] | None, name: str = "prompt_token_ids") -> Any:
    """Give a list of Python's integers for any iterable; a list of them is given back as it is.

    Items that are no integers stay, for the check of each field to name them.

    Raises:
      TypeError: A text, bytes, a mapping or nothing iterable at all.
    """
    if type(value) is list:
        if not value or type(value[0]) is int:
            return value
        return [_plain(item) for item in value]
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim else [value.item()]
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} must be token ids, such as a list of integers, not {_describe(value)}"
        )
    return [_plain(item) for item in value]


def plain_items(value: Any) -> Any:
    """The same list with numpy's integers as Python's, wherever in it they are."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _plain(item: Any) -> Any:
    return int(item) if isinstance(item, np.integer) else item


def _describe(value: object) -> str:
    if isinstance(value, str):
        return "a text: what turns it into tokens stands outside of this package"
    return with_article(type(value).__name__)
