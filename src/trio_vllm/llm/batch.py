"""`BatchResults` iterates over the outcomes of many requests, of which a limited number is in flight."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import trio

from trio_vllm.concurrency import Waker
from trio_vllm.errors import (
    AdapterError,
    ClientClosedError,
    ConfigurationError,
    EngineCoreError,
    EngineDeadError,
    UtilityError,
    copy_error,
)

R = TypeVar("R")
O = TypeVar("O")  # noqa: E741

ERRORS_OF_THE_END = (EngineDeadError, ClientClosedError, UtilityError, AdapterError)
"""What requests fail with as the last engine dies: their own, or the calls made for them."""


class Service(Protocol):
    """What answers the requests, and may end; an `EngineCoreClient`."""

    @property
    def failure(self) -> EngineCoreError | None:
        """Why it answers no request any more; None while it does."""

    @property
    def engine_indices(self) -> Sequence[int]:
        """The engines that take requests. There is none for a moment before the failure, too."""

    async def wait_failed(self) -> EngineCoreError:
        """Wait until it answers no request any more; gives the reason."""


class BatchResults(Generic[R, O]):
    """An asynchronous iterator over pairs of a request and its output or error; see `Llm.map`.

    One task at a time may iterate.
    """

    def __init__(
        self,
        requests: Iterable[R] | AsyncIterable[R],
        send: Callable[[R], Awaitable[O]],
        service: Service,
        *,
        limit: int,
        ordered: bool,
        retries: int,
    ) -> None:
        """
        Args:
          requests: Taken from one by one, as there is room.
          send: Answers one request; for example `Llm.generate`.
          service: Who answers behind it.
          limit: How many requests may be in flight or wait for the caller.
          ordered: Whether pairs come in the order of the requests.
          retries: How often a request is sent again whose engine has died.
        """
        if limit < 1 or retries < 0:
            raise ConfigurationError("limit must be 1 or more, and retries 0 or more")
        self._requests = aiter(requests) if isinstance(requests, AsyncIterable) else iter(requests)
        self._send = send
        self._service = service
        self._retries = retries
        self._ordered = ordered
        # A slot is free again when the caller has got the pair, so that a slow caller slows the
        # sending and does not fill the memory.
        self._slots = trio.Semaphore(limit)
        self._waker = Waker()
        self._taking = trio.CancelScope()
        # By the requests' numbers, in the order in which they were taken or have ended.
        self._undelivered: dict[int, R] = {}
        self._ready: dict[int, O | EngineCoreError] = {}
        self._taken_count = 0
        self._delivered_count = 0
        self._is_exhausted = False
        self._has_ended = False
        self._failure: Exception | None = None

    @property
    def unanswered(self) -> Sequence[R]:
        """The requests that were taken and whose pairs have not come, in the order of the requests.

        After the last engine has died, these and what is left of the requests are still to be done;
        in order, that includes those that were answered behind one that was not.
        """
        return list(self._undelivered.values())

    def __aiter__(self) -> BatchResults[R, O]:
        return self

    async def __anext__(self) -> tuple[R, O | EngineCoreError]:
        """Wait for the next pair.

        Raises:
          EngineDeadError: No engine is left, and all pairs there were have come, in order those up to
            the first that is missing.
          ClientClosedError: The client was closed, likewise.
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
        return self._undelivered.pop(number), self._ready.pop(number)  # noqa: ASYNC910

    def _next_number(self) -> int | None:
        if self._ordered:
            return self._delivered_count if self._delivered_count in self._ready else None
        return next(iter(self._ready), None)

    def _is_over(self) -> bool:
        return self._has_ended and self._next_number() is None

    # Sending ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Task: send the requests, as many at a time as may be, until all are answered."""
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(self._watch_service)
                async with trio.open_nursery() as answering:
                    with self._taking:
                        await self._send_all(answering)
                if not self._is_cut_short():
                    watching.cancel_scope.cancel(reason="there is nothing to do")
        finally:
            self._end()

    def _end(self) -> None:
        """Let the caller get what there is, in order up to the first request given up; then the failure."""
        failure = self._service.failure
        if failure is not None and self._is_cut_short():
            self._failure = copy_error(failure)
        self._has_ended = True
        self._waker.wake()

    def _is_cut_short(self) -> bool:
        """Whether requests are left because nobody is there to answer them."""
        is_all_answered = self._is_exhausted and len(self._undelivered) == len(self._ready)
        return self._failure is None and not self._is_served() and not is_all_answered

    def _is_served(self) -> bool:
        return self._service.failure is None and bool(self._service.engine_indices)

    async def _watch_service(self) -> None:
        """Task: take no further request when nobody is left to answer it."""
        await self._service.wait_failed()
        self._taking.cancel(reason="no request is answered any more")

    async def _send_all(self, nursery: trio.Nursery) -> None:
        while True:
            await self._slots.acquire()
            if not self._is_served():
                return
            try:
                request = await self._next_request()
            except StopAsyncIteration:
                self._is_exhausted = True
                return
            except Exception as error:  # it is the caller's, who gets it from `__anext__`
                self._fail(error)
                return
            self._undelivered[self._taken_count] = request
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
        try:
            result = await self._outcome(request)
        except Exception as error:  # no outcome of a request, so the caller's mistake
            self._fail(error)
            return  # noqa: ASYNC910
        # Of a request that came too late nothing is known: it can be sent to other engines.
        if isinstance(result, EngineCoreError) and self._is_given_up(result):
            self._taking.cancel(reason="no request is answered any more")
            return  # noqa: ASYNC910
        self._ready[number] = result
        self._waker.wake()

    async def _outcome(self, request: R) -> O | EngineCoreError:
        retries = self._retries
        while True:  # noqa: ASYNC913 (sending is a checkpoint)
            try:
                return await self._send(request)
            except EngineCoreError as error:
                can_retry = retries and isinstance(error, EngineDeadError)
                if not can_retry or self._is_given_up(error):
                    return error  # noqa: ASYNC910
                retries -= 1

    def _is_given_up(self, error: EngineCoreError) -> bool:
        """Whether a request failed because nobody is left to answer any."""
        return not self._is_served() and isinstance(error, ERRORS_OF_THE_END)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._taking.cancel(reason="the requests cannot be gone on with")
