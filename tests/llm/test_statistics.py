"""`Llm.statistics`: engines and requests in one object."""

from __future__ import annotations

import attrs
import pytest
import trio
from tests.client.world import make_output
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import MockClock

from trio_vllm.llm.statistics import EngineStatistics, TokenTotals
from trio_vllm.protocol import FinishReason, PrefillStats

IDLE = EngineStatistics(
    is_alive=True,
    is_stalled=False,
    in_flight=0,
    running=None,
    waiting=None,
    kv_cache_usage=None,
    totals=TokenTotals(),
    prompt_throughput=0.0,
    generation_throughput=0.0,
    prefix_cache_hit_rate=None,
    external_cache_hit_rate=None,
    oldest_request_age=None,
    statistics_age=None,
)
"""An engine that has sent nothing and has no requests."""

PREFILL = PrefillStats(
    num_prompt_tokens=10,
    num_computed_tokens=5,
    num_cached_tokens=5,
    num_local_cached_tokens=4,
    num_external_cached_tokens=1,
)


async def test_engines_and_requests(autojump_clock: MockClock) -> None:
    async with open_llm_world(2) as world:
        await world.start(lambda: world.llm.generate(make_prompt(n=3)))
        world.pass_time(7)
        await world.world.engines[1].report(
            running=2, waiting=4, num_skipped_waiting_reqs=1, kv_cache_usage=0.5
        )
        await trio.sleep(3)

        got = world.llm.statistics()

    assert got.in_flight == 1
    assert got.engines == {
        0: attrs.evolve(IDLE, in_flight=2, oldest_request_age=7.0),
        1: attrs.evolve(
            IDLE,
            in_flight=1,
            running=2,
            waiting=5,
            kv_cache_usage=0.5,
            oldest_request_age=7.0,
            statistics_age=3.0,
        ),
    }


async def run_request(world: LlmWorld, *, ends: bool) -> None:
    """A request that has got four tokens."""
    await world.start(lambda: world.llm.generate(make_prompt(max_tokens=9)))
    request_id = world.engine.requests()[0].request_id
    await world.engine.send(make_output([7], request_id, prefill_stats=PREFILL))
    reason = FinishReason.STOP if ends else None
    await world.engine.send(make_output([8, 9, 2], request_id, finish_reason=reason))


@pytest.mark.parametrize("ends", [True, False])
async def test_tokens_and_their_rates(autojump_clock: MockClock, ends: bool) -> None:
    """Requests in flight count like those that have ended."""
    async with open_llm_world() as world:
        await run_request(world, ends=ends)
        await trio.sleep(2)
        engine = world.llm.statistics().engines[0]

    assert engine.totals == TokenTotals(
        prompt_tokens=10, computed_prompt_tokens=5, external_cached_tokens=1, output_tokens=4
    )
    assert (engine.prompt_throughput, engine.generation_throughput) == (2.5, 2.0)
    assert (engine.prefix_cache_hit_rate, engine.external_cache_hit_rate) == (0.4, 0.1)


async def test_rates_since_earlier_statistics(autojump_clock: MockClock) -> None:
    async with open_llm_world() as world:
        await run_request(world, ends=False)
        await trio.sleep(2)
        earlier = world.llm.statistics()
        await run_request(world, ends=True)
        await trio.sleep(4)
        later = world.llm.statistics(earlier).engines[0]
        await trio.sleep(1)
        idle = world.llm.statistics(world.llm.statistics()).engines[0]

    assert later.totals.output_tokens == 8
    assert (later.prompt_throughput, later.generation_throughput) == (1.25, 1.0)
    assert later.prefix_cache_hit_rate == 0.4
    assert (idle.generation_throughput, idle.prefix_cache_hit_rate) == (0.0, None)


async def test_garbled_statistics_are_none() -> None:
    """One engine's must not take the view of the others away."""
    async with open_llm_world() as world:
        await world.engine.say(b"\x94\x00\x90\xa5stats\x00")

        assert world.llm.statistics().engines == {0: IDLE}


async def test_a_dead_engine_stays_in_it(autojump_clock: MockClock) -> None:
    """With the tokens that it has made."""
    async with open_llm_world(2) as world:
        await world.world.engines[1].report(running=1)
        await world.world.engines[1].send_sentinel()

        got = world.llm.statistics()

    assert got.engines == {0: IDLE, 1: attrs.evolve(IDLE, is_alive=False)}


async def test_an_engine_that_stalls(autojump_clock: MockClock) -> None:
    async with open_llm_world() as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        await trio.sleep(30)

        assert world.llm.statistics().engines[0].is_stalled
