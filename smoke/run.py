"""Run the smoke checks: each in its own process, within a time limit.

Those in ``checks/`` need nothing but the installed package. Those in ``peers/`` need real vLLM
processes (see ``provision.py``) and run with ``--peers``; where these cannot be installed they are
skipped, loudly, and that is no failure. So are checks, or parts of them, for which this machine lacks something. A check fails by raising, by its time limit, and by leaving a
process running.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import signal
import sys
import tempfile
import textwrap
import time
import uuid
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from processes import POLL_INTERVAL, ProcessError, kill_all, marked_processes, running, tail
from provision import (
    BUILT_VERSION,
    REFERENCE_VERSION,
    VERSIONS,
    PeersUnavailable,
    find_peers,
    provision,
    provision_guidellm,
)

OUR_CHECKS = ("docs", "examples", "fleet", "flood", "llm", "llm_smoke")

REFERENCE = (REFERENCE_VERSION,)
WINDOW = (REFERENCE_VERSION, BUILT_VERSION)
"""Both ends of the window of versions that the package works with."""

PEER_CHECKS = {
    "wire_types": WINDOW,  # every message, read and written by the types of either version
    "utilities": WINDOW,  # the methods differ
    "refusals": REFERENCE,
    "hostile_requests": WINDOW,
    "public_issues": REFERENCE,
    "llm_smoke": REFERENCE,
    "llm_smoke_spawn": REFERENCE,
    "llm": REFERENCE,
    "lockstep": REFERENCE,
    "bootstrapped": REFERENCE,
    "losses": REFERENCE,
    "python_frontend": REFERENCE,
    "rust_frontend": REFERENCE,
    "metrics": REFERENCE,
    "kv_transfers": REFERENCE,
    "restart": REFERENCE,
    "schedules": REFERENCE,
    "autoscaler": REFERENCE,
    "load_tools": REFERENCE,
}
"""The checks with real peers, and the versions of vLLM that each runs with unless told otherwise."""

WITH_GUIDELLM = ("load_tools",)
"""Checks that need this tool, too."""

COUNTED = ("hostile_requests",)
"""Checks that send as many requests as ``--count`` says."""

MARK = "TRIO_VLLM_SMOKE_MARK"
"""The variable by which we find what a check has started."""

SKIPPED = 77
"""The exit code of a check that cannot be run here."""

TIME_LIMITS = {"checks": 300.0, "peers": 900.0}
"""Seconds a check may take, by kind: several times what it takes on a busy machine of two cores."""

TOTAL_LIMIT = 3500.0
"""Seconds that all may take together, should several of them hang."""

INTERRUPT_GRACE = 15.0
"""Seconds between SIGINT and SIGTERM for a check whose time is over."""

STOP_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a check that is stopped."""

STRAY_GRACE = 2.0
"""Seconds after a check's end in which what it started may still be ending."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check, with the version of vLLM that it is run with, if any."""

    kind: str
    module: str
    version: str | None = None

    @property
    def name(self) -> str:
        """What it is called, and picked by."""
        path = f"{self.kind}/{self.module}"
        return path if self.version is None else f"{path}@{self.version}"

    def run(self, count: int | None = None) -> None:
        """Run it in this process; ``count`` is of requests, where a check has that option."""
        options = {} if count is None or self.module not in COUNTED else {"count": count}
        main = importlib.import_module(f"{self.kind}.{self.module}").main
        if self.version is None:
            main()
        elif peers := find_peers(self.version):
            main(peers, **options)
        else:
            raise SystemExit("the peers are not there; run.py --peers builds them")


def main() -> int:
    """Run what the command line asks for; 1 if any check failed."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    if arguments.here:
        return run_here(arguments)
    checks = [
        check
        for check in pick(arguments.names, arguments.vllm)
        if check.version is None or arguments.peers
    ]
    if not checks:
        print("there is no such smoke check (those in peers/ need --peers)")
        return 2
    without_peers = impossible(checks)
    to_run = [check for check in checks if check not in without_peers]
    deadline = time.monotonic() + TOTAL_LIMIT
    ends = Counter(run_check(check, arguments, deadline) for check in to_run)
    skipped = ends["skipped"] + len(without_peers)
    print(f"smoke: {ends['ok']} passed, {ends['FAIL']} failed, {skipped} skipped")
    return 1 if ends["FAIL"] else 0


def run_here(arguments: argparse.Namespace) -> int:
    """Run one check in this process."""
    from harness import CheckSkippedError

    (check,) = pick([arguments.here], arguments.vllm)
    try:
        check.run(arguments.count)
    except CheckSkippedError as reason:
        print(f"SKIPPED {check.name}: {reason}")
        return SKIPPED
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="run those that have this in their name"
    )
    parser.add_argument("--peers", action="store_true", help="also run those with real peers")
    parser.add_argument(
        "--vllm", choices=VERSIONS, help="the version of all real peers (default: see run.py)"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of a check")
    parser.add_argument(
        "--count", type=int, metavar="N", help="requests of peers/hostile_requests (default: 200)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the checks' output")
    parser.add_argument("--here", metavar="NAME", help="run one check in this process")
    return parser.parse_args()


def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leave by way of the clean-up of all blocks."""
    raise SystemExit(1)


def pick(names: list[str], version: str | None) -> list[Check]:
    """The checks whose name has one of ``names`` in it; a whole name is that check alone."""
    found = [Check("checks", module) for module in OUR_CHECKS]
    for module, versions in PEER_CHECKS.items():
        found += [Check("peers", module, each) for each in ([version] if version else versions)]
    if exact := [check for check in found if check.name in names]:
        return exact
    return [check for check in found if not names or any(name in check.name for name in names)]


def impossible(checks: list[Check]) -> list[Check]:
    """Provide for the peers, if any check needs them; the checks that cannot run without."""
    with_peers = [check for check in checks if check.version is not None]
    if skipped := left_out(with_peers, provision):
        return skipped
    with_guidellm = [check for check in with_peers if check.module in WITH_GUIDELLM]
    return left_out(with_guidellm, provision_guidellm)


def left_out(checks: list[Check], provide: Callable[[], object]) -> list[Check]:
    """Provide for what these checks need, if there are any; all of them if that cannot be."""
    try:
        if checks:
            provide()
    except PeersUnavailable as reason:
        print_banner(reason, checks)
        return checks
    return []


def run_check(check: Check, arguments: argparse.Namespace, deadline: float) -> str:
    """Run one check, end all that it has started, and print and return how it has ended."""
    begin = time.monotonic()
    limit = arguments.limit or TIME_LIMITS[check.kind]
    limit = max(min(limit, deadline - begin), 0.0)
    mark = uuid.uuid4().hex
    try:
        exit_code, failure, output = run_marked(check, mark, limit, arguments.count)
        seconds = time.monotonic() - begin
    finally:
        strays = kill_strays(mark)
    if strays and not failure:
        failure = f"processes left running: {len(strays)}"
    end = "FAIL" if failure else "skipped" if exit_code == SKIPPED else "ok"
    report = f"{end} {check.name} {seconds:.1f} s"
    print(f"{report}: {failure}" if failure else report, flush=True)
    if not arguments.verbose:
        output = tail(output) if failure else only_skipped(output)
    if output:
        print(textwrap.indent(output, "    "), flush=True)
    return end


def only_skipped(output: str) -> str:
    """What a check that has not failed could not do here."""
    return "\n".join(line for line in output.splitlines() if line.startswith("SKIPPED"))


def run_marked(
    check: Check, mark: str, limit: float, count: int | None
) -> tuple[int | None, str, str]:
    """Run one check; return its exit code, why it failed, or nothing, and what it printed."""
    command = [sys.executable, "-u", __file__, "--here", check.name]
    if check.version is not None:
        command += ["--vllm", check.version]
    if count is not None:
        command += ["--count", str(count)]
    failure = ""
    with (
        tempfile.TemporaryDirectory(prefix="smoke-") as scratch,
        running(
            check.name, command, environment={MARK: mark, "TMPDIR": scratch}, grace=STOP_GRACE
        ) as process,
    ):
        try:
            if (exit_code := process.wait_for_exit(limit)) not in (0, SKIPPED):
                failure = f"exit code {exit_code}"
        except ProcessError as exc:
            failure = str(exc)
            # By Ctrl-C it leaves all blocks, which print the last words of what it has started.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(ProcessError):
                process.wait_for_exit(INTERRUPT_GRACE)
        process.end(STOP_GRACE)
        return process.exit_code(), failure, process.log().rstrip()


def kill_strays(mark: str) -> list[int]:
    """Kill the processes with our mark that do not end by themselves; return their ids."""
    deadline = time.monotonic() + STRAY_GRACE
    while marked_processes(MARK, mark) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return kill_all(lambda: marked_processes(MARK, mark))


def print_banner(reason: PeersUnavailable, skipped: list[Check]) -> None:
    """Say so that nobody overlooks it that the real peers are missing."""
    bar = "!" * 100
    names = " ".join(check.name for check in skipped)
    print(bar, "THE REAL PEERS ARE NOT TO BE HAD HERE", reason, sep="\n")
    print(f"NOT CHECKED: {names}", bar, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
