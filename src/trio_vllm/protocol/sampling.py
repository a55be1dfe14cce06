"""`SamplingParams`: sampling parameters as the engine core reads them.

Mirrors upstream ``vllm/sampling_params.py`` and ``engine-core-client/src/protocol/sampling.rs``.
Parameters that only a frontend with a tokenizer acts on (stop strings, detokenisation, output
kinds) have no place here; decoding skips their keys.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from trio_vllm.protocol.arrays import NumpyArray
from trio_vllm.protocol.codec import (
    ANY_MAP,
    FINITE,
    I32,
    STR,
    TOKEN_IDS,
    AuxFrames,
    Codec,
    CodecError,
    Count,
    Frames,
    Int64,
    UInt32,
    codec_from,
    integer,
    known_string,
    list_of,
    number,
    satisfying,
    strict_on_encode,
)
from trio_vllm.protocol.structs import Key, as_map
from trio_vllm.protocol.token_ids import as_token_ids
from trio_vllm.values import define

STRUCTURED_OUTPUTS_BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")

# What an engine's constructors refuse is not written: they run in its input thread, which does not
# survive it. See `SamplingParams.__post_init__` and `SamplingParams._verify_args` upstream, and the
# `__post_init__` of the two classes of options.


def _decode_json(raw: Any, frames: Frames) -> str | dict[str, Any]:
    return STR.decode(raw, frames) if type(raw) is str else ANY_MAP.decode(raw, frames)


def _encode_json(value: str | dict[str, Any], aux: AuxFrames) -> Any:
    return STR.encode(value, aux) if type(value) is str else ANY_MAP.encode(value, aux)  # type: ignore[arg-type]


JsonSchema = Annotated[str | dict[str, Any], Codec("a JSON schema", _decode_json, _encode_json)]
Choices = Annotated[
    list[str], strict_on_encode(list_of(STR), satisfying("a list that is not empty", bool))
]
Backend = Annotated[str, known_string(*STRUCTURED_OUTPUTS_BACKENDS)]


def _check_structured_outputs(value: StructuredOutputsParams) -> None:
    given = [name for name in value.CONSTRAINTS if getattr(value, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise CodecError(f"must have one of {', '.join(value.CONSTRAINTS)}, not {found}")
    if value.json_object is False:
        raise CodecError("must be true or nil").add_path(".json_object")


@as_map(omit_defaults=True, check=_check_structured_outputs)
@define(kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of a completion: exactly one of the first six fields."""

    json: JsonSchema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: Annotated[Backend | None, Key("_backend")] = None
    """The engine's first request decides for its whole life."""
    backend_was_auto: Annotated[bool, Key("_backend_was_auto")] = False

    CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _check_repetition_detection(value: RepetitionDetectionParams) -> None:
    if value.min_pattern_size > value.max_pattern_size:
        raise CodecError("must be at most max_pattern_size").add_path(".min_pattern_size")
    if value.max_pattern_size > 0 and value.min_count < 2:
        raise CodecError("must be at least 2").add_path(".min_count")


@as_map(check=_check_repetition_detection)
@define(kw_only=True)
class RepetitionDetectionParams:
    """End a request whose output repeats a pattern (finish reason REPETITION)."""

    max_pattern_size: UInt32 = 0
    min_pattern_size: UInt32 = 0
    min_count: UInt32 = 0


_ABOVE_0 = math.ulp(0.0)
_COUNT_OR_ALL = codec_from(decode=I32, encode=integer(-1, 2**31 - 1, "an integer of at least -1"))


def _encode_top_k(value: int, aux: AuxFrames) -> Any:
    return max(_COUNT_OR_ALL.encode(value, aux), 0)


Penalty = Annotated[float, number(-2, 2)]
CountOrAll = Annotated[int, _COUNT_OR_ALL]
SomeTokenIds = Annotated[
    Sequence[int],
    strict_on_encode(TOKEN_IDS, satisfying("a list that is not empty", lambda ids: len(ids) > 0)),
]
FewTokenIds = Annotated[
    Sequence[int],
    strict_on_encode(TOKEN_IDS, satisfying("128 ids at most", lambda ids: len(ids) <= 128)),
]


_TEXTS = "there is no tokenizer here: "

VLLM_ONLY = {
    "ignore_eos": "the engine stops at eos_token_id alone; leave eos_token_id unset",
    "stop": _TEXTS + "use stop_token_ids, or match texts where you have one and leave the stream",
    "include_stop_str_in_output": _TEXTS + "cut texts where you match them",
    "detokenize": _TEXTS + "the answer is token ids",
    "skip_special_tokens": _TEXTS + "the answer is token ids, all of them",
    "spaces_between_special_tokens": _TEXTS + "the answer is token ids",
    "output_text_buffer_length": _TEXTS + "the answer is token ids",
    "bad_words": _TEXTS + "use bad_words_token_ids",
    "output_kind": "use Llm.stream for what is new, Llm.generate for the whole",
    "flat_logprobs": "log probabilities are arrays here",
    "skip_clone": "parameters are never changed, so never cloned",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(…)",
    "logits_processors": "engines load them when they start; use extra_args for their options",
    "truncate_prompt_tokens": "cut prompt_token_ids",
    "best_of": "use n and choose",
    "use_beam_search": "vLLM's frontends search beams with many requests, and so can you",
}
"""Parameters that vLLM's class of this name has, or had, and what to do here instead."""

_TOKEN_ID_FIELDS = frozenset(
    {
        "stop_token_ids",
        "all_stop_token_ids",
        "allowed_token_ids",
        "logprob_token_ids",
        "trace_decode_token_ids",
    }
)

C = TypeVar("C")


def _takes_what_people_write(cls: type[C]) -> type[C]:
    """Keep iterators of token ids as lists, and explain the parameters that only vLLM's class has."""
    attrs_init: Callable[..., None] = cls.__init__

    @functools.wraps(attrs_init)
    def init(self: object, *args: Any, **fields: Any) -> None:
        if not _TOKEN_ID_FIELDS.isdisjoint(fields):
            for name in _TOKEN_ID_FIELDS & fields.keys():
                if isinstance(fields[name], Iterator):
                    fields[name] = as_token_ids(fields[name], name)
        try:
            attrs_init(self, *args, **fields)
        except TypeError:
            for name in fields.keys() & VLLM_ONLY.keys():
                reason = VLLM_ONLY[name]
                raise TypeError(f"SamplingParams has no {name} here: {reason}") from None
            raise

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


GENERATION_CONFIG = {
    "max_new_tokens": "max_tokens",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""What vLLM takes as defaults out of a model's ``generation_config.json``, and its names here."""


@_takes_what_people_write
@as_map(omit_defaults=True)
@define(kw_only=True, eq=False)
class SamplingParams:
    """How to sample one request. Defaults are the engine's own.

    ``max_tokens`` is 16 unless it is stated. None means "up to the model's context": `Llm` fills it
    in, a bare engine refuses it. There is no ``ignore_eos``: the engine stops at ``eos_token_id`` and at
    ``stop_token_ids`` and knows no other end of text, so leave ``eos_token_id`` unset instead.
    """

    n: Count = 1
    """Completions of one prompt; only `Llm` makes several, one engine request each."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[
        float, number(_ABOVE_0, sys.float_info.max, "a finite number above 0")
    ] = 1.0
    temperature: Annotated[float, number(0, 2)] = 1.0
    """0 is greedy."""
    watermarking: bool | None = None
    top_p: Annotated[float, number(_ABOVE_0, 1, "a number above 0, at most 1")] = 1.0
    top_k: Annotated[int, Codec(I32.expected, I32.decode, _encode_top_k)] = 0
    """0 or -1 is "all"; always written as 0, since the strictest reader is unsigned."""
    min_p: Annotated[float, number(0, 1)] = 0.0
    seed: Int64 | None = None
    stop_token_ids: Sequence[UInt32] | None = None
    max_tokens: Count | None = 16
    """Tokens after which a completion ends at the latest."""
    min_tokens: UInt32 = 0
    logprobs: CountOrAll | None = None
    """Log probabilities per output token besides the sampled one; -1 is the whole vocabulary."""
    prompt_logprobs: CountOrAll | None = None
    """The same for prompt tokens."""
    prompt_logprob_token_ids: NumpyArray | None = None
    """int32 ``[rows, ids]``; -1 pads."""
    prompt_logprob_start: UInt32 | None = None
    logprob_token_ids: FewTokenIds | None = None
    """Report these ids instead of the most probable ones."""
    stream_interval: Count | None = None
    """Tokens between two deliveries to the caller; the client acts on it, the engine does not."""
    eos_token_id: Annotated[UInt32 | None, Key("_eos_token_id")] = None
    all_stop_token_ids: Annotated[
        Sequence[int] | frozenset[int], TOKEN_IDS, Key("_all_stop_token_ids")
    ] = ()
    """Ids masked until ``min_tokens``; the client derives them when empty."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[UInt32, Annotated[float, FINITE]] | None = None
    allowed_token_ids: SomeTokenIds | None = None
    extra_args: Mapping[str, Any] | None = None
    """Free values, such as ``kv_transfer_params``."""
    bad_words_token_ids: Annotated[Sequence[SomeTokenIds] | None, Key("_bad_words_token_ids")] = (
        None
    )
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: CountOrAll | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: UInt32 = 0
    trace_decode_token_ids: SomeTokenIds | None = None

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What ``extra_args`` say of a transfer of KV blocks between engines, if they say it in a map."""
        # Is also read before the client has refused what is no map.
        extra_args: Any = self.extra_args
        given = extra_args.get("kv_transfer_params") if isinstance(extra_args, Mapping) else None
        return given if isinstance(given, Mapping) else None

    @classmethod
    def from_generation_config(cls, folder: str | Path, **fields: Any) -> SamplingParams:
        """Take the defaults and the end-of-text ids of a model's ``generation_config.json``.

        An engine knows neither: a request without them runs to ``max_tokens``. The first end-of-text
        id becomes ``eos_token_id``, more of them are stop tokens.

        Args:
          folder: That of the model.
          fields: Win over what the file says.

        Raises:
          OSError: There is no such file.
          ValueError: It is not JSON, or no object.
        """
        config = json.loads((Path(folder) / "generation_config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{folder}/generation_config.json is no JSON object")  # noqa: TRY004
        found = {
            name: config[key]
            for key, name in GENERATION_CONFIG.items()
            if config.get(key) is not None
        }
        eos = config.get("eos_token_id")
        first, *others = eos if isinstance(eos, list) and eos else [None if eos == [] else eos]
        if first is not None:
            found["eos_token_id"] = first
        if others:
            found["stop_token_ids"] = others
        return cls(**{**found, **fields})


EngineCoreSamplingParams = SamplingParams
"""Its name in vLLM's Rust frontend."""
"""The name that vLLM's users know."""
