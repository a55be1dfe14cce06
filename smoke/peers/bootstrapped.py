"""A client of real engines in lockstep that a supervisor has started, with vLLM's own coordinator.

The supervisor listens for requests and outputs before anybody else, does the handshake, and hands
its listening sockets to the client, as `vllm serve` does with its API servers. The client follows
the coordinator: it takes the wave from it, and tells it of requests to idle engines.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import ormsgpack
import trio
import zmq

from harness import free_port, generate, headless_engine, make_lockstep_model, ok
from processes import Process, running
from provision import Peers
from trio_vllm import Bootstrapped, open_llm

COORDINATOR = """
import sys
from vllm.v1.engine.coordinator import DPCoordinatorProc
DPCoordinatorProc.run_coordinator(2, *sys.argv[1:4])
"""

TWO = ("--data-parallel-size", "2", "--data-parallel-size-local", "2")

HANDSHAKE_LIMIT = 240_000
"""Milliseconds for each message of the engines; they load a model meanwhile."""


def main(peers: Peers) -> None:
    """Run everything."""
    with tempfile.TemporaryDirectory() as name, listener() as inputs, listener() as outputs:
        folder, port = Path(name), free_port()
        model = make_lockstep_model(peers, folder)
        addresses: dict[str, object] = {
            "inputs": [tcp_address(inputs)],
            "outputs": [tcp_address(outputs)],
            "coordinator_input": f"ipc://{folder}/broadcasts",
            "coordinator_output": f"ipc://{folder}/notices",
            "frontend_stats_publish_address": f"ipc://{folder}/stats",
        }
        mode = Bootstrapped(
            input_address=tcp_address(inputs),
            output_address=tcp_address(outputs),
            input_listener=os.dup(inputs.fileno()),
            output_listener=os.dup(outputs.fileno()),
            engine_count=2,
            data_parallel_size=2,
            ready_timeout=300,
        )
        with (
            coordinator(peers, folder),
            headless_engine(peers, port, *TWO, model=model),
        ):
            trio.run(check, mode, port, addresses)


@contextmanager
def listener() -> Iterator[socket.socket]:
    """A socket of the supervisor that listens already."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def tcp_address(server: socket.socket) -> str:
    """Where it listens."""
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def coordinator(peers: Peers, folder: Path) -> AbstractContextManager[Process]:
    """Run vLLM's coordinator."""
    names = ("stats", "notices", "broadcasts")
    places = [f"ipc://{folder}/{name}" for name in names]
    command = [str(peers.python), "-c", COORDINATOR, *places]
    return running("vLLM's coordinator", command, environment=peers.environment)


def supervise(port: int, addresses: dict[str, object]) -> None:
    """Do the handshake with two engines; blocks."""
    init = ormsgpack.packb({"addresses": addresses, "parallel_config": {}})
    context = zmq.Context()
    try:
        handshake = context.socket(zmq.ROUTER)
        handshake.bind(f"tcp://127.0.0.1:{port}")
        ready = 0
        while ready < 2:
            if not handshake.poll(HANDSHAKE_LIMIT):
                raise TimeoutError("the engines do not start")
            identity, payload = handshake.recv_multipart()
            if ormsgpack.unpackb(payload)["status"] == "READY":
                ready += 1
            else:
                handshake.send_multipart([identity, init])
    finally:
        context.destroy(linger=0)


async def check(mode: Bootstrapped, port: int, addresses: dict[str, object]) -> None:
    """Begin waves at either engine."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, supervise, port, addresses)
        async with open_llm(mode) as llm:
            client = llm.client
            assert client.input_address == mode.input_address
            told = {r.dp_stats_address for r in client.engine_info.ready_responses.values()}
            assert told == {addresses["frontend_stats_publish_address"]}, told
            for number, rank in enumerate([0, 1, 1, 0, 1]):
                await generate(llm, 20, rank=rank)
                if number % 2:
                    await trio.sleep(1)  # in which the wave ends
            async with trio.open_nursery() as requests:
                for _ in range(16):
                    requests.start_soon(generate, llm, 20)
            assert client.is_healthy
    ok("followed vLLM's coordinator")
