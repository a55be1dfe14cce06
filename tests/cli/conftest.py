"""Addresses that nobody else uses, and a way to run the command against fake engines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Protocol

import attrs
import pytest
import trio
from tests.cli.fake_engine import FakeEngine

from trio_vllm.cli.llm_smoke import app


@attrs.frozen
class Outcome:
    """What a command left behind."""

    exit_code: int
    out: str
    err: str

    @property
    def findings(self) -> dict[str, str]:
        """The name=value lines."""
        lines = [line.partition("=") for line in self.out.splitlines() if "=" in line]
        return {name: value for name, _, value in lines}


class RunSmoke(Protocol):
    """Run ``llm-smoke`` with these arguments; an engine is there by default."""

    async def __call__(self, *tokens: str, engines: list[FakeEngine] | None = None) -> Outcome: ...


@pytest.fixture
def address() -> Iterator[str]:
    """A handshake address; short, which pytest's own temporary folders need not be."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        yield f"ipc://{folder}/handshake"


@pytest.fixture
def run_smoke(address: str, capsys: pytest.CaptureFixture[str]) -> RunSmoke:
    async def run(*tokens: str, engines: list[FakeEngine] | None = None) -> Outcome:
        async with trio.open_nursery() as nursery:
            for engine in [FakeEngine()] if engines is None else engines:
                nursery.start_soon(engine.serve, address)
            exit_code = await app.run_async([*tokens, "--handshake-address", address])
            nursery.cancel_scope.cancel()
        return Outcome(exit_code, *capsys.readouterr())

    return run
