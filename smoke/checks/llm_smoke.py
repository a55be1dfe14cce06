"""``llm-smoke`` with mock engines: in its process, beside it, spawned, killed, missing."""

import signal
import socket

from harness import LOSS_LIMIT, free_port, mock_engine, ok, our_command, timed
from llm_smoke_checks import (
    FIVE_IDS,
    STOP_LIMIT,
    begin_request,
    expect_end_within,
    expect_lines,
    llm_smoke,
)
from processes import running
from trio_vllm.cli.smokes import SMOKES

ENDLESS = ("--max-tokens", "1000000")
"""Tokens that a mock engine needs seconds for."""

SPAWN = ("--spawn", "--", *our_command("mock-engine"), "--handshake-address", "{address}")


def main() -> None:
    """Go through everything."""
    check_passing()
    check_loss()
    check_stops()
    check_failures()


def check_passing() -> None:
    """All smokes pass, wherever the engines come from."""
    with (
        timed("help"),
        running("llm-smoke --help", [*our_command("llm-smoke"), "all", "--help"]) as it,
    ):
        it.wait_for_exit()
    for command in (*SMOKES, "all"):
        with timed(f"{command} --mock"), llm_smoke(command, "--mock") as smoke:
            expect_lines(smoke, 0, r"engine_identities=\[\[0, 0\]\]")
    port = free_port()
    with (
        timed("two engines"),
        llm_smoke("all", "--engine-count", "2", *at(port)) as smoke,
        mock_engine(port, "--engine-count", "2"),
    ):
        expect_lines(smoke, 0, r"engine_identities=\[\[0, 0\], \[1, 0\]\]", FIVE_IDS)
    with timed("all --spawn"), llm_smoke("all", *SPAWN) as smoke:
        expect_lines(smoke, 0, FIVE_IDS)


def check_loss() -> None:
    """A killed engine ends it."""
    port = free_port()
    with llm_smoke("generate", *ENDLESS, *at(port)) as smoke, mock_engine(port) as engine:
        begin_request(smoke)
        reason = "engine 0 is dead: its connection was lost"
        seconds = expect_end_within(smoke, LOSS_LIMIT, engine.pid, signal.SIGKILL, 1, reason)
    ok("from the engine's death to the end", seconds)


def check_stops() -> None:
    """Signals end it, whatever it is doing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        stopped = 128 + number, f"stopped by {number.name} before it was done"
        with llm_smoke("generate", "--verbose", *at(free_port())) as smoke:
            smoke.wait_for_line("waiting for HELLO")
            seconds = expect_end_within(smoke, STOP_LIMIT, smoke.pid, number, *stopped)
        ok(f"from {number.name} without engines to the end", seconds)
        with llm_smoke("generate", *ENDLESS, *SPAWN) as smoke:
            begin_request(smoke)
            seconds = expect_end_within(smoke, STOP_LIMIT, smoke.pid, number, *stopped)
        ok(f"from {number.name} in mid-request to the end", seconds)


def check_failures() -> None:
    """One line tells what was wrong."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with llm_smoke("generate", *at(port)) as smoke:
            reason = f"address tcp://127.0.0.1:{port} is already in use"
            expect_lines(smoke, 1, f"llm-smoke: {reason}")
    with llm_smoke("generate", "--ready-timeout-secs=0.5", *at(port)) as smoke:
        expect_lines(smoke, 1, "llm-smoke: startup failed while waiting for HELLO from engine 0 .*")
    with llm_smoke("generate", "--mock", "--engine-count", "0") as smoke:
        expect_lines(smoke, 2, "llm-smoke: .*--engine-count.*")
    ok("failures")


def at(port: int) -> tuple[str, str]:
    """The option for where the engines report."""
    return "--handshake-address", f"tcp://127.0.0.1:{port}"
