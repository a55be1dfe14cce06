"""Real engines whose request is left, and which are killed or frozen.

One of two engines is at a long request when that is left: its statistics must tell of it no more, so
it has got the abort. The other one is killed, and the one serves on; then that is frozen, which only
heartbeats can tell.
"""

import os
import signal
from pathlib import Path

import trio

from peers import free_port, headless_engine
from processes import Process
from trio_vllm import (
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    HandshakeOwner,
    SamplingParams,
    open_client,
)
from trio_vllm.protocol import SchedulerStats

LOSS_LIMIT = 2.0
"""Seconds in which the end of a process must be known."""

HEARTBEAT_TIMEOUT = 3.0


async def main() -> None:
    """Leave a request, kill one engine, then freeze the other."""
    port = free_port()
    both = ("--data-parallel-size", "2", "--data-parallel-size-local", "2")
    with headless_engine(port, *both, "--max-model-len", "30000") as launcher:
        mode = HandshakeOwner(
            handshake_address=f"tcp://127.0.0.1:{port}",
            engine_count=2,
            ready_timeout=240,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        async with open_client(mode) as client:
            await trio.sleep(2 * HEARTBEAT_TIMEOUT)  # silence is no loss
            assert client.is_healthy, client.dead_engines

            await leave_in_mid_request(client)

            # It would end the other engine after the one.
            os.kill(launcher.pid, signal.SIGSTOP)
            seconds = await lose(client, 1, launcher, signal.SIGKILL)
            print(f"killed engine 1: its request failed after {seconds:.3f} s")
            assert seconds < LOSS_LIMIT
            assert list(client.dead_engines) == [1], client.dead_engines

            async with client.call(request("on", 5)) as outputs:
                assert outputs.engine_index == 0
                async for _ in outputs:
                    pass

            seconds = await lose(client, 0, launcher, signal.SIGSTOP)
            print(f"froze engine 0: its request failed after {seconds:.3f} s")
            assert seconds < HEARTBEAT_TIMEOUT + LOSS_LIMIT
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
            with trio.fail_after(60):
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


async def leave_in_mid_request(client: EngineCoreClient) -> None:
    """Leave a request that would take half a minute: its engine runs the next one alone."""
    async with client.call(request("long", 29_000, 0)) as outputs:
        await anext(outputs)
        both = await count_running(client, "beside")
    alone = await count_running(client, "after")
    print(f"engine 0 ran {both} requests, and {alone} after one was left")
    assert (both, alone) == (2, 1)


async def count_running(client: EngineCoreClient, request_id: str) -> int:
    """How many requests engine 0 has at most while it completes a short one."""
    counts = [0]

    def note(engine_index: int, stats: SchedulerStats) -> None:
        if engine_index == 0:
            counts.append(stats.num_running_reqs)

    client.on_scheduler_stats(note)
    with trio.fail_after(60):
        async with client.call(request(request_id, 20, 0)) as outputs:
            async for _ in outputs:
                pass
    return max(counts)


if __name__ == "__main__":
    trio.run(main)
