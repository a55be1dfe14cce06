"""Arrays that are not what they say hurt the one request that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ormsgpack
import pytest
from tests.client.world import make_output, make_request, open_world
from trio.testing import wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    EngineCoreSamplingParams,
    Logprobs,
    RequestBatchOutputs,
    encode_outputs,
)

PROMPT_LOGPROBS = Logprobs(
    np.zeros((99, 2), np.int32), np.zeros((99, 2), np.float32), np.ones(99, np.int32)
)
"""Each of the arrays goes into an auxiliary frame of its own."""

Break = Callable[[list[Any], list[bytes]], None]
"""Spoils the arrays of a row, or the message's auxiliary frames."""


def spoil(item: int, value: object) -> Break:
    """Put a value in the place of the first array's dtype, shape or data."""

    def spoil_first(arrays: list[Any], aux: list[bytes]) -> None:
        arrays[0][item] = value

    return spoil_first


BREAKS: dict[str, Break] = {
    "a frame is missing": lambda arrays, aux: aux.clear(),
    "a frame is short": lambda arrays, aux: aux.__setitem__(0, aux[0][:-1]),
    "a frame is long": lambda arrays, aux: aux.__setitem__(0, aux[0] + b"\0"),
    "the index is too big": spoil(2, 99),
    "the index is negative": spoil(2, -1),
    "the index is the payload's": spoil(2, 0),
    "the data are text": spoil(2, "data"),
    "the type is unknown": spoil(0, "int31"),
    "the type is an object": spoil(0, "|O8"),
    "the type is no text": spoil(0, 4),
    "the shape is negative": spoil(1, [-99, 2]),
    "the shape overflows": spoil(1, [2**63, 2**63]),
    "the shape is a number": spoil(1, 198),
    "the rows do not match": spoil(1, [198, 1]),
}


@pytest.mark.parametrize("spoil_message", BREAKS.values(), ids=BREAKS)
async def test_a_broken_array_hurts_one_request(spoil_message: Break) -> None:
    params = EngineCoreSamplingParams(prompt_logprobs=1)
    async with open_world() as world:
        bad, good = OutputStream("bad"), OutputStream("good")
        for stream in (bad, good):
            request = make_request(
                stream.request_id, prompt_token_ids=[1] * 100, sampling_params=params
            )
            world.client.driver.submit(request, stream)
        world.engine.received()
        outputs = [
            make_output([7], stream.request_id, new_prompt_logprobs_tensors=PROMPT_LOGPROBS)
            for stream in (good, bad)
        ]
        payload, *aux = map(bytes, encode_outputs(RequestBatchOutputs(outputs=outputs)))
        raw = ormsgpack.unpackb(payload)
        good_aux, bad_aux = aux[:3], aux[3:]
        spoil_message(raw[1][1][3], bad_aux)
        await world.engine.say(ormsgpack.packb(raw), *good_aux, *bad_aux)

        with pytest.raises(DecodeError) as caught:
            await anext(bad)

        assert (caught.value.request_id, caught.value.engine_index) == ("bad", 0)
        assert caught.value.where.startswith("new_prompt_logprobs_tensors")
        got = (await anext(good)).output.new_prompt_logprobs_tensors
        assert got is not None
        assert got == PROMPT_LOGPROBS
        assert world.client.is_healthy
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [["bad"]]


@pytest.mark.parametrize("code", [1, 2])
async def test_code_is_not_loaded(code: int) -> None:
    """Extension types 1 and 2 are pickles."""
    async with open_world() as world:
        stream = OutputStream("r")
        world.client.driver.submit(make_request(), stream)
        raw = [0, [["r", [7], None, None, ["int32", [1], ormsgpack.Ext(code, b"cos\nsystem\n")]]]]
        await world.engine.say(ormsgpack.packb(raw))

        with pytest.raises(DecodeError, match="never loaded"):
            await anext(stream)
        assert world.client.is_healthy
