"""Token ids in the forms that people write them in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from trio_vllm.client.input_processing import RequestLimits, fill_defaults, validate_and_encode
from trio_vllm.errors import InvalidFieldError
from trio_vllm.llm import EncodeRequest, GenerateRequest
from trio_vllm.protocol import (
    EngineCoreRequest,
    PoolingParams,
    SamplingParams,
    as_token_ids,
    decode_engine_message,
)

POOLING = PoolingParams(task="embed")

LIMITS = RequestLimits(max_model_len=16)

FORMS = [
    [1, 2],
    (1, 2),
    range(1, 3),
    np.array([1, 2]),
    np.array([1, 2], np.uint8),
    [np.int64(1), np.int32(2)],
    (np.int64(1), 2),
    deque([1, 2]),
    {1: "a", 2: "b"}.keys(),
]


@pytest.mark.parametrize("given", FORMS)
def test_any_iterable_of_integers_is_a_prompt(given: Any) -> None:
    prompt = GenerateRequest(given).prompt_token_ids

    assert prompt == [1, 2]
    assert [type(token_id) for token_id in prompt] == [int, int]


def test_generator_is_a_prompt() -> None:
    request = GenerateRequest(token_id for token_id in (1, 2))

    assert request.prompt_token_ids == [1, 2]


def test_list_is_not_copied() -> None:
    given = [1, 2]

    assert as_token_ids(given) is given


def test_prompt_by_name() -> None:
    assert GenerateRequest(prompt_token_ids=[1]).prompt_token_ids == [1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hello", "not a text"),
        (b"hello", "not a bytes"),
        ({1: 2}, "not a dict"),
        (5, "not an int"),
        (object(), "not an object"),
    ],
)
def test_what_is_no_token_ids_is_a_type_error(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"prompt_token_ids must be token ids.*{said}"):
        GenerateRequest(given)


@pytest.mark.parametrize("kind", [GenerateRequest, partial(EncodeRequest, pooling_params=POOLING)])
def test_a_request_id_is_a_string(kind: Callable[..., object]) -> None:
    """Engines read it as one, and a number would be the name of no request that can be aborted."""
    with pytest.raises(TypeError, match=r"^request_id must be a string, not 5$"):
        kind([1], request_id=5)


@pytest.mark.parametrize("given", [{"max_tokens": 1}, "greedy", None, GenerateRequest([1])])
def test_parameters_of_another_class_are_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match=r"sampling_params of request 'r' must be SamplingParams"):
        GenerateRequest([1], request_id="r", sampling_params=given)
    with pytest.raises(TypeError, match=r"pooling_params of request 'r' must be PoolingParams"):
        EncodeRequest([1], request_id="r", pooling_params=given)


def sent(**fields: Any) -> EngineCoreRequest:
    """The request as an engine gets it."""
    request = EngineCoreRequest(request_id="r", **fields)
    frames = validate_and_encode(fill_defaults(request), LIMITS)
    message = decode_engine_message([bytes(frame) for frame in frames])
    assert isinstance(message, EngineCoreRequest)
    return message


@pytest.mark.parametrize("given", [*FORMS[:7], [1, np.int64(2)]])
def test_all_token_ids_of_an_engine_request_may_be_written_so(given: Any) -> None:
    params = SamplingParams(
        stop_token_ids=given,
        allowed_token_ids=given,
        logprob_token_ids=given,
    )

    message = sent(prompt_token_ids=given, sampling_params=params)

    assert message.prompt_token_ids == [1, 2]
    assert message.sampling_params is not None
    assert message.sampling_params.stop_token_ids == [1, 2]
    assert message.sampling_params.all_stop_token_ids == [1, 2]
    assert message.sampling_params.allowed_token_ids == [1, 2]
    assert message.sampling_params.logprob_token_ids == [1, 2]


def test_iterator_serves_several_completions() -> None:
    params = SamplingParams(stop_token_ids=iter([1, 2]))  # type: ignore[arg-type]

    for _ in range(2):
        message = sent(prompt_token_ids=[1], sampling_params=params)
        assert message.sampling_params is not None
        assert message.sampling_params.stop_token_ids == [1, 2]


@pytest.mark.parametrize("given", [[1, 2.0], [True], [1, "2"], [1, np.float32(2)], [1, -1]])
def test_item_that_is_no_token_id_is_named(given: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"prompt_token_ids\["):
        sent(prompt_token_ids=given, sampling_params=SamplingParams())
