"""Run benchmarks, and print how fast we are next to a yardstick.

Without names all of them run, in less than twenty minutes (with --quick, in some five). What matters is
the ratio of the two, since both are measured in turns.
"""

import argparse
import inspect
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from arguments import output_file
from bench.figures import Figure
from bench.measure_cli import measure_help
from bench.measure_client import (
    measure_client_memory,
    measure_dispatch,
    measure_pauses,
    measure_submission,
)
from bench.measure_engine import (
    measure_burst,
    measure_churn,
    measure_engine_logprobs,
    measure_engine_memory,
    measure_idle,
    measure_pace,
    measure_processes,
    measure_schedule,
    measure_startup,
    measure_steps,
)
from bench.measure_load import (
    measure_engines,
    measure_load,
    measure_round_trip,
    measure_rows,
)
from bench.report import TOLERANCE, markdown, plot, regressions, table, write_json
from bench.turns import FULL, QUICK, Effort

BENCHMARKS: dict[str, Callable[[Effort], list[Figure]]] = {
    "burst": measure_burst,
    "churn": measure_churn,
    "engine-logprobs": measure_engine_logprobs,
    "schedule": measure_schedule,
    "pace": measure_pace,
    "steps": measure_steps,
    "processes": measure_processes,
    "startup": measure_startup,
    "idle": measure_idle,
    "engine-memory": measure_engine_memory,
    "load": measure_load,
    "rows": measure_rows,
    "engines": measure_engines,
    "round-trip": measure_round_trip,
    "dispatch": measure_dispatch,
    "submission": measure_submission,
    "client-memory": measure_client_memory,
    "pauses": measure_pauses,
    "help": measure_help,
}


def main() -> int:
    """Run what the command line asks for; 1 if something failed, or is worse than before."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    effort = QUICK if arguments.quick else FULL
    figures: list[Figure] = []
    failed: list[str] = []
    for name in arguments.names or BENCHMARKS:
        begin = time.monotonic()
        try:
            figures += BENCHMARKS[name](effort)
            print(f"ok {name} {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        except Exception as error:  # the others can still tell something
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed.append(f"{name} failed: {(str(error).splitlines() or [repr(error)])[-1]}")
    print(table(figures))
    if arguments.json:
        write_json(arguments.json, figures, quick=arguments.quick)
    if arguments.markdown:
        command = shlex.join(["nox", "-s", "bench", "--", *sys.argv[1:]])
        arguments.markdown.write_text(markdown(figures, command), encoding="utf-8")
    if arguments.plot:
        plot(arguments.plot, figures)
    worse = regressions(figures, arguments.compare) if arguments.compare else []
    for line in failed + worse:
        print(line)
    return 1 if failed or worse else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    listing = "\n".join(
        f"  {name:<14} {inspect.getdoc(measure)}" for name, measure in BENCHMARKS.items()
    )
    parser = argparse.ArgumentParser(
        "bench",
        description=__doc__,
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="a benchmark (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples")
    parser.add_argument(
        "--json", metavar="FILE", type=output_file, help="write all samples to a file"
    )
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        type=output_file,
        help="write the table of the docs (docs/explanation/speed_table.md)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=output_file, help="draw the ratios (matplotlib)"
    )
    parser.add_argument(
        "--compare",
        metavar="FILE",
        type=Path,
        help=f"fail if a ratio is over {TOLERANCE:.0%}% worse than in this file of --json",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    return arguments


def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leave by way of the clean-up of all blocks."""
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
