"""Real engines that are killed or frozen, and a client that leaves in mid-request.

Two engines: one is killed, and the other one serves on; that one is frozen, which only heartbeats
can tell. Another engine is busy with a long request when its client leaves: it must be idle then,
so it has got the abort.
"""

import os
import signal
import time
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

LOSS_LIMIT = 2.0
"""Seconds in which the end of a process must be known."""

HEARTBEAT_TIMEOUT = 3.0


async def main() -> None:
    """Run both checks."""
    await lose_two_engines()
    await leave_in_mid_request()


async def lose_two_engines() -> None:
    """Kill one, then freeze the other."""
    port = free_port()
    both = ("--data-parallel-size", "2", "--data-parallel-size-local", "2")
    with headless_engine(port, *both) as launcher:
        mode = HandshakeOwner(
            handshake_address=f"tcp://127.0.0.1:{port}",
            engine_count=2,
            ready_timeout=240,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        async with open_client(mode) as client:
            await trio.sleep(2 * HEARTBEAT_TIMEOUT)  # silence is no loss
            assert client.is_healthy, client.dead_engines

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
    """What a process calls itself."""
    return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")


async def leave_in_mid_request() -> None:
    """Start a request that takes half a minute, leave at once, and see the engine rest."""
    port = free_port()
    with headless_engine(port, "--max-model-len", "30000") as launcher:
        mode = HandshakeOwner(handshake_address=f"tcp://127.0.0.1:{port}", ready_timeout=240)
        async with open_client(mode) as client, client.call(request("long", 29_000)) as outputs:
            await anext(outputs)
            busy = await share_of_processor(launcher)
        idle = await share_of_processor(launcher)
        print(f"the engine used {busy:.2f} processors, and {idle:.2f} when the client had left")
        assert idle < busy / 2, "it works on"  # its worker looks for more work for a while


async def share_of_processor(launcher: Process) -> float:
    """How much of one processor the engine and its workers use, over two seconds."""
    used, begin = seconds_used(launcher), time.monotonic()
    await trio.sleep(2)
    return (seconds_used(launcher) - used) / (time.monotonic() - begin)


def seconds_used(launcher: Process) -> float:
    """Processor time of all processes of a session."""
    ticks = 0
    for pid in launcher.members():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    trio.run(main)
