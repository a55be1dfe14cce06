"""`Request` is what an engine knows of an unfinished request; `RequestFactory` makes or refuses it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import attrs

from trio_vllm.mock.answers import (
    MAX_TOKEN,
    Answer,
    Answers,
    Ending,
    GivenTokens,
    RandomAnswers,
    RequestTokens,
)
from trio_vllm.mock.block_hashes import PLAIN, CacheScope, MultiModalSpan
from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.connector import Connector, KvTransfer, transfer_params
from trio_vllm.mock.content import Pooler, TokenSource
from trio_vllm.mock.deaths import fails_in_preprocessing, generates, prompt_length
from trio_vllm.mock.ends import first_repetition, first_stop
from trio_vllm.mock.kv_cache import BlockTable
from trio_vllm.mock.late_interaction import LateQuery
from trio_vllm.mock.scheduled_request import ScheduledRequest
from trio_vllm.protocol import (
    POOLING_TASKS,
    Array,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    EventType,
    FinishReason,
    PoolingParams,
)
from trio_vllm.values import define, frozen


@frozen(kw_only=True)
class Extras:
    """What a request asks for besides tokens; with more than log probabilities it takes the plain path."""

    logprobs: int | None = None
    """Candidates per token besides the sampled one; -1 is the whole vocabulary."""
    logprob_token_ids: Sequence[int] | None = None
    num_candidates: int | None = None
    """From how many of the most probable tokens one is sampled, if not from all."""
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Array | None = None
    prompt_token_ids: Sequence[int] = ()
    """Kept only where prompt log probabilities are due."""
    masked_token_ids: frozenset[int] = frozenset()
    """Not to be drawn before position ``unmasked_from``."""
    unmasked_from: int = 0
    pooling: PoolingParams | None = None
    trace_headers: dict[str, str] | None = None

    @property
    def are_logprobs(self) -> bool:
        """Whether it asks for log probabilities of the most probable tokens, and nothing else."""
        is_more = self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None
        is_more = is_more or self.logprob_token_ids is not None or bool(self.masked_token_ids)
        is_other = self.pooling is not None or self.trace_headers is not None
        return self.logprobs is not None and not (is_more or is_other)


@define(eq=False, kw_only=True, weakref_slot=False)
class Request:
    """An unfinished request; which batch it is in, and where, is that batch's to know."""

    request_id: str
    client_index: int
    key: int
    prompt_len: int
    end: int
    """How many tokens it gets in all."""
    finish_reason: FinishReason = FinishReason.LENGTH
    """Why it will end there."""
    stop_reason: int | str | None = None
    last_token: int | None = None
    """In the place of the last one, if that is known beforehand: an end-of-text token."""
    given: RequestTokens | None = None
    """Gives its tokens, unless they are drawn by its key; such a request takes the plain path."""
    extras: Extras | None = None
    scheduled: ScheduledRequest | None = None
    """What vLLM's scheduler knows of it, if there is one."""
    is_prefilled_elsewhere: bool = False
    """Whether its ``kv_transfer_params`` say so."""
    transfer: KvTransfer | None = None
    """Its part in prefill/decode disaggregation."""
    query: LateQuery | None = None
    """What a document is scored by, in late interaction."""
    was_fetched: bool = False
    """Whether its prompt came from another engine, where there is no schedule."""

    search: Iterator[None] | None = None
    """Finds its ``end`` where that depends on its tokens, with turns for others; None if it is known."""

    emitted: int = 0
    """Tokens that it had got when it last left a batch, or joins its first one."""
    events: list[tuple[EventType, float]] | None = None
    """What has happened to it and no output has told yet."""
    is_prefilled: bool = False
    """Whether an output has told of its prefill."""

    @property
    def is_pooling(self) -> bool:
        """Whether it wants a vector instead of tokens."""
        return self.extras is not None and self.extras.pooling is not None

    @property
    def has_logprobs(self) -> bool:
        """Whether it wants tokens that are drawn, with log probabilities, and nothing else."""
        is_drawn = self.given is None and self.transfer is None
        return is_drawn and self.extras is not None and self.extras.are_logprobs

    @property
    def is_plain(self) -> bool:
        """Whether it wants more than drawn tokens."""
        return self.extras is not None or self.given is not None

    def tokens(self, source: TokenSource, first: int, count: int) -> list[int]:
        """Its ``count`` tokens from position ``first`` on."""
        given, extras, end = self.given, self.extras, self.end
        tokens = source.draw(self.key, first, count) if given is None else given.draw(first, count)
        if extras is not None and first < extras.unmasked_from and extras.masked_token_ids:
            tokens = _unmasked(tokens, first, extras, source.vocab_size)
        if self.last_token is not None and first < end <= first + count:
            tokens[end - 1 - first] = self.last_token
        return tokens

    def note(self, event: EventType, now: float) -> None:
        """Record an event for the next output."""
        self.events = [*(self.events or ()), (event, now)]


NO_TOKENS: frozenset[int] = frozenset()

_UNUSUAL = (
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "logprob_token_ids",
    "structured_outputs",
    "extra_args",
    "repetition_detection",
)
"""Parameters of which the mock makes more than the number of tokens, if they are set."""
_KINDS = 64
"""So many different parameters are remembered."""

KEEPING = frozenset({FinishReason.LENGTH, FinishReason.STOP})
"""Ends after which the blocks of a prompt are kept for another engine."""

MAX_NUMBERS = 2**26
"""Log probabilities, or numbers of a vector, in one output: what they take is memory."""


@frozen
class Refusal:
    """Why a request gets an error output instead of tokens."""

    message: str
    CODE: ClassVar = "validation_error"
    code: str | None = CODE
    """None where an engine does not say why; the log does."""
    retryable: bool = False


@frozen
class RequestFactory:
    """Makes a `Request` of what a frontend sends, or a `Refusal`.

    Which tokens a request gets does not depend on its parameters, so that its end is known from the
    start, also that of a request with stop tokens.
    """

    _config: MockEngineConfig
    _source: TokenSource
    _answers: Answers
    _connector: Connector | None = None
    _is_scheduled: bool = attrs.field(
        default=attrs.Factory(lambda self: self._config.is_scheduled, takes_self=True), init=False
    )
    _generates: bool = attrs.field(
        default=attrs.Factory(
            lambda self: generates(self._config.supported_tasks), takes_self=True
        ),
        init=False,
    )

    _usual: dict[EngineCoreSamplingParams, int | None] = attrs.field(factory=dict, init=False)
    """By parameters that requests share: how many tokens they get, if they get nothing else."""

    def make(self, wire: EngineCoreRequest, emitted: int) -> Request | Refusal:
        """Make a request; its first token will be that of position ``emitted``."""
        return self._make_usual(wire, emitted) or self.make_any(wire, emitted)

    def _make_usual(self, wire: EngineCoreRequest, emitted: int) -> Request | None:
        """Make a request that wants nothing but so many tokens; None of any other.

        What `make_any` would make of the parameters is found out once for all requests that share them.
        """
        params, prompt = wire.sampling_params, wire.prompt_token_ids
        if params is None or prompt is None or wire.lora_request or wire.trace_headers:
            return None
        if params not in self._usual:
            self._learn(params)
        limit, room = self._usual[params], self._config.max_model_len - len(prompt)
        if limit is None or room < 1 or not prompt or wire.pooling_params is not None:
            return None
        answer = self._answers.answer(wire, emitted)
        if answer.ending is not None:
            return None
        return Request(
            request_id=wire.request_id,
            client_index=wire.client_index,
            key=answer.key,
            prompt_len=len(prompt),
            end=emitted + min(limit, room),
            emitted=emitted,
        )

    def _learn(self, params: EngineCoreSamplingParams) -> None:
        """Note up to how many tokens requests with these parameters get, if that is all."""
        if len(self._usual) >= _KINDS:
            self._usual.clear()
        is_usual = (
            self._generates
            and isinstance(self._answers, RandomAnswers)
            and not self._is_scheduled
            and self._connector is None
            and not (params.stop_token_ids or params.min_tokens or params.trace_decode_token_ids)
            and self._eos(params) is None
            and all(getattr(params, name) is None for name in _UNUSUAL)
        )
        self._usual[params] = params.max_tokens if is_usual else None

    def make_any(self, wire: EngineCoreRequest, emitted: int) -> Request | Refusal:
        """Make a request whatever it asks for, usual ones too.

        Where a real engine would die (no prompt, or one too long) this gives a refusal, in that
        engine's words if it has any.
        """
        prompt_len = prompt_length(wire)
        fault = self._fault(wire, prompt_len)
        if fault is not None:
            code = None if fails_in_preprocessing(wire) else Refusal.CODE
            return Refusal(fault, code)
        answer = self._answer(wire, emitted)
        if answer.fault is not None:
            return Refusal(answer.fault)
        transfer = None if self._connector is None else self._connector.transfer_of(wire)
        if transfer is not None and self._connector is not None:
            fault = self._connector.fault_of(transfer)
            if fault is not None:
                return Refusal(fault)
        extras = _extras(wire, emitted, self._config.vocab_size)
        if transfer is not None and extras is None and (transfer.sends or not self._is_scheduled):
            extras = Extras()  # its rows have more than tokens
        scheduled = _scheduled(wire, prompt_len) if self._is_scheduled else None
        if scheduled is not None:
            scheduled.transfer = transfer
        request = Request(
            request_id=wire.request_id,
            client_index=wire.client_index,
            key=answer.key,
            prompt_len=prompt_len,
            end=emitted,
            emitted=emitted,
            given=answer.given,
            extras=extras,
            scheduled=scheduled,
            is_prefilled_elsewhere=bool(transfer_params(wire).get("do_remote_prefill")),
            transfer=transfer,
        )
        if wire.sampling_params is not None:
            self._note_end(request, wire.sampling_params, answer.ending)
        return request

    def _answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        answer, params = self._answers.answer(wire, emitted), wire.sampling_params
        if params is None or not params.trace_decode_token_ids:
            return answer
        trace = params.trace_decode_token_ids
        ending = Ending(len(trace), FinishReason.LENGTH)
        return Answer(answer.key, GivenTokens(trace, emitted), ending)

    def _fault(self, wire: EngineCoreRequest, prompt_len: int) -> str | None:
        config, params = self._config, wire.sampling_params
        if prompt_len < 1:
            return "the prompt is empty"
        if prompt_len >= config.max_model_len:
            return (
                f"the prompt of {prompt_len} tokens leaves no room in max_model_len"
                f" {config.max_model_len}"
            )
        if wire.lora_request is not None and not config.max_loras:
            return "LoRA is not enabled. Use --enable-lora to enable LoRA."
        if params is not None and wire.pooling_params is None:
            if not self._generates:
                return f"the model does not generate, its tasks are {[*config.supported_tasks]}"
            if params.max_tokens is None:
                return "max_tokens must be set"
            return self._ids_fault(params) or self._logprobs_fault(params, prompt_len)
        if wire.pooling_params is None:
            return "the request has neither sampling nor pooling parameters"
        supported = [task for task in config.supported_tasks if task in POOLING_TASKS]
        if wire.pooling_params.task not in supported:
            task = wire.pooling_params.task
            return f"Unsupported task: {task!r} Supported tasks: {supported}"
        rows, size = Pooler(config.embedding_size, config.num_labels).shape(
            wire.pooling_params, prompt_len
        )
        return _too_many("pooling_params", rows * size)

    def _ids_fault(self, params: EngineCoreSamplingParams) -> str | None:
        size = self._config.vocab_size
        if params.trace_decode_token_ids and max(params.trace_decode_token_ids) >= size:
            return f"trace_decode_token_ids are beyond the vocabulary of {size}"
        if params.logprob_token_ids and max(params.logprob_token_ids) >= size:
            return f"logprob_token_ids are beyond the vocabulary of {size}"
        ids = params.prompt_logprob_token_ids
        if ids is not None and (ids.ndim != 2 or ids.dtype.kind != "i"):
            return "prompt_logprob_token_ids must be signed integers in rows"
        return None

    def _logprobs_fault(self, params: EngineCoreSamplingParams, prompt_len: int) -> str | None:
        if params.logprobs is None and params.prompt_logprobs is None:
            return None
        size = self._config.vocab_size
        for what, wanted, rows in (
            ("logprobs", params.logprobs, self._config.output_token_chunk_size),
            ("prompt_logprobs", params.prompt_logprobs, prompt_len),
        ):
            if wanted is not None and wanted < -1:
                return f"{what} must be at least -1, got {wanted}"
            columns = size if wanted == -1 else min(wanted or 0, size)
            if (fault := _too_many(what, columns * rows)) is not None:
                return fault
        return None

    def _note_end(
        self, request: Request, params: EngineCoreSamplingParams, ending: Ending | None
    ) -> None:
        """Note at which position the request ends, and why, unless it has to be searched for."""
        start, config = request.emitted, self._config
        limit = min(params.max_tokens or 0, config.max_model_len - request.prompt_len)
        request.end = start + limit
        if ending is not None:
            ending = ending.after(params.min_tokens)
            if ending.length <= limit:
                request.end = start + ending.length
                request.finish_reason, request.stop_reason = ending.reason, ending.stop_reason
                request.last_token = ending.last_token
        if not params.trace_decode_token_ids:  # is replayed whatever else would end it
            stops = self._stops(request, params)
            if stops or params.repetition_detection is not None:
                request.search = self._search(request, params, stops)
        if request.search is None:
            _note_keeping(request)

    def _stops(self, request: Request, params: EngineCoreSamplingParams) -> frozenset[int]:
        """The tokens that end the request."""
        size = self._config.vocab_size if request.given is None else MAX_TOKEN + 1
        eos, stops = self._eos(params), frozenset(params.stop_token_ids or ())
        if eos is not None:
            stops |= {eos}
        if stops and max(stops) >= size:  # rarely: they may be a million
            stops = frozenset(token for token in stops if token < size)
        return stops

    def _eos(self, params: EngineCoreSamplingParams) -> int | None:
        return params.eos_token_id if self._config.stop_at_eos else None

    def _search(
        self, request: Request, params: EngineCoreSamplingParams, stops: Collection[int]
    ) -> Iterator[None]:
        """Let the request end at the first stop token, or where it begins to repeat itself."""
        first = request.emitted + params.min_tokens
        found = None
        if stops:
            found = yield from first_stop(request, self._source, stops, first)
        if found is not None:
            position, token = found
            request.end, request.last_token = position + 1, None
            request.finish_reason = FinishReason.STOP
            request.stop_reason = None if token == self._eos(params) else token
        if params.repetition_detection is not None:
            count = yield from first_repetition(
                request, self._source, params.repetition_detection, params.min_tokens
            )
            if count is not None:
                request.end, request.last_token = request.emitted + count, None
                request.finish_reason = FinishReason.REPETITION
                request.stop_reason = "repetition_detected"
        _note_keeping(request)


def _note_keeping(request: Request) -> None:
    """Note whether the blocks of its prompt are kept for another engine, which depends on its end."""
    if request.transfer is not None and request.finish_reason not in KEEPING:
        request.transfer.sends = False


def _too_many(what: str, count: int) -> str | None:
    if count <= MAX_NUMBERS:
        return None
    return f"{what} asks for {count} numbers in one output, {MAX_NUMBERS} are possible"


def _scheduled(wire: EngineCoreRequest, prompt_len: int) -> ScheduledRequest:
    """What the scheduler is told of a request."""
    lora = wire.lora_request
    is_embeds = wire.prompt_token_ids is None
    params = wire.sampling_params or wire.pooling_params
    table = BlockTable(
        array("I", bytes(4 * prompt_len) if is_embeds else wire.prompt_token_ids or ()),
        cache_scope(wire),
        lora_id=None if lora is None else lora.lora_int_id,
        session_id=wire.session_id,
        skip_reading_prefix_cache=bool(params and params.skip_reading_prefix_cache),
    )
    return ScheduledRequest(
        request_id=wire.request_id,
        num_prompt_tokens=prompt_len,
        table=table,
        priority=wire.priority,
        arrival_time=wire.arrival_time,
    )


def cache_scope(wire: EngineCoreRequest) -> CacheScope:
    """What shapes the blocks of a request besides its tokens."""
    lora = wire.lora_request
    scope = CacheScope(
        # Embeddings are not hashed: each prompt of them is like no other.
        cache_salt=wire.request_id if wire.prompt_token_ids is None else wire.cache_salt,
        lora_name=None if lora is None else lora.lora_name,
        lora_path="" if lora is None else lora.lora_path,
        multimodal=_multimodal(wire),
    )
    return PLAIN if scope == PLAIN else scope


def _multimodal(wire: EngineCoreRequest) -> tuple[MultiModalSpan, ...]:
    spans = [
        MultiModalSpan(one.identifier, one.mm_position.offset, one.mm_position.length)
        for one in wire.mm_features or ()
    ]
    return tuple(sorted(spans, key=lambda span: span.offset))


def _extras(wire: EngineCoreRequest, emitted: int, vocab_size: int) -> Extras | None:
    """What the request wants besides tokens, if anything."""
    params = wire.sampling_params
    if params is None:
        return Extras(pooling=wire.pooling_params, trace_headers=wire.trace_headers or None)
    masked = _masked(params, vocab_size) if params.min_tokens else NO_TOKENS
    about_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    about_tokens = params.logprobs is not None or params.logprob_token_ids is not None
    if not (masked or about_prompt or about_tokens or wire.trace_headers):
        return None
    prompt: Sequence[int] = wire.prompt_token_ids or () if about_prompt else ()
    return Extras(
        logprobs=params.logprobs,
        logprob_token_ids=params.logprob_token_ids,
        num_candidates=_num_candidates(params),
        prompt_logprobs=params.prompt_logprobs,
        prompt_logprob_token_ids=params.prompt_logprob_token_ids,
        prompt_token_ids=prompt,
        masked_token_ids=masked,
        unmasked_from=emitted + params.min_tokens,
        trace_headers=wire.trace_headers or None,
    )


GREEDY_BELOW = 1e-5
"""Temperatures that upstream takes for 0."""


def _num_candidates(params: EngineCoreSamplingParams) -> int | None:
    """How many tokens sampling chooses among; what is replayed was not sampled."""
    if params.trace_decode_token_ids:
        return None
    if params.temperature < GREEDY_BELOW:
        return 1
    return params.top_k if params.top_k > 0 else None


def _masked(params: EngineCoreSamplingParams, vocab_size: int) -> frozenset[int]:
    ids = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
    if params.eos_token_id is not None:
        ids.add(params.eos_token_id)
    return frozenset(token for token in ids if token < vocab_size)


def _unmasked(tokens: list[int], first: int, extras: Extras, vocab_size: int) -> list[int]:
    """The tokens, with the next that is allowed in the place of each that must not come yet."""
    masked = extras.masked_token_ids
    if len(masked) >= vocab_size:
        return tokens
    replaced = []
    for position, drawn in enumerate(tokens, first):
        token = drawn
        while position < extras.unmasked_from and token in masked:
            token = (token + 1) % vocab_size
        replaced.append(token)
    return replaced
