"""``llm-smoke all --spawn`` with vLLM's own engine: a fresh one for each smoke."""

import time

from llm_smoke_checks import ALL_PASS, expect_lines, llm_smoke, ok
from peers import VLLM_ENVIRONMENT, VLLM_OPTIONS, provision

begin = time.monotonic()
peers = provision()
command = [str(peers.vllm), "serve", str(peers.model), *VLLM_OPTIONS, "--headless"]
command += ["--max-model-len", "512", "--data-parallel-size-local", "1"]
command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "{port}"]
with llm_smoke("all", "--spawn", "--", *command, environment=VLLM_ENVIRONMENT) as smoke:
    expect_lines(smoke, 0, *ALL_PASS, timeout=500)
ok("all, each with a fresh engine", time.monotonic() - begin)
