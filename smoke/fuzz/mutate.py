"""Changes inputs as a peer with a fault would: one value in one MessagePack frame.

libFuzzer changes bytes, which mostly makes frames that end too early. Values at their right places,
but of a wrong type or size, get further.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ormsgpack

from fuzz.framing import join, split

STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    127,
    128,
    2**16,
    2**31,
    2**32 - 1,
    2**32,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -1.5,
    float("nan"),
    float("inf"),
    1e300,
    "",
    "a",
    "\x00\x1b[2J",
    "é" * 200,
    b"",
    b"\x00" * 8,
    b"\xff" * 300,
    [],
    [[]],
    [1, 2, 3],
    {},
    {"a": 1},
    {1: 2},
    ormsgpack.Ext(1, b"pickle"),
    ormsgpack.Ext(3, b"\x00" * 12),
    ["<f4", [2], ormsgpack.Ext(3, b"\x00" * 8)],
    ["<i8", [1, 2], 1],
    ["float32", [2**40, 2**40], ormsgpack.Ext(3, b"")],
]


def mutate(data: bytes, draw: random.Random, change_bytes: Callable[[bytes], bytes]) -> bytes:
    """Change one value of one frame, or an order, or bytes by ``change_bytes``."""
    if len(data) < 3 or draw.random() < 0.3:
        return change_bytes(data)
    setting, messages = data[:1], split(data[1:])
    choice = draw.random()
    if choice < 0.08:
        setting = bytes([draw.randrange(256)])
    elif choice < 0.2:
        _move(messages, draw)
    else:
        _change_frame(messages[draw.randrange(len(messages))], draw, change_bytes)
    return setting + join(messages)


def _move(messages: list[list[bytes]], draw: random.Random) -> None:
    """Repeat, remove or move a message."""
    at = draw.randrange(len(messages))
    message = messages.pop(at) if draw.random() < 0.6 else messages[at]
    if draw.random() < 0.7 or not messages:
        messages.insert(draw.randint(0, len(messages)), list(message))


def _change_frame(
    frames: list[bytes], draw: random.Random, change_bytes: Callable[[bytes], bytes]
) -> None:
    at = draw.randrange(len(frames))
    try:
        raw = ormsgpack.unpackb(
            frames[at], ext_hook=ormsgpack.Ext, option=ormsgpack.OPT_NON_STR_KEYS
        )
        changed = _changed(raw, draw, 0)
        frames[at] = ormsgpack.packb(changed, option=ormsgpack.OPT_NON_STR_KEYS)
    except (ValueError, TypeError):
        frames[at] = change_bytes(frames[at])


def _changed(raw: Any, draw: random.Random, depth: int) -> Any:
    """The value with one value inside changed; the deeper, the likelier this one."""
    if isinstance(raw, list) and raw and draw.random() > 0.12 * (depth + 1):
        return _changed_list(raw, draw, depth)
    if isinstance(raw, dict) and raw and draw.random() > 0.12 * (depth + 1):
        key = draw.choice(list(raw))
        raw = dict(raw)
        if draw.random() < 0.1:
            del raw[key]
        else:
            raw[key] = _changed(raw[key], draw, depth + 1)
        return raw
    if type(raw) is int and draw.random() < 0.4:
        return max(min(raw + draw.choice([-1, 1, 255, -(2**31)]), 2**64 - 1), -(2**63))
    return draw.choice(STRANGE)


def _changed_list(raw: list[Any], draw: random.Random, depth: int) -> list[Any]:
    raw = list(raw)
    at = draw.randrange(len(raw))
    choice = draw.random()
    if choice < 0.08:
        del raw[at]
    elif choice < 0.16:
        raw.insert(at, raw[draw.randrange(len(raw))])
    elif choice < 0.2:
        raw.append(draw.choice(STRANGE))
    else:
        raw[at] = _changed(raw[at], draw, depth + 1)
    return raw
