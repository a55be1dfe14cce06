"""Speculative decoding: several tokens a step, and what the statistics say of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.mock.driver import Driver, drive

from trio_vllm import ConfigurationError
from trio_vllm.mock import MockEngineConfig
from trio_vllm.mock.spread import Acceptance
from trio_vllm.protocol import FinishReason, SpecDecodingStats

DRAFTS = 3


def drive_requests(
    count: int = 40, max_tokens: int = 200, *, request: dict[str, Any] | None = None, **config: Any
) -> Driver:
    """Run requests with drafts to their end."""
    driver = drive(**{"num_speculative_tokens": DRAFTS, "max_model_len": 4096, **config})
    for i in range(count):
        driver.add(f"r{i}", max_tokens, **(request or {}))
    driver.run()
    return driver


def drafted(driver: Driver) -> list[SpecDecodingStats]:
    """The statistics of all steps that verified drafts."""
    batches = [batch.scheduler_stats for batch in driver.batches()]
    return [stats.spec_decoding_stats for stats in batches if stats and stats.spec_decoding_stats]


def test_tokens_are_those_without_drafts() -> None:
    """Speculation changes when they come, not which they are."""
    for speculated, plain in (
        (drive_requests(3), drive()),
        (drive_requests(3, output="echo"), drive(output="echo")),
    ):
        for i in range(3):
            plain.add(f"r{i}", 200)
        plain.run()
        for i in range(3):
            assert speculated.tokens(f"r{i}") == plain.tokens(f"r{i}")


@pytest.mark.parametrize(("rate", "sizes"), [(0.0, {1}), (1.0, {DRAFTS + 1}), (0.5, {1, 2, 3, 4})])
def test_rows_have_the_accepted_tokens_and_one_more(rate: float, sizes: set[int]) -> None:
    """But for the first row, of the prompt, and the last, which ends where the request does."""
    driver = drive_requests(acceptance_rate=rate)
    rows = [
        len(output.new_token_ids)
        for i in range(40)
        for output in driver.outputs(f"r{i}")[1:]
        if output.finish_reason is None
    ]
    assert set(rows) == sizes
    assert {len(driver.outputs(f"r{i}")[0].new_token_ids) for i in range(40)} == {1}
    assert {len(driver.tokens(f"r{i}")) for i in range(40)} == {200}
    assert driver.finish_reason("r0") is FinishReason.LENGTH


def test_fewer_steps_are_made() -> None:
    """That is what it is for; the statistics tell as many tokens as there were."""
    slow, fast = drive_requests(1, acceptance_rate=0.0), drive_requests(1, acceptance_rate=1.0)
    assert slow.engine.step_count > 3 * fast.engine.step_count
    assert fast.engine.summary.tokens == slow.engine.summary.tokens == 200


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_statistics_show_the_rate(rate: float) -> None:
    """At each position, and in all: the products of the rate."""
    told = drafted(drive_requests(acceptance_rate=rate))
    drafts = sum(stats.num_drafts for stats in told)
    accepted = np.sum([stats.num_accepted_tokens_per_pos for stats in told], axis=0)

    assert all(stats.num_spec_tokens == DRAFTS for stats in told)
    assert sum(stats.num_draft_tokens for stats in told) == DRAFTS * drafts
    assert np.sum([s.num_draft_tokens_per_pos for s in told], axis=0).tolist() == [drafts] * DRAFTS
    assert sum(stats.num_accepted_tokens for stats in told) == accepted.sum()
    expected = np.array([rate, rate**2, rate**3])
    error = np.sqrt(expected * (1 - expected) / drafts)
    assert (np.abs(accepted / drafts - expected) < 4 * error).all()


def test_a_rate_is_drawn_by_seed_and_request() -> None:
    """The same each time."""
    acceptance = Acceptance(0.5)
    found = [acceptance.draw(key, position, 5) for key in (1, 2) for position in range(50)]
    assert found == [acceptance.draw(key, position, 5) for key in (1, 2) for position in range(50)]
    assert found[:50] != found[50:]


def test_a_stop_among_the_drafts_cuts_the_row() -> None:
    """The statistics still count what was accepted."""
    stop = drive_requests(1).tokens("r0")[2]
    driver = drive_requests(1, request={"params": {"stop_token_ids": [stop]}}, acceptance_rate=1.0)
    assert [len(output.new_token_ids) for output in driver.outputs("r0")] == [1, 2]
    assert driver.finish_reason("r0") is FinishReason.STOP
    assert [stats.num_accepted_tokens for stats in drafted(driver)] == [3]


def test_log_probabilities_come_for_each_token() -> None:
    """A row of them for each."""
    driver = drive_requests(2, request={"params": {"logprobs": 2}}, acceptance_rate=1.0)
    for output in driver.outputs("r1"):
        assert output.new_logprobs is not None
        assert output.new_logprobs.token_ids[:, 0].tolist() == output.new_token_ids


def test_a_step_takes_as_long_as_its_tokens() -> None:
    """Drafts are verified as a prompt is computed; no time for them is the default."""
    fast, slow = (
        drive_requests(
            1, 41, acceptance_rate=1.0, step_time=1.0, step_time_per_prefill_token=per_token
        )
        for per_token in (0.0, 10.0)
    )
    assert len(fast.outputs("r0")) == len(slow.outputs("r0")) == 11
    fast_time, slow_time = (driver.batches()[-2].timestamp - 100 for driver in (fast, slow))
    assert slow_time - fast_time >= 300


def test_preempted_requests_go_on() -> None:
    """When blocks run out."""
    config: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks": 17 + 6, "max_num_seqs": 16}
    driver = drive_requests(8, 100, acceptance_rate=0.6, **config)
    assert {len(driver.tokens(f"r{i}")) for i in range(8)} == {100}
    alone = drive_requests(8, 100)
    assert all(driver.tokens(f"r{i}") == alone.tokens(f"r{i}") for i in range(8))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2, "acceptance_rate": 1.1}, "acceptance_rate"),
        ({"num_speculative_tokens": 2, "acceptance_rate": float("nan")}, "acceptance_rate"),
        ({"acceptance_rate": 0.5}, "takes num_speculative_tokens"),
        ({"num_speculative_tokens": 2, "inter_token_latency": 1.0}, "times of a step"),
    ],
)
def test_speculation_without_sense_is_refused(options: dict[str, Any], fault: str) -> None:
    """With the name of the option."""
    with pytest.raises(ConfigurationError, match=fault):
        MockEngineConfig(**options)
