"""From a caller's request to those of the engines."""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm._errors import InvalidFieldError
from trio_vllm.llm._request import EncodeRequest, GenerateRequest, PromptRequest
from trio_vllm.protocol import EngineCoreRequest, EngineCoreSamplingParams

MAX_COMPLETIONS = 16_384
"""Upstream's default for ``VLLM_MAX_N_SEQUENCES``: each is a request of its own to the engine."""

MAX_SEED = 2**63 - 1


@attrs.define
class Identity:
    """What a request is called, and when it came."""

    external_id: str
    internal_id: str
    arrival_time: float


def lower_generate(
    request: GenerateRequest, identity: Identity, max_model_len: int
) -> list[EngineCoreRequest]:
    """One engine request per completion; `InvalidFieldError` if their number makes no sense.

    Children are named and seeded as in ``vllm/v1/engine/parallel_sampling.py``.
    """
    params = request.sampling_params
    _check_completions(params, identity.external_id)
    if params.max_tokens is None:
        room = max_model_len - len(request.prompt_token_ids)
        # For a prompt that leaves no room the client has a better error.
        params = attrs.evolve(params, max_tokens=max(room, 1))
    parent = _lower(
        request,
        identity,
        sampling_params=params,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )
    if params.n == 1:
        return [parent]
    return [
        attrs.evolve(
            parent,
            request_id=f"{index}_{identity.internal_id}",
            sampling_params=attrs.evolve(params, n=1, seed=_child_seed(params.seed, index)),
        )
        for index in range(params.n)
    ]


def lower_encode(request: EncodeRequest, identity: Identity) -> EngineCoreRequest:
    """The engine request that pools a prompt."""
    return _lower(request, identity, pooling_params=request.pooling_params)


def _lower(request: PromptRequest, identity: Identity, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=identity.internal_id,
        external_req_id=identity.external_id,
        arrival_time=identity.arrival_time,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        trace_headers=request.trace_headers,
        priority=request.priority,
        data_parallel_rank=request.data_parallel_rank,
        session_id=request.session_id,
        kv_hints=request.kv_hints,
        **fields,
    )


def _check_completions(params: Any, external_id: str) -> None:
    if not isinstance(params, EngineCoreSamplingParams):
        raise InvalidFieldError(external_id, "sampling_params", "must be SamplingParams")
    if type(params.n) is not int or not 1 <= params.n <= MAX_COMPLETIONS:
        reason = f"must be an integer from 1 to {MAX_COMPLETIONS}"
        raise InvalidFieldError(external_id, "sampling_params.n", reason)
    last = _child_seed(params.seed, params.n - 1)
    if type(last) is int and last > MAX_SEED:
        reason = f"must leave room for {params.n} seeds below 2**63"
        raise InvalidFieldError(external_id, "sampling_params.seed", reason)


def _child_seed(seed: Any, index: int) -> Any:
    """Children differ; -1 is no seed. Other types are for the client to refuse."""
    return seed + index if type(seed) is int and seed != -1 else seed
