"""Complete a prompt with vLLM's own `AsyncLLM`, to be run by vLLM's Python.

``python vllm_generate.py MODEL REQUEST RESULT``: the two files hold JSON. The result is written when
all is done: the token ids, and what is known of the candidates of each position of the output and of
the prompt, by token id.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


def main() -> None:
    """Read what to ask, ask, and write."""
    model, request, result = sys.argv[1:]
    answer = asyncio.run(ask(model, **json.loads(Path(request).read_text())))
    partial = Path(f"{result}.partial")
    partial.write_text(json.dumps(answer))
    partial.replace(result)  # whole or not at all


async def ask(model: str, **request: Any) -> dict[str, Any]:
    """Start an engine, complete one prompt, and end it."""
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            load_format="dummy",
            enforce_eager=True,
            dtype="float32",
            max_model_len=512,
            skip_tokenizer_init=True,
        )
    )
    try:
        return await complete(llm, **request)
    finally:
        llm.shutdown()


async def complete(llm: AsyncLLM, prompt_token_ids: list[int], **params: Any) -> dict[str, Any]:
    """Complete one prompt."""
    sampling = SamplingParams(
        **params, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    prompt = {"prompt_token_ids": prompt_token_ids}
    (output,) = [output async for output in llm.generate(prompt, sampling, "reference")]
    (completion,) = output.outputs
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [plain(position) for position in completion.logprobs],
        "prompt_logprobs": [plain(position) for position in output.prompt_logprobs],
    }


def plain(position: Mapping[int, Any] | None) -> dict[int, list[float]] | None:
    """The logprob and the rank of each candidate; there are none for the first token of all."""
    if position is None:
        return None
    return {token_id: [entry.logprob, entry.rank] for token_id, entry in position.items()}


if __name__ == "__main__":
    main()
