"""The recorded messages of ``tests/vectors``, for seeds."""

from __future__ import annotations

import functools
import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "tests" / "vectors"

Frames = list[bytes]


@functools.cache
def _messages() -> list[tuple[str, Frames]]:
    return [
        (message["socket"].partition("[")[0], [bytes.fromhex(f) for f in message["frames_hex"]])
        for path in sorted(FOLDER.glob("*/*.json"))
        for message in json.loads(path.read_text(encoding="utf-8"))["messages"]
    ]


def recorded(*sockets: str, limit: int = 20_000) -> list[Frames]:
    """The messages of some sockets, with the routing id if they have one; without the largest."""
    return [
        frames
        for socket, frames in _messages()
        if socket in sockets and sum(map(len, frames)) <= limit
    ]
