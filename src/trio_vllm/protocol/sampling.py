"""Sampling parameters as the engine core reads them.

Mirrors upstream ``vllm/sampling_params.py`` and ``engine-core-client/src/protocol/sampling.rs``.
Parameters that only a frontend with a tokenizer acts on (stop strings, detokenisation, output
kinds) have no place here; readers skip their keys.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trio_vllm.protocol.arrays import NUMPY_ARRAY, Array
from trio_vllm.protocol.codec import (
    ANY_MAP,
    BOOL,
    FINITE,
    I32,
    I64,
    STR,
    TOKEN_IDS,
    U32,
    AuxFrames,
    Codec,
    CodecError,
    Frames,
    integer,
    list_of,
    map_of,
    number,
    one_of,
    only,
    optional,
    read_write,
    writing,
)
from trio_vllm.protocol.structs import map_struct


@attrs.define(kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of a completion: exactly one of the first six fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = None
    """``xgrammar``, ``guidance``, ``outlines`` or ``lm-format-enforcer``; the engine's first
    request decides for its whole life. Key ``_backend`` on the wire."""
    backend_was_auto: bool = False

    CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@attrs.define(kw_only=True)
class RepetitionDetectionParams:
    """End a request whose output repeats a pattern (finish reason REPETITION)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


@attrs.define(kw_only=True, eq=False)
class EngineCoreSamplingParams:
    """How to sample one request. Defaults are the engine's own.

    ``max_tokens=None`` means "up to the model's context": `Llm` fills it in, a bare engine
    refuses it. There is no ``ignore_eos``: the engine stops at ``eos_token_id`` and at
    ``stop_token_ids`` and knows no other end of text, so leave ``eos_token_id`` unset instead.
    """

    n: int = 1
    """Completions of one prompt; only `Llm` makes several, one engine request each."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 is "all"; always written as 0, since the strictest reader is unsigned."""
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    """Log probabilities per output token besides the sampled one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens."""
    prompt_logprob_token_ids: Array | None = None
    """int32 ``[rows, ids]``; -1 pads."""
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    """Report these ids instead of the most probable ones."""
    stream_interval: int | None = None
    """Tokens between two deliveries to the caller; the client acts on it, the engine does not."""
    eos_token_id: int | None = None
    """Key ``_eos_token_id`` on the wire."""
    all_stop_token_ids: Sequence[int] | frozenset[int] = ()
    """Ids masked until ``min_tokens``; the client derives them when empty. Key
    ``_all_stop_token_ids`` on the wire."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    """Free values, such as ``kv_transfer_params``."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Key ``_bad_words_token_ids`` on the wire."""
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None


SamplingParams = EngineCoreSamplingParams
"""The name that vLLM's users know."""

STRUCTURED_OUTPUTS_BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")

# What an engine's constructors refuse is not written: they run in its input thread, which does not
# survive it. See `SamplingParams.__post_init__` and `SamplingParams._verify_args` upstream, and the
# `__post_init__` of the two classes of options.


def _decode_json(raw: Any, frames: Frames) -> str | dict[str, Any]:
    return STR.decode(raw, frames) if type(raw) is str else ANY_MAP.decode(raw, frames)


def _encode_json(value: str | dict[str, Any], aux: AuxFrames) -> Any:
    return STR.encode(value, aux) if type(value) is str else ANY_MAP.encode(value, aux)  # type: ignore[arg-type]


def _check_structured_outputs(value: StructuredOutputsParams) -> None:
    given = [name for name in value.CONSTRAINTS if getattr(value, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise CodecError(f"must have one of {', '.join(value.CONSTRAINTS)}, not {found}")
    if value.json_object is False:
        raise CodecError("must be true or nil").within(".json_object")


STRUCTURED_OUTPUTS: Codec[StructuredOutputsParams] = writing(
    map_struct(
        StructuredOutputsParams,
        {
            "json": optional(Codec("a JSON schema", _decode_json, _encode_json)),
            "regex": optional(STR),
            "choice": optional(writing(list_of(STR), only("a list that is not empty", bool))),
            "grammar": optional(STR),
            "json_object": optional(BOOL),
            "structural_tag": optional(STR),
            "disable_any_whitespace": BOOL,
            "disable_additional_properties": BOOL,
            "whitespace_pattern": optional(STR),
            "backend": optional(one_of(*STRUCTURED_OUTPUTS_BACKENDS)),
            "backend_was_auto": BOOL,
        },
        omit_defaults=True,
        keys={"backend": "_backend", "backend_was_auto": "_backend_was_auto"},
    ),
    _check_structured_outputs,
)


def _check_repetition_detection(value: RepetitionDetectionParams) -> None:
    if value.min_pattern_size > value.max_pattern_size:
        raise CodecError("must be at most max_pattern_size").within(".min_pattern_size")
    if value.max_pattern_size > 0 and value.min_count < 2:
        raise CodecError("must be at least 2").within(".min_count")


REPETITION_DETECTION: Codec[RepetitionDetectionParams] = writing(
    map_struct(
        RepetitionDetectionParams,
        {"max_pattern_size": U32, "min_pattern_size": U32, "min_count": U32},
    ),
    _check_repetition_detection,
)


def _encode_top_k(value: int, aux: AuxFrames) -> Any:
    return max(_COUNT_OR_ALL.encode(value, aux), 0)


_PENALTY = number(-2, 2)
_ABOVE_0 = math.ulp(0.0)
_COUNT = read_write(U32, integer(1, 2**32 - 1, "at least 1"))
_COUNT_OR_ALL = read_write(I32, integer(-1, 2**31 - 1, "at least -1"))
_SOME_TOKEN_IDS = writing(TOKEN_IDS, only("a list that is not empty", lambda ids: len(ids) > 0))
_FEW_TOKEN_IDS = writing(TOKEN_IDS, only("128 ids at most", lambda ids: len(ids) <= 128))

SAMPLING_FIELDS: dict[str, Codec[Any]] = {
    "n": _COUNT,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": number(_ABOVE_0, sys.float_info.max, "a finite number above 0"),
    "temperature": number(0, 2),
    "watermarking": optional(BOOL),
    "top_p": number(_ABOVE_0, 1, "a number above 0, at most 1"),
    "top_k": Codec(I32.expected, I32.decode, _encode_top_k),
    "min_p": number(0, 1),
    "seed": optional(I64),
    "stop_token_ids": optional(TOKEN_IDS),
    "max_tokens": optional(_COUNT),
    "min_tokens": U32,
    "logprobs": optional(_COUNT_OR_ALL),
    "prompt_logprobs": optional(_COUNT_OR_ALL),
    "prompt_logprob_token_ids": optional(NUMPY_ARRAY),
    "prompt_logprob_start": optional(U32),
    "logprob_token_ids": optional(_FEW_TOKEN_IDS),
    "stream_interval": optional(_COUNT),
    "eos_token_id": optional(U32),
    "all_stop_token_ids": TOKEN_IDS,
    "structured_outputs": optional(STRUCTURED_OUTPUTS),
    "logit_bias": optional(map_of(U32, FINITE)),
    "allowed_token_ids": optional(_SOME_TOKEN_IDS),
    "extra_args": optional(ANY_MAP),
    "bad_words_token_ids": optional(list_of(_SOME_TOKEN_IDS)),
    "skip_reading_prefix_cache": optional(BOOL),
    "thinking_token_budget": optional(_COUNT_OR_ALL),
    "repetition_detection": optional(REPETITION_DETECTION),
    "routed_experts_prompt_start": U32,
    "trace_decode_token_ids": optional(_SOME_TOKEN_IDS),
}

SAMPLING_PARAMS: Codec[EngineCoreSamplingParams] = map_struct(
    EngineCoreSamplingParams,
    SAMPLING_FIELDS,
    omit_defaults=True,
    keys={
        "eos_token_id": "_eos_token_id",
        "all_stop_token_ids": "_all_stop_token_ids",
        "bad_words_token_ids": "_bad_words_token_ids",
    },
)
