"""Drive a mock engine by hand: messages as a frontend makes them, answers as it would read them."""

from __future__ import annotations

from typing import Any

import attrs
import ormsgpack

from trio_vllm.mock import COORDINATOR, MockEngine, MockEngineConfig
from trio_vllm.protocol import (
    DpControlOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    FinishReason,
    Frames,
    RequestBatchOutputs,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_outputs,
    encode_abort,
    encode_utility,
)

FIELDS = [attribute.name for attribute in attrs.fields(EngineCoreRequest)]
OMITTED = object()
"""In the place of ``max_tokens``: the key is absent."""


def raw_request(request_id: object, max_tokens: object = 4, **fields: Any) -> list[Any]:
    """An ADD's payload before packing, of any values; ``params`` adds sampling parameters."""
    params = fields.pop("params", {})
    if max_tokens is not OMITTED:
        params = {"max_tokens": max_tokens, **params}
    values = {
        "request_id": request_id,
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": params,
        "arrival_time": 1.5,
        "client_index": 0,
        "current_wave": 0,
        "priority": 0,
        "resumable": False,
        "abort_immediately": False,
        **fields,
    }
    return [values.get(name) for name in FIELDS]


def pack_add(raw: object, *aux: bytes) -> list[bytes]:
    """An ADD message."""
    return [b"\x00", ormsgpack.packb(raw, option=ormsgpack.OPT_NON_STR_KEYS), *aux]


@attrs.define
class Driver:
    """An engine, its clock, and all that it has sent."""

    engine: MockEngine
    is_fast: bool = True
    """Whether requests may take the fast path."""
    now: float = 100.0
    sent: list[tuple[int, EngineCoreOutputs]] = attrs.field(factory=list)
    call_id: int = 0

    def keep(self, messages: list[tuple[int, Any]]) -> None:
        """Decode and keep what the engine sends."""
        for client_index, frames in messages:
            outputs = decode_outputs([bytes(frame) for frame in frames])
            assert not isinstance(outputs, EngineDead)
            assert self.engine.engine_index == outputs.engine_index
            self.sent.append((client_index, outputs))

    def handle(self, frames: Frames) -> None:
        """Give it a message."""
        self.now += 0.25
        self.keep(self.engine.handle(frames, self.now))

    def add(self, request_id: object, max_tokens: object = 4, **fields: Any) -> None:
        """Add a request; `raw_request` says what can be given."""
        self.handle(pack_add(raw_request(request_id, max_tokens, **fields)))

    def abort(self, *request_ids: str) -> None:
        """Abort requests."""
        self.handle(encode_abort(request_ids))

    def post(self, method: str, *args: Any, client_index: int = 0) -> int:
        """Make a utility call; its id."""
        self.call_id += 1
        call = UtilityRequest(client_index, self.call_id, method, list(args))
        self.handle(encode_utility(call))
        return self.call_id

    def answer(self, call_id: int) -> UtilityOutput | None:
        """The answer to a call, if there is one."""
        for _, outputs in self.sent:
            if isinstance(outputs, UtilityCallOutput) and outputs.output.call_id == call_id:
                return outputs.output
        return None

    def call(self, method: str, *args: Any) -> Any:
        """Make a utility call that is answered at once with a result."""
        output = self.answer(self.post(method, *args))
        assert output is not None
        assert output.failure_message is None
        return output.result

    def fail(self, method: str, *args: Any) -> str:
        """Make a utility call that fails at once."""
        output = self.answer(self.post(method, *args))
        assert output is not None
        assert output.failure_message is not None
        return output.failure_message

    def step(self, count: int = 1) -> None:
        """Let it make steps."""
        for _ in range(count):
            self.now += 1.0
            self.keep(self.engine.step(self.now))

    def step_at_once(self, count: int) -> None:
        """Let it make steps, as many at a time as it likes; these have one time."""
        last = self.engine.step_count + count
        while self.engine.step_count < last:
            self.now += 1.0
            before = self.engine.step_count
            self.keep(self.engine.steps(self.now, last - before))
            self.now += self.engine.step_count - before - 1.0

    @property
    def has_work(self) -> bool:
        """Whether the engine will make a step without a message."""
        return self.engine.next_step_time(self.now) is not None

    def run(self, limit: int = 100_000) -> None:
        """Let it make steps until it has no work."""
        for _ in range(limit):
            if not self.has_work:
                return
            self.step()
        raise AssertionError("the engine never gets done")

    def batches(self, client_index: int | None = None) -> list[RequestBatchOutputs]:
        """The outputs sent to one client, or to all."""
        return [
            outputs
            for to, outputs in self.sent
            if isinstance(outputs, RequestBatchOutputs)
            and (to != COORDINATOR if client_index is None else to == client_index)
        ]

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        """What a request has got."""
        return [
            output
            for batch in self.batches()
            for output in batch.outputs
            if output.request_id == request_id
        ]

    def tokens(self, request_id: str) -> list[int]:
        """The tokens that a request has got."""
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        """Why a request has finished, if it has; nothing may come after that."""
        reasons = [output.finish_reason for output in self.outputs(request_id)]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1] if reasons else None

    def told_coordinator(self) -> list[EngineCoreOutputs]:
        """What was sent to the coordinator."""
        return [outputs for to, outputs in self.sent if to == COORDINATOR]

    def waves(self) -> list[DpControlOutput]:
        """The wave notices among these."""
        return [o for o in self.told_coordinator() if isinstance(o, DpControlOutput)]


def drive(engine_index: int = 0, *, client_count: int = 1, **config: Any) -> Driver:
    """A driver of a new engine."""
    fields = {name: config.pop(name) for name in ("has_coordinator", "fast_path") if name in config}
    engine = MockEngine(
        MockEngineConfig(**config), engine_index, client_count=client_count, **fields
    )
    return Driver(engine, is_fast=fields.get("fast_path", True))


def drive_many(count: int, **config: Any) -> Driver:
    """An engine at work on so many requests, and what it sends from now on."""
    driver = drive(**config)
    for number in range(count):
        driver.add(f"r{number}", 1000)
    # Not before each has a row: until then the step may be under way.
    while sum(len(batch.outputs) for batch in driver.batches()) < count:
        driver.step()
    driver.sent.clear()
    return driver
