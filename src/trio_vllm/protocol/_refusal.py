"""How the checks say what is wrong with a field."""

from __future__ import annotations

from trio_vllm.protocol._forms import FormError


class Unsupported(FormError):  # noqa: N818 (never leaves the checks)
    """The value is good, but not for this engine."""


def refuse(field: str, reason: str) -> FormError:
    """The error for a value that no engine takes; ``field`` may be empty for the whole."""
    return FormError(reason).within(f".{field}" if field else "")


def refuse_here(field: str, reason: str) -> FormError:
    """The error for a value that another engine would take."""
    return Unsupported(reason).within(f".{field}")


def not_in_vocabulary(token_id: int, vocab_size: int) -> str:
    """The reason for a token id that is too large."""
    return f"{token_id} is not in the vocabulary of {vocab_size} tokens"
