"""Several engines behind one client: balanced, pinned, and what is known of each.

mock-engine --engine-count 4 & python examples/data_parallel.py [HANDSHAKE_ADDRESS]
"""

import sys
from collections import Counter
from functools import partial

import trio

from trio_vllm import EngineCoreError, GenerateRequest, HandshakeOwner, SamplingParams, open_llm


async def main(address: str = "tcp://127.0.0.1:29550") -> None:
    """Spread 100 requests over four engines, then pin one to each."""
    mode = HandshakeOwner(handshake_address=address, engine_count=4)
    params = SamplingParams(max_tokens=8)
    async with open_llm(mode) as llm:
        requests = [
            GenerateRequest(prompt_token_ids=[n], sampling_params=params) for n in range(100)
        ]
        spread: Counter[int] = Counter()
        async with llm.map(requests, limit=32) as results:
            async for _, output in results:
                if not isinstance(output, EngineCoreError):
                    spread[output.completions[0].engine_index] += 1
        print("balanced:", dict(sorted(spread.items())))

        for index in llm.client.engine_indices:
            pinned = GenerateRequest(
                prompt_token_ids=[1], sampling_params=params, data_parallel_rank=index
            )
            output = await llm.generate(pinned)
            print(f"pinned to {index}: answered by {output.completions[0].engine_index}")


trio.run(partial(main, *sys.argv[1:]))
