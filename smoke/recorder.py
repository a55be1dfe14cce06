"""Record the schedule of a running engine: what it does with known requests, step by step.

``python smoke/recorder.py OUTPUT.json.gz --seed 1`` makes random requests and settings, starts a real
engine with them and writes a recording in the form that ``tests/vectors/schedules/README.md`` describes.
`record_mock` records an engine of ours under the same messages.

The scheduler is paused while the requests of a phase arrive, so what happens in which step depends on
nothing but the requests and the settings.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from harness import CONTEXT, PATIENCE, free_port, headless_engine, owner
from provision import REFERENCE_VERSION, VERSIONS, Peers, PeersUnavailable, find_peers
from trio_vllm.concurrency import running
from trio_vllm.mock import Lockstep, MockEngineConfig, serve_in_memory
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineId,
    Frames,
    RequestBatchOutputs,
    SamplingParams,
    UtilityCallOutput,
    UtilityRequest,
    decode_outputs,
    encode_add,
    encode_utility,
)
from trio_vllm.transport import EngineChannels, EngineSource, InMemory

Json = dict[str, Any]

BLOCK_SIZE = 32
"""The smallest that the CPU backend takes."""
ARRIVAL = 1_700_000_000.0
"""Seconds that arrival times count from."""

_STATS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    "kv_cache_usage",
    "prefix_cache_stats",
)
_READY: tuple[str, ...] = ("num_gpu_blocks", "block_size", "max_model_len", "max_num_seqs")
_READY += ("max_num_batched_tokens", "vllm_version")

_OPTIONS = argparse.ArgumentParser(exit_on_error=False)
_OPTIONS.add_argument("--long-prefill-token-threshold", type=int, default=0)
_OPTIONS.add_argument("--scheduling-policy", default="fcfs")
_OPTIONS.add_argument("--prefix-caching-hash-algo", default="sha256")
for _name in ("--enable-prefix-caching", "--enable-chunked-prefill"):
    _OPTIONS.add_argument(_name, action=argparse.BooleanOptionalAction, default=True)


# Scenarios ----------------------------------------------------------------------------------------


class Scenario:
    """Random settings, and requests in phases; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self.name = f"random-{seed}"
        self._model_len = self._random.choice([128, 256, CONTEXT])
        self.engine_args = self._settings()
        # Prompts begin with one of these, so that they have blocks in common.
        self._stems = [self._tokens(self._random.randint(20, 120)) for _ in range(3)]
        self.phases = [self._phase(number) for number in range(2)]

    def _settings(self) -> list[str]:
        roll, model_len = self._random, self._model_len
        seqs = roll.choice([1, 2, 3, 4, 8, 16])
        is_chunked = roll.random() < 0.75
        budgets = [max(seqs, 16), 64, 100, 256] if is_chunked else [model_len, model_len + 60]
        blocks = model_len // BLOCK_SIZE + 1 + roll.choice([0, 1, 3, 8, 40])
        arguments: list[object] = ["--block-size", BLOCK_SIZE, "--max-model-len", model_len]
        arguments += ["--max-num-seqs", seqs, "--max-num-batched-tokens", roll.choice(budgets)]
        arguments += ["--num-gpu-blocks-override", blocks]
        if not is_chunked:
            arguments.append("--no-enable-chunked-prefill")
        elif roll.random() < 0.4:
            arguments += ["--long-prefill-token-threshold", roll.choice([7, 16, 40])]
        if roll.random() < 0.4:
            arguments += ["--scheduling-policy", "priority"]
        if roll.random() < 0.25:
            arguments.append("--no-enable-prefix-caching")
        return [str(argument) for argument in arguments]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(10, 30_000) for _ in range(count)]

    def _phase(self, number: int) -> Json:
        is_reset = number > 0 and self._random.random() < 0.4
        count = self._random.randint(4, 10)
        return {
            "before": ["reset_prefix_cache"] if is_reset else None,
            "requests": [self._request() for _ in range(count)],
        }

    def _request(self) -> Json:
        roll = self._random
        stem = roll.choice(self._stems)[: roll.randint(0, 120)]
        prompt = [*stem, *self._tokens(roll.randint(1, self._model_len // 2))]
        request: Json = {
            "id": f"r{self._count}",
            "prompt": prompt[: self._model_len - 1],
            "max_tokens": roll.randint(1, 40),
            "priority": roll.choice([-1, 0, 0, 0, 2]) if self.is_by_priority else 0,
            "arrival": self._count + roll.choice([0.0, 0.5, -1.5]),
        }
        if roll.random() < 0.1:
            request["cache_salt"] = roll.choice(["salt", "pepper"])
        self._count += 1
        return request

    @property
    def is_by_priority(self) -> bool:
        """Whether requests have priorities."""
        return "priority" in self.engine_args


# Recording ----------------------------------------------------------------------------------------


@attrs.define
class Wire:
    """Messages to one engine, and its messages, in their order."""

    _channels: EngineChannels
    _call_id: int = 0
    _received: deque[EngineCoreOutputs] = attrs.field(factory=deque)

    def send(self, frames: Frames) -> None:
        """Send a message."""
        self._channels.requests.send_nowait([bytes(EngineId.of(0)), *frames])

    async def receive(self) -> EngineCoreOutputs:
        """Wait for the next message."""
        while not self._received:
            batch = await self._channels.outputs.receive_batch(1000)
            messages = (decode_outputs(frames) for frames, _ in batch)
            self._received += [one for one in messages if not isinstance(one, EngineDead)]
        return self._received.popleft()

    async def call(self, method: str, *args: Any) -> tuple[Any, list[RequestBatchOutputs]]:
        """Make a utility call; its result, and the steps that were told of before."""
        self._call_id += 1
        self.send(encode_utility(UtilityRequest(0, self._call_id, method, list(args))))
        steps: list[RequestBatchOutputs] = []
        while not isinstance(message := await self.receive(), UtilityCallOutput):
            if isinstance(message, RequestBatchOutputs):
                steps.append(message)
        assert message.output.failure_message is None, message.output
        return message.output.result, steps


async def record(source: EngineSource, scenario: Scenario) -> Json:
    """Record an engine that was started for this scenario."""
    async with source.connect() as channels:
        wire = Wire(channels)
        ready = attrs.asdict(channels.ready_responses[0])
        phases = [{**phase, "steps": await _record(wire, phase)} for phase in scenario.phases]
    return {
        "name": scenario.name,
        "engine_args": scenario.engine_args,
        "ready": {name: ready[name] for name in _READY},
        "phases": phases,
    }


async def _record(wire: Wire, phase: Json) -> list[Json]:
    with trio.fail_after(4 * PATIENCE):
        await wire.call("pause_scheduler", "keep", False)
        if phase["before"] is not None:
            await wire.call(*phase["before"])
        for request in phase["requests"]:
            wire.send(encode_add(_request(request)))
        _, steps = await wire.call("resume_scheduler")
        unfinished = {request["id"] for request in phase["requests"]} - _finished(steps)
        while unfinished:
            message = await wire.receive()
            if isinstance(message, RequestBatchOutputs):
                steps.append(message)
                unfinished -= _finished([message])
        # One more step follows the last output. Between two calls an engine makes one.
        for _ in range(2):
            steps += (await wire.call("is_scheduler_paused"))[1]
    return [_step(outputs) for outputs in steps]


def _request(request: Json) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request["id"],
        prompt_token_ids=request["prompt"],
        sampling_params=SamplingParams(max_tokens=request["max_tokens"], temperature=0.0),
        arrival_time=ARRIVAL + request["arrival"],
        priority=request["priority"],
        cache_salt=request.get("cache_salt"),
    )


def _finished(steps: Iterable[RequestBatchOutputs]) -> set[str]:
    rows = [output for step in steps for output in step.outputs]
    return {output.request_id for output in rows if output.finish_reason is not None}


def _step(outputs: RequestBatchOutputs) -> Json:
    """A message in the form of a recording."""
    step: Json = {"rows": [_row(output) for output in outputs.outputs]} if outputs.outputs else {}
    assert outputs.scheduler_stats is not None
    stats = attrs.asdict(outputs.scheduler_stats)
    step["stats"] = {name: stats[name] for name in _STATS}
    # Within 1e-9, as a number of this many digits.
    step["stats"]["kv_cache_usage"] = round(stats["kv_cache_usage"], 9)
    if stats["iteration_details"] is not None:
        step["stats"]["iteration_details"] = stats["iteration_details"]
        del step["stats"]["iteration_details"]["elapsed_ms"]
    return step


def _row(output: EngineCoreOutput) -> Json:
    row: Json = {"id": output.request_id, "tokens": len(output.new_token_ids)}
    if output.finish_reason is not None:
        row["finish"] = str(output.finish_reason)
    if output.events is not None:
        row["events"] = [event.type.name.lower() for event in output.events]
    if output.prefill_stats is not None:
        row["prefill"] = attrs.asdict(output.prefill_stats)
    return row


# Engines ------------------------------------------------------------------------------------------


def record_real(peers: Peers, scenario: Scenario) -> Json:
    """Start a real engine and record it."""
    port = free_port()
    arguments = [*scenario.engine_args, "--enable-logging-iteration-details"]
    with headless_engine(peers, port, *arguments):
        return trio.run(record, owner(port), scenario)


def record_mock(recording: Json, scenario: Scenario) -> Json:
    """Record an engine of ours with the settings of a recorded one."""
    return trio.run(_record_mock, mock_config(recording), scenario)


async def _record_mock(config: MockEngineConfig, scenario: Scenario) -> Json:
    meeting = InMemory()
    async with running(partial(serve_in_memory, config, meeting, 0, lockstep=Lockstep())):
        return await record(meeting, scenario)


def mock_config(recording: Json) -> MockEngineConfig:
    """The options of the engine that was recorded."""
    options, _ = _OPTIONS.parse_known_args(recording["engine_args"])
    return MockEngineConfig(
        **recording["ready"],
        enable_logging_iteration_details=True,
        enable_chunked_prefill=options.enable_chunked_prefill,
        enable_prefix_caching=options.enable_prefix_caching,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        scheduling_policy=options.scheduling_policy,
        prefix_caching_hash_algo=options.prefix_caching_hash_algo,
    )


def main() -> int:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", choices=VERSIONS, default=REFERENCE_VERSION)
    arguments = parser.parse_args()
    peers = find_peers(arguments.vllm)
    if peers is None:
        raise PeersUnavailable("the peers are not there; run.py --peers builds them")
    recording = record_real(peers, Scenario(arguments.seed))
    arguments.output.write_bytes(gzip.compress(json.dumps(recording).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
