"""Good requests, by Hypothesis and by hand; and what callers and peers may put in place of a value."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import ormsgpack
from hypothesis import strategies as st

from trio_vllm.protocol import (
    EngineCoreRequest,
    KvHintAction,
    KvHintsEnvelope,
    LateChunkingParams,
    LateInteractionParams,
    LoRARequest,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
    Tensor,
)

VOCABULARY = 1000
CONTEXT = 64


class Colour(enum.IntEnum):
    RED = 1


def _endless_list() -> list[Any]:
    endless: list[Any] = []
    endless.append([endless])
    return endless


def _endless_map() -> dict[str, Any]:
    endless: dict[str, Any] = {}
    endless["again"] = {"and": endless}
    return endless


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**32,
    2**63,
    2**64,
    -(2**63) - 1,
    10**5000,
    0.5,
    -0.0,
    math.nan,
    math.inf,
    "",
    "text",
    "a\x00b",
    "\ud800",
    "x" * 5000,
    b"bytes",
    bytearray(b"x"),
    memoryview(b"xyz")[::2],
    (),
    [],
    {},
    [True],
    [None],
    ["1"],
    [-1],
    [2**32],
    [[]],
    [1.0],
    {1, 2},
    frozenset({"a"}),
    {"a": {1: 2}},
    {1: 0.5},
    {-1: 0.5},
    {"1": 0.5},
    {None: 1},
    {True: 1},
    {("a",): 1},
    {"\ud800": 1},
    {"n": 2**64},
    {"s": {1}},
    {"o": object()},
    _endless_list(),
    _endless_map(),
    np.int64(3),
    np.float64(0.5),
    np.float32(math.nan),
    np.array(3),
    np.array([1, 2]),
    np.array([[1, -2]]),
    np.array(["a"]),
    np.array([None]),
    np.zeros((2, 2), complex),
    Colour.RED,
    object(),
    slice(1, 2),
    Tensor("float32", (2, 2), b"short"),
    Tensor("nonsense", (1,), b"x"),
    Tensor("float32", (-1,), b""),
    SamplingParams(),
    PoolingParams(),
]
"""What a caller might put anywhere."""


def packable(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Whatever MessagePack can say, odd keys and extension types included."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5)
    )
    ext = st.builds(ormsgpack.Ext, st.integers(1, 4), st.binary(max_size=8))
    keys = scalars | st.tuples(st.integers(0, 3))
    return st.recursive(
        scalars | ext if leaves is None else leaves | scalars | ext,
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


# Good values ------------------------------------------------------------------------------------

token_ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
some_token_ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)
u32 = st.integers(0, 2**32 - 1)
penalties = st.floats(-2, 2)
texts = st.text(max_size=8)
free = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
free_maps = st.dictionaries(texts, free, max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def tensors(shape: tuple[int, ...], dtype: str = "float32") -> st.SearchStrategy[Tensor]:
    return st.integers(0, 1).map(lambda fill: Tensor.from_numpy(np.full(shape, fill, dtype)))


structured_outputs = st.one_of(
    st.builds(StructuredOutputsParams, json=st.just('{"type": "object"}') | st.just({"a": [1]})),
    st.builds(
        StructuredOutputsParams,
        regex=st.from_regex(r"\A[a-z ]*\Z"),
        backend=st.sampled_from(["xgrammar", "guidance", "outlines", "lm-format-enforcer"]),
    ),
    st.builds(StructuredOutputsParams, choice=st.lists(texts, min_size=1, max_size=3)),
    st.builds(StructuredOutputsParams, json_object=st.just(True), whitespace_pattern=maybe(texts)),
    st.builds(
        StructuredOutputsParams,
        grammar=st.just("root ::= 'a'"),
        backend=st.sampled_from(["xgrammar", "guidance"]),
    ),
)

SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": penalties,
    "frequency_penalty": penalties,
    "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False),
    "temperature": st.floats(0, 2),
    "watermarking": maybe(st.booleans()),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "seed": maybe(st.integers(-(2**63), 2**63 - 1)),
    "stop_token_ids": maybe(token_ids),
    "max_tokens": st.integers(8, 2**32 - 1),
    "min_tokens": st.integers(0, 8),
    "logprobs": maybe(st.integers(-1, VOCABULARY)),
    "prompt_logprobs": maybe(st.integers(-1, VOCABULARY)),
    "stream_interval": maybe(st.integers(1, 2**32 - 1)),
    "eos_token_id": maybe(st.integers(0, VOCABULARY - 1)),
    "all_stop_token_ids": st.just(()) | token_ids,
    "structured_outputs": maybe(structured_outputs),
    "logit_bias": maybe(
        st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3)
    ),
    "allowed_token_ids": maybe(some_token_ids),
    "extra_args": maybe(free_maps),
    "bad_words_token_ids": maybe(st.lists(some_token_ids, max_size=2)),
    "skip_reading_prefix_cache": maybe(st.booleans()),
    "thinking_token_budget": maybe(st.integers(-1, 2**31 - 1)),
    "repetition_detection": maybe(
        st.builds(
            RepetitionDetectionParams,
            max_pattern_size=st.integers(2, 9),
            min_pattern_size=st.integers(0, 2),
            min_count=st.integers(2, 9),
        )
    ),
    "routed_experts_prompt_start": st.integers(0, 1),
}
"""By field; what is missing here depends on other fields."""

sampling_params = st.fixed_dictionaries({}, optional=SAMPLING).map(lambda f: SamplingParams(**f))

pooling_params = st.one_of(
    st.builds(
        PoolingParams,
        task=st.sampled_from(["embed", "token_embed"]),
        use_activation=maybe(st.booleans()),
        dimensions=maybe(st.integers(1, 100)),
        returned_token_ids=maybe(token_ids),
        late_interaction_params=maybe(
            st.builds(
                LateInteractionParams,
                mode=st.just("score_doc"),
                query_key=texts.filter(bool),
                query_uses=maybe(u32),
            )
        ),
        extra_kwargs=maybe(free_maps),
    ),
    st.builds(
        PoolingParams,
        task=st.just("token_embed"),
        late_chunking_params=st.builds(LateChunkingParams, chunk_size=st.integers(1, 99)),
    ),
    st.builds(PoolingParams, task=st.just("token_classify"), step_tag_id=maybe(st.integers(0, 9))),
)

multimodal_fields = st.one_of(
    st.builds(
        MultiModalField, st.just("batched"), st.fixed_dictionaries({"keep_on_cpu": st.booleans()})
    ),
    st.just(
        MultiModalField(
            "flat",
            {"keep_on_cpu": True, "slices": [slice(0, 2), slice(None, None, 2)], "dim": 0},
        )
    ),
    st.just(MultiModalField("shared", {"keep_on_cpu": False, "batch_size": 2})),
)
nested_tensors = st.recursive(
    tensors((2, 3)) | st.integers(-5, 5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
features = st.builds(
    MultiModalFeatureSpec,
    data=maybe(
        st.dictionaries(
            texts,
            st.builds(MultiModalFieldElem, maybe(nested_tensors), multimodal_fields),
            max_size=2,
        )
    ),
    modality=st.sampled_from(["image", "audio", "video"]),
    identifier=texts,
    mm_position=st.builds(
        PlaceholderRange,
        offset=st.integers(0, 1),
        length=st.just(1),
        is_embed=maybe(tensors((1,), "bool")),
    ),
    mm_hash=maybe(texts),
)

kv_hints = st.builds(
    KvHintsEnvelope,
    protocol_version=texts,
    message_id=texts,
    actions=st.lists(
        st.builds(
            KvHintAction,
            action_id=texts,
            action_type=texts,
            action_version=texts,
            payload=free_maps,
        ),
        max_size=2,
    ),
)

lora_requests = st.builds(
    LoRARequest,
    lora_name=texts,
    lora_int_id=st.integers(1, 2**63 - 1),
    lora_path=st.text(min_size=1, max_size=8),
    base_model_name=maybe(texts),
    load_inplace=st.booleans(),
    is_3d_lora_weight=st.booleans(),
)

REQUEST: dict[str, st.SearchStrategy[Any]] = {
    "arrival_time": st.floats(allow_nan=False, allow_infinity=False),
    "mm_features": maybe(
        st.lists(features, max_size=2).map(lambda f: sorted(f, key=lambda x: x.mm_position.offset))
    ),
    "lora_request": maybe(lora_requests),
    "cache_salt": maybe(texts),
    "data_parallel_rank": maybe(u32),
    "client_index": u32,
    "current_wave": u32,
    "priority": st.integers(-(2**31), 2**31 - 1),
    "trace_headers": maybe(st.dictionaries(texts, texts, max_size=2)),
    "resumable": st.booleans(),
    "external_req_id": maybe(texts),
    "reasoning_ended": maybe(st.booleans()),
    "reasoning_parser_kwargs": maybe(free_maps),
    "abort_immediately": st.booleans(),
    "session_id": maybe(texts),
    "kv_hints": maybe(kv_hints),
}


@st.composite
def requests(draw: st.DrawFn) -> EngineCoreRequest:
    """Requests that any engine takes."""
    fields = draw(st.fixed_dictionaries({}, optional=REQUEST))
    prompt: dict[str, Any] = {
        "prompt_token_ids": draw(
            st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=CONTEXT - 1)
        )
    }
    if draw(st.booleans()):
        params = draw(sampling_params)
        if params.prompt_logprobs is not None:
            params.skip_reading_prefix_cache = None
        if not fields.get("resumable"):
            prompt = draw(st.sampled_from([prompt, embeds_prompt(), mixed_prompt()]))
        if "prompt_token_ids" not in prompt:  # penalties look for the prompt's tokens
            params.presence_penalty = params.frequency_penalty = 0.0
            params.repetition_penalty = 1.0
        return EngineCoreRequest(request_id=draw(texts), sampling_params=params, **prompt, **fields)
    fields.pop("resumable", None)
    return EngineCoreRequest(
        request_id=draw(texts), pooling_params=draw(pooling_params), **prompt, **fields
    )


def embeds_prompt() -> dict[str, Any]:
    return {"prompt_embeds": Tensor.from_numpy(np.ones((3, 64), np.float32))}


def mixed_prompt() -> dict[str, Any]:
    return {
        "prompt_token_ids": [1, VOCABULARY + 7, 3],
        "prompt_is_token_ids": [True, False, True],
        "prompt_embeds": Tensor("bfloat16", (3, 64), bytes(384)),
    }


# By hand ---------------------------------------------------------------------------------------


def full_request() -> EngineCoreRequest:
    """Something in every place that holds a class of its own."""
    tensor = Tensor.from_numpy(np.ones((2, 2), np.float32))
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="a"),
            repetition_detection=RepetitionDetectionParams(max_pattern_size=1, min_count=2),
        ),
        lora_request=LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a"),
        mm_features=[
            MultiModalFeatureSpec(
                data={
                    "a": MultiModalFieldElem(tensor, MultiModalField("batched")),
                    "b": MultiModalFieldElem(
                        [tensor, 1], MultiModalField("shared", {"batch_size": 1})
                    ),
                },
                modality="image",
                identifier="i",
                mm_position=PlaceholderRange(offset=0, length=2),
            )
        ],
        kv_hints=KvHintsEnvelope(
            protocol_version="1",
            message_id="m",
            actions=[KvHintAction(action_id="a", action_type="t", action_version="1", payload={})],
        ),
    )


def pooling_request() -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        pooling_params=PoolingParams(
            task="token_embed",
            late_interaction_params=LateInteractionParams(mode="score_doc", query_key="k"),
        ),
    )


def chunks_request() -> EngineCoreRequest:
    params = PoolingParams(
        task="token_embed", late_chunking_params=LateChunkingParams(chunk_size=1)
    )
    return EngineCoreRequest(request_id="r", prompt_token_ids=[1], pooling_params=params)


def embeds_request() -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", sampling_params=SamplingParams(), **embeds_prompt())


def mixed_request() -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", sampling_params=SamplingParams(), **mixed_prompt())
