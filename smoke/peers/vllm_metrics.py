"""Go through a plan of requests with vLLM's own `AsyncLLM`, to be run by vLLM's Python.

``python vllm_metrics.py MODEL PLAN RESULT RUNNER``: the plan is a JSON list of steps, see
``metrics_plan.py``; the result is the text of the registry of vLLM's own `PrometheusStatLogger`, written when
all is done.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM


def main() -> None:
    """Read the plan, go through it, and write."""
    model, plan, result, runner = sys.argv[1:]
    text = asyncio.run(work(model, json.loads(Path(plan).read_text()), runner))
    partial = Path(f"{result}.partial")
    partial.write_text(text)
    partial.replace(result)  # whole or not at all


async def work(model: str, plan: list[dict[str, Any]], runner: Any) -> str:
    """Start an engine, go through the plan, and end it; gives the metrics."""
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            runner=runner,
            load_format="dummy",
            enforce_eager=True,
            dtype="float32",
            max_model_len=512,
            block_size=32,
        )
    )
    try:
        for number, step in enumerate(plan):
            await take(llm, step, str(number))
        await asyncio.sleep(1)  # the last statistics come after the last output
        return generate_latest(REGISTRY).decode()
    finally:
        llm.shutdown()


async def take(llm: AsyncLLM, step: dict[str, Any], name: str) -> None:
    """One step: a group of requests at once, under whatever circumstances."""
    if mode := step.get("paused"):
        await llm.pause_generation(mode=mode, clear_cache=False)
    tasks = [
        asyncio.create_task(ask(llm, request, f"{name}-{number}"))
        for number, request in enumerate(step["requests"])
    ]
    if step.get("leave"):
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
    if step.get("abort"):
        await asyncio.sleep(0.5)
        await llm.pause_generation(mode="abort", clear_cache=False)
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            outcome = await task
            assert bool(outcome) is bool(step.get("refused")), (step, outcome)
    if mode:
        await llm.resume_generation()


async def ask(llm: AsyncLLM, request: dict[str, Any], name: str) -> str:
    """One request; gives why it was refused."""
    prompt = {"prompt_token_ids": request["prompt"]}
    params = dict(request["params"])
    try:
        if request.get("pool"):
            pooling = PoolingParams(**params)
            outputs: Any = llm.encode(prompt, pooling, name)
        else:
            if choice := params.pop("choice", None):
                params["structured_outputs"] = StructuredOutputsParams(choice=choice)
            if bias := params.get("logit_bias"):
                params["logit_bias"] = {int(token): value for token, value in bias.items()}
            ignores = not params.pop("ends", False)
            sampling = SamplingParams(
                **params, ignore_eos=ignores, output_kind=RequestOutputKind.DELTA
            )
            outputs = llm.generate(prompt, sampling, name)
        async for _ in outputs:
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
