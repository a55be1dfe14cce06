"""`Llm.statistics`: engines and requests in one object."""

from __future__ import annotations

from tests.llm.world import make_prompt, open_llm_world
from trio.testing import MockClock

from trio_vllm.llm.statistics import EngineStatistics, LlmStatistics


async def test_engines_and_requests() -> None:
    async with open_llm_world(2) as world:
        await world.start(lambda: world.llm.generate(make_prompt(n=3)))
        await world.world.engines[1].report(
            running=2, waiting=4, num_skipped_waiting_reqs=1, kv_cache_usage=0.5
        )

        got = world.llm.statistics()

    expected = {
        0: EngineStatistics(is_alive=True, in_flight=2),
        1: EngineStatistics(is_alive=True, in_flight=1, running=2, waiting=5, kv_cache_usage=0.5),
    }
    assert got == LlmStatistics(engines=expected, in_flight=1)


async def test_a_dead_engine_stays_in_it(autojump_clock: MockClock) -> None:
    async with open_llm_world(2) as world:
        await world.world.engines[1].send_sentinel()

        got = world.llm.statistics()

    assert got.engines == {
        0: EngineStatistics(is_alive=True, in_flight=0),
        1: EngineStatistics(is_alive=False, in_flight=0),
    }
