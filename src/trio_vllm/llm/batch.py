"""`BatchResults` iterates over the outcomes of many requests, of which a limited number is in flight."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

import trio

from trio_vllm.concurrency import Waker
from trio_vllm.errors import ConfigurationError, EngineCoreError, EngineDeadError

R = TypeVar("R")
O = TypeVar("O")  # noqa: E741


class BatchResults(Generic[R, O]):
    """An asynchronous iterator over pairs of a request and its output or error; see `Llm.map`.

    One task at a time may iterate.
    """

    def __init__(
        self,
        requests: Iterable[R] | AsyncIterable[R],
        send: Callable[[R], Awaitable[O]],
        *,
        limit: int,
        ordered: bool,
        retries: int,
    ) -> None:
        """
        Args:
          requests: Taken from one by one, as there is room.
          send: Answers one request; for example `Llm.generate`.
          limit: How many requests may be in flight or wait for the caller.
          ordered: Whether pairs come in the order of the requests.
          retries: How often a request is sent again whose engine has died.
        """
        if limit < 1 or retries < 0:
            raise ConfigurationError("limit must be 1 or more, and retries 0 or more")
        self._requests = aiter(requests) if isinstance(requests, AsyncIterable) else iter(requests)
        self._send = send
        self._retries = retries
        self._ordered = ordered
        # A slot is free again when the caller has got the pair, so that a slow caller slows the
        # sending and does not fill the memory.
        self._slots = trio.Semaphore(limit)
        self._waker = Waker()
        self._ready: dict[int, tuple[R, O | EngineCoreError]] = {}  # by the request's number
        self._taken_count = 0
        self._delivered_count = 0
        self._has_all = False
        self._failure: Exception | None = None

    def __aiter__(self) -> BatchResults[R, O]:
        return self

    async def __anext__(self) -> tuple[R, O | EngineCoreError]:
        """Wait for the next pair.

        Raises:
          trio.BusyResourceError: Another task is iterating.
          Exception: What iterating over the requests raised, after the pairs of those before.

        Cancellation:
          Loses no pair.
        """
        if self._next_number() is not None or self._is_over():
            await trio.lowlevel.checkpoint()
        while (number := self._next_number()) is None:
            if self._is_over():
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            await self._waker.wait()
        self._delivered_count += 1
        self._slots.release()
        return self._ready.pop(number)  # noqa: ASYNC910

    def _next_number(self) -> int | None:
        if self._ordered:
            return self._delivered_count if self._delivered_count in self._ready else None
        return next(iter(self._ready), None)

    def _is_over(self) -> bool:
        return self._has_all and self._delivered_count == self._taken_count

    async def run(self) -> None:
        """Task: send the requests, as many at a time as may be."""
        async with trio.open_nursery() as nursery:
            try:
                await self._send_all(nursery)
            finally:
                self._has_all = True
                self._waker.wake()

    async def _send_all(self, nursery: trio.Nursery) -> None:
        while True:
            await self._slots.acquire()
            try:
                request = await self._next_request()
            except StopAsyncIteration:
                return
            except Exception as error:  # it is the caller's, who gets it from `__anext__`
                self._failure = error
                return
            nursery.start_soon(self._answer, self._taken_count, request)
            self._taken_count += 1

    async def _next_request(self) -> R:
        if isinstance(self._requests, AsyncIterator):
            return await anext(self._requests)
        try:
            return next(self._requests)  # noqa: ASYNC910
        except StopIteration:  # which a coroutine cannot raise
            raise StopAsyncIteration from None

    async def _answer(self, number: int, request: R) -> None:  # noqa: ASYNC910
        for attempt in range(self._retries + 1):
            result: O | EngineCoreError
            try:
                result = await self._send(request)
            except EngineDeadError as error:
                result = error
                if attempt < self._retries:
                    continue
            except EngineCoreError as error:
                result = error
            self._ready[number] = request, result
            self._waker.wake()
            return  # noqa: ASYNC910
