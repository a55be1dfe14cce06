"""Replays schedules that were recorded from vLLM's scheduler with ours, step by step."""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from trio_vllm.mock.block_hashes import BlockHasher, CacheScope, MultiModalSpan
from trio_vllm.mock.kv_cache import BlockTable, KvCache
from trio_vllm.mock.kv_events import KvCacheEvent
from trio_vllm.mock.scheduled_request import RequestStatus, ScheduledRequest
from trio_vllm.mock.scheduling import RowExtras, Sampled, Scheduler, SchedulerConfig, Step

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
            request.table.token_ids.append(output[-1])
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


def load(path: Path) -> Any:
    """A recording."""
    return json.loads(gzip.decompress(path.read_bytes()))


class OracleReplay:
    """Our scheduler in a scenario of ``smoke/scheduler_oracle.py``, recorded in the same form."""

    def __init__(self, settings: Json, *, fast_path: bool = True) -> None:
        options = {name: settings[name] for name in settings if name in _CONFIG_FIELDS}
        self.config = SchedulerConfig(**{**options, "vllm_release": tuple(settings["release"])})
        self.cache = KvCache(
            settings["num_blocks"],
            settings["block_size"],
            enable_prefix_caching=settings["enable_prefix_caching"],
            hasher=BlockHasher(settings["hash"], settings["hash_seed"]),
            enable_events=settings["events"],
        )
        self.scheduler = Scheduler(self.config, self.cache, fast_path=fast_path)
        self.outputs: dict[ScheduledRequest, Iterator[int]] = {}
        self.left: dict[ScheduledRequest, int] = {}
        self.order: dict[str, ScheduledRequest] = {}
        self.steps: list[Json] = []

    def perform(self, operation: list[Any]) -> None:
        """Carry out one operation."""
        name, *arguments = operation
        getattr(self, f"do_{name}")(*arguments)

    def do_add(self, request: Json) -> None:
        """Add a request."""
        prompt = segment_tokens(request["prompt"])
        lora = request.get("lora")
        scope = CacheScope(
            cache_salt=request.get("cache_salt"),
            lora_name=None if lora is None else f"lora{lora}",
            lora_path=f"/adapters/{lora}",
            multimodal=tuple(MultiModalSpan(*span) for span in request.get("multimodal", ())),
        )
        added = ScheduledRequest(
            request_id=request["id"],
            num_prompt_tokens=len(prompt),
            table=BlockTable(
                prompt,
                scope,
                lora_id=lora,
                skip_reading_prefix_cache=request.get("skip_reading_prefix_cache", False),
            ),
            priority=request["priority"],
            arrival_time=request["arrival"],
        )
        self.outputs[added] = iter(segment_tokens([[request["output"], request["max_tokens"]]]))
        self.left[added] = min(request["max_tokens"], self.config.max_model_len - len(prompt))
        self.order[request["id"]] = added
        self.scheduler.add(added, 0.0)

    def do_abort(self, index: int, in_step: bool) -> None:
        """Abort the unfinished request of this place, perhaps while a step is under way."""
        unfinished = [
            request_id
            for request_id, request in self.order.items()
            if request.status is not RequestStatus.FINISHED
        ]
        ids = unfinished[index : index + 1]
        if not in_step:
            self.scheduler.abort(ids)
        elif self.scheduler.has_work:
            self.step(ids)

    def do_reset(self, running: bool) -> None:
        """Reset the prefix cache."""
        done = self.scheduler.reset_prefix_cache(0.0, reset_running_requests=running)
        self.steps.append({"reset": done})

    def do_pause(self, state: Any) -> None:
        """Pause or resume."""
        self.scheduler.paused = state

    def do_step(self, count: int) -> None:
        """Make steps while there is work."""
        while count and self.scheduler.has_work:
            count -= 1
            self.step()

    def step(self, aborted_meanwhile: Iterable[str] = ()) -> None:
        """Make one step."""
        step = self.scheduler.schedule(0.0)
        self.scheduler.abort(aborted_meanwhile)
        rows = [request for request in step.rows if request.status is RequestStatus.RUNNING]
        sampled = {request: self._sample(request, step) for request in rows}
        finished = [request for request in rows if not self.left[request]]
        if self.config.num_speculative_tokens:
            extras = self.scheduler.update(step, finished, sampled)
            self._draft(step)
        else:
            extras = self.scheduler.update(step, finished)
        self.steps.append(self._record(step, rows, extras, sampled))

    def _sample(self, request: ScheduledRequest, step: Step) -> Sampled:
        """Give a request its next tokens."""
        made = len(request.table.token_ids) - request.num_prompt_tokens
        num_drafts = step.drafts.get(request, 0)
        num_accepted = made * 7 % (num_drafts + 1)
        delivered = list(islice(self.outputs[request], min(num_accepted + 1, self.left[request])))
        request.table.token_ids += delivered
        self.left[request] -= len(delivered)
        return Sampled(num_accepted, len(delivered))

    def _draft(self, step: Step) -> None:
        """Guess the next tokens; at times fewer than asked for."""
        most = self.config.num_speculative_tokens
        for request in step.rows:
            tokens = request.num_tokens
            request.num_draft_tokens = most if tokens % 5 else tokens % (most + 1)

    def _record(
        self,
        step: Step,
        rows: list[ScheduledRequest],
        extras: dict[ScheduledRequest, RowExtras],
        sampled: dict[ScheduledRequest, Sampled],
    ) -> Json:
        stats = self.scheduler.make_stats(step)
        details = stats.iteration_details
        record: Json = {
            "rows": [
                _short_row(request, sampled[request].num_delivered, extras.get(request))
                for request in rows
            ],
            "counts": [
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                stats.num_skipped_waiting_reqs,
            ],
            "usage": stats.kv_cache_usage,
            "prefix": [int(value) for value in attrs.astuple(stats.prefix_cache_stats)[:-1]],
            "iteration": None if details is None else list(attrs.astuple(details)[:5]),
            "blocks": {
                one.request_id: one.table.blocks.copy()
                for one in self.order.values()
                if one.status is RequestStatus.RUNNING
            },
        }
        if stats.spec_decoding_stats is not None:
            record["drafts"] = list(attrs.astuple(stats.spec_decoding_stats))
        events = self.cache.take_events()
        if events:
            record["events"] = json.loads(json.dumps([event.to_wire() for event in events]))
        return record


def segment_tokens(segments: list[list[int]]) -> list[int]:
    """The tokens of segments; those of the same number begin the same."""
    return [
        (seed * 7919 + index * 31) % 32_000 for seed, count in segments for index in range(count)
    ]


def _short_row(request: ScheduledRequest, num_tokens: int, extras: RowExtras | None) -> list[Any]:
    row: list[Any] = [request.request_id, num_tokens, None, None, None]
    if request.status is RequestStatus.FINISHED:
        row[2] = "length"
    if extras is not None:
        row[3] = [int(event.type) for event in extras.events] or None
        if extras.prefill_stats is not None:
            row[4] = list(attrs.astuple(extras.prefill_stats))
    return row


_CONFIG_FIELDS = {field.name for field in attrs.fields(SchedulerConfig)}
