"""Schedules of the real engine with fresh random requests, made again by ours: each step is the same."""

import secrets
from itertools import zip_longest

from harness import CheckError, ok
from provision import Peers
from recorder import Json, Scenario, record_mock, record_real

COUNT = 2
"""Recordings in a run, each of an engine of its own."""


def main(peers: Peers) -> None:
    """Record and compare."""
    for _ in range(COUNT):
        seed = secrets.randbelow(2**32)
        scenario = Scenario(seed)
        print(f"seed {seed}: {' '.join(scenario.engine_args)}", flush=True)
        real = record_real(peers, scenario)
        steps = compare(real, record_mock(real, scenario))
        ok(f"{steps} steps of random requests with seed {seed}")


def compare(real: Json, ours: Json) -> int:
    """How many steps there are, all of them the same in both."""
    count = 0
    for phase, (theirs, mine) in enumerate(zip(real["phases"], ours["phases"], strict=True)):
        pairs = zip_longest(theirs["steps"], mine["steps"])
        for number, (expected, got) in enumerate(pairs):
            if got != expected:
                raise CheckError(f"phase {phase}, step {number}: {got}, not {expected}")
            count += 1
    return count
