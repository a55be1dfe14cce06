"""How an input of the fuzzer is divided: into messages, and these into frames.

The dividers begin with the one byte that MessagePack never uses. A length in front of each part
would be wrong after every second mutation, and the rest of the input with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MESSAGE_END = b"\xc1\xc1;"
FRAME_END = b"\xc1\xc1,"

MAX_MESSAGES = 64
"""More in one input are left out: what takes long is to be found, not what is long."""


def join(messages: Iterable[Sequence[bytes]]) -> bytes:
    """An input of messages, each of which is frames."""
    return MESSAGE_END.join(FRAME_END.join(frames) for frames in messages)


def split(data: bytes) -> list[list[bytes]]:
    """The messages of an input."""
    return [part.split(FRAME_END) for part in data.split(MESSAGE_END)[:MAX_MESSAGES]]
