"""Engines with a schedule: what was recorded from real ones, message by message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.mock.driver import Driver, drive
from tests.mock.replay import _OPTIONS, Json, load
from tests.mock.test_schedules import RECORDED, without_ids

from trio_vllm.protocol import EngineCoreOutput, RequestBatchOutputs


def driver_for(recording: Json, **config: Any) -> Driver:
    """An engine with the options of the recorded one."""
    options, ready = _OPTIONS.parse_args(recording["engine_args"]), recording["ready"]
    return drive(
        **{name: ready[name] for name in ("max_model_len", "max_num_seqs", "num_gpu_blocks")},
        **{name: ready[name] for name in ("block_size", "max_num_batched_tokens")},
        enable_chunked_prefill=options.enable_chunked_prefill,
        enable_prefix_caching=options.enable_prefix_caching,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        scheduling_policy=options.scheduling_policy,
        prefix_caching_hash_algo=options.prefix_caching_hash_algo,
        enable_logging_iteration_details=True,
        **config,
    )


def run_phase(driver: Driver, phase: Json) -> Iterator[Json]:
    """Add what was added while the scheduler was paused, and let it run; each message."""
    driver.call("pause_scheduler", "keep", False)
    if phase["before"] is not None:
        assert driver.call(*phase["before"])
    for request in phase["requests"]:
        driver.add(
            request["id"],
            request["max_tokens"],
            prompt_token_ids=request["prompt"],
            priority=request.get("priority", 0),
            cache_salt=request.get("cache_salt"),
            arrival_time=1_700_000_000 + request["arrival"],
        )
    driver.sent.clear()
    driver.step()
    assert driver.batches() == []
    driver.call("resume_scheduler")
    driver.sent.clear()
    driver.run()
    for batch in driver.batches():
        yield message(batch)


def message(batch: RequestBatchOutputs) -> Json:
    """A message in the form of the recordings."""
    told: Json = {}
    if batch.outputs:
        told["rows"] = [row(output) for output in batch.outputs]
    assert batch.scheduler_stats is not None
    stats = attrs.asdict(batch.scheduler_stats)
    told["stats"] = {
        name: stats[name]
        for name in ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs")
    }
    told["stats"]["kv_cache_usage"] = pytest.approx(stats["kv_cache_usage"], abs=1e-9)
    told["stats"]["prefix_cache_stats"] = stats["prefix_cache_stats"]
    if stats["iteration_details"] is not None:
        told["stats"]["iteration_details"] = stats["iteration_details"]
        del told["stats"]["iteration_details"]["elapsed_ms"]
    return told


def row(output: EngineCoreOutput) -> Json:
    """An output in the form of the recordings."""
    told: Json = {"id": output.request_id, "tokens": len(output.new_token_ids)}
    if output.finish_reason is not None:
        told["finish"] = str(output.finish_reason)
    if output.events is not None:
        told["events"] = [event.type.name.lower() for event in output.events]
    if output.prefill_stats is not None:
        told["prefill"] = attrs.asdict(output.prefill_stats)
    return told


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_messages_are_those_of_a_real_engine(path: Path, *, fast_path: bool) -> None:
    """Rows, ends, events, prefill statistics and scheduler statistics of each step."""
    recording = load(path)
    driver = driver_for(recording, fast_path=fast_path)
    for phase in recording["phases"]:
        got = list(run_phase(driver, phase))
        expected = [without_ids(step) for step in phase["steps"]]
        for number, (mine, real) in enumerate(zip(got, expected, strict=False)):
            assert mine == real, f"step {number}"
        assert len(got) == len(expected)
