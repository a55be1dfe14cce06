"""Streaming-input sessions: one request id whose prompt comes in chunks.

Each chunk is an ADD with ``resumable`` set; it is decoded and ended like a request of its own, and
its tokens go on where those of the last chunk ended. A final ADD without ``resumable`` carries no
input; it says that no chunk will follow.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from trio_vllm.protocol import EngineCoreRequest


@attrs.define
class Session:
    """One session that is open."""

    client_index: int
    emitted: int = 0
    """Tokens of the chunks that have ended."""
    queue: deque[EngineCoreRequest] = attrs.field(factory=deque)
    """Chunks to come, and the ADD that ends the session, if that has come."""


@attrs.define
class Sessions:
    """The open sessions of one engine, by request id."""

    _open: dict[str, Session] = attrs.field(factory=dict, init=False)

    def get(self, request_id: str) -> Session | None:
        """The session with this id, if it is open."""
        return self._open.get(request_id)

    def open(self, wire: EngineCoreRequest) -> None:
        """The first chunk of a session has come."""
        self._open[wire.request_id] = Session(wire.client_index)

    def close(self, request_id: str) -> Session | None:
        """End a session, if it is open."""
        return self._open.pop(request_id, None)

    def close_all(self) -> list[tuple[str, Session]]:
        """End all sessions; which they were."""
        closed = list(self._open.items())
        self._open.clear()
        return closed

    def chunk_ended(self, request_id: str, emitted: int) -> None:
        """A chunk has ended, if that was one, after ``emitted`` tokens in all."""
        session = self._open.get(request_id)
        if session is not None:
            session.emitted = emitted
