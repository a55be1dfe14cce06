"""One row for each value that a frontend must not send."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import numpy as np
import pytest
from tests.protocol.strategies import embeds_prompt, mixed_prompt
from tests.recorded import recording

from trio_vllm.client.input_processing import RequestLimits, check_request
from trio_vllm.errors import (
    EmptyPromptError,
    InvalidFieldError,
    RequestError,
    UnsupportedFieldError,
)
from trio_vllm.protocol import (
    EngineCoreRequest,
    LateChunkingParams,
    LateInteractionParams,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
    Tensor,
    decode_engine_message,
    decode_ready_response,
)

LIMITS = RequestLimits(
    max_model_len=16,
    vocab_size=100,
    client_count=2,
    supports_lora=False,
    is_multimodal=True,
    accepts_prompt_embeds=True,
    hidden_size=64,
)


def request(**fields: Any) -> EngineCoreRequest:
    if "pooling_params" not in fields:
        fields.setdefault("sampling_params", SamplingParams())
    fields.setdefault("prompt_token_ids", [1, 2, 3])
    return EngineCoreRequest(request_id="r", **fields)


def nested(levels: int) -> dict[str, Any]:
    """A map in a map ..., so many in all."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def tag(levels: int) -> str:
    """A structural tag that nests so deep."""
    schema = nested(levels - 2)
    return json.dumps({"format": {"type": "json_schema", "json_schema": schema}})


SAMPLING = [
    ("presence_penalty", -2.01),
    ("presence_penalty", math.nan),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", math.inf),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", np.float32(0.5)),
    ("temperature", True),
    ("watermarking", 1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**32),
    ("max_tokens", None),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", True),
    ("logprobs", 101),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", 101),
    ("logprob_token_ids", list(range(129))),
    ("logprob_token_ids", [100]),
    ("logprob_token_ids", [-1]),
    ("stream_interval", 0),
    ("eos_token_id", 100),
    ("eos_token_id", -1),
    ("stop_token_ids", [100]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", {1.0}),
    ("all_stop_token_ids", [100]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [100]),
    ("bad_words_token_ids", [[]]),
    ("bad_words_token_ids", [[1], [100]]),
    ("logit_bias", {100: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("extra_args", {1: "a"}),
    ("extra_args", {"a": 2**64}),
    ("extra_args", {"a": [{"b": -(2**63) - 1}]}),
    ("extra_args", {"a": {1, 2}}),
    ("extra_args", {"a": {"b": "\ud800"}}),
    ("extra_args", {"a": np.int64(1)}),
    ("thinking_token_budget", -2),
    ("thinking_token_budget", True),
    ("routed_experts_prompt_start", 4),
    ("prompt_logprob_start", 0),
    ("prompt_logprob_token_ids", np.zeros((3, 1), np.int32)),
    ("prompt_logprob_token_ids", np.zeros((2, 0), np.int32)),
    ("prompt_logprob_token_ids", np.zeros(2, np.int32)),
    ("prompt_logprob_token_ids", np.zeros((2, 1), np.float32)),
    ("prompt_logprob_token_ids", np.full((2, 1), -2)),
    ("prompt_logprob_token_ids", np.full((2, 1), 100)),
    ("prompt_logprob_token_ids", np.full((2, 1), 2**31)),
    ("prompt_logprob_token_ids", [[1], [2]]),
    ("trace_decode_token_ids", []),
    ("trace_decode_token_ids", [100]),
    ("structured_outputs", {"regex": "a"}),
]


@pytest.mark.parametrize(("name", "value"), SAMPLING, ids=str)
def test_sampling_parameter_is_refused(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})

    with pytest.raises(InvalidFieldError) as caught:
        check_request(request(sampling_params=params), LIMITS)

    assert caught.value.request_id == "r"
    assert caught.value.field.startswith(f"sampling_params.{name}")
    assert str(caught.value).startswith(f"request 'r': sampling_params.{name}")


def structured(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**{"backend": "xgrammar", **fields})


STRUCTURED = [
    ("", structured()),
    ("", structured(regex="a", choice=["a"])),
    ("backend", structured(regex="a", backend=None)),
    ("backend", structured(regex="a", backend="auto")),
    ("json", structured(json=" ")),
    ("json", structured(json=["a"])),
    ("json", structured(json={1: 2})),
    ("json", structured(json=nested(65))),
    ("json", structured(json="[" * 65 + "]" * 65)),
    ("json", structured(json="[" * 100_000)),
    ("structural_tag", structured(structural_tag="")),
    ("structural_tag", structured(structural_tag=tag(81))),
    ("structural_tag", structured(structural_tag="[" * 100_000)),
    ("grammar", structured(grammar="\n")),
    ("regex", structured(regex="a\0")),
    ("choice", structured(choice=[])),
    ("choice", structured(choice="ab")),
    ("json_object", structured(json_object=False)),
]


@pytest.mark.parametrize(("name", "value"), STRUCTURED)
def test_structured_output_is_refused(name: str, value: StructuredOutputsParams) -> None:
    params = SamplingParams(structured_outputs=value)

    with pytest.raises(InvalidFieldError) as caught:
        check_request(request(sampling_params=params), LIMITS)

    path = "sampling_params.structured_outputs"
    assert caught.value.field.startswith(f"{path}.{name}" if name else path)


@pytest.mark.parametrize(
    "value",
    [
        structured(json=nested(64)),
        structured(json='{"a":' * 63 + "{}" + "}" * 63),
        structured(json="true"),
        structured(structural_tag=tag(80)),
        structured(regex=""),
        structured(json_object=True),
        structured(choice=["a", ""]),
    ],
)
def test_structured_output_passes(value: StructuredOutputsParams) -> None:
    check_request(request(sampling_params=SamplingParams(structured_outputs=value)), LIMITS)


TOGETHER = [
    ("skip_reading_prefix_cache", {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}),
    (
        "skip_reading_prefix_cache",
        {
            "prompt_logprob_token_ids": np.zeros((2, 1), np.int32),
            "skip_reading_prefix_cache": False,
        },
    ),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("logprobs", {"logprobs": 3, "logprob_token_ids": [1, 2]}),
    (
        "prompt_logprob_token_ids",
        {"prompt_logprob_token_ids": np.zeros((2, 1), np.int32), "prompt_logprob_start": 1},
    ),
    ("prompt_logprobs", {"trace_decode_token_ids": [1], "prompt_logprobs": 1}),
    ("bad_words_token_ids", {"trace_decode_token_ids": [1], "bad_words_token_ids": [[1]]}),
    ("thinking_token_budget", {"trace_decode_token_ids": [1], "thinking_token_budget": 1}),
    (
        "repetition_detection.min_count",
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=1)},
    ),
    (
        "repetition_detection.min_pattern_size",
        {"repetition_detection": RepetitionDetectionParams(min_pattern_size=1)},
    ),
    (
        "repetition_detection.max_pattern_size",
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=-1)},
    ),
]


@pytest.mark.parametrize(("name", "fields"), TOGETHER)
def test_sampling_parameters_that_do_not_go_together(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check_request(request(sampling_params=SamplingParams(**fields)), LIMITS)

    assert caught.value.field == f"sampling_params.{name}"


def feature(offset: int = 0, length: int = 1, **fields: Any) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length, is_embed=fields.pop("is_embed", None))
    fields = {"modality": "image", **fields}
    return MultiModalFeatureSpec(data=None, identifier="i", mm_position=position, **fields)


def floats(*shape: int) -> Tensor:
    return Tensor.from_numpy(np.zeros(shape, np.float32))


CHUNKS = LateChunkingParams(chunk_size=4)


def pooling(**fields: Any) -> EngineCoreRequest:
    resumable = fields.pop("resumable", False)
    return request(pooling_params=PoolingParams(**fields), resumable=resumable)


def late(mode: str, **fields: Any) -> EngineCoreRequest:
    """A request that takes part in late-interaction scoring."""
    names = ("query_key", "query_uses")
    own = {"query_key": "k"} | {name: fields.pop(name) for name in names if name in fields}
    params = LateInteractionParams(mode=mode, **own)
    return pooling(task="token_embed", late_interaction_params=params, **fields)


REQUESTS = [
    ("prompt_token_ids", request(prompt_token_ids=[1] * 16)),
    ("prompt_token_ids[1]", request(prompt_token_ids=[1, 100])),
    ("prompt_token_ids[1]", request(prompt_token_ids=[1, -1])),
    ("prompt_token_ids[0]", request(prompt_token_ids=[2**32])),
    ("prompt_token_ids[1]", request(prompt_token_ids=np.array([1, 100]))),
    (
        "mm_features[0].mm_position",
        request(prompt_token_ids=[100], mm_features=[feature(0, 2**32 - 1)]),
    ),
    ("prompt_token_ids[0]", request(prompt_token_ids=[True])),
    ("prompt_token_ids", request(prompt_token_ids="abc")),
    ("prompt_embeds", request(prompt_token_ids=None, prompt_embeds=floats(16, 2))),
    ("prompt_embeds", request(prompt_token_ids=None, prompt_embeds=floats(3))),
    (
        "prompt_embeds",
        request(prompt_token_ids=None, prompt_embeds=Tensor("int64", (1, 1), bytes(8))),
    ),
    ("prompt_is_token_ids", request(prompt_embeds=floats(3, 2))),
    ("prompt_is_token_ids", request(prompt_is_token_ids=[True] * 3)),
    ("prompt_is_token_ids", request(prompt_embeds=floats(3, 2), prompt_is_token_ids=[True])),
    ("prompt_token_ids", request(prompt_embeds=floats(2, 2), prompt_is_token_ids=[True] * 2)),
    ("prompt_token_ids[2]", request(**{**mixed_prompt(), "prompt_token_ids": [1, 999, 999]})),
    ("arrival_time", request(arrival_time=math.nan)),
    ("client_index", request(client_index=2)),
    ("client_index", request(client_index=-1)),
    ("current_wave", request(current_wave=-1)),
    ("priority", request(priority=2**31)),
    ("priority", request(priority=-(2**31) - 1)),
    ("data_parallel_rank", request(data_parallel_rank=-1)),
    ("cache_salt", request(cache_salt="\udfff")),
    ("trace_headers['a']", request(trace_headers={"a": 1})),
    ("resumable", request(resumable=None)),
    ("reasoning_parser_kwargs['a']", request(reasoning_parser_kwargs={"a": object()})),
    ("sampling_params", request(sampling_params=None)),
    ("sampling_params", request(sampling_params=SamplingParams(), pooling_params=PoolingParams(task="embed"))),
    ("sampling_params", request(sampling_params={"max_tokens": 1})),
    ("mm_features[0].mm_position", request(mm_features=[feature(2, 2)])),
    ("mm_features[1].mm_position.length", request(mm_features=[feature(), feature(2, 0)])),
    ("mm_features[0].mm_position.is_embed", request(mm_features=[feature(is_embed=floats(1))])),
    ("mm_features[1].mm_position.offset", request(mm_features=[feature(2), feature(1)])),
    ("mm_features[0].modality", request(mm_features=[feature(modality=1)])),
    ("lora_request.lora_int_id", request(lora_request=LoRARequest(lora_name="a", lora_int_id=0, lora_path="a"))),
    ("lora_request.lora_path", request(lora_request=LoRARequest(lora_name="a", lora_int_id=1, lora_path=""))),
    ("pooling_params.task", request(pooling_params=PoolingParams())),
    ("pooling_params.task", request(pooling_params=PoolingParams(task="encode"))),
    ("pooling_params.dimensions", request(pooling_params=PoolingParams(task="embed", dimensions=0))),
    ("pooling_params.output_kind", request(pooling_params=PoolingParams(task="embed", output_kind=0))),
    ("pooling_params.dimensions", pooling(task="classify", dimensions=2)),
    ("pooling_params.dimensions", pooling(task="token_classify", dimensions=2)),
    ("pooling_params.returned_token_ids", pooling(task="embed", returned_token_ids=[1, 100])),
    ("pooling_params.late_interaction_params.query_uses", late("cache_query")),
    ("pooling_params.late_interaction_params.query_uses", late("cache_query", query_uses=0)),
    ("pooling_params.late_interaction_params.query_key", late("score_doc", query_key="")),
    ("pooling_params.late_chunking_params", pooling(task="embed", late_chunking_params=CHUNKS)),
    (
        "pooling_params.late_chunking_params",
        pooling(task="token_embed", late_chunking_params=CHUNKS, step_tag_id=1),
    ),
    ("pooling_params.late_chunking_params", late("score_doc", late_chunking_params=CHUNKS)),
    ("resumable", pooling(task="embed", resumable=True)),
    ("resumable", request(prompt_token_ids=None, prompt_embeds=floats(3, 64), resumable=True)),
    ("prompt_embeds", request(prompt_token_ids=None, prompt_embeds=floats(3, 65))),
    (
        "pooling_params.late_interaction_params.mode",
        request(
            pooling_params=PoolingParams(
                task="embed",
                late_interaction_params=LateInteractionParams(mode="x", query_key="k"),
            )
        ),
    ),
    (
        "pooling_params.late_chunking_params.chunk_size",
        request(
            pooling_params=PoolingParams(
                task="embed", late_chunking_params=LateChunkingParams(chunk_size=0)
            )
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("field", "refused"), REQUESTS)
def test_request_is_refused(field: str, refused: EngineCoreRequest) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check_request(refused, LIMITS)

    assert caught.value.field == field


@pytest.mark.parametrize(
    "refused",
    [
        request(prompt_token_ids=[]),
        request(prompt_token_ids=None),
        request(prompt_token_ids=()),
        request(prompt_token_ids=None, prompt_embeds=floats(0, 4)),
    ],
)
def test_empty_prompt_is_refused(refused: EngineCoreRequest) -> None:
    with pytest.raises(EmptyPromptError):
        check_request(refused, LIMITS)


POOLING = RequestLimits(max_model_len=16, supported_tasks={"embed"}, vllm_version="0.32.0+cpu")
CHUNKED = PoolingParams(task="embed", late_chunking_params=CHUNKS)
BARE = RequestLimits(max_model_len=16)
WIDE = [
    ("allowed_token_ids", request(sampling_params=SamplingParams(allowed_token_ids=range(1025)))),
    (
        "logit_bias",
        request(sampling_params=SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ),
    (
        "all_stop_token_ids",
        request(
            sampling_params=SamplingParams(
                min_tokens=1, max_tokens=2, stop_token_ids=range(129), all_stop_token_ids=range(129)
            )
        ),
    ),
    (
        "bad_words_token_ids",
        request(sampling_params=SamplingParams(bad_words_token_ids=[[1]] * 129)),
    ),
    (
        "bad_words_token_ids",
        request(sampling_params=SamplingParams(bad_words_token_ids=[[1] * 25] * 41)),
    ),
]
"""More than fits the tables of vLLM's second model runner."""


UNSUPPORTED = [
    ("mm_features", request(mm_features=[feature()]), BARE),
    ("prompt_embeds", request(prompt_token_ids=None, prompt_embeds=floats(3, 64)), BARE),
    (
        "prompt_embeds",
        request(prompt_token_ids=None, prompt_embeds=floats(3, 64)),
        attrs.evolve(BARE, accepts_prompt_embeds=True),
    ),
    (
        "sampling_params.logprobs",
        request(sampling_params=SamplingParams(logprobs=21)),
        attrs.evolve(BARE, max_logprobs=20),
    ),
    (
        "sampling_params.prompt_logprobs",
        request(sampling_params=SamplingParams(prompt_logprobs=-1)),
        attrs.evolve(BARE, max_logprobs=20),
    ),
    (
        "sampling_params.prompt_logprobs",
        request(sampling_params=SamplingParams(prompt_logprobs=-1)),
        attrs.evolve(LIMITS, max_logprobs=99),
    ),
    (
        "sampling_params.prompt_logprob_token_ids",
        request(
            sampling_params=SamplingParams(prompt_logprob_token_ids=np.zeros((2, 3), np.int32))
        ),
        attrs.evolve(BARE, max_logprobs=2),
    ),
    (
        "sampling_params.trace_decode_token_ids",
        request(sampling_params=SamplingParams(trace_decode_token_ids=[1])),
        attrs.evolve(BARE, supports_trace_replay=False),
    ),
    (
        "sampling_params.thinking_token_budget",
        request(sampling_params=SamplingParams(thinking_token_budget=1)),
        attrs.evolve(BARE, has_reasoning_parser=False),
    ),
    (
        "pooling_params.dimensions",
        pooling(task="embed", dimensions=2),
        attrs.evolve(BARE, is_matryoshka=False),
    ),
    *[(f"sampling_params.{name}", params, BARE) for name, params in WIDE],
    *[
        (
            f"sampling_params.{name}",
            request(
                prompt_token_ids=None,
                prompt_embeds=floats(3, 64),
                sampling_params=params,
            ),
            LIMITS,
        )
        for name, params in (
            ("presence_penalty", SamplingParams(presence_penalty=1.5)),
            ("frequency_penalty", SamplingParams(frequency_penalty=1.5)),
            ("repetition_penalty", SamplingParams(repetition_penalty=1.5)),
        )
    ],
    ("sampling_params.n", request(sampling_params=SamplingParams(n=2)), LIMITS),
    (
        "lora_request",
        request(lora_request=LoRARequest(lora_name="a", lora_int_id=1, lora_path="a")),
        LIMITS,
    ),
    ("sampling_params", request(), POOLING),
    ("pooling_params.task", request(pooling_params=PoolingParams(task="classify")), POOLING),
    ("pooling_params.late_chunking_params", request(pooling_params=CHUNKED), POOLING),
]


@pytest.mark.parametrize(("field", "refused", "limits"), UNSUPPORTED)
def test_unsupported_field_is_told_apart(
    field: str, refused: EngineCoreRequest, limits: RequestLimits
) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        check_request(refused, limits)

    assert caught.value.field == field


@pytest.mark.parametrize(
    "good",
    [
        request(prompt_token_ids=[1] * 15),
        request(prompt_token_ids=range(1, 4)),
        request(prompt_token_ids=np.array([1, 2])),
        request(prompt_token_ids=(99,)),
        request(prompt_token_ids=[1] * 16, pooling_params=PoolingParams(task="embed")),
        request(**{**mixed_prompt(), "prompt_token_ids": [1, 999, 3]}),
        request(**{**embeds_prompt(), "prompt_token_ids": None}),
        late("cache_query", query_uses=1),
        late("score_doc"),
        pooling(task="token_embed", late_chunking_params=CHUNKS),
        pooling(task="token_embed", dimensions=2),
        # A token that stands for an image may have an id beyond the model's vocabulary.
        request(prompt_token_ids=[1, 999], mm_features=[feature(1)]),
        request(sampling_params=SamplingParams(min_tokens=16)),
        request(sampling_params=SamplingParams(logprobs=100, prompt_logprobs=-1)),
        request(sampling_params=SamplingParams(logprobs=2, logprob_token_ids=[1, 2])),
        request(
            sampling_params=SamplingParams(
                prompt_logprob_token_ids=np.array([[1, -1]]), prompt_logprob_start=1
            )
        ),
        request(sampling_params=SamplingParams(repetition_detection=RepetitionDetectionParams())),
        request(sampling_params=SamplingParams(trace_decode_token_ids=[1], max_tokens=1)),
        request(sampling_params=SamplingParams(temperature=0, top_k=-1, thinking_token_budget=-1)),
    ],
)
def test_edge_passes(good: EngineCoreRequest) -> None:
    check_request(good, LIMITS)


@pytest.mark.parametrize(("dimensions", "is_refused"), [(64, False), (65, True)])
def test_dimensions_are_those_of_the_model_at_most(dimensions: int, is_refused: bool) -> None:
    limits = attrs.evolve(BARE, embedding_size=64, is_matryoshka=True)

    assert refused_field(pooling(task="embed", dimensions=dimensions), limits) == (
        "pooling_params.dimensions" if is_refused else None
    )


@pytest.mark.parametrize(("queries", "is_refused"), [((), True), (("k",), False), (None, False)])
def test_document_needs_a_query_that_was_sent(queries: Any, is_refused: bool) -> None:
    limits = attrs.evolve(BARE, late_interaction_queries=queries)

    assert refused_field(late("score_doc"), limits) == (
        "pooling_params.late_interaction_params.query_key" if is_refused else None
    )


@pytest.mark.parametrize("count", [20, -1])
def test_whole_vocabulary_may_be_allowed(count: int) -> None:
    params = SamplingParams(logprobs=count, prompt_logprobs=20)

    check_request(request(sampling_params=params), attrs.evolve(BARE, max_logprobs=count))


def test_errors_name_the_callers_id() -> None:
    for bad in (request(prompt_token_ids=[]), request(priority="high"), request(client_index=5)):
        with pytest.raises(RequestError) as caught:
            check_request(attrs.evolve(bad, external_req_id="mine"), LIMITS)

        assert caught.value.request_id == "mine"


def refused_field(value: EngineCoreRequest, limits: RequestLimits) -> str | None:
    try:
        check_request(value, limits)
    except InvalidFieldError as error:
        return error.field
    return None


def test_what_is_not_known_is_not_checked() -> None:
    check_request(
        request(
            prompt_token_ids=[2**32 - 1],
            client_index=99,
            lora_request=LoRARequest(lora_name="a", lora_int_id=1, lora_path="a"),
            sampling_params=SamplingParams(stop_token_ids=[2**32 - 1], logprobs=10**6),
        ),
        RequestLimits(max_model_len=16),
    )


@pytest.mark.parametrize("task", ["generate", "transcription", "realtime"])
def test_any_kind_of_generation_takes_sampling_parameters(task: str) -> None:
    check_request(request(), RequestLimits(max_model_len=16, supported_tasks=[task]))


def test_limits_of_several_engines() -> None:
    response = next(
        decode_ready_response(message.frames)
        for message in recording("engine_handshake_dp1").messages
        if message.channel == "input"
    )
    shorter = attrs.evolve(response, max_model_len=100, supports_lora=True)

    limits = RequestLimits.of([response, shorter], vocab_size=7)

    assert limits == RequestLimits(
        max_model_len=100, supports_lora=False, vllm_version="0.33.0", vocab_size=7
    )


@pytest.mark.parametrize("name", ["fatal_empty_prompt", "fatal_prompt_too_long"])
def test_recorded_request_that_killed_an_engine_is_refused(name: str) -> None:
    requests = [
        value
        for message in recording(name).messages
        if message.channel == "input"
        and isinstance(value := decode_engine_message(message.frames), EngineCoreRequest)
    ]
    refused = [r for r in requests if is_refused(r)]

    assert len(refused) == 1


def is_refused(refused: EngineCoreRequest) -> bool:
    try:
        check_request(refused, RequestLimits(max_model_len=512))
    except (EmptyPromptError, InvalidFieldError):
        return True
    return False


@pytest.mark.parametrize(("field", "wide"), WIDE)
def test_first_model_runner_takes_any_number(field: str, wide: EngineCoreRequest) -> None:
    check_request(wide, attrs.evolve(BARE, model_runner_v2=False))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=range(1024)),
        SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)),
        SamplingParams(stop_token_ids=range(129), all_stop_token_ids=range(129)),
        SamplingParams(bad_words_token_ids=[[1] * 8] * 128),
    ],
)
def test_what_fits_the_second_model_runner_passes(params: SamplingParams) -> None:
    check_request(request(sampling_params=params), BARE)
