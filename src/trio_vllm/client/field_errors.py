"""Errors of input processing, which name a field; `validate_and_encode` adds the request's id.

A module of its own, since `structured_outputs` and `input_processing`, which imports that, both raise them.
"""

from __future__ import annotations

from trio_vllm.protocol import CodecError


class UnsupportedValue(CodecError):  # noqa: N818 (never leaves the checks)
    """The value is good, but not for this engine, or not with what is known of it."""


def invalid(field: str, reason: str) -> CodecError:
    """The error for a value that no engine takes; ``field`` may be empty for the whole."""
    return CodecError(reason).add_path(f".{field}" if field else "")


def unsupported(field: str, reason: str) -> CodecError:
    """The error for a value that another engine would take."""
    return UnsupportedValue(reason).add_path(f".{field}")
