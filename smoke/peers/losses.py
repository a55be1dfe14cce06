"""Real engines whose request is left, and which are killed or frozen.

One of two engines is at a long request when that is left: its statistics must tell of it no more, so
it has got the abort. The other one is killed, and the one serves on; then that is frozen, which only
heartbeats can tell.
"""

import os
import signal
from pathlib import Path

import trio

from harness import LOSS_LIMIT, PATIENCE, free_port, generate, headless_engine, ok, owner
from processes import Process
from provision import Peers
from trio_vllm import (
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    Llm,
    SamplingParams,
    open_llm,
)
from trio_vllm.protocol import SchedulerStats

HEARTBEAT_TIMEOUT = 3.0


def main(peers: Peers) -> None:
    """Run two engines."""
    port = free_port()
    both = ("--data-parallel-size", "2", "--data-parallel-size-local", "2")
    with headless_engine(peers, port, *both, "--max-model-len", "30000") as launcher:
        trio.run(check, port, launcher)


async def check(port: int, launcher: Process) -> None:
    """Leave a request, kill one engine, then freeze the other."""
    mode = owner(port, engine_count=2, heartbeat_timeout=HEARTBEAT_TIMEOUT)
    async with open_llm(mode) as llm:
        client = llm.client
        await trio.sleep(2 * HEARTBEAT_TIMEOUT)  # silence is no loss
        assert client.is_healthy, client.dead_engines

        await leave_in_mid_request(llm)

        # It would end the other engine after the one.
        os.kill(launcher.pid, signal.SIGSTOP)
        seconds = await lose(client, 1, launcher, signal.SIGKILL)
        assert seconds < LOSS_LIMIT, seconds
        ok("from killing engine 1 to the failure of its request", seconds)
        assert list(client.dead_engines) == [1], client.dead_engines

        await generate(llm, 5)  # by the other one

        seconds = await lose(client, 0, launcher, signal.SIGSTOP)
        assert seconds < HEARTBEAT_TIMEOUT + LOSS_LIMIT, seconds
        ok("from freezing engine 0 to the failure of its request", seconds)
        assert isinstance(client.failure, EngineDeadError), client.failure


async def lose(
    client: EngineCoreClient, engine_index: int, launcher: Process, signal_number: int
) -> float:
    """Signal an engine in mid-request; give the seconds until its request fails."""
    async with client.call(request(f"doomed {engine_index}", 400, engine_index)) as outputs:
        await anext(outputs)
        pid = engine_pid(launcher, engine_index)
        os.kill(pid, signal_number)
        begin = trio.current_time()
        loss: EngineDeadError | None = None
        try:
            with trio.fail_after(PATIENCE):
                async for _ in outputs:
                    pass
        except EngineDeadError as error:
            loss = error
        assert loss is not None, "the request came to its end"
        assert loss.engine_index == engine_index, loss
        return trio.current_time() - begin


def request(request_id: str, max_tokens: int, rank: int | None = None) -> EngineCoreRequest:
    """A request that stops at nothing but its length."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        data_parallel_rank=rank,
    )


def engine_pid(launcher: Process, engine_index: int) -> int:
    """The process of an engine; it names itself, with its rank if there are several."""
    names = {pid: process_title(pid) for pid in launcher.members()}
    wanted = (f"VLLM::EngineCore_DP{engine_index}", "VLLM::EngineCore")
    for title in wanted:
        for pid, name in names.items():
            if name == title:
                return pid
    raise AssertionError(f"engine {engine_index} is not among {names}")


def process_title(pid: int) -> str:
    """What a process calls itself; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def leave_in_mid_request(llm: Llm) -> None:
    """Leave a request that would take half a minute: its engine runs the next one alone."""
    async with llm.client.call(request("long", 29_000, 0)) as outputs:
        await anext(outputs)
        both = await count_running(llm)
    alone = await count_running(llm)
    assert (both, alone) == (2, 1), (both, alone)
    ok("a request that was left runs no more")


async def count_running(llm: Llm) -> int:
    """How many requests engine 0 has at most while it completes a short one."""
    counts = [0]

    def note(engine_index: int, stats: SchedulerStats) -> None:
        if engine_index == 0:
            counts.append(stats.num_running_reqs)

    llm.client.on_scheduler_stats(note)
    await generate(llm, 20, rank=0)
    return max(counts)
