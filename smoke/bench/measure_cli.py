"""Benchmarks of the commands: how long their help takes."""

import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.engines import LLM_SMOKE, MOCK_ENGINE
from bench.figures import Figure, Target
from bench.turns import Effort, take_turns


def measure_help(effort: Effort) -> list[Figure]:
    """``--help`` of each command, next to a Python that does nothing."""
    figures: list[Figure] = []
    for command, target in ((LLM_SMOKE, Target(0.3)), (MOCK_ENGINE, None)):
        samples, yardstick = take_turns(
            effort.times(3),
            lambda: run([command, "--help"]),  # noqa: B023  (called at once)
            lambda: run([sys.executable, "-c", "pass"]),
        )
        for index, what in enumerate(("time", "CPU")):
            figures.append(
                Figure(
                    f"{command.name} --help: {what}",
                    "s",
                    "less",
                    [sample[index] for sample in samples],
                    "bare Python",
                    [sample[index] for sample in yardstick],
                    target,
                )
            )
    return figures


def run(command: list[str | Path]) -> tuple[float, float]:
    """Run a command; gives the seconds it took, and those of the CPU."""
    cpu, begin = children_cpu(), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin, children_cpu() - cpu


def children_cpu() -> float:
    """CPU seconds of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
