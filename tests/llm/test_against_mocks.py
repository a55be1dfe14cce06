"""The facade against mock engines: the results are the engines' own."""

from __future__ import annotations

import trio
from tests.client.pair import expected_tokens, open_pair
from tests.client.world import make_request
from tests.llm.world import make_prompt
from trio.testing import wait_all_tasks_blocked

from trio_vllm.llm import GenerateOutput, Llm
from trio_vllm.protocol import FinishReason


async def test_many_requests_at_once_get_their_own_tokens() -> None:
    outputs: dict[str, GenerateOutput] = {}
    async with open_pair(3, output_token_chunk_size=2) as (world, mocks):
        llm = Llm(world.client, randomize_request_ids=False)

        async def generate(number: int) -> None:
            request = make_prompt(f"r{number}", max_tokens=1 + number % 9)
            outputs[request.request_id or ""] = await llm.generate(request)

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(generate, number)
        world.assert_tidy()

    assert len(outputs) == 100
    assert {output.completions[0].engine_index for output in outputs.values()} == {0, 1, 2}
    for number in range(100):
        output = outputs[f"r{number}"]
        mock = mocks[output.completions[0].engine_index]
        request = make_request(f"r{number}", max_tokens=1 + number % 9)
        assert output.token_ids == expected_tokens(mock, request)
        assert output.finish_reason is FinishReason.LENGTH


async def test_logprobs_of_the_mock_engine() -> None:
    async with open_pair() as (world, _):
        llm = Llm(world.client)
        output = await llm.generate(
            make_prompt(
                logprobs=2, prompt_logprobs=1, max_tokens=5, request_prompt_token_ids=[5] * 9
            )
        )

    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.token_ids == [position.token.token_id for position in output.logprobs]
    assert output.logprobs.token_ids.shape == (5, 3)
    assert output.prompt_logprobs.token_ids.shape == (8, 2)
    assert (output.error, output.completions[0].weight_versions[0].version) == (None, "default")


async def test_nothing_grows_with_the_number_of_requests() -> None:
    async with open_pair(2) as (world, mocks):
        llm = Llm(world.client)

        async def work(worker: int) -> None:
            for number in range(50):
                request = make_prompt(f"{worker}/{number}", max_tokens=2)
                if number % 10:
                    await llm.generate(request)
                else:
                    async with llm.stream(request) as deltas:
                        await anext(deltas)

        async with trio.open_nursery() as nursery:
            for worker in range(20):
                nursery.start_soon(work, worker)
        await wait_all_tasks_blocked()

        world.assert_tidy()
        assert llm.in_flight_count == 0
        assert not any(mock.has_unfinished for mock in mocks)
