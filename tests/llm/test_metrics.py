"""Prometheus metrics under vLLM's names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
from prometheus_client import CollectorRegistry
from tests.client.pair import open_pair
from tests.client.world import make_output
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import Sink
from trio_vllm.llm import Llm
from trio_vllm.llm.collector import Collector
from trio_vllm.llm.metrics import LlmMetrics
from trio_vllm.protocol import (
    EngineCoreEvent,
    EngineCoreRequest,
    EventType,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
    SpecDecodingStats,
)


class Metrics:
    """The metrics of one test, by short names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.observer = LlmMetrics(self.registry, model_name="m")

    def __getitem__(self, name: str) -> float | None:
        """``name`` may end with ``{label=value}``."""
        name, _, rest = name.partition("{")
        labels = {"model_name": "m", "engine": "0"}
        if rest:
            key, _, value = rest.removesuffix("}").partition("=")
            labels[key] = value
        return self.registry.get_sample_value(f"vllm:{name}", labels)

    def values(self, *names: str) -> dict[str, float | None]:
        return {name: self[name] for name in names}


async def run_request(world: LlmWorld) -> None:
    """A request that takes 3 s, with 4 tokens, the first after 0.5 s."""
    await world.start(lambda: world.llm.generate(make_prompt(max_tokens=9)))
    (request,) = world.engine.requests()
    world.clock += 0.5
    prefill = PrefillStats(
        num_prompt_tokens=3,
        num_computed_tokens=1,
        num_cached_tokens=2,
        num_local_cached_tokens=1,
        num_external_cached_tokens=1,
    )
    kinds = [(EventType.QUEUED, 50.0), (EventType.SCHEDULED, 51.0), (EventType.PREEMPTED, 52.0)]
    first = make_output(
        [7],
        request.request_id,
        prefill_stats=prefill,
        events=[EngineCoreEvent(kind, timestamp) for kind, timestamp in kinds],
    )
    await world.engine.send(first, timestamp=54.0)
    await world.engine.send(make_output([8, 9], request.request_id), timestamp=56.0)
    world.clock += 2.5
    last = make_output([2], request.request_id, finish_reason=FinishReason.STOP)
    await world.engine.send(last, timestamp=60.0)


async def test_a_request() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await run_request(world)

    expected = {
        "prompt_tokens_total": 3,
        "prompt_tokens_cached_total": 2,
        "prompt_tokens_by_source_total{source=local_compute}": 1,
        "prompt_tokens_by_source_total{source=local_cache_hit}": 1,
        "prompt_tokens_by_source_total{source=external_kv_transfer}": 1,
        "generation_tokens_total": 4,
        "num_preemptions_total": 1,
        "request_success_total{finished_reason=stop}": 1,
        "request_success_total{finished_reason=abort}": 0,
        "time_to_first_token_seconds_sum": 0.5,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 6.0,
        "inter_token_latency_seconds_count": 2,
        "e2e_request_latency_seconds_sum": 3.0,
        "request_queue_time_seconds_sum": 1.0,
        "request_prefill_time_seconds_sum": 3.0,
        "request_decode_time_seconds_sum": 6.0,
        "request_inference_time_seconds_sum": 9.0,
        "request_time_per_output_token_seconds_sum": 2.0,
        "request_num_preemptions_sum": 1,
        "request_prompt_tokens_sum": 3,
        "request_generation_tokens_sum": 4,
        "request_prefill_kv_computed_tokens_sum": 1,
        "request_params_max_tokens_sum": 9,
        "request_params_n_sum": 1,
        "request_max_num_generation_tokens_sum": 4,
    }
    assert metrics.values(*expected) == expected


async def test_the_state_of_an_engine() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        for _ in range(2):
            await world.engine.report(
                running=5,
                waiting=2,
                num_skipped_waiting_reqs=1,
                kv_cache_usage=0.25,
                prefix_cache_stats=PrefixCacheStats(queries=10, hits=4),
                connector_prefix_cache_stats=PrefixCacheStats(queries=6, hits=3),
                spec_decoding_stats=SpecDecodingStats(
                    num_spec_tokens=2,
                    num_drafts=4,
                    num_draft_tokens=8,
                    num_accepted_tokens=5,
                    num_accepted_tokens_per_pos=[4, 1],
                ),
            )

    expected = {
        "num_requests_running": 5,
        "num_requests_waiting": 3,
        "num_requests_waiting_by_reason{reason=capacity}": 2,
        "num_requests_waiting_by_reason{reason=deferred}": 1,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 8,
        "external_prefix_cache_queries_total": 12,
        "external_prefix_cache_hits_total": 6,
        "spec_decode_num_drafts_total": 8,
        "spec_decode_num_draft_tokens_total": 16,
        "spec_decode_num_accepted_tokens_total": 10,
        "spec_decode_num_accepted_tokens_per_pos_total{position=0}": 8,
        "spec_decode_num_accepted_tokens_per_pos_total{position=1}": 2,
    }
    assert metrics.values(*expected) == expected


async def test_everything_stands_at_zero_from_the_start() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]):
        pass

    names = ("num_requests_running", "generation_tokens_total", "request_params_n_count")
    assert list(metrics.values(*names).values()) == [0, 0, 0]
    reasons = [f"request_success_total{{finished_reason={reason}}}" for reason in FinishReason]
    assert list(metrics.values(*reasons).values()) == [0] * 5


async def test_buckets_of_lengths_end_with_the_context() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer], max_model_len=300):
        pass

    (family,) = (
        metric
        for metric in metrics.registry.collect()
        if metric.name == "vllm:request_prompt_tokens"
    )
    bounds = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]


async def test_the_next_connection_goes_on_counting() -> None:
    """Engines serve one frontend each life, so a frontend that goes on connects again."""
    metrics = Metrics()
    for _ in range(2):
        async with open_llm_world(observers=[metrics.observer]) as world:
            await run_request(world)

    assert metrics["generation_tokens_total"] == 8


async def test_engines_have_labels_of_their_own() -> None:
    metrics = Metrics()
    async with open_pair(2) as (world, _):
        llm = Llm(world.client, observers=[metrics.observer])
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(llm.generate, make_prompt(max_tokens=5))

    counts = [
        metrics.registry.get_sample_value(
            "vllm:generation_tokens_total", {"model_name": "m", "engine": engine}
        )
        for engine in ("0", "1")
    ]
    assert counts == [10, 10]


@pytest.mark.parametrize("n", [1, 3])
async def test_who_leaves_has_aborted(n: int) -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        async with world.llm.stream(make_prompt(n=n)) as stream:
            await wait_all_tasks_blocked()
            for request in world.engine.requests():
                await world.engine.emit(request.request_id, [7, 8])
            await anext(stream)

    expected = {
        "request_success_total{finished_reason=abort}": n,
        "request_generation_tokens_sum": 2 * n,
        "request_params_n_count": 1,
        "request_params_n_sum": n,
        "request_max_num_generation_tokens_sum": 2,
    }
    assert metrics.values(*expected) == expected


async def test_an_abort_counts_once() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        world.llm.abort()
        await wait_all_tasks_blocked()

        assert metrics["request_success_total{finished_reason=abort}"] == 1


async def test_what_fails_with_its_engine_has_no_finish_reason(autojump_clock: MockClock) -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        await world.engine.die()
        await trio.sleep(1)

    reasons = [f"request_success_total{{finished_reason={reason}}}" for reason in FinishReason]
    assert list(metrics.values(*reasons).values()) == [0] * 5
    assert metrics["request_params_n_count"] == 1


async def test_a_refused_request_is_not_counted() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        with pytest.raises(Exception, match="n must be"):
            await world.llm.generate(make_prompt(n=0))
        with pytest.raises(Exception, match="priority"):
            await world.llm.generate(make_prompt(request_priority=2**31))

    assert metrics["request_params_n_count"] == 0


async def test_a_wall_clock_that_goes_backwards_counts_as_standing() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        world.clock -= 100
        await world.finish(world.engine.requests()[0].request_id)

    assert metrics["e2e_request_latency_seconds_sum"] == 0
    assert metrics["e2e_request_latency_seconds_count"] == 1


async def test_without_observers_collectors_are_plain_and_statistics_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collectors: list[type[Sink]] = []
    async with open_llm_world() as world:
        submit = world.llm.client.driver.submit

        def note(request: EngineCoreRequest, sink: Sink) -> None:
            collectors.append(type(sink))
            submit(request, sink)

        monkeypatch.setattr(world.llm.client.driver, "submit", note)
        await world.start(lambda: world.llm.generate(make_prompt()))
        await world.engine.say(b"\x94\x00\x90\xa5stats\x00")  # nobody finds out that these are none

    assert collectors == [Collector]
    assert "scheduler_stats" not in caplog.text


def test_prometheus_is_imported_only_when_asked_for() -> None:
    program = "import sys, trio_vllm, trio_vllm.llm; print('prometheus_client' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
