"""Mock engines in lockstep, led by our own coordinator."""

from __future__ import annotations

from pathlib import Path

import trio

from trio_vllm.client import EngineCoreClient, open_client
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines
from trio_vllm.protocol import EngineCoreRequest, SamplingParams
from trio_vllm.transport import HandshakeOwner


async def generate(client: EngineCoreClient, request_id: str, rank: int | None = None) -> None:
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=5),
        data_parallel_rank=rank,
    )
    async with client.call(request) as outputs:
        tokens = [token async for item in outputs for token in item.output.new_token_ids]
    assert len(tokens) == 5


async def test_waves(tmp_path: Path) -> None:
    """Each engine gets a turn to begin a wave; then all work at once."""
    address = f"ipc://{tmp_path}/handshake"
    mode = HandshakeOwner(handshake_address=address, engine_count=3, coordinator=True)
    config = MockEngineConfig(lockstep=True)
    options = ServeOptions(handshake_address=address, engine_count=3)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_mock_engines, config, options)
            async with open_client(mode) as client:
                assert client.engine_info.data_parallel_size == 3
                for rank in (1, 0, 2, 2):
                    await generate(client, f"alone-{rank}", rank)
                async with trio.open_nursery() as requests:
                    for number in range(30):
                        requests.start_soon(generate, client, f"together-{number}")
                assert client.is_healthy
            nursery.cancel_scope.cancel()
