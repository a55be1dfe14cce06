"""Prefill/decode disaggregation: what engines tell each other of KV blocks, and what they do with it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.mock.driver import Driver, drive

from trio_vllm import (
    ConfigurationError,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    HandshakeOwner,
    Llm,
    SamplingParams,
    open_llm,
)
from trio_vllm.errors import AddressInUseError
from trio_vllm.mock import MockEngineConfig, ServeOptions, TransferHub, serve_mock_engines
from trio_vllm.mock.connector import Fetched
from trio_vllm.protocol import EventType, PrefixCacheStats, SchedulerStats
from trio_vllm.testing import mock_llm

PROMPT = [*range(100, 150)]
"""50 tokens: four blocks of 16."""

SCHEDULED: dict[str, Any] = {"schedule": True, "max_model_len": 256, "num_gpu_blocks": 33}
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def ask(params: dict[str, Any] | None) -> dict[str, Any]:
    """The sampling parameters of a request with these transfer parameters."""
    return {"extra_args": {"kv_transfer_params": params}}


def engine(role: str | None, **config: Any) -> Driver:
    return drive(pd_role=role, **{**SCHEDULED, **config})


def prefill(driver: Driver, request_id: str = "p", prompt: list[int] = PROMPT) -> dict[str, Any]:
    """Let an engine compute a prompt; what it tells the decode side."""
    driver.add(request_id, 1, prompt_token_ids=prompt, params=ask(TO_DECODE))
    while driver.finish_reason(request_id) is None:
        driver.step()
    params = driver.outputs(request_id)[-1].kv_transfer_params
    assert params is not None
    return params


def stats_of(driver: Driver) -> list[SchedulerStats]:
    batches = driver.batches()
    return [batch.scheduler_stats for batch in batches if batch.scheduler_stats is not None]


def last_stats(driver: Driver) -> SchedulerStats:
    return stats_of(driver)[-1]


def connector_stats(driver: Driver) -> dict[str, list[float]]:
    """What was told of transfers, all of it together."""
    told: dict[str, list[float]] = {}
    for stats in stats_of(driver):
        for name, items in (stats.kv_connector_stats or {}).items():
            told.setdefault(name, []).extend(items)
    return told


FAILURES = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes")
NONE_FAILED: dict[str, list[float]] = {key: [] for key in FAILURES}


# The prefill side -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [True, False])
def test_a_prefill_tells_where_its_blocks_are(schedule: bool) -> None:
    """In the last output, under the names of vLLM's NIXL connector."""
    config = SCHEDULED if schedule else {}
    driver = drive(3, pd_role="prefill", instance_id="i", kv_side_channel_host="h", **config)
    assert prefill(driver) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "i_dp3",
        "remote_request_id": "p",
        "remote_host": "h",
        "remote_port": 5603,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 50,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 1,
        "remote_prefill_cached_tokens": 0,
        "transfer_mode": "pull",
    }
    assert driver.finish_reason("p") is FinishReason.LENGTH


def test_the_older_release_tells_less() -> None:
    """0.32 does not count registrations."""
    assert "remote_registration_generation" not in prefill(engine("both", vllm_version="0.32.0"))


def test_the_cached_part_of_a_prompt_is_told() -> None:
    """Three blocks are full, and found by the next request; with several outputs nothing is told."""
    driver = engine("prefill")
    prefill(driver)
    assert prefill(driver, "q")["remote_prefill_cached_tokens"] == 48
    driver.add("r", 2, prompt_token_ids=PROMPT, params=ask(TO_DECODE))
    driver.step(4)
    params = driver.outputs("r")[-1].kv_transfer_params
    assert params is not None
    assert "remote_prefill_cached_tokens" not in params
    assert params["remote_num_tokens"] == 51


def test_blocks_are_kept_until_they_are_fetched() -> None:
    """And the step after that tells that they are free."""
    driver = engine("prefill")
    prefill(driver)
    driver.step()
    assert last_stats(driver).kv_cache_usage == pytest.approx(4 / 32)
    driver.engine.release("nobody", driver.now)
    driver.engine.release("p", driver.now)
    driver.run()

    assert last_stats(driver).kv_cache_usage == 0.0
    assert last_stats(driver).num_running_reqs == 0


def test_blocks_that_nobody_fetches_are_free_after_a_time() -> None:
    """Until then the engine sleeps."""
    driver = engine("prefill", kv_lease_duration=10, time_scale=2)
    prefill(driver)
    scheduled_at = driver.outputs("p")[0].events
    assert scheduled_at is not None
    driver.step()
    due = driver.engine.next_step_time(driver.now)
    assert due == pytest.approx(scheduled_at[-1].timestamp + 20)
    assert due is not None
    driver.now = due
    driver.step(2)

    assert last_stats(driver).kv_cache_usage == 0.0
    assert not driver.has_work


def test_statistics_tell_of_blocks_that_were_not_fetched() -> None:
    """That their time was over, and of a notification that came later."""
    driver = engine("prefill", kv_lease_duration=30.0, kv_connector_stats=True)
    prefill(driver)
    driver.now += 31.0
    driver.run()
    driver.engine.release("p", driver.now)
    prefill(driver, "q")
    told = connector_stats(driver)
    assert told["num_kv_expired_reqs"] == [1]
    assert told["num_notifications_after_expiry"] == [1]
    assert told["transfer_duration"] == []


def test_a_request_waits_for_blocks_that_are_kept() -> None:
    """Without a step until they are free."""
    driver = engine("prefill", max_model_len=64, num_gpu_blocks=6)
    prefill(driver)
    driver.add("next", 1, prompt_token_ids=[7] * 40)
    driver.step(2)
    assert last_stats(driver).num_waiting_reqs == 1
    due = driver.engine.next_step_time(driver.now)
    assert due is not None
    assert due > driver.now + 20
    driver.engine.release("p", driver.now)
    assert driver.engine.next_step_time(driver.now) == driver.now
    driver.run()
    assert driver.finish_reason("next") is FinishReason.LENGTH


def test_the_cache_is_not_reset_while_blocks_are_kept() -> None:
    """As in vLLM, with and without preemptions."""
    driver = engine("prefill")
    prefill(driver)
    assert driver.call("reset_prefix_cache") is False
    assert "waiting for remote KV transfer" in driver.fail("reset_prefix_cache", True)
    driver.engine.release("p", driver.now)
    assert driver.call("reset_prefix_cache") is True


def test_an_abort_keeps_nothing() -> None:
    """There is nobody who would fetch it."""
    driver = engine("prefill")
    driver.add("p", 9, prompt_token_ids=PROMPT, params=ask(TO_DECODE))
    driver.step(2)
    driver.abort("p")
    driver.run()
    assert last_stats(driver).kv_cache_usage == 0.0


def test_a_shutdown_waits_for_nobody() -> None:
    """Who would fetch blocks of an engine that ends."""
    driver = engine("prefill")
    prefill(driver)
    driver.step()
    driver.engine.shut_down(driver.now, drain=False)
    driver.run(5)
    assert not driver.has_work


@pytest.mark.parametrize("role", [None, "decode"])
def test_others_tell_nothing_and_keep_nothing(role: str | None) -> None:
    """An engine without this half computes the request as any other."""
    driver = engine(role)
    driver.add("p", 1, prompt_token_ids=PROMPT, params=ask(TO_DECODE))
    driver.run()
    assert driver.outputs("p")[-1].kv_transfer_params is None
    assert last_stats(driver).kv_cache_usage == 0.0


# The decode side --------------------------------------------------------------------------------


def given(**changes: Any) -> dict[str, Any]:
    """What a prefill engine has told."""
    return {**prefill(engine("prefill", kv_side_channel_host="there")), **changes}


@pytest.mark.parametrize("schedule", [True, False])
def test_a_prompt_that_is_fetched_is_not_computed(schedule: bool) -> None:
    """It counts as cached elsewhere, for the request and in the statistics of the connector."""
    driver = drive(pd_role="decode", **(SCHEDULED if schedule else {}))
    driver.add("d", 4, prompt_token_ids=PROMPT, params=ask(given()))
    driver.run()

    outputs = driver.outputs("d")
    prefilled = outputs[0].prefill_stats
    assert prefilled is not None
    assert (prefilled.num_prompt_tokens, prefilled.num_computed_tokens) == (50, 0)
    assert (prefilled.num_external_cached_tokens, prefilled.num_local_cached_tokens) == (50, 0)
    assert len(driver.tokens("d")) == 4
    assert outputs[-1].kv_transfer_params is None
    assert driver.engine.pop_fetched() == [Fetched("there", 5600, "p")]
    assert driver.engine.pop_fetched() == []
    found = [one.connector_prefix_cache_stats for one in stats_of(driver)]
    assert PrefixCacheStats(requests=1, queries=50, hits=50) in found
    assert sum(one.hits for one in found if one is not None) == 50
    assert sum(one.prefix_cache_stats.queries for one in stats_of(driver)) == 50
    assert sum(one.prefix_cache_stats.hits for one in stats_of(driver)) == 0


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("schedule", [True, False])
def test_statistics_tell_of_what_was_fetched(schedule: bool, reports: bool) -> None:
    """As vLLM's NIXL connector counts: durations, bytes and descriptors, an item a transfer."""
    params = prefill(engine("prefill"))
    time: dict[str, Any] = {"kv_cache_transfer_latency": 2.0} if schedule else {}
    config = SCHEDULED if schedule else {}
    driver = drive(pd_role="decode", kv_connector_stats=reports, **config, **time)
    driver.add("d", 2, prompt_token_ids=PROMPT, params=ask(params))
    driver.run()
    expected = {
        "transfer_duration": [2.0 if schedule else 1e-6],
        "post_duration": [0.0],
        "bytes_transferred": [4 * 16 * 131_072],
        "num_descriptors": [4 * 64],
        "num_kv_expired_reqs": [],
        "num_notifications_after_expiry": [],
        **NONE_FAILED,
    }
    assert connector_stats(driver) == (expected if reports else {})


def test_a_step_computes_one_token_of_a_prompt_that_was_fetched() -> None:
    """The last one, whose logits are needed."""
    driver = engine("decode", enable_logging_iteration_details=True)
    driver.add("d", 2, prompt_token_ids=PROMPT, params=ask(given()))
    driver.run()
    details = [one.iteration_details for one in stats_of(driver) if one.iteration_details]
    assert [one.num_ctx_tokens for one in details] == [1, 0]
    assert [one.num_generation_tokens for one in details] == [0, 1]


def test_what_is_here_is_not_fetched() -> None:
    """Only the rest; and the other engine is told even if that is nothing."""
    driver = engine("decode")
    driver.add("a", 1, prompt_token_ids=PROMPT)
    driver.run()
    driver.add("d", 1, prompt_token_ids=PROMPT, params=ask(given()))
    driver.run()
    prefilled = driver.outputs("d")[0].prefill_stats
    assert prefilled is not None
    assert (prefilled.num_local_cached_tokens, prefilled.num_external_cached_tokens) == (48, 2)


def test_stages_of_a_transfer() -> None:
    """It waits for a seat, is under way, and is over; blocks are held from its begin on."""
    driver = engine("decode", max_num_seqs=1, kv_cache_transfer_latency=10)
    driver.add("a", 4)
    driver.add("d", 2, prompt_token_ids=PROMPT, params=ask(given()))
    driver.step()
    assert last_stats_of_stages(driver) == (1, 0, 0)
    driver.abort("a")
    driver.step(3)
    assert last_stats_of_stages(driver) == (0, 1, 0)
    stats = last_stats(driver)
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 1)
    assert stats.kv_cache_usage == pytest.approx(4 / 32)
    due = driver.engine.next_step_time(driver.now)
    assert due is not None
    assert due > driver.now
    assert driver.engine.pop_fetched() == []

    driver.add("b", 30)  # takes the only seat when the transfer is over
    driver.step()
    driver.now = due
    driver.step()
    assert last_stats_of_stages(driver) == (0, 0, 1)
    driver.run()
    assert last_stats_of_stages(driver) == (0, 0, 0)
    assert [one.request_id for one in driver.engine.pop_fetched()] == ["p"]


def last_stats_of_stages(driver: Driver) -> tuple[int, ...]:
    stages = last_stats(driver).num_kv_fetch_reqs_by_stage
    return tuple(stages[name] for name in ("waiting_to_start", "in_progress", "completed_waiting"))


@pytest.mark.parametrize("other", [{"step_time": 1.0}, {"inter_token_latency": 1.0}])
def test_a_transfer_takes_its_time(other: dict[str, float]) -> None:
    """Beside times of steps, and in place of the prefill where requests have times of their own."""
    driver = engine("decode", kv_cache_transfer_latency=7.0, time_scale=2.0, **other)
    begin = driver.now + 0.25
    driver.add("d", 3, prompt_token_ids=PROMPT, params=ask(given()))
    times: list[float] = []
    while driver.has_work:
        due = driver.engine.next_step_time(driver.now)
        assert due is not None
        driver.now = due
        before = len(driver.tokens("d"))
        driver.keep(driver.engine.step(driver.now))
        if len(driver.tokens("d")) > before:
            times.append(round(driver.now - begin, 9))
    first = 14.0 if "inter_token_latency" in other else 16.0
    assert times == pytest.approx([first, first + 2, first + 4], abs=0.001)


def test_a_transfer_takes_its_time_beside_speculation() -> None:
    """It is a time of a request that goes with those of steps, as drafts do."""
    driver = engine("decode", kv_cache_transfer_latency=7.0, num_speculative_tokens=2)
    begin = driver.now + 0.25
    driver.add("d", 4, prompt_token_ids=PROMPT, params=ask(given()))
    while not driver.tokens("d"):
        due = driver.engine.next_step_time(driver.now)
        assert due is not None
        driver.now = due
        driver.keep(driver.engine.step(driver.now))
    assert driver.now - begin == pytest.approx(7.0, abs=0.001)
    driver.run()
    assert len(driver.tokens("d")) == 4


def test_a_preempted_request_computes_its_prompt() -> None:
    """The other engine does not have it any more."""
    driver = engine("decode", enable_prefix_caching=False)
    driver.add("d", 9, prompt_token_ids=PROMPT, params=ask(given()))
    driver.step(4)
    driver.call("reset_prefix_cache", True)
    driver.run()
    assert len(driver.tokens("d")) == 9
    assert len(driver.engine.pop_fetched()) == 1
    events = [event.type for output in driver.outputs("d") for event in output.events or ()]
    assert events.count(EventType.PREEMPTED) == 1
    stats = [one.connector_prefix_cache_stats for one in stats_of(driver)]
    assert sum(one.preempted_hits for one in stats if one is not None) == 0
    assert sum(one.preempted_queries for one in stats if one is not None) > 50


@pytest.mark.parametrize("moment", ["waiting", "under way", "at once"])
def test_an_aborted_request_lets_the_other_engine_know(moment: str) -> None:
    """That it need not keep anything, whenever it was."""
    driver = engine("decode", kv_cache_transfer_latency=50)
    at_once = moment == "at once"
    driver.add("d", 2, prompt_token_ids=PROMPT, params=ask(given()), abort_immediately=at_once)
    if moment == "under way":
        driver.step(2)
    driver.abort("d")
    driver.step(2)
    assert driver.engine.pop_fetched() == [Fetched("there", 5600, "p")]
    if moment == "under way":
        assert last_stats(driver).kv_cache_usage == 0.0


def test_prompt_logprobs_are_computed() -> None:
    """Which need the whole prompt; what was kept for it is not needed."""
    driver = engine("decode")
    params = {**ask(given()), "prompt_logprobs": 1, "skip_reading_prefix_cache": True}
    driver.add("d", 1, prompt_token_ids=PROMPT, params=params)
    driver.run()
    prefilled = driver.outputs("d")[0].prefill_stats
    assert prefilled is not None
    assert prefilled.num_computed_tokens == 50
    assert len(driver.engine.pop_fetched()) == 1


@pytest.mark.parametrize(
    "name",
    [
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
    ],
)
def test_what_does_not_say_where_blocks_are_is_refused(name: str) -> None:
    """In vLLM it waits for ever, or is the end of the engine."""
    driver = engine("decode")
    params = given()
    del params[name]
    driver.add("d", 1, prompt_token_ids=PROMPT, params=ask(params))
    (output,) = driver.outputs("d")
    assert output.error is not None
    assert output.error.message == f"kv_transfer_params lack {name}"


@pytest.mark.parametrize("role", [None, "prefill"])
@pytest.mark.parametrize("params", [None, {}, [], given])
def test_others_compute_what_they_are_given(role: str | None, params: Any) -> None:
    """An engine without this half fetches nothing, whatever it is given."""
    driver = engine(role)
    given_params = params() if callable(params) else params
    driver.add("d", 1, prompt_token_ids=PROMPT, params=ask(given_params))
    driver.run()
    prefilled = driver.outputs("d")[0].prefill_stats
    assert prefilled is not None
    assert prefilled.num_computed_tokens == 50
    assert driver.engine.pop_fetched() == []


# Together ---------------------------------------------------------------------------------------


async def generate_disaggregated(
    prefiller: Llm, decoder: Llm, prompt: list[int], max_tokens: int
) -> tuple[GenerateOutput, GenerateOutput]:
    """What a router does: one token from the prefill side, all of them from the decode side."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": TO_DECODE})
    first = await prefiller.generate(GenerateRequest(prompt, sampling_params=params))
    params = SamplingParams(
        max_tokens=max_tokens, extra_args={"kv_transfer_params": first.kv_transfer_params}
    )
    return first, await decoder.generate(GenerateRequest(prompt, sampling_params=params))


@pytest.mark.parametrize("schedule", [True, False])
async def test_a_prompt_is_computed_once(autojump_clock: object, schedule: bool) -> None:
    """By the prefill side, whose blocks are free once the decode side has them."""
    hub = TransferHub()
    config: dict[str, Any] = {}
    if schedule:
        config = {**SCHEDULED, "enable_logging_iteration_details": True}
    times: dict[str, Any] = {"kv_cache_transfer_latency": 3.0} if schedule else {}
    computed: dict[str, int] = {"prefill": 0, "decode": 0}

    def count(role: str, stats: SchedulerStats) -> None:
        if stats.iteration_details is not None:
            computed[role] += stats.iteration_details.num_ctx_tokens

    async with (
        mock_llm(MockEngineConfig(pd_role="prefill", **config), transfers=hub) as prefiller,
        mock_llm(
            MockEngineConfig(pd_role="decode", kv_side_channel_port=7000, **config, **times),
            transfers=hub,
        ) as decoder,
    ):
        prefiller.llm.client.on_scheduler_stats(lambda _, stats: count("prefill", stats))
        decoder.llm.client.on_scheduler_stats(lambda _, stats: count("decode", stats))
        begin = trio.current_time()
        first, output = await generate_disaggregated(prefiller.llm, decoder.llm, PROMPT, 5)
        assert (len(first.token_ids), len(output.token_ids)) == (1, 5)
        assert first.usage.cached_tokens == 0
        assert output.usage.cached_tokens == 0  # what the prefill side found is what users are told
        await trio.sleep(0.01)
        if schedule:
            assert trio.current_time() - begin == pytest.approx(3.01)
            assert computed == {"prefill": 50, "decode": 1}  # the last token once more
            assert prefiller.llm.statistics().engines[0].kv_cache_usage == 0.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for sockets."""
    with tempfile.TemporaryDirectory(prefix="mock-") as name:
        yield Path(name)


@asynccontextmanager
async def served(folder: Path, **config: Any) -> AsyncIterator[Llm]:
    """An engine behind sockets, and its client."""
    address = f"ipc://{folder}/{config['pd_role']}"
    async with trio.open_nursery() as nursery:
        options = ServeOptions(handshake_address=address)
        engine_config = MockEngineConfig(**SCHEDULED, **config)
        nursery.start_soon(serve_mock_engines, engine_config, options)
        async with open_llm(HandshakeOwner(handshake_address=address, ready_timeout=20)) as llm:
            yield llm
        nursery.cancel_scope.cancel()


async def test_processes_tell_each_other_over_a_side_channel(
    folder: Path, unused_tcp_port: int
) -> None:
    """So that blocks are free long before their time."""
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            prefiller = await stack.enter_async_context(
                served(folder, pd_role="prefill", kv_side_channel_port=unused_tcp_port)
            )
            decoder = await stack.enter_async_context(served(folder, pd_role="decode"))
            _, output = await generate_disaggregated(prefiller, decoder, PROMPT, 3)
            assert len(output.token_ids) == 3
            while prefiller.statistics().engines[0].kv_cache_usage:  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.fixture
def unused_tcp_port() -> int:
    """A port that nobody has at the moment."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_side_channel_that_is_taken(folder: Path, unused_tcp_port: int) -> None:
    """Is told, as one failure of all engines."""
    config = MockEngineConfig(pd_role="prefill", kv_side_channel_port=unused_tcp_port)
    options = ServeOptions(handshake_address=f"ipc://{folder}/handshake")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_mock_engines, config, options)
            await trio.sleep(0.1)
            with pytest.raises((ConfigurationError, AddressInUseError)):
                await serve_mock_engines(config, options)
            nursery.cancel_scope.cancel()
