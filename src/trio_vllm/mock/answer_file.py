"""`FileAnswers`: answers that stand in a file of JSON lines, found by request id, prompt or number."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from trio_vllm.errors import ConfigurationError
from trio_vllm.mock.answers import (
    MAX_TOKEN,
    Answer,
    Ending,
    GivenTokens,
    RandomAnswers,
    stopping,
)
from trio_vllm.protocol import (
    EngineCoreRequest,
    EngineCoreSamplingParams,
    FinishReason,
    is_vocabulary_question,
)
from trio_vllm.values import frozen

SELECTORS = ("id", "prompt", "index")
CONTENTS = ("tokens", "text", "length")
_KEYS = {*SELECTORS, *CONTENTS, "finish_reason", "stop_reason"}
_REASONS = {str(reason): reason for reason in FinishReason}


@frozen(kw_only=True)
class AnswerLine:
    """One line: which request it is for, and what that gets."""

    id: str | None = None
    """The request's, or what stands before a hyphen in it, to which frontends append more."""
    prompt: Sequence[int] | None = None
    """The first tokens of the prompt."""
    index: int | None = None
    """How many requests came to the engine before."""
    tokens: Sequence[int] | None = None
    text: str | None = None
    """In the place of ``tokens``."""
    length: int | None = None
    """How many tokens are drawn, if none are given."""
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None

    def ending(self, params: EngineCoreSamplingParams) -> Ending:
        """Where the answer ends; an end-of-text token follows given tokens, as from a model."""
        count = len(self.tokens) if self.tokens is not None else self.length or 0
        if self.finish_reason is FinishReason.STOP and self.stop_reason is None:
            return stopping(params, count, eos="replaces" if self.tokens is None else "follows")
        return Ending(count, self.finish_reason, self.stop_reason)


def read_answer_file(path: str | Path) -> Sequence[AnswerLine]:
    """The lines of a file; empty ones do not count.

    A file that has not changed is read once, whatever the number of engines.

    Raises:
      ConfigurationError: It cannot be read, or one of its lines; says which.
    """
    try:
        status = Path(path).stat()
        return _read(str(path), status.st_mtime_ns, status.st_size)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None


@functools.lru_cache(maxsize=1)
def _read(path: str, *_: int) -> Sequence[AnswerLine]:
    text = Path(path).read_text(encoding="utf-8")
    lines: list[AnswerLine] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            lines.append(parse_line(line, len(lines)))
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise ConfigurationError(f"{path} has no line")
    return lines


def parse_line(text: str, index: int) -> AnswerLine:
    """One line; without a selector it is for the request with this ``index``.

    Raises:
      ValueError: It is no such line.
    """
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004  a fault of the text
    if unknown := given.keys() - _KEYS:
        raise ValueError(f"unknown key {min(unknown)!r}")
    selectors = [name for name in SELECTORS if name in given]
    if len(selectors) > 1:
        raise ValueError(f"{selectors[0]} and {selectors[1]} exclude each other")
    if len(given.keys() & {*CONTENTS}) != 1:
        raise ValueError(f"takes one of {', '.join(CONTENTS)}")
    for name, value in given.items():
        if (fault := _fault(name, value)) is not None:
            raise ValueError(f"{name} must be {fault}, got {value!r}")
    if not selectors:
        given["index"] = index
    reason = _REASONS[given.pop("finish_reason", "stop")]
    return AnswerLine(**given, finish_reason=reason)


def _fault(name: str, value: Any) -> str | None:
    """What a value must be and is not."""
    match name:
        case "tokens" | "prompt":
            is_fine = isinstance(value, list) and value and all(map(_is_token, value))
            return None if is_fine else f"token ids from 0 to {MAX_TOKEN}"
        case "length" | "index":
            least = 1 if name == "length" else 0
            is_fine = type(value) is int and value >= least
            return None if is_fine else f"an integer of at least {least}"
        case "finish_reason":
            is_fine = isinstance(value, str) and value in _REASONS
            return None if is_fine else "one of " + ", ".join(_REASONS)
        case "stop_reason":
            is_fine = value is None or isinstance(value, str) or _is_token(value)
            return None if is_fine else "a token id, a text or null"
        case _:
            return None if isinstance(value, str) and value else "a text"


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN


def tokenized(
    lines: Iterable[AnswerLine], encode: Callable[[str], Sequence[int]]
) -> list[AnswerLine]:
    """The lines with tokens instead of texts."""
    return [
        line if line.text is None else attrs.evolve(line, text=None, tokens=encode(line.text))
        for line in lines
    ]


class FileAnswers:
    """Answers from lines: by request id, else by the longest prompt, else by number; else drawn."""

    def __init__(self, lines: Sequence[AnswerLine], others: RandomAnswers) -> None:
        self._others = others
        self._count = 0  # of the requests that came
        self._by_id = {line.id: line for line in lines if line.id is not None}
        self._by_index = {line.index: line for line in lines if line.index is not None}
        with_prompt = [line for line in lines if line.prompt is not None]
        self._by_prompt = {tuple(line.prompt or ()): line for line in with_prompt}
        lengths = {len(prompt) for prompt in self._by_prompt}
        self._prompt_lengths = sorted(lengths, reverse=True)

    def answer(self, wire: EngineCoreRequest, emitted: int) -> Answer:
        """What stands in the file, if there is a line for the request.

        What a client asks of its own accord is for no line, and does not count.
        """
        if is_vocabulary_question(wire):
            return self._others.answer(wire, emitted)
        index, params = self._count, wire.sampling_params
        self._count += 1
        line = self._find_id(wire.request_id) or self._find_prompt(wire.prompt_token_ids or ())
        line = line or self._by_index.get(index)
        if line is None or params is None:
            return self._others.answer(wire, emitted)
        given = None if line.tokens is None else GivenTokens(line.tokens, emitted)
        return Answer(self._others.key(wire), given, line.ending(params))

    def _find_id(self, request_id: str) -> AnswerLine | None:
        """The line of this id, or of the longest beginning of it that a hyphen follows."""
        if not self._by_id:
            return None
        start: str = request_id
        while start not in self._by_id:
            start, hyphen, _ = start.rpartition("-")
            if not hyphen:
                return None
        return self._by_id[start]

    def _find_prompt(self, prompt: Sequence[int]) -> AnswerLine | None:
        for length in self._prompt_lengths:
            if length <= len(prompt):
                line = self._by_prompt.get(tuple(prompt[:length]))
                if line is not None:
                    return line
        return None
