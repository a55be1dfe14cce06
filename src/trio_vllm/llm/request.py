"""`GenerateRequest` and `EncodeRequest`; `to_engine_requests` makes engine requests of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trio_vllm.errors import InvalidFieldError, with_article
from trio_vllm.protocol import (
    EngineCoreRequest,
    EngineCoreSamplingParams,
    KvHintsEnvelope,
    LoRARequest,
    MultiModalFeatureSpec,
    PoolingParams,
    as_token_ids,
)
from trio_vllm.values import define, frozen


def _has_class(expected: type) -> Any:
    """A validator that says in a sentence what to give."""

    def validate(request: PromptRequest, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, expected):
            got = with_article(type(value).__name__)
            whose = "" if request.request_id is None else f" of request {request.request_id!r}"
            raise TypeError(f"{attribute.name}{whose} must be {expected.__name__}(…), not {got}")

    return validate


def _is_text(_: PromptRequest, attribute: attrs.Attribute[Any], value: object) -> None:
    """A validator that refuses what is neither a string nor None."""
    if not isinstance(value, str | None):
        raise TypeError(f"{attribute.name} must be a string, not {value!r}")


@frozen(eq=False)
class PromptRequest:
    """Fields of both kinds of request; mirrors ``GenerateRequest`` of ``rust/src/llm``."""

    prompt_token_ids: Sequence[int] = attrs.field(converter=as_token_ids)
    """Any iterable of integers; may be given by position."""
    request_id: str | None = attrs.field(default=None, kw_only=True, validator=_is_text)
    """The caller's id; None lets `Llm` choose one. It need not be unique unless randomisation is
    off."""
    mm_features: list[MultiModalFeatureSpec] | None = attrs.field(default=None, kw_only=True)
    arrival_time: float | None = attrs.field(default=None, kw_only=True)
    """UNIX seconds; None is now. Latencies count from here."""
    lora_request: LoRARequest | None = attrs.field(default=None, kw_only=True)
    cache_salt: str | None = attrs.field(default=None, kw_only=True)
    """Prefix-cache entries are shared only between requests of the same salt."""
    trace_headers: dict[str, str] | None = attrs.field(default=None, kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    """Lower is earlier, if the engine schedules by priority."""
    data_parallel_rank: int | None = attrs.field(default=None, kw_only=True)
    """Pins the request to the engine with this index."""
    session_id: str | None = attrs.field(default=None, kw_only=True)
    kv_hints: KvHintsEnvelope | None = attrs.field(default=None, kw_only=True)


@frozen(eq=False)
class GenerateRequest(PromptRequest):
    """A prompt to complete."""

    sampling_params: EngineCoreSamplingParams = attrs.field(
        factory=EngineCoreSamplingParams,
        kw_only=True,
        validator=_has_class(EngineCoreSamplingParams),
    )
    """``n`` completions are as many engine requests; the seed of the i-th is ``seed + i``.
    ``max_tokens`` is 16 unless it is stated; None is what the model's context leaves."""
    reasoning_parser_kwargs: dict[str, Any] | None = attrs.field(default=None, kw_only=True)
    reasoning_ended: bool | None = attrs.field(default=None, kw_only=True)


@frozen(eq=False)
class EncodeRequest(PromptRequest):
    """A prompt to pool, into an embedding for example."""

    pooling_params: PoolingParams = attrs.field(kw_only=True, validator=_has_class(PoolingParams))


def check_kind(method: str, request: object, kind: type[PromptRequest]) -> None:
    """Refuse what is no request for this method, with a `TypeError`."""
    if not isinstance(request, kind):
        wanted, got = with_article(kind.__name__), with_article(type(request).__name__)
        raise TypeError(f"{method} takes {wanted}(...), not {got}")


def check_many(method: str, requests: object) -> None:
    """Refuse one request where many are wanted, with a `TypeError`."""
    if isinstance(requests, PromptRequest):
        got = with_article(type(requests).__name__)
        raise TypeError(f"{method} takes many requests, not {got}: write {method}([request])")


MAX_COMPLETIONS = 16_384
"""Upstream's default for ``VLLM_MAX_N_SEQUENCES``: each is a request of its own to the engine."""

MAX_SEED = 2**63 - 1


@define
class RequestIds:
    """A request's id at the caller and at the engine, and its arrival time."""

    external_id: str
    internal_id: str
    arrival_time: float
    """UNIX seconds."""


def to_engine_requests(
    request: GenerateRequest, ids: RequestIds, max_model_len: int
) -> list[EngineCoreRequest]:
    """Make one engine request per completion; `InvalidFieldError` if ``n`` is out of range.

    Children are named and seeded as in ``vllm/v1/engine/parallel_sampling.py``.
    """
    params = request.sampling_params
    _check_completions(params, ids.external_id)
    if params.max_tokens is None:
        room = max_model_len - len(request.prompt_token_ids)
        # For a prompt that leaves no room the client has a better error.
        params = attrs.evolve(params, max_tokens=max(room, 1))
    parent = _to_engine_request(request, ids)
    parent.sampling_params = params
    parent.reasoning_ended = request.reasoning_ended
    parent.reasoning_parser_kwargs = request.reasoning_parser_kwargs
    if params.n == 1:
        return [parent]
    return [
        attrs.evolve(
            parent,
            request_id=f"{index}_{ids.internal_id}",
            sampling_params=attrs.evolve(params, n=1, seed=_child_seed(params.seed, index)),
        )
        for index in range(params.n)
    ]


def to_pooling_request(request: EncodeRequest, ids: RequestIds) -> EngineCoreRequest:
    """Make the engine request that pools a prompt."""
    pooling = _to_engine_request(request, ids)
    pooling.pooling_params = request.pooling_params
    return pooling


def _to_engine_request(request: PromptRequest, ids: RequestIds) -> EngineCoreRequest:
    """What both kinds of request have; the parameters are missing."""
    return EngineCoreRequest(
        request_id=ids.internal_id,
        external_req_id=ids.external_id,
        arrival_time=ids.arrival_time,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        trace_headers=request.trace_headers,
        priority=request.priority,
        data_parallel_rank=request.data_parallel_rank,
        session_id=request.session_id,
        kv_hints=request.kv_hints,
    )


def _check_completions(params: Any, external_id: str) -> None:
    if not isinstance(params, EngineCoreSamplingParams):
        raise InvalidFieldError(external_id, "sampling_params", "must be SamplingParams")
    if type(params.n) is not int or not 1 <= params.n <= MAX_COMPLETIONS:
        reason = f"must be an integer from 1 to {MAX_COMPLETIONS}, not {params.n!r}"
        raise InvalidFieldError(external_id, "sampling_params.n", reason)
    last = None if params.seed is None else _child_seed(params.seed, params.n - 1)
    if type(last) is int and last > MAX_SEED:
        reason = f"must leave room for {params.n} seeds below 2**63"
        raise InvalidFieldError(external_id, "sampling_params.seed", reason)


def _child_seed(seed: Any, index: int) -> Any:
    """Children differ; -1 is no seed. Other types are for the client to refuse."""
    return seed + index if type(seed) is int and seed != -1 else seed
