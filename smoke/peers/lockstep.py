"""Two real engines in lockstep, led by our coordinator: waves begin at either, pause and end.

The model's config claims experts, which is enough for vLLM to run its engines like those of a
mixture-of-experts model. Once the engines come from one command, and once from two, which need
our word where to meet.
"""

import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import trio

from harness import (
    LOSS_LIMIT,
    free_port,
    generate,
    headless_engine,
    make_lockstep_model,
    ok,
    owner,
)
from processes import Process
from provision import Peers
from trio_vllm import EngineDeadError, HandshakeOwner, PauseMode, open_llm

COMMANDS = [("--data-parallel-size-local", "1", "--data-parallel-start-rank", r) for r in "01"]
"""Options of two commands with an engine each."""


def main(peers: Peers) -> None:
    """Run both."""
    common = {"engine_count": 2, "coordinator": True}
    meeting = {
        "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_master_port": free_port(),
        "_data_parallel_master_port_list": [free_port() for _ in range(5)],
        "data_parallel_size": 2,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_lockstep_model(peers, Path(folder))
        with ExitStack() as stack:
            port = free_port()
            (launcher,) = start(stack, peers, model, port, [("--data-parallel-size-local", "2")])
            trio.run(check_waves, owner(port, **common), launcher)
        with ExitStack() as stack:
            port = free_port()
            start(stack, peers, model, port, COMMANDS)
            trio.run(check_meeting, owner(port, **common, parallel_config=meeting))


def start(
    stack: ExitStack, peers: Peers, model: Path, port: int, commands: Sequence[tuple[str, ...]]
) -> list[Process]:
    """Run two engines by so many commands."""
    size = ("--data-parallel-size", "2")
    return [
        stack.enter_context(headless_engine(peers, port, *size, *options, model=model))
        for options in commands
    ]


async def check_waves(mode: HandshakeOwner, launcher: Process) -> None:
    """Begin waves at either engine, with work for one and for both, and pause in between."""
    async with open_llm(mode) as llm:
        client = llm.client
        assert client.engine_info.data_parallel_size == 2
        for number, rank in enumerate([0, 1, 1, 0, 1]):
            await generate(llm, 20, rank=rank)
            if number % 2:
                await trio.sleep(1)  # in which the wave ends
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(generate, llm, 20)
        for pause_mode in PauseMode:
            await client.pause_generation(pause_mode)
            assert await client.is_scheduler_paused()
            await client.resume_scheduler()
            await generate(llm, 20, rank=1)
        await client.sleep(1)
        assert await client.wake_up()
        await generate(llm, 20, rank=0)
        ok("waves")

        begin = trio.current_time()
        launcher.send_signal(signal.SIGKILL)
        failure = await client.wait_failed()
        assert isinstance(failure, EngineDeadError), failure
        seconds = trio.current_time() - begin
        assert seconds < LOSS_LIMIT, seconds
        ok("from the engines' death to the client's", seconds)


async def check_meeting(mode: HandshakeOwner) -> None:
    """They have met if they begin a wave together."""
    async with open_llm(mode) as llm:
        for rank in (1, 0):
            await generate(llm, 20, rank=rank)
        ok("engines of two commands")
