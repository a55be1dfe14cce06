"""An answer that is not what was asked for is an error of its request, in whatever way it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from tests.client.world import World, hand_driven, make_output, make_request, open_world
from tests.llm.logprobs import make_logprobs
from tests.llm.world import open_llm_world
from trio.testing import wait_all_tasks_blocked

from trio_vllm import EncodeRequest, GenerateRequest, open_llm
from trio_vllm.client import OutputStream
from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LateInteractionParams,
    Logprobs,
    PoolingParams,
    SamplingParams,
    Tensor,
)

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
PROMPT = [1, 2, 3]


def padded(token_ids: list[int], width: int) -> Logprobs:
    """Rows as an engine fills them while another request of the step names its token ids."""
    logprobs = make_logprobs(token_ids, width)
    logprobs.token_ids[:, 1:] = 0
    logprobs.logprobs[:, 1:] = -np.inf
    return logprobs


def scores(rows: int, ids: int) -> Any:
    return np.zeros((rows, ids), np.float32)


def sampling(**params: Any) -> dict[str, Any]:
    return {"sampling_params": SamplingParams(**params)}


def pooling(task: str = "embed", **params: Any) -> dict[str, Any]:
    return {"sampling_params": None, "pooling_params": PoolingParams(task=task, **params)}


def pooled(*shape: int) -> dict[str, Any]:
    return {"pooling_output": Tensor.from_numpy(np.zeros(shape, np.float32))}


IDS = np.array([[5, 6], [7, 8]], np.int32)
TRANSFER: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True}}
QUERY = LateInteractionParams(mode="cache_query", query_key="q", query_uses=1)

Outputs = list[tuple[list[int], dict[str, Any]]]
"""New tokens and further fields, of one output each."""

BAD: dict[str, tuple[dict[str, Any], Outputs, str, str]] = {
    "fewer columns": (
        sampling(logprobs=5),
        [([7], {"new_logprobs": make_logprobs([7], 2)})],
        "new_logprobs", "has 2 columns, but 6 were asked for",
    ),
    "fewer columns than token ids": (
        sampling(logprob_token_ids=[4, 5]),
        [([7], {"new_logprobs": make_logprobs([7], 2)})],
        "new_logprobs", "has 2 columns, but 3 were asked for",
    ),
    "not the whole vocabulary": (
        sampling(logprobs=-1),
        [([7], {"new_logprobs": make_logprobs([7], 9)})],
        "new_logprobs", "has 9 columns, but 501 were asked for",
    ),
    "fewer columns of several tokens": (
        sampling(logprobs=3),
        [([7, 8], {"new_logprobs": make_logprobs([7, 8], 3)})],
        "new_logprobs", "has 3 columns, but 4 were asked for",
    ),
    "padding in place of columns": (
        sampling(logprobs=1),
        [([7], {"new_logprobs": padded([7], 2)}), ([8], {"new_logprobs": padded([8], 2)})],
        "new_logprobs", "has padding in place of the most probable tokens",
    ),
    "tokens without any": (
        sampling(logprobs=1), [([7, 8], {})], "new_logprobs", "has 0 rows for 2 tokens",
    ),
    "tokens without any at the end": (
        sampling(logprobs=1),
        [([7], {"new_logprobs": make_logprobs([7], 2)}), ([8], {"finish_reason": STOP})],
        "new_logprobs", "has 0 rows for 1 tokens",
    ),
    "fewer rows than tokens": (
        sampling(logprobs=1),
        [([7, 8], {"new_logprobs": make_logprobs([7], 2)})],
        "new_logprobs", "has 1 rows for 2 tokens",
    ),
    "more rows than the prompt": (
        sampling(prompt_logprobs=1),
        [([7], {"new_prompt_logprobs_tensors": make_logprobs([2, 3, 4], 2)})],
        "new_prompt_logprobs_tensors", "has 3 rows, but a prompt of 3 tokens has 2",
    ),
    "more rows over several outputs": (
        sampling(prompt_logprobs=1),
        [([], {"new_prompt_logprobs_tensors": make_logprobs([2, 3], 2)}),
         ([7], {"new_prompt_logprobs_tensors": make_logprobs([3], 2)})],
        "new_prompt_logprobs_tensors", "has 3 rows, but a prompt of 3 tokens has 2",
    ),
    "fewer rows than the prompt": (
        sampling(prompt_logprobs=1),
        [([7], {"new_prompt_logprobs_tensors": make_logprobs([2], 2), "finish_reason": STOP})],
        "new_prompt_logprobs_tensors", "has 1 rows, but a prompt of 3 tokens has 2",
    ),
    "nothing of the prompt": (
        sampling(prompt_logprobs=0), [([7], {"finish_reason": LENGTH})],
        "new_prompt_logprobs_tensors", "has 0 rows, but a prompt of 3 tokens has 2",
    ),
    "a part of a prompt from elsewhere": (
        sampling(prompt_logprobs=0, extra_args=TRANSFER),
        [([7], {"new_prompt_logprobs_tensors": make_logprobs([2], 1), "finish_reason": LENGTH})],
        "new_prompt_logprobs_tensors", "has 1 rows, but a prompt of 3 tokens has 2",
    ),
    "fewer columns of the prompt": (
        sampling(prompt_logprobs=4),
        [([7], {"new_prompt_logprobs_tensors": make_logprobs([2, 3], 4)})],
        "new_prompt_logprobs_tensors", "has 4 columns, but 5 were asked for",
    ),
    "fewer named ids of the prompt": (
        sampling(prompt_logprob_token_ids=IDS),
        [([7], {"prompt_token_id_logprobs": scores(2, 1)})],
        "prompt_token_id_logprobs", "has the shape [2, 1], but ids of the shape [2, 2] were named",
    ),
    "fewer rows of named ids": (
        sampling(prompt_logprob_token_ids=IDS),
        [([7], {"prompt_token_id_logprobs": scores(1, 2), "finish_reason": STOP})],
        "prompt_token_id_logprobs", "has 1 rows, but ids of the shape [2, 2] were named",
    ),
    "more rows of named ids": (
        sampling(prompt_logprob_token_ids=IDS),
        [([7], {"prompt_token_id_logprobs": scores(3, 2)})],
        "prompt_token_id_logprobs", "has 3 rows, but ids of the shape [2, 2] were named",
    ),
    "a vector of another size": (
        pooling(dimensions=32), [([], {**pooled(64), "finish_reason": STOP})],
        "pooling_output", "has the shape [64], but vectors of 32 were asked for",
    ),
    "a vector of another size than the model's": (
        pooling(), [([], {**pooled(63), "finish_reason": STOP})],
        "pooling_output", "has the shape [63], but vectors of 64 were asked for",
    ),
    "vectors of another size": (
        pooling("token_embed"), [([], {**pooled(3, 65), "finish_reason": STOP})],
        "pooling_output", "has the shape [3, 65], but vectors of 64 were asked for",
    ),
    "no vector": (
        pooling(), [([], {"finish_reason": STOP})],
        "pooling_output", "is missing, though the request has ended well",
    ),
}  # fmt: skip

GOOD: dict[str, tuple[dict[str, Any], Outputs]] = {
    "more columns than asked for": (
        sampling(logprobs=1), [([7], {"new_logprobs": make_logprobs([7], 9), "finish_reason": STOP})],
    ),
    "no log probabilities of no tokens": (
        sampling(logprobs=1), [([], {"finish_reason": STOP})],
    ),
    "improbable tokens that were named": (
        sampling(logprob_token_ids=[4]),
        [([7], {"new_logprobs": padded([7], 2), "finish_reason": STOP})],
    ),
    "the token alone, beside a request that named others": (
        sampling(logprobs=0), [([7], {"new_logprobs": padded([7], 3), "finish_reason": STOP})],
    ),
    "no ids that were named": (
        sampling(logprob_token_ids=[]), [([7], {"finish_reason": STOP})],
    ),
    "the token alone": (
        sampling(logprobs=0), [([7], {"new_logprobs": make_logprobs([7], 1), "finish_reason": STOP})],
    ),
    "a prompt that was not computed to its end": (
        sampling(prompt_logprobs=1), [([], {"finish_reason": ABORT})],
    ),
    "a prompt from elsewhere": (
        sampling(prompt_logprobs=1, extra_args=TRANSFER), [([7], {"finish_reason": STOP})],
    ),
    "a prompt that grows": (
        {**sampling(prompt_logprobs=1), "resumable": True}, [([7], {"finish_reason": STOP})],
    ),
    "named ids in parts": (
        sampling(prompt_logprob_token_ids=IDS),
        [([7], {"prompt_token_id_logprobs": scores(1, 2)}),
         ([8], {"prompt_token_id_logprobs": scores(1, 2), "finish_reason": STOP})],
    ),
    "labels": (pooling("classify"), [([], {**pooled(2), "finish_reason": STOP})]),
    "a query that is kept": (
        pooling("token_embed", late_interaction_params=QUERY),
        [([], {**pooled(), "finish_reason": STOP})],
    ),
    "a pooling request that is aborted": (pooling(), [([], {"finish_reason": ABORT})]),
}  # fmt: skip

STATED = {"vocab_size": 500, "hidden_size": 64}


async def answer(world: World, request: EngineCoreRequest, outputs: Outputs) -> list[Any]:
    """What a stream gives of these outputs."""
    stream = OutputStream(request.request_id, 99)
    world.client.driver.submit(request, stream)
    world.engine.received()
    for token_ids, fields in outputs:
        await world.engine.send(make_output(token_ids, request.request_id, **fields))
    return [item.output async for item in stream]


@pytest.mark.parametrize(("asked", "outputs", "where", "reason"), BAD.values(), ids=BAD)
async def test_what_was_not_asked_for_fails_its_request(
    asked: dict[str, Any], outputs: Outputs, where: str, reason: str
) -> None:
    async with open_world(client_options=STATED) as world:
        other = OutputStream("other", 1)
        world.client.driver.submit(make_request("other"), other)
        with pytest.raises(DecodeError) as caught:
            await answer(world, make_request(**asked), outputs)

        error = caught.value
        assert (error.where, error.reason) == (where, reason)
        assert (error.engine_index, error.request_id) == (0, "r")
        await wait_all_tasks_blocked()
        ended = outputs[-1][1].get("finish_reason") is not None
        assert world.engine.aborts() == ([] if ended else [["r"]])
        await world.engine.emit("other", [7], LENGTH)
        assert [item.output.new_token_ids async for item in other] == [[7]]
        world.assert_tidy()


@pytest.mark.parametrize(("asked", "outputs"), GOOD.values(), ids=GOOD)
async def test_what_was_asked_for_is_handed_on(asked: dict[str, Any], outputs: Outputs) -> None:
    async with open_world(client_options=STATED) as world:
        got: list[EngineCoreOutput] = await answer(world, make_request(**asked), outputs)

        assert [output.new_token_ids for output in got] == [tokens for tokens, _ in outputs]


# Read as completions ------------------------------------------------------------------------------

OF_TOKENS = [name for name, (asked, *_) in BAD.items() if asked["sampling_params"] is not None]


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_completions_are_checked_too(name: str, is_streamed: bool) -> None:
    """Log probabilities of single tokens reach them without being decoded."""
    asked, outputs, where, reason = BAD[name]
    request = GenerateRequest(PROMPT, **asked)
    async with open_llm_world(client_options=STATED) as world:

        async def run() -> None:
            if not is_streamed:
                await world.llm.generate(request)
                return
            async with world.llm.stream(request) as stream:
                async for _ in stream:
                    pass

        outcome = await world.start(run)
        (sent,) = world.engine.requests()
        for token_ids, fields in outputs:
            await world.engine.send(make_output(token_ids, sent.request_id, **fields))
        if outcome.error is None:  # a whole completion is looked at when it is whole
            await world.finish(sent.request_id, [])

        assert isinstance(outcome.error, DecodeError)
        assert outcome.error.where.removeprefix(".") == where
        assert outcome.error.reason == reason
        world.assert_tidy()


@pytest.mark.parametrize(
    ("option", "size"), [({"embedding_size": 7, "hidden_size": 64}, 7), ({"hidden_size": 64}, 64)]
)
async def test_size_of_embeddings_can_be_stated(option: dict[str, Any], size: int) -> None:
    source = hand_driven()
    engine = source.engines[0]
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            await wait_all_tasks_blocked()
            await engine.answer(engine.call().call_id, ["embed"])
            for width in (size, size + 1):
                while not (requests := engine.requests()):
                    await wait_all_tasks_blocked()
                shape = pooled(width)
                await engine.emit(requests[0].request_id, [], STOP, **shape)

        nursery.start_soon(serve)
        async with open_llm(source, **option) as llm:
            request = EncodeRequest(PROMPT, pooling_params=PoolingParams(task="embed"))
            output = await llm.encode(request)
            assert output.data is not None
            assert output.data.shape == (size,)
            with pytest.raises(DecodeError, match=f"vectors of {size} were asked for"):
                await llm.encode(request)
