"""Write schedules that vLLM's own scheduler makes of random requests, to compare ours with.

Run by the Python that has vLLM: ``python scheduler_oracle.py MODEL OUTPUT --seed 1 --count 20``. No engine
and no model run: `vllm.v1.core.sched.scheduler.Scheduler` is called as the engine core calls it, and the
tokens that a model would sample are made up. ``tests/mock/replay.py`` does the same with our scheduler.

Every scenario has settings, and operations: add a request, abort some, reset the prefix cache, pause,
make a step. Steps record rows, statistics, block tables and KV-cache events.
"""

import argparse
import copy
import gzip
import json
import os
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

Json = dict[str, Any]


class Rolls:
    """Random settings and operations of one scenario."""

    def __init__(self, seed: int, *, speculative: bool) -> None:
        self.speculative = speculative
        self.random = random.Random(seed)
        self.seed = seed
        self.requests = 0

    def maybe(self, probability: float) -> bool:
        """Yes or no."""
        return self.random.random() < probability

    def settings(self) -> Json:
        """Options of the scheduler and of the KV cache."""
        roll = self.random
        block_size = roll.choice([1, 4, 8, 16, 16, 32])
        max_model_len = roll.choice([32, 64, 100, 128, 256])
        max_num_seqs = roll.choice([1, 2, 3, 4, 8, 16])
        chunked = self.maybe(0.8)
        budgets = [max_num_seqs, 16, 33, 64, 128, 512] if chunked else [256, 300, 512]
        budget = max(max_num_seqs, roll.choice(budgets))
        fewest_blocks = -(-max_model_len // block_size) + 1
        num_blocks = fewest_blocks + int(roll.choice([0, 1, 3, 8, 40]) * max(1, 16 / block_size))
        settings: Json = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "enable_chunked_prefill": chunked,
            "scheduling_policy": roll.choice(["fcfs", "priority"]),
            "enable_prefix_caching": self.maybe(0.8),
            "hash": roll.choice(["sha256", "sha256_cbor"]),
            "hash_seed": roll.choice(["0", "42", "vllm-none-hash"]),
            "events": self.maybe(0.5),
        }
        if chunked and self.maybe(0.4):
            # Upstream asserts that the places for drafts are not cut.
            thresholds = [7, 16, 30] if self.speculative else [1, 7, 16, 30]
            settings["long_prefill_token_threshold"] = roll.choice(thresholds)
            settings["long_prefill_token_threshold_adaptive"] = self.maybe(0.3)
        if self.maybe(0.2):
            settings["watermark"] = roll.choice([0.05, 0.1, 0.3])
        if self.maybe(0.2):
            settings["scheduler_reserve_full_isl"] = False
        if self.maybe(0.15):
            settings["max_loras"] = roll.choice([1, 2])
        if self.speculative:
            settings["num_speculative_tokens"] = roll.choice([1, 2, 3, 5])
        if self.maybe(0.1):
            settings["max_num_active_seqs"] = max(1, max_num_seqs // 2)
        if self.maybe(0.1):
            settings["max_num_scheduled_tokens"] = max(max_num_seqs, budget // 2)
        return settings

    def request(self, settings: Json) -> Json:
        """A request; its prompt is made of a few segments that others have as well."""
        roll = self.random
        longest = settings["max_model_len"] - 1
        if not settings["enable_chunked_prefill"]:
            longest = min(longest, settings["max_num_batched_tokens"])
        segments: list[list[int]] = []
        room = roll.randint(1, longest)
        while room > 0:
            length = min(room, roll.choice([3, 16, 32, 40, 64]))
            segments.append([roll.randint(0, 3), length])
            room -= length
        self.requests += 1
        request: Json = {
            "id": f"r{roll.randint(0, 9)}-{self.requests}",
            "prompt": segments,
            "output": roll.randint(0, 3),
            "max_tokens": roll.choice([1, 2, 5, 20, 60, 200]),
            "priority": roll.choice([0, 0, 1, 5, -2]),
            "arrival": roll.choice([0.0, 1.0, 2.5, float(self.requests)]),
        }
        if self.maybe(0.1):
            request["cache_salt"] = roll.choice(["a", "b"])
        if "max_loras" in settings and self.maybe(0.7):
            request["lora"] = roll.randint(1, 3)
        if self.maybe(0.1):
            request["multimodal"] = [["cat", roll.randint(0, 10), roll.randint(1, 20)]]
        if self.maybe(0.05):
            request["skip_reading_prefix_cache"] = True
        return request

    def operations(self, settings: Json) -> list[list[Any]]:
        """What happens to the engine; it is then stepped until it has nothing to do."""
        roll = self.random
        operations: list[list[Any]] = []
        for _ in range(roll.randint(1, 4)):
            for _ in range(roll.choice([1, 3, 6, 12])):
                operations.append(["add", self.request(settings)])
                if self.maybe(0.3):
                    operations.append(["step", roll.randint(1, 6)])
            if self.maybe(0.3):
                operations.append(["abort", roll.randint(0, 12), self.maybe(0.5)])
            operations.append(["step", roll.choice([1, 5, 30, 1000])])
            if self.maybe(0.25):
                operations.append(["reset", self.maybe(0.5)])
            if self.maybe(0.1):
                operations += [["pause", roll.choice(["new", "all"])], ["step", 3]]
                operations.append(["pause", "no"])
        # Some requests are never scheduled, for example if the watermark leaves no block for them.
        return [*operations, ["step", 500]]


def tokens(segments: list[list[int]]) -> list[int]:
    """The tokens of segments; those of the same number begin the same."""
    return [
        (seed * 7919 + index * 31) % 32_000 for seed, count in segments for index in range(count)
    ]


def accepted(num_output_tokens: int, num_drafts: int) -> int:
    """How many drafts the model agrees with."""
    return num_output_tokens * 7 % (num_drafts + 1)


def drafted(num_tokens: int, most: int) -> int:
    """How many tokens the drafter guesses after so many."""
    return most if num_tokens % 5 else num_tokens % (most + 1)


class Oracle:
    """vLLM's scheduler in one scenario."""

    def __init__(self, engine_config: Any, settings: Json) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]
        from vllm.config import KVEventsConfig, SpeculativeConfig
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        config = copy.copy(engine_config)
        config.scheduler_config = scheduler = copy.copy(config.scheduler_config)
        config.cache_config = cache = copy.copy(config.cache_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = settings["max_model_len"]
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "enable_chunked_prefill",
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "watermark",
            "scheduler_reserve_full_isl",
            "max_num_active_seqs",
            "max_num_scheduled_tokens",
        ):
            if name in settings:
                setattr(scheduler, name, settings[name])
        scheduler.policy = settings["scheduling_policy"]
        cache.block_size = settings["block_size"]
        cache.enable_prefix_caching = settings["enable_prefix_caching"]
        cache.num_gpu_blocks = settings["num_blocks"]
        if settings["events"]:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.num_drafts = settings.get("num_speculative_tokens", 0)
        if self.num_drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=self.num_drafts,
                prompt_lookup_max=3,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        if "max_loras" in settings:
            config.lora_config = SimpleNamespace(max_loras=settings["max_loras"])
        spec = FullAttentionSpec(
            block_size=settings["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.settings = settings
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=settings["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=_NoGrammars(),
            block_size=settings["block_size"],
            log_stats=True,
        )
        self.batches: list[Any] = []
        self.scheduler.kv_event_publisher = SimpleNamespace(publish=self.batches.append)
        self.hasher = None
        if settings["enable_prefix_caching"]:
            os.environ["PYTHONHASHSEED"] = settings["hash_seed"]
            function = get_hash_fn_by_name(settings["hash"])
            kv_cache_utils.init_none_hash(function)
            self.hasher = kv_cache_utils.get_request_block_hasher(settings["block_size"], function)
        self.outputs: dict[str, list[int]] = {}
        self.iterations = 0
        self.steps: list[Json] = []

    def perform(self, operation: list[Any]) -> None:
        """Carry out one operation."""
        name, *arguments = operation
        getattr(self, f"do_{name}")(*arguments)

    def do_add(self, request: Json) -> None:
        """Add a request."""
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True)
        sampling.skip_reading_prefix_cache = request.get("skip_reading_prefix_cache", False)
        lora = None
        if (number := request.get("lora")) is not None:
            lora = LoRARequest(f"lora{number}", number, f"/adapters/{number}")
        added = Request(
            request_id=request["id"],
            prompt_token_ids=tokens(request["prompt"]),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=request["arrival"],
            lora_request=lora,
            cache_salt=request.get("cache_salt"),
            priority=request["priority"],
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=identifier,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for identifier, offset, length in request.get("multimodal", ())
            ],
            block_hasher=self.hasher,
        )
        self.outputs[request["id"]] = tokens([[request["output"], request["max_tokens"] + 10]])
        self.scheduler.add_request(_without_encoder(added))

    def do_abort(self, index: int, in_step: bool) -> None:
        """Abort the unfinished request of this place, perhaps while a step is under way."""
        from vllm.v1.request import RequestStatus

        ids = list(self.scheduler.requests)[index : index + 1]
        abort = partial(self.scheduler.finish_requests, ids, RequestStatus.FINISHED_ABORTED)
        if not in_step:
            abort()
        elif self.scheduler.has_requests():
            self.step(abort)

    def do_reset(self, running: bool) -> None:
        """Reset the prefix cache."""
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.steps.append({"reset": done})

    def do_pause(self, state: str) -> None:
        """Pause or resume."""
        from vllm.v1.core.sched.interface import PauseState

        states = {"no": "UNPAUSED", "new": "PAUSED_NEW", "all": "PAUSED_ALL"}
        self.scheduler.set_pause_state(PauseState[states[state]])

    def do_step(self, count: int) -> None:
        """Make steps while there is work."""
        while count and self.scheduler.has_requests():
            count -= 1
            self.step()

    def step(self, meanwhile: Any = None) -> None:
        """Make one step."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        sampled = [self.sample(request_id, len(drafts.get(request_id, ()))) for request_id in ids]
        iteration = self.iteration(output)
        if meanwhile is not None:
            meanwhile()
        messages = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        if self.num_drafts and ids:
            self.draft(ids)
        (message,) = messages.values()
        self.steps.append(self.record(message, iteration))

    def sample(self, request_id: str, num_drafts: int) -> list[int]:
        """The next tokens of a request whose tokens are all computed."""
        request = self.scheduler.requests[request_id]
        if request.is_prefill_chunk:
            return []
        first = request.num_output_tokens
        return self.outputs[request_id][first : first + 1 + accepted(first, num_drafts)]

    def draft(self, ids: list[str]) -> None:
        """Guess the next tokens of all requests of the step."""
        from vllm.v1.outputs import DraftTokenIds

        requests = self.scheduler.requests
        guesses = {
            request_id: [0] * drafted(requests[request_id].num_tokens, self.num_drafts)
            for request_id in ids
            if request_id in requests
        }
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(guesses), list(guesses.values())))

    def iteration(self, output: Any) -> list[int] | None:
        """What the step is about to compute."""
        from vllm.v1.utils import compute_iteration_details

        if not output.total_num_scheduled_tokens:
            return None
        self.iterations += 1
        details = compute_iteration_details(output)
        return [
            self.iterations - 1,
            details.num_ctx_requests,
            details.num_ctx_tokens,
            details.num_generation_requests,
            details.num_generation_tokens,
        ]

    def record(self, message: Any, iteration: list[int] | None) -> Json:
        """A step as it is compared."""
        stats = message.scheduler_stats
        prefix = {**asdict(stats.prefix_cache_stats), "hits_by_source": None}
        step: Json = {
            "rows": [_row(row) for row in message.outputs],
            "counts": [
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                stats.num_skipped_waiting_reqs,
            ],
            "usage": stats.kv_cache_usage,
            "prefix": [int(value) for value in prefix.values() if value is not None],
            "iteration": iteration,
            "blocks": {
                request.request_id: self.scheduler.kv_cache_manager.get_block_ids(
                    request.request_id
                )[0]
                for request in self.scheduler.running
            },
        }
        if stats.spec_decoding_stats is not None:
            step["drafts"] = list(asdict(stats.spec_decoding_stats).values())
        if self.batches:
            from msgspec import (  # type: ignore[import-not-found, unused-ignore]
                to_builtins,
            )

            (batch,) = self.batches
            step["events"] = [to_builtins(event) for event in batch.events]
            self.batches.clear()
        return step


class _NoGrammars:
    """In place of the manager of structured outputs."""

    @staticmethod
    def accept_tokens(request: Any, token_ids: list[int]) -> bool:
        return True

    @staticmethod
    def validate_tokens(request: Any, token_ids: list[int]) -> list[int]:
        return token_ids


def _without_encoder(request: Any) -> Any:
    """The request as one whose features need no encoder: here they only tell blocks apart."""
    request.__class__ = type("Request", (type(request),), {"has_encoder_inputs": False})
    return request


def _row(row: Any) -> list[Any]:
    prefill = row.prefill_stats
    return [
        row.request_id,
        len(row.new_token_ids),
        None if row.finish_reason is None else str(row.finish_reason),
        None if row.events is None else [int(event.type) for event in row.events],
        None if prefill is None else list(asdict(prefill).values()),
    ]


def engine_config(model: str) -> Any:
    """The configuration that all scenarios are varied from."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=model,
        dtype="float32",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
    )
    return arguments.create_engine_config()


def scenario(config: Any, seed: int, release: list[int], *, speculative: bool) -> Json:
    """One random scenario, and what vLLM does in it."""
    rolls = Rolls(seed, speculative=speculative)
    settings = {**rolls.settings(), "release": release}
    operations = rolls.operations(settings)
    oracle = Oracle(config, settings)
    for operation in operations:
        oracle.perform(operation)
    return {"seed": seed, "settings": settings, "operations": operations, "steps": oracle.steps}


def main() -> None:
    """Write scenarios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="directory of a model; only its configuration is read")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--release", default="0.32", help="which vLLM this is")
    parser.add_argument("--speculative", action="store_true", help="with speculative decoding")
    options = parser.parse_args()
    config = engine_config(options.model)
    release = [int(part) for part in options.release.split(".")]
    seeds = range(options.seed, options.seed + options.count)
    scenarios = [scenario(config, seed, release, speculative=options.speculative) for seed in seeds]
    text = json.dumps(scenarios, separators=(",", ":"))
    options.output.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"scenarios={len(scenarios)} steps={sum(len(one['steps']) for one in scenarios)}")


if __name__ == "__main__":
    main()
