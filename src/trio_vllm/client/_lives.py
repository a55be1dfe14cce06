"""Which engines are alive, and how one is found to be dead.

Theory of operation. An engine goes in one of three ways.

* Its connection is lost. It is sent nothing from then on, but what it sent before, over another
  connection, may still be on its way: its requests fail `LOSS_GRACE` seconds later.
* It sends ENGINE_CORE_DEAD, without saying who it is. If something else has come by the same
  connection before, that told it. Otherwise, if a connection has broken in the last `LATE_FAREWELL`
  seconds, it was that engine; else the only living engine is dead at once, and of several it is the
  one whose connection breaks next. If none does within `FAREWELL_GRACE` seconds, an engine that
  serves nobody cannot be told from the others, so none can be relied on.
* It sends what cannot be read. What it says next cannot be trusted, so it is dead at once. Who it is
  is known from the connection, or else from the message, if that much of it can be read.

The first reason is kept. Engines in lockstep go together.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import trio

from trio_vllm._errors import DecodeError, EngineCoreError, EngineDeadError

_log = logging.getLogger("trio_vllm.client")

LOSS_GRACE = 0.2
"""Seconds; on one host, outputs under way arrive within milliseconds."""

FAREWELL_GRACE = 10.0
"""Seconds; after its farewell an engine takes 5 s at most to end (``_send_engine_dead`` upstream)."""

LATE_FAREWELL = 2.0
"""Seconds that what an engine sent may lie unread when the client is behind."""

CONNECTION_LOST = "its connection was lost"
REPORTED_DEATH = "it reported ENGINE_CORE_DEAD"
UNREADABLE = "it sent a message that cannot be read"


class EngineLives:
    """Knows the living and the dead, and calls back when one goes."""

    def __init__(
        self,
        engine_indices: Iterable[int],
        *,
        is_lockstep: bool,
        on_loss: Callable[[int], None],
        on_death: Callable[[int, EngineDeadError], None],
        on_failure: Callable[[EngineCoreError], None],
    ) -> None:
        """
        Args:
          engine_indices: All of them; they are alive.
          is_lockstep: None can go on without the others.
          on_loss: An engine can be sent nothing any more.
          on_death: An engine is dead; a loss may have come before.
          on_failure: No engine can be relied on any more.
        """
        self.living = sorted(engine_indices)
        """Those that are not dead, lost or not."""
        self.dead: dict[int, EngineDeadError] = {}
        self._is_lockstep = is_lockstep
        self._on_loss = on_loss
        self._on_death = on_death
        self._on_failure = on_failure
        self._lost: dict[int, Exception | None] = {}  # and the cause, if it is known
        self._silent: list[int] = []  # lost a moment ago, without a farewell
        # Each is set when it is known who sent the farewell.
        self._farewells: deque[trio.Event] = deque()
        # Unbounded: holds one item per loss and farewell, of which each engine has one that counts.
        self._start, self._started = trio.open_memory_channel[Callable[[], Awaitable[None]]](
            math.inf
        )

    async def watch(self, losses: trio.abc.ReceiveChannel[int]) -> None:
        """Task: take the lost connections, and keep the times of grace; for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_losses, losses)
            async for waiting in self._started:
                nursery.start_soon(waiting)

    async def _take_losses(self, losses: trio.abc.ReceiveChannel[int]) -> None:
        async for engine_index in losses:
            self.lose(engine_index)

    def lose(self, engine_index: int, cause: Exception | None = None) -> None:
        """An engine's connection is gone."""
        if engine_index in self._lost:
            return
        self._lost[engine_index] = cause
        if engine_index in self.living:
            self._on_loss(engine_index)
        self._start.send_nowait(partial(self._bury_lost, engine_index))

    async def _bury_lost(self, engine_index: int) -> None:
        await trio.sleep(LOSS_GRACE)
        if engine_index in self.dead:
            return  # this is no news, and tells nothing of other engines' farewells
        if self._farewells:
            self._farewells.popleft().set()
            self.die(engine_index, REPORTED_DEATH)
        else:
            self.die(engine_index, CONNECTION_LOST, self._lost[engine_index])
            self._silent.append(engine_index)
            await trio.sleep(LATE_FAREWELL)
            if engine_index in self._silent:
                self._silent.remove(engine_index)

    def take_farewell(self, sender: int | None) -> None:
        """An engine sent ENGINE_CORE_DEAD; None if it is not known which."""
        if sender in self.dead:
            if sender in self._silent:
                self._silent.remove(sender)
        elif sender in self.living:
            self.die(sender, REPORTED_DEATH)
        elif self._is_lockstep and len(self.living) > 1:
            self._on_failure(EngineDeadError(None, REPORTED_DEATH))
        elif self._silent:
            del self._silent[0]
        elif len(self.living) == 1:
            self.die(self.living[0], REPORTED_DEATH)
        elif len(self._farewells) < len(self.living):
            known = trio.Event()
            self._farewells.append(known)
            self._start.send_nowait(partial(self._await_sender, known))

    async def _await_sender(self, known: trio.Event) -> None:
        with trio.move_on_after(FAREWELL_GRACE):
            await known.wait()
        if not known.is_set():
            self._on_failure(EngineDeadError(None, REPORTED_DEATH))

    def take_unreadable(self, error: DecodeError, sender: int | None) -> None:
        """An engine sent a message that cannot be read; None if it is not known which."""
        if sender is None:
            sender = error.engine_index
        if sender in self.dead:
            return
        reason = f"{UNREADABLE}: {error}"
        if sender in self.living:
            self.die(sender, reason, error)
        elif len(self.living) == 1:
            self.die(self.living[0], reason, error)
        else:
            # Whose outputs are incomplete now is not known.
            self._on_failure(error)

    def die(self, engine_index: int, reason: str, cause: Exception | None = None) -> None:
        """An engine is dead."""
        if engine_index not in self.living:
            return
        error = EngineDeadError(engine_index, reason)
        error.__cause__ = cause
        _log.error("%s", error)
        self.living.remove(engine_index)
        self.dead[engine_index] = error
        self._on_death(engine_index, error)
        if not self.living or self._is_lockstep:
            self._on_failure(error)
