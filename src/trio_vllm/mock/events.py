"""`EventLog` and `Summary`: what a mock engine has done, for log lines and the command's last one."""

from __future__ import annotations

import math
from collections import Counter

import attrs

from trio_vllm.mock.deaths import Death
from trio_vllm.mock.request import Request
from trio_vllm.protocol import FinishReason
from trio_vllm.values import define, frozen


@frozen
class RequestStarted:
    """A request was taken."""

    request_id: str
    prompt_len: int
    max_tokens: int
    """How many tokens it can get, whatever it asked for."""
    chunk_size: int


@frozen
class RequestFinished:
    """A request is over."""

    request_id: str
    prompt_len: int
    output_tokens: int
    finish_reason: FinishReason


@frozen
class RequestRefused:
    """A request got no token, because of what it is; ``answered`` if its client was told."""

    request_id: str
    reason: str
    answered: bool = True


@frozen
class MessageIgnored:
    """A message could not be read, or is not for this engine."""

    reason: str


@frozen
class PaceLost:
    """The machine is too slow for the times that are asked for."""

    seconds: float
    """How far behind it fell since the last entry of this kind."""


@frozen
class EngineDied:
    """The engine goes on without one of its threads, or not at all."""

    death: Death


LogEntry = (
    RequestStarted | RequestFinished | RequestRefused | MessageIgnored | PaceLost | EngineDied
)

_NAMES = {reason: str(reason) for reason in FinishReason}

PACE_INTERVAL = 10.0
"""Seconds between two entries about a lost pace."""


@define
class ScheduleCounts:
    """What frontends count of a schedule, when the engine tells them."""

    prompt_tokens: int = 0
    """Of requests that have their first token."""
    preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens that were looked for in the prefix cache."""
    prefix_cache_hits: int = 0
    """Those that were found there."""


@define
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

    prompt_tokens: int = 0
    """Of the requests taken."""
    tokens_asked: int = 0
    """That the requests taken could get."""
    seconds_behind: float = 0.0
    """Time that steps came later than was asked for, because the machine is too slow."""
    finish_reasons: dict[str, int] = attrs.field(factory=dict)
    """Requests that are over, by the reason."""
    prefilled_tokens: int = 0
    """Prompt tokens of the requests that have their first token."""
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    def take_schedule(self, counts: ScheduleCounts | None) -> None:
        """Note what a schedule has done so far; without one a prompt is prefilled at once."""
        if counts is None:
            self.prefilled_tokens = self.prompt_tokens
            return
        self.prefilled_tokens = counts.prompt_tokens
        self.preemptions = counts.preemptions
        self.prefix_cache_queries = counts.prefix_cache_queries
        self.prefix_cache_hits = counts.prefix_cache_hits

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
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            tokens_asked=self.tokens_asked + other.tokens_asked,
            seconds_behind=self.seconds_behind + other.seconds_behind,
            finish_reasons=dict(Counter(self.finish_reasons) + Counter(other.finish_reasons)),
            prefilled_tokens=self.prefilled_tokens + other.prefilled_tokens,
            preemptions=self.preemptions + other.preemptions,
            prefix_cache_queries=self.prefix_cache_queries + other.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits + other.prefix_cache_hits,
        )


@define
class EventLog:
    """Counts what one engine does, and keeps entries of it until they are fetched."""

    _log_requests: bool
    """Whether each request that starts or ends makes an entry; faults always do."""
    summary: Summary = attrs.field(factory=Summary, init=False)
    _entries: list[LogEntry] = attrs.field(factory=list, init=False)
    _lost: float = attrs.field(default=0.0, init=False)
    _next_about_pace: float = attrs.field(default=-math.inf, init=False)

    def pop_entries(self) -> list[LogEntry]:
        """Return all entries and forget them."""
        entries = self._entries
        if entries:
            self._entries = []
        return entries

    def started(self, request: Request, chunk_size: int, now: float) -> None:
        """A request was taken."""
        if not self.summary.requests:
            self.summary.begin = now
        left = request.end - request.emitted
        self.summary.requests += 1
        self.summary.prompt_tokens += request.prompt_len
        self.summary.tokens_asked += left
        if self._log_requests:
            entry = RequestStarted(request.request_id, request.prompt_len, left, chunk_size)
            self._entries.append(entry)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request is over and in no batch any more."""
        if reason is FinishReason.ABORT:
            self.summary.aborted += 1
        else:
            self.summary.finished += 1
        reasons, name = self.summary.finish_reasons, _NAMES[reason]
        reasons[name] = reasons.get(name, 0) + 1
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

    def died(self, death: Death) -> None:
        """A message was the end of a thread."""
        self.summary.errors += 1
        self._entries.append(EngineDied(death))

    def lost_time(self, seconds: float, now: float) -> None:
        """Steps came too late, by so much."""
        self._lost += seconds
        self.summary.seconds_behind += seconds
        if now >= self._next_about_pace:
            self._entries.append(PaceLost(self._lost))
            self._lost, self._next_about_pace = 0.0, now + PACE_INTERVAL
