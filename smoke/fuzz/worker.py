"""One target in a process of its own, which libFuzzer ends: ``worker.py TARGET LIBFUZZER_ARGUMENT...``."""

import logging
import random
import sys

import atheris

with atheris.instrument_imports(include=["trio_vllm"]):
    from fuzz.mutate import mutate
    from fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until libFuzzer's limits are reached, or an input shows a fault."""
    name, *arguments = sys.argv[1:]
    logging.disable()
    target = TARGETS[name]

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        def change_bytes(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, len(part) + 64))

        return mutate(bytes(data), random.Random(seed), change_bytes)[:max_size]

    atheris.Setup([name, *arguments], target.check, custom_mutator=mutator)
    atheris.Fuzz()


main()
