"""The commands of the engines that are measured, and of those that they are measured with."""

import sys
import sysconfig
from pathlib import Path

from bench.frontend import Command

SCRIPTS = Path(sysconfig.get_path("scripts"))
MOCK_ENGINE = SCRIPTS / "mock-engine"
LLM_SMOKE = SCRIPTS / "llm-smoke"


def mock_engine(engine_count: int = 1, *options: str) -> Command:
    """Ours."""
    counts = ("--engine-count", str(engine_count))
    return lambda address: [MOCK_ENGINE, "--handshake-address", address, *counts, *options]


def raw_engine(*options: str) -> Command:
    """One that makes nothing, see there."""
    return lambda address: [*python("bench.raw_engine"), address, *options]


def step_engine(*options: str) -> Command:
    """Some that answer like vLLM's, see there."""
    return lambda address: [*python("bench.step_engine"), address, *options]


def python(module: str) -> list[str]:
    """Run a module of ours."""
    return [sys.executable, "-m", module]
