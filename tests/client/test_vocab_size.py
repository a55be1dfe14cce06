"""Which requests depend on a vocabulary whose size is not known yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trio_vllm.client.input_processing import needs_vocab_size
from trio_vllm.protocol import EngineCoreRequest, SamplingParams


def request(prompt: Any = (1, 255), **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams(**params)
    )


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [151645], "min_tokens": 1},
        {"stop_token_ids": np.array([7, 300])},
        {"all_stop_token_ids": frozenset({7, 256})},
        {"logit_bias": {191222: -100.0}},
        {"allowed_token_ids": [99999]},
        {"logprob_token_ids": [99999]},
        {"trace_decode_token_ids": [1, 999]},
        {"bad_words_token_ids": [[1], [2, 500]]},
        {"prompt_logprob_token_ids": np.full((1, 1), 400, np.int32)},
        {"logprobs": 40000},
        {"prompt_logprobs": 257},
        {"eos_token_id": 31992},
    ],
)
def test_request_that_depends_on_the_vocabulary(params: dict[str, Any]) -> None:
    assert needs_vocab_size(request(**params))


@pytest.mark.parametrize("prompt", [[256], (1, 99999), np.array([5, 300]), range(300)])
def test_a_prompt_alone_is_no_reason_to_ask(prompt: Any) -> None:
    """Nearly every prompt would be one; its ids are checked if the size is known."""
    assert not needs_vocab_size(request(prompt))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop_token_ids": [7], "logit_bias": {255: 1.0}, "bad_words_token_ids": [[1]]},
        {"temperature": 0.5, "max_tokens": 9999, "seed": 10**9},
        {"logprobs": 20, "prompt_logprobs": -1},
        {"logprobs": -1},
        {"eos_token_id": 2},
        {"stop_token_ids": [], "logit_bias": {}},
        {"logprobs": "many"},
    ],
)
def test_request_that_does_not(params: dict[str, Any]) -> None:
    assert not needs_vocab_size(request(**params))


@pytest.mark.parametrize("prompt", [None, [], 5, ["a"], "text"])
def test_prompt_that_is_none_is_for_the_check(prompt: Any) -> None:
    assert not needs_vocab_size(request(prompt))
