"""A fleet of mock engines on several hosts, each a network namespace.

Two pods of ``deploy/mock-engines.yaml`` do just what the manifest says: their engines are numbered by the index that
Kubernetes would give them, a frontend on a third host has them all, and the probes answer. Then one host
vanishes, as by a pulled cable, which closes no connection: the frontend notices, and so do the engines
there, which serve the next frontend once the cable is back.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness import CheckSkippedError, expect, ok, our_command, timed
from hosts import Host, HostsUnavailableError, isolated, joined_hosts, require
from processes import Process, running

MANIFEST = Path(__file__).parents[2] / "deploy" / "mock-engines.yaml"

PORT = 29550

HEARTBEAT_TIMEOUT = 3.0

VANISHED_LIMIT = 30.0
"""Seconds in which a vanished host must be noticed."""


def main() -> None:
    """Go through it in a network of our own, where that is permitted."""
    try:
        require()
    except HostsUnavailableError as reason:
        raise CheckSkippedError(f"no network namespaces as hosts: {reason}") from reason
    command = isolated([sys.executable, "-u", "-m", "checks.fleet"])
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with running("the fleet", command, environment=environment) as process:
        expect("the exit code", process.wait_for_exit(240), 0)
        print(process.log(), end="")


def check() -> None:
    """The check itself, in that network."""
    with joined_hosts(["frontend", "pod-0", "pod-1"]) as (frontend, *pods):
        check_manifest(frontend, pods)
        check_vanished_host(frontend, pods)


# As in the manifest -------------------------------------------------------------------------------


def check_manifest(frontend: Host, pods: Sequence[Host]) -> None:
    """Each pod has its own engines, and says when they have a frontend."""
    container = read_container()
    variables = {item["name"]: item["value"] for item in container["env"]}
    count = len(pods) * int(variables["ENGINES_PER_POD"])
    with ExitStack() as stack:
        processes = [
            stack.enter_context(pod(container, *each, frontend)) for each in enumerate(pods)
        ]
        for host, process in zip(pods, processes, strict=True):
            process.wait_until("alive", partial(probe, container, "liveness", host), 60)
            expect("readiness without a frontend", probe(container, "readiness", host), False)
        with timed(f"{count} engines of {len(pods)} pods"):
            found = smoke_all(frontend, count)
        expect("the engines", found["engine_identities"], [[n, 0] for n in range(count)])
        with smoke(frontend, "bench", count, "--duration=8", "--request-rate=20") as bench:
            for host, process in zip(pods, processes, strict=True):
                process.wait_until("ready", partial(probe, container, "readiness", host), 60)
            expect("the exit code of bench", bench.wait_for_exit(), 0)
    ok("probes")


def read_container() -> dict[str, Any]:
    """What the manifest says of a pod."""
    import yaml

    manifest = yaml.safe_load(MANIFEST.read_text("utf-8"))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def pod(
    container: dict[str, Any], index: int, host: Host, frontend: Host
) -> AbstractContextManager[Process]:
    """Run a pod's container as Kubernetes would, but for the image."""
    environment = {item["name"]: item["value"] for item in container["env"]}
    environment |= {"JOB_COMPLETION_INDEX": str(index), "FRONTEND": frontend.address}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = host.command([*container["command"], *container["args"]])
    return running(host.name, command, environment=environment)


def probe(container: dict[str, Any], kind: str, host: Host) -> bool:
    """What the kubelet would find out."""
    get = container[f"{kind}Probe"]["httpGet"]
    (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == get["port"]]
    try:
        url = f"http://{host.address}:{port}{get['path']}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


# A host vanishes ----------------------------------------------------------------------------------


def check_vanished_host(frontend: Host, pods: Sequence[Host]) -> None:
    """Both ends of a connection notice, and find each other again."""
    with ExitStack() as stack:
        first, _ = [stack.enter_context(engine(*each, frontend)) for each in enumerate(pods)]
        with smoke(frontend, "generate", 2, "--max-tokens=1000000") as generate:
            first.wait_for_line("request taken")
            pods[0].unplug()
            begin = time.monotonic()
            expect("the exit code", generate.wait_for_exit(VANISHED_LIMIT + 30), 1)
            seconds = time.monotonic() - begin
            generate.wait_for_line("llm-smoke: engine 0 is dead: ")
        first.wait_for_line("engine 0: the frontend has gone", HEARTBEAT_TIMEOUT * 3)
        expect("that it was in time", seconds < VANISHED_LIMIT, True)
        ok("from pulling the cable of a host to the failure of its request", seconds)
        pods[0].plug_in()
        with timed("the same engines at another frontend"):
            smoke_all(frontend, 2)


def engine(index: int, host: Host, frontend: Host) -> AbstractContextManager[Process]:
    """Run one engine on its host."""
    options = {
        "--handshake-address": f"tcp://{frontend.address}:{PORT}",
        "--engine-start-index": str(index),
        "--step-interval": "1ms",
        "--heartbeat-timeout": f"{HEARTBEAT_TIMEOUT:g}",
    }
    words = [word for option in options.items() for word in option]
    command = host.command([*our_command("mock-engine"), "--log-requests", *words])
    return running(host.name, command)


# The frontend -------------------------------------------------------------------------------------


def smoke(
    frontend: Host, name: str, count: int, *arguments: str
) -> AbstractContextManager[Process]:
    """Run ``llm-smoke`` on the frontend's host, reachable for other hosts."""
    where = ("--handshake-address", f"tcp://{frontend.address}:{PORT}", "--host", frontend.address)
    options = ("--engine-count", str(count), "--ready-timeout-secs", "60", *arguments)
    return running(
        "llm-smoke", frontend.command([*our_command("llm-smoke"), name, *where, *options])
    )


def smoke_all(frontend: Host, count: int) -> dict[str, Any]:
    """All smokes pass; gives what one of them found."""
    with smoke(frontend, "all", count, "--json-full") as process:
        expect("the exit code of llm-smoke", process.wait_for_exit(), 0)
        found: dict[str, Any] = json.loads(process.log())["smokes"]["generate"]
        return found


if __name__ == "__main__":
    check()
