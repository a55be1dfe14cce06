"""What a mock engine has done, for logs and summaries."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

import attrs

from trio_vllm.protocol import FinishReason

if TYPE_CHECKING:
    from trio_vllm.mock.request import Request

# MERGED mock/_log: Log lines for operators.


@attrs.frozen
class RequestStarted:
    """A request was taken."""

    request_id: str
    prompt_len: int
    max_tokens: int
    """How many tokens it can get, whatever it asked for."""
    chunk_size: int


@attrs.frozen
class RequestFinished:
    """A request is over."""

    request_id: str
    prompt_len: int
    output_tokens: int
    finish_reason: FinishReason


@attrs.frozen
class RequestRefused:
    """A request got no token, because of what it is; ``answered`` if its client was told."""

    request_id: str
    reason: str
    answered: bool = True


@attrs.frozen
class MessageIgnored:
    """A message could not be read, or is not for this engine."""

    reason: str


JournalEntry = RequestStarted | RequestFinished | RequestRefused | MessageIgnored


@attrs.define
class Summary:
    """Counts since the start; add up those of several engines."""

    requests: int = 0
    """Taken, whether or not they have finished."""
    tokens: int = 0
    finished: int = 0
    """Came to the end that they were meant to have."""
    aborted: int = 0
    errors: int = 0
    """Requests that were refused, and messages that could not be read."""

    begin: float = math.inf
    """When the first request was taken."""
    end: float = -math.inf
    """When the last step was made."""

    @property
    def tokens_per_second(self) -> float:
        """From the first request to the last step."""
        return self.tokens / (self.end - self.begin) if self.end > self.begin else 0.0

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
            finished=self.finished + other.finished,
            aborted=self.aborted + other.aborted,
            errors=self.errors + other.errors,
            begin=min(self.begin, other.begin),
            end=max(self.end, other.end),
        )


@attrs.define
class Journal:
    """Notes of one engine, until somebody takes them."""

    _log_requests: bool
    """Whether requests that start and end are noted one by one; faults always are."""
    summary: Summary = attrs.field(factory=Summary, init=False)
    _entries: list[JournalEntry] = attrs.field(factory=list, init=False)

    def take(self) -> list[JournalEntry]:
        """Give up all entries."""
        entries = self._entries
        if entries:
            self._entries = []
        return entries

    def started(self, request: Request, chunk_size: int, now: float) -> None:
        """A request was taken."""
        if not self.summary.requests:
            self.summary.begin = now
        self.summary.requests += 1
        if self._log_requests:
            left = request.end - request.emitted
            entry = RequestStarted(request.request_id, request.prompt_len, left, chunk_size)
            self._entries.append(entry)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request is over; what it has ``emitted`` is up to date."""
        if reason is FinishReason.ABORT:
            self.summary.aborted += 1
        else:
            self.summary.finished += 1
        if self._log_requests:
            entry = RequestFinished(request.request_id, request.prompt_len, request.emitted, reason)
            self._entries.append(entry)

    def refused(self, request_id: str, reason: str, *, answered: bool = True) -> None:
        """A request was not taken."""
        self.summary.errors += 1
        self._entries.append(RequestRefused(request_id, reason, answered))

    def ignored(self, reason: str) -> None:
        """A message led to nothing."""
        self.summary.errors += 1
        self._entries.append(MessageIgnored(reason))


log = logging.getLogger("trio_vllm.mock")


def log_entries(engine_index: int, entries: Iterable[JournalEntry]) -> None:
    """A line for each: requests that come and go at info level, faults as warnings."""
    for entry in entries:
        match entry:
            case RequestStarted():
                log.info(
                    "engine %d: request started request_id=%s prompt_len=%d max_tokens=%d"
                    " chunk_size=%d",
                    engine_index,
                    shown(entry.request_id),
                    entry.prompt_len,
                    entry.max_tokens,
                    entry.chunk_size,
                )
            case RequestFinished():
                aborted = entry.finish_reason is FinishReason.ABORT
                log.info(
                    "engine %d: request %s request_id=%s prompt_len=%d output_tokens=%d"
                    " finish_reason=%s",
                    engine_index,
                    "aborted" if aborted else "finished",
                    shown(entry.request_id),
                    entry.prompt_len,
                    entry.output_tokens,
                    entry.finish_reason,
                )
            case RequestRefused():
                log.warning(
                    "engine %d: request refused request_id=%s answered=%s: %s",
                    engine_index,
                    shown(entry.request_id),
                    "yes" if entry.answered else "no",
                    entry.reason,
                )
            case MessageIgnored():
                log.warning("engine %d: message ignored: %s", engine_index, entry.reason)
            case _:
                assert_never(entry)


def shown(request_id: str) -> str:
    """A request id that keeps to its place in a line, whatever a frontend made of it."""
    text = request_id if len(request_id) <= 200 else f"{request_id[:200]}..."
    return text if text.isprintable() and " " not in text and text else repr(text)
