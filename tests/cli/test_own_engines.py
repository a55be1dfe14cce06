"""The end of engines of our own, while they are needed and afterwards."""

from __future__ import annotations

import pytest
import trio

from trio_vllm import HandshakeOwner, open_llm
from trio_vllm.cli.smoke_runner import EnginesEndedError, RequiredEngines, mock_engines


async def test_a_block_ends_with_what_it_needs() -> None:
    """The reason comes out of it."""
    engines = RequiredEngines()

    with pytest.raises(EnginesEndedError, match="out of memory"):
        with engines.needed_by_block():
            engines.ended("out of memory")
            await trio.sleep_forever()


async def test_a_need_that_is_over() -> None:
    """Engines may end once the frontend has gone."""
    engines = RequiredEngines()

    with engines.needed_by_block():
        engines.needed_no_more()
        engines.ended("no frontend")
        await trio.lowlevel.checkpoint()


async def test_a_cancellation_is_not_an_end_of_engines() -> None:
    """Somebody else's is passed on."""
    with trio.CancelScope() as scope:
        with RequiredEngines().needed_by_block():
            scope.cancel()
            await trio.sleep_forever()

    assert scope.cancelled_caught


async def test_mock_engines_tell_of_their_end(address: str) -> None:
    """They end with their frontend."""
    reasons: list[str] = []
    ended = trio.Event()

    def on_end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    with trio.fail_after(60):
        async with mock_engines(address, 1, on_end):
            async with open_llm(HandshakeOwner(handshake_address=address)):
                assert not reasons
            await ended.wait()

    assert reasons[0].startswith("mock engine: engine 0 is dead: ")
