"""`Answers` say what a request is answered with: which tokens, and where they end by themselves.

Most requests get tokens drawn by a key (`TokenSource`), which many can be at once. The others have
their `RequestTokens`, an object that gives those of one request. Either way the same tokens come
whenever they are asked for, so that nothing depends on how they are cut into steps.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

import attrs

from trio_vllm.mock.content import request_key
from trio_vllm.mock.spread import Spread
from trio_vllm.protocol import EngineCoreRequest, EngineCoreSamplingParams, FinishReason
from trio_vllm.values import define, frozen

_LENGTH = 1 << 43
"""The position at which the length of a request is drawn."""
MAX_TOKEN = 2**31 - 1
"""The largest token that log probabilities can name."""


class RequestTokens(Protocol):
    """The tokens of one request."""

    def draw(self, first: int, count: int) -> list[int]:
        """The ``count`` tokens from position ``first`` on."""
        ...


@frozen
class GivenTokens:
    """Tokens that are known beforehand; behind the last one they begin again."""

    tokens: Sequence[int]
    start: int = 0
    """The position of the first one."""

    def draw(self, first: int, count: int) -> list[int]:
        """The ``count`` tokens from position ``first`` on."""
        at, size = first - self.start, len(self.tokens)
        if at + count <= size:
            return list(self.tokens[at : at + count])
        return [self.tokens[place % size] for place in range(at, at + count)]


@frozen
class Ending:
    """Where an answer ends if nothing ends it earlier."""

    length: int
    """In tokens, the last one included."""
    reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None
    last_token: int | None = None
    """In the place of what would be the last token."""
    is_fixed: bool = False
    """Whether nothing can follow, so that it is the same with ``min_tokens``."""

    def after(self, min_tokens: int) -> Ending:
        """The ending of a request that is not to stop before it has so many tokens."""
        is_later = self.length > min_tokens
        if is_later or self.is_fixed or self.reason is not FinishReason.STOP:
            return self
        return attrs.evolve(self, length=min_tokens + 1)


def stopping(params: EngineCoreSamplingParams, length: int, *, eos: str = "replaces") -> Ending:
    """The end of a text of ``length`` tokens.

    Args:
      params: Of the request, which names the end-of-text token, if it has one.
      length: How many tokens there are.
      eos: Whether that token ``replaces`` the last of them, or ``follows`` it.
    """
    token = params.eos_token_id
    follows = token is not None and eos == "follows"
    return Ending(length + follows, last_token=token)


@define
class Answer:
    """What one request is answered with."""

    key: int
    """Draws tokens, if none are given, and in any case log probabilities and times."""
    given: RequestTokens | None = None
    ending: Ending | None = None
    fault: str | None = None
    """Why it is refused instead."""


class Answers(Protocol):
    """Says what each request is answered with."""

    def answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        """The answer to a request whose first token will be that of position ``emitted``."""
        ...


@frozen
class RandomAnswers:
    """Tokens that depend on the seed, the engine's index and the request id."""

    _seed: int
    _engine_index: int
    _lengths: Spread

    def key(self, wire: EngineCoreRequest) -> int:
        """What the tokens of a request depend on."""
        return request_key(self._seed, self._engine_index, wire.request_id)

    def answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        """Drawn tokens, up to the request's own limit or of a drawn length."""
        key = self.key(wire)
        params = wire.sampling_params
        if not self._lengths.mean or params is None or params.eos_token_id is None:
            return Answer(key)
        length = max(1, round(self._lengths.draw(key, _LENGTH + emitted)))
        return Answer(key, ending=stopping(params, length))


@frozen
class PromptAnswers(RandomAnswers):
    """Tokens that depend on the prompt and, unless a request is greedy, on its sampling seed.

    A request that is neither greedy nor has a seed gets tokens of its own, as from a real engine.
    """

    def key(self, wire: EngineCoreRequest) -> int:
        """What the tokens of a request depend on: the same on each engine."""
        params, digest = wire.sampling_params, hashlib.blake2b(digest_size=8)
        for part in (str(self._seed).encode(), *_prompt_parts(wire)):
            digest.update(len(part).to_bytes(8, "little") + part)
        if params is not None and params.temperature:
            chance = wire.request_id if params.seed is None else params.seed
            digest.update(repr(chance).encode())
        return int.from_bytes(digest.digest(), "little")


def _prompt_parts(wire: EngineCoreRequest) -> list[bytes]:
    """All that makes a prompt what it is."""
    lora = "" if wire.lora_request is None else wire.lora_request.lora_name
    media = [str(feature.identifier).encode() for feature in wire.mm_features or ()]
    embeds = b"" if wire.prompt_embeds is None else bytes(wire.prompt_embeds.data)
    tokens = array("Q", wire.prompt_token_ids or ()).tobytes()  # twice as fast as by numpy
    return [tokens, embeds, lora.encode(), *media]


@frozen
class EchoAnswers:
    """The tokens of the prompt in their order, and the end; a prompt of embeddings gets others."""

    _others: RandomAnswers

    def answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        """The prompt."""
        params, prompt = wire.sampling_params, wire.prompt_token_ids
        if params is None or not prompt:
            return self._others.answer(wire, emitted)
        if max(prompt) > MAX_TOKEN:
            prompt = [min(token, MAX_TOKEN) for token in prompt]
        given = GivenTokens(prompt, emitted)
        ending = stopping(params, len(prompt), eos="follows")
        return Answer(self._others.key(wire), given, ending)
