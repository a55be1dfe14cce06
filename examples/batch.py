"""Complete many prompts: JSON lines in, JSON lines out.

Each input line is an object with ``prompt_token_ids`` and, if wanted, ``max_tokens``; each output
line has the number of its input line, and the completion or what went wrong.

    python examples/batch.py prompts.jsonl completions.jsonl [HANDSHAKE_ADDRESS]
"""

import json
import sys
from collections.abc import Iterator
from functools import partial

import trio

from trio_vllm import EngineCoreError, GenerateRequest, HandshakeOwner, SamplingParams, open_llm


def read_requests(path: str) -> Iterator[GenerateRequest]:
    """The requests of a file, each with the number of its line as its id."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            item = json.loads(line)
            yield GenerateRequest(
                request_id=str(number),
                prompt_token_ids=item["prompt_token_ids"],
                sampling_params=SamplingParams(max_tokens=item.get("max_tokens", 64)),
            )


async def main(prompts: str, completions: str, address: str = "tcp://127.0.0.1:29550") -> None:
    """Take requests from the one file as there is room, and write to the other as they end."""
    mode = HandshakeOwner(handshake_address=address)
    async with open_llm(mode) as llm, await trio.open_file(completions, "w") as out:
        async with llm.map(read_requests(prompts), limit=256, retries=2) as results:
            async for request, output in results:
                if isinstance(output, EngineCoreError):
                    answer: dict[str, object] = {"error": str(output)}
                else:
                    answer = {
                        "token_ids": output.token_ids,
                        "finish_reason": output.finish_reason.name.lower(),
                    }
                await out.write(json.dumps({"line": request.request_id, **answer}) + "\n")


trio.run(partial(main, *sys.argv[1:]))
