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
    """Change some values, or the order of messages, or bytes by ``change_bytes``."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = _mutate_once(data, draw, change_bytes)
    return data


def _mutate_once(data: bytes, draw: random.Random, change_bytes: Callable[[bytes], bytes]) -> bytes:
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
    # Most frames that are shorter are names, routing ids and types.
    large = [at for at, frame in enumerate(frames) if len(frame) > 6]
    at = draw.choice(large) if large and draw.random() < 0.8 else draw.randrange(len(frames))
    try:
        raw = ormsgpack.unpackb(
            frames[at], ext_hook=ormsgpack.Ext, option=ormsgpack.OPT_NON_STR_KEYS
        )
        changed = _changed(raw, draw.choice(_paths(raw)), draw)
        frames[at] = ormsgpack.packb(changed, option=ormsgpack.OPT_NON_STR_KEYS)
    except (ValueError, TypeError):
        frames[at] = change_bytes(frames[at])


MAX_PATHS = 500
"""Values of a frame that may be chosen; a long prompt is not worth more."""


def _paths(raw: Any) -> list[tuple[Any, ...]]:
    """Where there are values in an object: keys and positions, from the outside in."""
    found: list[tuple[Any, ...]] = [()]
    for path in found:  # which grows
        if len(found) >= MAX_PATHS:
            break
        value = raw
        for key in path:
            value = value[key]
        if isinstance(value, dict):
            found += [(*path, key) for key in value]
        elif isinstance(value, list):
            found += [(*path, position) for position in range(len(value))]
    return found


def _changed(raw: Any, path: tuple[Any, ...], draw: random.Random) -> Any:
    """The object with the value at a path changed, or repeated, or gone."""
    if not path:
        return _changed_value(raw, draw)
    key, *rest = path
    copy: Any = list(raw) if isinstance(raw, list) else dict(raw)
    choice = draw.random()
    if not rest and choice < 0.1:
        del copy[key]
    elif not rest and choice < 0.2 and isinstance(copy, list):
        copy.insert(key, copy[draw.randrange(len(copy))])
    else:
        copy[key] = _changed(copy[key], tuple(rest), draw)
    return copy


def _changed_value(raw: Any, draw: random.Random) -> Any:
    if type(raw) is int and draw.random() < 0.4:
        return max(min(raw + draw.choice([-1, 1, 255, -(2**31)]), 2**64 - 1), -(2**63))
    if type(raw) is list and draw.random() < 0.3:
        return [*raw, draw.choice(STRANGE)]
    return draw.choice(STRANGE)
