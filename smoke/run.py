"""Run the smoke checks: each script by itself, in its own process, within a time limit.

``mock_*.py`` need nothing but the installed package. ``peers_*.py`` need real vLLM processes
(see ``peers.py``) and run with ``--peers``; where these cannot be installed they are skipped,
loudly, and that is no failure. A script fails by its exit code, by its time limit, and by
leaving a process running.
"""

import argparse
import contextlib
import fnmatch
import signal
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import NoReturn

from peers import PeersUnavailable, provision
from processes import POLL_INTERVAL, ProcessError, kill_all, marked_processes, running, tail

HERE = Path(__file__).parent

MARK = "TRIO_VLLM_SMOKE_MARK"
"""The variable by which we find what a script has started."""

TIME_LIMITS = {"mock": 300.0, "peers": 900.0}
"""Seconds a script may take, by kind: several times what it takes on a busy machine of two cores."""

TOTAL_LIMIT = 3000.0
"""Seconds that all may take together, should several of them hang."""

INTERRUPT_GRACE = 15.0
"""Seconds between SIGINT and SIGTERM for a script whose time is over."""

STOP_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a script that is stopped."""

STRAY_GRACE = 2.0
"""Seconds after a script's end in which what it started may still be ending."""


def main() -> int:
    """Run what the command line asks for; 1 if any script failed."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    scripts = find_scripts("mock", arguments.k)
    skipped: list[Path] = []
    if arguments.peers:
        scripts_with_peers = find_scripts("peers", arguments.k)
        try:
            provision()
        except PeersUnavailable as reason:
            skipped = scripts_with_peers
            print_banner(reason, skipped)
        else:
            scripts += scripts_with_peers
    if not scripts and not skipped:
        print("there is no such smoke script")
        return 0
    deadline = time.monotonic() + TOTAL_LIMIT
    passed = [run_script(script, arguments, deadline) for script in scripts].count(True)
    failed = len(scripts) - passed
    print(f"smoke: {passed} passed, {failed} failed, {len(skipped)} skipped")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="also run those with real peers")
    parser.add_argument("-k", metavar="PATTERN", default="", help="run those whose name has this")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of a script")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the scripts' output")
    return parser.parse_args()


def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leave by way of the clean-up of all blocks."""
    raise SystemExit(1)


def find_scripts(kind: str, pattern: str) -> list[Path]:
    """The scripts of a kind, by name; ``pattern`` is a part of it or a shell pattern."""
    return [
        path
        for path in sorted(HERE.glob(f"{kind}_*.py"))
        if fnmatch.fnmatch(path.stem, f"*{pattern}*")
    ]


def run_script(script: Path, arguments: argparse.Namespace, deadline: float) -> bool:
    """Run one script, end all that it has started, and print whether and how fast it passed."""
    begin = time.monotonic()
    limit = arguments.limit or TIME_LIMITS[script.stem.partition("_")[0]]
    limit = max(min(limit, deadline - begin), 0.0)
    mark = uuid.uuid4().hex
    try:
        failure, output = run_marked(script, mark, limit)
        seconds = time.monotonic() - begin
    finally:
        strays = kill_strays(mark)
    if strays and not failure:
        failure = f"processes left running: {len(strays)}"
    report = f"{script.stem} {seconds:.1f} s"
    print(f"FAIL {report}: {failure}" if failure else f"ok {report}", flush=True)
    if failure or arguments.verbose:
        print(textwrap.indent(output if arguments.verbose else tail(output), "    "), flush=True)
    return not failure


def run_marked(script: Path, mark: str, limit: float) -> tuple[str, str]:
    """Run one script; return why it failed, or nothing, and what it printed."""
    command = [sys.executable, "-u", str(script)]
    failure = ""
    with (
        tempfile.TemporaryDirectory(prefix="smoke-") as scratch,
        running(
            script.name, command, environment={MARK: mark, "TMPDIR": scratch}, grace=STOP_GRACE
        ) as process,
    ):
        try:
            if exit_code := process.wait_for_exit(limit):
                failure = f"exit code {exit_code}"
        except ProcessError as exc:
            failure = str(exc)
            # By Ctrl-C it leaves all blocks, which print the last words of what it has started.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(ProcessError):
                process.wait_for_exit(INTERRUPT_GRACE)
        process.end(STOP_GRACE)
        return failure, process.log().rstrip()


def kill_strays(mark: str) -> list[int]:
    """Kill the processes with our mark that do not end by themselves; return their ids."""
    deadline = time.monotonic() + STRAY_GRACE
    while marked_processes(MARK, mark) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return kill_all(lambda: marked_processes(MARK, mark))


def print_banner(reason: PeersUnavailable, skipped: list[Path]) -> None:
    """Say so that nobody overlooks it that the real peers are missing."""
    bar = "!" * 100
    names = " ".join(script.stem for script in skipped) or "(there is none)"
    print(bar, "THE REAL PEERS ARE NOT TO BE HAD HERE", reason, sep="\n")
    print(f"NOT CHECKED: {names}", bar, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
