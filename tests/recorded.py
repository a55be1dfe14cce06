"""The recorded messages of ``tests/vectors``: see the README there."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import pytest

FOLDER = Path(__file__).parent / "vectors"

VERSIONS = ("0.32", "0.33")
"""The versions of vLLM that were recorded; each has a folder."""

each_version = pytest.mark.parametrize("version", VERSIONS)


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
    """One scenario with programs of one version of vLLM."""

    version: str
    """Such as ``0.33``."""
    name: str
    producer: str
    messages: list[Message]
    expected: dict[str, Any]

    @property
    def label(self) -> str:
        """Tells it from all others."""
        return f"{self.version}-{self.name}"


@functools.cache
def recordings() -> list[Recording]:
    """All of them, by version and name."""
    return [_load(path) for path in sorted(FOLDER.glob("*/*.json"))]


def recording(name: str, version: str = "0.33") -> Recording:
    """The one of this name and version."""
    (found,) = (
        scenario
        for scenario in recordings()
        if (scenario.name, scenario.version) == (name, version)
    )
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
        path.parent.name,
        scenario["name"],
        scenario["producer"],
        messages,
        scenario.get("expected") or {},
    )
