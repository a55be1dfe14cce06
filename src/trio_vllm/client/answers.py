"""`answer_checks`: what comes back is checked against what a request asked for.

An engine may answer in good form and yet not what was asked: it takes the log probabilities of a step
in the way of one of its requests, or has fewer of the prompt than the prompt is long. Such an answer
is a `DecodeError` of its request. Most requests ask for tokens alone and have no such checks; where
there are some they look at an array once per output, not at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np

from trio_vllm.client.field_errors import invalid
from trio_vllm.client.input_processing import RequestLimits
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    FinishReason,
    Logprobs,
    PoolingParams,
    Tensor,
)
from trio_vllm.values import define, frozen

COMPLETE_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})
"""How a request ends whose answer has to be whole."""


class AnswerCheck(Protocol):
    """Checks the outputs of one request, one after the other."""

    def check(self, output: EngineCoreOutput) -> None:
        """Raise `CodecError` if an output, after those before it, is not what was asked for."""
        ...


def answer_checks(request: EngineCoreRequest, limits: RequestLimits) -> Sequence[AnswerCheck]:
    """The checks for a request that was accepted; none for one that asks for tokens alone."""
    params = request.sampling_params
    if params is None:
        pooling = request.pooling_params
        return () if pooling is None else (PooledCheck.of(pooling, limits),)
    checks: list[AnswerCheck] = []
    if params.logprobs is not None or params.logprob_token_ids:  # an engine takes no ids for none
        checks.append(LogprobsCheck.of(params, limits))
    if params.prompt_logprobs is not None:
        checks.append(PromptLogprobsCheck.of(request, params.prompt_logprobs, limits))
    if params.prompt_logprob_token_ids is not None:
        checks.append(PromptTokenIdLogprobsCheck(params.prompt_logprob_token_ids.shape))
    return checks or ()


def logprob_columns(
    count: int | None, token_ids: Sequence[int] | None = None, *, vocab_size: int | None = None
) -> int | None:
    """How many columns were asked for, that of the token itself too; None is all there are."""
    if count is None:
        count = 0 if token_ids is None else len(token_ids)
    if count < 0:
        return None if vocab_size is None else vocab_size + 1
    return count + 1


# Of the tokens that were sampled ------------------------------------------------------------------


@frozen
class LogprobsCheck:
    """Each output with tokens has their log probabilities, in so many columns at least."""

    columns: int
    is_ranked: bool
    """Whether there are columns after the first, of the most probable tokens."""

    @classmethod
    def of(cls, params: EngineCoreSamplingParams, limits: RequestLimits) -> LogprobsCheck:
        """The check for certain parameters."""
        columns = logprob_columns(
            params.logprobs, params.logprob_token_ids, vocab_size=limits.vocab_size
        )
        return cls(columns or 1, params.logprobs != 0 and not params.logprob_token_ids)

    def check(self, output: EngineCoreOutput) -> None:
        """Check the sample log probabilities of an output."""
        self.check_tokens(len(output.new_token_ids), output.new_logprobs)

    def check_tokens(self, token_count: int, logprobs: Logprobs | None) -> None:
        """Check the log probabilities of some tokens, which may have come with several outputs."""
        rows = 0 if logprobs is None else len(logprobs)
        if rows != token_count:
            raise invalid("new_logprobs", f"has {rows} rows for {token_count} tokens")
        if logprobs is not None:
            _check_columns("new_logprobs", logprobs, self.columns)
            if self.is_ranked:
                _check_ranked(logprobs)


def _check_ranked(logprobs: Logprobs) -> None:
    """Refuse rows that were padded where the most probable token should be.

    vLLM up to 0.33 fills them so while another request of the step has ``logprob_token_ids``. No
    most probable token has the probability 0.
    """
    values = logprobs.logprobs
    if values.shape[1] > 1 and bool(np.isneginf(values[:, 1]).any()):
        reason = "has padding in place of the most probable tokens"
        raise invalid("new_logprobs", reason)


def _check_columns(field: str, logprobs: Logprobs, columns: int) -> None:
    got = logprobs.token_ids.shape[1]
    if got < columns and len(logprobs):
        raise invalid(field, f"has {got} columns, but {columns} were asked for")


# Of the prompt ------------------------------------------------------------------------------------


@define
class PromptLogprobsCheck:
    """There is one row for each prompt token but the first, over all outputs."""

    columns: int
    rows: int | None
    """None if it is not known how many there should be."""
    may_be_missing: bool = False
    """Whether an engine may well have none, which has not computed the prompt."""
    _count: int = attrs.field(default=0, init=False)

    @classmethod
    def of(
        cls, request: EngineCoreRequest, count: int, limits: RequestLimits
    ) -> PromptLogprobsCheck:
        """The check for a request that asks for so many columns besides the first."""
        columns = logprob_columns(count, vocab_size=limits.vocab_size) or 1
        token_ids = request.prompt_token_ids
        # Of embeddings there are none; a session's prompt grows with each chunk.
        if token_ids is None or request.resumable:
            return cls(columns, None)
        params = request.sampling_params
        transfer = None if params is None else params.kv_transfer_params
        return cls(columns, len(token_ids) - 1, may_be_missing=transfer is not None)

    def check(self, output: EngineCoreOutput) -> None:
        """Count the rows; at the end they have to add up."""
        logprobs = output.new_prompt_logprobs_tensors
        if logprobs is not None:
            _check_columns("new_prompt_logprobs_tensors", logprobs, self.columns)
            self._count += len(logprobs)
        if self.rows is None or self._count == self.rows:
            return
        is_missing = output.finish_reason in COMPLETE_ENDS
        if self._count > self.rows or (is_missing and (self._count or not self.may_be_missing)):
            reason = (
                f"has {self._count} rows, but a prompt of {self.rows + 1} tokens has {self.rows}"
            )
            raise invalid("new_prompt_logprobs_tensors", reason)


@define
class PromptTokenIdLogprobsCheck:
    """There is one log probability for each id that was named."""

    shape: tuple[int, ...]
    _count: int = attrs.field(default=0, init=False)

    def check(self, output: EngineCoreOutput) -> None:
        """Count the rows; at the end they have to add up."""
        values = output.prompt_token_id_logprobs
        if values is not None:
            if values.ndim != 2 or values.shape[1:] != self.shape[1:]:
                self._refuse(f"has the shape {list(values.shape)}")
            self._count += len(values)
        if self._count > self.shape[0] or (
            self._count < self.shape[0] and output.finish_reason in COMPLETE_ENDS
        ):
            self._refuse(f"has {self._count} rows")

    def _refuse(self, what: str) -> None:
        reason = f"{what}, but ids of the shape {list(self.shape)} were named"
        raise invalid("prompt_token_id_logprobs", reason)


# Of a prompt that is pooled -----------------------------------------------------------------------


@define
class PooledCheck:
    """The end has what the prompt was pooled to, and vectors are as long as they should be."""

    size: int | None
    """The last of the array's dimensions; None if it is not known."""
    _has_come: bool = attrs.field(default=False, init=False)

    @classmethod
    def of(cls, params: PoolingParams, limits: RequestLimits) -> PooledCheck:
        """The check for certain parameters."""
        if params.task not in ("embed", "token_embed"):
            return cls(None)
        if params.late_interaction_params is not None:
            return cls(None)  # a score, or nothing of interest
        return cls(params.dimensions or limits.embedding_size or limits.hidden_size)

    def check(self, output: EngineCoreOutput) -> None:
        """Check the shape of the array, if there is one."""
        pooled = output.pooling_output
        if pooled is not None:
            self._check_shape(pooled)
            self._has_come = True
        elif not self._has_come and output.finish_reason in COMPLETE_ENDS:
            raise invalid("pooling_output", "is missing, though the request has ended well")

    def _check_shape(self, pooled: Tensor) -> None:
        if self.size is not None and pooled.shape[-1:] != (self.size,):
            reason = (
                f"has the shape {list(pooled.shape)}, but vectors of {self.size} were asked for"
            )
            raise invalid("pooling_output", reason)
