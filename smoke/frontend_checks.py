"""What a vLLM frontend must be able to do with mock engines, whichever frontend it is."""

import re
import signal
import time
from collections import Counter

import trio

from harness import eventually, expect
from http_client import events, get, post
from processes import Process

PACE = ("--step-interval", "0.005")
"""Options of the mock engine. As fast as it can be, it has made all tokens before a frontend, busy
with what it has got already, sees that somebody leaves.
"""

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 16,
}
"""The request of the README."""

LONG = 40_000
"""Tokens of a request that is not to end by itself; more the frontends refuse that look at the
model's length."""

REQUESTS = 500
CROWD = 40
"""Requests that run while we look at the frontend's figures."""


def check_frontend(port: int, mock: Process, engine_count: int, server_count: int = 1) -> None:
    """Go through all checks; the frontend has so many processes that serve HTTP."""
    for check in (check_stream, check_many, check_figures, check_disconnect):
        begin = time.monotonic()
        trio.run(check, port, mock, engine_count, server_count)
        name = check.__name__.removeprefix("check_")
        print(f"ok {name} {time.monotonic() - begin:.1f} s", flush=True)
    check_summary(mock)


async def check_stream(port: int, mock: Process, engine_count: int, server_count: int) -> None:
    """The README's request streams its tokens and ends with their number."""
    before = Log(mock)
    texts, reasons, usage = [], [], None
    body = {**CHAT, "stream_options": {"include_usage": True}}
    async with events(port, "/v1/chat/completions", body) as received:
        async for event in received:
            for choice in event["choices"]:
                texts.append(choice["delta"].get("content") or "")
                reasons.append(choice.get("finish_reason"))
            usage = event.get("usage") or usage
    expect("finish reasons", [reason for reason in reasons if reason], ["length"])
    expect("tokens", usage and usage["completion_tokens"], 16)
    # How many tokens an event has is the frontend's business: these engines are faster than it.
    expect("that there is a text", any(texts), True)
    await eventually("the request to be logged", lambda: Log(mock).finished - before.finished == 1)


async def check_many(port: int, mock: Process, engine_count: int, server_count: int) -> None:
    """Hundreds of requests of mixed lengths each get just the tokens that they asked for."""
    lengths = [1 + i * 7 % 200 for i in range(REQUESTS)]
    before = Log(mock)

    async def ask(length: int) -> None:
        body = {"model": "tiny", "prompt": [1, 2, 3] * (1 + length), "max_tokens": length}
        answer = await post(port, "/v1/completions", body)
        (choice,) = answer["choices"]
        got = answer["usage"]["completion_tokens"], choice["finish_reason"]
        expect("the completion", got, (length, "length"))

    async with trio.open_nursery() as nursery:
        for length in lengths:
            nursery.start_soon(ask, length)
    await eventually("all to be logged", lambda: Log(mock).finished - before.finished == REQUESTS)
    expect("engines that served", set(Log(mock).served), set(range(engine_count)))
    expect("tokens", Log(mock).tokens - before.tokens, sum(lengths))


async def check_figures(port: int, mock: Process, engine_count: int, server_count: int) -> None:
    """The frontend's metrics agree with what the engines have logged."""
    log = Log(mock)
    await eventually("all tokens to be counted", lambda: count_tokens(port, log.tokens))
    figures = await metrics(port)
    expect("finished requests", figures["vllm:request_success_total"], log.finished)
    expect("prompt tokens", figures["vllm:prompt_tokens_total"], log.prompt_tokens)

    async with trio.open_nursery() as nursery:
        for _ in range(CROWD):
            nursery.start_soon(read_endlessly, port)
        await eventually("a crowd to run", lambda: has_running(port, CROWD))
        nursery.cancel_scope.cancel()
    await eventually("the crowd to be gone", lambda: has_none_left(port, server_count))
    await eventually("all to be aborted", lambda: Log(mock).aborted - log.aborted == CROWD)


async def check_disconnect(port: int, mock: Process, engine_count: int, server_count: int) -> None:
    """A client that leaves in the middle shows as an abort, and nothing is left of it."""
    before = Log(mock)
    async with events(port, "/v1/chat/completions", {**CHAT, "max_tokens": LONG}) as received:
        for _ in range(5):
            await anext(received)
    await eventually("one abort", lambda: Log(mock).aborted - before.aborted == 1)
    expect("requests left", Log(mock).started - Log(mock).finished - Log(mock).aborted, 0)


def check_summary(mock: Process) -> None:
    """At its end the mock sums up what it has logged."""
    log = Log(mock)
    mock.send_signal(signal.SIGINT)
    expect("the exit code", mock.wait_for_exit(20), 0)
    figures = dict(re.findall(r"(\w+)=(\d+)", mock.wait_for_line("summary: ", 5)))
    expect("requests", int(figures["requests"]), log.started)
    expect("tokens", int(figures["tokens"]), log.tokens)
    expect("finished", int(figures["finished"]), log.finished)
    expect("aborted", int(figures["aborted"]), log.aborted)
    expect("errors", int(figures["errors"]), 0)


async def read_endlessly(port: int) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": LONG}
    async with events(port, "/v1/completions", body) as received:
        async for _ in received:
            pass


class Log:
    """What the engines have logged so far."""

    def __init__(self, mock: Process) -> None:
        text = mock.log()
        ended = re.findall(
            r"engine (\d+): request (finished|aborted) .*? prompt_len=(\d+) output_tokens=(\d+)",
            text,
        )
        how = Counter(end for _, end, _, _ in ended)
        self.started = len(re.findall("request taken ", text))
        self.finished, self.aborted = how["finished"], how["aborted"]
        self.served = Counter(int(engine) for engine, end, _, _ in ended if end == "finished")
        self.tokens = sum(int(tokens) for _, _, _, tokens in ended)
        self.prompt_tokens = sum(int(prompt) for _, _, prompt, _ in ended)


async def metrics(port: int) -> Counter[str]:
    """The frontend's figures, summed over engines and everything else."""
    figures: Counter[str] = Counter()
    for line in (await get(port, "/metrics")).splitlines():
        if found := re.fullmatch(r"([a-z_:]+)(?:\{.*\})? (\S+)", line):
            figures[found[1]] += float(found[2])  # type: ignore[assignment]
    return figures


async def count_tokens(port: int, count: int) -> bool:
    return (await metrics(port))["vllm:generation_tokens_total"] == count


async def has_running(port: int, count: int) -> bool:
    return (await metrics(port))["vllm:num_requests_running"] == count


async def has_none_left(port: int, server_count: int) -> bool:
    """Whether nothing runs any more, as far as the frontend shows.

    An engine tells one of several servers, with the next message that it has for any. The one that
    was told earlier may show that later, for good, until there is a request and news with it.
    """
    if await has_running(port, 0):
        return True
    if server_count > 1:
        await post(port, "/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 1})
    return False
