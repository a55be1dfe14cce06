"""``llm-smoke`` with mock engines: in its process, beside it, spawned, killed, missing."""

import signal
import socket
import sys
import time

from llm_smoke_checks import (
    FIVE_IDS,
    LLM_SMOKE,
    LOSS_LIMIT,
    STOP_LIMIT,
    begin_request,
    expect_end_within,
    expect_lines,
    llm_smoke,
    ok,
)
from peers import free_port
from processes import running

MOCK_ENGINE = [sys.executable, "-m", "trio_vllm", "mock-engine"]

ENDLESS = ("--max-tokens", "1000000")
"""Tokens that a mock engine needs seconds for."""

begin = time.monotonic()
with running("llm-smoke --help", [*LLM_SMOKE, "all", "--help"]) as process:
    process.wait_for_exit()
ok("help", time.monotonic() - begin)

for command in ("generate", "utility", "logprobs", "all"):
    begin = time.monotonic()
    with llm_smoke(command, "--mock") as smoke:
        expect_lines(smoke, 0, r"engine_identities=\[\[0, 0\]\]")
    ok(f"{command} --mock", time.monotonic() - begin)

begin = time.monotonic()
address = f"tcp://127.0.0.1:{free_port()}"
with (
    llm_smoke("all", "--engine-count", "2", "--handshake-address", address) as smoke,
    running("mock-engine", [*MOCK_ENGINE, "--engine-count", "2", "--handshake-address", address]),
):
    expect_lines(smoke, 0, r"engine_identities=\[\[0, 0\], \[1, 0\]\]", FIVE_IDS)
ok("two engines", time.monotonic() - begin)

begin = time.monotonic()
spawned = [*MOCK_ENGINE, "--handshake-address", "{address}"]
with llm_smoke("all", "--spawn", "--", *spawned) as smoke:
    expect_lines(smoke, 0, FIVE_IDS)
ok("all --spawn", time.monotonic() - begin)

address = f"tcp://127.0.0.1:{free_port()}"
with (
    llm_smoke("generate", *ENDLESS, "--handshake-address", address) as smoke,
    running("mock-engine", [*MOCK_ENGINE, "--handshake-address", address]) as engine,
):
    begin_request(smoke)
    reason = "engine 0 is dead: its connection was lost"
    seconds = expect_end_within(smoke, LOSS_LIMIT, engine.pid, signal.SIGKILL, 1, reason)
ok("from the engine's death to the end", seconds)

for number in (signal.SIGINT, signal.SIGTERM):
    stopped = 128 + number, f"stopped by {number.name} before it was done"
    address = f"tcp://127.0.0.1:{free_port()}"
    with llm_smoke("generate", "--verbose", "--handshake-address", address) as smoke:
        smoke.wait_for_line("waiting for HELLO")
        seconds = expect_end_within(smoke, STOP_LIMIT, smoke.pid, number, *stopped)
    ok(f"from {number.name} without engines to the end", seconds)
    with llm_smoke("generate", *ENDLESS, "--spawn", "--", *spawned) as smoke:
        begin_request(smoke)
        seconds = expect_end_within(smoke, STOP_LIMIT, smoke.pid, number, *stopped)
    ok(f"from {number.name} in mid-request to the end", seconds)

with socket.create_server(("127.0.0.1", 0)) as server:
    address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with llm_smoke("generate", "--handshake-address", address) as smoke:
        expect_lines(smoke, 1, f"llm-smoke: address {address} is already in use")

with llm_smoke("generate", "--ready-timeout-secs=0.5", f"--handshake-address={address}") as smoke:
    expect_lines(smoke, 1, "llm-smoke: startup failed while waiting for HELLO from engine 0 .*")

with llm_smoke("generate", "--mock", "--engine-count", "0") as smoke:
    expect_lines(smoke, 2, "llm-smoke: .*--engine-count.*")
print("ok failures")
