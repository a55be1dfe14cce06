"""vLLM's Python frontend shows what mock engines tell of KV transfers, under NIXL's names.

It does so if it knows of a connector itself; what it says without one is why the mock is silent unless asked.
"""

import json
import re
from typing import Any

import trio

from harness import expect, free_port, mock_engine, ok, python_frontend
from http_client import get, post
from provision import Peers

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PROMPT = [*range(100, 150)]
"""Four blocks of 16 tokens."""


def main(peers: Peers) -> None:
    """One engine computes a prompt for itself, and fetches it."""
    handshake, http, channel = free_port(), free_port(), free_port()
    options = ("--pd-role", "both", "--kv-connector-stats", "--kv-side-channel-port", str(channel))
    # With a prefix cache the engine would have most of the prompt already.
    schedule = ("--kv-cache-transfer-latency", "40ms", "--no-enable-prefix-caching")
    with (
        mock_engine(handshake, "--max-model-len", "256", *options, *schedule),
        python_frontend(
            peers, handshake, http, "--kv-transfer-config", json.dumps(CONNECTOR)
        ) as frontend,
    ):
        frontend.wait_for_http(f"http://127.0.0.1:{http}/health", 180)
        trio.run(transfer, http)
        text = trio.run(get, http, "/metrics")
    shown = {name: value_of(text, f"vllm:nixl_{name}") for name in EXPECTED}
    expect("the frontend's metrics of transfers", shown, EXPECTED)
    ok("transfers are shown as vllm:nixl_*")


EXPECTED = {
    "xfer_time_seconds_count": 1.0,
    "xfer_time_seconds_sum": 0.04,
    "bytes_transferred_sum": 4 * 16 * 131_072.0,
    "num_descriptors_sum": 256.0,
    "num_failed_transfers_total": 0.0,
    "num_kv_expired_reqs_total": 0.0,
}


async def transfer(port: int) -> None:
    """A prompt is computed for another engine, and fetched."""
    params = await complete(port, {"do_remote_decode": True, "do_remote_prefill": False})
    await complete(port, params)
    await trio.sleep(1)  # statistics come with a later message


async def complete(port: int, params: dict[str, Any]) -> dict[str, Any]:
    """Ask for a token; the transfer parameters of the answer."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}
    answer = await post(port, "/v1/completions", body)
    found: dict[str, Any] = answer["kv_transfer_params"] or {}
    return found


def value_of(text: str, name: str) -> float | None:
    """The sample of this name, if there is one."""
    found = re.search(rf"(?m)^{name}\{{.*\}} (\S+)$", text)
    return None if found is None else round(float(found[1]), 6)
