"""The recorded messages of ``tests/vectors``: see the README there."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs

FOLDER = Path(__file__).parent / "vectors"


@attrs.frozen
class Message:
    """One recorded message and the JSON view of its MessagePack frame."""

    seq: int
    socket: str
    sender: str
    receiver: str
    origin: str
    frames: list[bytes]
    payload_frame: int | None
    decoded: Any

    @property
    def channel(self) -> str:
        """The socket without its client index."""
        return self.socket.partition("[")[0]

    @property
    def payload(self) -> bytes | None:
        """The MessagePack frame; None for a bare marker."""
        return None if self.payload_frame is None else self.frames[self.payload_frame]

    @property
    def is_golden(self) -> bool:
        """Whether a real program wrote these bytes, not the script that recorded them."""
        return self.origin == "producer"


@attrs.frozen
class Recording:
    """One scenario."""

    name: str
    producer: str
    messages: list[Message]
    expected: dict[str, Any]


@functools.cache
def recordings() -> list[Recording]:
    """All of them, by name."""
    return [_load(path) for path in sorted(FOLDER.glob("*.json"))]


def recording(name: str) -> Recording:
    """The one of this name."""
    (found,) = (scenario for scenario in recordings() if scenario.name == name)
    return found


def _load(path: Path) -> Recording:
    scenario = json.loads(path.read_text(encoding="utf-8"))
    messages = [
        Message(
            message["seq"],
            message["socket"],
            message["from"],
            message["to"],
            message["origin"],
            [bytes.fromhex(frame) for frame in message["frames_hex"]],
            message.get("payload_frame"),
            message["decoded"],
        )
        for message in scenario["messages"]
    ]
    return Recording(
        scenario["name"], scenario["producer"], messages, scenario.get("expected") or {}
    )
