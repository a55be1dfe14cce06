"""What passes the checks can be sent, and arrives as it was."""

from __future__ import annotations

import attrs
from hypothesis import given
from tests.protocol import strategies as some
from tests.protocol.comparing import same

from trio_vllm.client.input_processing import RequestLimits, check_request, fill_defaults
from trio_vllm.protocol import EngineCoreRequest, decode_engine_message, encode_add

LIMITS = RequestLimits(
    max_model_len=some.CONTEXT,
    vocab_size=some.VOCABULARY,
    accepts_prompt_embeds=True,
    hidden_size=64,
    is_multimodal=True,
)


def arrived(request: EngineCoreRequest) -> EngineCoreRequest:
    frames = encode_add(request)
    message = decode_engine_message([bytes(frame) for frame in frames])
    assert isinstance(message, EngineCoreRequest)
    assert same(message, decode_engine_message(encode_add(message)))
    return message


@given(some.requests())
def test_good_requests_pass_and_arrive(request: EngineCoreRequest) -> None:
    resolved = fill_defaults(request, request.client_index)
    check_request(resolved, LIMITS)

    message = arrived(resolved)

    plain = attrs.evolve(resolved)
    if plain.sampling_params is not None and plain.sampling_params.all_stop_token_ids != ():
        plain.sampling_params = attrs.evolve(
            plain.sampling_params, all_stop_token_ids=list(plain.sampling_params.all_stop_token_ids)
        )
    assert same(plain, message)
