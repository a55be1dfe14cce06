"""An engine core that does as it is told, over ØMQ: for the commands' tests.

As a program, it serves one frontend: ``fake_engine.py ADDRESS [BEHAVIOUR]``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import trio

from trio_vllm import StartupError
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    Logprobs,
    RequestBatchOutputs,
    UtilityCallOutput,
    UtilityOutput,
    UtilityRequest,
    decode_engine_message,
    encode_outputs,
)
from trio_vllm.transport import FrontendChannels, join_frontend

MAX_MODEL_LEN = 512

TASKS_METHOD = "get_supported_tasks"
"""What every client asks for as it starts; even the mute answer that."""


def ready_response(engine_index: int) -> EngineCoreReadyResponse:
    """What a small engine says of itself."""
    return EngineCoreReadyResponse(
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks=32,
        block_size=16,
        dtype="float32",
        vllm_version="0.33.0",
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=engine_index,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        instance_id="fake",
        supports_lora=False,
        max_loras=0,
    )


def logprobs(rows: int, columns: int) -> Logprobs:
    """Log probabilities of that shape; -1 columns stand for a vocabulary of 7."""
    shape = (rows, 7 if columns == -1 else columns + 1)
    return Logprobs(
        np.full(shape, 3, np.int64), np.full(shape, -1.5, np.float32), np.ones(rows, np.int64)
    )


def token_by_token(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
    """The tokens 1, 2, … one at a time, with the log probabilities that were asked for."""
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    prompt_len = len(request.prompt_token_ids or ())
    for index in range(params.max_tokens):
        output = EngineCoreOutput(request.request_id, [index + 1])
        if params.logprobs is not None:
            output.new_logprobs = logprobs(1, params.logprobs)
        if params.prompt_logprobs is not None and index == 0:
            output.new_prompt_logprobs_tensors = logprobs(prompt_len - 1, params.prompt_logprobs)
        if index + 1 == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        yield output


@attrs.define
class FakeEngine:
    """Completes prompts and answers the utility calls of a smoke."""

    index: int = 0
    data_parallel_size: int = attrs.field(default=1, kw_only=True)
    complete: Callable[[EngineCoreRequest], Iterator[EngineCoreOutput]] = token_by_token
    """The outputs of a request, one message each."""
    results: dict[str, Any] = attrs.field(factory=dict)
    """What utility methods give; an exception is a failure, others give nothing."""
    is_sleeping: bool = False
    wakes_up: bool = True
    is_mute: bool = False
    """Whether it answers nothing at all."""
    received: list[EngineMessage] = attrs.field(factory=list, init=False)
    asked: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set when a mute engine has got a message."""

    @property
    def requests(self) -> list[EngineCoreRequest]:
        """The requests that came."""
        return [message for message in self.received if isinstance(message, EngineCoreRequest)]

    @property
    def calls(self) -> dict[str, list[Any]]:
        """The arguments of the last call of each utility method."""
        calls = [message for message in self.received if isinstance(message, UtilityRequest)]
        return {call.method: call.args for call in calls}

    async def serve(self, address: str) -> None:
        """Join the frontend at ``address``, and answer until cancelled."""
        size = self.data_parallel_size
        response = attrs.evolve(ready_response(self.index), data_parallel_size=size)
        with suppress(StartupError):  # the frontend may have enough before we are ready
            async with join_frontend(
                address, engine_index=self.index, ready_response=lambda _: response
            ) as links:
                await self._serve(links)

    async def _serve(self, links: FrontendChannels) -> None:
        while True:
            for frames, _ in await links.inputs[0].receive_batch(16):
                message = decode_engine_message(frames)
                if isinstance(message, UtilityRequest) and message.method == TASKS_METHOD:
                    tasks = UtilityOutput(message.call_id, result=["generate"])
                    told = UtilityCallOutput(engine_index=self.index, output=tasks)
                    links.outputs[0].send_nowait(encode_outputs(told))
                    continue
                self.received.append(message)
                for answer in self._answers(message):
                    links.outputs[0].send_nowait(encode_outputs(answer))

    def _answers(self, message: EngineMessage) -> Iterator[EngineCoreOutputs]:
        match message:
            case _ if self.is_mute:
                self.asked.set()
            case EngineCoreRequest():
                for output in self.complete(message):
                    yield RequestBatchOutputs(engine_index=self.index, outputs=[output])
            case UtilityRequest():
                answer = self._call(message)
                yield UtilityCallOutput(engine_index=self.index, output=answer)
            case _:
                assert isinstance(message, AbortRequests)

    def _call(self, request: UtilityRequest) -> UtilityOutput:
        if request.method == "sleep":
            self.is_sleeping = True
        elif request.method == "wake_up" and self.wakes_up:
            self.is_sleeping = False
        results = {"is_sleeping": self.is_sleeping, "reset_prefix_cache": True, "wake_up": True}
        result = (results | self.results).get(request.method)
        if isinstance(result, Exception):
            return UtilityOutput(request.call_id, failure_message=str(result))
        return UtilityOutput(request.call_id, result=result)


def die(_request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
    """Vanish in mid-request."""
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def main() -> None:
    """Serve one frontend, misbehaving as the command line says."""
    address, *behaviours = sys.argv[1:]
    sys.stdout.write(f"fake engine with pid {os.getpid()}\n")
    if "fail" in behaviours:
        sys.exit("no memory")
    if "stubborn" in behaviours:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in behaviours:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.stdout.write(f"child with pid {child.pid}\n")
    complete = die if "die" in behaviours else token_by_token
    engine = FakeEngine(complete=complete, is_mute="mute" in behaviours)
    trio.run(engine.serve, address)


if __name__ == "__main__":
    main()
