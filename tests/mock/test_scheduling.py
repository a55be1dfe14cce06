"""The scheduler's rules one by one. Whole schedules are in ``test_schedules.py``."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import attrs
import pytest

from trio_vllm.mock.block_hashes import CacheScope
from trio_vllm.mock.kv_cache import BlockTable, KvCache
from trio_vllm.mock.scheduled_request import RequestStatus, ScheduledRequest
from trio_vllm.mock.scheduling import RowExtras, Sampled, Scheduler, SchedulerConfig, Step
from trio_vllm.protocol import EventType

QUEUED, SCHEDULED, PREEMPTED = EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED


@attrs.define
class Engine:
    """A scheduler with blocks of four tokens; all prompts differ unless they are told to be the same."""

    scheduler: Scheduler
    cache: KvCache
    now: float = 0.0
    requests: dict[str, ScheduledRequest] = attrs.field(factory=dict)
    extras: dict[str, RowExtras] = attrs.field(factory=dict)
    _tokens: Iterator[int] = attrs.field(factory=count)

    def add(
        self,
        name: str,
        length: int,
        *,
        like: str | None = None,
        table: dict[str, Any] | None = None,
        **fields: Any,
    ) -> ScheduledRequest:
        """Add a request; its prompt begins as another one's."""
        shared = list(self.requests[like].table.token_ids) if like is not None else []
        prompt = [*shared[:length], *(next(self._tokens) for _ in range(length - len(shared)))]
        request = ScheduledRequest(
            request_id=name,
            num_prompt_tokens=length,
            table=BlockTable(prompt, **(table or {})),
            **fields,
        )
        self.requests[name] = request
        self.scheduler.add(request, self.now)
        return request

    def step(self, *finished: str) -> dict[str, int]:
        """Make a step: who computed how many tokens."""
        step = self.scheduler.schedule(self.now)
        self.end(step, *finished)
        return {request.request_id: tokens for request, tokens in step.scheduled.items()}

    def end(self, step: Step, *finished: str) -> None:
        """Sample a token for each row."""
        for request in step.rows:
            request.table.token_ids.append(next(self._tokens))
        extras = self.scheduler.update(step, [self.requests[name] for name in finished])
        self.extras = {request.request_id: extra for request, extra in extras.items()}

    def events(self, name: str) -> list[EventType]:
        """The events in the last step's row."""
        return [event.type for event in self.extras[name].events]


def make_engine(num_blocks: int = 100, *, cached: bool = True, **options: Any) -> Engine:
    """An engine; its fast path is off, so that the counts of requests can be looked at."""
    cache = KvCache(num_blocks, 4, enable_prefix_caching=cached)
    config = SchedulerConfig(**{"max_model_len": 1000, "max_num_batched_tokens": 100, **options})
    return Engine(Scheduler(config, cache, fast_path=False), cache)


def test_budget_is_spent_in_order_and_long_prompts_are_chunked() -> None:
    """The last prompt that begins gets what is left."""
    engine = make_engine(max_num_batched_tokens=10)
    engine.add("a", 7)
    engine.add("b", 7)
    engine.add("c", 7)
    assert engine.step() == {"a": 7, "b": 3}
    assert engine.step() == {"a": 1, "b": 4, "c": 5}
    assert engine.step() == {"a": 1, "b": 1, "c": 2}


def test_budget_may_be_less_than_the_batch() -> None:
    """``max_num_scheduled_tokens`` counts if it is less."""
    engine = make_engine(max_num_batched_tokens=10, max_num_scheduled_tokens=6)
    engine.add("a", 9)
    assert engine.step() == {"a": 6}


def test_prompts_are_whole_without_chunked_prefill() -> None:
    """One that does not fit stops all behind it."""
    engine = make_engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    engine.add("a", 7)
    engine.add("b", 7)
    engine.add("c", 1)
    assert engine.step() == {"a": 7}
    assert engine.step() == {"a": 1, "b": 7, "c": 1}


def test_threshold_limits_long_prompts_while_there_are_others() -> None:
    """Whoever is alone gets the budget."""
    engine = make_engine(long_prefill_token_threshold=3)
    engine.add("a", 10)
    engine.add("b", 2)
    assert engine.step("b") == {"a": 3, "b": 2}
    assert engine.step() == {"a": 7}


def test_adaptive_threshold_is_at_least_a_fair_share() -> None:
    """Of the budget, among all that run and wait."""
    engine = make_engine(
        long_prefill_token_threshold=3,
        long_prefill_token_threshold_adaptive=True,
        max_num_batched_tokens=20,
    )
    engine.add("a", 50)
    engine.add("b", 50)
    assert engine.step() == {"a": 10, "b": 10}


def test_last_token_that_the_model_can_have_is_not_computed() -> None:
    """A prompt as long as the model's length has no place for an output; it goes no further."""
    engine = make_engine(max_model_len=10, max_num_batched_tokens=6)
    engine.add("a", 10)
    assert [engine.step() for _ in range(3)] == [{"a": 6}, {"a": 3}, {}]


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_active_seqs"])
def test_seats_are_limited(option: str) -> None:
    """Others wait until one is free."""
    limit: dict[str, Any] = {option: 2}
    engine = make_engine(**limit)
    for name in "abc":
        engine.add(name, 3)
    assert engine.step("b") == {"a": 3, "b": 3}
    assert engine.step() == {"a": 1, "c": 3}


def test_last_admitted_is_preempted_and_comes_back_first() -> None:
    """It computes everything again, without a second prefill in the statistics."""
    engine = make_engine(4, cached=False)
    engine.add("a", 4)
    engine.add("b", 4)
    assert engine.step() == {"a": 4, "b": 4}
    assert engine.extras["b"].prefill_stats is not None
    engine.add("c", 1)
    assert engine.step() == {"a": 1}
    assert engine.requests["b"].status is RequestStatus.PREEMPTED
    assert engine.scheduler.num_waiting == 2
    assert engine.step("a") == {"a": 1}
    assert engine.step() == {"b": 5, "c": 1}
    assert engine.events("b") == [PREEMPTED, SCHEDULED]
    assert engine.extras["b"].prefill_stats is None


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """Even if there were blocks for somebody small."""
    engine = make_engine(5, cached=False)
    engine.add("a", 4)
    engine.add("b", 12)
    assert engine.step() == {"a": 4, "b": 12}
    engine.add("c", 1)
    assert engine.step() == {"a": 1}


def test_events_and_statistics_come_with_the_first_row() -> None:
    """Not with chunks before it."""
    engine = make_engine(max_num_batched_tokens=6)
    engine.now = 1.0
    engine.add("a", 10)
    engine.now = 2.0
    engine.step()
    assert engine.extras == {}
    engine.step()
    extra = engine.extras["a"]
    times = [(event.type, event.timestamp) for event in extra.events]
    assert times == [(QUEUED, 1.0), (SCHEDULED, 2.0)]
    stats = extra.prefill_stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_computed_tokens) == (10, 10)
    assert stats.num_cache_creation_tokens == 8
    engine.step()
    assert engine.extras == {}


def test_priority_decides_who_is_admitted() -> None:
    """Then arrival, then the id."""
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    engine.add("late", 1, priority=1, arrival_time=2.0)
    engine.add("z", 1, priority=1, arrival_time=1.0)
    engine.add("y", 1, priority=1, arrival_time=1.0)
    engine.add("first", 1, priority=0, arrival_time=9.0)
    order = [next(iter(engine.step(name))) for name in ("first", "y", "z", "late")]
    assert order == ["first", "y", "z", "late"]


def test_least_important_is_preempted() -> None:
    """Even if it was scheduled in the same step already."""
    engine = make_engine(4, scheduling_policy="priority", max_num_batched_tokens=4, cached=False)
    engine.add("minor", 3, priority=5)
    engine.step()
    engine.add("major", 7, priority=0)
    assert engine.step() == {"minor": 1, "major": 3}
    assert engine.step() == {"major": 3}
    assert engine.requests["minor"].status is RequestStatus.PREEMPTED


@pytest.mark.parametrize(
    ("release", "expected"), [((0, 32), {"a": 1}), ((0, 33), {"a": 1, "c": 1})]
)
def test_who_preempts_itself_stops_the_others_in_0_32(
    release: tuple[int, int], expected: dict[str, int]
) -> None:
    """In 0.33 more important ones behind it go on."""
    engine = make_engine(4, scheduling_policy="priority", cached=False, vllm_release=release)
    for name, length, priority in (("a", 1, 0), ("b", 3, 5), ("c", 1, 0)):
        engine.add(name, length, priority=priority)
        engine.step()
    assert engine.step() == expected
    assert engine.requests["b"].status is RequestStatus.PREEMPTED


def test_watermark_keeps_blocks_free_for_those_who_run() -> None:
    """It does not count for whoever would be alone."""
    engine = make_engine(10, watermark=0.5)
    engine.add("a", 24)
    engine.add("b", 1)
    assert engine.step() == {"a": 24}
    assert engine.step("a") == {"a": 1}
    assert engine.step() == {"b": 1}


@pytest.mark.parametrize(("reserve", "expected"), [(True, {"a": 6}), (False, {"a": 6, "b": 2})])
def test_whole_prompt_must_fit(reserve: bool, expected: dict[str, int]) -> None:
    """Unless the reserve is off; then the first chunk must."""
    engine = make_engine(4, max_num_batched_tokens=8, scheduler_reserve_full_isl=reserve)
    engine.add("a", 6)
    engine.add("b", 8)
    assert engine.step() == expected


def test_cached_prefix_is_not_computed_again() -> None:
    """Full blocks count, and the last token of a prompt is computed in any case."""
    engine = make_engine()
    engine.add("a", 8)
    engine.step("a")
    engine.add("same", 8, like="a")
    engine.add("longer", 11, like="a")
    engine.step()
    assert engine.extras["same"].prefill_stats.num_cached_tokens == 4  # type: ignore[union-attr]
    assert engine.extras["longer"].prefill_stats.num_cached_tokens == 8  # type: ignore[union-attr]
    stats = engine.cache.take_statistics()
    assert (stats.requests, stats.queries, stats.hits) == (3, 27, 12)


@pytest.mark.parametrize(
    "table",
    [
        {"scope": CacheScope(cache_salt="s")},
        {"scope": CacheScope(lora_name="l", lora_path="/l")},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_prefix_of_another_kind_is_not_shared(table: dict[str, Any]) -> None:
    """Salt and adapter are part of the hash; prompt log probabilities need the whole computation."""
    engine = make_engine()
    engine.add("a", 8)
    engine.step("a")
    engine.add("b", 8, like="a", table=table)
    assert engine.step() == {"b": 8}


def test_hits_of_preempted_requests_are_counted_apart() -> None:
    """They find their own blocks, if nobody took them."""
    engine = make_engine(6)
    engine.add("a", 8)
    engine.add("b", 12)
    engine.step()
    engine.cache.take_statistics()
    engine.step("a")
    assert engine.step() == {"b": 5}
    stats = engine.cache.take_statistics()
    assert (stats.requests, stats.preempted_requests) == (0, 1)
    assert (stats.preempted_queries, stats.preempted_hits) == (13, 8)


def test_reset_is_refused_while_blocks_are_held() -> None:
    """And done afterwards; the next statistics say so."""
    engine = make_engine()
    engine.add("a", 8)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(0.0)
    engine.step("a")
    assert engine.scheduler.reset_prefix_cache(0.0)
    assert engine.cache.take_statistics().reset
    engine.add("b", 8, like="a")
    assert engine.step() == {"b": 8}


def test_reset_may_preempt_all() -> None:
    """They come back in their order."""
    engine = make_engine()
    engine.add("a", 5)
    engine.add("b", 6)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(3.0, reset_running_requests=True)
    assert engine.cache.usage == 0.0
    assert list(engine.step()) == ["a", "b"]
    assert engine.events("a") == [PREEMPTED, SCHEDULED]
    assert engine.extras["a"].events[0].timestamp == 3.0


def test_adapters_are_limited() -> None:
    """A request with one too many is skipped, and those behind it go on."""
    engine = make_engine(max_loras=1)
    engine.add("a", 1, table={"lora_id": 1})
    engine.add("b", 1, table={"lora_id": 2})
    engine.add("c", 1, table={"lora_id": 1})
    engine.add("d", 1)
    assert engine.step("a") == {"a": 1, "c": 1, "d": 1}
    stats = engine.scheduler.make_stats()
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 1)
    assert engine.step("c", "d") == {"c": 1, "d": 1}
    assert engine.step() == {"b": 1}
    assert engine.scheduler.make_stats().num_skipped_waiting_reqs == 0


def test_blocked_request_is_skipped_until_it_is_ready() -> None:
    """For example while its grammar is compiled."""
    engine = make_engine()
    blocked = engine.add("a", 1, blocked=True)
    engine.add("b", 1)
    assert engine.scheduler.make_stats().num_skipped_waiting_reqs == 1
    assert engine.step() == {"b": 1}
    blocked.blocked = False
    assert engine.step() == {"a": 1, "b": 1}


def test_pause_holds_new_requests_or_all() -> None:
    """Running ones go on under ``new``."""
    engine = make_engine()
    engine.add("a", 1)
    engine.step()
    engine.add("b", 1)
    engine.scheduler.paused = "new"
    assert (engine.scheduler.num_unfinished, engine.step()) == (1, {"a": 1})
    engine.scheduler.paused = "all"
    assert (engine.scheduler.num_unfinished, engine.step()) == (0, {})
    engine.scheduler.paused = "no"
    assert engine.step() == {"a": 1, "b": 1}


def test_engine_makes_one_more_step_after_the_last_request() -> None:
    """It computes nothing, and has no details."""
    engine = make_engine()
    engine.add("a", 1)
    engine.step("a")
    assert engine.scheduler.has_work
    step = engine.scheduler.schedule(0.0)
    assert (step.num_tokens, step.rows) == (0, [])
    engine.end(step)
    assert engine.scheduler.make_stats(step).iteration_details is None
    assert not engine.scheduler.has_work


def test_abort_ends_requests_wherever_they_are() -> None:
    """Waiting, running, or in the middle of a step; unknown ids are ignored."""
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, 3)
    step = engine.scheduler.schedule(0.0)
    aborted = engine.scheduler.abort(["b", "c", "nobody", "b"])
    assert [request.request_id for request in aborted] == ["b", "c"]
    engine.end(step)
    assert list(engine.extras) == ["a"]
    assert engine.step() == {"a": 1}
    engine.scheduler.abort_all()
    assert (engine.scheduler.num_running, engine.cache.usage) == (0, 0.0)
    assert engine.scheduler.get("a") is None


def test_step_tells_what_it_costs() -> None:
    """Prompt tokens, decoding requests, and the length of all contexts."""
    engine = make_engine()
    engine.add("a", 8)
    engine.step()
    engine.add("b", 5)
    step = engine.scheduler.schedule(0.0)
    details = step.details
    assert (details.num_ctx_requests, details.num_ctx_tokens) == (1, 5)
    assert (details.num_generation_requests, details.num_generation_tokens) == (1, 1)
    assert (step.num_tokens, step.context_length) == (6, 14)


def test_drafts_are_computed_and_wrong_ones_taken_back() -> None:
    """A step verifies the drafts of the step before; its statistics count them."""
    engine = make_engine(num_speculative_tokens=3)
    request = engine.add("a", 5)
    assert engine.step() == {"a": 5}
    step = engine.scheduler.schedule(0.0)
    assert (step.scheduled, step.drafts) == ({request: 4}, {request: 3})
    request.table.token_ids += [7, 8]
    engine.scheduler.update(step, sampled={request: Sampled(1, 2)})
    assert (request.num_tokens, request.num_computed_tokens) == (8, 7)
    stats = engine.scheduler.make_stats(step).spec_decoding_stats
    assert stats is not None
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 1)
    assert stats.num_accepted_tokens_per_pos == [1, 0, 0]
    assert stats.num_draft_tokens_per_pos == [1, 1, 1]


def test_whoever_joins_decoding_requests_gets_places_for_drafts() -> None:
    """Not while a prompt is under way, and only if all of them fit."""
    engine = make_engine(num_speculative_tokens=3, max_num_batched_tokens=7)
    engine.add("a", 4)
    engine.step()
    engine.add("b", 1)
    assert engine.step() == {"a": 4}
    engine.requests["a"].num_draft_tokens = 0
    assert engine.step() == {"a": 1, "b": 4}


def test_usage_of_an_empty_pool_is_nothing() -> None:
    """An engine that has only the null block."""
    assert KvCache(1, 4).usage == 0.0
