"""The plain path: requests one by one, as objects.

It is for requests that want more than tokens, and it is the measure of the fast path: what both can
do they must do equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trio_vllm.mock.content import LogprobModel, pool
from trio_vllm.mock.request import Extras, Request
from trio_vllm.protocol import EngineCoreEvent, EngineCoreOutput, FinishReason, PrefillStats

if TYPE_CHECKING:
    from trio_vllm.mock.config import MockEngineConfig
    from trio_vllm.mock.content import TokenSource
    from trio_vllm.mock.encoding import Draft


_NO_EXTRAS = Extras()


class PlainBatch:
    """The requests of one engine on the plain path."""

    def __init__(self, config: MockEngineConfig, source: TokenSource) -> None:
        self._source = source
        self._vocab_size = config.vocab_size
        self._chunk_size = config.output_token_chunk_size
        self._embedding_size = config.embedding_size
        self._logprobs = LogprobModel(config.vocab_size)
        self._members: dict[str, Request] = {}
        self.tokens_made = 0

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self._members)

    def step(self, joining: Iterable[Request], draft_for: Callable[[int], Draft]) -> list[Request]:
        """The next step; who has finished."""
        for request in joining:
            self._members[request.request_id] = request
        # A real engine computes log probabilities for the whole batch at once: all are as wide as
        # the widest.
        width = max(map(self._width, self._members.values()), default=0)
        finished: list[Request] = []
        for request in self._members.values():
            output = self._output(request, width)
            draft = draft_for(request.client_index)
            draft.outputs.append(output)
            self.tokens_made += len(output.new_token_ids)
            if output.finish_reason is not None:
                draft.finished.append(request.request_id)
                finished.append(request)
        for request in finished:
            del self._members[request.request_id]
        return finished

    def remove(self, request: Request) -> None:
        """Take out a member before its end."""
        del self._members[request.request_id]

    def _width(self, request: Request) -> int:
        extras = request.extras or _NO_EXTRAS
        return self._logprobs.width(extras.logprobs, extras.logprob_token_ids)

    def _output(self, request: Request, width: int) -> EngineCoreOutput:
        extras = request.extras or _NO_EXTRAS
        output = EngineCoreOutput(request.request_id, trace_headers=extras.trace_headers)
        if extras.pooling is None:
            self._give_tokens(output, request, extras, width)
        else:
            output.pooling_output = pool(
                request.key, extras.pooling, request.prompt_len, self._embedding_size
            )
            output.finish_reason = FinishReason.STOP
        if request.events:
            output.events = [EngineCoreEvent(kind, time) for kind, time in request.events]
            request.events = None
        if not request.is_prefilled:
            self._give_prefill(output, request, extras)
            request.is_prefilled = True
        return output

    def _give_tokens(
        self, output: EngineCoreOutput, request: Request, extras: Extras, width: int
    ) -> None:
        first = request.emitted
        count = min(self._chunk_size, request.end - first)
        tokens = self._source.draw(request.key, first, count)
        if first < extras.unmasked_from and extras.masked_token_ids:
            tokens = _unmasked(tokens, first, extras, self._vocab_size)
        output.new_token_ids = tokens
        if self._width(request):
            output.new_logprobs = self._logprobs.sample(
                request.key, first, tokens, width, extras.logprob_token_ids
            )
        request.emitted += count
        if request.emitted == request.end:
            output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason

    def _give_prefill(self, output: EngineCoreOutput, request: Request, extras: Extras) -> None:
        count = request.prompt_len
        output.prefill_stats = PrefillStats(num_prompt_tokens=count, num_computed_tokens=count)
        if extras.prompt_logprobs is not None:
            output.new_prompt_logprobs_tensors = self._logprobs.prompt(
                request.key, extras.prompt_token_ids, extras.prompt_logprobs
            )
        if extras.prompt_logprob_token_ids is not None:
            output.prompt_token_id_logprobs = self._logprobs.prompt_token_ids(
                request.key, extras.prompt_token_ids, extras.prompt_logprob_token_ids
            )


def _unmasked(tokens: list[int], first: int, extras: Extras, vocab_size: int) -> list[int]:
    """The tokens, those that must not come yet replaced by the next that may."""
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
