"""`UtilityRequest` and `UtilityOutput`: a call of an engine's method by name, and its answer.

Mirrors upstream ``vllm/v1/engine/__init__.py`` (``UtilityOutput``) and
``vllm/v1/serial_utils.py`` (``UtilityResult``).
"""

from __future__ import annotations

from typing import Annotated, Any

import attrs

from trio_vllm.protocol.codec import (
    ANY,
    INT64_OR_UINT64,
    AuxFrames,
    Codec,
    CodecError,
    Frames,
    UInt32,
    refuse_extensions,
    wrong_type,
)
from trio_vllm.protocol.structs import as_array, codec_of, set_codec
from trio_vllm.values import define

UNENCODABLE_RESULTS = ("get_kv_cache_spec", "get_model")
"""Methods of workers whose results are objects without a MessagePack form. Sending one as the result of
``collective_rpc`` ends the engine's output thread: it goes mute without a word."""

CACHE_RESETS = ("reset_encoder_cache", "reset_mm_cache")
"""Methods of an engine, and of its workers, after which these keep no queries of late interaction."""

CallId = Annotated[int, INT64_OR_UINT64]


@as_array(minimum=4)
@define
class UtilityRequest:
    """Calls ``method`` with positional ``args``; the answer goes to output socket ``client_index``."""

    client_index: UInt32
    call_id: CallId
    """Any 64-bit integer, signed or unsigned; the answer carries the same."""
    method: str
    args: list[Annotated[Any, ANY]] = attrs.field(factory=list)


def _decode_result(raw: Any, _: Frames) -> Any:
    if raw is None:
        return None
    if type(raw) is not list or len(raw) != 2:
        raise wrong_type("an array [type info, value]", raw)
    # The type info would say how to rebuild the value with pickle; the plain value is enough.
    return raw[1]


def _encode_result(value: Any, aux: AuxFrames) -> Any:
    # A void success too is [nil, nil]: a bare nil kills upstream's Python client.
    return [None, ANY.encode(value, aux)]


@as_array()
@define
class UtilityOutput:
    """The answer to one call: ``result``, or why there is none."""

    call_id: CallId
    failure_message: str | None = None
    result: Annotated[Any, Codec("a utility result", _decode_result, _encode_result)] = None


_UTILITY_OUTPUT = codec_of(UtilityOutput)


def _encode_output(value: UtilityOutput, aux: AuxFrames) -> Any:
    raw = _UTILITY_OUTPUT.encode(value, aux)
    if value.failure_message is not None:
        if value.result is not None:
            raise CodecError("must be nil, the call failed").add_path(".result")
        raw[2] = None
    return raw


def _decode_output(raw: Any, frames: Frames) -> UtilityOutput:
    try:
        output = _UTILITY_OUTPUT.decode(raw, frames)
        refuse_extensions(output.result)
    except CodecError as error:
        # Fails this call, not all that the engine serves, if the message shows which call it is.
        if type(raw) is not list or not raw or type(raw[0]) is not int:
            raise
        failure = raw[1] if len(raw) > 1 and type(raw[1]) is str else None
        field = error.where.removeprefix(".") or "result"
        return UtilityOutput(raw[0], failure or f"the {field} {error.reason}")
    return output


UTILITY_REQUEST = codec_of(UtilityRequest)
set_codec(UtilityOutput, Codec("UtilityOutput", _decode_output, _encode_output))
