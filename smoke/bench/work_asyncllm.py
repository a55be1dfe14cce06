"""A worker with vLLM's own Python client on a connected engine, to be run by vLLM's Python.

``python work_asyncllm.py PORT MODEL``. It understands the orders of ``work_llm.py``, as far as they
are about load: token ids in and out, no detokenisation.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

# What vLLM prints must not get between the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

PROMPT = list(range(1, 33))
KINDS = {"generate": RequestOutputKind.FINAL_ONLY, "stream": RequestOutputKind.DELTA}


async def main() -> None:
    """Connect, say so, and do what is ordered until there are no more orders."""
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=sys.argv[2],
            load_format="dummy",
            enforce_eager=True,
            dtype="float32",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            data_parallel_address="127.0.0.1",
            data_parallel_rpc_port=int(sys.argv[1]),
            data_parallel_size=1,
            data_parallel_size_local=0,
        )
    )
    await complete(llm, "generate", 1)
    reply(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply(**await keep_busy(llm, **json.loads(line)))
    llm.shutdown()


def reply(**answer: Any) -> None:
    """Answer an order."""
    print(json.dumps(answer), file=answers, flush=True)


async def complete(llm: AsyncLLM, kind: str, max_tokens: int) -> int:
    """Complete a prompt; gives how often we were woken."""
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=KINDS[kind]
    )
    tokens = deliveries = 0
    outputs: AsyncIterator[Any] = llm.generate(
        {"prompt_token_ids": PROMPT}, params, uuid.uuid4().hex
    )
    async for output in outputs:
        tokens += len(output.outputs[0].token_ids)
        deliveries += 1
    assert tokens == max_tokens
    return deliveries


async def keep_busy(
    llm: AsyncLLM, *, task: str, concurrency: int, max_tokens: int, seconds: float
) -> dict[str, Any]:
    """Keep ``concurrency`` requests in flight, and start no more after ``seconds``."""
    requests = deliveries = 0
    begin, cpu = time.perf_counter(), time.process_time()

    async def one_after_another() -> None:
        nonlocal requests, deliveries
        while time.perf_counter() - begin < seconds:
            count = await complete(llm, task, max_tokens)  # += would read its old value too early
            deliveries += count
            requests += 1

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return {
        "requests": requests,
        "deliveries": deliveries,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }


if __name__ == "__main__":
    asyncio.run(main())
