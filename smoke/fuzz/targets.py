"""The targets by name, and what each input must keep to, whatever the target."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import attrs

from fuzz.client import client_seeds, fuzz_client
from fuzz.decoders import (
    decoder_seeds,
    engine_startup_seeds,
    fuzz_decoders,
    fuzz_engine_startup,
    fuzz_startup,
    startup_seeds,
)
from fuzz.engine import engine_seeds, fuzz_engine

MAX_SECONDS = 2.0
"""Processor time that an input may take; instrumented code takes some ten times as long as usual."""

MAX_MEMORY = 256 * 2**20
"""Bytes by which one input may raise the peak of the process."""


@attrs.frozen
class Target:
    """Something that reads what others wrote."""

    run: Callable[[bytes], None]
    """Gives an input to it; raises if that shows a fault."""
    seeds: Callable[[], list[bytes]]
    """Inputs to start from."""

    def check(self, data: bytes) -> None:
        """Run an input, and hold it to its limits of time and memory."""
        before, begin = _peak(), time.thread_time()
        self.run(data)
        seconds, grown = time.thread_time() - begin, _peak() - before
        assert seconds < MAX_SECONDS, f"the input took {seconds:.1f} s"
        assert grown < MAX_MEMORY, f"the input took {grown >> 20} MiB"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


TARGETS = {
    "decoders": Target(fuzz_decoders, decoder_seeds),
    "startup": Target(fuzz_startup, startup_seeds),
    "engine-startup": Target(fuzz_engine_startup, engine_startup_seeds),
    "client": Target(fuzz_client, client_seeds),
    "engine": Target(fuzz_engine, engine_seeds),
}
