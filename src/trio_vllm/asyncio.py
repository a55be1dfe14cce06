"""`open_llm` for programs on asyncio: the same `Llm`, with trio as a guest of their event loop.

Theory of operation. Trio's guest mode runs trio's scheduler in the thread of another event loop: a
helper thread only waits for descriptors. Each asyncio loop has at most one such run, shared by all
that is open on it. Whatever is asked of it becomes a trio task whose outcome completes a future of
the loop; cancelling who awaits the future cancels the trio task, and waits for its end, so that
leaving is aborting here too. Both loops share one thread, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import trio

from trio_vllm import llm as trio_llm
from trio_vllm import spawn
from trio_vllm.concurrency import Opening, explains_misuse
from trio_vllm.errors import EngineCoreError
from trio_vllm.llm import (
    BatchResults,
    CompletionDelta,
    EncodeOutput,
    EncodeRequest,
    GenerateOutput,
    GenerateRequest,
    GenerateStream,
    LlmStatistics,
)

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")

TRIO_LLM = "the Llm of trio_vllm.open_llm"


class Llm:
    """Token in, token out; made by `open_llm`. The methods are those of `trio_vllm.Llm`."""

    def __init__(self, guest: GuestRun, llm: trio_llm.Llm) -> None:
        self._guest = guest
        self.trio = llm
        """The `trio_vllm.Llm` behind it; its coroutine functions are for `run_in_trio`."""

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Complete a prompt and wait for the end; see `trio_vllm.Llm.generate`.

        Cancellation:
          Aborts the request.
        """
        return await self._guest.run(self.trio.generate, request)

    @explains_misuse("llm.stream", instead=TRIO_LLM, library="asyncio")
    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[CompletionStream]:
        """Complete a prompt; ``async with llm.stream(request) as deltas`` iterates over what is new.

        Leaving the block early, for whatever reason, aborts the request. See
        `trio_vllm.Llm.stream`.
        """
        async with self._guest.enter(self.trio.stream(request)) as stream:
            yield CompletionStream(self._guest, stream)

    @explains_misuse("llm.map", instead=TRIO_LLM, library="asyncio")
    @asynccontextmanager
    async def map(
        self,
        requests: Iterable[GenerateRequest] | AsyncIterable[GenerateRequest],
        *,
        limit: int = 256,
        ordered: bool = False,
        retries: int = 0,
    ) -> AsyncIterator[BatchStream]:
        """Complete many prompts; ``async with llm.map(requests) as results`` iterates over pairs.

        Arguments and errors are those of `trio_vllm.Llm.map`. An asynchronous iterable runs on
        asyncio. Leaving the block aborts what is in flight.
        """
        if isinstance(requests, AsyncIterable):
            requests = _FromAsyncio(requests)
        manager = self.trio.map(requests, limit=limit, ordered=ordered, retries=retries)
        async with self._guest.enter(manager) as results:
            yield BatchStream(self._guest, results)

    async def encode(self, request: EncodeRequest) -> EncodeOutput:
        """Pool a prompt; see `trio_vllm.Llm.encode`. Cancelled like `generate`."""
        return await self._guest.run(self.trio.encode, request)

    def abort(self, request_ids: Iterable[str] = ()) -> None:
        """End requests by the caller's ids, without ids all; see `trio_vllm.Llm.abort`."""
        self.trio.abort(request_ids)

    def statistics(self, since: LlmStatistics | None = None) -> LlmStatistics:
        """What is known now of engines and requests; see `trio_vllm.Llm.statistics`."""
        return self.trio.statistics(since)

    async def shutdown(self) -> None:
        """Abort everything and close the client; idempotent."""
        await self._guest.run(self.trio.shutdown)

    async def run_in_trio(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a coroutine function of trio's, such as ``llm.trio.client.sleep``, to its end.

        Raises:
          BaseException: What ``function`` raises, bare.
          TypeError: ``function`` is no coroutine function. One that does not wait, such as
            ``llm.trio.client.scheduler_stats``, is called directly.

        Cancellation:
          Cancels the function and waits until it has ended.
        """
        if asyncio.iscoroutine(function):
            function.close()  # type: ignore[unreachable]
            raise TypeError(
                f"run_in_trio takes a coroutine function and its arguments, not {function!r}"
            )
        return await self._guest.run(_call, function, *args)


async def _call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a coroutine function; `TypeError` if it is none."""
    awaitable = function(*args)
    if not isinstance(awaitable, Awaitable):
        raise TypeError(
            f"run_in_trio takes coroutine functions; {function!r} does not wait, so call it directly"
        )
    return await awaitable


class Stream(Generic[T]):
    """An asynchronous iterator over what comes of one request or of many; see `Llm.stream`."""

    def __init__(self, guest: GuestRun, stream: AsyncIterator[T], request_id: str = "") -> None:
        self._guest = guest
        self._stream = stream
        self.request_id = request_id
        """The caller's id; empty if these are the outputs of many."""
        # What trio's side has taken from its stream stays here if who waited for it was cancelled.
        self._deliveries: deque[T] = deque()

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        """Wait for the next delivery; see `trio_vllm.GenerateStream`.

        Cancellation:
          Loses nothing; what came in the meantime is part of the next delivery.
        """
        if not self._deliveries:
            await self._guest.run(self._receive)
        return self._deliveries.popleft()

    async def _receive(self) -> None:
        self._deliveries.append(await self._stream.__anext__())


class CompletionStream(Stream[CompletionDelta]):
    """An asynchronous iterator over the deltas of a prompt's completions; see `Llm.stream`."""

    def __init__(self, guest: GuestRun, stream: GenerateStream) -> None:
        super().__init__(guest, stream, stream.request_id)
        self._completions = stream

    def stop(self, stop_reason: str | None = None, *, index: int | None = None) -> None:
        """Finish a completion that matched a stop string; see `trio_vllm.GenerateStream.stop`."""
        self._completions.stop(stop_reason, index=index)


class BatchStream(Stream[tuple[GenerateRequest, GenerateOutput | EngineCoreError]]):
    """An asynchronous iterator over pairs of a request and its output or error; see `Llm.map`."""

    def __init__(
        self, guest: GuestRun, results: BatchResults[GenerateRequest, GenerateOutput]
    ) -> None:
        super().__init__(guest, results)
        self._results = results

    @property
    def unanswered(self) -> Sequence[GenerateRequest]:
        """The requests that were taken and whose pairs have not come; see `trio_vllm.Llm.map`."""
        return [*(request for request, _ in self._deliveries), *self._results.unanswered]


class _FromAsyncio(AsyncIterator[T]):
    """Iterates on asyncio for a task of trio's in the same thread."""

    def __init__(self, iterable: AsyncIterable[T]) -> None:
        self._iterator = aiter(iterable)
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> T:
        task = self._loop.create_task(self._next())
        done = trio.Event()
        task.add_done_callback(lambda _: done.set())
        try:
            await done.wait()
        except trio.Cancelled:
            task.cancel()
            with trio.CancelScope(shield=True):
                await done.wait()
            if task.cancelled():
                raise
        # If it was too late to cancel the task, what it has got must not be lost.
        return task.result()

    async def _next(self) -> T:
        return await anext(self._iterator)


class SpawnedEngine:
    """Engines that a command of ours has started, for `open_llm`; made by `spawn_engine`."""

    def __init__(self, guest: GuestRun, engine: spawn.SpawnedEngine) -> None:
        self._guest = guest
        self.trio = engine
        """The `trio_vllm.SpawnedEngine` behind it."""

    @property
    def engine_indices(self) -> range:
        """The expected engines."""
        return self.trio.engine_indices

    @property
    def is_for_one_client(self) -> bool:
        """Whether the engines are told one output address: that of client 0."""
        return self.trio.is_for_one_client

    @property
    def handshake_address(self) -> str:
        """Where the engines of the present run of the command report."""
        return self.trio.handshake_address

    @property
    def pid(self) -> int:
        """The process id of the command, which is the id of its process group."""
        return self.trio.pid

    @property
    def log(self) -> Sequence[str]:
        """The last lines that the present run of the command has printed."""
        return self.trio.log

    def connect(self) -> AbstractAsyncContextManager[Any]:
        """For trio's side of `open_llm`."""
        return self.trio.connect()

    async def wait_ended(self) -> str:
        """Wait until the command ends by itself; gives how, with its last line."""
        return await self._guest.run(self.trio.wait_ended)


def _opens(
    name: str, function: Callable[P, AbstractAsyncContextManager[T]]
) -> Callable[[Callable[[GuestRun, T], U]], Callable[P, Opening[U]]]:
    """Decorate what makes a value for asyncio of one of trio's; the result opens it.

    Its arguments are those of ``function``, which opens trio's.
    """

    def decorate(convert: Callable[[GuestRun, T], U]) -> Callable[P, Opening[U]]:
        @asynccontextmanager
        async def opener(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[U]:
            async with _guest_run() as guest, guest.enter(function(*args, **kwargs)) as value:
                yield convert(guest, value)

        functools.update_wrapper(opener, convert)
        value = inspect.signature(convert).return_annotation
        opener.__signature__ = inspect.signature(function).replace(  # type: ignore[attr-defined]
            return_annotation=f"AsyncIterator[{value}]"
        )
        return explains_misuse(name, instead=f"trio_vllm.{name}", library="asyncio")(opener)

    return decorate


@_opens("open_llm", trio_llm.open_llm)
def open_llm(guest: GuestRun, llm: trio_llm.Llm) -> Llm:
    """Connect to engine cores: ``async with open_llm(mode) as llm``.

    Arguments and errors are those of `trio_vllm.open_llm`. After the block nothing of it runs.

    Raises:
      RuntimeError: The task is one of trio's.

    Cancellation:
      Leaves nothing behind, at any point.
    """
    return Llm(guest, llm)


@_opens("spawn_engine", spawn.spawn_engine)
def spawn_engine(guest: GuestRun, engine: spawn.SpawnedEngine) -> SpawnedEngine:
    """Start engines: ``async with spawn_engine(command) as mode``, for `open_llm`.

    Arguments and errors are those of `trio_vllm.spawn_engine`.

    Cancellation:
      Ends the command, more hastily.
    """
    return SpawnedEngine(guest, engine)


class GuestRun:
    """One run of trio inside an asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[trio.Nursery] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.user_count = 0
        self.is_closing = False
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=self._loop.call_soon,
            done_callback=self._end,
            host_uses_signal_set_wakeup_fd=True,
        )

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._started.set_result(nursery)
            await trio.sleep_forever()

    def _end(self, _outcome: object) -> None:
        del _guest_runs[self._loop]
        self._ended.set_result(None)

    async def wait_started(self) -> None:
        """Wait until tasks can be started."""
        await asyncio.wait([self._started])

    async def wait_ended(self) -> None:
        """Wait until another run may begin in this thread."""
        await asyncio.wait([self._ended])

    async def close(self) -> None:
        """End the run and wait for its end, also if this wait is cancelled."""
        self.is_closing = True
        await _wait_done(self._started)
        self._started.result().cancel_scope.cancel(reason="its last user has left")
        await _wait_done(self._ended)

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a trio function in a task of its own; return or raise what it does."""
        result: asyncio.Future[T] = self._loop.create_future()
        scope = trio.CancelScope()

        async def call() -> None:
            try:
                with scope:
                    result.set_result(await function(*args))
            except trio.Cancelled:
                result.cancel()
                raise
            except BaseException as error:
                result.set_exception(error)
            if scope.cancelled_caught:
                result.cancel()

        self._started.result().start_soon(call)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            scope.cancel(reason="the asyncio task that waits for it was cancelled")
            await _wait_done(result)
            raise

    @asynccontextmanager
    async def enter(self, manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Hold a context manager of trio's open while the block runs.

        Should it end before the block does, which is a crash of its own tasks, the block is
        cancelled and the error takes its place.
        """
        entered: asyncio.Future[T] = self._loop.create_future()
        leave = trio.Event()

        async def hold() -> None:
            async with manager as value:
                entered.set_result(value)
                await leave.wait()

        holding = self._loop.create_task(self.run(hold))
        try:
            either: list[asyncio.Future[Any]] = [entered, holding]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            holding.cancel()
            await _wait_done(holding)
            raise
        if not entered.done():
            await holding  # raises why
        async with _cancelled_by(holding):
            try:
                yield entered.result()
            finally:
                leave.set()
                await _wait_done(holding)


@asynccontextmanager
async def _cancelled_by(crash: asyncio.Future[None]) -> AsyncIterator[None]:
    """Cancel the block when a future fails, and raise its error; as `asyncio.timeout` does."""
    block = asyncio.current_task()
    assert block is not None
    was_cancelled = False

    def cancel_block(_crash: asyncio.Future[None]) -> None:
        nonlocal was_cancelled
        if not crash.cancelled() and crash.exception() is not None:
            was_cancelled = True
            block.cancel()

    crash.add_done_callback(cancel_block)
    try:
        yield
    except asyncio.CancelledError:
        if was_cancelled and not block.uncancel():
            await crash
        raise
    finally:
        crash.remove_done_callback(cancel_block)


async def _wait_done(future: asyncio.Future[Any]) -> None:
    """Wait for a future whatever happens; a cancellation goes on after that."""
    is_cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            is_cancelled = True
    if not future.cancelled():
        future.exception()  # seen, so that asyncio does not complain
    if is_cancelled:
        raise asyncio.CancelledError


# A thread can run trio once at a time, so all that is open on a loop must find the run it has.
_guest_runs: WeakKeyDictionary[asyncio.AbstractEventLoop, GuestRun] = WeakKeyDictionary()


@asynccontextmanager
async def _guest_run() -> AsyncIterator[GuestRun]:
    """The run of trio in this loop; begun for the first user, ended with the last."""
    loop = asyncio.get_running_loop()
    while (guest := _guest_runs.get(loop)) is not None and guest.is_closing:
        await guest.wait_ended()
    if guest is None:
        guest = _guest_runs[loop] = GuestRun()
    guest.user_count += 1
    try:
        await guest.wait_started()
        yield guest
    finally:
        guest.user_count -= 1
        if not guest.user_count:
            await guest.close()
