"""`StartupRun`: sees the engines through their startup, over the sockets of a frontend.

What has to happen in which order is in `trio_vllm.protocol.FrontendStartup`. Here messages are
carried to it and its answers back, broken connections are made known to it, and the time is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import trio

from trio_vllm.concurrency import Waker, running
from trio_vllm.errors import DecodeError, PeerGoneError, StartupError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    SUBSCRIBE,
    Buffer,
    EngineCoreReadyResponse,
    EngineId,
    Frames,
    FrontendStartup,
    Phase,
)
from trio_vllm.transport.zmq_monitor import ConnectionTable
from trio_vllm.transport.zmq_socket import ZmqSocket
from trio_vllm.values import frozen

_log = logging.getLogger("trio_vllm.transport")


BATCH = 64
"""Messages taken between two looks at how far the startup has come, which takes long with many
engines."""


SERVED_BEFORE = " has it served another frontend before?"
"""The end of a note about engines that have not come, a question that whoever starts them can answer."""


@frozen(kw_only=True)
class StartupLimits:
    """How long a startup may take, in seconds."""

    message: float
    """For the next message that brings the startup forward."""
    total: float = math.inf
    """For all of it."""
    restart_grace: float = 2.0
    """For an engine that has left, or has registered with garbage, to start again."""
    settling_time: float = 0.1
    """From the end of a handshake connection until the engine counts as gone: its READY, sent just
    before, may not have been read yet."""
    report_interval: float = 10.0
    """Between two log lines that tell what is waited for."""


@frozen
class Handshake:
    """What belongs to a frontend that does the handshake."""

    socket: ZmqSocket
    connections: ConnectionTable
    """Those of ``socket``."""
    init: Sequence[Buffer]
    """The answer to each HELLO."""
    broadcasts: ZmqSocket | None
    """Where engines subscribe, if we are their coordinator."""
    subscribers: ConnectionTable | None = None
    """The connections of ``broadcasts``."""


class StartupRun:
    """One startup of a frontend; the engines' messages are taken while `wait` runs."""

    def __init__(
        self,
        engine_indices: Iterable[int],
        limits: StartupLimits,
        *,
        requests: ZmqSocket,
        connections: ConnectionTable,
        handshake: Handshake | None = None,
    ) -> None:
        """
        Args:
          engine_indices: The expected engines.
          limits: How long to wait.
          requests: Where engines register.
          connections: Those of ``requests``.
          handshake: None if a supervisor does the handshake.
        """
        self._machine = FrontendStartup(
            engine_indices,
            handshake=handshake is not None,
            coordinator=handshake is not None and handshake.broadcasts is not None,
        )
        self._limits = limits
        self._requests = requests
        self._connections = connections
        self._handshake = handshake
        self._waker = Waker()
        self._message_deadline = math.inf
        self._total_deadline = math.inf
        self._restart_deadlines: dict[int, float] = {}  # of the engines that have to start again
        self.subscribers: set[int] = set()
        """The connections that have subscribed to the coordinator's broadcasts."""
        self._notes_logged = 0
        self._fewest_steps = math.inf

    async def wait(self) -> Mapping[int, EngineCoreReadyResponse]:
        """Wait until all engines are ready; gives what they registered with, by index.

        Raises:
          StartupError: One of the limits has passed.
        """
        pumps: list[Callable[[], Awaitable[None]]] = [
            self._take_registrations,
            self._take_disconnects,
            self._report,
        ]
        if self._handshake is not None:
            pumps += [self._take_reports, self._watch_handshakes]
            if self._handshake.broadcasts is not None:
                pumps += [self._take_subscriptions]
        self._total_deadline = trio.current_time() + self._limits.total
        self._update_progress()
        await trio.lowlevel.checkpoint()
        # An engine may be lost while the pumps come to rest, hence again.
        while self._machine.phase is not None:
            async with running(*pumps):
                await self._wait_complete()
        return self._machine.ready_responses

    async def _wait_complete(self) -> None:
        await trio.lowlevel.checkpoint()
        while (phase := self._machine.phase) is not None:
            if trio.current_time() >= self._deadline:
                raise self._failure(phase)
            with trio.move_on_at(self._deadline):
                await self._waker.wait()

    @property
    def _deadline(self) -> float:
        return min(self._message_deadline, self._total_deadline, *self._restart_deadlines.values())

    # Failure ------------------------------------------------------------------------------------

    def _failure(self, phase: Phase) -> StartupError:
        now = trio.current_time()
        missing = [index for index, end in self._restart_deadlines.items() if end <= now]
        seconds = self._limits.restart_grace
        if not missing:
            missing = self._machine.missing(phase)
            is_over = now >= self._total_deadline
            seconds = self._limits.total if is_over else self._limits.message
        notes = [*self._machine.notes, *self._absence(seconds)]
        sockets = {"input": self._connections}
        if self._handshake is not None:
            sockets = {"handshake": self._handshake.connections, **sockets}
        for name, connections in sockets.items():
            notes += _describe_connections(name, connections)
        return StartupError(phase.value, missing, seconds, notes)

    def _absence(self, seconds: float) -> list[str]:
        """Say that no engine has even connected, if so."""
        socket, connections = self._requests, self._connections
        if self._handshake is not None:
            socket, connections = self._handshake.socket, self._handshake.connections
        if connections.connection_count:
            return []
        text = f"no engine has connected to {socket.address} in {seconds:g} s;"
        if self._handshake is None:
            return [f"{text}{SERVED_BEFORE}"]
        port = socket.address.rpartition(":")[2] if socket.address.startswith("tcp:") else "PORT"
        return [
            f"{text} is it started with --data-parallel-rpc-port {port} (a mock with"
            f" --handshake-address {socket.address})?{SERVED_BEFORE}"
        ]

    # What comes ---------------------------------------------------------------------------------

    async def _take_reports(self) -> None:
        """Task: read the handshake socket and answer."""
        assert self._handshake is not None
        handshake, connections = self._handshake.socket, self._handshake.connections
        while True:
            for frames, connection in await handshake.receive_batch(BATCH):
                engine_id = self._machine.receive_report(frames)
                self._note_return(_sender(frames), is_new=engine_id is not None)
                if engine_id is not None:
                    connections.identify(connection, engine_id.engine_index)
                    # An engine that left in the meantime is reported as a disconnect, too.
                    with suppress(PeerGoneError):
                        handshake.send_nowait([engine_id, *self._handshake.init])
            self._update_progress()

    def _note_return(self, engine_index: int, *, is_new: bool) -> None:
        """An engine that has to start again may have done so, or was READY before it left.

        Of one whose other connection broke, a READY that was still under way says nothing.
        """
        if engine_index in self._restart_deadlines and (
            is_new or engine_index not in self._machine.missing(Phase.READY)
        ):
            del self._restart_deadlines[engine_index]

    async def _watch_handshakes(self) -> None:
        """Task: note which engines leave before they are ready."""
        assert self._handshake is not None
        connections = self._handshake.connections

        async def note_departure(engine_index: int) -> None:
            await trio.sleep(self._limits.settling_time)
            self._machine.lose_handshake(engine_index)
            if engine_index in self._machine.missing(Phase.READY):
                self._expect_restart(engine_index)
            self._update_progress()

        async with trio.open_nursery() as nursery:
            async for disconnect in connections:
                if disconnect.engine_index is not None:
                    nursery.start_soon(note_departure, disconnect.engine_index)

    async def _take_subscriptions(self) -> None:
        """Task: let all engines go on once all wait at the coordinator."""
        assert self._handshake is not None
        assert self._handshake.broadcasts is not None
        broadcasts = self._handshake.broadcasts
        while True:
            for frames, connection in await broadcasts.receive_batch(BATCH):
                if self._machine.receive_subscription(frames):
                    broadcasts.send_nowait([COORDINATOR_READY])
                if frames == [SUBSCRIBE] and connection is not None:
                    self.subscribers.add(connection)
            self._forget_subscribers()
            self._update_progress()

    def _forget_subscribers(self) -> None:
        """Forget those that are gone: engines that start anew, and strangers, which may be many."""
        if self._handshake is not None and (table := self._handshake.subscribers) is not None:
            gone = {disconnect.connection for disconnect in table.receive_pending()}
            self.subscribers -= gone

    async def _take_registrations(self) -> None:
        """Task: read the input socket."""
        while True:
            for frames, connection in await self._requests.receive_batch(BATCH):
                engine_index = self._machine.receive_registration(frames)
                if engine_index is not None:
                    self._connections.identify(connection, engine_index)
                    self._restart_deadlines.pop(engine_index, None)
                elif (sender := _sender(frames)) in self._machine.missing(Phase.REGISTRATION):
                    self._expect_restart(sender)
            self._update_progress()

    async def _take_disconnects(self) -> None:
        """Task: let engines start over whose connection broke."""
        async for disconnect in self._connections:
            if (engine_index := disconnect.engine_index) is not None:
                self._machine.lose(engine_index)
                self._expect_restart(engine_index)
            self._update_progress()

    async def _report(self) -> None:
        """Task: log from time to time what is waited for."""
        while True:
            await trio.sleep(self._limits.report_interval)
            if phase := self._machine.phase:
                missing = self._machine.missing(phase)
                _log.info("still waiting for %s of engines %s", phase.value, missing)

    def _expect_restart(self, engine_index: int) -> None:
        deadline = trio.current_time() + self._limits.restart_grace
        self._restart_deadlines.setdefault(engine_index, deadline)

    def _update_progress(self) -> None:
        """Log what is new; a message that brings the startup forward gives the next one its time."""
        machine = self._machine
        for note in machine.notes[self._notes_logged :]:
            _log.warning("%s", note)
        self._notes_logged = len(machine.notes)
        steps = machine.steps_missing
        if steps < self._fewest_steps:
            # Never more than before: an engine that crashes and restarts must not prolong it.
            self._fewest_steps = steps
            self._message_deadline = trio.current_time() + self._limits.message
            if phase := machine.phase:
                _log.info("waiting for %s of engines %s", phase.value, machine.missing(phase))
        self._waker.wake()


def _sender(frames: Frames) -> int:
    """Which engine a message names as its sender; -1 if none."""
    try:
        return EngineId(frames[0]).engine_index
    except DecodeError:
        return -1


def _describe_connections(name: str, connections: ConnectionTable) -> list[str]:
    """Say what is odd about the connections of a socket."""
    notes = []
    if idle := connections.idle_connections:
        notes.append(
            f"{idle} of the connections to the {name} socket said nothing (ZeroMQ does not hear a"
            " second engine with the same index, and an engine that has served another frontend"
            " does not register again)"
        )
    if foreign := connections.non_zmq_connections:
        notes.append(
            f"{foreign} of the connections to the {name} socket ended without a message in"
            " ZeroMQ's protocol"
        )
    return notes
