"""Requests that an engine would not survive, sent by a client that was told nothing of it.

One engine with room for adapters gets all of them. Each must be refused or answered, and the engine must
generate afterwards.
"""

from typing import Any

import trio

from harness import expect, free_port, generate, headless_engine, ok, owner
from provision import Peers
from trio_vllm import (
    GenerateRequest,
    Llm,
    LoRARequest,
    SamplingParams,
    StructuredOutputsParams,
    open_llm,
)
from trio_vllm.errors import AdapterError, InvalidFieldError, RequestError, UnsupportedFieldError
from trio_vllm.protocol import MultiModalFeatureSpec, PlaceholderRange

VOCAB_SIZE = 32_000

BEYOND_THE_VOCABULARY = (
    {"stop_token_ids": [151645], "min_tokens": 1},
    {"logit_bias": {191222: -100.0}},
    {"allowed_token_ids": [99999]},
    {"logprob_token_ids": [99999]},
    {"logprobs": 40000},
)


def main(peers: Peers) -> None:
    """Run one engine and send everything."""
    port = free_port()
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    with headless_engine(peers, port, *options):
        trio.run(check, port)


async def check(port: int) -> None:
    """Send what kills, stalls or fools an engine."""
    async with open_llm(owner(port)) as llm:
        await vocabulary(llm)
        await adapters(llm)
        await features(llm)
        await choices(llm)
        await generate(llm, 5)
        expect("health", llm.client.is_healthy, True)
        expect("stalled", llm.client.stalled_engines, [])


def ask(lora: LoRARequest | None = None, **params: object) -> GenerateRequest:
    values: dict[str, Any] = {"max_tokens": 4, **params}
    return GenerateRequest([1, 2, 3], sampling_params=SamplingParams(**values), lora_request=lora)


async def refused(llm: Llm, request: GenerateRequest, kind: type[RequestError]) -> None:
    try:
        await llm.generate(request)
    except kind as error:
        ok(f"refused: {error}"[:150])
        return
    raise AssertionError(f"not refused as {kind.__name__}: {request}")


async def vocabulary(llm: Llm) -> None:
    """The client finds out how large it is."""
    for params in BEYOND_THE_VOCABULARY:
        await refused(llm, ask(**params), InvalidFieldError)
    expect("vocabulary", llm.client.driver.core.facts.limits.vocab_size, VOCAB_SIZE)
    output = await llm.generate(ask(logit_bias={VOCAB_SIZE - 1: -100.0}))
    expect("tokens of a good bias", len(output.token_ids), 4)


async def adapters(llm: Llm) -> None:
    """One that is not there does not load, however many ask for it at once."""
    nowhere = LoRARequest(lora_name="x", lora_int_id=1, lora_path="/nowhere")
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(refused, llm, ask(nowhere), AdapterError)
    expect("adapters", await llm.client.list_loras(), set())


async def features(llm: Llm) -> None:
    """A model for text would wait for an encoder for ever."""
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="x",
        mm_position=PlaceholderRange(offset=0, length=2),
    )
    request = GenerateRequest([1, 2, 3], mm_features=[feature])
    await refused(llm, request, UnsupportedFieldError)


async def choices(llm: Llm) -> None:
    """They become a grammar."""
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    output = await llm.generate(
        ask(structured_outputs=constraint, eos_token_id=31992, max_tokens=20)
    )
    expect("end of a choice", output.finish_reason.name, "STOP")
