"""`generate`, `utility` and `logprobs`, the smokes, ask engines for what must hold of them.

Mirror ``rust/src/llm/examples/external_engine_smoke.rs`` and
``rust/src/engine-core-client/examples/external_engine_{utility_call,logprobs}.rs``.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import trio

from trio_vllm import (
    EngineCoreClient,
    EngineCoreRequest,
    FinishReason,
    GenerateRequest,
    Llm,
    Logprobs,
    PauseMode,
    SamplingParams,
)
from trio_vllm.cli.smoke_options import GenerateOptions, LogprobsOptions, UtilityOptions
from trio_vllm.cli.smoke_report import Report
from trio_vllm.protocol import RequestErrorInfo
from trio_vllm.values import define

PROMPT_TOKEN_IDS = [20841, 448, 6896, 25, 23811]
"""The examples' own: "Reply with exactly: hello" to a Qwen3 model."""

REQUEST_ID_PREFIX = "llm-smoke-"
"""Of all requests, so that they are found in an engine's log."""


class SmokeError(Exception):
    """The engines did not do what they must; the text says what."""


class OutputTimeoutError(SmokeError):
    """The output of a request did not come in time."""


Smoke = Callable[[Llm, Report, Any], Awaitable[None]]
"""Asks and checks; is handed the options of its command."""


def check(condition: bool, reason: str) -> None:
    """Raise `SmokeError` unless ``condition`` holds."""
    if not condition:
        raise SmokeError(reason)


async def generate(llm: Llm, report: Report, options: GenerateOptions) -> None:
    """Complete a prompt through `Llm`, whose answer must be one whole completion."""
    request = GenerateRequest(
        request_id=_new_request_id(),
        prompt_token_ids=PROMPT_TOKEN_IDS,
        sampling_params=_sampling_params(options.max_tokens),
    )
    report.put("request_id", request.request_id)
    report.put("prompt_token_ids", PROMPT_TOKEN_IDS)
    with _limit(report, options.output_timeout_secs, request.request_id):
        output = await llm.generate(request)
    report.put("token_ids", output.token_ids)
    report.put("finish_reason", str(output.finish_reason))
    check(len(output.completions) == 1, f"{len(output.completions)} final outputs instead of one")
    _check_finish(output.finish_reason, output.error, FinishReason.LENGTH, FinishReason.STOP)
    room = llm.client.max_model_len - len(PROMPT_TOKEN_IDS)
    _check_token_count(len(output.token_ids), min(options.max_tokens, room), output.finish_reason)


async def utility(llm: Llm, report: Report, options: UtilityOptions) -> None:
    """Ask whether the engines sleep, reset their caches, put them to sleep and wake them up."""
    client, timeout = llm.client, options.output_timeout_secs

    async def check_sleeping(when: str, *, expected: bool) -> None:
        report.awaited = "the answer to is_sleeping"
        sleeping = await client.is_sleeping(timeout=timeout)
        report.put(f"is_sleeping({when})", sleeping)
        text = f"is_sleeping({when}) is {sleeping}, expected was {expected}"
        check(sleeping == expected, text.lower())

    await check_sleeping("initial", expected=options.expected_is_sleeping)
    report.awaited = "the answer to reset_prefix_cache"
    was_reset = await client.reset_prefix_cache(
        reset_running_requests=options.reset_running_requests,
        reset_connector=options.reset_external,
        timeout=timeout,
    )
    report.put("reset_prefix_cache", was_reset)  # an engine at work does not: no failure
    report.awaited = "the answer to reset_mm_cache"
    await client.reset_mm_cache(timeout=timeout)
    report.put("reset_mm_cache", "ok")
    report.awaited = "the answer to reset_encoder_cache"
    await client.reset_encoder_cache(timeout=timeout)
    report.put("reset_encoder_cache", "ok")
    if options.skip_sleep_wake:
        report.put_skipped("sleep_wake")
        return
    level, mode = options.sleep_level, options.sleep_mode
    report.awaited = "the answer to sleep"
    await client.sleep(level, PauseMode(mode), timeout=timeout)
    report.put("sleep", f"ok level={level} mode={mode}")
    await check_sleeping("after_sleep", expected=True)
    report.awaited = "the answer to wake_up"
    await client.wake_up(timeout=timeout)
    report.put("wake_up", "ok")
    await check_sleeping("after_wake", expected=False)


async def logprobs(llm: Llm, report: Report, options: LogprobsOptions) -> None:
    """Complete a prompt by a bare call of the client, and look at the log probabilities."""
    prompt_token_ids = PROMPT_TOKEN_IDS * options.prompt_repeats
    request = EngineCoreRequest(
        request_id=_new_request_id(),
        prompt_token_ids=prompt_token_ids,
        sampling_params=_sampling_params(
            options.max_tokens,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
        ),
        arrival_time=0.0,
    )
    report.put("request_id", request.request_id)
    report.put("prompt_len", len(prompt_token_ids))
    report.put("base_prompt_len", len(PROMPT_TOKEN_IDS))
    report.put("prompt_repeats", options.prompt_repeats)
    report.put("requested_logprobs", options.logprobs)
    report.put("requested_prompt_logprobs", options.prompt_logprobs)
    with _limit(report, options.output_timeout_secs, request.request_id):
        answer = await _collect(llm.client, request)
    count, reason = len(answer.token_ids), answer.finish_reason
    report.put("token_ids", answer.token_ids)
    report.put("finish_reason", str(reason))
    _put_logprobs(report, "new_logprobs", answer.logprobs)
    _put_logprobs(report, "new_prompt_logprobs_tensors", answer.prompt_logprobs)
    _check_finish(reason, answer.error, FinishReason.LENGTH)
    room = llm.client.max_model_len - len(prompt_token_ids)
    _check_token_count(count, min(options.max_tokens, room), reason)


SMOKES: dict[str, Smoke] = {"generate": generate, "utility": utility, "logprobs": logprobs}


@define
class _Answer:
    """All outputs of one request."""

    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[Logprobs] = attrs.field(factory=list)
    prompt_logprobs: list[Logprobs] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    error: RequestErrorInfo | None = None


async def _collect(client: EngineCoreClient, request: EngineCoreRequest) -> _Answer:
    """Read to the end: log probabilities of the prompt come first, the others with each token."""
    answer = _Answer()
    async with client.call(request) as outputs:
        async for part in outputs:
            output = part.output
            answer.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                answer.logprobs.append(output.new_logprobs)
            if output.new_prompt_logprobs_tensors is not None:
                answer.prompt_logprobs.append(output.new_prompt_logprobs_tensors)
            answer.finish_reason, answer.error = output.finish_reason, output.error
    return answer


def _new_request_id() -> str:
    return f"{REQUEST_ID_PREFIX}{uuid.uuid4()}"


def _sampling_params(max_tokens: int, **fields: Any) -> SamplingParams:
    """The examples' own: plain sampling that ends at ``max_tokens`` and nowhere else."""
    return SamplingParams(max_tokens=max_tokens, watermarking=True, **fields)


@contextmanager
def _limit(report: Report, seconds: float, request_id: str | None) -> Iterator[None]:
    """Raise `OutputTimeoutError` if the block, which completes a request, takes too long."""
    report.awaited = f"the final output of request {request_id}"
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise OutputTimeoutError(f"{report.awaited} did not come within {seconds:g} s")


def _check_finish(reason: FinishReason | None, error: object, *expected: FinishReason) -> None:
    text = f"finish_reason is {reason}, expected was {' or '.join(map(str, expected))}"
    check(reason in expected, text if error is None else f"{text}: {error}")


def _check_token_count(count: int, limit: int, reason: FinishReason | None) -> None:
    """No token more than allowed, and none less unless something else ended the request."""
    least = limit if reason is FinishReason.LENGTH else 1
    check(least <= count <= limit, f"{count} tokens came instead of {limit}")


def _put_logprobs(report: Report, name: str, parts: list[Logprobs]) -> None:
    """Report how many rows of how many candidates came, and of each row the token itself.

    Not all of them: with -1 there are as many as the vocabulary has tokens. That there is one for each
    token the client has seen to.
    """
    rows = sum(map(len, parts))
    columns = max((part.token_ids.shape[1] for part in parts), default=0)
    finding = {
        "rows": rows,
        "columns": columns,
        "token_ids": [item for part in parts for item in part.token_ids[:, 0].tolist()],
        "logprobs": [item for part in parts for item in part.logprobs[:, 0].tolist()],
        "ranks": [item for part in parts for item in part.ranks.tolist()],
    }
    report.put(name, finding, f"{rows} rows of {columns}" if rows else "none")
