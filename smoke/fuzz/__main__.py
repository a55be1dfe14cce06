"""Fuzz everything that reads what others wrote: ``nox -s fuzz -- [TARGET...] [--seconds N] [--runs N]``.

Each target runs in a process of its own, one after the other, from inputs made of the recorded
messages; limits are shared by all targets. An input that shows a fault is kept in --artifacts, and
``--replay FILE TARGET`` shows the traceback again.
"""

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

from arguments import output_file
from fuzz.targets import TARGETS

DEFAULT_SECONDS = 60.0
MAX_INPUT = 16_384
"""Bytes of an input."""
INPUT_TIMEOUT = 20
"""Seconds after which libFuzzer takes an input for one that hangs."""
RSS_LIMIT = 2048
"""MiB of a fuzzing process, with all the inputs that it keeps."""


@attrs.frozen
class Result:
    """What came of fuzzing one target."""

    target: str
    runs: int
    seconds: float
    cpu_seconds: float
    """Of processor time; on a busy machine fewer than the seconds."""
    fault: Path | None
    """The input that showed a fault."""

    @property
    def rate(self) -> float:
        """Inputs a second of processor time."""
        return self.runs / self.cpu_seconds if self.cpu_seconds else 0.0


def main() -> int:
    """Fuzz, print a table; 1 if a fault was found."""
    arguments = parse_arguments()
    names = arguments.targets or list(TARGETS)
    if arguments.replay:
        TARGETS[names[0]].check(arguments.replay.read_bytes())
        print("no fault")
        return 0
    seconds = arguments.seconds
    if seconds is None and arguments.runs is None:
        seconds = DEFAULT_SECONDS
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            corpus = (arguments.corpus or Path(scratch)) / name
            write_seeds(name, corpus)
            limits = []
            if seconds is not None:
                limits.append(f"-max_total_time={max(1, round(seconds / len(names)))}")
            if arguments.runs is not None:
                limits.append(f"-runs={max(1, arguments.runs // len(names))}")
            results.append(fuzz(name, corpus, arguments.artifacts, limits))
    report(results, arguments.json)
    return any(result.fault for result in results)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, help="for all targets together, 60 by default")
    parser.add_argument("--runs", type=int, help="inputs of all targets together")
    parser.add_argument("--corpus", type=Path, help="keep inputs that led somewhere new here")
    parser.add_argument("--artifacts", type=Path, default=Path("fuzz-artifacts"))
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="run one input, without atheris"
    )
    parser.add_argument("--json", type=output_file, help="write the figures here")
    arguments = parser.parse_args()
    for name in arguments.targets:
        if name not in TARGETS:
            parser.error(f"there is no target {name!r}")
    if arguments.replay and len(arguments.targets) != 1:
        parser.error("--replay needs one target")
    return arguments


def write_seeds(name: str, corpus: Path) -> None:
    """Put the inputs to start from into a folder; each must pass."""
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in TARGETS[name].seeds():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)


def fuzz(name: str, corpus: Path, artifacts: Path, limits: list[str]) -> Result:
    """Run one target until its limits are reached or a fault is found."""
    artifacts.mkdir(parents=True, exist_ok=True)
    prefix = f"{artifacts}{os.sep}{name}-"
    command = [
        *(sys.executable, "-m", "fuzz.worker", name, str(corpus), *limits),
        *(f"-artifact_prefix={prefix}", f"-max_len={MAX_INPUT}", f"-timeout={INPUT_TIMEOUT}"),
        *(f"-rss_limit_mb={RSS_LIMIT}", "-print_final_stats=1"),
    ]
    before, begin, cpu_begin = set(artifacts.iterdir()), time.monotonic(), cpu_of_children()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    log = done.stdout.decode(errors="replace")
    seconds, cpu_seconds = time.monotonic() - begin, cpu_of_children() - cpu_begin
    if done.returncode:
        sys.stderr.write(log[-8000:])
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", log)
    faults = sorted(set(artifacts.iterdir()) - before)
    fault = (faults or [artifacts])[0] if done.returncode else None
    return Result(name, int(counted[1]) if counted else 0, seconds, cpu_seconds, fault)


def cpu_of_children() -> float:
    """Processor seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(results: list[Result], path: Path | None) -> None:
    """Print what came of it, and write it to a file on wish."""
    print(f"{'target':<14} {'inputs':>11} {'seconds':>8} {'CPU s':>7} {'a CPU s':>8}  fault")
    for result in results:
        print(f"{result.target:<14} {result.runs:>11,} {result.seconds:>8.0f}", end=" ")
        print(f"{result.cpu_seconds:>7.0f} {result.rate:>8,.0f}  {result.fault or 'none'}")
    if path is not None:
        figures = [{**attrs.asdict(r), "fault": r.fault and str(r.fault)} for r in results]
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
