"""The data-parallel waves: lead the engines through them, or follow who leads them.

What a coordinator has to do is in `trio_vllm.protocol.Waves`. It runs in our process
(`WaveLeader`), or in a supervisor's that publishes what it knows (`WaveFollower`). Engines that do
not run in lockstep have no waves; their coordinators only count requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    COORDINATOR_READY,
    SUBSCRIBE,
    Frames,
    StartDpWave,
    Waves,
    decode_coordinator_notice,
    decode_coordinator_stats,
    encode_first_request_notice,
    encode_start_dp_wave,
)
from trio_vllm.transport import FollowerChannels, FrameReceiver, LeaderChannels

_log = logging.getLogger("trio_vllm.client")

BATCH = 100
"""Messages handled between two checkpoints."""


class WaveTracker(Protocol):
    """What the client needs of either."""

    @property
    def current_wave(self) -> int:
        """What a request is stamped with."""
        ...

    def send_request(self, engine_index: int) -> None:
        """A request has been sent to this engine."""
        ...

    async def run(self) -> None:
        """Task: keep up with the engines, for ever."""
        ...


class WaveLeader:
    """The coordinator of the engines. What is wrong with a notice to it is fatal for all of them."""

    def __init__(
        self, links: LeaderChannels, *, is_lockstep: bool, on_failure: Callable[[DecodeError], None]
    ) -> None:
        self._links = links
        self._is_lockstep = is_lockstep
        self._on_failure = on_failure
        self._waves = Waves()

    @property
    def current_wave(self) -> int:
        """See `WaveTracker`."""
        return self._waves.current_wave

    def send_request(self, engine_index: int) -> None:
        """See `WaveTracker`."""
        if self._is_lockstep:
            self._wake(self._waves.send_request(engine_index))

    async def run(self) -> None:
        """See `WaveTracker`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_all, self._links.notices, self._take_notice)
            nursery.start_soon(receive_all, self._links.subscriptions, self._take_subscription)

    def _take_notice(self, frames: Frames) -> None:
        try:
            notice = decode_coordinator_notice(frames)
        except DecodeError as error:
            self._on_failure(error)
            return
        if notice is not None:
            self._wake(self._waves.receive_notice(notice))

    def _take_subscription(self, frames: Frames) -> None:
        if frames == [SUBSCRIBE]:
            self._links.broadcasts.send_nowait([COORDINATOR_READY])
            self._wake(self._waves.receive_subscription())

    def _wake(self, message: StartDpWave | None) -> None:
        if message is not None:
            _log.debug("%s", message)
            self._links.broadcasts.send_nowait(encode_start_dp_wave(message))


class WaveFollower:
    """Knows what a coordinator in another process publishes."""

    def __init__(
        self,
        links: FollowerChannels,
        *,
        is_lockstep: bool,
        must_notify: bool,
        on_failure: Callable[[DecodeError], None],
    ) -> None:
        """
        Args:
          links: The way to the coordinator.
          is_lockstep: Whether the engines have waves at all.
          must_notify: Whether the coordinator must be told of requests to idle engines; one that
            need not be takes that for an error.
          on_failure: The coordinator cannot be understood, and the engines need it.
        """
        self._links = links
        self._is_lockstep = is_lockstep
        self._must_notify = must_notify
        self._on_failure = on_failure
        self._waves = Waves()

    @property
    def current_wave(self) -> int:
        """See `WaveTracker`."""
        return self._waves.current_wave

    def send_request(self, engine_index: int) -> None:
        """See `WaveTracker`."""
        if self._is_lockstep and self._must_notify and not self._waves.engines_running:
            notice = encode_first_request_notice(engine_index, self._waves.current_wave)
            self._links.notices.send_nowait(notice)

    async def run(self) -> None:
        """See `WaveTracker`."""
        await receive_all(self._links.publications, self._take)

    def _take(self, frames: Frames) -> None:
        try:
            self._waves.follow(decode_coordinator_stats(frames))
        except DecodeError as error:
            if self._is_lockstep:
                self._on_failure(error)
            else:
                _log.warning("%s", error)


async def receive_all(receiver: FrameReceiver, take: Callable[[Frames], None]) -> None:
    """Task: hand over every message, for ever."""
    while True:
        for frames, _ in await receiver.receive_batch(BATCH):
            take(frames)
