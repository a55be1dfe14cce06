"""Sampling parameters that do not go together, or not with the prompt or the vocabulary.

See ``SamplingParams._verify_args`` and ``SamplingParams.verify`` upstream, in
``vllm/sampling_params.py``. What concerns one field by itself stands in ``_sampling.py``.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from trio_vllm.protocol._forms import FormError
from trio_vllm.protocol._refusal import not_in_vocabulary, refuse, refuse_here
from trio_vllm.protocol._sampling import EngineCoreSamplingParams, StructuredOutputsParams

JSON_NESTING = 64
"""Levels of a JSON schema; each makes its conversion to a grammar much more expensive."""
STRUCTURAL_TAG_NESTING = 80


def check_sampling(params: EngineCoreSamplingParams, length: int, vocab_size: int | None) -> None:
    """Check parameters whose fields are good by themselves, for a prompt of ``length`` tokens."""
    try:
        if params.n != 1:
            raise refuse_here("n", "must be 1: an engine makes one completion per request")
        if params.max_tokens is None:
            raise refuse("max_tokens", "must be set")
        if params.min_tokens > params.max_tokens:
            raise refuse("min_tokens", f"must be at most max_tokens ({params.max_tokens})")
        if params.routed_experts_prompt_start > length:
            raise refuse("routed_experts_prompt_start", f"must be {length} at most")
        if params.logprob_token_ids is not None and params.logprobs is not None:
            _check_logprobs_count(params.logprobs, len(params.logprob_token_ids))
        if params.prompt_logprob_token_ids is not None or params.prompt_logprob_start is not None:
            _check_prompt_logprob_token_ids(params, length)
        if params.structured_outputs is not None:
            _check_structured_outputs(params.structured_outputs)
        if params.trace_decode_token_ids is not None:
            _check_trace(params)
        if vocab_size is not None:
            _check_vocabulary(params, vocab_size)
    except FormError as error:
        raise error.within(".sampling_params") from None


def _check_logprobs_count(logprobs: int, count: int) -> None:
    if logprobs != count:
        raise refuse("logprobs", f"must be nil or the number of logprob_token_ids ({count})")


def _check_prompt_logprob_token_ids(params: EngineCoreSamplingParams, length: int) -> None:
    """One row of ids for each prompt token from the one after ``prompt_logprob_start`` on."""
    ids = params.prompt_logprob_token_ids
    if ids is None:
        raise refuse("prompt_logprob_start", "needs prompt_logprob_token_ids")
    rows = length - 1 - (params.prompt_logprob_start or 0)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise refuse("prompt_logprob_token_ids", "must be integers of shape [rows, ids], not empty")
    if len(ids) != rows:
        raise refuse("prompt_logprob_token_ids", f"must have {rows} rows, not {len(ids)}")
    if int(ids.min()) < -1 or int(ids.max()) >= 2**31:
        raise refuse("prompt_logprob_token_ids", "must be token ids, or -1")


def _check_structured_outputs(params: StructuredOutputsParams) -> None:
    """See ``SamplingParams._validate_structured_outputs``; a grammar that does not compile is left
    to the engine, which ends that request alone."""
    try:
        if params.backend is None:
            raise refuse("backend", "must be set")
        for name in ("json", "grammar", "structural_tag"):
            text = getattr(params, name)
            if isinstance(text, str) and not text.strip():
                raise refuse(name, "must not be blank")
        if params.regex is not None and "\0" in params.regex:
            raise refuse("regex", "must not contain NUL")
        for name, limit in (("json", JSON_NESTING), ("structural_tag", STRUCTURAL_TAG_NESTING)):
            if _nests_deeper(getattr(params, name), limit):
                raise refuse(name, f"must not nest deeper than {limit} levels")
    except FormError as error:
        raise error.within(".structured_outputs") from None


_JSON_CONTAINERS = (dict, list, tuple)


def _nests_deeper(document: object, limit: int) -> bool:
    """Whether a JSON document nests lists and maps more than ``limit`` levels deep."""
    if isinstance(document, str):
        try:
            document = json.loads(document)
        except RecursionError:
            return True
        except ValueError:
            return False  # what is no JSON at all is found out by the engine's grammar compiler
    level = [document] if isinstance(document, _JSON_CONTAINERS) else []
    for _ in range(limit):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, _JSON_CONTAINERS)
        ]
    return bool(level)


_NOT_WITH_TRACE = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
    "bad_words_token_ids",
)


def _check_trace(params: EngineCoreSamplingParams) -> None:
    """See ``SamplingParams._validate_trace_replay``."""
    for name in _NOT_WITH_TRACE:
        if getattr(params, name) is not None:
            raise refuse(name, "cannot be combined with trace_decode_token_ids")


_TOKEN_ID_FIELDS = (
    "stop_token_ids",
    "all_stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
    "trace_decode_token_ids",
)


def _check_vocabulary(params: EngineCoreSamplingParams, vocab_size: int) -> None:
    """Token ids are indices into the logits, and so many log probabilities are there to report."""
    for name in _TOKEN_ID_FIELDS:
        _check_known(name, getattr(params, name), vocab_size)
    for index, word in enumerate(params.bad_words_token_ids or ()):
        _check_known(f"bad_words_token_ids[{index}]", word, vocab_size)
    if params.eos_token_id is not None and params.eos_token_id >= vocab_size:
        raise refuse("eos_token_id", not_in_vocabulary(params.eos_token_id, vocab_size))
    ids = params.prompt_logprob_token_ids
    if ids is not None and int(ids.max()) >= vocab_size:
        raise refuse("prompt_logprob_token_ids", not_in_vocabulary(int(ids.max()), vocab_size))
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise refuse(name, f"must be at most the vocabulary's {vocab_size} tokens")


def _check_known(name: str, token_ids: Collection[int] | None, vocab_size: int) -> None:
    if token_ids is not None and len(token_ids) and max(token_ids) >= vocab_size:
        raise refuse(name, not_in_vocabulary(max(token_ids), vocab_size))
