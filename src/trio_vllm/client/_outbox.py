"""What goes to the engines: requests at once, aborts together."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trio_vllm._errors import PeerGoneError
from trio_vllm.client._waker import Waker
from trio_vllm.protocol import Buffer, EngineId, encode_abort
from trio_vllm.transport import FrameSender


class Outbox:
    """Sends without waiting, except for aborts.

    All requests that are aborted before `run` gets its turn share one message per engine.
    """

    def __init__(
        self, requests: FrameSender, *, on_gone: Callable[[int, PeerGoneError], None]
    ) -> None:
        """``on_gone`` is called with an engine that turns out to be gone."""
        self._requests = requests
        self._on_gone = on_gone
        self._aborts: dict[int, dict[str, None]] = {}  # request ids by engine
        self._waker = Waker()

    def __bool__(self) -> bool:
        """Whether aborts are waiting."""
        return bool(self._aborts)

    def send(self, engine_index: int, message: list[Buffer]) -> bool:
        """Send to an engine; False if it is not there any more."""
        try:
            self._requests.send_nowait([EngineId.of(engine_index), *message])
        except PeerGoneError as error:
            self._on_gone(engine_index, error)
            return False
        return True

    def abort(self, engine_index: int, request_id: str) -> None:
        """Tell an engine soon that a request is over."""
        self._aborts.setdefault(engine_index, {})[request_id] = None
        self._waker.wake()

    def prepare_id(self, request_id: str) -> None:
        """See to it that no engine still has this id: it would die of getting it again."""
        if any(request_id in ids for ids in self._aborts.values()):
            self.flush()

    def flush(self) -> None:
        """Send the aborts that are waiting."""
        aborts, self._aborts = self._aborts, {}
        for engine_index, request_ids in aborts.items():
            self.send(engine_index, encode_abort(list(request_ids)))

    async def run(self) -> None:
        """Task: send aborts, for ever."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._aborts:
                await self._waker.wait()
            self.flush()
