"""`fill_defaults` and `validate_and_encode`: what a frontend does to a request before it sends it.

Mirrors upstream's ``InputProcessor.process_inputs`` (``vllm/v1/engine/input_processor.py``) and the
checks of ``vllm/sampling_params.py`` and ``vllm/pooling_params.py``. An engine relies on them: it
builds the classes of parameters in its input thread, which does not survive what their
constructors reject, and its main loop dies of others (an empty prompt, an unknown token id). The
table in ``tests/client/test_input_rules.py`` has each rule of upstream, and what became of it.

Upstream rewrites the caller's values in place; here the caller's request stays as it is and a copy
is sent. What concerns one field by itself is checked by its codec, while the request is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trio_vllm.client import structured_outputs
from trio_vllm.client.field_errors import UnsupportedValue, invalid, unsupported
from trio_vllm.client.versions import WITHOUT_LATE_CHUNKING
from trio_vllm.errors import EmptyPromptError, InvalidFieldError, UnsupportedFieldError
from trio_vllm.protocol import (
    GENERATION_TASKS,
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
    as_token_ids,
    encode_add,
    plain_items,
    request_label,
)
from trio_vllm.values import frozen

# Defaults ---------------------------------------------------------------------------------------

MAX_LOGIT_BIAS = 100.0

TOKEN_ID_FIELDS = (
    "stop_token_ids",
    "all_stop_token_ids",
    "allowed_token_ids",
    "logprob_token_ids",
    "trace_decode_token_ids",
)
"""Sampling parameters that are token ids; ``logit_bias`` and bad words have them inside."""


def fill_defaults(
    request: EngineCoreRequest,
    client_index: int = 0,
    structured_outputs_backend: str = "xgrammar",
    *,
    max_model_len: int | None = None,
) -> EngineCoreRequest:
    """Fill in what an engine needs and callers leave out; the request itself is not changed.

    * ``client_index``: where this client listens;
    * token ids: a list of Python's integers for any iterable;
    * ``sampling_params.all_stop_token_ids``, if empty: the stop and end-of-text ids;
    * ``seed`` and ``thinking_token_budget`` of -1: none;
    * ``logit_bias``: brought into the range from -100 to 100, as upstream's frontends do;
    * ``prompt_logprob_token_ids``: int32, rows of lists padded with -1;
    * ``trace_decode_token_ids``: nothing but the trace's end ends the request;
    * ``structured_outputs.backend``, if None: ``structured_outputs_backend``, of which "auto" takes
      the one that can do it; choices for xgrammar become a grammar;
    * ``pooling_params``: what upstream's tasks start from.

    ``max_tokens`` of None stays None. Values of a wrong type or range are left for
    `validate_and_encode`. ``max_model_len`` bounds traces; it may be left out.
    """
    changes: dict[str, Any] = {}
    if request.client_index is not client_index:  # equality may be anything yet
        changes["client_index"] = client_index
    token_ids = request.prompt_token_ids
    if type(token_ids) is not list and token_ids is not None:
        changes |= _as_lists(request, ("prompt_token_ids",))
    params = request.sampling_params
    if isinstance(params, EngineCoreSamplingParams):
        if _has_nothing_to_fill(params):
            return attrs.evolve(request, **changes) if changes else request
        filled = _sampling_changes(params, structured_outputs_backend)
        if params.trace_decode_token_ids is not None:
            room = None if max_model_len is None else max_model_len - _prompt_length(request)
            filled |= _trace_changes(attrs.evolve(params, **filled), room)
        if filled:
            changes["sampling_params"] = attrs.evolve(params, **filled)
    elif isinstance(request.pooling_params, PoolingParams):
        filled = _pooling_changes(request.pooling_params)
        if filled:
            changes["pooling_params"] = attrs.evolve(request.pooling_params, **filled)
    return attrs.evolve(request, **changes) if changes else request


_CONVERTIBLE = (list, tuple, range, np.ndarray)
"""No iterators: a request may be sent again, and several completions share their parameters."""


def _as_lists(holder: Any, names: Iterable[str]) -> dict[str, Any]:
    """Token ids that are not yet a list of integers; what are none at all is left."""
    changes = {}
    for name in names:
        value = getattr(holder, name)
        if value is None or not isinstance(value, _CONVERTIBLE):
            continue
        token_ids = as_token_ids(value, name)
        if token_ids is not value and not (type(value) is tuple and not value):
            changes[name] = token_ids
    return changes


def _prompt_length(request: EngineCoreRequest) -> int:
    for positions in (request.prompt_token_ids, request.prompt_is_token_ids):
        if isinstance(positions, Sequence):
            return len(positions)
    embeds = request.prompt_embeds
    return embeds.shape[0] if isinstance(embeds, Tensor) and embeds.shape else 0


_NO_IDS = attrs.fields(EngineCoreSamplingParams).all_stop_token_ids.default


def _has_nothing_to_fill(params: EngineCoreSamplingParams) -> bool:
    """Whether none of the fields is set that `_sampling_changes` looks at, as in most requests."""
    # One after the other, not by a list of names: that would cost a fifth of what the request costs.
    return (
        params.seed is None
        and params.eos_token_id is None
        and params.stop_token_ids is None
        and params.structured_outputs is None
        and params.logit_bias is None
        and params.allowed_token_ids is None
        and params.logprob_token_ids is None
        and params.all_stop_token_ids is _NO_IDS
        and params.prompt_logprob_token_ids is None
        and params.thinking_token_budget is None
        and params.trace_decode_token_ids is None
    )


def _sampling_changes(params: EngineCoreSamplingParams, backend: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if _is_minus_one(params.seed):
        changes["seed"] = None
    if _is_minus_one(params.thinking_token_budget):
        changes["thinking_token_budget"] = None
    changes |= _as_lists(params, TOKEN_ID_FIELDS)
    if params.eos_token_id is not None or params.stop_token_ids is not None:
        changes |= _stop_ids(params, changes)
    if params.logit_bias is not None:
        changes |= _clamped(params.logit_bias)
    if params.prompt_logprob_token_ids is not None:
        changes |= _as_int32(params.prompt_logprob_token_ids)
    structured = params.structured_outputs
    if isinstance(structured, StructuredOutputsParams):
        resolved = structured_outputs.resolve(structured, backend)
        if resolved is not structured:
            changes["structured_outputs"] = resolved
    return changes


def _is_minus_one(value: object) -> bool:
    return type(value) is int and value == -1


def _stop_ids(params: EngineCoreSamplingParams, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The ids to mask until ``min_tokens``; a grammar compiler looks at them too."""
    given: Any = changes.get("all_stop_token_ids", params.all_stop_token_ids)
    if type(given) not in (tuple, list, set, frozenset) or given:
        return {}
    found: set[Any] = set()
    try:
        if params.eos_token_id is not None:
            found.add(params.eos_token_id)
        found.update(changes.get("stop_token_ids", params.stop_token_ids) or ())
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
    if isinstance(token_ids, list | tuple):
        token_ids = _padded(token_ids)
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype.kind not in "iu":
        return {}
    narrow = token_ids.astype(np.int32)
    if token_ids.dtype == np.int32 or not np.array_equal(narrow, token_ids):
        return {}
    return {"prompt_logprob_token_ids": narrow}


def _padded(rows: Sequence[Any]) -> Any:
    """Rows of ids as an array, -1 where one is shorter than the longest; None if they are none."""
    if not all(isinstance(row, list | tuple) for row in rows):
        return None
    width = max(map(len, rows), default=0)
    try:
        array = np.array([[*row, *[-1] * (width - len(row))] for row in rows])
    except (OverflowError, ValueError):
        return None
    return array.astype(np.int64) if array.dtype.kind in "iu" else None


_DEFAULT_MAX_TOKENS = attrs.fields(EngineCoreSamplingParams).max_tokens.default


def _trace_changes(params: EngineCoreSamplingParams, room: int | None) -> dict[str, Any]:
    """What upstream's ``_normalize_trace_replay_params`` sets: only the trace's end is an end.

    A default ``max_tokens`` was not meant for the trace, so it does not cut it; any other does.
    """
    trace: Any = params.trace_decode_token_ids
    if type(trace) is not list or not trace:
        return {}
    if room is not None:
        trace = trace[: max(room, 1)]
    limit: Any = params.max_tokens
    if limit is None or limit == _DEFAULT_MAX_TOKENS:
        limit = len(trace)
    return {
        "trace_decode_token_ids": trace,
        "max_tokens": min(limit, len(trace)) if type(limit) is int else limit,
        "min_tokens": 0,
        "eos_token_id": None,
        "stop_token_ids": None,
        "all_stop_token_ids": (),
    }


_ACTIVATED = frozenset({"embed", "classify", "token_embed", "token_classify"})
"""Tasks of which upstream's frontends set parameters; a pooler takes None for False."""
_WHOLE_PROMPT = frozenset({"token_embed", "token_classify", "plugin"})
"""Tasks whose answer has something for each token, so none may come from the prefix cache."""


def _pooling_changes(params: PoolingParams) -> dict[str, Any]:
    task = params.task
    if not isinstance(task, str) or task not in _ACTIVATED | _WHOLE_PROMPT:
        return {}
    changes: dict[str, Any] = _as_lists(params, ("returned_token_ids",))
    if params.use_activation is None and task in _ACTIVATED:
        changes["use_activation"] = True
    if params.skip_reading_prefix_cache is None:
        changes["skip_reading_prefix_cache"] = task in _WHOLE_PROMPT
    if params.late_chunking_params is not None:
        changes["skip_reading_prefix_cache"] = True
    return changes


# Checks -----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RequestLimits:
    """What the engines behind a client can take. What is not known of them is None or False."""

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
    accepts_prompt_embeds: bool = False
    """Started with ``--enable-prompt-embeds``: others ignore embeddings without a word."""
    hidden_size: int | None = None
    """Width of the model's embeddings; an engine dies of any other."""
    is_multimodal: bool = False
    """Whether the model has encoders; others never schedule a request that needs one."""
    model_runner_v2: bool = True
    """Whether an engine may have vLLM's second model runner, as it has on GPUs: its tables for what a
    request names are of a fixed width, and it dies of more."""
    max_logprobs: int | None = None
    """``--max-logprobs``, of which the engine itself does not know."""
    supports_trace_replay: bool | None = None
    """Started with ``--enable-trace-replay``: others sample as usual."""
    has_reasoning_parser: bool | None = None
    """Without one, a thinking budget has no meaning."""
    embedding_size: int | None = None
    is_matryoshka: bool | None = None
    """Whether embeddings may be cut to fewer ``dimensions``."""
    late_interaction_queries: Collection[str] | None = None
    """Keys of queries that documents can be scored against: sent, and not used up."""

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
    """`validate_and_encode` without its message."""
    validate_and_encode(request, limits)


def validate_and_encode(request: EngineCoreRequest, limits: RequestLimits) -> list[Buffer]:
    """Refuse a request that an engine with these limits would reject, die of or misunderstand.

    It should have gone through `fill_defaults` before. Gives the message of `encode_add`, which has
    to look at each field anyway. Errors name the caller's id of the request, if it has one.

    Raises:
      EmptyPromptError: There is no prompt.
      UnsupportedFieldError: The engine, or a single engine request, cannot do that.
      InvalidFieldError: A field has a wrong value; names it.
    """
    try:
        message = encode_add(request)
    except InvalidFieldError as error:
        plain = _with_plain_token_ids(request)
        if plain is not None:
            return validate_and_encode(plain, limits)
        raise InvalidFieldError(callers_id(request), error.field, error.reason) from None
    try:
        _check_whole(request, limits)
    except UnsupportedValue as error:
        raise UnsupportedFieldError(callers_id(request), error.where, error.reason) from None
    except CodecError as error:
        raise InvalidFieldError(callers_id(request), error.where, error.reason) from None
    return message


def callers_id(request: EngineCoreRequest) -> str:
    """The id that a request has at its caller, for an error."""
    external = request.external_req_id
    return external[:200] if isinstance(external, str) else request_label(request)


def _with_plain_token_ids(request: EngineCoreRequest) -> EngineCoreRequest | None:
    """The request with numpy's integers among its token ids as Python's; None if it has none.

    `as_token_ids` looks at the first one only, for the sake of long prompts.
    """
    changes = _plain_changes(request, ("prompt_token_ids",))
    params = request.sampling_params
    if isinstance(params, EngineCoreSamplingParams):
        inner = _plain_changes(params, TOKEN_ID_FIELDS)
        if inner:
            changes["sampling_params"] = attrs.evolve(params, **inner)
    return attrs.evolve(request, **changes) if changes else None


def _plain_changes(holder: Any, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(holder, name) for name in names}
    return {
        name: plain_items(value)
        for name, value in values.items()
        if isinstance(value, list | tuple) and any(isinstance(item, np.integer) for item in value)
    }


def _check_whole(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Check what concerns fields together, or the engine; each by itself is good."""
    length = _check_prompt(request, limits)
    if request.mm_features:
        _check_features(request.mm_features, length)
    if request.prompt_token_ids is not None and limits.vocab_size is not None:
        _check_prompt_vocabulary(request, request.prompt_token_ids, limits.vocab_size)
    _check_engine(request, limits)
    if request.resumable:
        _check_resumable(request)
    if request.sampling_params is not None:
        if request.prompt_embeds is not None and request.prompt_token_ids is None:
            _check_no_penalties(request.sampling_params)
        _check_sampling(request.sampling_params, length, limits)


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
        raise EmptyPromptError(callers_id(request))
    if request.prompt_is_token_ids is not None:
        _check_token_mask(request, length)
    longest = limits.max_model_len
    if request.pooling_params is None:
        longest -= 1
    if length > longest:
        field = "prompt_embeds" if token_ids is None else "prompt_token_ids"
        raise invalid(field, f"must be {longest} tokens at most, not {length}")
    return length


def _check_embeds(request: EngineCoreRequest, embeds: Tensor) -> int:
    if len(embeds.shape) != 2 or not str(embeds.dtype).endswith(("float16", "float32", "float64")):
        raise invalid("prompt_embeds", "must be numbers of shape [tokens, hidden]")
    if request.prompt_token_ids is not None and request.prompt_is_token_ids is None:
        raise invalid("prompt_is_token_ids", "must tell token ids from embeddings")
    return embeds.shape[0]


def _check_no_penalties(params: EngineCoreSamplingParams) -> None:
    """An engine looks for the prompt's tokens and finds those of an earlier request, or dies of one."""
    for name, none in (
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
    ):
        if getattr(params, name) != none:
            reason = f"must be {none} for a prompt of embeddings, which has no tokens to look at"
            raise unsupported(f"sampling_params.{name}", reason)


def _check_token_mask(request: EngineCoreRequest, length: int) -> None:
    """The mask has one entry per position, and so has everything else."""
    mask = request.prompt_is_token_ids
    if request.prompt_embeds is None or request.prompt_token_ids is None:
        raise invalid("prompt_is_token_ids", "needs both prompt_token_ids and prompt_embeds")
    for field, positions in (
        ("prompt_token_ids", len(request.prompt_token_ids)),
        ("prompt_is_token_ids", len(mask or ())),
    ):
        if positions != length:
            raise invalid(field, f"must be as long as prompt_embeds ({length}), not {positions}")


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
            raise invalid(f"prompt_token_ids[{position}]", _not_in_vocabulary(token_id, vocab_size))


def _not_in_vocabulary(token_id: int, vocab_size: int) -> str:
    return f"{token_id} is not in the vocabulary of {vocab_size} tokens"


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
        raise invalid("length", "must be at least 1")
    if position.offset + position.length > prompt_length:
        raise invalid("", f"must lie inside the prompt of {prompt_length} tokens")
    if position.offset < earlier:
        raise invalid("offset", f"must not be before the one of the feature before ({earlier})")
    if mask is not None and (str(mask.dtype) != "bool" or mask.shape != (position.length,)):
        raise invalid("is_embed", f"must be booleans of shape [{position.length}]")


# The engine -------------------------------------------------------------------------------------


def _check_engine(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """What the engine has to be able to do for this request."""
    if limits.client_count is not None and request.client_index >= limits.client_count:
        # It would never answer anybody again: see EngineCoreProc.process_output_sockets.
        raise invalid("client_index", f"must be below {limits.client_count}")
    if request.lora_request is not None and not limits.supports_lora:
        # It would silently answer without the adapter: InputProcessor._validate_lora.
        raise unsupported("lora_request", "is set, but the engine was started without LoRA")
    if request.mm_features and not limits.is_multimodal:
        # It would wait for an encoder that never runs, and so would all that comes after it.
        reason = "needs a model that takes more than text, which is_multimodal=True states"
        raise unsupported("mm_features", reason)
    if request.prompt_embeds is not None:
        _check_width(request.prompt_embeds, limits)
    if (request.sampling_params is None) == (request.pooling_params is None):
        raise invalid("sampling_params", "or pooling_params must be set, and not both")
    if request.pooling_params is not None:
        try:
            _check_pooling(request.pooling_params, limits)
        except CodecError as error:
            raise error.add_path(".pooling_params") from None
    elif limits.supported_tasks is not None and GENERATION_TASKS.isdisjoint(limits.supported_tasks):
        raise unsupported("sampling_params", "is set, but the model only pools")


def _check_width(embeds: Tensor, limits: RequestLimits) -> None:
    if not limits.accepts_prompt_embeds:
        reason = (
            "needs engines with --enable-prompt-embeds, which accepts_prompt_embeds=True states"
        )
        raise unsupported("prompt_embeds", reason)
    if limits.hidden_size is None:
        raise unsupported("prompt_embeds", "needs the model's hidden_size to be stated")
    if embeds.shape[1] != limits.hidden_size:
        reason = f"must be {limits.hidden_size} wide, as the model is, not {embeds.shape[1]}"
        raise invalid("prompt_embeds", reason)


def _check_resumable(request: EngineCoreRequest) -> None:
    """See ``AsyncLLM._validate_streaming_input_sampling_params``."""
    if request.pooling_params is not None:
        raise invalid("resumable", "must be false: a prompt to pool comes in one piece")
    if request.prompt_embeds is not None:
        raise invalid("resumable", "must be false: embeddings come in one piece")


def _check_pooling(params: PoolingParams, limits: RequestLimits) -> None:
    """See ``PoolingParams.verify``, without what belongs to the model's own configuration."""
    if params.task is None:
        raise invalid("task", "must be set")
    if limits.supported_tasks is not None and params.task not in limits.supported_tasks:
        raise unsupported("task", f"{params.task!r} is not supported by the model")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, params.task, limits)
    if params.late_interaction_params is not None:
        _check_late_interaction(params, limits)
    if params.late_chunking_params is not None:
        _check_late_chunking(params, limits)
    if params.returned_token_ids is not None and limits.vocab_size is not None:
        _check_known("returned_token_ids", params.returned_token_ids, limits.vocab_size)


def _check_dimensions(dimensions: int, task: str, limits: RequestLimits) -> None:
    if task in ("classify", "token_classify"):
        raise invalid("dimensions", f"must not be set for the task {task}")
    if limits.is_matryoshka is False:
        raise unsupported("dimensions", "must not be set: the model's embeddings cannot be cut")
    if limits.embedding_size is not None and dimensions > limits.embedding_size:
        raise invalid("dimensions", f"must be at most {limits.embedding_size}, as the model has")


def _check_late_interaction(params: PoolingParams, limits: RequestLimits) -> None:
    """A worker keeps queries by key for so many documents; it dies of a document without one."""
    late = params.late_interaction_params
    assert late is not None
    if not late.query_key:
        raise invalid("late_interaction_params.query_key", "must not be empty")
    if late.mode == "cache_query":
        if late.query_uses is None or late.query_uses < 1:
            reason = "must be the number of documents to come, at least 1"
            raise invalid("late_interaction_params.query_uses", reason)
    elif (
        limits.late_interaction_queries is not None
        and late.query_key not in limits.late_interaction_queries
    ):
        reason = f"{late.query_key!r} is of no query that was sent for so many documents"
        raise invalid("late_interaction_params.query_key", reason)


def _check_late_chunking(params: PoolingParams, limits: RequestLimits) -> None:
    if limits.vllm_version.startswith(WITHOUT_LATE_CHUNKING):
        raise unsupported("late_chunking_params", "needs an engine of 0.33")
    if params.task != "token_embed":
        raise invalid("late_chunking_params", "must only be set for the task token_embed")
    if params.late_interaction_params is not None:
        raise invalid("late_chunking_params", "must not be set with late_interaction_params")
    if params.step_tag_id is not None:
        raise invalid("late_chunking_params", "must not be set with step_tag_id")


# Sampling ---------------------------------------------------------------------------------------


def _check_sampling(params: EngineCoreSamplingParams, length: int, limits: RequestLimits) -> None:
    """Check parameters whose fields are good by themselves, for a prompt of ``length`` tokens.

    See ``SamplingParams.verify`` upstream.
    """
    try:
        _check_counts(params, length)
        if params.logprob_token_ids is not None and params.logprobs is not None:
            _check_logprobs_count(params.logprobs, len(params.logprob_token_ids))
        if params.prompt_logprobs is not None:
            _check_prompt_logprobs(params)
        if params.prompt_logprob_token_ids is not None or params.prompt_logprob_start is not None:
            _check_prompt_logprob_token_ids(params, length)
        if params.structured_outputs is not None:
            _check_structured_outputs(params.structured_outputs)
        if params.trace_decode_token_ids is not None:
            _check_trace(params, limits)
        _check_what_is_known(params, limits)
    except CodecError as error:
        raise error.add_path(".sampling_params") from None


def _check_counts(params: EngineCoreSamplingParams, length: int) -> None:
    if params.n != 1:
        raise unsupported("n", "must be 1: an engine makes one completion per request")
    if params.max_tokens is None:
        raise invalid("max_tokens", "must be set")
    if params.min_tokens > params.max_tokens:
        raise invalid("min_tokens", f"must be at most max_tokens ({params.max_tokens})")
    if params.routed_experts_prompt_start > length:
        raise invalid("routed_experts_prompt_start", f"must be {length} at most")


def _check_what_is_known(params: EngineCoreSamplingParams, limits: RequestLimits) -> None:
    if params.thinking_token_budget is not None and limits.has_reasoning_parser is False:
        raise unsupported("thinking_token_budget", "needs engines with --reasoning-parser")
    if limits.max_logprobs is not None:
        _check_max_logprobs(params, limits.max_logprobs, limits.vocab_size)
    if limits.model_runner_v2 and (
        params.logit_bias is not None
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids is not None
        or params.min_tokens
    ):
        _check_widths(params)
    if limits.vocab_size is not None and _names_tokens(params):
        _check_vocabulary(params, limits.vocab_size)


MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
"""With ``min_tokens``, until which they are masked."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together; this and the one before are defaults of upstream's environment."""


def _check_widths(params: EngineCoreSamplingParams) -> None:
    """See ``vllm/v1/worker/gpu/sample``: ``logit_bias.py``, ``bad_words.py``."""
    words = params.bad_words_token_ids or ()
    masked = params.all_stop_token_ids if params.min_tokens else ()
    for name, count, most in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), MAX_LOGIT_BIASES),
        ("all_stop_token_ids", len(masked), MAX_STOP_TOKEN_IDS),
        ("bad_words_token_ids", len(words), MAX_BAD_WORDS),
        ("bad_words_token_ids", sum(map(len, words)), MAX_BAD_WORD_TOKENS),
    ):
        if count > most:
            reason = f"must be {most} at most, not {count}, unless model_runner_v2=False is stated"
            raise unsupported(name, reason)


def _check_logprobs_count(logprobs: int, count: int) -> None:
    if logprobs != count:
        raise invalid("logprobs", f"must be nil or the number of logprob_token_ids ({count})")


def _check_prompt_logprobs(params: EngineCoreSamplingParams) -> None:
    """What comes from the prefix cache is not computed, and has no log probabilities."""
    if params.skip_reading_prefix_cache is False:
        raise invalid("skip_reading_prefix_cache", "must not be false with prompt_logprobs")


def _check_prompt_logprob_token_ids(params: EngineCoreSamplingParams, length: int) -> None:
    """One row of ids for each prompt token from the one after ``prompt_logprob_start`` on."""
    ids = params.prompt_logprob_token_ids
    if ids is None:
        raise invalid("prompt_logprob_start", "needs prompt_logprob_token_ids")
    rows = length - 1 - (params.prompt_logprob_start or 0)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise invalid(
            "prompt_logprob_token_ids", "must be integers of shape [rows, ids], not empty"
        )
    if len(ids) != rows:
        raise invalid("prompt_logprob_token_ids", f"must have {rows} rows, not {len(ids)}")
    if int(ids.min()) < -1 or int(ids.max()) >= 2**31:
        raise invalid("prompt_logprob_token_ids", "must be token ids, or -1")
    if params.skip_reading_prefix_cache is False:
        reason = "must not be false with prompt_logprob_token_ids"
        raise invalid("skip_reading_prefix_cache", reason)


def _check_structured_outputs(params: StructuredOutputsParams) -> None:
    try:
        structured_outputs.check(params)
    except CodecError as error:
        raise error.add_path(".structured_outputs") from None


_NOT_WITH_TRACE = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
    "bad_words_token_ids",
)


def _check_trace(params: EngineCoreSamplingParams, limits: RequestLimits) -> None:
    """See ``SamplingParams._validate_trace_replay``."""
    for name in _NOT_WITH_TRACE:
        if getattr(params, name) is not None:
            raise invalid(name, "cannot be combined with trace_decode_token_ids")
    if limits.supports_trace_replay is False:
        raise unsupported("trace_decode_token_ids", "needs engines with --enable-trace-replay")


def _check_max_logprobs(
    params: EngineCoreSamplingParams, max_logprobs: int, vocab_size: int | None
) -> None:
    """See ``SamplingParams._validate_logprobs``; -1 asks for, and allows, the whole vocabulary."""
    if max_logprobs == -1:
        return
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count == -1:
            count = vocab_size if vocab_size is not None else max_logprobs + 1
        if count is not None and count > max_logprobs:
            raise unsupported(name, f"must be at most {max_logprobs}, the engines' --max-logprobs")
    ids = params.prompt_logprob_token_ids
    if ids is not None and ids.shape[1] > max_logprobs:
        reason = f"must be at most {max_logprobs} wide, the engines' --max-logprobs"
        raise unsupported("prompt_logprob_token_ids", reason)


# The vocabulary ---------------------------------------------------------------------------------


def _names_tokens(params: EngineCoreSamplingParams) -> bool:
    """Whether any field is set that depends on the vocabulary."""
    return not (
        params.eos_token_id is None
        and params.logprobs is None
        and params.stop_token_ids is None
        and params.prompt_logprobs is None
        and params.logit_bias is None
        and params.allowed_token_ids is None
        and params.bad_words_token_ids is None
        and params.logprob_token_ids is None
        and params.all_stop_token_ids is _NO_IDS
        and params.prompt_logprob_token_ids is None
        and params.trace_decode_token_ids is None
    )


def _check_vocabulary(params: EngineCoreSamplingParams, vocab_size: int) -> None:
    """Token ids are indices into the logits, and so many log probabilities are there to report."""
    for name in (*TOKEN_ID_FIELDS, "logit_bias"):
        token_ids = getattr(params, name)
        if token_ids is not None and len(token_ids):
            _check_known(name, token_ids, vocab_size)
    for index, word in enumerate(params.bad_words_token_ids or ()):
        _check_known(f"bad_words_token_ids[{index}]", word, vocab_size)
    if params.eos_token_id is not None and params.eos_token_id >= vocab_size:
        raise invalid("eos_token_id", _not_in_vocabulary(params.eos_token_id, vocab_size))
    ids = params.prompt_logprob_token_ids
    if ids is not None and int(ids.max()) >= vocab_size:
        raise invalid("prompt_logprob_token_ids", _not_in_vocabulary(int(ids.max()), vocab_size))
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise invalid(name, f"must be at most the vocabulary's {vocab_size} tokens")


def _check_known(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if len(token_ids) and max(token_ids) >= vocab_size:
        raise invalid(name, _not_in_vocabulary(max(token_ids), vocab_size))


SMALLEST_VOCABULARY = 256
"""No model has fewer tokens, as each byte needs one: ids and counts below are always good."""


def needs_vocab_size(request: EngineCoreRequest) -> bool:
    """Whether sampling parameters depend on the vocabulary.

    A prompt's ids do too, but nearly every prompt would: they are checked if the size is known.
    """
    params = request.sampling_params
    if not isinstance(params, EngineCoreSamplingParams) or not _names_tokens(params):
        return False
    names = (*TOKEN_ID_FIELDS, "logit_bias", "bad_words_token_ids", "prompt_logprob_token_ids")
    counts = (params.logprobs, params.prompt_logprobs, params.eos_token_id)
    return any(_reaches(getattr(params, name)) for name in names) or any(map(_reaches, counts))


def _reaches(token_ids: Any) -> bool:
    """Whether there is a token id among these, or a count, that not every vocabulary has."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.size > 0 and bool(np.any(token_ids >= SMALLEST_VOCABULARY))
    if isinstance(token_ids, Iterable) and not isinstance(token_ids, str | bytes):
        return any(map(_reaches, token_ids))
    return type(token_ids) is int and token_ids >= SMALLEST_VOCABULARY
