"""`running` runs tasks beside a block; `Waker` wakes the task that waits for it; `Turns` shares out turns.

The only place that takes exceptions out of groups. It keeps all of them out of the nursery, which
would wrap them, and sorts them when the nursery is closed. `explains_misuse` is for functions whose
value is a block's.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

import trio

from trio_vllm.errors import InternalError
from trio_vllm.values import define

# Whoever wants our log configures it; without this Python would print warnings to standard error.
logging.getLogger("trio_vllm").addHandler(logging.NullHandler())

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def running(*pumps: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run ``pumps`` while the block runs; leaving the block cancels them and waits for their end.

    A pump may return early, but not raise: what a peer does is for the pump to handle, so what it
    lets out is a bug of ours. It cancels the block. Ctrl-C never strikes in a pump.

    Raises:
      InternalError: A pump raised; the first exception that one did is the cause.
      BaseException: What the block raised otherwise, bare and as it was.
    """
    crash, block, around = _Caught(), _Caught(), _Caught()

    @trio.lowlevel.enable_ki_protection
    async def guard(pump: Callable[[], Awaitable[None]]) -> None:
        pump_end = _Caught()
        with pump_end:
            await pump()
        cause = pump_end.without_cancelled()
        if cause is None:
            pump_end.raise_again()
        elif crash.error is None:
            crash.error = cause
            nursery.cancel_scope.cancel(reason=f"{pump!r} crashed")

    with around:
        async with trio.open_nursery() as nursery:
            for pump in pumps:
                nursery.start_soon(guard, pump)
            with block:
                yield
            nursery.cancel_scope.cancel(reason="the block was left")
    try:
        _raise_first(crash, block, around)
    finally:
        for caught in (crash, block, around):
            caught.error = None  # what is raised refers to this frame


@define
class _Caught:
    """Catches whatever its block raises, cancellations too; who looks at it must raise it again."""

    error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True

    def raise_again(self) -> None:
        """Raise what was caught, and keep it no longer.

        Its traceback refers to the frames that refer to this object: each task that is cancelled would
        leave garbage that only a collection finds.
        """
        error, self.error = self.error, None
        if error is None:
            return
        try:
            raise error
        finally:
            del error

    def without_cancelled(self) -> BaseException | None:
        """Give the error less the cancellations that are grouped with it; bare, if it is one."""
        error = self.error
        while isinstance(error, BaseExceptionGroup):
            _, rest = error.split(trio.Cancelled)
            if rest is None or len(rest.exceptions) > 1:
                return rest
            (error,) = rest.exceptions
        return None if isinstance(error, trio.Cancelled) else error


def _raise_first(crash: _Caught, block: _Caught, around: _Caught) -> None:
    """Raise the gravest of what the pumps, the block and scopes around us have raised."""
    if isinstance(crash.error, Exception):
        bug = InternalError("a background task crashed, please report this")
        if (besides := block.without_cancelled()) is not None:
            bug.add_note(f"Besides, the block raised {besides!r}")
        raise bug from crash.error
    for caught in (crash, block, around):
        caught.raise_again()


class _NoOutcome:
    """What a sleeper wakes up with: an `outcome.Value` of None that serves any number of times.

    To make one for each and note that it was used would be a quarter of what trio needs to wake a task.
    """

    def unwrap(self) -> None: ...


_NO_OUTCOME: Any = _NoOutcome()


class Waker:
    """Lets one task sleep until `wake`; a wake without a sleeper is forgotten.

    A `trio.Event` can be set only once, and to make a new one for every output would cost
    more than the output itself.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a task sleeps here."""
        return self._task is not None

    def wake(self) -> None:
        """Let the sleeper go on, if there is one."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task, _NO_OUTCOME)

    async def wait(self) -> None:
        """Sleep until the next `wake`; `trio.BusyResourceError` if a task sleeps here already."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is already waiting for this")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Opening(AbstractAsyncContextManager[T_co, bool | None], Generic[T_co]):
    """An asynchronous context manager that says so when it is used otherwise, or by the wrong library."""

    def __init__(
        self, function: str, manager: AbstractAsyncContextManager[T_co], check: Callable[[], None]
    ) -> None:
        """``check`` is called before the block is entered."""
        self._function = function
        self._manager = manager
        self._check = check

    async def __aenter__(self) -> T_co:
        self._check()
        return await self._manager.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._manager.__aexit__(kind, error, traceback)  # noqa: ASYNC102

    def __await__(self) -> NoReturn:
        raise TypeError(self._advice("cannot be awaited"))

    if not TYPE_CHECKING:  # which finds the mistake by its absence

        def __aiter__(self) -> NoReturn:
            advice = self._advice("cannot be iterated over")
            raise TypeError(f"{advice} and iterate over the block's value")

    def __enter__(self) -> NoReturn:
        raise TypeError(self._advice("is no block for `with`"))

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._advice(f"has no {name!r}"), name=name, obj=self)

    def _advice(self, fault: str) -> str:
        return f"{self._function}(...) {fault}: write `async with {self._function}(...) as ...:`"


def explains_misuse(
    name: str, *, instead: str, library: str = "trio"
) -> Callable[
    [Callable[P, AbstractAsyncContextManager[T_co]]],
    Callable[P, Opening[T_co]],
]:
    """Decorate a function that gives an asynchronous context manager, which shall be an `Opening`.

    Args:
      name: What callers write, such as ``llm.stream``.
      instead: What to use under the other library.
      library: Whose tasks may enter the block: ``trio`` or ``asyncio``.
    """

    def decorate(
        function: Callable[P, AbstractAsyncContextManager[T_co]],
    ) -> Callable[P, Opening[T_co]]:
        check = functools.partial(check_library, name, library, instead)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Opening[T_co]:
            return Opening(name, function(*args, **kwargs), check)

        # What `contextmanager` leaves says that the function iterates, and `help` shows that.
        shown = inspect.signature(function)
        value = str(shown.return_annotation).removeprefix("AsyncIterator")
        wrapper.__signature__ = shown.replace(  # type: ignore[attr-defined]
            return_annotation=f"AbstractAsyncContextManager{value}"
        )
        return wrapper

    return decorate


def check_library(function: str, library: str, instead: str) -> None:
    """Raise a `RuntimeError` unless the task that runs is one of this library, trio or asyncio."""
    present = "trio" if trio.lowlevel.in_trio_task() else "asyncio"
    if present != library:
        raise RuntimeError(f"{function}(...) is for {library}: under {present} use {instead}")


class Turns:
    """Lets tasks that all come at once go on some at a time, so that others get their turn in between.

    Theory of operation. Tasks that come one right after the other share a slice of time. The first
    that comes when it is over waits until all others have run, and those that come after it wait in
    line. Then some go on, the last of which lets the next ones go on in trio's next turn.
    """

    def __init__(
        self,
        slice_time: float,
        clock: Callable[[], float],
        *,
        gap: float = 0.001,
        width: int = 32,
    ) -> None:
        """
        Args:
          slice_time: Seconds.
          clock: Gives seconds, real ones.
          gap: Seconds after which a task does not come right after the last one any more.
          width: Tasks that go on together, once there is a line.
        """
        self._slice_time = slice_time
        self._gap = gap
        self._width = width
        self._clock = clock
        # A `trio.lowlevel.ParkingLot` does the same, at half the speed.
        self._line: OrderedDict[trio.lowlevel.Task, None] = OrderedDict()
        self._going = 0  # tasks that may go on, and have not run yet
        self._is_pausing = False
        self._last = self._end = -math.inf

    async def wait(self) -> None:  # noqa: ASYNC910
        """Go on at once, as a rule; else when it is this task's turn."""
        if not self.may_go_on():
            await self.wait_in_line()

    def may_go_on(self) -> bool:
        """Whether a task that comes now goes on at once; if not, it has to `wait_in_line`.

        To ask is cheaper than to `wait`.
        """
        now = self._clock()
        is_close, self._last = now - self._last < self._gap, now
        if self._line or self._is_pausing:
            return False
        if not is_close:
            self._end = now + self._slice_time
            return True
        return now < self._end

    async def wait_in_line(self) -> None:
        """Go on when it is this task's turn, which has come."""
        if not (self._line or self._is_pausing or self._going):
            await self._pause()
            return
        task = trio.lowlevel.current_task()
        self._line[task] = None

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._line[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._going -= 1
        if not self._going:
            self._let_go_on()

    async def _pause(self) -> None:
        self._is_pausing = True
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self._is_pausing = False
            self._end = self._clock() + self._slice_time
            self._let_go_on()

    def _let_go_on(self) -> None:
        line = self._line
        self._going = min(self._width, len(line))
        for _ in range(self._going):
            task, _ = line.popitem(last=False)
            trio.lowlevel.reschedule(task, _NO_OUTCOME)
