"""What real engines sent, through the facade: the results are those that the recordings note."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
from tests.llm.world import LlmWorld, open_llm_world
from tests.recorded import Recording, each_version, recording, recordings

from trio_vllm.llm import EncodeRequest, GenerateRequest
from trio_vllm.protocol import (
    EngineCoreRequest,
    FinishReason,
    Logprobs,
    RequestBatchOutputs,
    decode_engine_message,
    decode_outputs,
)

KNOWN = {"vocab_size": 1 << 20}
"""What the client is told, so that it asks the engines nothing that was not recorded."""


def sent(scenario: Recording) -> list[EngineCoreRequest]:
    """The requests that the engines were sent."""
    messages = [
        decode_engine_message(message.frames)
        for message in scenario.messages
        if message.channel == "input" and message.sender == "frontend"
    ]
    return [message for message in messages if isinstance(message, EngineCoreRequest)]


def answers(scenario: Recording) -> list[list[bytes]]:
    """What the engines sent back."""
    return [message.frames for message in scenario.messages if message.channel == "output"]


def as_prompt(request: EngineCoreRequest) -> GenerateRequest:
    """The caller's request that makes this one."""
    assert request.sampling_params is not None
    return GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids or [],
        sampling_params=request.sampling_params,
        lora_request=request.lora_request,
    )


def know_adapter(world: LlmWorld, request: EngineCoreRequest) -> None:
    """The adapter of a request was loaded before the recording began."""
    if request.lora_request is not None:
        facts = world.llm.client.driver.core.facts
        facts.note_results("add_lora", [attrs.astuple(request.lora_request)], {0: True})


def assert_equal(recorded: list[list[list[Any]]] | None, logprobs: Logprobs | None) -> None:
    """Log probabilities are those of a recording, where a rank of None is no rank."""
    assert (recorded is None) == (logprobs is None)
    if recorded is None or logprobs is None:
        return
    for entries, position in zip(recorded, logprobs, strict=True):
        for (token_id, value, rank), entry in zip(entries, position.entries, strict=True):
            number = float(value["float"]) if isinstance(value, dict) else value
            assert (token_id, number) == (entry.token_id, entry.logprob)
            assert rank in (None, entry.rank)


def engines_of(scenario: Recording) -> dict[str, int]:
    """Which engine had each request."""
    messages = [decode_outputs(frames) for frames in answers(scenario)]
    return {
        output.request_id: message.engine_index
        for message in messages
        if isinstance(message, RequestBatchOutputs)
        for output in message.outputs
    }


def complete_recordings() -> list[Recording]:
    """Those of an engine that sent all of its requests' tokens and their ends."""
    return [
        scenario
        for scenario in recordings()
        if scenario.producer.endswith("engine")
        and scenario.expected.get("requests")
        and all(r["finish_reason"] is not None for r in scenario.expected["requests"])
        # Of the first some messages were left out, the second has a backend that we refuse to send.
        and scenario.name not in ("pause_keep_resume", "structured_backend_ignored_later")
    ]


@pytest.mark.parametrize("scenario", complete_recordings(), ids=lambda scenario: scenario.label)
async def test_results(scenario: Recording) -> None:
    expected: list[dict[str, Any]] = scenario.expected["requests"]
    async with open_llm_world(
        2,
        randomize_request_ids=False,
        supports_lora=True,
        max_loras=2,
        client_options=KNOWN,
    ) as world:
        engine_of = engines_of(scenario)
        outcomes = {}
        for request in sent(scenario):
            know_adapter(world, request)
            prompt = attrs.evolve(
                as_prompt(request), data_parallel_rank=engine_of[request.request_id]
            )
            outcomes[request.request_id] = await world.start(partial(world.llm.generate, prompt))
        for frames in answers(scenario):
            index = getattr(decode_outputs(frames), "engine_index", 0)
            await world.world.engines[index].say(*frames)

        assert sorted(outcomes) == sorted(result["request_id"] for result in expected)
        for result in expected:
            output = outcomes[result["request_id"]].get()
            assert result["token_ids"] == output.token_ids
            assert result["finish_reason"] == output.finish_reason
            assert result["stop_reason"] == output.stop_reason
            assert_equal(result.get("logprobs"), output.logprobs)
            assert_equal(result.get("prompt_logprobs"), output.prompt_logprobs)
        world.assert_tidy()
        assert world.llm.client.is_healthy


@each_version
async def test_a_completion_that_took_several_steps(version: str) -> None:
    scenario = recording("generate_plain_5", version)
    (request,) = sent(scenario)
    async with open_llm_world(randomize_request_ids=False, client_options=KNOWN) as world:
        outcome = await world.start(lambda: world.llm.generate(as_prompt(request)))
        for frames in answers(scenario):
            await world.engine.say(*frames)

        (completion,) = outcome.get().completions
        timings = outcome.get().timings
        assert timings.queued_time is not None
        assert timings.prefill_time is not None
        assert timings.decode_time is not None
        assert timings.inference_time is not None
        assert 0 <= timings.queued_time < 1
        assert len(timings.inter_token_latencies) == 4
        assert timings.decode_time == pytest.approx(sum(timings.inter_token_latencies))
        assert timings.inference_time == pytest.approx(timings.prefill_time + timings.decode_time)
        assert [(span.start, span.end, span.version) for span in completion.weight_versions] == [
            (0, 5, "default")
        ]
        assert outcome.get().usage.cached_tokens == 0


@each_version
async def test_a_prompt_that_was_cached(version: str) -> None:
    scenario = recording("prefix_cache_hit", version)
    async with open_llm_world(randomize_request_ids=False, client_options=KNOWN) as world:
        outcomes = [
            await world.start(partial(world.llm.generate, as_prompt(request)))
            for request in sent(scenario)
        ]
        for frames in answers(scenario):
            await world.engine.say(*frames)

    assert [outcome.get().usage.cached_tokens for outcome in outcomes] == [0, 256]


@each_version
async def test_an_embedding(version: str) -> None:
    scenario = recording("pooling_embed", version)
    (request,) = sent(scenario)
    assert request.pooling_params is not None
    prompt = EncodeRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids or [],
        pooling_params=request.pooling_params,
    )
    async with open_llm_world(randomize_request_ids=False, client_options=KNOWN) as world:
        outcome = await world.start(lambda: world.llm.encode(prompt))
        for frames in answers(scenario):
            await world.engine.say(*frames)

        output = outcome.get()
        assert output.data is not None
        assert output.finish_reason is FinishReason.STOP
        assert output.data.shape == (64,)
