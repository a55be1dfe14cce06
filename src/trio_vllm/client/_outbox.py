"""What goes to the engines: at once where one waits for it, else together."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trio_vllm._errors import PeerGoneError
from trio_vllm._waker import Waker
from trio_vllm.protocol import Buffer, EngineId, encode_abort
from trio_vllm.transport import FrameSender

HOLD = 0.005
"""Seconds that what is posted may wait at most, beyond the turns of other tasks."""


class Outbox:
    """Sends at once, or when `run` gets its turn, that is after all tasks that are due now.

    What is sent in one go costs ØMQ one wake-up, and reaches the engine before its next step. All
    requests that are aborted until then share one message per engine.
    """

    def __init__(
        self,
        requests: FrameSender,
        *,
        on_gone: Callable[[int, PeerGoneError], None],
        on_unsent: Callable[[str, list[Buffer]], None],
    ) -> None:
        """
        Args:
          requests: The way to all engines.
          on_gone: Called with an engine that turns out to be gone.
          on_unsent: Called after that with each request, id and message, that was posted to it and
            may go elsewhere.
        """
        self._requests = requests
        self._on_gone = on_gone
        self._on_unsent = on_unsent
        self._posted: list[tuple[int, list[Buffer], str | None]] = []
        self._aborts: dict[int, dict[str, None]] = {}  # request ids by engine
        self._waker = Waker()
        self._hold_end: float | None = None

    def __bool__(self) -> bool:
        """Whether something is waiting."""
        return bool(self._posted or self._aborts)

    def send(self, engine_index: int, message: list[Buffer]) -> bool:
        """Send to an engine; False if it is not there any more."""
        try:
            self._requests.send_nowait([EngineId.of(engine_index), *message])
        except PeerGoneError as error:
            self._on_gone(engine_index, error)
            return False
        return True

    def post(self, engine_index: int, message: list[Buffer], movable_id: str | None) -> None:
        """Send a request soon; its id, if another engine will do as well."""
        # Copied, for it may have views of arrays that are the caller's to change once we return.
        self._posted.append((engine_index, [*map(bytes, message)], movable_id))
        self._waker.wake()

    def abort(self, engine_index: int, request_id: str) -> None:
        """Tell an engine soon that a request is over; a hold ends with this."""
        self._hold_end = None
        self._aborts.setdefault(engine_index, {})[request_id] = None
        self._waker.wake()

    def prepare_id(self, request_id: str) -> None:
        """See to it that no engine still has this id: it would die of getting it again."""
        if self._aborts and any(request_id in ids for ids in self._aborts.values()):
            self.flush()

    def hold(self) -> None:
        """Let `run` wait until `release`, but for `HOLD` seconds at most.

        For while outputs are waiting to be handed out, of which requests could only bring more.
        An abort brings less, and is not held.
        """
        # Else a hold without end would grow out of several.
        if self._hold_end is None and not self._aborts:
            self._hold_end = trio.current_time() + HOLD

    def release(self) -> None:
        """End a hold."""
        self._hold_end = None
        if self:
            self._waker.wake()

    def flush(self) -> None:
        """Send what is waiting: requests first, for they may have been aborted since."""
        self._hold_end = None
        while self._posted:
            posted, self._posted = self._posted, []
            for engine_index, message, movable_id in posted:
                if not self.send(engine_index, message) and movable_id is not None:
                    self._on_unsent(movable_id, message)
        aborts, self._aborts = self._aborts, {}
        for engine_index, request_ids in aborts.items():
            self.send(engine_index, encode_abort(list(request_ids)))

    async def run(self) -> None:
        """Task: send what is waiting, for ever."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self:
                await self._waker.wait()
            while self._hold_end is not None and trio.current_time() < self._hold_end:
                with trio.move_on_at(self._hold_end):
                    await self._waker.wait()
            self.flush()
