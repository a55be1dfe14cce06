"""Load a client and mock engines for some minutes, with faults: ``nox -s soak -- MINUTES``.

The client is opened again and again, for some seconds each, at one address. Two mock engines in
processes of their own serve it: engine 0 all the time, engine 1 is killed, or ended in order, and
started again. Requests come in a closed and in an open loop; some are left, cancelled or aborted. A
third mock engine serves frontends in processes of their own, which are killed.

At the end each request has had just its tokens, engine 0 has taken just the requests that it was sent,
no engine has a request left, and neither memory nor descriptors of any process have grown.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from arguments import output_file
from harness import free_port
from processes import Process, running
from soak.loads import Load, MiscountError, read_for_ever
from soak.samples import Sampler, Series
from soak.victim import STREAMS
from trio_vllm import HandshakeOwner, open_llm

SESSION = 10.0
"""Seconds for which a client is open."""
WORKERS = 16
RATE = 20.0
"""Requests a second of the open loop."""
LEFT_AT_THE_END = 10
"""Streams that are there when the client is closed."""
STEP_INTERVAL = "0.002"
VICTIM_SECONDS = 6.0
"""For which a frontend lives that will be killed."""


@attrs.define
class World:
    """The processes, and what is counted."""

    port: int = attrs.field(factory=free_port)
    victim_port: int = attrs.field(factory=free_port)
    load: Load = attrs.field(factory=lambda: Load(random.Random(1)))
    processes: dict[str, Process] = attrs.field(factory=dict)
    sessions: int = 0
    engine_restarts: int = 0
    killed_frontends: int = 0
    lost_requests: int = 0
    """Those of frontends that were killed; their engine aborts them."""

    def pids(self) -> dict[str, int]:
        """The processes that are there now, and ours."""
        running_now = {name: p.pid for name, p in self.processes.items() if p.exit_code() is None}
        return {"client": os.getpid(), **running_now}

    @contextmanager
    def engine(self, name: str, port: int, index: int) -> Iterator[Process]:
        """Run a mock engine."""
        command = [
            *(sys.executable, "-m", "trio_vllm", "mock-engine"),
            *("--handshake-address", f"tcp://127.0.0.1:{port}"),
            *("--engine-start-index", str(index), "--step-interval", STEP_INTERVAL),
        ]
        with running(name, command) as process:
            self.processes[name] = process
            yield process


async def main(arguments: argparse.Namespace) -> int:
    """Run sessions until the time is over; 1 if something is wrong."""
    world = World()
    sampler = Sampler(world.pids)
    end = time.monotonic() + arguments.minutes * 60
    with (
        world.engine("engine 0", world.port, 0) as engine,
        world.engine("engine of killed frontends", world.victim_port, 0) as victim_engine,
        ExitStack() as second,
    ):
        second.enter_context(world.engine("engine 1", world.port, 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampler.run)
            nursery.start_soon(kill_frontends, world)
            while time.monotonic() < end:
                await run_session(world, second)
            nursery.cancel_scope.cancel()
        summaries = {p.name: await end_and_read(p) for p in (engine, victim_engine)}
    faults = [*miscounts(world, summaries)]
    faults += [fault for series in sampler.series.values() for fault in series.faults()]
    report(world, summaries, sampler, faults, arguments)
    return bool(faults)


async def run_session(world: World, second: ExitStack) -> None:
    """Open the client, load it, and lose engine 1 in two of three sessions."""
    load, number = world.load, world.sessions
    world.sessions += 1
    load.is_ending = False
    address = f"tcp://127.0.0.1:{world.port}"
    mode = HandshakeOwner(handshake_address=address, engine_count=2, ready_timeout=60)
    async with open_llm(mode) as llm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.closed_loop, llm, WORKERS)
            nursery.start_soon(load.open_loop, llm, RATE)
            nursery.start_soon(load.call_utilities, llm, 0.5)
            await trio.sleep(SESSION / 2)
            if number % 3:
                how = signal.SIGKILL if number % 3 == 1 else signal.SIGTERM
                await trio.to_thread.run_sync(restart_engine, world, second, how)
            await trio.sleep(SESSION / 2)
            load.is_ending = True
        check_empty(llm.client.statistics().requests_in_flight)
        async with trio.open_nursery() as nursery:
            begun = [trio.Event() for _ in range(LEFT_AT_THE_END)]
            for event in begun:
                nursery.start_soon(read_for_ever, llm, 0, event)
            for event in begun:
                await event.wait()
            load.counts.left[0] += LEFT_AT_THE_END
            nursery.cancel_scope.cancel()


def check_empty(in_flight: object) -> None:
    """Nothing is left once all callers have gone."""
    if isinstance(in_flight, dict) and any(in_flight.values()):
        raise MiscountError(f"requests are left: {in_flight}")


def restart_engine(world: World, second: ExitStack, how: signal.Signals) -> None:
    """End engine 1 and start another one."""
    process = world.processes["engine 1"]
    process.send_signal(how)
    process.wait_for_exit(20)
    second.close()
    second.enter_context(world.engine("engine 1", world.port, 1))
    world.engine_restarts += 1


async def kill_frontends(world: World) -> None:
    """Task: start frontends, and kill them while they have requests."""
    command = [sys.executable, "-m", "soak.victim", str(world.victim_port)]
    while True:
        with running("frontend to be killed", command) as process:
            begun = partial(process.wait_for_line, "all streams have begun", 60)
            with trio.CancelScope(shield=True):  # all or none
                await trio.to_thread.run_sync(begun)
                world.lost_requests += STREAMS
            await trio.sleep(VICTIM_SECONDS)
            process.send_signal(signal.SIGKILL)
            world.killed_frontends += 1


async def end_and_read(process: Process) -> dict[str, int]:
    """End an engine in order, and read the counts that it gives."""
    process.send_signal(signal.SIGTERM)
    code = await trio.to_thread.run_sync(process.wait_for_exit, 30)
    if code:
        raise MiscountError(f"{process.name} ended with {code}")
    line = process.wait_for_line("summary: ", 5)
    return {name: int(figure) for name, figure in re.findall(r"(\w+)=(\d+)", line)}


def miscounts(world: World, summaries: dict[str, dict[str, int]]) -> Iterator[str]:
    """What of the counts of callers and engines does not fit."""
    counts = world.load.counts
    first = summaries["engine 0"]
    if first["requests"] != counts.sent_to(0):
        yield f"engine 0 took {first['requests']} requests, {counts.sent_to(0)} were sent"
    if not counts.finished[0] <= first["finished"]:
        yield f"engine 0 finished {first['finished']}, {counts.finished[0]} were received"
    if first["tokens"] < counts.tokens[0]:
        yield f"engine 0 made {first['tokens']} tokens, {counts.tokens[0]} were received"
    if counts.failed.keys() - {1}:
        yield f"requests failed with engines that nobody ended: {counts.failed}"
    taken = summaries["engine of killed frontends"]["requests"]
    if taken != world.lost_requests:
        yield f"of killed frontends {world.lost_requests} requests were begun, {taken} were taken"
    for name, summary in summaries.items():
        if summary["requests"] != summary["finished"] + summary["aborted"]:
            yield f"{name} has requests left: {summary}"
        if summary["errors"]:
            yield f"{name} refused something: {summary}"
    if not (counts.finished[1] and counts.failed[1] and counts.calls and world.killed_frontends):
        yield "too little happened to say anything"


def report(
    world: World,
    summaries: dict[str, dict[str, int]],
    sampler: Sampler,
    faults: list[str],
    arguments: argparse.Namespace,
) -> None:
    """Print what happened; write it, and draw it, on wish."""
    counts = world.load.counts
    figures = {
        "minutes": arguments.minutes,
        "sessions": world.sessions,
        "engine_restarts": world.engine_restarts,
        "killed_frontends": world.killed_frontends,
        "lost_with_their_frontend": world.lost_requests,
        "finished": counts.finished.total(),
        "tokens": counts.tokens.total(),
        "left": counts.left.total(),
        "failed_with_their_engine": counts.failed.total(),
        "refused": counts.refused,
        "utility_calls": counts.calls,
        "engines": summaries,
        "growth": [growth(series) for series in sampler.series.values()],
        "faults": faults,
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(arguments.plot, list(sampler.series.values()))


def growth(series: Series) -> dict[str, object]:
    """The figures of one process."""
    memory, descriptors = series.growth(series.resident), series.growth(series.descriptors)
    return {
        "process": series.name,
        "seconds": round(series.times[-1] - series.times[0], 1),
        "resident_mib": round(series.resident[-1] / 2**20, 1),
        "resident_growth_mib": None if memory is None else round(memory / 2**20, 2),
        "descriptors": series.descriptors[-1],
        "descriptor_growth": None if descriptors is None else round(descriptors, 2),
    }


def plot(path: Path, every: list[Series]) -> None:
    """Draw memory and descriptors over time; needs matplotlib."""
    canvas = importlib.import_module("matplotlib.figure").Figure((10, 7), layout="constrained")
    memory, descriptors = canvas.subplots(2, 1, sharex=True)
    colours: dict[str, str] = {}
    for series in every:
        colour = colours.get(series.name)
        label = series.name if colour is None else None
        (line,) = memory.plot(
            series.times, [n / 2**20 for n in series.resident], color=colour, label=label
        )
        colours[series.name] = line.get_color()
        descriptors.plot(series.times, series.descriptors, color=line.get_color())
    memory.set_ylabel("resident MiB")
    descriptors.set_ylabel("descriptors")
    descriptors.set_xlabel("seconds")
    memory.legend()
    canvas.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="nox -s soak --", description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=3.0)
    parser.add_argument("--json", type=output_file, help="write the figures here")
    parser.add_argument("--plot", type=output_file, help="draw memory and descriptors here (PNG)")
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(trio.run(main, parse_arguments()))
