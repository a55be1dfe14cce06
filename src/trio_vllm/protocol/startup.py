"""`FrontendStartup`: follows the startup of engines on the frontend's side, message by message.

Theory of operation. An engine goes through HELLO (answered with INIT), registration on the input
socket and READY on the handshake socket. The last two come over different connections, so either
may be first. If we are its coordinator, it also subscribes to our broadcasts before it registers,
and is not READY before all engines have subscribed and we have opened the gate.

Everything unexpected (a stranger's id, garbage, a message out of turn) is noted and left
unanswered: the expected engines may still come. A second HELLO of an engine that is not READY and
registered is a restart, it gets its INIT again; so does an engine that was lost and starts over.

Mirrors upstream ``vllm/v1/engine/utils.py::wait_for_engine_startup`` and
``engine-core-client/src/transport.rs``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import Frames
from trio_vllm.protocol.coordination import SUBSCRIBE
from trio_vllm.protocol.handshake import (
    EngineCoreReadyResponse,
    EngineId,
    HandshakeReport,
    HandshakeStatus,
    decode_ready_response,
    decode_report,
)
from trio_vllm.values import define

MAX_NOTES = 20
"""How many notes are kept: a hostile peer could cause any number."""


class Phase(enum.Enum):
    """What the startup waits for; the value is for messages."""

    HELLO = "HELLO"
    SUBSCRIPTION = "subscription at the coordinator"
    READY = "READY"
    REGISTRATION = "registration"


@define
class _Progress:
    hello: bool = False
    ready: HandshakeReport | None = None
    response: EngineCoreReadyResponse | None = None

    def reached(self, phase: Phase) -> bool:
        match phase:
            case Phase.HELLO:
                return self.hello
            case Phase.SUBSCRIPTION:
                # It does not say who it is, but registers next.
                return self.response is not None
            case Phase.READY:
                return self.ready is not None
            case Phase.REGISTRATION:
                return self.response is not None


class FrontendStartup:
    """Follows the startup of the expected engines from the messages they send.

    ``handshake=False`` is for a frontend whose supervisor does the handshake: only registrations
    are waited for. ``coordinator`` says whether we are the engines' coordinator too.
    """

    def __init__(
        self, engine_indices: Iterable[int], *, handshake: bool = True, coordinator: bool = False
    ) -> None:
        self._progress = {index: _Progress() for index in engine_indices}
        phases = set(Phase) if handshake else {Phase.REGISTRATION}
        if not coordinator:
            phases.discard(Phase.SUBSCRIPTION)
        self._phases = tuple(phase for phase in Phase if phase in phases)
        self._subscriptions = 0
        self.notes: list[str] = []
        """What was seen and should not have been, in words."""

    @property
    def phase(self) -> Phase | None:
        """The first phase that some engine has not reached; None if all is done."""
        return next((phase for phase in self._phases if self.missing(phase)), None)

    def missing(self, phase: Phase) -> list[int]:
        """The engines that have not reached ``phase``; all, if it is not known which."""
        if phase is Phase.SUBSCRIPTION and not self._subscriptions_missing:
            return []
        missing = [i for i, progress in self._progress.items() if not progress.reached(phase)]
        return missing or (list(self._progress) if phase is Phase.SUBSCRIPTION else [])

    @property
    def _subscriptions_missing(self) -> int:
        return max(len(self._progress) - self._subscriptions, 0)

    @property
    def steps_missing(self) -> int:
        """How many messages are still needed, of all engines together."""
        return sum(
            self._subscriptions_missing if phase is Phase.SUBSCRIPTION else len(self.missing(phase))
            for phase in self._phases
        )

    @property
    def ready_responses(self) -> dict[int, EngineCoreReadyResponse]:
        """The registrations, by engine index."""
        return {i: p.response for i, p in sorted(self._progress.items()) if p.response is not None}

    def receive_report(self, frames: Frames) -> EngineId | None:
        """Take a message of the handshake socket; the id returned is to be answered with INIT."""
        found = self._find(frames, "handshake")
        if found is None:
            return None
        engine_id, progress = found
        engine_index = engine_id.engine_index
        try:
            report = decode_report(frames[1:])
        except DecodeError as error:
            self.note(f"engine {engine_index} sent garbage: {error}")
            return None
        if report.status is HandshakeStatus.READY:
            if not progress.hello or progress.ready is not None:
                self.note(f"engine {engine_index} said READY out of turn")
            else:
                progress.ready = report
            return None
        if progress.ready is not None and progress.response is not None:
            # The first one lives: this one would be sent requests that it does not know of.
            self.note(f"engine {engine_index} said HELLO after READY: are there two of it?")
            return None
        if progress.hello:
            self.note(f"engine {engine_index} said HELLO again")
        # READY without a registration: that was lost with its connection, or is still under way.
        progress.hello = True
        return engine_id

    def receive_subscription(self, frames: Frames) -> bool:
        """Take a message of the engines on the coordinator's socket; whether to open the gate.

        The gate is opened again for each engine that comes late, after a restart for example: the
        others ignore it.
        """
        if frames != [SUBSCRIBE]:
            return False
        self._subscriptions += 1
        return not self._subscriptions_missing

    def receive_registration(self, frames: Frames) -> int | None:
        """Take a message of the input socket; gives the index of an engine that registered."""
        found = self._find(frames, "input")
        if found is None:
            return None
        engine_id, progress = found
        engine_index = engine_id.engine_index
        if progress.response is not None:
            self.note(f"engine {engine_index} registered again")
            return None
        try:
            progress.response = decode_ready_response(frames[1:])
        except DecodeError as error:
            self.note(f"engine {engine_index} sent garbage: {error}")
            return None
        return engine_index

    def lose_handshake(self, engine_index: int) -> None:
        """The handshake connection of an engine ended; as it should, if the engine is READY."""
        if self._progress[engine_index].ready is None:
            self.note(f"engine {engine_index} left before it was READY")

    def lose(self, engine_index: int) -> None:
        """The connection of an engine that had registered broke: it has to start over."""
        self.note(f"engine {engine_index} was lost during startup")
        self._progress[engine_index] = _Progress()
        # It had subscribed before it registered.
        self._subscriptions = max(self._subscriptions - 1, 0)

    def _find(self, frames: Frames, socket: str) -> tuple[EngineId, _Progress] | None:
        """Find the sender of a message, and its progress; None for a stranger."""
        if len(frames) != 2:
            self.note(f"a message of {len(frames)} frames came on the {socket} socket")
            return None
        engine_id = EngineId(bytes(frames[0]))
        try:
            engine_index = engine_id.engine_index
        except DecodeError:
            stranger = f"a peer with the id {engine_id[:16].hex()}, which is no engine id,"
        else:
            if progress := self._progress.get(engine_index):
                return engine_id, progress
            stranger = f"engine {engine_index}, which is not expected,"
        self.note(f"{stranger} spoke on the {socket} socket")
        return None

    def note(self, text: str) -> None:
        """Keep what was seen and should not have been; once, if it is seen repeatedly."""
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)
