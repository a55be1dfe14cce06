"""Utility calls: a named method run by an engine, and its answer.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``UtilityOutput``) and
``vllm/v1/serial_utils.py`` (``UtilityResult``).
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm.protocol.codec import (
    ANY,
    INT64_OR_UINT64,
    STR,
    U32,
    AuxFrames,
    Codec,
    CodecError,
    Frames,
    list_of,
    misfit,
    optional,
)
from trio_vllm.protocol.structs import array_struct


@attrs.define
class UtilityRequest:
    """Run ``method`` with positional ``args`` and answer on output socket ``client_index``."""

    client_index: int
    call_id: int
    """Any 64-bit integer, signed or unsigned; the answer carries the same."""
    method: str
    args: list[Any] = attrs.field(factory=list)


@attrs.define
class UtilityOutput:
    """The answer to one call: ``result``, or why there is none."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


UTILITY_REQUEST: Codec[UtilityRequest] = array_struct(
    UtilityRequest,
    4,
    {"client_index": U32, "call_id": INT64_OR_UINT64, "method": STR, "args": list_of(ANY)},
)


def _decode_result(raw: Any, _: Frames) -> Any:
    if raw is None:
        return None
    if type(raw) is not list or len(raw) != 2:
        raise misfit("an array [type info, value]", raw)
    # The type info would say how to rebuild the value with pickle; the plain value is enough.
    return raw[1]


def _encode_result(value: Any, aux: AuxFrames) -> Any:
    # A void success too is [nil, nil]: a bare nil kills upstream's Python client.
    return [None, ANY.encode(value, aux)]


_UTILITY_OUTPUT: Codec[UtilityOutput] = array_struct(
    UtilityOutput,
    1,
    {
        "call_id": INT64_OR_UINT64,
        "failure_message": optional(STR),
        "result": Codec("a utility result", _decode_result, _encode_result),
    },
)


def _encode_output(value: UtilityOutput, aux: AuxFrames) -> Any:
    raw = _UTILITY_OUTPUT.encode(value, aux)
    if value.failure_message is not None:
        if value.result is not None:
            raise CodecError("must be nil, the call failed").within(".result")
        raw[2] = None
    return raw


UTILITY_OUTPUT: Codec[UtilityOutput] = Codec(
    "UtilityOutput", _UTILITY_OUTPUT.decode, _encode_output
)
