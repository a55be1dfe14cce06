"""`open_llm` hands on what it does not use itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import trio
from tests.client.world import hand_driven
from trio.testing import MockClock

from trio_vllm import open_client, open_llm


def test_it_takes_all_options_of_open_client() -> None:
    ours = inspect.signature(open_llm).parameters
    theirs = inspect.signature(open_client).parameters

    assert {name: ours.get(name) for name in theirs} == dict(theirs)


@pytest.mark.parametrize("opener", [open_llm, open_client])
async def test_an_address_is_no_mode(opener: Any) -> None:
    with pytest.raises(TypeError, match=r"write HandshakeOwner\('tcp://127\.0\.0\.1:29550'\)"):
        async with opener("tcp://127.0.0.1:29550"):
            pytest.fail("it was opened")


async def test_engines_have_as_long_as_told_to_say_what_they_support(
    autojump_clock: MockClock,
) -> None:
    async with open_llm(hand_driven(), learning_timeout=3) as llm:
        assert trio.current_time() == 3
        assert llm.client.supported_tasks is None
