"""A loop as in reinforcement learning: sample, learn, give the engine new weights, sample again.

The learning is left out. Each completion tells which version of the weights made which of its
tokens, so that those of an older version can be weighted or dropped.

    python examples/rl_loop.py [HANDSHAKE_ADDRESS]
"""

import sys
from functools import partial

import trio

from trio_vllm import GenerateRequest, HandshakeOwner, Llm, PauseMode, SamplingParams, open_llm

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
SAMPLES_PER_PROMPT = 4
ROUNDS = 3


async def sample(llm: Llm) -> list[tuple[str, float]]:
    """The version and the summed log probability of each sampled completion."""
    requests = [
        GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(n=SAMPLES_PER_PROMPT, max_tokens=16, logprobs=0),
        )
        for prompt in PROMPTS
    ]
    samples = []
    async with llm.map(requests) as results:
        async for _, output in results:
            if isinstance(output, Exception):
                raise output
            for completion in output.completions:
                assert completion.logprobs is not None
                total = sum(position.token.logprob for position in completion.logprobs)
                samples.append((completion.weight_versions[-1].version, total))
    return samples


async def give_weights(llm: Llm, version: str) -> None:
    """Let the engine take new weights while nothing runs, and name them."""
    client = llm.client
    await client.pause_generation(PauseMode.KEEP)
    # Here the trainer sends: client.start_weight_update(), client.update_weights(...), …
    await client.reset_prefix_cache()  # what is cached was computed with the old weights
    await client.set_weight_version(version)
    await client.resume_scheduler()


async def main(address: str = "tcp://127.0.0.1:29550") -> None:
    """Three rounds."""
    async with open_llm(HandshakeOwner(handshake_address=address)) as llm:
        for number in range(ROUNDS):
            await give_weights(llm, f"step-{number}")
            samples = await sample(llm)
            versions = sorted({version for version, _ in samples})
            print(f"round {number}: {len(samples)} samples of {', '.join(versions)}")


trio.run(partial(main, *sys.argv[1:]))
