"""A usual request is made in a shorter way, and is the same."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from trio_vllm.mock import MockEngineConfig
from trio_vllm.mock.content import TokenSource
from trio_vllm.mock.engine import answers_of
from trio_vllm.mock.request import Refusal, Request, RequestFactory
from trio_vllm.protocol import (
    EngineCoreRequest,
    EngineCoreSamplingParams,
    PoolingParams,
    RepetitionDetectionParams,
    StructuredOutputsParams,
)

USUAL_OR_NOT = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([None, 1, 5, 900])},
    optional={
        "temperature": st.sampled_from([0.0, 1.0]),
        "min_tokens": st.sampled_from([0, 1, 3]),
        "stop_token_ids": st.sampled_from([[], [1, 2, 3]]),
        "eos_token_id": st.sampled_from([None, 2, 7]),
        "logprobs": st.sampled_from([None, 0, 2, -2]),
        "prompt_logprobs": st.sampled_from([None, 1]),
        "logprob_token_ids": st.sampled_from([None, [1], [99]]),
        "trace_decode_token_ids": st.sampled_from([None, [1, 2], [99]]),
        "structured_outputs": st.just(StructuredOutputsParams(regex="a")),
        "extra_args": st.just({"kv_transfer_params": {"do_remote_prefill": True}}),
        "repetition_detection": st.just(
            RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=2)
        ),
    },
)


@given(
    params=USUAL_OR_NOT,
    prompt_len=st.sampled_from([None, 0, 1, 3, 999, 1000]),
    emitted=st.sampled_from([0, 7]),
    others=st.sampled_from(
        [{}, {"trace_headers": {"a": "b"}}, {"pooling_params": PoolingParams()}]
    ),
    config=st.sampled_from(
        [
            {},
            {"output_tokens_mean": 4.0},
            {"output": "echo"},
            {"stop_at_eos": True},
            {"supported_tasks": ("embed",)},
            {"inter_token_latency": 0.01},
        ]
    ),
)
@examples(300)
def test_usual_requests_are_made_as_any_others_are(
    params: dict[str, Any],
    prompt_len: int | None,
    emitted: int,
    others: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """What is known of the parameters of one is true of the next, too."""
    made = MockEngineConfig(max_model_len=1000, vocab_size=64, **config)
    wire = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=None if prompt_len is None else [1] * prompt_len,
        sampling_params=EngineCoreSamplingParams(**params),
        **others,
    )
    factory, fresh = (
        RequestFactory(made, TokenSource(64), answers_of(made, 0), None) for _ in range(2)
    )
    factory.make(wire, emitted)

    def told(request: Request | Refusal) -> Any:
        if isinstance(request, Refusal):
            return request
        for _ in request.search or ():
            pass
        others = {"given", "scheduled", "search"}
        names = [name.name for name in attrs.fields(Request) if name.name not in others]
        return [getattr(request, name) for name in names], request.tokens(TokenSource(64), 0, 3)

    assert told(factory.make(wire, emitted)) == told(fresh.make_any(wire, emitted))
