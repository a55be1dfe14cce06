"""`Llm` on real engines: logprobs, structured outputs, stops, several completions, embeddings.

What vLLM's own `AsyncLLM` says of the same request, with an engine of its own, is the measure for
logprobs: the weights are made up alike in every process, so not a bit may differ.
"""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from harness import CONTEXT, PATIENCE, free_port, generate, headless_engine, ok, owner
from processes import Process, running
from provision import Peers
from trio_vllm import (
    EncodeRequest,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    HandshakeOwner,
    Llm,
    Logprobs,
    LoRARequest,
    PoolingParams,
    StructuredOutputsParams,
    open_llm,
)
from trio_vllm.errors import UnsupportedFieldError, UtilityCallFailedError

PROMPT = [(7 * number + 11) % 250 for number in range(40)]

MEASURED: dict[str, Any] = {
    "temperature": 0.0,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "max_tokens": 8,
}

ADAPTER = LoRARequest(lora_name="adapter", lora_int_id=1, lora_path="/nowhere")


def main(peers: Peers) -> None:
    """Generate with one engine, pool with another one."""
    trio.run(check_generation, peers)
    trio.run(check_pooling, peers)


async def check_generation(peers: Peers) -> None:
    """Complete prompts in all ways, while vLLM's own frontend completes one of them."""
    with running_reference(peers) as (reference, result), engine(peers) as mode:
        async with open_llm(mode) as llm:
            ours = await generate(llm, prompt=PROMPT, **MEASURED)
            await obey_structure(llm, peers.model)
            await refuse_adapters(llm)
            await repeat_completions(llm)
            await stop(llm)
            await fill_context(llm)
            assert llm.client.is_healthy
        compare(ours, await trio.to_thread.run_sync(read, reference, result))


async def check_pooling(peers: Peers) -> None:
    """Embed."""
    with engine(peers, "--runner", "pooling") as mode:
        async with open_llm(mode) as llm:
            await pool(llm, peers.model)
            assert llm.client.is_healthy


@contextlib.contextmanager
def engine(peers: Peers, *args: str) -> Iterator[HandshakeOwner]:
    """Run an engine; gives how to meet it."""
    port = free_port()
    with headless_engine(peers, port, *args):
        yield owner(port)


# Logprobs ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_reference(peers: Peers) -> Iterator[tuple[Process, Path]]:
    """Let vLLM's own frontend complete the prompt; gives the process and where it writes to."""
    script = Path(__file__).with_name("vllm_generate.py")
    with tempfile.TemporaryDirectory(prefix="trio-vllm-smoke-") as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        request.write_text(json.dumps({"prompt_token_ids": PROMPT, **MEASURED}))
        command = [peers.python, script, peers.model, request, result]
        with running("vLLM's AsyncLLM", command, environment=peers.environment) as process:
            yield process, result


def read(process: Process, result: Path) -> dict[str, Any]:
    """Wait for what vLLM's own frontend has got."""
    process.wait_until("writing its result", result.exists, 240)
    theirs: dict[str, Any] = json.loads(result.read_text())
    return theirs


def compare(ours: GenerateOutput, theirs: dict[str, Any]) -> None:
    """Not a bit differs."""
    (completion,) = ours.completions
    assert completion.token_ids == theirs["token_ids"], (completion.token_ids, theirs)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    sample, prompt = plain(completion.logprobs), [None, *plain(completion.prompt_logprobs)]
    assert len(sample) == MEASURED["max_tokens"]
    assert len(prompt) == len(PROMPT)
    assert sample == theirs["logprobs"], (sample, theirs["logprobs"])
    assert prompt == theirs["prompt_logprobs"], (prompt, theirs["prompt_logprobs"])
    candidates = sum(map(len, sample)) + sum(len(position or ()) for position in prompt)
    ok(f"{candidates} logprobs and ranks are those of AsyncLLM, such as {sample[0]}")


def plain(logprobs: Logprobs) -> list[dict[str, list[float]]]:
    """As AsyncLLM tells it: by token id, and a token that comes twice has its later rank."""
    return [
        {str(entry.token_id): [entry.logprob, entry.rank] for entry in position.entries}
        for position in logprobs
    ]


# Generation -------------------------------------------------------------------------------------


async def obey_structure(llm: Llm, model: Path) -> None:
    """Four digits and the end; an engine would refuse the first such request without a backend."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    digits = {vocabulary[digit]: digit for digit in "0123456789"}
    end = json.loads((model / "config.json").read_text())["eos_token_id"]
    for backend in (None, "xgrammar"):
        constraint = StructuredOutputsParams(regex="[0-9]{4}", backend=backend)
        output = await generate(
            llm, 10, prompt=PROMPT, structured_outputs=constraint, eos_token_id=end, seed=3
        )
        (completion,) = output.completions
        *text, last = completion.token_ids
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, None)
        assert last == end, completion.token_ids
        assert len(text) == 4, completion.token_ids
        assert set(text) <= set(digits), completion.token_ids
    ok(f"four digits: {''.join(digits[token] for token in text)}")


async def refuse_adapters(llm: Llm) -> None:
    """In the engine's words for a call, in ours for a request, which the engine would not refuse."""
    said = "nothing"
    try:
        await llm.client.add_lora(ADAPTER, timeout=PATIENCE)
    except UtilityCallFailedError as error:
        said = error.failures[0]
    assert "LoRA is not enabled" in said, said
    request = GenerateRequest(prompt_token_ids=PROMPT, lora_request=ADAPTER)
    await refused(llm.generate(request), "lora_request")
    ok(f"adapters: {said}")


async def repeat_completions(llm: Llm) -> None:
    """Seeds make completions that differ from each other, and not from one time to the next."""
    first, again, other = [
        [completion.token_ids for completion in output.completions]
        for seed in (5, 5, 6)
        for output in [await generate(llm, 6, prompt=PROMPT, n=2, seed=seed)]
    ]
    assert first == again, (first, again)
    assert first[0] != first[1], first
    assert first[1] == other[0], (first, other)  # the seed of the second is one more
    ok(f"two completions, twice: {first}")


async def stop(llm: Llm) -> None:
    """At a token of a completion that is known already."""
    (whole,) = (await generate(llm, 6, prompt=PROMPT, seed=9)).completions
    token = whole.token_ids[3]
    output = await generate(llm, 6, prompt=PROMPT, seed=9, stop_token_ids=[token])
    (stopped,) = output.completions
    length = whole.token_ids.index(token) + 1
    assert stopped.token_ids == whole.token_ids[:length], (stopped, whole)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, token), stopped
    ok(f"stopped at token {token}, the {length}th")


async def fill_context(llm: Llm) -> None:
    """No limit is the end of the context."""
    prompt = PROMPT * 12 + PROMPT[:20]
    (completion,) = (await generate(llm, None, prompt=prompt)).completions
    assert completion.finish_reason is FinishReason.LENGTH, completion
    assert len(prompt) + len(completion.token_ids) == CONTEXT, completion
    ok(f"{len(completion.token_ids)} tokens after {len(prompt)}")


async def refused(call: Any, field: str) -> None:
    """Make a call that is refused before anything is sent."""
    said = "nothing"
    try:
        with trio.fail_after(PATIENCE):
            await call
    except UnsupportedFieldError as error:
        said = error.field
    assert said == field, f"{said} is refused, not {field}"


# Pooling ----------------------------------------------------------------------------------------


async def pool(llm: Llm, model: Path) -> None:
    """Refuse what the model cannot do, of which the engine would die, and embed before and after."""
    await refused(llm.generate(GenerateRequest(prompt_token_ids=PROMPT)), "sampling_params")
    first = await embed(llm)
    request = EncodeRequest(prompt_token_ids=PROMPT, pooling_params=PoolingParams(task="classify"))
    await refused(llm.encode(request), "pooling_params.task")
    assert await embed(llm) == first
    hidden_size = json.loads((model / "config.json").read_text())["hidden_size"]
    assert len(first) == hidden_size, first
    assert all(map(math.isfinite, first)), first
    assert any(first), first
    ok(f"an embedding of {hidden_size} numbers, such as {first[0]}")


async def embed(llm: Llm) -> list[float]:
    """The embedding of the prompt."""
    request = EncodeRequest(prompt_token_ids=PROMPT, pooling_params=PoolingParams(task="embed"))
    with trio.fail_after(PATIENCE):
        output = await llm.encode(request)
    assert output.finish_reason is FinishReason.STOP, output
    assert output.data is not None
    numbers: list[float] = output.data.tolist()
    return numbers
