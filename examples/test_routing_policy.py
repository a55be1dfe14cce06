"""Test a routing policy in virtual time: an hour of traffic over 20 engines, in seconds.

    pytest examples/test_routing_policy.py

The client, the engines and their times are simulated by one clock, which jumps to the next moment at
which something happens. So the same requests meet the same engines in each run.
"""

import random
from collections.abc import Sequence

import trio
from trio.testing import MockClock

from trio_vllm import GenerateRequest, Llm, SamplingParams
from trio_vllm.client import Engine
from trio_vllm.mock import MockEngineConfig
from trio_vllm.testing import mock_llm

ENGINES = 20
HOUR = 3600
REQUESTS_PER_SECOND = 0.1
TOKENS = 5
STEP = 40.0  # seconds per token: each request lasts 200


class TwoChoices:
    """The policy under test: draw two engines, take the one with fewer requests of ours."""

    choices = 2

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.longest_queue = 0

    def choose(self, engines: Sequence[Engine]) -> Engine:
        """Choose an engine, and note how much it has to do then."""
        drawn = self._random.sample(engines, self.choices)
        chosen = min(drawn, key=lambda engine: len(engine.requests))
        self.longest_queue = max(self.longest_queue, len(chosen.requests) + 1)
        return chosen


class OneChoice(TwoChoices):
    """What it is compared with."""

    choices = 1


async def send_for(seconds: float, llm: Llm) -> None:
    """Send requests at random times, and wait for the last answer."""
    arrivals = random.Random(7)
    params = SamplingParams(max_tokens=TOKENS)
    async with trio.open_nursery() as nursery:
        while trio.current_time() < seconds:
            request = GenerateRequest(prompt_token_ids=[1, 2, 3], sampling_params=params)
            nursery.start_soon(llm.generate, request)
            await trio.sleep(arrivals.expovariate(REQUESTS_PER_SECOND))


def simulate(policy: TwoChoices, seconds: float = HOUR) -> tuple[int, float]:
    """The longest queue under a policy, and when the last request ended."""

    async def main() -> float:
        config = MockEngineConfig(step_interval=STEP)
        async with mock_llm(config, engine_count=ENGINES, load_balancer=policy) as mock:
            await send_for(seconds, mock.llm)
            return trio.current_time()

    end = trio.run(main, clock=MockClock(autojump_threshold=0))
    return policy.longest_queue, end


def test_two_choices_spread_better_than_one() -> None:
    """Under the same traffic."""
    two, end = simulate(TwoChoices(seed=1))
    one, _ = simulate(OneChoice(seed=1))

    assert end > HOUR
    assert two < one


def test_a_run_can_be_repeated() -> None:
    """To the last digit."""
    assert simulate(TwoChoices(seed=2), HOUR / 6) == simulate(TwoChoices(seed=2), HOUR / 6)
