"""Requests that kill, stall or fool an engine, sent by a client that was told little of it.

Two engines that generate get most of them, two that pool the rest. Each request must be refused, or
answered as it was asked, and the engines must be alive afterwards.
"""

import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio

from harness import PATIENCE, PROMPT, expect, free_port, generate, headless_engine, ok, owner
from provision import Peers
from trio_vllm import (
    EncodeRequest,
    EngineCoreRequest,
    GenerateOutput,
    GenerateRequest,
    Llm,
    LoRARequest,
    PauseMode,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    open_llm,
)
from trio_vllm.errors import (
    AdapterError,
    DecodeError,
    InvalidFieldError,
    RequestError,
    UnsupportedFieldError,
)
from trio_vllm.protocol import (
    FinishReason,
    LateInteractionParams,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Tensor,
)

VOCAB_SIZE = 32_000
HIDDEN_SIZE = 64
EOS = 31_992
STALL_TIME = 2.0

TWO = ("--data-parallel-size", "2", "--data-parallel-size-local", "2")
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")

BEYOND_THE_VOCABULARY: tuple[dict[str, Any], ...] = (
    {"stop_token_ids": [151645], "min_tokens": 1},
    {"logit_bias": {191222: -100.0}},
    {"allowed_token_ids": [99999]},
    {"logprob_token_ids": [99999]},
    {"logprobs": 40000},
)

NOT_ENFORCED: tuple[dict[str, Any], ...] = (
    {"type": "array", "uniqueItems": True},
    {"type": "integer", "multipleOf": 1000},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "string", "format": "nonsense"},
    {"type": "string", "pattern": "a+", "minLength": 3},
    {"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"a": {}}},
    {"type": "object", "patternProperties": {"^a": {"type": "string"}, "^b": {"type": "integer"}}},
    {"allOf": [{"type": "string"}, {"enum": ["a"]}]},
    {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 2}}},
)
"""Schemas with keywords that xgrammar drops."""


def main(peers: Peers) -> None:
    """Run the engines, two and two."""
    port = free_port()
    with headless_engine(peers, port, *TWO, *LORA, "--enable-prompt-embeds"):
        trio.run(check_generating, port, peers.model)
    port = free_port()
    with headless_engine(peers, port, *TWO, "--runner", "pooling"):
        trio.run(check_pooling, port)


async def check_generating(port: int, model: Path) -> None:
    """Send what kills, stalls or fools an engine that generates."""
    stated: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "accepts_prompt_embeds": True}
    async with open_llm(owner(port, engine_count=2), stall_time=STALL_TIME, **stated) as llm:
        await vocabulary(llm)
        await adapters(llm, model)
        await features(llm)
        await embeddings(llm)
        await sessions(llm)
        await named_logprobs(llm)
        await traces(llm)
        await constraints(llm)
        await balance(llm)
        await stalls(llm)
        await alive(llm)


async def alive(llm: Llm) -> None:
    """Both engines serve."""
    for rank in (0, 1):
        await generate(llm, 5, rank=rank)
    expect("health", llm.client.is_healthy, True)
    expect("stalled", llm.client.stalled_engines, [])
    expect("in flight", llm.client.in_flight_count, 0)


def ask(
    lora: LoRARequest | None = None, rank: int | None = None, **params: object
) -> GenerateRequest:
    values: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, **params}
    return GenerateRequest(
        PROMPT, sampling_params=SamplingParams(**values), lora_request=lora, data_parallel_rank=rank
    )


async def traces(llm: Llm) -> None:
    """A trace sets the length. What it replays, only the model runner of GPUs does."""
    output = await answer(
        llm, ask(max_tokens=None, trace_decode_token_ids=[*range(100, 120)], stop_token_ids=[100])
    )
    expect("tokens for a trace of 20", len(output.token_ids), 20)
    expect("its end", output.finish_reason, FinishReason.LENGTH)


async def answer(llm: Llm, request: GenerateRequest) -> GenerateOutput:
    with trio.fail_after(PATIENCE):
        return await llm.generate(request)


async def refused(
    llm: Llm, request: GenerateRequest | EncodeRequest, kind: type[RequestError]
) -> None:
    """It is an error of this class, and takes no time."""
    try:
        with trio.fail_after(PATIENCE):
            if isinstance(request, GenerateRequest):
                await llm.generate(request)
            else:
                await llm.encode(request)
    except kind as error:
        ok(f"refused: {error}"[:180])
        return
    raise AssertionError(f"not refused as {kind.__name__}: {request}")


# Vocabulary --------------------------------------------------------------------------------------


async def vocabulary(llm: Llm) -> None:
    """The client finds out how large it is."""
    for params in BEYOND_THE_VOCABULARY:
        await refused(llm, ask(**params), InvalidFieldError)
    expect("vocabulary", llm.client.driver.core.facts.limits.vocab_size, VOCAB_SIZE)
    output = await answer(llm, ask(logit_bias={VOCAB_SIZE - 1: -100.0}))
    expect("tokens of a good bias", len(output.token_ids), 4)


# Adapters ----------------------------------------------------------------------------------------


async def adapters(llm: Llm, model: Path) -> None:
    """One that does not load is refused, however many ask for it at once; a good one works."""
    with tempfile.TemporaryDirectory() as folder:
        good = make_adapter(Path(folder) / "good", model, rank=8)
        wide = make_adapter(Path(folder) / "wide", model, rank=16)
        nowhere = LoRARequest(lora_name="x", lora_int_id=1, lora_path="/nowhere")
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(refused, llm, ask(nowhere), AdapterError)
        await refused(llm, ask(adapter(wide, 2)), AdapterError)
        expect("adapters", await llm.client.list_loras(), set())

        plain = (await answer(llm, ask(max_tokens=16))).token_ids
        for rank in (0, 1):
            adapted = await answer(llm, ask(adapter(good, 3), rank, max_tokens=16))
            expect("an adapter changes the tokens", adapted.token_ids != plain, True)
        expect("adapters", await llm.client.list_loras(), {3})
        other = LoRARequest(lora_name="other", lora_int_id=3, lora_path=str(wide))
        await refused(llm, ask(other), InvalidFieldError)
        expect("tokens without", (await answer(llm, ask(max_tokens=16))).token_ids, plain)
        await llm.client.remove_lora(3)
        await refused(llm, ask(other), AdapterError)
        await answer(llm, ask(adapter(good, 3)))
        ok("an adapter of rank 8 on both engines, none of rank 16")


def adapter(path: Path, lora_int_id: int) -> LoRARequest:
    return LoRARequest(lora_name=path.name, lora_int_id=lora_int_id, lora_path=str(path))


def make_adapter(folder: Path, model: Path, rank: int) -> Path:
    """An adapter of random weights for the queries and the outputs of attention."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    rng = np.random.default_rng(rank)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size_in, size_out in (("q_proj", hidden, heads), ("o_proj", heads, hidden)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(size=(rank, size_in))
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(size=(size_out, rank))
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(as_safetensors(tensors))
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": 4 * rank,
                "target_modules": ["q_proj", "o_proj"],
                "bias": "none",
                "base_model_name_or_path": str(model),
            }
        )
    )
    return folder


def as_safetensors(tensors: dict[str, Any]) -> bytes:
    """A file of float32: the length of its header, the header in JSON, the arrays."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# What the model cannot do ------------------------------------------------------------------------


def with_feature() -> GenerateRequest:
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="x",
        mm_position=PlaceholderRange(offset=0, length=2),
    )
    return GenerateRequest(PROMPT, mm_features=[feature])


async def features(llm: Llm) -> None:
    """A model for text would wait for an encoder for ever."""
    await refused(llm, with_feature(), UnsupportedFieldError)


async def embeddings(llm: Llm) -> None:
    """Those of the model's width are used; others, of which an engine dies, are refused."""
    rng = np.random.default_rng(0)
    answers = [await tokens_after(llm, rng.normal(size=(5, HIDDEN_SIZE))) for _ in range(3)]
    expect("different answers", len({*map(tuple, answers)}), 3)
    try:
        await tokens_after(llm, rng.normal(size=(5, HIDDEN_SIZE + 1)))
    except InvalidFieldError as error:
        ok(f"refused: {error}")
    else:
        raise AssertionError("embeddings of a wrong width are not refused")


async def tokens_after(llm: Llm, embeds: Any) -> list[int]:
    """What the engine adds to a prompt of embeddings."""
    request = EngineCoreRequest(
        request_id=f"embeddings-{float(embeds[0, 0])}",
        prompt_token_ids=None,
        prompt_embeds=Tensor.from_numpy(embeds.astype(np.float32)),
        sampling_params=SamplingParams(max_tokens=8, temperature=0.0),
    )
    return await tokens_of(llm, request)


async def tokens_of(llm: Llm, request: EngineCoreRequest) -> list[int]:
    with trio.fail_after(PATIENCE):
        async with llm.client.call(request) as outputs:
            return [token async for item in outputs for token in item.output.new_token_ids]


# Sessions ----------------------------------------------------------------------------------------


async def sessions(llm: Llm) -> None:
    """Chunks go to one engine, whatever else that has to do; what is answered by nobody ends."""
    params = SamplingParams(max_tokens=3, temperature=0.0)

    def chunk(prompt: list[int], **fields: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id="session", prompt_token_ids=prompt, sampling_params=params, **fields
        )

    await tokens_of(llm, chunk([1, 2, 3], resumable=True))
    async with trio.open_nursery() as nursery:
        for rank in (0, 1):
            nursery.start_soon(answer, llm, ask(rank=rank, max_tokens=200))
        await trio.sleep(0.1)
        for prompt in ([4, 5], [6]):
            got = await tokens_of(llm, chunk(prompt, resumable=True))
            expect("tokens of a chunk", len(got), 3)
    expect("tokens of the end of a session", await tokens_of(llm, chunk([7])), [])
    got = await tokens_of(llm, chunk([8], abort_immediately=True))
    expect("tokens of a request that is aborted as it comes", got, [])
    ok("a session of three chunks")


# Log probabilities -------------------------------------------------------------------------------


async def named_logprobs(llm: Llm) -> None:
    """Beside a request that names tokens, another's columns may be padding: an error, if they are."""
    ends: list[str] = []

    async def ranked() -> None:
        try:
            output = await answer(llm, ask(rank=0, logprobs=5, max_tokens=60))
        except DecodeError as error:
            ends.append(f"an error ({error.reason})")
            return
        assert output.logprobs is not None
        expect("columns", output.logprobs.logprobs.shape, (60, 6))
        expect("all are numbers", bool(np.isfinite(output.logprobs.logprobs).all()), True)
        ends.append("as asked")

    async def named() -> None:
        output = await answer(llm, ask(rank=0, logprob_token_ids=[9, 10], max_tokens=60))
        assert output.logprobs is not None
        expect("named tokens", output.logprobs.token_ids[:, 1:].tolist(), [[9, 10]] * 60)

    async with trio.open_nursery() as nursery:
        for function in (ranked, named, ranked):
            nursery.start_soon(function)
    ok(f"log probabilities beside those of named tokens: {', '.join(ends)}")


# Structured outputs ------------------------------------------------------------------------------


def token_of(character: str) -> int:
    """The tiny model's tokens for what can be seen of ASCII stand first, in order."""
    return ord(character) - ord("!")


def tokens(text: str) -> list[int]:
    return [*map(token_of, text)]


async def constraints(llm: Llm) -> None:
    """They hold, or are refused; each engine keeps its first backend."""
    bounds: dict[str, Any] = {"eos_token_id": EOS, "max_tokens": 30}
    for constraint in (
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(choice=['"', "\\"]),
        StructuredOutputsParams(regex="(yes|no)"),
        StructuredOutputsParams(json={"enum": ["x", "y"]}),
    ):
        output = await answer(llm, ask(rank=0, structured_outputs=constraint, **bounds))
        expect(f"end of {constraint}", output.finish_reason, FinishReason.STOP)
        if constraint.choice == ["yes", "no"]:
            said = output.token_ids[:-1]
            expect("a choice", said in (tokens("yes"), tokens("no")), True)
    for schema in NOT_ENFORCED:
        constraint = StructuredOutputsParams(json=schema)
        await refused(llm, ask(structured_outputs=constraint), UnsupportedFieldError)
    for text in ("(", "a{"):
        await refused(
            llm, ask(structured_outputs=StructuredOutputsParams(regex=text)), RequestError
        )

    by_guidance = StructuredOutputsParams(
        json={"type": "integer", "multipleOf": 1000, "minimum": 1000, "maximum": 3000},
        backend="guidance",
    )
    output = await answer(llm, ask(structured_outputs=by_guidance, **bounds))
    said = output.token_ids[:-1]
    expect("a multiple", said in [tokens(f"{number}000") for number in (1, 2, 3)], True)
    await refused(llm, ask(rank=0, structured_outputs=by_guidance), UnsupportedFieldError)
    other = StructuredOutputsParams(regex="a", backend="outlines")
    await refused(llm, ask(structured_outputs=other), UnsupportedFieldError)
    for schema in ({"type": "nonsense"}, {"type": "array", "uniqueItems": True}):
        bad = StructuredOutputsParams(json=schema, backend="guidance")
        await refused(llm, ask(structured_outputs=bad), RequestError)
    ok("constraints by xgrammar on one engine, by guidance on the other")


# The choice of an engine -------------------------------------------------------------------------


async def balance(llm: Llm) -> None:
    """What was aborted counts no more, though the engine's statistics may still have it."""
    for _ in range(20):
        async with llm.client.call(plain_request("aborted")) as outputs:
            await anext(outputs)
    await trio.sleep(0.5)
    async with trio.open_nursery() as nursery:
        got: list[int] = []

        async def run(number: int) -> None:
            async with llm.client.call(plain_request(f"kept-{number}")) as outputs:
                got.append(outputs.engine_index)
                async for _ in outputs:
                    pass

        for number in range(20):
            nursery.start_soon(run, number)
    expect("requests of each engine", [got.count(0), got.count(1)], [10, 10])
    ok("20 requests are spread evenly after 20 that were left")


def plain_request(request_id: str) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=50, temperature=0.0)
    return EngineCoreRequest(
        request_id=f"{request_id}-{trio.current_time()}",
        prompt_token_ids=list(PROMPT),
        sampling_params=params,
    )


# Stalls ------------------------------------------------------------------------------------------


async def stalls(llm: Llm) -> None:
    """Requests that no engine runs are seen: of a paused one, and behind one that waits for ever."""
    client = llm.client
    await client.pause_generation(PauseMode.KEEP)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, llm, ask(rank=1))
        await seen(lambda: client.stalled_engines == [1], "a paused engine")
        await client.resume_scheduler()
    expect("stalled after the pause", client.stalled_engines, [])

    client.driver.core.facts.learn(is_multimodal=True)  # which is not true
    with trio.move_on_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.generate, with_feature())
            await seen(lambda: client.stalled_engines == [0], "an engine that waits for an encoder")
            nursery.cancel_scope.cancel()
    client.driver.core.facts.learn(is_multimodal=False)
    ok("stalled engines are seen")


async def seen(look: Callable[[], bool], what: str) -> None:
    """Wait until something shows, which it must within some seconds."""
    begin = trio.current_time()
    while not look():
        if trio.current_time() > begin + 5 * STALL_TIME:
            raise AssertionError(f"{what} was not seen to stall")
        await trio.sleep(0.1)
    ok(f"{what} was seen to stall", trio.current_time() - begin)


# Pooling -----------------------------------------------------------------------------------------


async def check_pooling(port: int) -> None:
    """Send what kills or fools an engine that pools."""
    async with open_llm(owner(port, engine_count=2), hidden_size=HIDDEN_SIZE) as llm:
        await refused(llm, ask(), UnsupportedFieldError)
        await refused(llm, pool("classify"), UnsupportedFieldError)
        await refused(llm, scored("score_doc", "early"), InvalidFieldError)
        for key in ("first", "second", "third"):
            await score(llm, key)
        for rank in (0, 1):
            output = await llm.encode(pool("embed", rank))
            assert output.data is not None
            expect("the shape of an embedding", output.data.shape, (HIDDEN_SIZE,))
        expect("health", llm.client.is_healthy, True)
        ok("queries and their documents on two engines")


async def score(llm: Llm, key: str) -> None:
    """Documents are scored where their query is, and are refused when it is used up."""
    with trio.fail_after(PATIENCE):
        query = await llm.encode(scored("cache_query", key))
        documents = [await llm.encode(scored("score_doc", key)) for _ in range(3)]
    engines = {output.completion.engine_index for output in (query, *documents)}
    expect("engines of a query and its documents", engines, {zlib.crc32(key.encode()) % 2})
    scores = [float(output.data) for output in documents if output.data is not None]
    expect("scores", [round(value, 4) for value in scores], [round(scores[0], 4)] * 3)
    expect("a score of a document that is the query", scores[0] > 0, True)
    await refused(llm, scored("score_doc", key), InvalidFieldError)


def pool(task: str, rank: int | None = None, **params: Any) -> EncodeRequest:
    values: dict[str, Any] = {"task": task, **params}
    return EncodeRequest(PROMPT, pooling_params=PoolingParams(**values), data_parallel_rank=rank)


def scored(mode: str, key: str) -> EncodeRequest:
    uses = 3 if mode == "cache_query" else None
    late: Any = LateInteractionParams(mode=mode, query_key=key, query_uses=uses)
    return pool("token_embed", late_interaction_params=late)
