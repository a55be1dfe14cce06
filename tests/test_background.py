"""`running`: every way in which the block, the pumps and the world around them can end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_vllm.concurrency import explains_misuse, running
from trio_vllm.errors import InternalError


async def idle() -> None:
    await trio.sleep_forever()


async def crash() -> NoReturn:
    await trio.lowlevel.checkpoint()
    raise ValueError("bug")


async def crash_when_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("bug")


async def fail_in_child_nursery() -> None:
    """Raise a group of an error and the cancellation of the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crash_when_cancelled)
        await trio.sleep_forever()


async def linger() -> None:
    """Take a second to end, like a pump that sends its last messages."""
    with trio.CancelScope(shield=True):
        await trio.sleep(1)
    await trio.sleep_forever()


async def test_leaving_the_block_cancels_and_awaits_the_pumps(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running(linger, idle):
        pass

    assert trio.current_time() == 1


async def test_a_cancelled_pump_leaves_no_garbage() -> None:
    """What it held is free when the block is left, and not only when garbage is collected."""

    class Held: ...

    witnesses = []

    async def hold() -> None:
        held = Held()
        witnesses.append(weakref.ref(held))
        await trio.sleep_forever()

    gc.disable()
    try:
        with trio.CancelScope() as scope:
            async with running(hold):
                await wait_all_tasks_blocked()
                scope.cancel()
                await trio.sleep_forever()
        assert [witness() for witness in witnesses] == [None]
    finally:
        gc.enable()


async def test_without_pumps_it_is_just_a_block() -> None:
    async with running():
        await trio.lowlevel.checkpoint()


async def test_pump_may_return_early() -> None:
    returned = trio.Event()

    async def brief() -> None:
        await trio.lowlevel.checkpoint()
        returned.set()

    async with running(brief):
        await returned.wait()
        await wait_all_tasks_blocked()


async def test_error_of_the_block_is_bare_and_unchanged() -> None:
    error = ValueError("mine")

    with pytest.raises(ValueError) as caught:
        async with running(idle):
            raise error

    assert error is caught.value
    assert error.__context__ is None
    assert error.__cause__ is None


async def test_group_of_the_block_stays_that_group() -> None:
    group = ExceptionGroup("mine", [ValueError("a")])

    with pytest.RaisesGroup(ValueError) as caught:
        async with running(idle):
            raise group

    assert group is caught.value


@pytest.mark.parametrize(
    "error", [StopIteration(), StopAsyncIteration(), GeneratorExit()], ids=repr
)
async def test_errors_that_generators_know_pass_too(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with running(idle):
            raise error

    assert error is caught.value


async def test_crash_cancels_the_block_and_is_an_internal_error() -> None:
    with pytest.raises(InternalError) as caught:
        async with running(idle, crash):
            await trio.sleep_forever()

    assert str(caught.value.__cause__) == "bug"


async def test_crash_after_the_block_is_an_internal_error() -> None:
    with pytest.raises(InternalError) as caught:
        async with running(crash_when_cancelled):
            await wait_all_tasks_blocked()

    assert str(caught.value.__cause__) == "bug"


async def test_first_crash_is_kept() -> None:
    async def crash_first() -> None:
        await trio.lowlevel.checkpoint()
        raise KeyError("first")

    with pytest.raises(InternalError) as caught:
        async with running(crash_first, crash_when_cancelled):
            await trio.sleep_forever()

    assert str(caught.value.__cause__) == "'first'"


async def test_crash_in_a_child_nursery_is_found_among_cancellations() -> None:
    with pytest.raises(InternalError) as caught:
        async with running(fail_in_child_nursery):
            await wait_all_tasks_blocked()

    assert str(caught.value.__cause__) == "bug"


async def test_several_crashes_in_a_child_nursery_stay_a_group() -> None:
    async def crash_twice() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash_when_cancelled)
            nursery.start_soon(crash_when_cancelled)

    with pytest.raises(InternalError) as caught:
        async with running(crash_twice):
            await wait_all_tasks_blocked()

    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2


async def test_crash_tells_what_the_block_raised_besides() -> None:
    with pytest.raises(InternalError) as caught:
        async with running(crash):
            await crash_when_cancelled()

    assert str(caught.value.__cause__) == "bug"
    assert caught.value.__notes__ == ["Besides, the block raised ValueError('bug')"]


async def test_timeout_around_the_block(autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(1) as scope:
        async with running(idle):
            await trio.sleep_forever()

    assert scope.cancelled_caught


async def test_timeout_while_the_pumps_end(autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(0.5) as scope:
        async with running(linger):
            pass

    assert scope.cancelled_caught
    assert trio.current_time() == 1


async def test_timeout_while_the_pumps_end_does_not_hide_the_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with trio.move_on_after(0.5) as scope, pytest.raises(ValueError, match="mine") as caught:
        async with running(linger, idle):
            raise ValueError("mine")

    assert scope.cancel_called
    assert not scope.cancelled_caught
    assert caught.value.__context__ is None


async def test_timeout_around_does_not_hide_a_crash(autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(1), pytest.raises(InternalError):
        async with running(crash_when_cancelled, idle):
            await trio.sleep_forever()


async def test_inner_timeout_of_the_block_is_its_own(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running(idle):
        with trio.move_on_after(1) as scope:
            await trio.sleep_forever()

        assert scope.cancelled_caught


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)], ids=repr)
async def test_interrupt_of_the_block_is_bare(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with running(idle):
            raise error

    assert error is caught.value


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)], ids=repr)
async def test_interrupt_of_a_pump_is_bare(error: BaseException) -> None:
    async def interrupted() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    with pytest.raises(type(error)) as caught:
        async with running(idle, interrupted):
            await trio.sleep_forever()

    assert error is caught.value


def test_ctrl_c_in_a_pump_strikes_in_the_main_task() -> None:
    async def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()

    async def main() -> None:
        with pytest.raises(KeyboardInterrupt):
            async with running(interrupt):
                await trio.sleep_forever()

    trio.run(main)


def test_ctrl_c_while_the_pumps_end_strikes_afterwards() -> None:
    async def interrupt_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with running(interrupt_at_the_end, linger):
            pass
        with pytest.raises(KeyboardInterrupt):
            await trio.lowlevel.checkpoint()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# A block's value without a block ------------------------------------------------------------------


@explains_misuse("open_seven", instead="open_eight")
@asynccontextmanager
async def open_seven(extra: int = 0) -> AsyncIterator[int]:
    """Seven, and something."""
    await trio.lowlevel.checkpoint()
    yield 7 + extra


async def test_a_block_that_is_well_opened() -> None:
    """It gets the value, and its errors go through the function."""
    async with open_seven(extra=1) as value:
        assert value == 8
    with pytest.raises(ZeroDivisionError):
        async with open_seven():
            raise ZeroDivisionError


async def test_awaiting_in_place_of_opening() -> None:
    """The error says what to write."""
    with pytest.raises(
        TypeError, match=r"open_seven\(\.\.\.\) cannot be awaited: write `async with"
    ):
        await open_seven()


async def test_iterating_in_place_of_opening() -> None:
    """It says that the block's value iterates, if any does."""
    with pytest.raises(
        TypeError, match=r"write `async with open_seven\(\.\.\.\) as .* and iterate"
    ):
        async for _ in open_seven():  # type: ignore[attr-defined]
            pytest.fail("there is nothing")


def test_the_signature_of_an_opening() -> None:
    """`help` shows a context manager, with the arguments and the value."""
    assert (
        str(inspect.signature(open_seven)).replace("'", "")
        == "(extra: int = 0) -> AbstractAsyncContextManager[int]"
    )


def test_opening_under_asyncio() -> None:
    """It is refused before anything is done, with what to use there."""

    async def enter() -> None:
        async with open_seven():
            pytest.fail("it was opened")

    with pytest.raises(
        RuntimeError, match=r"open_seven\(\.\.\.\) is for trio: under asyncio use open_eight"
    ):
        asyncio.run(enter())


def test_opening_with_plain_with() -> None:
    """So does this one."""
    with pytest.raises(TypeError, match="is no block for `with`: write `async with open_seven"):
        with open_seven():
            pytest.fail("there is no value")


def test_using_what_is_not_open() -> None:
    """And this one, which is what `hasattr` expects."""
    opening = open_seven()

    with pytest.raises(AttributeError, match="has no 'bit_length': write `async with open_seven"):
        opening.bit_length()
    assert not hasattr(opening, "bit_length")
