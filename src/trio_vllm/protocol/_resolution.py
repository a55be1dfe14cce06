"""What a frontend fills into a request before it sends it.

Upstream's constructors and its ``InputProcessor.process_inputs`` (``vllm/sampling_params.py``,
``vllm/v1/engine/input_processor.py``) rewrite the caller's values in place; here the caller's
request stays as it is and a copy is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trio_vllm.protocol._request import EngineCoreRequest
from trio_vllm.protocol._sampling import EngineCoreSamplingParams, StructuredOutputsParams
from trio_vllm.protocol._structs import evolver

MAX_LOGIT_BIAS = 100.0

_evolve_request = evolver(EngineCoreRequest)
_evolve_sampling = evolver(EngineCoreSamplingParams)


def resolve_request(
    request: EngineCoreRequest,
    client_index: int = 0,
    structured_outputs_backend: str = "xgrammar",
) -> EngineCoreRequest:
    """Fill in what an engine needs and callers leave out; the request itself is not changed.

    * ``client_index``: where this client listens;
    * ``sampling_params.all_stop_token_ids``, if empty: the stop and end-of-text ids;
    * ``seed`` and ``thinking_token_budget`` of -1: none;
    * ``logit_bias``: brought into the range from -100 to 100, as upstream's frontends do;
    * ``prompt_logprob_token_ids``: int32;
    * ``structured_outputs.backend``, if None: ``structured_outputs_backend``.

    ``max_tokens`` of None stays None. Values of a wrong type or range are left for `check_request`.
    """
    changes: dict[str, Any] = {}
    if request.client_index is not client_index:  # equality may be anything yet
        changes["client_index"] = client_index
    params = request.sampling_params
    if isinstance(params, EngineCoreSamplingParams):
        resolved = _sampling_changes(params, structured_outputs_backend)
        if resolved:
            changes["sampling_params"] = _evolve_sampling(params, resolved)
    return _evolve_request(request, changes) if changes else request


def _sampling_changes(params: EngineCoreSamplingParams, backend: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if _is_minus_one(params.seed):
        changes["seed"] = None
    if _is_minus_one(params.thinking_token_budget):
        changes["thinking_token_budget"] = None
    if params.eos_token_id is not None or params.stop_token_ids is not None:
        changes |= _stop_ids(params)
    if params.logit_bias is not None:
        changes |= _clamped(params.logit_bias)
    if params.prompt_logprob_token_ids is not None:
        changes |= _as_int32(params.prompt_logprob_token_ids)
    structured = params.structured_outputs
    if isinstance(structured, StructuredOutputsParams) and structured.backend is None:
        changes["structured_outputs"] = attrs.evolve(
            structured, backend=backend, backend_was_auto=True
        )
    return changes


def _is_minus_one(value: object) -> bool:
    return type(value) is int and value == -1


def _stop_ids(params: EngineCoreSamplingParams) -> dict[str, Any]:
    """The ids to mask until ``min_tokens``; a grammar compiler looks at them too."""
    given: Any = params.all_stop_token_ids
    stop_ids: Any = params.stop_token_ids
    if type(given) not in (tuple, list, set, frozenset) or given:
        return {}
    found: set[Any] = set()
    try:
        if params.eos_token_id is not None:
            found.add(params.eos_token_id)
        found.update(stop_ids.tolist() if isinstance(stop_ids, np.ndarray) else stop_ids or ())
        return {"all_stop_token_ids": sorted(found)} if found else {}
    except TypeError:
        return {}


def _clamped(logit_bias: Mapping[int, float]) -> dict[str, Any]:
    low, high = -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
    try:
        if all(low <= bias <= high for bias in logit_bias.values()):
            return {}
        clamped = {
            token_id: min(high, max(low, bias)) if bias == bias else bias  # NaN is left
            for token_id, bias in logit_bias.items()
        }
    except (AttributeError, TypeError):
        return {}
    return {"logit_bias": clamped}


def _as_int32(token_ids: Any) -> dict[str, Any]:
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype.kind not in "iu":
        return {}
    narrow = token_ids.astype(np.int32)
    if token_ids.dtype == np.int32 or not np.array_equal(narrow, token_ids):
        return {}
    return {"prompt_logprob_token_ids": narrow}
