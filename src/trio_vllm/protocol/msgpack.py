"""`pack` and `unpack`: plain objects to MessagePack bytes and back.

Two things that the library leaves to its user are settled here for the whole package: a payload
with bytes behind its end is refused, and of the extension types only the raw view (3) is loaded.
Types 1 and 2 are upstream's pickles (``vllm/v1/serial_utils.py``): they would run code of the
sender's choice. A `ForeignExtension` takes their place, which every codec refuses.
"""

from __future__ import annotations

from typing import Any

import ormsgpack

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import (
    Buffer,
    Codec,
    CodecError,
    ForeignExtension,
    Frames,
    T,
)

RAW_VIEW = 3
"""Extension type of array bytes that travel inside the payload."""

# The decoder ignores what follows the first object. So the payload is decoded as the first of two
# array elements, the second being a mark: if anything stands between them, or if the payload ends
# early, the second element is not the mark. A payload that holds the one mark itself (a call id can)
# gets the other; one that holds both was made to deceive us.
_PAIR = b"\x92"
_MARKS = tuple(
    (mark, b"\xcf" + mark.to_bytes(8, "big")) for mark in (0x9D1C77A35E02B4F1, 0xC3A54E960B7D182F)
)
_FIRST_MARK = _MARKS[0]
_MARK_SIZE = len(_FIRST_MARK[1])


def pack(raw: object) -> bytes:
    """Pack plain objects; `CodecError` says why some object cannot be packed."""
    try:
        return ormsgpack.packb(raw, option=ormsgpack.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise CodecError(f"cannot be packed: {error}") from error


def raw_view(data: Buffer) -> ormsgpack.Ext:
    """Array bytes, to be packed inline."""
    return ormsgpack.Ext(RAW_VIEW, bytes(data))


def unpack(payload: Buffer) -> Any:
    """Unpack one complete object; raw views become memoryviews, other extensions marks.

    Raises `CodecError` if the bytes are not exactly one object, or nest too deeply.
    """
    mark, mark_bytes = _FIRST_MARK
    pair = b"".join((_PAIR, payload, mark_bytes))
    if pair.find(mark_bytes) != len(pair) - _MARK_SIZE:
        pair, mark = _marked(payload)
    try:
        raw, end = ormsgpack.unpackb(pair, ext_hook=_extension, option=ormsgpack.OPT_NON_STR_KEYS)
    except ValueError as error:
        raise CodecError(f"not MessagePack: {error}") from error
    if end != mark:
        raise CodecError("bytes follow the end of the payload")
    return raw


def _marked(payload: Buffer) -> tuple[bytes, int]:
    """The pair of the payload and a mark that is not in it, and that mark."""
    for mark, mark_bytes in _MARKS:
        pair = b"".join((_PAIR, payload, mark_bytes))
        if pair.find(mark_bytes) == len(pair) - len(mark_bytes):
            return pair, mark
    raise CodecError("holds the marks that show where a payload ends")


def _extension(code: int, data: bytes) -> memoryview | ForeignExtension:
    return memoryview(data) if code == RAW_VIEW else ForeignExtension(code)


def decode_payload(codec: Codec[T], frames: Frames, what: str) -> T:
    """Unpack and decode a message whose first frame is its payload.

    Any fault is a `DecodeError` about ``what``.
    """
    if not frames:
        raise DecodeError(what, "", "has no frame")
    try:
        return codec.decode(unpack(frames[0]), frames)
    except CodecError as error:
        raise DecodeError(what, error.where, error.reason) from error


def decode_frame(codec: Codec[T], frames: Frames, what: str) -> T:
    """Unpack and decode a message of exactly one frame; any fault is a `DecodeError`."""
    if len(frames) != 1:
        raise DecodeError(what, "", f"has {len(frames)} frames, not 1")
    return decode_payload(codec, frames, what)
