"""What goes wrong is told in one line, whoever's fault it is."""

from __future__ import annotations

import socket

import pytest
import trio
from tests.cli.conftest import RunSmoke
from tests.cli.fake_engine import FakeEngine
from trio.testing import MockClock

from trio_vllm import (
    DecodeError,
    EngineDeadError,
    Llm,
)
from trio_vllm.cli.app import FAILED
from trio_vllm.cli.llm_smoke import app
from trio_vllm.cli.smoke_options import GenerateOptions
from trio_vllm.cli.smoke_report import Report
from trio_vllm.cli.smoke_runner import run_smokes
from trio_vllm.cli.smokes import Smoke


async def test_an_address_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """At once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"

        assert await app.run_async(["generate", "--handshake-address", address]) == FAILED

    assert capsys.readouterr().err == f"llm-smoke: address {address} is already in use\n"


async def test_a_host_that_is_not_ours(run_smoke: RunSmoke) -> None:
    """The address that cannot be bound is named."""
    outcome = await run_smoke("generate", "--host", "192.0.2.1", engines=[])

    (line,) = outcome.err.splitlines()
    assert outcome.exit_code == FAILED
    assert "tcp://192.0.2.1:0" in line


async def test_the_missing_engine_is_named(run_smoke: RunSmoke, patient_clock: MockClock) -> None:
    """If only one of two comes."""
    outcome = await run_smoke("generate", "--engine-count=2", "--ready-timeout-secs=0.2")

    assert outcome.exit_code == FAILED
    assert "waiting for HELLO from engine 1 (gave up after 0.2 s)" in outcome.err


async def test_a_stranger_is_told_of(run_smoke: RunSmoke, patient_clock: MockClock) -> None:
    """An engine with an unexpected index is no reason to fail, but worth a note if nothing comes."""
    outcome = await run_smoke("generate", "--ready-timeout-secs=0.2", engines=[FakeEngine(7)])

    (line,) = outcome.err.splitlines()
    assert outcome.exit_code == FAILED
    assert "HELLO from engine 0" in line
    assert "7" in line.partition("; ")[2]


async def test_an_engine_that_is_lost(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In mid-request: the request never ends, its engine does."""
    engine = FakeEngine(is_mute=True)

    async def serve_until_asked() -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.serve, address)
                await engine.asked.wait()
                scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_until_asked)

        assert await app.run_async(["generate", "--handshake-address", address]) == FAILED

    assert capsys.readouterr().err == "llm-smoke: engine 0 is dead: its connection was lost\n"


async def failure_of(smoke: Smoke, address: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a smoke that fails on an engine; give what is said of that."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(FakeEngine().serve, address)
        options = GenerateOptions(handshake_address=address)
        assert await run_smokes(options, (), {"generate": smoke}) == FAILED
        nursery.cancel_scope.cancel()
    return capsys.readouterr().err


async def test_garbage_is_explained(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the cause of the engine's death."""

    async def die(_llm: Llm, _report: Report, _options: object) -> None:
        await trio.lowlevel.checkpoint()
        cause = DecodeError("outputs", "[3]", "is not an array")
        raise EngineDeadError(0, "it sent garbage") from cause

    assert await failure_of(die, address, capsys) == (
        "llm-smoke: engine 0 is dead: it sent garbage: "
        "cannot decode outputs at [3]: is not an array\n"
    )


async def test_a_bug_of_ours_is_called_one(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its type and where to look for more."""

    async def stumble(_llm: Llm, _report: Report, _options: object) -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError("by nothing")

    assert await failure_of(stumble, address, capsys) == (
        "llm-smoke: ZeroDivisionError: by nothing (a bug of llm-smoke; --debug shows where)\n"
    )
