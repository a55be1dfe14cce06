"""``llm-smoke`` with vLLM's own engines: two, and a killed one."""

import re
import signal

from harness import LOSS_LIMIT, free_port, headless_engine, ok, timed
from llm_smoke_checks import ALL_PASS, begin_request, expect_end_within, expect_lines, llm_smoke
from processes import Process
from provision import Peers

READY = ("--ready-timeout-secs", "240")

LONG = ("--max-tokens", "500")
"""Tokens that the tiny model needs seconds for."""

TWO = ("--data-parallel-size", "2", "--data-parallel-size-local", "2")


def main(peers: Peers) -> None:
    """Run both commands, one after the other."""
    port = free_port()
    address = f"--handshake-address=tcp://127.0.0.1:{port}"
    with (
        timed("all over one connection to two engines"),
        headless_engine(peers, port, *TWO),
        llm_smoke("all", *READY, "--engine-count=2", address) as smoke,
    ):
        identities = r"engine_identities=\[\[0, 0\], \[1, 0\]\]"
        expect_lines(smoke, 0, identities, *ALL_PASS, timeout=300)
    port = free_port()
    address = f"--handshake-address=tcp://127.0.0.1:{port}"
    with (
        headless_engine(peers, port) as engine,
        llm_smoke("generate", *READY, *LONG, address) as smoke,
    ):
        check_loss(smoke, engine)


def check_loss(smoke: Process, engine: Process) -> None:
    """The command ends with its engine core, and says so."""
    found = re.search(r"EngineCore pid=(\d+)", engine.wait_for_line(r"EngineCore pid=\d+"))
    assert found
    begin_request(smoke)
    reason = "engine 0 is dead: its connection was lost"
    seconds = expect_end_within(smoke, LOSS_LIMIT, int(found[1]), signal.SIGKILL, 1, reason)
    ok("from the engine core's death to the end", seconds)
