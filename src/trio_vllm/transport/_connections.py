"""Which engine is at the other end of each connection of a bound socket, and which one is lost."""

from __future__ import annotations

from collections import deque

import trio

from trio_vllm.transport._monitor import PeerEvent, PeerEventKind, PeerMonitor


class EngineConnections(trio.abc.ReceiveChannel[int]):
    """A channel of the engines whose connection broke, by index.

    ØMQ tells only the descriptor of a broken connection, so each engine's is kept from a message
    that came by it. The number may be given to another connection afterwards, so it is forgotten
    with the loss.
    """

    def __init__(self, monitor: PeerMonitor) -> None:
        self._monitor = monitor
        self._engine_of: dict[int, int | None] = {}
        self._open: set[int] = set()
        self._broken: set[int] = set()  # whose number is not in use again
        self._lost: deque[int] = deque()
        self._waiting = trio.CancelScope()
        # Two threads of ØMQ tell of the beginning and the end, so a short one may end first.
        self._ended_early: set[int] = set()
        self._mute: set[int] = set()  # the broken ones nothing had come by
        self._earlier_mute = 0  # those whose number is in use again

    @property
    def silent_count(self) -> int:
        """How many connections nothing has come by."""
        self._take_pending()
        return len(self._open - self._engine_of.keys())

    @property
    def mute_count(self) -> int:
        """How many connections ended before anything came by them: of those who do not speak ØMQ."""
        self._take_pending()
        return self._earlier_mute + len(self._mute)

    def watch(self, engine_index: int | None, descriptor: int) -> None:
        """A message came by this connection; from an engine, or from we do not know whom."""
        self._take_pending()
        self._mute.discard(descriptor)
        previous = self._engine_of.get(descriptor)
        if descriptor in self._broken:
            self._lose(engine_index)
        elif previous is None:
            self._engine_of[descriptor] = engine_index
        elif engine_index not in (None, previous):
            self._engine_of[descriptor] = engine_index
            self._lose(previous)

    def _take_pending(self) -> None:
        # The monitor has told of the beginning of a connection before a message can come by it.
        for event in self._monitor.receive_pending():
            self._take(event)

    def _take(self, event: PeerEvent) -> None:
        descriptor = event.descriptor
        if event.kind is PeerEventKind.ACCEPTED and descriptor is not None:
            if descriptor in self._ended_early:
                self._ended_early.remove(descriptor)
                return
            self._open.add(descriptor)
            self._broken.discard(descriptor)
            self._reuse(descriptor)
        elif event.kind is PeerEventKind.DISCONNECTED and descriptor is not None:
            if descriptor not in self._open:
                self._ended_early.add(descriptor)
            self._open.discard(descriptor)
            self._broken.add(descriptor)
            if descriptor not in self._engine_of:
                self._reuse(descriptor)
                self._mute.add(descriptor)
            self._lose(self._engine_of.pop(descriptor, None))

    def _reuse(self, descriptor: int) -> None:
        """The number is that of another connection than before."""
        if descriptor in self._mute:
            self._mute.remove(descriptor)
            self._earlier_mute += 1

    def _lose(self, engine_index: int | None) -> None:
        if engine_index is not None:
            self._lost.append(engine_index)
            self._waiting.cancel()

    async def receive(self) -> int:
        """Wait for the next loss; gives the engine's index. Cancelling loses none."""
        await trio.lowlevel.checkpoint()
        while not self._lost:
            with trio.CancelScope() as self._waiting:
                self._take(await self._monitor.receive())
        return self._lost.popleft()

    async def aclose(self) -> None:
        """Watch no longer."""
        await self._monitor.aclose()
