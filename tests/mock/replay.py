"""Replays schedules that were recorded from vLLM's scheduler with ours, step by step."""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from trio_vllm.mock.block_hashes import BlockHasher, CacheScope
from trio_vllm.mock.kv_cache import BlockTable, KvCache
from trio_vllm.mock.kv_events import KvCacheEvent
from trio_vllm.mock.scheduled_request import RequestStatus, ScheduledRequest
from trio_vllm.mock.scheduling import RowExtras, Scheduler, SchedulerConfig, Step

Json = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "vectors" / "schedules"

_OPTIONS = argparse.ArgumentParser(exit_on_error=False)
for _name in ("max-num-seqs", "max-num-batched-tokens", "max-model-len", "num-gpu-blocks-override"):
    _OPTIONS.add_argument(f"--{_name}", type=int)
_OPTIONS.add_argument("--long-prefill-token-threshold", type=int, default=0)
_OPTIONS.add_argument("--block-size", type=int)
_OPTIONS.add_argument("--scheduling-policy", default="fcfs")
_OPTIONS.add_argument("--prefix-caching-hash-algo", default="sha256")
_OPTIONS.add_argument("--kv-events-config", type=json.loads)
_OPTIONS.add_argument(
    "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
)
_OPTIONS.add_argument(
    "--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True
)


class Replay:
    """A scheduler set up as the recorded engine was, and the engine around it."""

    def __init__(self, recording: Json, *, fast_path: bool = True) -> None:
        options = _OPTIONS.parse_args(recording["engine_args"])
        ready = recording["ready"]
        config = SchedulerConfig(
            max_model_len=ready["max_model_len"],
            max_num_seqs=ready["max_num_seqs"],
            max_num_batched_tokens=ready["max_num_batched_tokens"],
            enable_chunked_prefill=options.enable_chunked_prefill,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            scheduling_policy=options.scheduling_policy,
        )
        seed = recording.get("kv_events", {}).get("pythonhashseed", "0")
        self.cache = KvCache(
            ready["num_gpu_blocks"],
            ready["block_size"],
            enable_prefix_caching=options.enable_prefix_caching,
            hasher=BlockHasher(options.prefix_caching_hash_algo, str(seed)),
            enable_events=options.kv_events_config is not None,
        )
        self.scheduler = Scheduler(config, self.cache, fast_path=fast_path)
        self.events: list[list[KvCacheEvent]] = []
        self._max_model_len = config.max_model_len
        self._max_tokens: dict[ScheduledRequest, int] = {}
        self._outputs: dict[ScheduledRequest, list[int]] = {}

    def run(self, phase: Json) -> Iterator[Json]:
        """What each step of a recorded phase gives, in the form of the recording."""
        if phase["before"] is not None:
            assert phase["before"] == ["reset_prefix_cache"]
            assert self.scheduler.reset_prefix_cache(0.0)
        for request in phase["requests"]:
            self._add(request)
        ids = iter(phase["steps"])
        while self.scheduler.has_work:
            yield self.step(_recorded_ids(next(ids, {})))

    def step(self, ids: dict[str, list[int]]) -> Json:
        """One step; ``ids`` are the tokens that are sampled, where they are known."""
        step = self.scheduler.schedule(0.0)
        finished: list[ScheduledRequest] = []
        for request in step.rows:
            output = self._outputs[request]
            output += ids.get(request.request_id, [0])
            request.table.token_ids.append(output[-1])  # type: ignore[attr-defined]
            if (
                len(output) >= self._max_tokens[request]
                or request.num_prompt_tokens + len(output) >= self._max_model_len
            ):
                finished.append(request)
        extras = self.scheduler.update(step, finished)
        events = self.cache.take_events()
        if events:
            self.events.append(events)
        return self._message(step, extras)

    def _add(self, request: Json) -> None:
        added = ScheduledRequest(
            request_id=request["id"],
            num_prompt_tokens=len(request["prompt"]),
            table=BlockTable(
                list(request["prompt"]), CacheScope(cache_salt=request.get("cache_salt"))
            ),
            priority=request.get("priority", 0),
            arrival_time=1_700_000_000 + request["arrival"],
        )
        self._max_tokens[added] = request["max_tokens"]
        self._outputs[added] = []
        self.scheduler.add(added, 0.0)

    def _message(self, step: Step, extras: dict[ScheduledRequest, RowExtras]) -> Json:
        message: Json = {}
        if step.rows:
            message["rows"] = [_row(request, extras.get(request)) for request in step.rows]
        message["stats"] = _stats(self.scheduler, step)
        return message


def _recorded_ids(step: Json) -> dict[str, list[int]]:
    return {row["id"]: row["ids"] for row in step.get("rows", ()) if "ids" in row}


def _row(request: ScheduledRequest, extras: RowExtras | None) -> Json:
    row: Json = {"id": request.request_id, "tokens": 1}
    if request.status is RequestStatus.FINISHED:
        row["finish"] = "length"
    if extras is not None:
        row["events"] = [event.type.name.lower() for event in extras.events]
        if extras.prefill_stats is not None:
            row["prefill"] = attrs.asdict(extras.prefill_stats)
    return row


def _stats(scheduler: Scheduler, step: Step) -> Json:
    stats = attrs.asdict(scheduler.make_stats(step))
    recorded = {name: stats[name] for name in _RECORDED_STATS}
    if stats["iteration_details"] is not None:
        recorded["iteration_details"] = stats["iteration_details"]
        del recorded["iteration_details"]["elapsed_ms"]
    return recorded


_RECORDED_STATS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    "kv_cache_usage",
    "prefix_cache_stats",
)


def load(path: Path) -> Json:
    """A recording."""
    recording: Json = json.loads(gzip.decompress(path.read_bytes()))
    return recording
