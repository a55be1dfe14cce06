"""`WaveLeader` and `WaveFollower`: a client's part in the data-parallel waves, sans IO.

What a coordinator has to do is in `trio_vllm.protocol.Waves`. It runs in our process
(`WaveLeader`), or in a supervisor's that publishes what it knows (`WaveFollower`). Engines that do
not run in lockstep have no waves; their coordinators only count requests.

Both take messages and return the messages to send: a leader's are broadcast to the engines, a
follower's go to the coordinator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from trio_vllm.client.engines import EngineConnections
from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    SUBSCRIBE,
    Buffer,
    DpControlOutput,
    Frames,
    StartDpWave,
    Waves,
    decode_coordinator_notice,
    decode_coordinator_stats,
    encode_first_request_notice,
    encode_start_dp_wave,
)

_log = logging.getLogger("trio_vllm.client")

Messages: TypeAlias = list[Sequence[Buffer]]

MAX_WAVE_LEAD = 1 << 16
"""How far the wave in a message may be ahead of ours. Waves come one by one, and only a few can be
under way; what is far ahead is a mistake that no later message could put right."""


class WaveTracker(Protocol):
    """What the client needs of either."""

    @property
    def current_wave(self) -> int:
        """What a request is stamped with."""
        ...

    def send_request(self, engine_index: int) -> Messages:
        """A request is sent to this engine."""
        ...


class WaveLeader:
    """Coordinates the engines: wakes those that wait when one of them has work."""

    def __init__(self, engine_indices: Iterable[int], *, is_lockstep: bool) -> None:
        """Without ``is_lockstep`` the engines have no waves, and are not to be woken."""
        self._is_lockstep = is_lockstep
        self._connections = EngineConnections(engine_indices)
        self._waves = Waves()

    @property
    def current_wave(self) -> int:
        """The wave that the engines run, or will run next."""
        return self._waves.current_wave

    def engine_of(self, connection: int | None) -> int | None:
        """The engine that is known to send its notices by this connection."""
        return self._connections.engine_of(connection)

    def send_request(self, engine_index: int) -> Messages:
        """A request is sent to this engine; the others may wait for it."""
        return _broadcasts(self._waves.send_request(engine_index)) if self._is_lockstep else []

    def receive_notice(self, frames: Frames, connection: int | None) -> Messages:
        """An engine tells of a wave, or of its load.

        Raises:
          DecodeError: The message is no notice, or not of the engine that it names. ``engine_index``
            is the engine that is known to have sent it, or None if that is not known.
        """
        try:
            notice = decode_coordinator_notice(frames)
            _check_notice(notice, self.current_wave)
        except DecodeError as error:
            error.engine_index = self.engine_of(connection)
            raise
        if notice is None:
            return []
        if not self._connections.claim(connection, notice.engine_index):
            reason = f"engine {notice.engine_index} is not known by this connection"
            raise DecodeError("a notice to the coordinator", "", reason)
        return _broadcasts(self._waves.receive_notice(notice))

    def receive_subscription(self, frames: Frames) -> Messages:
        """An engine's connection to the broadcasts is new; it may have missed some."""
        if frames != [SUBSCRIBE]:
            return []
        return [[COORDINATOR_READY], *_broadcasts(self._waves.receive_subscription())]


def _check_notice(notice: DpControlOutput | None, current_wave: int) -> None:
    if notice is not None:
        what = "a notice to the coordinator"
        _check_lead(notice.wave_complete, current_wave, what, ".wave_complete")
        _check_lead(notice.start_wave, current_wave, what, ".start_wave")


def _check_lead(wave: int | None, current_wave: int, what: str, where: str) -> None:
    if wave is not None and wave > current_wave + MAX_WAVE_LEAD:
        raise DecodeError(what, where, f"is {wave}, far ahead of wave {current_wave}")


def _broadcasts(message: StartDpWave | None) -> Messages:
    if message is None:
        return []
    _log.debug("%s", message)
    return [encode_start_dp_wave(message)]


class WaveFollower:
    """Knows what a coordinator in another process publishes, and tells it of requests if it must."""

    def __init__(self, *, is_lockstep: bool, must_notify: bool) -> None:
        """
        Args:
          is_lockstep: Whether the engines have waves at all.
          must_notify: Whether the coordinator must be told of requests to idle engines; one that
            need not be takes that for an error.
        """
        self._is_lockstep = is_lockstep
        self._must_notify = must_notify
        self._waves = Waves()
        self._has_heard = False

    @property
    def current_wave(self) -> int:
        """The wave that was published last."""
        return self._waves.current_wave

    def send_request(self, engine_index: int) -> Messages:
        """A request is sent to this engine; an older coordinator must be told if all are idle."""
        if self._is_lockstep and self._must_notify and not self._waves.engines_running:
            return [encode_first_request_notice(engine_index, self._waves.current_wave)]
        return []

    def receive_publication(self, frames: Frames) -> None:
        """The coordinator publishes the wave.

        Raises:
          DecodeError: It cannot be understood, and the engines need it. Without lockstep they do
            not, and that is only logged.
        """
        try:
            stats = decode_coordinator_stats(frames)
            if self._has_heard:  # we may have come late, so the first may be any
                wave, what = stats.current_wave, "a coordinator's stats"
                _check_lead(wave, self.current_wave, what, ".current_wave")
        except DecodeError as error:
            if self._is_lockstep:
                raise
            _log.warning("%s", error)
        else:
            self._has_heard = True
            self._waves.follow(stats)
