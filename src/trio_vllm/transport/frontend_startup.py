"""Sees the engines through their startup: what the frontend's state machine needs of the world.

What has to happen in which order is in `trio_vllm.protocol.FrontendStartup`. Here messages are
carried to it and its answers back, broken connections are made known to it, and the time is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import attrs
import trio

from trio_vllm.concurrency import running
from trio_vllm.errors import PeerGoneError, StartupError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    Buffer,
    EngineCoreReadyResponse,
    FrontendStartup,
    Phase,
)
from trio_vllm.transport.zmq_monitor import ConnectionTable
from trio_vllm.transport.zmq_socket import ZmqSocket

_log = logging.getLogger("trio_vllm.transport")

SETTLING_TIME = 0.1
"""Seconds from the end of a handshake connection until an engine counts as gone: its READY, sent
just before, may not have been read yet."""


@attrs.frozen
class Handshake:
    """What belongs to a frontend that does the handshake."""

    socket: ZmqSocket
    connections: ConnectionTable
    """Those of ``socket``."""
    init: Sequence[Buffer]
    """The answer to each HELLO."""
    broadcasts: ZmqSocket | None
    """Where engines subscribe, if we are their coordinator."""


class StartupRun:
    """One startup of a frontend; the engines' messages are taken while `wait` runs."""

    def __init__(
        self,
        engine_indices: Iterable[int],
        *,
        timeout: float,
        requests: ZmqSocket,
        connections: ConnectionTable,
        handshake: Handshake | None = None,
    ) -> None:
        """
        Args:
          engine_indices: The expected engines.
          timeout: Seconds that the next message which brings the startup forward may take.
          requests: Where engines register.
          connections: Those of ``requests``.
          handshake: None if somebody else does the handshake.
        """
        self._machine = FrontendStartup(
            engine_indices,
            handshake=handshake is not None,
            coordinator=handshake is not None and handshake.broadcasts is not None,
        )
        self._timeout = timeout
        self._requests = requests
        self._connections = connections
        self._handshake = handshake
        self._patience = trio.CancelScope()
        self._done = trio.Event()
        self._notes_logged = 0
        self._fewest_steps = math.inf

    async def wait(self) -> Mapping[int, EngineCoreReadyResponse]:
        """Wait until all engines are ready; gives what they told of themselves, by index.

        Raises:
          StartupError: Nothing came that brings the startup forward, for the length of the timeout.
        """
        pumps: list[Callable[[], Awaitable[None]]] = [self._take_registrations, self._take_losses]
        if self._handshake is not None:
            pumps += [self._take_reports, self._watch_handshakes]
            if self._handshake.broadcasts is not None:
                pumps += [self._take_subscriptions]
        self._look()
        await trio.lowlevel.checkpoint()
        with self._patience:
            # An engine may be lost while the pumps come to rest, hence again.
            while self._machine.phase is not None:
                async with running(*pumps):
                    await self._done.wait()
        if (phase := self._machine.phase) is not None:
            raise self._failure(phase)
        return self._machine.ready_responses

    def _failure(self, phase: Phase) -> StartupError:
        notes = list(self._machine.notes)
        sockets = {"input": self._connections}
        if self._handshake is not None:
            sockets = {"handshake": self._handshake.connections, **sockets}
        for name, connections in sockets.items():
            if idle := connections.idle_connections:
                notes.append(
                    f"{idle} of the connections to the {name} socket said nothing (ZeroMQ does"
                    " not hear a second engine with the same index, and an engine that has served"
                    " another frontend does not register again)"
                )
            if foreign := connections.non_zmq_connections:
                notes.append(
                    f"{foreign} of the connections to the {name} socket ended without a message in"
                    " ZeroMQ's protocol"
                )
        return StartupError(phase.value, self._machine.missing(phase), self._timeout, notes)

    async def _take_reports(self) -> None:
        """Task: read the handshake socket and answer, for ever."""
        assert self._handshake is not None
        handshake, connections = self._handshake.socket, self._handshake.connections
        while True:
            ((frames, connection),) = await handshake.receive_batch(1)
            engine_id = self._machine.receive_report(frames)
            if engine_id is not None:
                connections.identify(connection, engine_id.engine_index)
                # An engine that left in the meantime is news of the connections.
                with suppress(PeerGoneError):
                    handshake.send_nowait([engine_id, *self._handshake.init])
            self._look()

    async def _watch_handshakes(self) -> None:
        """Task: note which engines leave before they are ready, for ever."""
        assert self._handshake is not None
        connections = self._handshake.connections

        async def note_departure(engine_index: int) -> None:
            await trio.sleep(SETTLING_TIME)
            self._machine.lose_handshake(engine_index)
            self._look()

        async with trio.open_nursery() as nursery:
            async for disconnect in connections:
                if disconnect.engine_index is not None:
                    nursery.start_soon(note_departure, disconnect.engine_index)

    async def _take_subscriptions(self) -> None:
        """Task: open the gate once all engines wait there, for ever."""
        assert self._handshake is not None
        assert self._handshake.broadcasts is not None
        broadcasts = self._handshake.broadcasts
        while True:
            if self._machine.receive_subscription(await broadcasts.receive()):
                broadcasts.send_nowait([COORDINATOR_READY])
            self._look()

    async def _take_registrations(self) -> None:
        """Task: read the input socket, for ever."""
        while True:
            ((frames, connection),) = await self._requests.receive_batch(1)
            engine_index = self._machine.receive_registration(frames)
            if engine_index is not None:
                self._connections.identify(connection, engine_index)
            self._look()

    async def _take_losses(self) -> None:
        """Task: let engines start over whose connection broke, for ever."""
        async for disconnect in self._connections:
            if disconnect.engine_index is not None:
                self._machine.lose(disconnect.engine_index)
            self._look()

    def _look(self) -> None:
        """See where the startup stands; what brings it forward gives the next message its time."""
        machine = self._machine
        for note in machine.notes[self._notes_logged :]:
            _log.warning("%s", note)
        self._notes_logged = len(machine.notes)
        steps = machine.steps_missing
        if steps < self._fewest_steps:
            # Never more than before: an engine that crashes and restarts must not prolong it.
            self._fewest_steps = steps
            self._patience.deadline = trio.current_time() + self._timeout
            if phase := machine.phase:
                _log.info("waiting for %s of engines %s", phase.value, machine.missing(phase))
        if machine.phase is None:
            self._done.set()
        elif self._done.is_set():
            self._done = trio.Event()
