"""``llm-smoke`` with vLLM's own engines: two, and a killed one."""

import re
import signal
import time

from llm_smoke_checks import (
    ALL_PASS,
    LOSS_LIMIT,
    begin_request,
    expect_end_within,
    expect_lines,
    llm_smoke,
    ok,
)
from peers import free_port, headless_engine

READY = ("--ready-timeout-secs", "240")

LONG = ("--max-tokens", "500")
"""Tokens that the tiny model needs seconds for."""

begin = time.monotonic()
port = free_port()
address = f"tcp://127.0.0.1:{port}"
with (
    headless_engine(port, "--data-parallel-size", "2", "--data-parallel-size-local", "2"),
    llm_smoke("all", *READY, "--engine-count=2", f"--handshake-address={address}") as smoke,
):
    two = r"engine_identities=\[\[0, 0\], \[1, 0\]\]"
    expect_lines(smoke, 0, two, *ALL_PASS, timeout=300)
ok("all over one connection to two engines", time.monotonic() - begin)

port = free_port()
address = f"tcp://127.0.0.1:{port}"
with (
    headless_engine(port) as engine,
    llm_smoke("generate", *READY, *LONG, "--handshake-address", address) as smoke,
):
    found = re.search(r"EngineCore pid=(\d+)", engine.wait_for_line(r"EngineCore pid=\d+"))
    assert found
    pid = int(found[1])
    begin_request(smoke)
    reason = "engine 0 is dead: its connection was lost"
    seconds = expect_end_within(smoke, LOSS_LIMIT, pid, signal.SIGKILL, 1, reason)
ok("from the engine core's death to the end", seconds)
