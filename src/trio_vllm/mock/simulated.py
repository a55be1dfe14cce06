"""`SimulatedScheduler` runs requests as vLLM's scheduler lets them; they take the time that is asked for.

It stands in the place of `UnlimitedScheduler`, in which all requests run at once. Who computes how
much in a step is decided in ``scheduling.py``; here rows are made of that.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from trio_vllm.mock.block_hashes import DEFAULT_SEED, BlockHasher, BlockKeys
from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.connector import Connector
from trio_vllm.mock.content import TokenSource
from trio_vllm.mock.encoding import (
    NIL,
    MessageBuilder,
    MessageTemplate,
    Outgoing,
    SchedulerStatsEncoder,
    pack_double,
    pack_prefill_stats,
    row_with,
)
from trio_vllm.mock.events import ScheduleCounts
from trio_vllm.mock.kv_cache import BLOCKS_AT_ONCE, KvCache
from trio_vllm.mock.kv_events import KvCacheEvent
from trio_vllm.mock.lineup import Lineup, Member, Share
from trio_vllm.mock.plain_batch import SLICE_NUMBERS, RowMaker, advance, row_cost
from trio_vllm.mock.request import Request, cache_scope
from trio_vllm.mock.scheduled_request import RequestStatus, ScheduledRequest
from trio_vllm.mock.scheduling import (
    ONE_TOKEN,
    SCHEDULED_AT_ONCE,
    RowExtras,
    Sampled,
    Scheduler,
    SchedulerConfig,
    Step,
)
from trio_vllm.mock.spread import Acceptance
from trio_vllm.mock.timed_group import TimedGroup, Times
from trio_vllm.mock.times import RequestTimes, StepTimes
from trio_vllm.mock.token_rows import DRAWN_AT_ONCE, MOST_STEPS, Indices, TokenRows
from trio_vllm.mock.unlimited import MAX_LAG, Counts, Paused
from trio_vllm.protocol import EngineCoreRequest, EventType, PrefillStats, SchedulerStats


def _scheduler_config(config: MockEngineConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        scheduling_policy=config.scheduling_policy,
        max_loras=config.max_loras or None,
        num_speculative_tokens=config.num_speculative_tokens,
        vllm_release=config.vllm_release,
    )


def _kv_cache(config: MockEngineConfig) -> KvCache:
    seed = config.prefix_caching_hash_seed or DEFAULT_SEED
    kind = BlockKeys if config.kv_events is None else BlockHasher
    return KvCache(
        config.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        hasher=kind(config.prefix_caching_hash_algo, seed),
        enable_events=config.kv_events is not None,
    )


TOKENS_AT_ONCE = 2048
"""Of all the steps that are made together, which takes some 0.3 ms."""


class SimulatedScheduler:
    """The unfinished requests of one engine, and its steps.

    Args:
      config: With a schedule.
      source: Of tokens.
      fast_path: False makes all rows as objects, for comparison.
      connector: To other engines, in prefill/decode disaggregation.
    """

    def __init__(
        self,
        config: MockEngineConfig,
        source: TokenSource,
        *,
        fast_path: bool = True,
        connector: Connector | None = None,
    ) -> None:
        self._config = config
        self._cache = _kv_cache(config)
        self._scheduler = Scheduler(
            _scheduler_config(config),
            self._cache,
            fast_path=fast_path and not self._is_by_request,
            connector=connector,
        )
        self._request_times = RequestTimes.of(config)
        self._times = StepTimes.of(config)
        # Rows as objects, times, and what names a step in its statistics are for the other steps.
        self._can_be_steady = (
            fast_path
            and self._times.is_zero
            and not (self._is_by_request or config.lockstep)
            and not config.enable_logging_iteration_details
        )
        self._in_hand: Step | None = None
        self._due = 0.0
        self._begun = -math.inf  # when the engine last had work again
        self._sampling: Iterator[int] | None = None  # of the step in hand, if it has begun
        self._sampled: dict[ScheduledRequest, Sampled] = {}
        self._lost = 0.0
        self._resets_at_end = False  # what resets the cache waits for the end of the step
        self._resetting: Iterator[None] | None = None  # or goes on in the place of steps
        self._rows = TokenRows(config.vocab_size, source)
        self._maker = RowMaker(config, source)
        # In a slot a request gets one token a step.
        self._fast_path = fast_path and not config.num_speculative_tokens
        self._acceptance = Acceptance(config.acceptance_rate)
        self._members: dict[str, Member] = {}
        self._by_scheduled: dict[ScheduledRequest, Member] = {}
        self._lineup = Lineup(self._rows)
        self._plain_count = 0  # requests whose rows are objects
        self._is_exact = True  # all that were scheduled for the step in hand still run
        self._stats: SchedulerStats | None = None
        self._encoder = SchedulerStatsEncoder()
        self._held: frozenset[int] = frozenset()
        self._kv_events: list[list[KvCacheEvent]] = []
        self.tokens_made = 0
        self.schedule_counts = ScheduleCounts()

    @property
    def counts(self) -> Counts:
        """Requests running and waiting."""
        return self._scheduler.num_running, self._scheduler.num_waiting

    @property
    def kv_cache_usage(self) -> float:
        """The part of the blocks that requests hold."""
        return self._scheduler.kv_cache_usage

    @property
    def paused(self) -> Paused:
        """How far requests are held back."""
        return self._scheduler.paused

    @paused.setter
    def paused(self, paused: Paused) -> None:
        self._scheduler.paused = paused
        self._scheduler.wake()

    @property
    def has_work(self) -> bool:
        """Whether a step is in hand, or can begin."""
        if self._resetting is not None:
            return True
        return (self._in_hand is not None or self._scheduler.has_work) and not self._is_stalled

    @property
    def _is_stalled(self) -> bool:
        """Whether a client with requests is late: a scheduler cannot do without some of its requests."""
        return bool(self._held) and any(
            member.request.client_index in self._held for member in self._members.values()
        )

    @property
    def is_steady(self) -> bool:
        """Whether the next steps make tokens and nothing else, at once."""
        return (
            self._can_be_steady
            and self._in_hand is None
            and not self._plain_count
            and self._scheduler.is_steady
            and not self._is_stalled
        )

    _is_by_request = False

    # Requests -----------------------------------------------------------------------------------

    def get(self, request_id: str) -> Request | None:
        """An unfinished request."""
        member = self._members.get(request_id)
        return None if member is None else member.request

    def unfinished(self) -> list[Request]:
        """All of them, in the order in which they came."""
        return [member.request for member in self._members.values()]

    def hash_prompt(self, wire: EngineCoreRequest) -> Generator[None, None, list[bytes]]:
        """Compute the block hashes of a long prompt; yields whenever others should have a turn."""
        prompt = wire.prompt_token_ids or ()
        # Fewer are hashed as they are scheduled; more than the model takes are refused.
        at_once = BLOCKS_AT_ONCE * self._cache.block_size
        if not at_once < len(prompt) < self._config.max_model_len:
            return []
        return (yield from self._cache.hash_blocks(prompt, cache_scope(wire)))

    def add(self, request: Request, now: float) -> None:
        """Let a request wait for its turn."""
        scheduled = request.scheduled
        assert scheduled is not None
        member = Member(request, scheduled)
        if self._fast_path and self._rows.accepts(request):
            assert isinstance(scheduled.table.token_ids, array)
            member.slot = self._rows.add(request, scheduled.table.token_ids)
        else:
            member.plain = self._maker.member(request)
            self._plain_count += 1
        self._members[request.request_id] = self._by_scheduled[scheduled] = member
        if scheduled.transfer is not None:
            scheduled.transfer_time = self._request_times.of_transfer(request.key)
        self._scheduler.add(scheduled, now)

    def remove(self, requests: Sequence[Request]) -> None:
        """Forget unfinished requests; what they have ``emitted`` is up to date then."""
        self._scheduler.abort([request.request_id for request in requests])
        self._forget([self._members[request.request_id] for request in requests])
        self._is_exact = False

    def _forget(self, members: Sequence[Member]) -> None:
        self._lineup.remove(members)
        for member in members:
            self._forget_one(member)

    def _forget_in_slices(self, members: Sequence[Member]) -> Iterator[None]:
        self._lineup.remove(members)
        for start in range(0, len(members), SCHEDULED_AT_ONCE):
            if start:
                yield
            for member in members[start : start + SCHEDULED_AT_ONCE]:
                self._forget_one(member)

    def _forget_one(self, member: Member) -> None:
        request = member.request
        del self._members[request.request_id], self._by_scheduled[member.scheduled]
        if member.plain is not None:
            request.emitted = member.plain.emitted
            self._plain_count -= 1
        elif member.slot is not None:
            request.emitted = request.end - self._rows.remove(member.slot)

    def release(self, request_id: str) -> None:
        """Another engine has fetched the blocks of a request that is over."""
        self._scheduler.release(request_id)

    def release_all(self) -> None:
        """Keep blocks for no other engine."""
        self._scheduler.release_all()

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are in use that no preemption would free."""
        return self._scheduler.holds_blocks

    def preempt_all(self, now: float) -> None:
        """Let all running requests wait again, and forget the prefix cache."""
        self._scheduler.wake()
        self._is_exact = False
        self._resets_at_end = True
        if self._in_hand is None:
            self._reset(now)

    @property
    def is_preempting(self) -> bool:
        """Whether requests still run that `preempt_all` lets wait."""
        return self._resets_at_end or self._resetting is not None

    def _reset(self, now: float) -> None:
        """Do what `preempt_all` wants, or begin with it if it takes long."""
        if self._resets_at_end:
            self._resets_at_end = False
            self._resetting = self._scheduler.preempt_all(now)
            self._reset_more(now)

    def _reset_more(self, now: float) -> bool:
        """Do a slice of what `_reset` began, if it is under way; whether more is left."""
        if self._resetting is None:
            return False
        for _ in self._resetting:
            return True
        self._resetting = None
        self._scheduler.reset_prefix_cache(now)
        return False

    def reset_cache(self, now: float) -> None:
        """Forget the prefix cache, if no request runs."""
        self._scheduler.reset_prefix_cache(now)

    def hold(self, held: frozenset[int]) -> None:
        """Make no step while these clients have requests, until the next call."""
        self._held = held

    # Steps --------------------------------------------------------------------------------------

    def steady_step(self, template: MessageTemplate, now: float) -> list[Outgoing] | None:
        """Make the next step if it is steady; its messages, or None if it is not."""
        made = self.steady_steps(template, now, 1)
        return None if made is None else made[1]

    def steady_steps(
        self, template: MessageTemplate, now: float, limit: int
    ) -> tuple[int, list[Outgoing]] | None:
        """Make the next steady steps, ``limit`` at most: how many, and their messages.

        None if there are none: a request ends, or there are too few blocks.
        """
        scheduler, rows = self._scheduler, self._rows
        self._lineup.follow(scheduler.running, self._by_scheduled)
        shares = sorted(self._lineup.shares.items())
        limit = min(limit, 1 + TOKENS_AT_ONCE // scheduler.num_running, MOST_STEPS)
        for _, share in shares:
            limit = rows.prepare(share.layout, limit)
        stats = self._decode(limit)
        if not stats:
            return None
        count = len(stats)
        self.tokens_made += count * scheduler.num_running
        end = b"".join((b"\xcb", pack_double(now), template.end()))
        messages: list[Outgoing] = []
        for client_index, share in shares:
            head = template.start(len(share.layout))
            messages += [
                (client_index, [b"".join((head, made, encoded, end))])
                for made, encoded in zip(
                    rows.advance_often(share.layout, count), stats, strict=True
                )
            ]
            stats = [NIL] * count  # once is enough
        return count, messages

    def _decode(self, limit: int) -> list[bytes]:
        """Make steady steps of the scheduler; the encoded statistics of each."""
        encoded: list[bytes] = []
        stats = self._scheduler.make_stats()
        usage = None
        while len(encoded) < limit and self._scheduler.decode():
            stats.kv_cache_usage = self._cache.usage
            changed = stats.kv_cache_usage != usage
            encoded.append(self._encoder.encode(stats) if changed else encoded[-1])
            usage = stats.kv_cache_usage
            if events := self._cache.take_events():
                self._kv_events.append(events)
        return encoded

    def begin(self, now: float) -> None:
        """There may be work again: a message came, or a client is not late any more."""
        self._begun = now

    def due(self, now: float) -> float:
        """When the step in hand ends, or the next one begins."""
        if self._resetting is not None:
            return now
        return self._scheduler.due(now) if self._in_hand is None else self._due

    def step(
        self, now: float, builder_for: Callable[[int], MessageBuilder]
    ) -> Generator[None, None, list[Request]]:
        """End the step in hand and begin the next; which requests have finished.

        It yields whenever others should have a turn; nothing may be added or removed in between.
        """
        finished: list[Request] = []
        if self._reset_more(now):
            return finished
        step, begin = self._in_hand, now
        if step is not None:
            if now < self._due or self._is_stalled or not self._is_sampled(step):
                return finished
            begin = self._keep_pace(self._due, now)
            finished = yield from self._end(step, builder_for)
        if self.has_work and self._resetting is None:
            following = yield from self._scheduler.schedule_in_slices(now)
            duration = self._times.duration(following)
            self._in_hand, self._due = following, begin + duration
            # A message has the rows of one step.
            if step is None and not duration and self._is_sampled(following):
                finished = yield from self._end(following, builder_for)
        return finished

    def _keep_pace(self, due: float, now: float) -> float:
        """The time that was due, unless that is too long ago; then time is lost.

        The time in which a late client let the engine wait is not.
        """
        due = max(due, self._begun)
        kept = max(due, now - MAX_LAG)
        self._lost += kept - due
        return kept

    def pop_lost_time(self) -> float:
        """Seconds that the machine was too slow for since this was last called."""
        lost, self._lost = self._lost, 0.0
        return lost

    def _is_sampled(self, step: Step) -> bool:
        """Go on with what the rows of the step in hand get, for a slice; whether that is all of it."""
        if not self._plain_count:
            return True
        if self._sampling is None:
            self._follow(step)
            self._sampling = self._sample_plain(step, [*self._lineup.plain.members])
        return advance(self._sampling, SLICE_NUMBERS) < SLICE_NUMBERS

    def _follow(self, step: Step) -> list[ScheduledRequest]:
        """Lay out the rows of a step, and give their requests; some may have been aborted since it began."""
        rows = step.rows
        if not self._is_exact:
            rows = [request for request in rows if request.status is RequestStatus.RUNNING]
        self._lineup.follow(rows, self._by_scheduled)
        return rows

    def _end(
        self, step: Step, builder_for: Callable[[int], MessageBuilder]
    ) -> Generator[None, None, list[Request]]:
        """Make the rows of the step in hand, and let the scheduler know."""
        rows = self._follow(step)
        self._is_exact = True
        shares = [*self._lineup.shares.items()]
        for _, share in shares:
            if len(share.layout) > DRAWN_AT_ONCE:
                yield from self._rows.draw_in_slices(share.layout)
        lasts = [self._rows.advance(share.layout) for _, share in shares]
        sampled, self._sampled, self._sampling, self._in_hand = self._sampled, {}, None, None
        finished = [
            share.members[place]
            for (_, share), last in zip(shares, lasts, strict=True)
            for place in last
        ]
        finished += [member for member in self._lineup.plain.members if _is_last(member)]
        ending = [member.scheduled for member in finished]
        extras = yield from self._scheduler.update_in_slices(step, ending, sampled)
        for (client_index, share), last in zip(shares, lasts, strict=True):
            yield from self._write(share, last, extras, builder_for(client_index))
        yield from self._write_plain(extras, builder_for)
        self._count(extras)
        self.tokens_made += len(rows)
        if sampled:
            self.tokens_made += sum(
                sampled[one].num_delivered - 1 for one in rows if one in sampled
            )
        if events := self._cache.take_events():
            self._kv_events.append(events)
        self._make_stats(step)
        if finished:
            yield from self._forget_in_slices(finished)
        self._reset(step.now)
        return [member.request for member in finished]

    def _write(
        self,
        share: Share,
        last: Sequence[int],
        extras: Mapping[ScheduledRequest, RowExtras],
        builder: MessageBuilder,
    ) -> Iterator[None]:
        """Put the rows of one client into its message: those with more than tokens one by one."""
        layout = share.layout
        data = bytes(layout.buffer)
        told = (share.find(self._by_scheduled[request].seat) for request in extras)
        lasts = set(last)
        special = lasts.union(place for place in told if place is not None)
        done = written = 0
        for number, place in enumerate(sorted(special)):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            member = share.members[place]
            start, end = layout.edges(place)
            if place > done:
                builder.add(data[written:start], place - done)
            events, prefill = _told(extras.get(member.scheduled))
            stats = None if prefill is None else pack_prefill_stats(prefill)
            is_last = place in lasts
            builder.add(
                row_with(data[start + 1 : end], member.request, events, stats, final=is_last)
            )
            if is_last:
                builder.finished.append(member.request.request_id)
            done, written = place + 1, end
        if done < len(layout):
            builder.add(data[written:], len(layout) - done)

    def _sample_plain(self, step: Step, members: Sequence[Member]) -> Iterator[int]:
        """Give tokens to the rows that are objects; yields how many numbers each slice has made."""
        width = max((member.plain.width for member in members if member.plain), default=0)
        for member in members:
            plain, scheduled = member.plain, member.scheduled
            assert plain is not None
            if plain.prefill is not None:
                yield from plain.prefill
                plain.prefill = None
            if scheduled.status is not RequestStatus.RUNNING:  # aborted in between
                continue
            got = self._verify(member.request, plain.emitted, step.drafts.get(scheduled))
            self._maker.sample(plain, width, got.num_delivered)
            scheduled.table.token_ids.extend(plain.output.new_token_ids)
            if got is not ONE_TOKEN:
                self._sampled[scheduled] = got
            yield row_cost(plain, width * got.num_delivered)

    def _verify(self, request: Request, emitted: int, num_drafts: int | None) -> Sampled:
        """What a request gets that has draft tokens: those accepted and one more."""
        if not num_drafts:
            return ONE_TOKEN
        num_accepted = self._acceptance.draw(request.key, emitted, num_drafts)
        return Sampled(num_accepted, min(num_accepted + 1, request.end - emitted))

    def _write_plain(
        self,
        extras: Mapping[ScheduledRequest, RowExtras],
        builder_for: Callable[[int], MessageBuilder],
    ) -> Iterator[None]:
        for number, member in enumerate(self._lineup.plain.members):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            plain, request = member.plain, member.request
            assert plain is not None
            events, prefill = _told(extras.get(member.scheduled))
            request.events, plain.output.prefill_stats = list(events), prefill
            if request.transfer is not None and request.transfer.answer and prefill is not None:
                # The decode side tells its users of these, and not that all was cached for it.
                request.transfer.answer["remote_prefill_cached_tokens"] = prefill.num_cached_tokens
            self._maker.add_row(plain, builder_for(request.client_index))

    def pop_kv_events(self) -> list[list[KvCacheEvent]]:
        """What was cached and evicted in each step since this was last called."""
        events, self._kv_events = self._kv_events, []
        return events

    # Statistics ---------------------------------------------------------------------------------

    def _count(self, extras: Mapping[ScheduledRequest, RowExtras]) -> None:
        """Count what frontends count of rows."""
        counts = self.schedule_counts
        for row in extras.values():
            if row.prefill_stats is not None:
                counts.prompt_tokens += row.prefill_stats.num_prompt_tokens
            counts.preemptions += sum(event.type is EventType.PREEMPTED for event in row.events)

    def _make_stats(self, step: Step) -> None:
        """Make the statistics of a step, and count what frontends count of them."""
        self._stats = stats = self._scheduler.make_stats(step)
        self.schedule_counts.prefix_cache_queries += stats.prefix_cache_stats.queries
        self.schedule_counts.prefix_cache_hits += stats.prefix_cache_stats.hits

    @property
    def has_stats(self) -> bool:
        """Whether there was a step since `pop_stats`."""
        return self._stats is not None

    def pop_stats(self, step: int, wave: int) -> bytes:
        """The encoded statistics of the last step; the numbers are those of a lockstep."""
        stats, self._stats = self._stats, None
        assert stats is not None
        stats.step_counter, stats.current_wave = step, wave
        if not self._config.enable_logging_iteration_details:
            stats.iteration_details = None
        return self._encoder.encode(stats)

    def forget_messages(self) -> None:
        """Nothing is kept between two steps that depends on a template."""


GRANULARITY, GRANULARITY_PER_REQUEST = 0.0005, 0.000004
"""Seconds between two looks at the requests, at least: tokens that are due in between come a little
late, and those after them do not."""


class TimedRequests(SimulatedScheduler):
    """A `SimulatedScheduler` in which the tokens of each request come at times of their own.

    A request that was scheduled has its row withheld until it is due, and is scheduled again after that.
    """

    _is_by_request = True

    def __init__(
        self,
        config: MockEngineConfig,
        source: TokenSource,
        *,
        fast_path: bool = True,
        connector: Connector | None = None,
    ) -> None:
        super().__init__(config, source, fast_path=fast_path, connector=connector)
        self._dues: dict[ScheduledRequest, float] = {}  # of the rows that are withheld
        self._order: list[tuple[float, int, ScheduledRequest]] = []
        """A heap of these, and of some that are not any more."""
        self._unscheduled: set[ScheduledRequest] = set()
        """Those that run and have something to compute."""
        self._last: dict[ScheduledRequest, float] = {}
        """When those got their last token that have just got it. One that is scheduled later was preempted
        or paused meanwhile: its times begin anew."""
        self._is_eager = False  # there may be something to schedule before a row is due
        self._looked_at = 0.0
        self._has_chunks = False  # a running request is in the middle of its prompt
        self._group = TimedGroup(self._cache.block_size, self._rows)
        # Which adapters a step may use depends on the requests that it schedules.
        self._has_group = self._fast_path and not config.max_loras

    @property
    def has_work(self) -> bool:
        """Whether a row is withheld, or something can be scheduled."""
        if self._resetting is not None:
            return True
        has_rows = bool(self._dues or self._group) or self._in_hand is not None
        return (has_rows or self._scheduler.has_work) and not self._is_stalled

    def begin(self, now: float) -> None:
        """There may be work again: perhaps a request that can be admitted."""
        super().begin(now)
        self._is_eager = True

    def add(self, request: Request, now: float) -> None:
        """Let a request wait for its turn."""
        super().add(request, now)
        self._is_eager = True

    def remove(self, requests: Sequence[Request]) -> None:
        """Forget unfinished requests: there may be room for others."""
        for request in requests:
            self._group.leave(self._members[request.request_id])
        super().remove(requests)
        self._is_eager = True

    def due(self, now: float) -> float:
        """When the next row is due, or a transfer of blocks is over."""
        if self._is_eager or self._in_hand is not None or self._resetting is not None:
            return now
        if not (self._dues or self._group):
            return self._scheduler.due(now)
        pause = max(GRANULARITY, GRANULARITY_PER_REQUEST * self._scheduler.num_running)
        first = min(self._first_due, self._group.first_due, self._scheduler.next_timer)
        return max(first, self._looked_at + pause)

    @property
    def _first_due(self) -> float:
        """When the next row is due."""
        order = self._order
        while order and self._dues.get(order[0][2]) != order[0][0]:
            heappop(order)
        return order[0][0] if order else math.inf

    def step(
        self, now: float, builder_for: Callable[[int], MessageBuilder]
    ) -> Generator[None, None, list[Request]]:
        """Send the rows that are due, and schedule what can be; which requests have finished."""
        finished: list[Request] = []
        if not self.has_work:
            self._is_eager = False
            return finished
        if self._reset_more(now):
            return finished
        if not self._scheduler.has_room() or self._has_chunks:
            self._withhold(self._group.dissolve())
        step = self._in_hand = self._in_hand or (yield from self._step_of_due(now))
        if step is not None and not self._is_sampled(step):
            return finished
        in_group = self._group.due(now)
        if len(in_group):
            step = step or Step(now, 0, 0.0)
            self._write_group(in_group, builder_for)
        if step is not None:
            finished = yield from self._end(step, builder_for)
            self._lineup.clear()  # the group has no use for layouts
            running = RequestStatus.RUNNING
            self._unscheduled.update(one for one in step.rows if one.status is running)
        self._is_eager, self._looked_at = False, now
        if self._scheduler.has_work and self._resetting is None:
            yield from self._schedule(now, in_group, keep_stats=step is not None)
        self._last.clear()
        return finished

    def _withhold(self, leaving: Iterable[tuple[Member, float]]) -> None:
        """Keep the rows of members that leave the group, until they are due."""
        for member, due in leaving:
            request = member.scheduled
            self._dues[request] = due
            heappush(self._order, (due, request.seat, request))

    def _write_group(self, slots: Indices, builder_for: Callable[[int], MessageBuilder]) -> None:
        """Write the rows of the group that are due."""
        for client_index, share in self._group.by_client(slots):
            builder_for(client_index).add(self._rows.write(share), len(share))
        self.tokens_made += len(slots)

    def _step_of_due(self, now: float) -> Generator[None, None, Step | None]:
        """A step with just the rows that are due, if any are, but for those of the group."""
        for number, leaving in enumerate(self._group.leave_at_end(now)):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            self._withhold([leaving])
        due: list[ScheduledRequest] = []
        while (time := self._first_due) <= now:
            if due and not len(due) % SCHEDULED_AT_ONCE:
                yield
            request = heappop(self._order)[2]
            del self._dues[request]
            self._last[request] = self._keep_pace(time, now)
            due.append(request)
        if not due:
            return None
        step = Step(now, 0, 0.0)
        step.rows = step.individual_rows = sorted(due, key=lambda request: request.seat)
        return step

    def _schedule(self, now: float, in_group: Indices, *, keep_stats: bool) -> Iterator[None]:
        besides = self._group.next_tokens(in_group)
        step = yield from self._scheduler.schedule_in_slices(now, self._unscheduled, besides)
        if len(in_group):
            self._group.advance(in_group, self._next_dues(in_group, now))
        self._unscheduled.difference_update(step.scheduled)
        for request in step.preempted:
            self._dues.pop(request, None)
            self._unscheduled.discard(request)
        takes_in = self._has_group and self._scheduler.has_room(2)  # not to be dissolved at once
        for number, request in enumerate(step.rows):
            if number and not number % SCHEDULED_AT_ONCE:
                yield
            due, member = self._due_time(request, now), self._by_scheduled[request]
            if takes_in and member.slot is not None and request.only_decodes:
                self._group.join(member, due)
            else:
                self._withhold([(member, due)])
        chunks = [request for request in step.scheduled if request.is_prefill_chunk]
        self._unscheduled.update(chunks)
        self._is_eager = self._has_chunks = bool(chunks)
        if not keep_stats:
            self._make_stats(step)

    def _next_dues(self, slots: Indices, now: float) -> Times:
        """When the next tokens of the group are due, after those that are due now."""
        due = np.maximum(self._group.dues(slots), self._begun)
        kept = np.maximum(due, now - MAX_LAG)
        self._lost += float((kept - due).sum())
        times, running = self._request_times, self._scheduler.num_running
        if times.between.deviation:
            positions = self._group.positions(slots)
            return kept + [times.to_next_token(*position, running) for position in positions]
        return kept + times.to_next_token(0, 0, running)

    def _due_time(self, request: ScheduledRequest, now: float) -> float:
        member, running = self._by_scheduled[request], self._scheduler.num_running
        times, key = self._request_times, member.request.key
        if request.num_tokens > request.num_prompt_tokens:
            last = self._last.get(request, now)
            return last + times.to_next_token(key, request.num_tokens, running)
        if request.was_fetched:
            return now  # the transfer is over
        prefill = request.prefill_stats
        computed = request.num_prompt_tokens if prefill is None else prefill.num_computed_tokens
        return now + times.to_first_token(
            key, computed, running, is_remote=member.request.is_prefilled_elsewhere
        )

    def _forget_one(self, member: Member) -> None:
        self._group.leave(member)
        super()._forget_one(member)
        self._dues.pop(member.scheduled, None)
        self._last.pop(member.scheduled, None)
        self._unscheduled.discard(member.scheduled)

    def preempt_all(self, now: float) -> None:
        """Let all running requests wait again, and forget the prefix cache."""
        self._withhold(self._group.dissolve())
        super().preempt_all(now)
        self._dues.clear()
        self._unscheduled.clear()


def simulated_scheduler(
    config: MockEngineConfig,
    source: TokenSource,
    *,
    fast_path: bool,
    connector: Connector | None = None,
) -> SimulatedScheduler:
    """A scheduler that takes the time that the options say."""
    kind = TimedRequests if config.is_timed_by_request else SimulatedScheduler
    return kind(config, source, fast_path=fast_path, connector=connector)


def _is_last(member: Member) -> bool:
    return member.plain is not None and member.plain.output.finish_reason is not None


def _told(
    extras: RowExtras | None,
) -> tuple[Sequence[tuple[EventType, float]], PrefillStats | None]:
    """Events and statistics of a row."""
    if extras is None:
        return (), None
    return [(event.type, event.timestamp) for event in extras.events], extras.prefill_stats
