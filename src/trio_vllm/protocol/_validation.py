"""What a frontend must not send: an engine dies of it, or goes deaf.

An engine builds upstream's parameter classes while it decodes a request, in its input thread, and
that thread does not survive what their constructors reject. Other values kill its main loop later:
an empty or too long prompt, an unknown token id or pooling task. Upstream's frontends check all
that first, in ``vllm/v1/engine/input_processor.py`` (``InputProcessor.process_inputs``) and
``vllm/sampling_params.py`` (``SamplingParams._verify_args``, ``SamplingParams.verify``); so does
`check_request`. What concerns one field by itself stands in its form (``_sampling.py``,
``_request.py``, …) and is checked again when the request is written; here, and in
``_sampling_validation.py``, is what concerns fields together, or the engine.

Not known here, and left to the caller: the vocabulary unless it is told, the engine's
``--max-logprobs``, its hidden size, whether it has a reasoning parser.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs

from trio_vllm._errors import EmptyPromptError, InvalidFieldError, UnsupportedFieldError
from trio_vllm.protocol._arrays import Tensor
from trio_vllm.protocol._forms import Buffer, FormError
from trio_vllm.protocol._handshake import EngineCoreReadyResponse
from trio_vllm.protocol._multimodal import MultiModalFeatureSpec, PlaceholderRange
from trio_vllm.protocol._pooling import PoolingParams
from trio_vllm.protocol._refusal import Unsupported, not_in_vocabulary, refuse, refuse_here
from trio_vllm.protocol._request import EngineCoreRequest, encode_add, name_of
from trio_vllm.protocol._sampling_validation import check_sampling


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

    It should have gone through `resolve_request` before. What passes can be written by
    `encode_add`.

    Raises:
      EmptyPromptError: There is no prompt.
      UnsupportedFieldError: The engine, or a single engine request, cannot do that.
      InvalidFieldError: A field has a wrong value; names it.
    """
    encode_checked(request, limits)


def encode_checked(request: EngineCoreRequest, limits: RequestLimits) -> list[Buffer]:
    """`check_request`, and the message of `encode_add`, which has to look at each field anyway."""
    message = encode_add(request)
    try:
        _check_whole(request, limits)
    except Unsupported as error:
        raise UnsupportedFieldError(name_of(request), error.where, error.reason) from None
    except FormError as error:
        raise InvalidFieldError(name_of(request), error.where, error.reason) from None
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
        except FormError as error:
            raise error.within(f".mm_features[{index}].mm_position") from None
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
