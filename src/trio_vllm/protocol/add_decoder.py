"""`AddDecoder` decodes ADD messages, most of which differ from one before only in a few fields.

These are the id, the prompt, the arrival time and the external id. What stands in all the others is
decoded, and checked, once; the requests made of it share their sampling parameters.
`decode_engine_message` decodes the same without a memory, and takes twice as long.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import STR, TOKEN_IDS, CodecError, Frames
from trio_vllm.protocol.msgpack import unpack
from trio_vllm.protocol.request import (
    EngineCoreRequest,
    EngineMessage,
    RequestType,
    decode_engine_message,
)
from trio_vllm.protocol.structs import defaults_of, index_of

_ADD = RequestType.ADD.value
_NAMES = tuple(attribute.name for attribute in attrs.fields(EngineCoreRequest))
_OWN = ("request_id", "prompt_token_ids", "arrival_time", "external_req_id")
_ID, _PROMPT, _TIME, _EXTERNAL = (index_of(EngineCoreRequest, name) for name in _OWN)
_SHARED = (
    "sampling_params",
    "client_index",
    "current_wave",
    "priority",
    "resumable",
    "reasoning_ended",
    "abort_immediately",
)
"""Fields that requests may share, if they are not the default; those of others are decoded."""
_DEFAULTS = dict(zip(_NAMES, defaults_of(EngineCoreRequest), strict=True))
_OTHERS = tuple(i for i, name in enumerate(_NAMES) if name not in (*_OWN, *_SHARED))

MAX_KEY = 2048
"""Bytes of the fields that are shared; larger ones are hardly ever the same twice."""

_Make = Callable[..., EngineCoreRequest]


class AddDecoder:
    """Decodes the messages of an input socket; remembers ``size`` kinds of requests.

    What it gives is not to be changed: the requests share their parameters.
    """

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._makers: dict[bytes, _Make] = {}
        """Make a request of its own fields, by all others, as `marshal` writes them."""

    def decode(self, frames: Frames) -> EngineMessage:
        """Decode a message like `decode_engine_message`, with the same errors."""
        if len(frames) == 2 and frames[0] == _ADD:
            try:
                raw = unpack(frames[1])
                if type(raw) is list and len(raw) == len(_NAMES):
                    return self._decode(raw, frames)
            except (CodecError, DecodeError, ValueError):
                pass  # which is raised again in the usual words
        return decode_engine_message(frames)

    def _decode(self, raw: list[Any], frames: Frames) -> EngineMessage:
        request_id, prompt, time, external = raw[_ID], raw[_PROMPT], raw[_TIME], raw[_EXTERNAL]
        raw[_ID] = raw[_PROMPT] = raw[_TIME] = raw[_EXTERNAL] = None
        # Unlike a comparison it tells 1 from 1.0 and True.
        key = marshal.dumps(raw, 2)
        make = self._makers.get(key)
        if make is None or type(time) is not float or type(prompt) is not list:
            return self._remember(key, raw, decode_engine_message(frames))
        return make(
            request_id=STR.decode(request_id, ()),
            prompt_token_ids=TOKEN_IDS.decode(prompt, ()),
            arrival_time=time,
            external_req_id=None if external is None else STR.decode(external, ()),
        )

    def _remember(self, key: bytes, raw: list[Any], message: EngineMessage) -> EngineMessage:
        """Remember what a message has in common with others, if it has nothing unusual."""
        is_usual = all(raw[index] is None for index in _OTHERS)
        if len(key) <= MAX_KEY and is_usual and not _holds_bytes(raw):
            if len(self._makers) >= self._size:
                self._makers.clear()
            values = ((name, getattr(message, name)) for name in _SHARED)
            shared = {name: value for name, value in values if value is not _DEFAULTS[name]}
            self._makers[key] = partial(EngineCoreRequest, **shared)
        return message


def _holds_bytes(value: Any) -> bool:
    """Whether there are any, which `marshal` does not tell from a view of an array."""
    if isinstance(value, dict):
        return any(map(_holds_bytes, value)) or any(map(_holds_bytes, value.values()))
    if isinstance(value, list):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | memoryview)
