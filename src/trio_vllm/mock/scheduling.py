"""`Scheduler` decides which request computes how many tokens in each step, as vLLM's does.

A step has a budget of tokens. Running requests get theirs first, in the order of their admission;
one that finds no free KV block preempts the last one admitted, or the least important one. If nobody
was preempted, waiting requests are admitted with what is left. A prompt that is longer than
the budget, or than the threshold for long prompts, is computed in chunks.

With speculative decoding a request computes its draft tokens together with the newest one. What
the model would not have sampled is taken back in `Scheduler.update`.

With a `Connector` a request may find its prompt computed by another engine. It gets blocks for all of it,
holds them while they are fetched, and then runs like one that found all but the last token cached.

Source: ``vllm/v1/core/sched/scheduler.py`` of 0.32.0 and 0.33.0, without asynchronous scheduling, encoder
inputs, KV connectors other than NIXL's, and drafters that have a KV cache.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import attrs

from trio_vllm.mock.config import NEWEST_RELEASE
from trio_vllm.mock.connector import (
    COMPLETED_WAITING,
    IN_PROGRESS,
    STAGES,
    WAITING_TO_START,
    Connector,
    KvTransfer,
)
from trio_vllm.mock.decode_group import DecodeGroup, by_seat
from trio_vllm.mock.kv_cache import BlockTable, KvCache, count_query
from trio_vllm.mock.request_queue import FcfsQueue, PriorityQueue
from trio_vllm.mock.scheduled_request import RequestStatus, ScheduledRequest
from trio_vllm.protocol import (
    EngineCoreEvent,
    EventType,
    IterationDetails,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
    in_one_go,
)
from trio_vllm.values import define, frozen

PREEMPTED_AT_ONCE = 128
"""Requests preempted without a turn for others, if all are: 1 ms, with long contexts some 10."""

SCHEDULED_AT_ONCE = 256
"""Requests admitted, or ended, in a step without a turn for others: some 3 ms."""


@frozen(kw_only=True)
class SchedulerConfig:
    """The options of ``vllm serve`` that the scheduler depends on, under their names there."""

    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    """The token budget of a step, if less than ``max_num_batched_tokens``."""
    max_num_active_seqs: int | None = None
    """How many requests may run, if fewer than ``max_num_seqs``."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Tokens that one prompt may get in a step while there are other requests; 0 is no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether the threshold is at least an even share of the budget."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0
    """The part of all blocks that must stay free when a request joins others."""
    scheduler_reserve_full_isl: bool = True
    """Whether a request is admitted only if there are blocks for all of its prompt."""
    num_speculative_tokens: int = 0
    """Draft tokens of a request in a step, from a drafter such as n-gram."""
    max_loras: int | None = None
    """How many adapters may be used in one step; None without LoRA."""
    vllm_release: tuple[int, int] = NEWEST_RELEASE
    """In 0.33 a request that preempted itself does not end the turn of the others,
    adapters count for all running requests, and blocks full of accepted drafts are cached at once."""

    @property
    def token_budget(self) -> int:
        """Tokens of one step."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, self.max_num_scheduled_tokens)

    @property
    def max_running(self) -> int:
        """How many requests may run."""
        return self.max_num_active_seqs or self.max_num_seqs


@frozen
class RowExtras:
    """What the row of a request carries besides tokens and finish reason."""

    events: list[EngineCoreEvent]
    prefill_stats: PrefillStats | None


@frozen
class Sampled:
    """What a row got, if it is not one token."""

    num_accepted: int
    """Draft tokens that the model agreed with; it sampled one token more."""
    num_delivered: int
    """Tokens in the row: fewer if the request ended at one of the drafts."""


@frozen
class Besides:
    """Running requests that compute one token each."""

    num_requests: int = 0
    context_length: int = 0
    """Tokens that are computed of them after the step."""
    starting: Sequence[ScheduledRequest] = ()
    """Those whose token is the first of a block."""
    filling: Sequence[ScheduledRequest] = ()
    """Those whose token is the last of a block."""


NOTHING_BESIDES = Besides()

ONE_TOKEN = Sampled(0, 1)
NOTHING_BUT_ONE_TOKEN: Mapping[ScheduledRequest, Sampled] = MappingProxyType({})


@define(eq=False)
class Step:
    """What an engine does in one step."""

    now: float
    budget: int
    """Tokens that are left."""
    long_prefill_threshold: float
    scheduled: dict[ScheduledRequest, int] = attrs.field(factory=dict, init=False)
    """Tokens of each request that is not in the decode group."""
    drafts: dict[ScheduledRequest, int] = attrs.field(factory=dict, init=False)
    """Draft tokens among them."""
    spec_decoding_stats: SpecDecodingStats | None = attrs.field(default=None, init=False)
    goes_on_with_prefill: bool = attrs.field(default=False, init=False)
    """Whether one of the running requests was in the middle of its prompt."""
    preempted: list[ScheduledRequest] = attrs.field(factory=list, init=False)
    admitted: list[ScheduledRequest] = attrs.field(factory=list, init=False)
    rows: list[ScheduledRequest] = attrs.field(factory=list, init=False)
    """The requests for which a token is sampled, in the order of the output message."""
    individual_rows: list[ScheduledRequest] = attrs.field(factory=list, init=False)
    """Those of them that are not in the decode group."""
    context_length: int = attrs.field(default=0, init=False)
    """Tokens of all scheduled requests that are computed after the step: what attention looks at."""
    details: IterationDetails = attrs.field(factory=IterationDetails, init=False)

    @property
    def num_tokens(self) -> int:
        """Computed in this step, prompts and outputs."""
        return self.details.num_ctx_tokens + self.details.num_generation_tokens

    def give(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Spend tokens of the budget on a request."""
        self.scheduled[request] = num_tokens
        self.budget -= num_tokens

    def take_back(self, request: ScheduledRequest) -> None:
        """Undo `give`."""
        self.budget += self.scheduled.pop(request, 0)
        self.drafts.pop(request, None)


Queue = FcfsQueue[ScheduledRequest] | PriorityQueue[ScheduledRequest]


def _holds_blocks(request: ScheduledRequest) -> bool:
    """Whether a waiting request has its blocks already."""
    return request.num_computed_tokens > 0


@frozen
class Shortage:
    """A waiting request that did not fit."""

    request: ScheduledRequest
    needed: int
    """Free blocks that it would have taken then."""
    num_changes: int
    """Of the cache until then."""


@frozen
class Loan:
    """Blocks of a request that is over, kept for another engine."""

    table: BlockTable
    end: float


@frozen
class Fetch:
    """A transfer that is under way."""

    num_tokens: int
    begin: float
    end: float


@define
class RemoteBlocks:
    """What a scheduler fetches from other engines, and keeps for them."""

    connector: Connector
    _cache: KvCache
    loans: dict[str, Loan] = attrs.field(factory=dict, init=False)
    _transfers: dict[ScheduledRequest, Fetch] = attrs.field(factory=dict, init=False)
    _stages: dict[ScheduledRequest, str] = attrs.field(factory=dict, init=False)
    _statistics: PrefixCacheStats = attrs.field(factory=PrefixCacheStats, init=False)

    def request_came(self, request: ScheduledRequest) -> None:
        """A request was added."""
        if request.transfer is not None and request.transfer.fetches:
            self._stages[request] = WAITING_TO_START

    def request_left(self, request: ScheduledRequest) -> None:
        """A request runs."""
        self._stages.pop(request, None)

    def request_ended(self, request: ScheduledRequest) -> None:
        """A request is over; blocks that it would have fetched are not needed."""
        self._stages.pop(request, None)
        self._transfers.pop(request, None)
        if request.transfer is not None and request.transfer.fetches:
            self.connector.note_fetched(request.transfer)

    def count_external(self, request: ScheduledRequest, num_local: int) -> int:
        """How many tokens a request is to fetch if it has so many here."""
        transfer = request.transfer
        if transfer is None or not transfer.fetches:
            return 0
        if request.table.skip_reading_prefix_cache:
            return 0
        return request.num_prompt_tokens - num_local

    def fetch(self, request: ScheduledRequest, num_tokens: int, now: float) -> None:
        """Begin a transfer."""
        self._transfers[request] = Fetch(num_tokens, now, now + request.transfer_time)
        self._stages[request] = IN_PROGRESS
        request.was_fetched = True

    def has_received(self, request: ScheduledRequest) -> bool:
        """Whether the transfer for a request is over."""
        return request not in self._transfers

    def lend(self, request: ScheduledRequest, now: float) -> None:
        """Keep the blocks of a request that has finished, if another engine is to fetch them."""
        transfer, connector = request.transfer, self.connector
        if transfer is None or not transfer.sends:
            return
        num_tokens = request.num_computed_tokens
        blocks = request.table.blocks[: self._cache.blocks_for(num_tokens)]
        transfer.answer = connector.describe(request.request_id, blocks, num_tokens)
        self.loans[request.request_id] = Loan(request.table, now + connector.lease)

    def release(self, request_id: str) -> bool:
        """End a loan; whether there was one."""
        loan = self.loans.pop(request_id, None)
        if loan is not None:
            self._cache.free(loan.table)
        return loan is not None

    def advance(self, now: float) -> None:
        """End the transfers and the loans whose time is over."""
        for request in [one for one, fetch in self._transfers.items() if fetch.end <= now]:
            fetch = self._transfers.pop(request)
            self.connector.note_transfer(fetch.num_tokens, fetch.end - fetch.begin)
            self._stages[request] = COMPLETED_WAITING
            self.connector.note_fetched(_transfer_of(request))
        for request_id in [one for one, loan in self.loans.items() if loan.end <= now]:
            self.release(request_id)
            self.connector.note_expired()

    @property
    def next_timer(self) -> float:
        """When the first of them will be over."""
        timers: list[Fetch | Loan] = [*self._transfers.values(), *self.loans.values()]
        return min((timer.end for timer in timers), default=math.inf)

    def record_query(self, request: ScheduledRequest, num_local: int, num_external: int) -> None:
        """Count that a request was scheduled: what it did not have here could have come from there."""
        transfer = request.transfer
        if transfer is not None and transfer.fetches and not num_external:
            self.connector.note_fetched(transfer)  # all of it is here
        queries = request.num_tokens - num_local
        if queries:
            preempted = request.num_preemptions > 0
            count_query(self._statistics, queries, num_external, preempted=preempted)

    def take_statistics(self) -> PrefixCacheStats:
        """What happened since this was last called."""
        statistics, self._statistics = self._statistics, PrefixCacheStats()
        return statistics

    def count_stages(self) -> dict[str, int]:
        """How many requests are in each stage of a transfer."""
        counts = dict.fromkeys(STAGES, 0)
        for stage in self._stages.values():
            counts[stage] += 1
        return counts


def _transfer_of(request: ScheduledRequest) -> KvTransfer:
    assert request.transfer is not None
    return request.transfer


class Scheduler:
    """The unfinished requests of one engine, its KV cache, and who is next.

    A step is a call of `schedule` and then one of `update`. The caller decides which token is sampled for
    each row and when a request is finished; it must finish one that reaches ``max_model_len``.
    In between it may add and abort requests.

    Args:
      fast_path: Whether requests that all decode go through a `DecodeGroup`. It changes the time that
        a step takes and nothing else.
      connector: To other engines, in prefill/decode disaggregation.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KvCache,
        *,
        fast_path: bool = True,
        connector: Connector | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._waiting = self._new_queue()
        self._holding = self._new_queue()  # requests that wait and hold blocks; they go first
        self._remote = None if connector is None else RemoteBlocks(connector, cache)
        self._is_stalled = False  # the last step has found nothing to do
        self._running: list[ScheduledRequest] = []
        self._requests: dict[str, ScheduledRequest] = {}
        self._skipped: set[ScheduledRequest] = set()
        self._fast_path = fast_path and not config.num_speculative_tokens
        self._shortage: Shortage | None = None
        self._group = DecodeGroup(cache.block_size)
        self._watermark_blocks = int(config.watermark * cache.num_blocks)
        self._seats = 0
        self._steps = 0
        self._farewell = False
        self.paused: Literal["no", "new", "all"] = "no"
        """Whether waiting requests are held back (``new``), or running ones as well (``all``)."""

    def _new_queue(self) -> Queue:
        return PriorityQueue() if self._config.scheduling_policy == "priority" else FcfsQueue()

    @property
    def running(self) -> list[ScheduledRequest]:
        """The requests that were admitted, in this order; not to be changed."""
        return self._running

    @property
    def num_running(self) -> int:
        """How many requests were admitted."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queues."""
        return len(self._waiting) + len(self._holding)

    @property
    def has_work(self) -> bool:
        """Whether a step is due.

        The engine makes one more step, without tokens, after requests are finished: in it the workers
        drop what they know of them.
        """
        return self._farewell or self.num_unfinished > 0 or self.lends_blocks

    @property
    def lends_blocks(self) -> bool:
        """Whether blocks of requests that are over are kept for other engines."""
        return self._remote is not None and bool(self._remote.loans)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are in use which no preemption would free."""
        return self.lends_blocks or len(self._holding) > 0

    def due(self, now: float) -> float:
        """When there is something to do: now, or at the end of a transfer or of a loan."""
        if not self._is_stalled or self._remote is None or self._farewell:
            return now
        timer = self.next_timer
        return now if timer == math.inf else max(now, timer)

    @property
    def next_timer(self) -> float:
        """The end of the first transfer or loan."""
        return math.inf if self._remote is None else self._remote.next_timer

    def wake(self) -> None:
        """Something has changed: perhaps a step would find something to do."""
        self._is_stalled = False

    @property
    def num_unfinished(self) -> int:
        """Requests that can go on."""
        if self.paused == "all":
            return 0
        return self.num_running + (self.num_waiting if self.paused == "no" else len(self._holding))

    def get(self, request_id: str) -> ScheduledRequest | None:
        """The unfinished request of this id."""
        return self._requests.get(request_id)

    def add(self, request: ScheduledRequest, now: float) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        request.record(EventType.QUEUED, now)
        self._waiting.add(request)
        if request.blocked:
            self._skipped.add(request)
        if self._remote is not None:
            self._remote.request_came(request)
        self.wake()

    def abort(self, request_ids: Iterable[str]) -> list[ScheduledRequest]:
        """Finish requests from outside of a step; unknown ids are ignored.

        Returns:
          Those that were aborted. They get no row.
        """
        known = [self._requests[one] for one in request_ids if one in self._requests]
        requests = list(dict.fromkeys(known))
        self._leave_queues(requests)
        for request in requests:
            self._free(request)
        self.wake()
        return requests

    def release(self, request_id: str) -> None:
        """Another engine has fetched the blocks of a request, or will not; an unknown id is ignored."""
        if self._remote is None:
            return
        if self._remote.release(request_id):
            self._farewell = True
            self.wake()
        else:
            self._remote.connector.note_late_notification()

    def release_all(self) -> None:
        """Keep blocks for nobody."""
        if self._remote is not None:
            for request_id in list(self._remote.loans):
                self._remote.release(request_id)

    def abort_all(self) -> list[ScheduledRequest]:
        """Finish all requests, in the order in which they were added."""
        return self.abort(list(self._requests))

    def reset_prefix_cache(self, now: float, *, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks.

        Args:
          now: Time of the preemptions.
          reset_running_requests: Whether running requests are preempted for it. Otherwise nothing
            is done while any hold blocks.

        Returns:
          Whether it was done.
        """
        if reset_running_requests:
            for _ in self.preempt_all(now):
                pass
        return self._cache.reset_prefix_cache()

    def preempt_all(self, now: float) -> Iterator[None]:
        """Put the running requests back into the queue; yields whenever others should have a turn.

        They may be aborted, and others added, in between.
        """
        self._group.dissolve()
        while self._running:
            for _ in range(min(PREEMPTED_AT_ONCE, len(self._running))):
                self._preempt(self._running.pop(), now)
            if self._running:
                yield

    def schedule(self, now: float) -> Step:
        """Begin a step like `schedule_in_slices`, in one go."""
        return in_one_go(self.schedule_in_slices(now))

    def schedule_in_slices(
        self,
        now: float,
        among: Collection[ScheduledRequest] | None = None,
        besides: Besides = NOTHING_BESIDES,
    ) -> Generator[None, None, Step]:
        """Begin a step: decide who computes what, allocate blocks, preempt and admit.

        It yields whenever others should have a turn; nothing may be added or aborted in between.

        Args:
          now: The time.
          among: The running requests that have something to compute, if the caller knows.
          besides: Those that the caller counts for; all of ``among`` must decode then, and there must be a
            token and a block for each, see `has_room`.
        """
        step = self._new_step(now)
        if self._remote is not None:
            self._remote.advance(now)
        if self._decodes_steadily(step):
            self._schedule_group(step)
        else:
            self._group.dissolve()
            running = self._running.copy() if among is None else sorted(among, key=by_seat)
            if besides.num_requests:
                self._schedule_besides(besides, running, step)
            yield from self._schedule_running(running, step)
        if not step.preempted and self.paused != "all":
            yield from self._schedule_waiting(step)
        yield from self._advance(step)
        self._farewell = False
        self._is_stalled = not (self._running or step.num_tokens)
        return step

    def has_room(self, blocks_each: int = 1) -> bool:
        """Whether each running request could get a token and so many blocks in the next step."""
        count = len(self._running)
        budget = 0 if self.paused == "all" else self._config.token_budget
        return count <= budget and count * blocks_each <= self._cache.free_count

    @property
    def is_steady(self) -> bool:
        """Whether each step gives one token to each running request, until one ends or blocks are short.

        What comes from outside may change that.
        """
        return (
            0 < len(self._running) == len(self._group) <= self._config.token_budget
            and self.paused != "all"
            and self._remote is None
            and not self._may_admit()
        )

    def _may_admit(self, num_changes: int = 0) -> bool:
        """Whether a waiting request might be admitted after so many more changes of the cache."""
        config = self._config
        is_full = len(self._running) >= min(config.token_budget, config.max_running)
        if is_full or not self.num_waiting:
            return False
        request = self._waiting.peek()
        is_in_turn = not request.blocked and config.max_loras is None
        return not (is_in_turn and self._lacks_blocks(request, num_changes))

    def decode(self) -> bool:
        """Make a step that is steady, and in which no request ends, unless blocks are short for it.

        It is what `schedule` and `update` do with such a step; whether it was made.
        """
        group = self._group
        if group.blocks_needed > self._cache.free_count or self._may_admit(group.blocks_filled):
            return False
        self._pass_edges(*self._group.step())
        self._steps += 1
        self._farewell = False
        return True

    def update(
        self,
        step: Step,
        finished: Collection[ScheduledRequest] = (),
        sampled: Mapping[ScheduledRequest, Sampled] = NOTHING_BUT_ONE_TOKEN,
    ) -> dict[ScheduledRequest, RowExtras]:
        """End a step like `update_in_slices`, in one go."""
        return in_one_go(self.update_in_slices(step, finished, sampled))

    def update_in_slices(
        self,
        step: Step,
        finished: Collection[ScheduledRequest] = (),
        sampled: Mapping[ScheduledRequest, Sampled] = NOTHING_BUT_ONE_TOKEN,
    ) -> Generator[None, None, dict[ScheduledRequest, RowExtras]]:
        """End a step; yields whenever others should have a turn, like `schedule_in_slices`.

        Args:
          step: As `schedule` gave it.
          finished: Those whose row is their last one.
          sampled: What rows got; one token, if they are not in it.

        Returns:
          For the rows that have any: what they carry besides tokens. A request that was aborted since
          `schedule` has no row.
        """
        extras: dict[ScheduledRequest, RowExtras] = {}
        for number, request in enumerate(step.individual_rows):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            if request.status is RequestStatus.RUNNING:
                self._append(request, sampled.get(request, ONE_TOKEN), step)
                if request.events:
                    extras[request] = self._take_extras(request)
        if finished:
            yield from self._finish(finished, step)
        self._regroup(step)
        return extras

    @property
    def kv_cache_usage(self) -> float:
        """The part of the blocks that requests hold, 0 to 1."""
        return self._cache.usage

    def make_stats(self, step: Step | None = None) -> SchedulerStats:
        """The state of the scheduler, and what happened since this was last called."""
        num_skipped = len(self._skipped)
        remote = self._remote
        return SchedulerStats(
            num_running_reqs=self.num_running,
            num_waiting_reqs=self.num_waiting - num_skipped,
            num_skipped_waiting_reqs=num_skipped,
            num_kv_fetch_reqs_by_stage={} if remote is None else remote.count_stages(),
            kv_cache_usage=self._cache.usage,
            prefix_cache_stats=self._cache.take_statistics(),
            connector_prefix_cache_stats=None if remote is None else remote.take_statistics(),
            spec_decoding_stats=None if step is None else step.spec_decoding_stats,
            kv_connector_stats=None if remote is None else remote.connector.take_stats(),
            iteration_details=step.details if step is not None and step.num_tokens else None,
        )

    def _new_step(self, now: float) -> Step:
        config = self._config
        threshold: float = config.long_prefill_token_threshold
        others = self.num_running + self.num_waiting
        if others <= 1 or not threshold:
            # Without others there is nobody whom a long prompt could keep waiting.
            threshold = math.inf
        elif config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, config.max_num_batched_tokens // others)
        return Step(now, 0 if self.paused == "all" else config.token_budget, threshold)

    def _decodes_steadily(self, step: Step) -> bool:
        """Whether each running request computes one token, and none is preempted."""
        return (
            len(self._group) == len(self._running) <= step.budget
            and self._group.blocks_needed <= self._cache.free_count
        )

    def _schedule_besides(
        self, besides: Besides, others: Sequence[ScheduledRequest], step: Step
    ) -> None:
        """Schedule those that the caller counts for, and give the others their blocks in the same order."""
        size = self._cache.block_size
        starting, filling = [*besides.starting], [*besides.filling]
        starting += [one for one in others if not one.num_computed_tokens % size]
        filling += [one for one in others if not (one.num_computed_tokens + 1) % size]
        starting.sort(key=by_seat)
        filling.sort(key=by_seat)
        self._pass_edges(starting, filling)
        step.budget -= besides.num_requests
        step.details.num_generation_requests += besides.num_requests
        step.details.num_generation_tokens += besides.num_requests
        step.context_length += besides.context_length

    def _schedule_group(self, step: Step) -> None:
        """Schedule the running requests, all of which decode."""
        self._pass_edges(*self._group.step())
        count = len(self._running)
        step.rows = self._running.copy()
        step.budget -= count
        step.details.num_generation_requests = step.details.num_generation_tokens = count
        step.context_length = self._group.num_computed_tokens

    def _pass_edges(
        self, starting: Sequence[ScheduledRequest], filling: Sequence[ScheduledRequest]
    ) -> None:
        """Give blocks to requests whose token begins one, and cache those of requests whose token fills one."""
        if not self._cache.enable_events:
            self._cache.add_block_to_each([request.table for request in starting])
            self._cache.cache_block_of_each([request.table for request in filling])
            return
        # The order of events is that of the requests.
        is_starting, is_filling = set(starting), set(filling)
        for request in sorted(is_starting | is_filling, key=by_seat):
            if request in is_starting:
                self._cache.add_block(request.table)
            if request in is_filling:
                self._cache.cache_block_of_each([request.table])

    def _schedule_running(self, requests: list[ScheduledRequest], step: Step) -> Iterator[None]:
        """Schedule running requests one by one; some of them may be preempted for others."""
        block_size = self._cache.block_size
        for number, request in enumerate(requests):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            if step.budget <= 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = self._next_chunk(request, step)
            if not num_tokens:
                continue
            # One more token that neither begins a block nor fills it asks for nothing.
            is_within = (
                num_tokens == 1 and 0 < request.num_computed_tokens % block_size < block_size - 1
            )
            if is_within or self._make_room(request, num_tokens, step):
                step.give(request, num_tokens)
                step.goes_on_with_prefill |= request.is_prefill_chunk
                self._spend_drafts(request, step)
            elif not self._goes_on_after_preemption:
                break

    def _make_room(self, request: ScheduledRequest, num_tokens: int, step: Step) -> bool:
        """Give a running request its blocks, for which others may be preempted, or it: then not."""
        while not self._allocate(request, num_tokens):
            victim = self._choose_victim()
            self._running.remove(victim)
            step.take_back(victim)
            step.preempted.append(victim)
            self._preempt(victim, step.now)
            if victim is request:
                return False
        return True

    def _next_chunk(self, request: ScheduledRequest, step: Step) -> int:
        """How many tokens a running request is to compute."""
        num_tokens = min(
            request.num_tokens + request.num_draft_tokens - request.num_computed_tokens,
            step.long_prefill_threshold,
            step.budget,
            self._config.max_model_len - request.num_computed_tokens - 1,
        )
        return int(num_tokens)

    def _spend_drafts(self, request: ScheduledRequest, step: Step) -> None:
        """Note how many of a running request's drafts are verified; the others are dropped."""
        end = request.num_computed_tokens + step.scheduled[request]
        if request.num_draft_tokens and end > request.num_tokens:
            step.drafts[request] = end - request.num_tokens
        request.num_draft_tokens = 0

    def _choose_victim(self) -> ScheduledRequest:
        """The running request to be preempted."""
        if self._config.scheduling_policy == "priority":
            return max(self._running, key=lambda request: request.urgency[:2])
        return self._running[-1]

    @property
    def _goes_on_after_preemption(self) -> bool:
        """Whether others are still scheduled after a request had to preempt itself."""
        return self._config.vllm_release >= (0, 33) and self._config.scheduling_policy == "priority"

    def _preempt(self, request: ScheduledRequest, now: float) -> None:
        """Take a request's blocks and put it back into the queue; it is out of the running ones."""
        self._cache.free(request.table)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_draft_tokens = 0
        request.num_preemptions += 1
        request.record(EventType.PREEMPTED, now)
        self._waiting.put_back([request])

    def _allocate(self, request: ScheduledRequest, num_tokens: int) -> bool:
        """Give a running request the blocks for its next tokens, if there are enough."""
        cache, table = self._cache, request.table
        end = min(request.num_computed_tokens + num_tokens, self._config.max_model_len)
        missing = cache.blocks_for(end) - len(table.blocks)
        if missing > 0:
            if missing > cache.free_count:
                return False
            cache.extend(table, end)
        cache.cache_full_blocks(table, min(end, request.num_tokens))
        return True

    def _schedule_waiting(self, step: Step) -> Iterator[None]:
        """Admit waiting requests while there is room: those that hold blocks, then the others."""
        skipped: list[ScheduledRequest] = []
        loras = self._scheduled_loras(step)
        for number in itertools.count():
            if step.budget <= 0 or self.num_running >= self._config.max_running:
                break
            queue = self._next_queue()
            if queue is None:
                break
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            request = queue.peek()
            if self._is_blocked(request) or self._exceeds_loras(request, loras):
                self._skip(request, queue, skipped)
            elif num_external := self._count_external(request):
                if not self._park(request, num_external, step):
                    break
                self._skip(request, queue, skipped)
            elif self._admit(request, step):
                self._seat(request, queue, step)
                if request.table.lora_id is not None:
                    loras.add(request.table.lora_id)
            else:
                break
        self._waiting.put_back([one for one in skipped if not _holds_blocks(one)])
        self._holding.put_back([one for one in skipped if _holds_blocks(one)])

    def _next_queue(self) -> Queue | None:
        """The queue whose first request is next."""
        if self._holding:
            return self._holding
        return self._waiting if self._waiting and self.paused == "no" else None

    def _skip(
        self, request: ScheduledRequest, queue: Queue, skipped: list[ScheduledRequest]
    ) -> None:
        queue.pop()
        self._skipped.add(request)
        skipped.append(request)

    def _is_blocked(self, request: ScheduledRequest) -> bool:
        """Whether a request waits for something; blocks that have come are its own from here on."""
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.blocked
        assert self._remote is not None
        if not self._remote.has_received(request):
            return True
        self._cache.cache_full_blocks(request.table, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # its logits are needed
        is_new = not request.num_preemptions
        request.status = RequestStatus.WAITING if is_new else RequestStatus.PREEMPTED
        return False

    def _count_external(self, request: ScheduledRequest) -> int:
        """How many tokens of a request's prompt are to be fetched from another engine."""
        if self._remote is None or _holds_blocks(request):
            return 0
        cached = self._cache.find_cached(request.table, request.num_tokens)
        return self._remote.count_external(request, len(cached) * self._cache.block_size)

    def _park(self, request: ScheduledRequest, num_external: int, step: Step) -> bool:
        """Give a request blocks for its whole prompt, to be filled by a transfer, if they are there."""
        cache, table = self._cache, request.table
        assert self._remote is not None
        cached = cache.find_cached(table, request.num_tokens)
        num_local = len(cached) * cache.block_size
        end = num_local + num_external
        if not self._fits(request, cached, end, reserved=self._reserved_blocks()):
            return False
        self._observe_query(request, num_local, num_external)
        cache.adopt(table, cached)
        cache.extend(table, end)
        request.num_computed_tokens = end
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._remote.fetch(request, num_external, step.now)
        return True

    def _reserved_blocks(self) -> int:
        """Blocks that prompts need which are computed in part."""
        cache = self._cache
        unfinished = (one for one in self._running if one.num_tokens == one.num_prompt_tokens)
        needed = (cache.blocks_for(one.num_tokens) - len(one.table.blocks) for one in unfinished)
        return sum(max(0, count) for count in needed)

    def _observe_query(
        self, request: ScheduledRequest, num_local: int, num_external: int = 0
    ) -> None:
        """Count what a request has found: in the cache, and at another engine."""
        request.begin_prefill(num_local, num_external)
        preempted = request.num_preemptions > 0
        if self._cache.reads_cache(request.table):
            self._cache.record_query(request.num_tokens, num_local, preempted=preempted)
        if self._remote is not None:
            self._remote.record_query(request, num_local, num_external)

    def _scheduled_loras(self, step: Step) -> set[int]:
        """The adapters in use."""
        if self._config.max_loras is None:
            return set()
        in_use = (
            self._running if self._config.vllm_release >= (0, 33) else step.rows or step.scheduled
        )
        return {one.table.lora_id for one in in_use if one.table.lora_id is not None}

    def _exceeds_loras(self, request: ScheduledRequest, loras: set[int]) -> bool:
        """Whether the request's adapter would be one too many."""
        lora_id = request.table.lora_id
        return lora_id is not None and lora_id not in loras and len(loras) == self._config.max_loras

    def _admit(self, request: ScheduledRequest, step: Step) -> bool:
        """Let the first waiting request run, unless it does not fit."""
        cache, table = self._cache, request.table
        if self._lacks_blocks(request):
            return False
        was_held = _holds_blocks(request)
        cached = [] if was_held else cache.find_cached(table, request.num_tokens)
        num_computed_tokens = request.num_computed_tokens or len(cached) * cache.block_size
        left = request.num_tokens - num_computed_tokens
        padding = self._padding(num_computed_tokens, step) if left == 1 else 0
        if left + padding > step.budget and padding:
            return False
        remaining = min(left + padding, step.long_prefill_threshold)
        if remaining > step.budget and not self._config.enable_chunked_prefill:
            return False
        num_tokens = int(min(remaining, step.budget))
        if not self._fits(request, cached, num_computed_tokens + num_tokens):
            return False
        if not was_held:
            self._observe_query(request, num_computed_tokens)
            cache.adopt(table, cached)
        end = min(num_computed_tokens + num_tokens, self._config.max_model_len)
        cache.extend(table, end)
        cache.cache_full_blocks(table, min(end, request.num_tokens))
        request.num_computed_tokens = num_computed_tokens
        step.give(request, num_tokens)
        if padding and num_tokens > 1:  # upstream fails if a threshold cuts the places for drafts
            step.drafts[request] = num_tokens - 1
        return True

    def _padding(self, num_computed_tokens: int, step: Step) -> int:
        """Places for drafts that a request gets which joins with one token to compute.

        There are no drafts yet; the places make its batch as wide as those of the others.
        """
        count = self._config.num_speculative_tokens
        joins_others = num_computed_tokens > 0 or len(step.scheduled) > len(step.admitted)
        has_room = num_computed_tokens + count + 2 <= self._config.max_model_len
        return count if joins_others and has_room and not step.goes_on_with_prefill else 0

    def _fits(
        self, request: ScheduledRequest, cached: list[int], num_tokens: int, *, reserved: int = 0
    ) -> bool:
        """Whether there are blocks for a waiting request, beyond those it finds cached or has."""
        config, cache = self._config, self._cache
        if config.scheduler_reserve_full_isl:
            num_tokens = max(num_tokens, request.num_tokens)
        needed = cache.blocks_for(min(num_tokens, config.max_model_len)) - len(cached) + reserved
        needed -= len(request.table.blocks)
        # Cached blocks that nobody holds count as free until they are taken.
        needed += cache.count_unreferenced(cached)
        if self._running:
            needed += self._watermark_blocks
        fits = needed <= cache.free_count
        is_simple = config.scheduler_reserve_full_isl and self._remote is None
        if not fits and is_simple and self._fast_path:
            self._shortage = Shortage(request, needed, cache.num_changes)
        return fits

    def _lacks_blocks(self, request: ScheduledRequest, num_changes: int = 0) -> bool:
        """Whether it is clear without a look at the cache that a waiting request does not fit.

        What it needs besides blocks that others hold has become less by one at most with each change of
        the cache: one more block of its prefix is cached, or one that is held takes the place of one that is not.
        """
        shortage, cache = self._shortage, self._cache
        if shortage is None or shortage.request is not request or not self._running:
            return False
        num_changes += cache.num_changes - shortage.num_changes
        return shortage.needed - num_changes > cache.free_count

    def _seat(self, request: ScheduledRequest, queue: Queue, step: Step) -> None:
        """Move the first waiting request of a queue to the running ones."""
        queue.pop()
        self._skipped.discard(request)
        if self._remote is not None:
            self._remote.request_left(request)
        self._shortage = None
        self._seats += 1
        request.seat = self._seats
        request.status = RequestStatus.RUNNING
        request.record(EventType.SCHEDULED, step.now)
        self._running.append(request)
        step.admitted.append(request)

    def _advance(self, step: Step) -> Iterator[None]:
        """Count the tokens that are computed in this step, and see who gets a new one."""
        details = step.details
        for number, (request, num_tokens) in enumerate(step.scheduled.items()):
            if number and not number % (4 * SCHEDULED_AT_ONCE):
                yield
            if request.num_tokens == request.num_prompt_tokens:  # no output so far
                details.num_ctx_requests += 1
                details.num_ctx_tokens += num_tokens
            else:
                details.num_generation_requests += 1
                details.num_generation_tokens += num_tokens
            request.num_computed_tokens += num_tokens
            step.context_length += request.num_computed_tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
            if not request.is_prefill_chunk:
                step.individual_rows.append(request)
        step.rows += step.individual_rows
        if step.num_tokens:
            details.iteration_index = self._steps
            self._steps += 1

    def _append(self, request: ScheduledRequest, got: Sampled, step: Step) -> None:
        """Give a request the tokens of its row, and take back what was computed for wrong drafts."""
        num_drafts = step.drafts.get(request, 0)
        if num_drafts:
            request.num_computed_tokens -= num_drafts - got.num_accepted
            self._observe_drafts(step, num_drafts, got.num_accepted)
        request.num_tokens += got.num_delivered
        request.num_draft_tokens = self._config.num_speculative_tokens
        if request.num_draft_tokens and self._config.vllm_release >= (0, 33):
            # The last token of a row is not computed yet, even if the row was cut.
            self._cache.cache_full_blocks(request.table, request.num_tokens - 1)

    def _observe_drafts(self, step: Step, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one row."""
        stats = step.spec_decoding_stats
        if stats is None:
            count = self._config.num_speculative_tokens
            stats = step.spec_decoding_stats = SpecDecodingStats(
                num_spec_tokens=count,
                num_accepted_tokens_per_pos=[0] * count,
                num_draft_tokens_per_pos=[0] * count,
            )
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            stats.num_accepted_tokens_per_pos[position] += 1
        for position in range(num_drafts):
            stats.num_draft_tokens_per_pos[position] += 1

    def _take_extras(self, request: ScheduledRequest) -> RowExtras:
        block_size = self._cache.block_size
        return RowExtras(request.take_events(), request.take_prefill_stats(block_size))

    def _finish(self, finished: Collection[ScheduledRequest], step: Step) -> Iterator[None]:
        """End requests in the order of their rows."""
        ending = sorted(finished, key=by_seat)
        requests = [one for one in ending if one.status is RequestStatus.RUNNING]
        self._leave_queues(requests)
        for number, request in enumerate(requests):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            if self._remote is not None:
                self._remote.lend(request, step.now)
            self._free(request)

    def _leave_queues(self, requests: Collection[ScheduledRequest]) -> None:
        """Take requests out of where they run or wait."""
        running = [one for one in requests if one.status is RequestStatus.RUNNING]
        for request in running:
            self._group.leave(request)
        if len(running) == 1:
            del self._running[bisect_left(self._running, running[0].seat, key=by_seat)]
        elif running:
            leaving = set(running)
            self._running = [one for one in self._running if one not in leaving]
        if len(running) < len(requests):
            waiting = set(requests)
            self._waiting.remove(waiting)
            self._holding.remove(waiting)
            self._skipped -= waiting

    def _free(self, request: ScheduledRequest) -> None:
        request.status = RequestStatus.FINISHED
        if self._remote is not None:
            self._remote.request_ended(request)
        if self._remote is None or request.request_id not in self._remote.loans:
            self._cache.free(request.table)
        del self._requests[request.request_id]
        self._farewell = True

    def _regroup(self, step: Step) -> None:
        """Let the decode group count for the running requests as soon as all of them decode."""
        if not self._fast_path:
            return
        group = self._group
        newcomers = [one for one in step.admitted if one.status is RequestStatus.RUNNING]
        if not len(group):
            newcomers = self._running
        if all(request.is_decoding for request in newcomers):
            for request in newcomers:
                group.join(request)
        else:
            group.dissolve()
