"""`UnlimitedScheduler` runs all requests of an engine at once; `StepClock` says when its steps are due."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Literal

import attrs

from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.connector import STAGES, Connector, KvTransfer
from trio_vllm.mock.content import TokenSource
from trio_vllm.mock.encoding import (
    MessageBuilder,
    MessageTemplate,
    Outgoing,
    StatsTemplate,
    encode_stats,
)
from trio_vllm.mock.fast_batch import FastBatch
from trio_vllm.mock.kv_events import KvCacheEvent
from trio_vllm.mock.plain_batch import PlainBatch
from trio_vllm.mock.request import Request
from trio_vllm.protocol import EngineCoreRequest, EventType, PrefixCacheStats, SchedulerStats
from trio_vllm.values import define

Counts = tuple[int, int]
"""Requests running and waiting."""

Paused = Literal["no", "new", "all"]
"""Whether waiting requests are held back (``new``), or running ones as well (``all``)."""

STARTS_AT_ONCE = 4096
"""Requests that one step may start, which takes it some 5 µs for each; more go on with the next step."""

PREEMPTED_AT_ONCE = 1024
"""Requests preempted without a turn for others, if all are: some 4 ms."""

MAX_LAG = 0.1
"""Seconds that steps may be late and still be made up for."""


CHANGING_STATS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "step_counter",
    "current_wave",
    "prefix_cache_stats.requests",
    "prefix_cache_stats.queries",
)
"""The statistics that change without a schedule; prompts are queries of a cache that holds nothing."""


@define
class StepClock:
    """When steps are due: at the start of a busy period, and then every ``interval`` seconds.

    Each deadline follows from the one before it and not from when that step was made, so that delays
    do not add up.
    """

    interval: float
    _next: float = attrs.field(default=-math.inf, init=False)

    def begin(self, now: float) -> None:
        """Begin a busy period: a step is due now, or an interval after the last one."""
        self._next = max(self._next, now)

    def due(self, now: float) -> float:
        """When the next step is due."""
        return self._next if self.interval else now

    def stepped(self, now: float) -> None:
        """A step was made."""
        # After a stop of the whole process there is no burst of steps.
        self._next = max(self._next, now - MAX_LAG) + self.interval


class UnlimitedScheduler:
    """All unfinished requests: waiting, on the fast path, or on the plain path.

    There is no limit to how many run at once. They wait for the next step, for a pause to end, or,
    while their client is held, for its release.

    Clients get statistics with the next message after the counts have changed, not with every
    message: nothing else in them ever changes.
    """

    def __init__(
        self,
        config: MockEngineConfig,
        source: TokenSource,
        client_count: int,
        *,
        fast_path: bool,
        connector: Connector | None = None,
    ) -> None:
        self._config = config
        self._connector = connector
        self._fetched_tokens = 0
        self._fast = FastBatch(config, source, client_count)
        self._plain = PlainBatch(config, source)
        self._fast_path = fast_path
        self._unfinished: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._on_plain_path: set[str] = set()
        self._requests_by_logprob_columns: Counter[int] = Counter()  # those that run
        self._held: frozenset[int] = frozenset()
        self._clock = StepClock(config.step_interval * config.time_scale)
        self._stats = StatsTemplate(*CHANGING_STATS)
        self._told: Counts = (0, 0)
        self._prefills = self._prefilled_tokens = 0
        self._preempting: Iterator[None] | None = None
        self.paused: Paused = "no"
        self.kv_cache_usage = 0.0

    @property
    def counts(self) -> Counts:
        """Requests running and waiting."""
        return self._fast.count + self._plain.count, len(self._waiting)

    @property
    def _can_step(self) -> bool:
        """Whether a step would give a running request something."""
        has_active = self._fast.active_count > 0 or self._plain.active_count > 0
        return has_active and self.paused != "all"

    @property
    def _can_start(self) -> bool:
        """Whether a step would start a waiting request."""
        if not self._waiting or self.paused != "no":
            return False
        return not self._held or bool(self._startable())

    @property
    def has_work(self) -> bool:
        """Whether a step is due."""
        return self._can_step or self._can_start or self._preempting is not None

    @property
    def is_steady(self) -> bool:
        """Whether the next steps make tokens and nothing else."""
        is_settled = not self._plain.count and self._logprob_columns == self._fast.logprob_columns
        is_uneventful = self._preempting is None and not self._can_start
        return is_settled and self._can_step and is_uneventful

    schedule_counts = None
    """There is no schedule."""

    @property
    def tokens_made(self) -> int:
        """How many tokens there have been in all."""
        return self._fast.tokens_made + self._plain.tokens_made

    # Requests -----------------------------------------------------------------------------------

    def get(self, request_id: str) -> Request | None:
        """An unfinished request."""
        return self._unfinished.get(request_id)

    def unfinished(self) -> list[Request]:
        """All of them, in the order in which they came."""
        return list(self._unfinished.values())

    def hash_prompt(self, _: EngineCoreRequest) -> Generator[None, None, list[bytes]]:
        """Nothing is cached."""
        yield from ()
        return []

    def add(self, request: Request, now: float) -> None:
        """Let a request wait for its first step."""
        request.note(EventType.QUEUED, now)
        self._unfinished[request.request_id] = self._waiting[request.request_id] = request

    def remove(self, requests: Iterable[Request]) -> None:
        """Forget unfinished requests; what they have ``emitted`` is up to date then."""
        for request in requests:
            del self._unfinished[request.request_id]
            self._take_out(request)

    def _take_out(self, request: Request) -> None:
        if self._waiting.pop(request.request_id, None) is not None:
            return
        self._forget_logprob_columns(request)
        if request.request_id in self._on_plain_path:
            self._on_plain_path.discard(request.request_id)
            self._plain.remove(request)
        else:
            self._fast.remove(request)

    @property
    def _logprob_columns(self) -> int:
        """How many the widest running request wants."""
        return max(self._requests_by_logprob_columns, default=0)

    def _forget_logprob_columns(self, request: Request) -> None:
        if request.extras is not None and (columns := self._plain.logprob_columns_of(request)):
            self._requests_by_logprob_columns[columns] -= 1
            if not self._requests_by_logprob_columns[columns]:
                del self._requests_by_logprob_columns[columns]

    def reset_cache(self, now: float) -> None:
        """Nothing is cached."""

    def release(self, request_id: str) -> None:
        """No blocks are kept."""

    def release_all(self) -> None:
        """No blocks are kept."""

    holds_blocks = False

    def preempt_all(self, now: float) -> None:
        """Let all running requests wait again, before those that are waiting; steps go on with many."""
        self._preempting = self._preempt_in_slices(now)
        self._preempt_more()

    @property
    def is_preempting(self) -> bool:
        """Whether requests still run that `preempt_all` lets wait."""
        return self._preempting is not None

    def _preempt_in_slices(self, now: float) -> Iterator[None]:
        """Preempt those that came last first; yields whenever others should have a turn."""
        waiting = self._waiting
        running = [r for r in self._unfinished.values() if r.request_id not in waiting]
        for end in range(len(running), 0, -PREEMPTED_AT_ONCE):
            if end < len(running):
                yield
            some = running[max(0, end - PREEMPTED_AT_ONCE) : end]
            # Meanwhile some may have been aborted.
            some = [one for one in some if self._unfinished.get(one.request_id) is one]
            for request in some:
                self._take_out(request)
                request.note(EventType.PREEMPTED, now)
            self._waiting = {request.request_id: request for request in some} | self._waiting

    def _preempt_more(self) -> bool:
        """Do a slice of what `preempt_all` began, if it is under way; whether more is left."""
        if self._preempting is None:
            return False
        for _ in self._preempting:
            return True
        self._preempting = None
        return False

    def hold(self, held: frozenset[int]) -> None:
        """Give nothing to the requests of these clients until the next call."""
        self._held = held
        self._fast.hold(held)
        self._plain.hold(held)

    # Time ---------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Something is to be done after a time with nothing."""
        self._clock.begin(now)

    def due(self, now: float) -> float:
        """When the next step is due."""
        return self._clock.due(now)

    def pop_lost_time(self) -> float:
        """No pace is promised."""
        return 0.0

    # Steps --------------------------------------------------------------------------------------

    def steady_step(self, template: MessageTemplate, now: float) -> list[Outgoing] | None:
        """See `FastBatch.steady_step`; only if no request waits or is on the plain path."""
        messages = self._fast.steady_step(template, now)
        if messages is not None and self._clock.interval:
            self._clock.stepped(now)
        return messages

    def steady_steps(
        self, template: MessageTemplate, now: float, limit: int
    ) -> tuple[int, list[Outgoing]] | None:
        """See `FastBatch.steady_steps`; only if no request waits or is on the plain path."""
        return None if self._clock.interval else self._fast.steady_steps(template, now, limit)

    def step(
        self, now: float, builder_for: Callable[[int], MessageBuilder]
    ) -> Generator[None, None, list[Request]]:
        """Make a step of any kind, in one slice; which requests have finished."""
        yield from ()
        if self._preempt_more() or self.paused == "all":
            return []
        if self._plain.is_in_step:
            finished = self._plain.step((), builder_for)
        else:
            started = self._startable() if self._can_start else []
            fast, plain = self._start(started, now)
            finished = self._fast.step(fast, builder_for)
            if plain or self._plain.count:
                finished += self._plain.step(plain, builder_for, self._logprob_columns)
        for request in finished:
            del self._unfinished[request.request_id]
            self._on_plain_path.discard(request.request_id)
            self._forget_logprob_columns(request)
        if finished or self.counts[0]:
            self._clock.stepped(now)
        return finished

    def _start(self, started: list[Request], now: float) -> tuple[list[Request], list[Request]]:
        """Send waiting requests along the fast path and the plain path."""
        for request in started:
            if request.extras is not None and (columns := self._plain.logprob_columns_of(request)):
                self._requests_by_logprob_columns[columns] += 1
        fast: list[Request] = []
        plain = self._fast.set_logprob_columns(self._logprob_columns)
        self._on_plain_path.update([request.request_id for request in plain])
        if len(started) == len(self._waiting):
            self._waiting.clear()  # with the memory of a table that was large once
        for request in started:
            self._waiting.pop(request.request_id, None)
            self._prefills += 1
            self._prefilled_tokens += request.prompt_len
            if request.transfer is not None:
                self._transfer(request, request.transfer)
            request.note(EventType.SCHEDULED, now)
            if self._fast_path and self._fast.accepts(request):
                fast.append(request)
            else:
                plain.append(request)
                self._on_plain_path.add(request.request_id)
        return fast, plain

    def _transfer(self, request: Request, transfer: KvTransfer) -> None:
        """Do at once what a scheduler would take time and blocks for."""
        connector = self._connector
        assert connector is not None
        if transfer.fetches:
            request.was_fetched = True
            self._fetched_tokens += request.prompt_len
            connector.note_transfer(request.prompt_len, 0.0)
            connector.note_fetched(transfer)
        if transfer.sends:
            count = request.end - request.emitted
            num_tokens = request.prompt_len + count - 1
            blocks = range(1, 1 + -(-num_tokens // connector.block_size))
            # What is cached is told in the first output only.
            is_told = count <= self._config.output_token_chunk_size
            cached = request.prompt_len if request.was_fetched else 0
            transfer.answer = connector.describe(
                request.request_id, blocks, num_tokens, cached if is_told else None
            )

    def _startable(self) -> list[Request]:
        waiting = self._waiting.values()
        ready = (request for request in waiting if request.client_index not in self._held)
        return list(islice(ready, STARTS_AT_ONCE))

    def pop_kv_events(self) -> list[list[KvCacheEvent]]:
        """Nothing is cached."""
        return []

    # Statistics ---------------------------------------------------------------------------------

    @property
    def has_stats(self) -> bool:
        """Whether clients do not know the counts yet, or that prompts were not found cached."""
        return self.counts != self._told or self._prefills > 0

    def pop_stats(self, step: int, wave: int) -> bytes:
        """The encoded statistics, with the numbers of a lockstep; the clients know them then."""
        self._told = self.counts
        numbers = (*self._told, step, wave, self._prefills, self._prefilled_tokens)
        fetched = self._fetched_tokens
        self._prefills = self._prefilled_tokens = self._fetched_tokens = 0
        if self._connector is None:
            return self._stats.fill(*numbers)
        return _stats_with_connector(numbers, fetched, self._connector.take_stats())

    def forget_messages(self) -> None:
        """Use another template from now on."""
        self._fast.forget_messages()


def _stats_with_connector(
    numbers: tuple[int, ...], fetched: int, transfers: dict[str, list[float]] | None
) -> bytes:
    """The statistics of an engine with a connector; ``fetched`` tokens came from other engines."""
    running, waiting, step, wave, requests, queries = numbers
    stats = SchedulerStats(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_kv_fetch_reqs_by_stage=dict.fromkeys(STAGES, 0),
        step_counter=step,
        current_wave=wave,
        kv_connector_stats=transfers,
    )
    stats.prefix_cache_stats.requests = requests
    stats.prefix_cache_stats.queries = queries
    stats.connector_prefix_cache_stats = PrefixCacheStats(
        requests=requests, queries=queries, hits=fetched
    )
    return encode_stats(stats)
