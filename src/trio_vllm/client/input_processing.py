"""How the checks say what is wrong with a field."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trio_vllm.errors import EmptyPromptError, InvalidFieldError, UnsupportedFieldError
from trio_vllm.protocol import (
    Buffer,
    CodecError,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PoolingParams,
    StructuredOutputsParams,
    Tensor,
    encode_add,
    request_label,
)

# MERGED protocol/_resolution: What a frontend fills into a request before it sends it.
#
# Upstream's constructors and its ``InputProcessor.process_inputs`` (``vllm/sampling_params.py``,
# ``vllm/v1/engine/input_processor.py``) rewrite the caller's values in place; here the caller's
# request stays as it is and a copy is sent.
# MERGED protocol/_sampling_validation: Sampling parameters that do not go together, or not with the prompt or the vocabulary.
#
# See ``SamplingParams._verify_args`` and ``SamplingParams.verify`` upstream, in
# ``vllm/sampling_params.py``. What concerns one field by itself stands in ``_sampling.py``.
# MERGED protocol/_validation: What a frontend must not send: an engine dies of it, or goes deaf.
#
# An engine builds upstream's parameter classes while it decodes a request, in its input thread, and
# that thread does not survive what their constructors reject. Other values kill its main loop later:
# an empty or too long prompt, an unknown token id or pooling task. Upstream's frontends check all
# that first, in ``vllm/v1/engine/input_processor.py`` (``InputProcessor.process_inputs``) and
# ``vllm/sampling_params.py`` (``SamplingParams._verify_args``, ``SamplingParams.verify``); so does
# `check_request`. What concerns one field by itself stands in its form (``_sampling.py``,
# ``_request.py``, …) and is checked again when the request is written; here, and in
# ``_sampling_validation.py``, is what concerns fields together, or the engine.
#
# Not known here, and left to the caller: the vocabulary unless it is told, the engine's
# ``--max-logprobs``, its hidden size, whether it has a reasoning parser.


class Unsupported(CodecError):  # noqa: N818 (never leaves the checks)
    """The value is good, but not for this engine."""


def refuse(field: str, reason: str) -> CodecError:
    """The error for a value that no engine takes; ``field`` may be empty for the whole."""
    return CodecError(reason).add_path(f".{field}" if field else "")


def refuse_here(field: str, reason: str) -> CodecError:
    """The error for a value that another engine would take."""
    return Unsupported(reason).add_path(f".{field}")


def not_in_vocabulary(token_id: int, vocab_size: int) -> str:
    """The reason for a token id that is too large."""
    return f"{token_id} is not in the vocabulary of {vocab_size} tokens"


MAX_LOGIT_BIAS = 100.0


def fill_defaults(
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
            changes["sampling_params"] = attrs.evolve(params, **resolved)
    return attrs.evolve(request, **changes) if changes else request


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
    except CodecError as error:
        raise error.add_path(".sampling_params") from None


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
    except CodecError as error:
        raise error.add_path(".structured_outputs") from None


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


@attrs.frozen(kw_only=True)
class RequestLimits:
    """What the engines behind a client can take."""

    max_model_len: int
    """Prompt and output tokens that fit the context."""
    vocab_size: int | None = None
    """The model's; None if it is not known, then token ids are not checked."""
    supports_lora: bool = True
    client_count: int | None = None
    """Output sockets of the engines, of which a request names one; None if it is not known."""
    supported_tasks: Collection[str] | None = None
    """The answer to ``get_supported_tasks``; None if it is not known."""
    vllm_version: str = ""

    @classmethod
    def of(cls, responses: Iterable[EngineCoreReadyResponse], **known: Any) -> RequestLimits:
        """The limits that suit all these engines; ``known`` are the fields that they do not tell."""
        responses = list(responses)
        return cls(
            max_model_len=min(response.max_model_len for response in responses),
            supports_lora=all(response.supports_lora for response in responses),
            vllm_version=responses[0].vllm_version,
            **known,
        )


def check_request(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Refuse a request that an engine with these limits would reject, die of or misunderstand.

    It should have gone through `fill_defaults` before. What passes can be written by
    `encode_add`.

    Raises:
      EmptyPromptError: There is no prompt.
      UnsupportedFieldError: The engine, or a single engine request, cannot do that.
      InvalidFieldError: A field has a wrong value; names it.
    """
    validate_and_encode(request, limits)


def validate_and_encode(request: EngineCoreRequest, limits: RequestLimits) -> list[Buffer]:
    """`check_request`, and the message of `encode_add`, which has to look at each field anyway."""
    message = encode_add(request)
    try:
        _check_whole(request, limits)
    except Unsupported as error:
        raise UnsupportedFieldError(request_label(request), error.where, error.reason) from None
    except CodecError as error:
        raise InvalidFieldError(request_label(request), error.where, error.reason) from None
    return message


def _check_whole(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Check what concerns fields together, or the engine; each by itself is good."""
    length = _check_prompt(request, limits)
    if request.mm_features:
        _check_features(request.mm_features, length)
    if request.prompt_token_ids is not None and limits.vocab_size is not None:
        _check_prompt_vocabulary(request, request.prompt_token_ids, limits.vocab_size)
    _check_engine(request, limits)
    if request.sampling_params is not None:
        check_sampling(request.sampling_params, length, limits.vocab_size)


# The prompt -------------------------------------------------------------------------------------


def _check_prompt(request: EngineCoreRequest, limits: RequestLimits) -> int:
    """Check the prompt and give its length.

    See ``InputProcessor._validate_model_input`` and ``InputProcessor._validate_prompt_len``. An
    engine computes at least one token, so a prompt may not fill the whole context.
    """
    token_ids, embeds = request.prompt_token_ids, request.prompt_embeds
    length = len(token_ids) if token_ids is not None else 0
    if embeds is not None:
        length = _check_embeds(request, embeds)
    if length == 0:
        raise EmptyPromptError(request.request_id)
    if request.prompt_is_token_ids is not None:
        _check_token_mask(request, length)
    longest = limits.max_model_len
    if request.pooling_params is None:
        longest -= 1
    if length > longest:
        field = "prompt_embeds" if token_ids is None else "prompt_token_ids"
        raise refuse(field, f"must be {longest} tokens at most, not {length}")
    return length


def _check_embeds(request: EngineCoreRequest, embeds: Tensor) -> int:
    if len(embeds.shape) != 2 or not str(embeds.dtype).endswith(("float16", "float32", "float64")):
        raise refuse("prompt_embeds", "must be numbers of shape [tokens, hidden]")
    if request.prompt_token_ids is not None and request.prompt_is_token_ids is None:
        raise refuse("prompt_is_token_ids", "must tell token ids from embeddings")
    return embeds.shape[0]


def _check_token_mask(request: EngineCoreRequest, length: int) -> None:
    """The mask has one entry per position, and so has everything else."""
    mask = request.prompt_is_token_ids
    if request.prompt_embeds is None or request.prompt_token_ids is None:
        raise refuse("prompt_is_token_ids", "needs both prompt_token_ids and prompt_embeds")
    for field, positions in (
        ("prompt_token_ids", len(request.prompt_token_ids)),
        ("prompt_is_token_ids", len(mask or ())),
    ):
        if positions != length:
            raise refuse(field, f"must be as long as prompt_embeds ({length}), not {positions}")


def _check_prompt_vocabulary(
    request: EngineCoreRequest, token_ids: Sequence[int], vocab_size: int
) -> None:
    """All tokens are in the vocabulary, but those that only hold a place need not be."""
    if max(token_ids) < vocab_size:
        return
    held: set[int] = set()
    for feature in request.mm_features or ():
        start = feature.mm_position.offset
        held.update(range(start, start + feature.mm_position.length))
    mask = request.prompt_is_token_ids or ()
    held.update(position for position, is_token in enumerate(mask) if not is_token)
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size and position not in held:
            raise refuse(f"prompt_token_ids[{position}]", not_in_vocabulary(token_id, vocab_size))


def _check_features(features: list[MultiModalFeatureSpec], prompt_length: int) -> None:
    """An engine computes what it comes to in the prompt and stops at the first that is later."""
    earlier = 0
    for index, feature in enumerate(features):
        try:
            _check_position(feature.mm_position, prompt_length, earlier)
        except CodecError as error:
            raise error.add_path(f".mm_features[{index}].mm_position") from None
        earlier = feature.mm_position.offset


def _check_position(position: PlaceholderRange, prompt_length: int, earlier: int) -> None:
    mask = position.is_embed
    if position.length < 1:
        raise refuse("length", "must be at least 1")
    if position.offset + position.length > prompt_length:
        raise refuse("", f"must lie inside the prompt of {prompt_length} tokens")
    if position.offset < earlier:
        raise refuse("offset", f"must not be before the one of the feature before ({earlier})")
    if mask is not None and (str(mask.dtype) != "bool" or mask.shape != (position.length,)):
        raise refuse("is_embed", f"must be booleans of shape [{position.length}]")


# The engine -------------------------------------------------------------------------------------


def _check_engine(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """What the engine has to be able to do for this request."""
    if limits.client_count is not None and request.client_index >= limits.client_count:
        # It would never answer anybody again: see EngineCoreProc.process_output_sockets.
        raise refuse("client_index", f"must be below {limits.client_count}")
    if request.lora_request is not None and not limits.supports_lora:
        # It would silently answer without the adapter: InputProcessor._validate_lora.
        raise refuse_here("lora_request", "is set, but the engine was started without LoRA")
    if (request.sampling_params is None) == (request.pooling_params is None):
        raise refuse("sampling_params", "or pooling_params must be set, and not both")
    if request.pooling_params is not None:
        _check_pooling(request.pooling_params, limits)
    elif limits.supported_tasks is not None and not _GENERATION_TASKS & {*limits.supported_tasks}:
        raise refuse_here("sampling_params", "is set, but the model only pools")


_GENERATION_TASKS = {"generate", "transcription", "realtime"}


def _check_pooling(params: PoolingParams, limits: RequestLimits) -> None:
    if params.task is None:
        raise refuse("pooling_params.task", "must be set")
    if limits.supported_tasks is not None and params.task not in limits.supported_tasks:
        raise refuse_here("pooling_params.task", f"{params.task!r} is not supported by the model")
    if params.late_chunking_params is not None and limits.vllm_version.startswith("0.32."):
        # It would be taken for an unknown trailing field.
        raise refuse_here("pooling_params.late_chunking_params", "needs an engine of 0.33")
