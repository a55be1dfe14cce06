"""Waiting for the completions of one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from trio_vllm._errors import fresh
from trio_vllm._waker import Waker
from trio_vllm.llm._collector import Collector
from trio_vllm.llm._output import CompletionOutput


@attrs.define(eq=False)
class Generation:
    """The engine requests of one caller's request, which share a waker. One task may wait."""

    external_id: str
    collectors: Sequence[Collector]
    _waker: Waker
    submitted_count: int = attrs.field(default=0, init=False)
    """How many of them the client has taken."""
    _turn: int = attrs.field(default=0, init=False)
    """Which completion may deliver next."""

    async def wait_due(self) -> Collector | None:
        """Wait until some completion has a delivery; None when all have ended."""
        await self._wait_for_news()
        while True:
            if due := self._next_due():
                return due
            self._raise_error()
            if self._has_ended():
                return None
            await self._waker.wait()

    def _next_due(self) -> Collector | None:
        """One completion after the other: with a slow caller the first might always be due."""
        collectors, turn = self.collectors, self._turn
        for number in range(turn, turn + len(collectors)):
            collector = collectors[number % len(collectors)]
            if collector.is_due:
                self._turn = (number + 1) % len(collectors)
                return collector
        return None

    async def wait_ended(self) -> None:
        """Wait for the ends of all completions."""
        await self._wait_for_news()
        while not self._has_ended():
            self._raise_error()
            await self._waker.wait()

    async def _wait_for_news(self) -> None:
        """Wait until there may be something new; if there is, only let others run."""
        if self._has_ended() or any(c.is_due or c.error is not None for c in self.collectors):
            await trio.lowlevel.checkpoint()
        else:
            await self._waker.wait()

    def _has_ended(self) -> bool:
        return all(collector.finished for collector in self.collectors)

    def _raise_error(self) -> None:
        for collector in self.collectors:
            if collector.error is not None:
                raise fresh(collector.error)


class GenerateStream:
    """An asynchronous iterator over what is new of a prompt's completions; see `Llm.stream`.

    A caller who is slower than the engine gets several tokens at once. One task at a time may
    iterate.
    """

    def __init__(self, generation: Generation) -> None:
        self.request_id = generation.external_id
        """The caller's id."""
        self._generation = generation

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> CompletionOutput:
        """Wait for the next delivery.

        Raises:
          EngineDeadError: The engine died, or its connection was lost.
          DecodeError: An output of this request could not be read.
          ClientClosedError: The client was closed.
          trio.BusyResourceError: Another task is iterating.

        Cancellation:
          Loses nothing; what came in the meantime is part of the next delivery.
        """
        collector = await self._generation.wait_due()
        if collector is None:
            raise StopAsyncIteration
        return collector.take()
