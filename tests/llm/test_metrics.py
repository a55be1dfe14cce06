"""Prometheus metrics under vLLM's names."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from prometheus_client import CollectorRegistry
from tests.client.pair import open_pair
from tests.client.world import make_output
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.client import Sink
from trio_vllm.errors import ConfigurationError
from trio_vllm.llm import EncodeRequest, Llm
from trio_vllm.llm.collector import Collector
from trio_vllm.llm.metrics import LlmMetrics
from trio_vllm.protocol import (
    EngineCoreEvent,
    EngineCoreRequest,
    EventType,
    FinishReason,
    KvCacheEvictionEvent,
    LoRARequest,
    PerfStats,
    PoolingParams,
    PrefillStats,
    PrefixCacheStats,
    RequestErrorInfo,
    SchedulerStats,
    SpecDecodingStats,
    Tensor,
)


class Metrics:
    """The metrics of one test, by short names."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.observer = LlmMetrics(self.registry, model_name="m", **options)

    def everything(self) -> dict[str, float]:
        """All samples, by name and labels; when they were created is left out."""
        return {
            f"{sample.name}{sample.labels}": sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        }

    def __getitem__(self, name: str) -> float | None:
        """``name`` may end with ``{label=value}``, or with several of them."""
        name, _, rest = name.partition("{")
        labels = {"model_name": "m", "engine": "0"}
        if rest:
            for pair in rest.removesuffix("}").split(","):
                key, _, value = pair.partition("=")
                labels[key] = value
        return self.registry.get_sample_value(f"vllm:{name}", labels)

    def values(self, *names: str) -> dict[str, float | None]:
        return {name: self[name] for name in names}


async def run_request(world: LlmWorld) -> None:
    """A request that takes 3 s, with 4 tokens, the first after 0.5 s."""
    await world.start(lambda: world.llm.generate(make_prompt(max_tokens=9)))
    (request,) = world.engine.requests()
    world.pass_time(0.5)
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
    world.pass_time(2.5)
    last = make_output([2], request.request_id, finish_reason=FinishReason.STOP)
    await world.engine.send(last, timestamp=60.0)


REQUEST_VALUES: dict[str, float] = {
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


async def test_a_request() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await run_request(world)

    assert metrics.values(*REQUEST_VALUES) == REQUEST_VALUES


ENGINE_VALUES: dict[str, float] = {
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

    assert metrics.values(*ENGINE_VALUES) == ENGINE_VALUES


async def test_counters_stand_at_zero_from_the_start() -> None:
    """With all known values of their labels."""
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]):
        pass

    names = ["generation_tokens_total", "request_params_n_count", "corrupted_requests_total"]
    for name, label, values in (
        ("request_success", "finished_reason", [str(reason) for reason in FinishReason]),
        (
            "prompt_tokens_by_source",
            "source",
            ["local_compute", "local_cache_hit", "external_kv_transfer"],
        ),
        (
            "prompt_tokens_cached_by_source",
            "source",
            ["device", "host", "p2p", "disk", "external_unspecified"],
        ),
    ):
        names += [f"{name}_total{{{label}={value}}}" for value in values]
    assert metrics.values(*names) == dict.fromkeys(names, 0)


UNKNOWN = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason{reason=capacity}",
    "num_requests_waiting_by_reason{reason=deferred}",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "request_num_preemptions_count",
]


async def test_what_an_engine_does_not_measure_has_no_series() -> None:
    """It keeps no statistics and sends no events, and is busy."""
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        await world.finish(world.engine.requests()[0].request_id)

    assert metrics.values(*UNKNOWN) == dict.fromkeys(UNKNOWN)
    assert metrics["request_success_total{finished_reason=length}"] == 1


async def test_gauges_begin_with_the_first_statistics() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.engine.report(running=0)

    gauges = UNKNOWN[:5]
    assert metrics.values(*gauges) == dict.fromkeys(gauges, 0)


async def test_preemptions_begin_with_the_first_event() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        events = [EngineCoreEvent(EventType.SCHEDULED, 1.0)]
        await world.finish(world.engine.requests()[0].request_id, events=events)

    names = ["num_preemptions_total", "request_num_preemptions_sum"]
    assert metrics.values(*names) == dict.fromkeys(names, 0)
    assert metrics["request_num_preemptions_count"] == 1


REFUSED = RequestErrorInfo(code="engine_paused", message="the engine is paused")


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_an_engine_refuses_never_ran(n: int) -> None:
    """It is answered, and not counted anywhere."""
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(n=n, max_tokens=9)))
        before = metrics.everything()
        for request in world.engine.requests():
            await world.finish(
                request.request_id, [], finish_reason=FinishReason.ERROR, error=REFUSED
            )

        ends = [completion.finish_reason for completion in outcome.get().completions]
        assert ends == [FinishReason.ERROR] * n
        assert metrics.everything() == before


async def test_an_error_of_a_request_that_ran_counts() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.engine.emit(request.request_id, [7])
        await world.finish(request.request_id, [], finish_reason=FinishReason.ERROR, error=REFUSED)

    assert metrics["request_success_total{finished_reason=error}"] == 1
    assert metrics["request_params_n_count"] == 1


async def test_the_decode_side_counts_what_it_computed() -> None:
    """Its caller hears what the engine of the prefill found in its cache."""
    metrics = Metrics()
    transfer = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 5}
    async with open_llm_world(observers=[metrics.observer]) as world:
        prompt = make_prompt(
            request_prompt_token_ids=list(range(8)),
            extra_args={"kv_transfer_params": transfer},
        )
        outcome = await world.start(lambda: world.llm.generate(prompt))
        stats = PrefillStats(
            num_prompt_tokens=8,
            num_computed_tokens=1,
            num_cached_tokens=7,
            num_external_cached_tokens=7,
        )
        await world.finish(world.engine.requests()[0].request_id, prefill_stats=stats)

        assert outcome.get().usage.cached_tokens == 5
    assert metrics["request_prefill_kv_computed_tokens_sum"] == 1


async def test_a_matched_stop_string_counts_as_stop() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        async with world.llm.stream(make_prompt()) as stream:
            await wait_all_tasks_blocked()
            await world.engine.emit(world.engine.requests()[0].request_id, [7])
            await anext(stream)
            stream.stop("###")

    names = ["request_success_total{finished_reason=stop}"]
    names += ["request_success_total{finished_reason=abort}", "request_generation_tokens_sum"]
    assert metrics.values(*names) == dict(zip(names, (1, 0, 1), strict=True))


async def test_requests_with_nans_are_corrupted_once() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        for _ in range(2):
            await world.engine.emit(request.request_id, [7], num_nans_in_logits=2)
        await world.finish(request.request_id)

    assert metrics["corrupted_requests_total"] == 1


async def test_tokens_of_a_message_are_one_iteration() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        for name in "xy":
            await world.start(partial(world.llm.generate, make_prompt(name)))
        first, second = (request.request_id for request in world.engine.requests())
        prefill = PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
        await world.engine.send(
            make_output([7], first, prefill_stats=prefill),
            make_output([8, 9], second),
            timestamp=50.0,
        )
        await world.engine.send(make_output([10], first), timestamp=51.0)
        last = [make_output([2], name, finish_reason=FinishReason.STOP) for name in (first, second)]
        await world.engine.send(*last, timestamp=52.0)

    assert metrics["iteration_tokens_total_count"] == 3
    assert metrics["iteration_tokens_total_sum"] == 6 + 1 + 2
    assert metrics["iteration_tokens_total_bucket{le=1.0}"] == 1
    assert metrics["iteration_tokens_total_bucket{le=8.0}"] == 3


async def test_statistics_end_a_message() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        output = make_output([7, 8], request.request_id)
        await world.engine.send(output, timestamp=50.0, scheduler_stats=SchedulerStats())

        assert metrics["iteration_tokens_total_sum"] == 2


WORK_VALUES: dict[str, float] = {
    "estimated_flops_per_gpu_total": 20,
    "estimated_read_bytes_per_gpu_total": 40,
    "estimated_write_bytes_per_gpu_total": 60,
    "kv_block_lifetime_seconds_sum": 8.0,
    "kv_block_idle_before_evict_seconds_sum": 3.0,
    "kv_block_reuse_gap_seconds_sum": 1.5,
    "kv_block_reuse_gap_seconds_count": 4,
    "prompt_tokens_cached_by_source_total{source=device}": 8,
    "prompt_tokens_cached_by_source_total{source=host}": 2,
    "prompt_tokens_cached_by_source_total{source=p2p}": 0,
    "prompt_tokens_cached_by_source_total{source=disk}": 4,
    "prompt_tokens_cached_by_source_total{source=external_unspecified}": 0,
    "num_requests_kv_fetch_by_stage{stage=in_progress}": 2,
    "num_requests_kv_fetch_by_stage{stage=waiting_to_start}": 0,
}


async def test_work_and_caches_of_an_engine() -> None:
    metrics = Metrics()
    block = KvCacheEvictionEvent(
        lifetime_seconds=4.0, idle_seconds=1.5, reuse_gaps_seconds=[0.5, 0.25]
    )
    async with open_llm_world(observers=[metrics.observer]) as world:
        for _ in range(2):
            await world.engine.report(
                running=0,
                perf_stats=PerfStats(
                    num_flops_per_gpu=10, num_read_bytes_per_gpu=20, num_write_bytes_per_gpu=30
                ),
                kv_cache_eviction_events=[block],
                prefix_cache_stats=PrefixCacheStats(queries=10, hits=4),
                connector_prefix_cache_stats=PrefixCacheStats(
                    queries=6, hits=3, hits_by_source={"host": 1, "disk": 2}
                ),
                num_kv_fetch_reqs_by_stage={"in_progress": 2},
            )

    assert metrics.values(*WORK_VALUES) == WORK_VALUES


NIXL = {
    "transfer_duration": [0.01, 0.02],
    "post_duration": [0.001, 0.002],
    "bytes_transferred": [4096, 8192],
    "num_descriptors": [2, 4],
    "num_failed_transfers": [1],
    "num_failed_notifications": [1],
    "num_failed_handshakes": [1],
    "num_kv_expired_reqs": [1],
    "num_notifications_after_expiry": [2],
}
MOONCAKE = {
    "transfer_duration": [0.5],
    "bytes_transferred": [1024],
    "num_descriptors": [7],
    "num_failed_transfers": [1, 1],
    "num_failed_recvs": [1],
    "num_kv_expired_reqs": [1, 2],
}
STORE = {
    "load_get": [
        {
            "duration_seconds": 0.05,
            "num_keys": 3,
            "num_bytes": 1024,
            "status": "ok",
            "num_failed_keys": 2,
        }
    ]
}
NIXL_VALUES = {
    "nixl_xfer_time_seconds_sum": 0.03,
    "nixl_post_time_seconds_sum": 0.003,
    "nixl_bytes_transferred_sum": 12288,
    "nixl_num_descriptors_sum": 6,
    "nixl_num_descriptors_count": 2,
    "nixl_num_failed_transfers_total": 3,
    "nixl_num_failed_notifications_total": 1,
    "nixl_num_kv_expired_reqs_total": 1,
    "nixl_num_notifications_after_expiry_total": 2,
}
MOONCAKE_VALUES = {
    "mooncake_xfer_time_seconds_sum": 0.5,
    "mooncake_bytes_transferred_sum": 1024,
    "mooncake_num_descriptors_sum": 7,
    "mooncake_num_failed_transfers_total": 2,
    "mooncake_num_failed_recvs_total": 1,
    "mooncake_num_kv_expired_reqs_total": 3,
}
STORE_VALUES = {
    "mooncake_store_operation_time_seconds_sum{operation=load_get,status=ok}": 0.05,
    "mooncake_store_operation_total{operation=load_get,status=ok}": 1,
    "mooncake_store_operation_keys_total{operation=load_get,status=ok}": 3,
    "mooncake_store_operation_bytes_total{operation=load_get,status=ok}": 1024,
    "mooncake_store_operation_failed_keys_total{operation=load_get,status=ok}": 2,
}


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        pytest.param(NIXL, NIXL_VALUES, id="nixl"),
        pytest.param(MOONCAKE, MOONCAKE_VALUES, id="mooncake"),
        pytest.param(STORE, STORE_VALUES, id="store"),
        pytest.param(
            {"NixlConnector": NIXL, "MooncakeStoreConnector": STORE},
            NIXL_VALUES | STORE_VALUES,
            id="multi",
        ),
    ],
)
async def test_transfers(stats: dict[str, Any], expected: dict[str, float]) -> None:
    """There is no series of a connector before its first statistics."""
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.engine.report(running=0)
        assert metrics.values(*expected) == dict.fromkeys(expected)
        await world.engine.report(running=0, kv_connector_stats=stats)

    assert metrics.values(*expected) == pytest.approx(expected)


@pytest.mark.parametrize(
    "stats",
    [
        {"post_duration": "x", "transfer_duration": [None, "1", -1, float("nan")]},
        {"num_failed_recvs": {"a": 1}, "num_failed_transfers": [True, -2]},
        {"load_get": [1, {"duration_seconds": "long", "num_keys": None}]},
        {"SomeConnector": {"a": {"b": 3}}, "other": 7},
    ],
)
async def test_statistics_of_connectors_may_be_anything(stats: dict[str, Any]) -> None:
    """What makes no sense is left out."""
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await world.engine.report(running=3, kv_connector_stats=stats)

    assert metrics["num_requests_running"] == 3
    assert not metrics["nixl_xfer_time_seconds_sum"]
    assert not metrics["mooncake_num_failed_transfers_total"]


def adapters(metrics: Metrics) -> list[tuple[str, str, str]]:
    """The adapters that wait and run, by each series that there is."""
    (family,) = (m for m in metrics.registry.collect() if m.name == "vllm:lora_requests_info")
    for sample in family.samples:
        assert sample.value == pytest.approx(time.time(), abs=600)
    return [
        (
            sample.labels["max_lora"],
            sample.labels["waiting_lora_adapters"],
            sample.labels["running_lora_adapters"],
        )
        for sample in family.samples
    ]


SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


async def call(world: LlmWorld, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
    """Make a utility call that the engine answers with yes."""
    await world.start(partial(function, *args))
    await world.engine.answer(world.engine.call().call_id, True)
    await wait_all_tasks_blocked()


async def test_the_state_that_an_engine_was_put_into() -> None:
    metrics = Metrics()
    names = [f"engine_sleep_state{{sleep_state={state}}}" for state in SLEEP_STATES]
    async with open_llm_world(observers=[metrics.observer]) as world:
        client = world.llm.client
        seen = [list(metrics.values(*names).values())]
        for function, args in (
            (client.sleep, (1,)),
            (client.reset_mm_cache, ()),
            (client.sleep, (2,)),
            (client.release_kv_cache_memory, ()),
            (client.wake_up, ()),
        ):
            await call(world, function, *args)
            seen.append(list(metrics.values(*names).values()))

    assert seen == [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]]


async def test_an_engine_that_has_got_only_its_weights_back_is_not_awake() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await call(world, world.llm.client.sleep, 2)
        await world.start(lambda: world.llm.client.wake_up(["weights"]))
        await world.engine.answer(world.engine.call().call_id, False)

        assert metrics["engine_sleep_state{sleep_state=awake}"] == 0
        assert metrics["engine_sleep_state{sleep_state=discard_all}"] == 1


WATERMARK_VALUES: dict[str, float] = {
    "watermark_requests_total{status=watermarked}": 1,
    "watermark_requests_total{status=skipped}": 2,
    "watermark_requests_total{status=not_watermarked}": 2,
}


async def test_requests_by_their_watermark() -> None:
    """An engine marks only who asks for it, and neither greedy nor replayed tokens."""
    metrics = Metrics(watermarking=True)
    async with open_llm_world(observers=[metrics.observer]) as world:
        for params in (
            {"watermarking": True},
            {"watermarking": True, "temperature": 0.0},
            {"watermarking": True, "trace_decode_token_ids": [7]},
            {"watermarking": False},
            {},
        ):
            await world.start(partial(world.llm.generate, make_prompt(**params)))
            await world.finish(world.engine.requests()[0].request_id)

    assert metrics.values(*WATERMARK_VALUES) == WATERMARK_VALUES


async def test_there_are_no_watermarks_unless_it_is_stated() -> None:
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await run_request(world)

    assert metrics["watermark_requests_total{status=not_watermarked}"] is None


async def test_a_pooled_prompt() -> None:
    """It comes like a first token; there are no more, and no maximum."""
    metrics = Metrics()
    async with open_llm_world(observers=[metrics.observer]) as world:
        await call_tasks(world, ["embed"])
        pooling = EncodeRequest([1, 2, 3], pooling_params=PoolingParams(task="embed"))
        await world.start(lambda: world.llm.encode(pooling))
        world.pass_time(0.5)
        output = make_output(
            [],
            world.engine.requests()[0].request_id,
            pooling_output=Tensor.from_numpy(np.zeros(2, np.float32)),
            prefill_stats=PrefillStats(num_prompt_tokens=3, num_computed_tokens=3),
            events=[
                EngineCoreEvent(EventType.QUEUED, 50.0),
                EngineCoreEvent(EventType.SCHEDULED, 51.0),
            ],
            finish_reason=FinishReason.STOP,
        )
        await world.engine.send(output, timestamp=54.0)

    expected = {
        "time_to_first_token_seconds_sum": 0.5,
        "inter_token_latency_seconds_count": 0,
        "request_queue_time_seconds_sum": 1.0,
        "request_prefill_time_seconds_sum": 3.0,
        "request_decode_time_seconds_sum": 0.0,
        "request_decode_time_seconds_count": 1,
        "request_inference_time_seconds_sum": 3.0,
        "request_params_max_tokens_count": 0,
        "request_params_n_sum": 1,
        "request_generation_tokens_count": 1,
        "request_generation_tokens_sum": 0,
        "iteration_tokens_total_sum": 3,
        "request_success_total{finished_reason=stop}": 1,
    }
    assert metrics.values(*expected) == expected


async def call_tasks(world: LlmWorld, tasks: list[str]) -> None:
    """Let the engine say what its model supports."""
    await world.start(world.llm.client.driver.learn_supported_tasks)
    await world.engine.answer(world.engine.call().call_id, tasks)


async def test_adapters_of_requests(autojump_clock: MockClock) -> None:
    """One series, which goes with the last request, also with one that fails with its engine."""
    metrics = Metrics()
    events = {
        kind: [EngineCoreEvent(kind, 1.0)] for kind in (EventType.SCHEDULED, EventType.PREEMPTED)
    }
    ready: dict[str, Any] = {"supports_lora": True, "max_loras": 4}
    async with open_llm_world(observers=[metrics.observer], **ready) as world:
        for number, name in enumerate("ab"):
            lora = LoRARequest(lora_name=name, lora_int_id=number + 1, lora_path="p")
            facts = world.llm.client.driver.core.facts
            facts.note_results("add_lora", [[name, number + 1, "p"]], {0: True})
            prompt = make_prompt(name, request_lora_request=lora)
            await world.start(partial(world.llm.generate, prompt))
        first = world.engine.requests()[0].request_id
        assert adapters(metrics) == [("4", "a,b", "")]
        await world.engine.emit(first, [7], events=events[EventType.SCHEDULED])
        assert adapters(metrics) == [("4", "b", "a")]
        await world.engine.emit(first, [7], events=events[EventType.PREEMPTED])
        assert adapters(metrics) == [("4", "a,b", "")]
        await world.engine.report(
            running=0, running_lora_adapters={"c": 2}, waiting_lora_adapters={"d": 0}
        )
        assert adapters(metrics) == [("4", "a,b", "c")]
        await world.engine.report(running=0)
        await world.finish(first)
        assert adapters(metrics) == [("4", "b", "")]
        await world.engine.die()
        await trio.sleep(1)
        assert adapters(metrics) == []


PINNED = {
    **REQUEST_VALUES,
    **ENGINE_VALUES,
    **WORK_VALUES,
    **WATERMARK_VALUES,
    **NIXL_VALUES,
    **MOONCAKE_VALUES,
    **STORE_VALUES,
}
ELSEWHERE = {
    "corrupted_requests": "test_requests_with_nans_are_corrupted_once",
    "engine_sleep_state": "test_the_state_that_an_engine_was_put_into",
    "iteration_tokens_total": "test_tokens_of_a_message_are_one_iteration",
    "lora_requests_info": "test_adapters_of_requests",
}
"""Series whose values are in a test of their own."""


def test_no_series_is_exported_without_a_test_of_its_value() -> None:
    registry = CollectorRegistry()
    LlmMetrics(registry, watermarking=True).start([0], 1000, 0)
    exported = {metric.name.removeprefix("vllm:") for metric in registry.collect()}
    assert set(ELSEWHERE.values()) <= globals().keys()

    pinned = {re.sub(r"_(total|sum|count)(\{.*)?$", "", name.split("{")[0]) for name in PINNED}
    assert exported - pinned == ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("family", "name"),
    [("iteration_tokens", "iteration_tokens_total"), ("request_tokens", "request_prompt_tokens")],
)
async def test_buckets_can_be_replaced(family: str, name: str) -> None:
    metrics = Metrics(buckets={family: [3, 4.5]})
    async with open_llm_world(observers=[metrics.observer]):
        pass

    bounds = [f"{name}_bucket{{le={bound}}}" for bound in ("3.0", "4.5", "+Inf", "1.0")]
    assert list(metrics.values(*bounds).values()) == [0, 0, 0, None]


@pytest.mark.parametrize(
    ("buckets", "reason"),
    [
        ({"latency": [1]}, "no bucket family 'latency'"),
        ({"request_tokens": []}, "must be a bound"),
        ({"request_tokens": [0, 1]}, "finite and above 0"),
        ({"request_tokens": [1, float("inf")]}, "finite and above 0"),
        ({"request_tokens": [True, 2]}, "finite and above 0"),
        ({"request_tokens": [1, 1]}, "must increase"),
    ],
)
def test_buckets_that_make_no_sense(buckets: dict[str, list[float]], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        LlmMetrics(CollectorRegistry(), buckets=buckets)


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
        world.pass_time(-100)
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
