"""``llm-smoke`` with vLLM's own engine: one, two, a killed one, and a fresh one for each smoke."""

import re
import signal
import time

from llm_smoke_checks import (
    LOSS_LIMIT,
    begin_request,
    expect_end_within,
    expect_lines,
    llm_smoke,
    ok,
)
from peers import VLLM_ENVIRONMENT, VLLM_OPTIONS, free_port, headless_engine, provision

READY = ("--ready-timeout-secs", "240")

FIVE_IDS = r"token_ids=\[\d+(, \d+){4}\]"

ALL_PASS = (
    FIVE_IDS,
    "finish_reason=length",
    r"is_sleeping\(after_sleep\)=true",
    r"is_sleeping\(after_wake\)=false",
    "new_logprobs=1 rows of 3",
    "new_prompt_logprobs_tensors=479 rows of 2",
)

LONG = ("--max-tokens", "500")
"""Tokens that the tiny model needs seconds for."""

begin = time.monotonic()
port = free_port()
with (
    headless_engine(port),
    llm_smoke("all", *READY, "--handshake-address", f"tcp://127.0.0.1:{port}") as smoke,
):
    expect_lines(smoke, 0, *ALL_PASS, timeout=300)
ok("all over one connection", time.monotonic() - begin)

begin = time.monotonic()
port = free_port()
address = f"tcp://127.0.0.1:{port}"
with (
    headless_engine(port, "--data-parallel-size", "2", "--data-parallel-size-local", "2"),
    llm_smoke("generate", *READY, "--engine-count=2", f"--handshake-address={address}") as smoke,
):
    two = r"engine_identities=\[\[0, 0\], \[1, 0\]\]"
    expect_lines(smoke, 0, two, FIVE_IDS, "finish_reason=length", timeout=300)
ok("two engines", time.monotonic() - begin)

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

begin = time.monotonic()
peers = provision()
command = [str(peers.vllm), "serve", str(peers.model), *VLLM_OPTIONS, "--headless"]
command += ["--max-model-len", "512", "--data-parallel-size-local", "1"]
command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "{port}"]
with llm_smoke("all", "--spawn", "--", *command, environment=VLLM_ENVIRONMENT) as smoke:
    expect_lines(smoke, 0, *ALL_PASS, timeout=500)
ok("all, each with a fresh engine", time.monotonic() - begin)
