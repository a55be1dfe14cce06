"""Requests of every kind, for ``cases.py``: as we write them, and as we must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import ormsgpack

from trio_vllm.protocol import (
    EngineCoreRequest,
    KvHintAction,
    KvHintsEnvelope,
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


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def requests() -> dict[str, EngineCoreRequest]:
    """Requests of every kind, with something in every field."""
    plain = EngineCoreRequest(
        request_id="r-é",
        prompt_token_ids=[1, 31999, 3],
        arrival_time=1234.5,
        sampling_params=SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=7),
    )

    def sampled(**fields: Any) -> EngineCoreRequest:
        return attrs.evolve(plain, sampling_params=SamplingParams(**fields))

    def pooled(**fields: Any) -> EngineCoreRequest:
        return attrs.evolve(plain, sampling_params=None, pooling_params=PoolingParams(**fields))

    return {
        "plain": plain,
        "defaults": sampled(),
        "sampling in full": sampled(**FULL_SAMPLING),
        "edges": sampled(
            temperature=2, presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=1e-3,
            top_p=1e-9, min_p=1.0, seed=-(2**63), max_tokens=1, logprobs=-1, prompt_logprobs=-1,
            stream_interval=1, repetition_detection=RepetitionDetectionParams(),
        ),
        "greedy": sampled(temperature=0, max_tokens=2**31, logprob_token_ids=[5, 1], logprobs=2),
        "replay": sampled(trace_decode_token_ids=[5, 6], routed_experts_prompt_start=3),
        "token ids to score": sampled(
            prompt_logprob_token_ids=np.array([[1, -1]]), prompt_logprob_start=1
        ),
        **{
            f"structured {name}": sampled(structured_outputs=StructuredOutputsParams(**{name: value}))
            for name, value in CONSTRAINTS.items()
        },
        "structured options": sampled(
            structured_outputs=StructuredOutputsParams(
                json={"type": "object"}, disable_any_whitespace=True, whitespace_pattern=" ",
                disable_additional_properties=True, backend="guidance",
            )
        ),
        "everything around": attrs.evolve(plain, **AROUND),
        "adapter": attrs.evolve(plain, lora_request=ADAPTER),
        "features": attrs.evolve(plain, mm_features=features()),
        "embeddings": attrs.evolve(
            plain, prompt_token_ids=None, prompt_embeds=Tensor.from_numpy(floats(3, 64))
        ),
        "embeddings and tokens": attrs.evolve(
            plain,
            prompt_embeds=Tensor("bfloat16", (3, 64), bytes(range(128)) * 3),
            prompt_is_token_ids=[True, False, True],
        ),
        "pooling": pooled(task="embed"),
        "pooling to fewer dimensions": pooled(task="embed", dimensions=8),
        "pooling in full": pooled(
            task="token_classify", use_activation=True, step_tag_id=-1,
            returned_token_ids=[1], requires_token_ids=True, skip_reading_prefix_cache=True,
            late_interaction_params=LateInteractionParams(mode="score_doc", query_key="k", query_uses=2),
            extra_kwargs={"a": [1.5]},
        ),
    }  # fmt: skip


FULL_SAMPLING: dict[str, Any] = {
    "watermarking": False,
    "stop_token_ids": [7, 8],
    "max_tokens": 9,
    "min_tokens": 1,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "eos_token_id": 2,
    "logit_bias": {1: 5.0, 31999: -200.0},
    "allowed_token_ids": [1, 2],
    "extra_args": {"kv_transfer_params": {"n": 2**64 - 1, "m": -(2**63), "t": None, "f": [0.5]}},
    "bad_words_token_ids": [[1], [2, 3]],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 4,
    "repetition_detection": RepetitionDetectionParams(
        max_pattern_size=3, min_pattern_size=1, min_count=2
    ),
}

CONSTRAINTS: dict[str, Any] = {
    "json": '{"type": "object"}',
    "regex": "[0-9]+",
    "choice": ["a", "b"],
    "grammar": 'root ::= "a"',
    "json_object": True,
    "structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}',
}

ADAPTER = LoRARequest(
    lora_name="a", lora_int_id=5, lora_path="/a", base_model_name="b", load_inplace=True,
    is_3d_lora_weight=True,
)  # fmt: skip

AROUND: dict[str, Any] = {
    "cache_salt": "s",
    "data_parallel_rank": 1,
    "current_wave": 7,
    "priority": -3,
    "trace_headers": {"traceparent": "00"},
    "resumable": True,
    "external_req_id": "r",
    "reasoning_ended": True,
    "reasoning_parser_kwargs": {"chat_template_kwargs": {"a": [1]}},
    "abort_immediately": True,
    "session_id": "s",
    "kv_hints": KvHintsEnvelope(
        protocol_version="1",
        message_id="m",
        actions=[
            KvHintAction(
                action_id="a", action_type="t", action_version="1", payload={"x": [1, None]}
            )
        ],
    ),
}


def features() -> list[MultiModalFeatureSpec]:
    """One of each kind of field, small and large arrays."""
    small, large = (Tensor.from_numpy(floats(*shape)) for shape in ((2, 2), (3, 100)))
    slices = [[slice(0, 2, None), slice(1, 3)]]
    data = {
        "batched": MultiModalFieldElem(large, MultiModalField("batched", {"keep_on_cpu": True})),
        "flat": MultiModalFieldElem(
            [small, large], MultiModalField("flat", {"slices": slices, "dim": 1})
        ),
        "one": MultiModalFieldElem(small, MultiModalField("flat", {"slices": [slice(0, 2)]})),
        "shared": MultiModalFieldElem([1, 2.5, [3]], MultiModalField("shared", {"batch_size": 2})),
        "none": MultiModalFieldElem(None, MultiModalField("batched")),
    }
    return [
        MultiModalFeatureSpec(
            data=data,
            modality="image",
            identifier="i",
            mm_position=PlaceholderRange(
                offset=0, length=2, is_embed=Tensor.from_numpy(np.array([True, False]))
            ),
            mm_hash="h",
        ),
        MultiModalFeatureSpec(
            data=None, modality="audio", identifier="j",
            mm_position=PlaceholderRange(offset=2, length=1),
        ),
    ]  # fmt: skip


DEADLY_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": float("inf")}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": float("nan")}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.1}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 17}),
    ("logprobs", {"logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
    ("stream_interval", {"stream_interval": 0}),
    ("thinking_token_budget", {"thinking_token_budget": -2}),
    ("logit_bias", {"logit_bias": {"1": 1.0}}),
    ("stop_token_ids", {"stop_token_ids": ["a"]}),
    ("n", {"n": 0}),
    ("repetition_detection", {"repetition_detection": {"min_pattern_size": 1}}),
    ("repetition_detection", {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}),
    ("structured_outputs", {"structured_outputs": {"_backend": "xgrammar"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
]


def deadly_requests() -> Iterator[tuple[str, list[bytes]]]:
    """Requests that vLLM's constructors refuse, and the field: an engine that reads one goes deaf."""
    for name, fields in DEADLY_SAMPLING:
        yield name, raw_request(sampling_params=fields)
    pooling: list[Any] = [None, None, None, None, "embed", False, None, None, None, 2]
    for name, position, value in (("output_kind", 9, 0), ("task", 4, "encode")):
        params = [*pooling[:position], value, *pooling[position + 1 :]]
        yield name, raw_request(sampling_params=None, pooling_params=params)
    yield "lora_int_id", raw_request(lora_request=["a", 0, "/a"])
    yield "lora_path", raw_request(lora_request=["a", 1, ""])
    for name in ("arrival_time", "client_index", "current_wave", "priority", "resumable"):
        yield name, raw_request(**{name: None})
    yield "trace_headers", raw_request(trace_headers={1: "a"})


def raw_request(**fields: Any) -> list[bytes]:
    """The payload of an ADD with any values, past all our checks."""
    names = [attribute.name for attribute in attrs.fields(EngineCoreRequest)]
    values = attrs.asdict(
        EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    )
    values |= {"sampling_params": {}, **fields}
    payload = [values[name] for name in names]
    return [ormsgpack.packb(payload, option=ormsgpack.OPT_NON_STR_KEYS)]
