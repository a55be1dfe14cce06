"""The log line about throughput and load."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from tests.client.world import World, hand_driven, make_output
from tests.llm.world import make_prompt
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.errors import ConfigurationError
from trio_vllm.llm import Llm, open_llm
from trio_vllm.llm.observers import Observer
from trio_vllm.protocol import (
    EngineCoreEvent,
    EventType,
    FinishReason,
    PerfStats,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)


@asynccontextmanager
async def open_llm_in_memory(**options: Any) -> AsyncIterator[tuple[Llm, World]]:
    """What `open_llm` gives, over two engines in memory."""
    source = hand_driven(2)
    async with open_llm(source, **options) as llm:
        yield llm, World(llm.client, source.engines, source.stranger)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """The lines since the last call, with their levels."""
    found = [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name == "trio_vllm.llm"
    ]
    caplog.clear()
    return found


async def test_the_line(caplog: pytest.LogCaptureFixture, autojump_clock: MockClock) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_llm_in_memory(stats_interval=10) as (llm, world):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.generate, make_prompt(max_tokens=99))
            await wait_all_tasks_blocked()
            engine = world.engines[0]
            (request,) = engine.requests()
            await engine.send(
                make_output(
                    list(range(25)),
                    request.request_id,
                    prefill_stats=PrefillStats(num_prompt_tokens=9, num_computed_tokens=5),
                    events=[EngineCoreEvent(EventType.PREEMPTED, 1.0)],
                ),
                scheduler_stats=SchedulerStats(
                    num_running_reqs=3,
                    num_waiting_reqs=1,
                    num_skipped_waiting_reqs=1,
                    kv_cache_usage=0.5,
                    prefix_cache_stats=PrefixCacheStats(queries=8, hits=2),
                ),
            )
            await world.engines[1].report(running=4, kv_cache_usage=0.25)
            await trio.sleep(10.5)

            assert lines(caplog) == [
                (
                    logging.INFO,
                    "prompt throughput 0.5 tokens/s, generation throughput 2.5 tokens/s,"
                    " running 7, waiting 2, deferred 1, KV cache usage 37.5%, preemptions 1,"
                    " prefix cache hit rate 25.0%",
                )
            ]
            await trio.sleep(20)
            idle = (
                "prompt throughput 0.0 tokens/s, generation throughput 0.0 tokens/s,"
                " running 7, waiting 2, deferred 1, KV cache usage 37.5%"
            )
            assert lines(caplog) == [(logging.INFO, idle), (logging.DEBUG, idle)]
            llm.abort()
    await trio.sleep(100)
    assert lines(caplog) == []


async def test_the_line_of_an_engine_with_all_features(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    half = SpecDecodingStats(
        num_spec_tokens=5,
        num_drafts=2,
        num_draft_tokens=10,
        num_accepted_tokens=6,
        num_accepted_tokens_per_pos=[2, 1],
    )
    other_half = attrs.evolve(half, num_accepted_tokens_per_pos=[2, 1, 1])
    async with open_llm_in_memory(stats_interval=2) as (llm, world):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.generate, make_prompt())
            await wait_all_tasks_blocked()
            (request,) = world.engines[0].requests()
            last = make_output(
                [7], request.request_id, num_nans_in_logits=1, finish_reason=FinishReason.STOP
            )
            await world.engines[0].send(last)
        for engine, drafts in zip(world.engines, (half, other_half), strict=True):
            await engine.report(
                running=1,
                kv_cache_usage=0.5,
                num_kv_fetch_reqs_by_stage={"waiting_to_start": 0, "in_progress": 2},
                connector_prefix_cache_stats=PrefixCacheStats(queries=8, hits=6),
                spec_decoding_stats=drafts,
                perf_stats=PerfStats(
                    num_flops_per_gpu=3 * 10**12,
                    num_read_bytes_per_gpu=4 * 10**9,
                    num_write_bytes_per_gpu=10**9,
                ),
            )
        await trio.sleep(2.5)

    assert lines(caplog) == [
        (
            logging.INFO,
            "prompt throughput 0.0 tokens/s, generation throughput 0.5 tokens/s,"
            " running 2, waiting 0, KV fetch in progress 4, KV cache usage 50.0%, corrupted 1,"
            " external prefix cache hit rate 75.0%,"
            " mean acceptance length 4.00, accepted 6.0 tokens/s, drafted 10.0 tokens/s,"
            " draft acceptance rate 60.0%, acceptance by position 1.000 0.500 0.250,"
            " 1.5 TFLOP/s per GPU, 2.5 GB/s per GPU",
        )
    ]


async def test_an_engine_without_statistics_is_not_shown_as_idle(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_llm_in_memory(stats_interval=2):
        await trio.sleep(2.5)

    throughput = "prompt throughput 0.0 tokens/s, generation throughput 0.0 tokens/s"
    assert lines(caplog) == [(logging.DEBUG, throughput)]


async def test_there_is_none_unless_asked_for(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_llm_in_memory():
        await trio.sleep(1_000)

    assert lines(caplog) == []


@pytest.mark.parametrize("interval", [0, -1, math.nan])
async def test_an_interval_that_makes_no_sense(interval: float) -> None:
    with pytest.raises(ConfigurationError, match="stats_interval"):
        async with open_llm_in_memory(stats_interval=interval):
            raise AssertionError("it was opened")


async def test_metrics_and_the_line_do_not_mind_each_other(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    class Counting(Observer):
        count = 0

        def scheduler_stats(self, engine_index: int, stats: SchedulerStats) -> None:
            self.count += 1

    caplog.set_level(logging.DEBUG)
    metrics = Counting()
    options = {"observers": [metrics], "stats_interval": 1}
    async with open_llm_in_memory(**options) as (_, world):
        await world.engines[0].report(running=1)
        await trio.sleep(1.5)

    assert metrics.count == 1
    assert len(lines(caplog)) == 1


async def test_what_the_block_raises_comes_out_as_it_is(autojump_clock: MockClock) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_llm_in_memory(stats_interval=1):
            raise ZeroDivisionError
