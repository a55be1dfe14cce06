"""`Llm.encode`: a prompt becomes an array."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.client.world import make_output
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.errors import ClientClosedError, EmptyPromptError, UnsupportedFieldError
from trio_vllm.llm import EncodeRequest
from trio_vllm.protocol import (
    FinishReason,
    PoolingParams,
    PrefillStats,
    RequestErrorInfo,
    Tensor,
)

EMBED = PoolingParams(
    task="embed", dimensions=3, use_activation=True, skip_reading_prefix_cache=False
)
VALUES = np.array([0.5, -1.0, 2.0], np.float32)


def make_encode(**fields: Any) -> EncodeRequest:
    values: dict[str, Any] = {"prompt_token_ids": [1, 2], "pooling_params": EMBED, **fields}
    return EncodeRequest(**values)


@asynccontextmanager
async def open_pooling_world() -> AsyncIterator[LlmWorld]:
    """A model of which is known already that it pools."""
    async with open_llm_world() as world:
        await world.start(world.llm.client.driver.learn_supported_tasks)
        await world.engine.answer(world.engine.call().call_id, ["embed"])
        yield world


async def test_the_pooled_prompt() -> None:
    async with open_pooling_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode(request_id="e")))
        (request,) = world.engine.requests()
        await world.finish(
            request.request_id,
            [],
            pooling_output=Tensor.from_numpy(VALUES),
            prefill_stats=PrefillStats(num_cached_tokens=1),
            finish_reason=FinishReason.STOP,
        )

        output = outcome.get()
        assert (
            request.sampling_params,
            request.pooling_params,
            request.external_req_id,
        ) == (None, EMBED, "e")
        assert (
            output.request_id,
            output.prompt_token_ids,
            output.finish_reason,
        ) == ("e", [1, 2], FinishReason.STOP)
        assert output.data is not None
        assert output.data.tolist() == VALUES.tolist()
        usage = output.completion.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (2, 0, 1)
        world.assert_tidy()


async def test_the_array_may_come_before_the_end() -> None:
    async with open_pooling_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode()))
        (request,) = world.engine.requests()
        await world.engine.send(
            make_output([], request.request_id, pooling_output=Tensor.from_numpy(VALUES))
        )
        await world.finish(request.request_id, [], finish_reason=FinishReason.STOP)

        assert outcome.get().data is not None


async def test_what_the_engine_has_against_it() -> None:
    async with open_pooling_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode()))
        error = RequestErrorInfo(code="validation_error", message="no")
        await world.finish(
            world.engine.requests()[0].request_id,
            [],
            finish_reason=FinishReason.ERROR,
            error=error,
        )

        output = outcome.get()
        assert (FinishReason.ERROR, None, error) == (
            output.finish_reason,
            output.data,
            output.completion.error,
        )


async def test_it_can_be_aborted() -> None:
    async with open_pooling_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode(request_id="e")))
        world.llm.abort(["e"])
        await wait_all_tasks_blocked()

        assert (outcome.get().finish_reason, outcome.get().data) == (FinishReason.ABORT, None)


async def test_an_empty_prompt_is_refused() -> None:
    async with open_pooling_world() as world:
        with pytest.raises(EmptyPromptError):
            await world.llm.encode(make_encode(prompt_token_ids=[]))
        world.assert_tidy()


async def test_encode_always_checkpoints() -> None:
    async with open_pooling_world() as world:

        async def answer() -> None:
            await wait_all_tasks_blocked()
            pooled = Tensor.from_numpy(VALUES)
            request_id = world.engine.requests()[0].request_id
            await world.finish(request_id, [], pooling_output=pooled)

        world.nursery.start_soon(answer)
        with assert_checkpoints():
            await world.llm.encode(make_encode())


async def test_the_first_one_asks_what_the_model_supports() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode()))
        await world.engine.answer(world.engine.call().call_id, ["embed", "classify"])
        (request,) = world.engine.requests()
        pooled = Tensor.from_numpy(VALUES)
        await world.finish(
            request.request_id, [], finish_reason=FinishReason.STOP, pooling_output=pooled
        )
        await world.start(lambda: world.llm.encode(make_encode()))

        assert outcome.get().finish_reason is FinishReason.STOP
        assert len(world.engine.requests()) == 1


async def test_a_task_that_the_model_has_not_is_refused() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode()))
        await world.engine.answer(world.engine.call().call_id, ["generate"])

        assert isinstance(outcome.error, UnsupportedFieldError)
        assert "pooling_params.task" in str(outcome.error)
        assert world.engine.received() == []
        world.assert_tidy()


async def test_a_model_that_only_pools_is_not_asked_to_generate() -> None:
    async with open_pooling_world() as world:
        with pytest.raises(UnsupportedFieldError, match="only pools"):
            await world.llm.generate(make_prompt())
        with pytest.raises(UnsupportedFieldError, match="only pools"):
            async with world.llm.stream(make_prompt()):
                raise AssertionError("it was sent")

        assert world.engine.received() == []
        world.assert_tidy()


async def test_a_shutdown_ends_the_question() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.encode(make_encode()))
        await world.llm.shutdown()
        await wait_all_tasks_blocked()

        assert isinstance(outcome.error, ClientClosedError)
        world.assert_tidy()
