"""Prometheus metrics under vLLM's names, for a program that drives engines itself.

Needs ``pip install '.[metrics]'`` in the clone.

    python examples/metrics.py [HANDSHAKE_ADDRESS]
"""

import sys
from functools import partial

import trio
from prometheus_client import CollectorRegistry, generate_latest

from trio_vllm import GenerateRequest, HandshakeOwner, SamplingParams, open_llm
from trio_vllm.llm.metrics import LlmMetrics


async def main(address: str = "tcp://127.0.0.1:29550") -> None:
    """Complete a few prompts and print what was counted.

    A service would call ``prometheus_client.start_http_server(8000, registry=registry)`` instead.
    """
    registry = CollectorRegistry()
    observers = [LlmMetrics(registry, model_name="my-model")]
    async with open_llm(HandshakeOwner(handshake_address=address), observers=observers) as llm:
        requests = [
            GenerateRequest(
                prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=9)
            )
        ] * 10
        async with llm.map(requests) as results:
            async for _ in results:
                pass
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith(("vllm:generation_tokens_total", "vllm:request_success_total")):
            print(line)


trio.run(partial(main, *sys.argv[1:]))
