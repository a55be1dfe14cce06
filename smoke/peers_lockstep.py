"""Two real engines in lockstep, led by our coordinator: waves begin at either, pause and end.

The model's config claims experts, which is enough for vLLM to run its engines like those of a
mixture-of-experts model. Once the engines come from one command, and once from two, which need
our word where to meet.
"""

import json
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio

from peers import VLLM_ENVIRONMENT, VLLM_OPTIONS, free_port, provision
from processes import Process, running
from trio_vllm import (
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    HandshakeOwner,
    PauseMode,
    SamplingParams,
    open_client,
)

LOSS_LIMIT = 2.0
"""Seconds in which the end of a process must be known."""


def main() -> None:
    """Run both."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_lockstep_model(Path(folder))
        port = free_port()
        with engines(model, port, [("--data-parallel-size-local", "2")]) as (launcher,):
            trio.run(check_waves, owner(port), launcher)
        port = free_port()
        commands = [
            ("--data-parallel-size-local", "1", "--data-parallel-start-rank", rank)
            for rank in ("0", "1")
        ]
        meeting = {
            "data_parallel_master_ip": "127.0.0.1",
            "data_parallel_master_port": free_port(),
            "_data_parallel_master_port_list": [free_port() for _ in range(5)],
            "data_parallel_size": 2,
        }
        with engines(model, port, commands):
            trio.run(check_meeting, owner(port, parallel_config=meeting))


def make_lockstep_model(folder: Path) -> Path:
    """The tiny model, with experts that it does not have."""
    model = folder / "tiny-lockstep"
    shutil.copytree(provision().model, model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_experts": 2}))
    return model


@contextmanager
def engines(model: Path, port: int, commands: Sequence[tuple[str, ...]]) -> Iterator[list[Process]]:
    """Run two engines by so many commands."""
    dial = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))
    options = (*VLLM_OPTIONS, "--max-model-len", "512", "--headless", *dial)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running(
                    "vLLM's engines",
                    [
                        provision().vllm,
                        "serve",
                        model,
                        *options,
                        "--data-parallel-size",
                        "2",
                        *more,
                    ],
                    environment=VLLM_ENVIRONMENT,
                )
            )
            for more in commands
        ]


def owner(port: int, **options: Any) -> HandshakeOwner:
    """How we wait for them."""
    address = f"tcp://127.0.0.1:{port}"
    common = {"engine_count": 2, "coordinator": True, "ready_timeout": 240, **options}
    return HandshakeOwner(handshake_address=address, **common)


async def check_waves(mode: HandshakeOwner, launcher: Process) -> None:
    """Begin waves at either engine, with work for one and for both, and pause in between."""
    async with open_client(mode) as client:
        assert client.engine_info.data_parallel_size == 2
        for number, rank in enumerate([0, 1, 1, 0, 1]):
            await generate(client, f"alone {number}", rank)
            if number % 2:
                await trio.sleep(1)  # in which the wave ends
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(generate, client, f"together {number}")
        for pause_mode in PauseMode:
            await client.pause_generation(pause_mode)
            assert await client.is_scheduler_paused()
            await client.resume_scheduler()
            await generate(client, f"after {pause_mode}", 1)
        await client.sleep(1)
        assert await client.wake_up()
        await generate(client, "awake", 0)
        print("waves: ok")

        begin = trio.current_time()
        launcher.send_signal(signal.SIGKILL)
        failure = await client.wait_failed()
        assert isinstance(failure, EngineDeadError), failure
        print(f"killed engines: the client failed after {trio.current_time() - begin:.3f} s")
        assert trio.current_time() - begin < LOSS_LIMIT


async def check_meeting(mode: HandshakeOwner) -> None:
    """They have met if they begin a wave together."""
    async with open_client(mode) as client:
        for rank in (1, 0):
            await generate(client, f"at {rank}", rank)
        print("engines of two commands: ok")


async def generate(client: EngineCoreClient, request_id: str, rank: int | None = None) -> None:
    """Let an engine generate a few tokens."""
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=20),
        data_parallel_rank=rank,
    )
    with trio.fail_after(60):
        async with client.call(request) as outputs:
            tokens = [token async for item in outputs for token in item.output.new_token_ids]
    assert len(tokens) == 20, tokens


if __name__ == "__main__":
    main()
