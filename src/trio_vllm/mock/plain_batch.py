"""`PlainBatch`: the requests that want more than tokens, one by one, as objects.

It is the measure of the fast path, too: what both can do they must do equally.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.content import PER_TOKEN, Floats, LogprobModel, Pooler, TokenSource
from trio_vllm.mock.encoding import MessageBuilder
from trio_vllm.mock.request import Extras, Request
from trio_vllm.protocol import (
    EngineCoreEvent,
    EngineCoreOutput,
    FinishReason,
    PoolingParams,
    PrefillStats,
    Tensor,
)
from trio_vllm.values import define

_NO_EXTRAS = Extras()

SLICE_NUMBERS = 2**18
"""Log probabilities and numbers of vectors made at a time, which takes some 5 ms."""
ROW_COST, LOGPROBS_COST = 200, 1500
"""To how many of them the making of a row comes, and of log probabilities for it."""


@define(eq=False)
class PlainMember:
    """A request in the batch, and how far it has come there."""

    request: Request
    width: int
    """Columns of log probabilities that it asks for."""
    emitted: int
    output: EngineCoreOutput
    """Its next output, in which the prefill leaves what it makes."""
    prefill: Iterator[int] | None
    """Makes what is told of the prompt, in slices; yields how many numbers each has made."""


class RowMaker:
    """Makes the rows of requests on the plain path."""

    def __init__(self, config: MockEngineConfig, source: TokenSource) -> None:
        self._source = source
        self._chunk_size = config.output_token_chunk_size
        self._pooler = Pooler(config.embedding_size, config.num_labels)
        self._logprobs = LogprobModel(config.vocab_size)

    def member(self, request: Request) -> PlainMember:
        """Take in a request."""
        extras = request.extras or _NO_EXTRAS
        output = EngineCoreOutput(request.request_id)
        return PlainMember(
            request,
            self.logprob_columns_of(extras),
            request.emitted,
            output,
            None if request.is_prefilled else self._prefill(request, extras, output),
        )

    def logprob_columns_of(self, extras: Extras) -> int:
        """How many a request asks for."""
        return self._logprobs.width(extras.logprobs, extras.logprob_token_ids)

    def sample(self, member: PlainMember, width: int, count: int | None = None) -> None:
        """Put the next tokens of a request into its output; a vector is there already.

        Args:
          member: Its prefill must be over.
          width: Columns of log probabilities, if the request wants any.
          count: How many tokens, if it is not the usual number.
        """
        request, output = member.request, member.output
        extras = request.extras or _NO_EXTRAS
        if extras.pooling is not None:
            output.finish_reason = FinishReason.STOP
            return
        first = member.emitted
        count = min(count or self._chunk_size, request.end - first)
        tokens = request.tokens(self._source, first, count)
        output.new_token_ids = tokens
        if member.width:
            output.new_logprobs = self._logprobs.sample(
                request.key,
                first,
                tokens,
                width,
                extras.logprob_token_ids,
                num_candidates=extras.num_candidates,
            )
        member.emitted += count
        if member.emitted == request.end:
            output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason

    def add_row(self, member: PlainMember, builder: MessageBuilder) -> bool:
        """Put the output of a request into a message, once it has tokens; whether it was the last."""
        request, output = member.request, member.output
        output.trace_headers = (request.extras or _NO_EXTRAS).trace_headers
        if request.events:
            output.events = [EngineCoreEvent(kind, time) for kind, time in request.events]
            request.events = None
        builder.outputs.append(output)
        if output.finish_reason is None:
            member.output = EngineCoreOutput(request.request_id)
            return False
        if request.transfer is not None:
            output.kv_transfer_params = request.transfer.answer
        builder.finished.append(request.request_id)
        request.emitted = member.emitted
        return True

    def _pooled(self, request: Request, params: PoolingParams, vectors: Floats) -> Floats:
        """What is answered of the vectors of a prompt: all, the only one, or what they come to."""
        if request.query is not None:
            return request.query.score(vectors, self._pooler, params)
        if params.late_interaction_params is not None:
            return np.zeros((), np.float32)  # a query is kept, not told
        return vectors if params.task in PER_TOKEN else vectors[0]

    def _prefill(self, request: Request, extras: Extras, output: EngineCoreOutput) -> Iterator[int]:
        """Put into an output what is told of the prompt, in slices."""
        count, prompt, key = request.prompt_len, extras.prompt_token_ids, request.key
        output.prefill_stats = PrefillStats(num_prompt_tokens=count, num_computed_tokens=count)
        if request.was_fetched:
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=count, num_cached_tokens=count, num_external_cached_tokens=count
            )
        if extras.prompt_logprobs is not None:
            made = self._logprobs.empty_prompt(prompt, extras.prompt_logprobs)
            for rows in _slices(*made.token_ids.shape):
                self._logprobs.fill_prompt(made, key, prompt, rows)
                yield (rows.stop - rows.start) * made.token_ids.shape[1]
            # What is read-only is lent to ØMQ, not copied.
            made.token_ids.flags.writeable = made.logprobs.flags.writeable = False
            output.new_prompt_logprobs_tensors = made
        if extras.prompt_logprob_token_ids is not None:
            token_ids = extras.prompt_logprob_token_ids
            values = self._logprobs.empty_prompt_token_ids(token_ids)
            for rows in _slices(*token_ids.shape):
                self._logprobs.fill_prompt_token_ids(values, key, prompt, token_ids, rows)
                yield (rows.stop - rows.start) * token_ids.shape[1]
            values.flags.writeable = False
            output.prompt_token_id_logprobs = values
        if extras.pooling is not None:
            vectors = self._pooler.empty(extras.pooling, count)
            for rows in _slices(*vectors.shape):
                self._pooler.fill(vectors, key, extras.pooling, rows)
                yield (rows.stop - rows.start) * vectors.shape[1]
            vectors.flags.writeable = False
            output.pooling_output = Tensor.from_numpy(
                self._pooled(request, extras.pooling, vectors)
            )
        request.is_prefilled = True


class PlainBatch:
    """The requests of one engine on the plain path.

    Its steps are made in slices, each with messages of its own, where a request asks for so much
    that a whole step would hold up everything else: rows of the one request in this slice, of the
    next in another. A long prefill takes several steps, as chunked prefill does in real engines.
    """

    def __init__(self, config: MockEngineConfig, source: TokenSource) -> None:
        self._maker = RowMaker(config, source)
        self._chunk_size = config.output_token_chunk_size
        self._members: dict[str, PlainMember] = {}
        self._round: deque[PlainMember] = deque()  # members that the step in hand has not come to
        self._width = 0  # columns of log probabilities in the step in hand
        self._held: frozenset[int] = frozenset()
        self.tokens_made = 0

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self._members)

    @property
    def active_count(self) -> int:
        """How many requests are in the next step."""
        if not self._held:
            return len(self._members)
        return sum(m.request.client_index not in self._held for m in self._members.values())

    @property
    def is_in_step(self) -> bool:
        """Whether the next call of `step` goes on with a step that has begun."""
        return bool(self._round)

    def hold(self, held: frozenset[int]) -> None:
        """Give nothing to the requests of these clients until the next call."""
        self._held = held

    def step(
        self,
        joining: Iterable[Request],
        builder_for: Callable[[int], MessageBuilder],
        columns: int = 0,
    ) -> list[Request]:
        """Make the next step, or a slice of it; gives the requests that have finished.

        ``joining`` requests are taken in where a step begins. Log probabilities have as many
        ``columns`` at least.
        """
        if not self._round:
            self._begin(joining, columns)
        finished: list[Request] = []
        numbers = 0
        while self._round and numbers < SLICE_NUMBERS:
            member = self._round.popleft()
            if not self._is_due(member):
                continue
            if member.prefill is not None:
                numbers += advance(member.prefill, SLICE_NUMBERS - numbers)
                if not member.request.is_prefilled:
                    continue
                member.prefill = None
            numbers += row_cost(member, self._width * self._chunk_size)
            before = member.emitted
            builder = builder_for(member.request.client_index)
            self._maker.sample(member, self._width)
            if self._maker.add_row(member, builder):
                finished.append(member.request)
                self.remove(member.request)
            self.tokens_made += member.emitted - before
        return finished

    def _begin(self, joining: Iterable[Request], columns: int) -> None:
        for request in joining:
            self._members[request.request_id] = self._maker.member(request)
        # A real engine computes log probabilities for the whole batch at once: all are as wide as
        # the widest.
        self._width = max([columns, *[member.width for member in self._members.values()]])
        self._round.extend(self._members.values())

    def _is_due(self, member: PlainMember) -> bool:
        request = member.request
        is_here = self._members.get(request.request_id) is member  # and not aborted meanwhile
        return is_here and request.client_index not in self._held

    def logprob_columns_of(self, request: Request) -> int:
        """How many a request asks for."""
        return self._maker.logprob_columns_of(request.extras or _NO_EXTRAS)

    def remove(self, request: Request) -> None:
        """Take out a member before its end, with the tokens that it has got."""
        request.emitted = self._members.pop(request.request_id).emitted


def row_cost(member: PlainMember, width: int) -> int:
    """What a row counts for in a slice, with so many log probabilities if it has any."""
    return ROW_COST + (LOGPROBS_COST + width if member.width else 0)


def advance(work: Iterator[int], limit: int) -> int:
    """Go on with what is made in slices until that is ``limit`` numbers or more; how many it was."""
    numbers = 0
    for made in work:
        numbers += made
        if numbers >= limit:
            break
    return numbers


def _slices(row_count: int, width: int) -> Iterator[slice]:
    """Cut rows into parts of some `SLICE_NUMBERS`."""
    height = max(1, SLICE_NUMBERS // max(1, width))
    for start in range(0, row_count, height):
        yield slice(start, min(start + height, row_count))
