"""What is filled into a request, in a copy."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest

from trio_vllm.client.input_processing import fill_defaults
from trio_vllm.protocol import (
    EngineCoreRequest,
    LateChunkingParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    Tensor,
)


def resolved(**fields: Any) -> SamplingParams:
    request = EngineCoreRequest(request_id="r", sampling_params=SamplingParams(**fields))
    params = fill_defaults(request).sampling_params
    assert params is not None
    return params


def test_nothing_to_fill_in_gives_the_same_request() -> None:
    request = EngineCoreRequest(request_id="r", sampling_params=SamplingParams(temperature=0.5))

    assert fill_defaults(request) is request


def test_client_index_is_set_in_a_copy() -> None:
    request = EngineCoreRequest(request_id="r", sampling_params=SamplingParams())

    copy = fill_defaults(request, 3)

    assert copy.client_index == 3
    assert request.client_index == 0
    assert copy.sampling_params is request.sampling_params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ()),
        ({"eos_token_id": 7}, [7]),
        ({"stop_token_ids": [9, 3]}, [3, 9]),
        ({"stop_token_ids": [9, 7], "eos_token_id": 7}, [7, 9]),
        ({"stop_token_ids": np.array([4, 4])}, [4]),
        ({"stop_token_ids": [], "eos_token_id": None}, ()),
        ({"eos_token_id": 0}, [0]),
        ({"eos_token_id": 7, "all_stop_token_ids": [1]}, [1]),
        ({"eos_token_id": 7, "all_stop_token_ids": frozenset()}, [7]),
        ({"eos_token_id": 7, "all_stop_token_ids": 5}, 5),
        ({"eos_token_id": [7]}, ()),
        ({"stop_token_ids": ["a"], "eos_token_id": 1}, ()),
        ({"stop_token_ids": 5}, ()),
    ],
)
def test_ids_to_mask_are_the_stop_and_end_of_text_ids(
    fields: dict[str, Any], expected: object
) -> None:
    assert resolved(**fields).all_stop_token_ids == expected


def test_minus_one_is_none() -> None:
    params = resolved(seed=-1, thinking_token_budget=-1)

    assert params.seed is params.thinking_token_budget is None


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({1: 100.0, 2: -100.0}, {1: 100.0, 2: -100.0}),
        ({1: 150.0, 2: -1e300, 3: 5}, {1: 100.0, 2: -100.0, 3: 5}),
        ({1: math.inf, 2: -math.inf}, {1: 100.0, 2: -100.0}),
        ({1: 10**400}, {1: 100.0}),
        ({1: "much"}, {1: "much"}),
        ([1], [1]),
    ],
)
def test_logit_bias_is_brought_into_range(bias: Any, expected: object) -> None:
    assert resolved(logit_bias=bias).logit_bias == expected


def test_bias_that_is_no_number_stays() -> None:
    bias = resolved(logit_bias={1: math.nan, 2: 101.0}).logit_bias

    assert bias is not None
    assert math.isnan(bias[1])
    assert bias[2] == 100


def test_prompt_token_ids_to_score_are_narrowed() -> None:
    wide = np.array([[1, -1]])
    params = resolved(prompt_logprob_token_ids=wide)

    assert params.prompt_logprob_token_ids is not None
    assert params.prompt_logprob_token_ids.dtype == np.int32
    assert params.prompt_logprob_token_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize("ids", [np.array([[2**40]]), np.array([[0.5]]), "ids"])
def test_what_does_not_fit_is_left_for_the_check(ids: Any) -> None:
    assert resolved(prompt_logprob_token_ids=ids).prompt_logprob_token_ids is ids


def test_structured_outputs_get_a_backend() -> None:
    given = StructuredOutputsParams(regex="a")
    request = EngineCoreRequest(
        request_id="r", sampling_params=SamplingParams(structured_outputs=given)
    )

    params = fill_defaults(request, 0, "guidance").sampling_params

    assert params is not None
    expected = attrs.evolve(given, backend="guidance")
    assert params.structured_outputs == expected
    assert given.backend is None


def test_chosen_backend_stays() -> None:
    given = StructuredOutputsParams(regex="a", backend="outlines")

    assert resolved(structured_outputs=given).structured_outputs is given


def test_copy_keeps_every_other_field() -> None:
    fields: dict[str, Any] = {a.name: object() for a in attrs.fields(EngineCoreRequest)}
    sampling: dict[str, Any] = {a.name: object() for a in attrs.fields(SamplingParams)}
    sampling |= {"eos_token_id": 1, "all_stop_token_ids": (), "stop_token_ids": None}
    params = SamplingParams(**sampling)
    request = EngineCoreRequest(**(fields | {"sampling_params": params}))

    copy = fill_defaults(request, 5)

    for attribute in attrs.fields(EngineCoreRequest):
        if attribute.name not in ("client_index", "sampling_params"):
            assert getattr(copy, attribute.name) is getattr(request, attribute.name)
    for attribute in attrs.fields(SamplingParams):
        if attribute.name != "all_stop_token_ids":
            assert getattr(copy.sampling_params, attribute.name) is getattr(params, attribute.name)
    assert copy.sampling_params is not None
    assert copy.sampling_params.all_stop_token_ids == [1]


# Traces ------------------------------------------------------------------------------------------


def test_trace_is_replayed_to_its_end() -> None:
    params = resolved(
        trace_decode_token_ids=list(range(20)),
        min_tokens=3,
        eos_token_id=7,
        stop_token_ids=[9],
    )

    assert params.max_tokens == 20
    assert params.min_tokens == 0
    assert params.eos_token_id is None
    assert params.stop_token_ids is None
    assert params.all_stop_token_ids == ()
    assert params.trace_decode_token_ids == list(range(20))


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 20), (16, 20), (5, 5), (99, 20)])
def test_trace_ends_before_a_limit_that_was_meant(max_tokens: int | None, expected: int) -> None:
    params = resolved(trace_decode_token_ids=[1] * 20, max_tokens=max_tokens)

    assert params.max_tokens == expected


@pytest.mark.parametrize(("prompt", "expected"), [(4, 12), (15, 1), (99, 1)])
def test_trace_is_cut_at_the_end_of_the_context(prompt: int, expected: int) -> None:
    given = SamplingParams(trace_decode_token_ids=tuple(range(20)))
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1] * prompt, sampling_params=given
    )

    params = fill_defaults(request, max_model_len=16).sampling_params

    assert params is not None
    assert params.trace_decode_token_ids == list(range(expected))
    assert params.max_tokens == expected


@pytest.mark.parametrize("trace", [[], "abc", 5])
def test_trace_that_is_none_is_left_for_the_check(trace: Any) -> None:
    params = resolved(trace_decode_token_ids=trace, max_tokens=3)

    assert params.max_tokens == 3
    assert params.trace_decode_token_ids == trace


def test_embeddings_count_as_a_prompt_before_a_trace() -> None:
    request = EngineCoreRequest(
        request_id="r",
        prompt_embeds=Tensor.from_numpy(np.zeros((10, 2), np.float32)),
        sampling_params=SamplingParams(trace_decode_token_ids=[1] * 20),
    )

    params = fill_defaults(request, max_model_len=16).sampling_params

    assert params is not None
    assert params.max_tokens == 6


# Pooling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "activation", "skip"),
    [
        ("embed", True, False),
        ("classify", True, False),
        ("token_embed", True, True),
        ("token_classify", True, True),
        ("plugin", None, True),
        ("embed&token_classify", None, None),
        ("nonsense", None, None),
        (None, None, None),
        ({}, None, None),
    ],
)
def test_pooling_starts_from_what_the_task_wants(
    task: Any, activation: bool | None, skip: bool | None
) -> None:
    params = pooled(task=task)

    assert (params.use_activation, params.skip_reading_prefix_cache) == (activation, skip)


def test_pooling_parameters_that_are_set_stay() -> None:
    params = pooled(task="token_embed", use_activation=False, skip_reading_prefix_cache=False)

    assert (params.use_activation, params.skip_reading_prefix_cache) == (False, False)


def test_late_chunks_need_the_whole_prompt() -> None:
    params = pooled(
        task="token_embed",
        skip_reading_prefix_cache=False,
        late_chunking_params=LateChunkingParams(chunk_size=2),
    )

    assert params.skip_reading_prefix_cache is True


def pooled(**fields: Any) -> PoolingParams:
    request = EngineCoreRequest(request_id="r", pooling_params=PoolingParams(**fields))
    params = fill_defaults(request).pooling_params
    assert params is not None
    return params


# Rows of ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 2], [3]], [[1, 2], [3, -1]]),
        ([(1,)], [[1]]),
        ([[1], []], [[1], [-1]]),
    ],
)
def test_rows_of_ids_are_padded(rows: Any, expected: list[list[int]]) -> None:
    ids = resolved(prompt_logprob_token_ids=rows).prompt_logprob_token_ids

    assert ids is not None
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


@pytest.mark.parametrize("rows", [[1, 2], [[0.5]], [["a"]], [[2**70]], [[True]]])
def test_rows_that_are_none_are_left_for_the_check(rows: Any) -> None:
    assert resolved(prompt_logprob_token_ids=rows).prompt_logprob_token_ids is rows
