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

PROMPT_LENGTH = 32
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
    await complete(llm, prompt(PROMPT_LENGTH), sampling("generate", max_tokens=1))
    reply(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply(**await keep_busy(llm, **json.loads(line)))
    llm.shutdown()


def reply(**answer: Any) -> None:
    """Answer an order."""
    print(json.dumps(answer), file=answers, flush=True)


def prompt(length: int) -> dict[str, list[int]]:
    """Token ids as vLLM takes them."""
    return {"prompt_token_ids": list(range(1, length + 1))}


def sampling(task: str, **asked: Any) -> SamplingParams:
    """What is asked for, without text."""
    return SamplingParams(ignore_eos=True, detokenize=False, output_kind=KINDS[task], **asked)


async def complete(llm: AsyncLLM, wanted: Any, params: SamplingParams) -> int:
    """Complete a prompt; gives how often we were woken."""
    tokens = deliveries = 0
    outputs: AsyncIterator[Any] = llm.generate(wanted, params, uuid.uuid4().hex)
    async for output in outputs:
        tokens += len(output.outputs[0].token_ids)
        deliveries += 1
    assert tokens == params.max_tokens
    if params.logprobs is not None:
        assert output.outputs[0].logprobs
    if params.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == len(wanted["prompt_token_ids"])
    return deliveries


async def keep_busy(
    llm: AsyncLLM,
    *,
    task: str,
    concurrency: int,
    seconds: float,
    prompt_length: int = PROMPT_LENGTH,
    **asked: Any,
) -> dict[str, Any]:
    """Keep ``concurrency`` requests in flight, and start no more after ``seconds``."""
    wanted, params = prompt(prompt_length), sampling(task, **asked)
    requests = deliveries = 0
    begin, cpu = time.perf_counter(), time.process_time()

    async def one_after_another() -> None:
        nonlocal requests, deliveries
        while time.perf_counter() - begin < seconds:
            # += would read its old value too early
            count = await complete(llm, wanted, params)
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
