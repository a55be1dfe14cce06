"""`StructuredAnswers`: tokens that match what a request's structured outputs ask for.

A grammar leaves many tokens to choose from. The choice is drawn, from words where the grammar allows
them, and leads to an end: the longer an answer gets, the more likely is what closes a string or an
object. Needs llguidance, the extra ``structured``; vLLM's guidance backend masks tokens with it, too.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from trio_vllm.errors import ConfigurationError
from trio_vllm.mock.answers import Answer, Ending, GivenTokens, stopping
from trio_vllm.mock.spread import share_at
from trio_vllm.mock.structural_tags import TagGrammar
from trio_vllm.protocol import (
    EngineCoreRequest,
    EngineCoreSamplingParams,
    FinishReason,
    StructuredOutputsParams,
)
from trio_vllm.values import define, frozen

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.bool_]

MAX_TOKENS = 2048
"""How long a structured output becomes; it is made when its request comes."""
PATIENT, IMPATIENT = 8, 64
"""Tokens before what closes something becomes likely, and before it is certain."""
CLOSERS = ("}", "]", '"', ",", ")", ">", "'")
"""The sooner one stands here, the sooner it is taken; in free text, as within a string, quotes are."""

_CHOICE = 1 << 45
"""The position from which on choices are drawn."""
_WORD = re.compile(r" ?[A-Za-z0-9]+")
_TEXT = re.compile(r"\S.*|.*\S", re.DOTALL)


class Drawn(Protocol):
    """Answers that do not look at structured outputs."""

    def answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        """The answer to a request whose first token will be that of position ``emitted``."""
        ...


class Vocabulary:
    """The tokens of a model, by what they are good for.

    Args:
      tokenizer_json: The text of a ``tokenizer.json``.

    Raises:
      ValueError: It is none.
    """

    def __init__(self, tokenizer_json: str) -> None:
        import llguidance  # noqa: PLC0415  an extra

        self.tokenizer: LLTokenizer = llguidance.LLTokenizer(tokenizer_json)
        size = self.tokenizer.vocab_size
        texts = [self.tokenizer.decode_str([token]) for token in range(size)]
        # What llguidance takes for the end of a text, it allows where the text may end.
        ends = {*self.tokenizer.eos_tokens}
        special = [token in ends or self.tokenizer.is_special_token(token) for token in range(size)]
        self.words = self._mask(map(_WORD.fullmatch, texts))
        self.text = self._mask(map(_TEXT.fullmatch, texts))
        self.ordinary = ~self._mask(special)
        self.no_end = ~self._mask(token in ends for token in range(size))
        self.special_tokens = [texts[token] for token in range(size) if special[token]]
        ids = {text: token for token, text in enumerate(texts) if not special[token]}
        self._closers = [ids[text] for text in CLOSERS if text in ids]
        quotes = [ids[text] for text in "\"'" if text in ids]
        self._closers_of_text = [*quotes, *self._closers]
        self._size = size

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; what looks like a special token is one."""
        tokens: list[int] = self.tokenizer.tokenize_str(text, parse_special=True)
        return tokens

    def closers(self, allowed: Mask) -> list[int]:
        """What closes something, among the tokens that are allowed."""
        is_text = 2 * np.count_nonzero(allowed) > self._size
        closers = self._closers_of_text if is_text else self._closers
        return [token for token in closers if allowed[token]]

    @staticmethod
    def _mask(values: Any) -> Mask:
        return np.array([bool(value) for value in values], np.bool_)


@functools.cache
def load_vocabulary(folder: str) -> Vocabulary:
    """The vocabulary of a model's folder for ``MockEngineConfig.tokenizer``.

    It is loaded once in a process, since that takes seconds. `serve_mock_engines` does so at its start.

    Raises:
      ConfigurationError: There is no ``tokenizer.json`` that can be read.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        return Vocabulary(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tokenizer {path} cannot be read: {error}") from None


def grammar_of(params: StructuredOutputsParams, special_tokens: Iterable[str] = ()) -> str:
    """A grammar as llguidance takes it.

    Args:
      params: With one constraint.
      special_tokens: The texts of those that structural tags may have.

    Raises:
      ValueError: There is none in the parameters, or no such one as guidance knows.
    """
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415  an extra

    is_flexible = not params.disable_any_whitespace
    if params.structural_tag is not None:
        tags = TagGrammar(special_tokens, whitespace_flexible=is_flexible)
        return tags.grammar(params.structural_tag)
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else params.json
        return _json_grammar(schema, whitespace_flexible=is_flexible)
    grammar: str
    if params.regex is not None:
        grammar = LLMatcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        grammar = grammar_from("choice", json.dumps(list(params.choice)))
    elif params.grammar is not None:
        grammar = grammar_from("grammar", params.grammar)
    else:
        raise ValueError("there is no constraint")
    return grammar


def _json_grammar(schema: Any, *, whitespace_flexible: bool) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415  an extra

    text = schema if isinstance(schema, str) else json.dumps(schema)
    grammar: str = LLMatcher.grammar_from_json_schema(
        text, defaults={"whitespace_flexible": whitespace_flexible}
    )
    return grammar


@define
class Walk:
    """The way through a grammar, token by token."""

    _vocabulary: Vocabulary
    _matcher: LLMatcher
    _key: int
    tokens: list[int] = attrs.field(factory=list)

    def go(self, limit: int) -> bool:
        """Choose tokens until the grammar is satisfied, or there are ``limit``; which of both."""
        while len(self.tokens) < limit:
            if self._matcher.is_stopped() or self._may_end():
                return True
            token = self._choose()
            if token is None:
                break
            self.take([token])
        return bool(self._matcher.is_stopped() or self._matcher.is_accepting())

    def take(self, tokens: list[int]) -> None:
        """Go on with these tokens.

        Raises:
          ValueError: The grammar does not allow them.
        """
        if not self._matcher.consume_tokens(tokens):
            raise ValueError(self._matcher.get_error())
        self.tokens += tokens

    def _draw(self, purpose: int) -> float:
        return share_at(self._key, _CHOICE + 4 * len(self.tokens) + purpose)

    def _may_end(self) -> bool:
        """Whether to end here: with something said, half of the times that it is possible."""
        return bool(self.tokens) and self._matcher.is_accepting() and self._is_time(0.5)

    def _is_time(self, least: float) -> bool:
        made = len(self.tokens)
        urgency = (made - PATIENT) / (IMPATIENT - PATIENT)
        return self._draw(0) < max(least, urgency)

    def _choose(self) -> int | None:
        """One of the tokens that the grammar allows."""
        vocabulary = self._vocabulary
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: vocabulary.ordinary.size] > 0
        special = np.flatnonzero(allowed & ~vocabulary.ordinary & vocabulary.no_end)
        allowed &= vocabulary.ordinary
        closers = vocabulary.closers(allowed)
        if closers and self._is_time(0.3):
            return closers[0]
        others = allowed & vocabulary.text & ~vocabulary.words
        kinds = [allowed & vocabulary.words, others, allowed]
        if not closers and self._draw(1) < 0.25:  # what ends this may be no closer
            kinds = [others, *kinds]
        for kind in kinds:
            found = np.flatnonzero(kind)
            if found.size:
                return int(found[int(self._draw(2) * found.size)])
        return int(special[0]) if special.size else None


@frozen
class StructuredAnswers:
    """What matches a request's structured outputs; others are answered as they would be without."""

    _vocabulary: Vocabulary
    _others: Drawn
    _keeps_given: bool = False
    """Whether tokens that are given, in a file, are not to be replaced."""

    def answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        """The answer, whose end the request's parameters may cut off."""
        answer, params = self._others.answer(wire, emitted), wire.sampling_params
        if params is None or params.structured_outputs is None:
            return answer
        if self._keeps_given and answer.given is not None:
            return answer
        limit = min(params.max_tokens or 0, MAX_TOKENS)
        try:
            tokens, is_whole = self._make(params.structured_outputs, answer.key, limit)
        except ValueError as error:
            reason = " ".join(str(error).split())
            return attrs.evolve(answer, fault=f"structured_outputs: {reason}")
        ending = _ending(params, len(tokens), is_whole=is_whole)
        return Answer(answer.key, GivenTokens(tokens or [0], emitted), ending)

    def _make(
        self, params: StructuredOutputsParams, key: int, limit: int
    ) -> tuple[list[int], bool]:
        from llguidance import LLMatcher  # noqa: PLC0415  an extra

        grammar = grammar_of(params, self._vocabulary.special_tokens)
        matcher = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0)
        if error := matcher.get_error():
            raise ValueError(error)
        walk = Walk(self._vocabulary, matcher, key)
        is_whole = walk.go(limit)
        return walk.tokens, is_whole


def _ending(params: EngineCoreSamplingParams, count: int, *, is_whole: bool) -> Ending:
    if is_whole:
        return attrs.evolve(stopping(params, count, eos="follows"), is_fixed=True)
    return Ending(count, FinishReason.LENGTH)
