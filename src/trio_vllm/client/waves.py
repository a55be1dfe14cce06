"""`WaveLeader` and `WaveFollower`: a client's part in the data-parallel waves, sans IO.

What a coordinator has to do is in `trio_vllm.protocol.Waves`. It runs in our process
(`WaveLeader`), or in a supervisor's that publishes what it knows (`WaveFollower`). Engines that do
not run in lockstep have no waves; their coordinators only count requests.

Both take messages and return the messages to send: a leader's are broadcast to the engines, a
follower's go to the coordinator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from trio_vllm.client.engines import EngineConnections
from trio_vllm.errors import DecodeError, EngineDeadError
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


RESUBSCRIBE_GRACE = 1.0
"""Seconds that an engine has to connect to the broadcasts again, or we to the coordinator, which ØMQ
does in tenths of one."""


class WaveLeader:
    """Coordinates the engines: wakes those that wait when one of them has work.

    A connection to the broadcasts does not tell whose it is. So if one breaks, and there are then
    fewer that have subscribed than engines, one of them is deaf, and all would wait for it.
    """

    def __init__(
        self,
        engine_indices: Collection[int],
        *,
        is_lockstep: bool,
        subscribers: Iterable[int] = (),
    ) -> None:
        """
        Args:
          engine_indices: The engines.
          is_lockstep: Whether they have waves; else they are not to be woken.
          subscribers: The connections that have subscribed to the broadcasts already.
        """
        self._is_lockstep = is_lockstep
        self._engine_count = len(engine_indices)
        self._connections = EngineConnections(engine_indices)
        self._subscribers = set(subscribers)
        self._waves = Waves()
        self.next_deadline = math.inf
        """When the engines are lost, unless one subscribes that has lost its connection."""

    @property
    def current_wave(self) -> int:
        """The wave that the engines run, or will run next."""
        return self._waves.current_wave

    @property
    def subscriber_count(self) -> int:
        """How many connections have subscribed to the broadcasts and are not lost: all that is kept of them."""
        return len(self._subscribers)

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

    def receive_subscription(self, frames: Frames, connection: int | None) -> Messages:
        """An engine's connection to the broadcasts is new; it may have missed some."""
        if frames != [SUBSCRIBE]:
            return []
        if connection is not None:
            self._subscribers.add(connection)
        if len(self._subscribers) >= self._engine_count:
            self.next_deadline = math.inf
        return [[COORDINATOR_READY], *_broadcasts(self._waves.receive_subscription())]

    def lose_connection(self, connection: int | None, now: float) -> None:
        """A connection broke; if it had subscribed, an engine may hear no broadcasts any more."""
        if connection not in self._subscribers:
            return
        self._subscribers.remove(connection)
        if self._is_lockstep and len(self._subscribers) < self._engine_count:
            self.next_deadline = min(self.next_deadline, now + RESUBSCRIBE_GRACE)

    def expire(self, now: float) -> EngineDeadError | None:
        """The deadline may have passed: gives the error for all that wait then."""
        if now < self.next_deadline:
            return None
        self.next_deadline = math.inf
        return EngineDeadError(None, "its connection to the coordinator was lost")


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
        self._is_cut_off = False
        self.next_deadline = math.inf
        """When all is lost, unless the connection to the coordinator is back."""

    @property
    def current_wave(self) -> int:
        """The wave that was published last."""
        return self._waves.current_wave

    def send_request(self, engine_index: int) -> Messages:
        """A request is sent to this engine; an older coordinator must be told if all are idle."""
        if self._is_lockstep and self._must_notify and not self._waves.engines_running:
            return [encode_first_request_notice(engine_index, self._waves.current_wave)]
        return []

    def lose_coordinator(self, now: float) -> None:
        """The connection to the coordinator broke.

        Engines in lockstep need one to wake each other, and if it is gone, ours is all that tells.
        """
        self._is_cut_off = True
        _log.warning("the connection to the coordinator was lost")
        if self._is_lockstep:
            self.next_deadline = now + RESUBSCRIBE_GRACE

    def regain_coordinator(self) -> None:
        """The connection is back; the coordinator may be another one, whose first wave may be any."""
        if self._is_cut_off:
            _log.warning("the coordinator is connected again")
        self._is_cut_off = self._has_heard = False
        self.next_deadline = math.inf

    def expire(self, now: float) -> EngineDeadError | None:
        """The deadline may have passed: gives the error for all that wait then."""
        if now < self.next_deadline:
            return None
        self.next_deadline = math.inf
        return EngineDeadError(None, "the coordinator is gone")

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
