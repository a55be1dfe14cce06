"""An autoscaler of 40 lines that reads a real frontend's metrics, with a mock engine that is small.

The engine has few seats and few blocks. What the frontend shows of it must be what is known of the load: requests
that run and wait, blocks in use, tokens found in the prefix cache, preemptions. The autoscaler decides on a
number of replicas; it starts none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import trio

from frontend_checks import metrics
from harness import (
    PARSERS,
    CheckError,
    eventually,
    expect,
    free_port,
    mock_engine,
    ok,
    rust_frontend,
)
from http_client import post
from provision import Peers

SEATS = 4
BLOCK = 16
BLOCKS = 24
USABLE_BLOCKS = BLOCKS - 1
"""One block of vLLM's cache is never used."""

ENGINE = (
    *("--max-num-seqs", f"{SEATS}", "--num-gpu-blocks", f"{BLOCKS}", "--block-size", f"{BLOCK}"),
    *("--max-model-len", "256", "--step-time", "20ms"),
)

LOOK_INTERVAL = 0.2
"""Seconds between two looks of the autoscaler."""

ATTEMPTS = 3

STAGES = (2, 12, 2)
"""So many clients at once, each of which asks again when it has its answer."""

STAGE_TIME = 5.0
"""Seconds that a stage takes."""

PROMPT, ANSWER = 40, 20
"""Tokens of a client's request: in the load, as many as run fit into the cache."""


@dataclass(frozen=True)
class Look:
    """What the frontend shows at one time, and what was decided then."""

    running: float
    waiting: float
    blocks: float
    replicas: int


@dataclass
class Autoscaler:
    """Decides how many replicas there should be: at once for more, and after some looks for fewer."""

    patience: int = 5
    replicas: int = 1
    _lower: int = 0

    def decide(self, running: float, waiting: float) -> int:
        """A replica for as many requests as one has seats for."""
        wanted = max(1, math.ceil((running + waiting) / SEATS))
        self._lower = self._lower + 1 if wanted < self.replicas else 0
        if wanted > self.replicas or self._lower >= self.patience:
            self.replicas, self._lower = wanted, 0
        return self.replicas


@dataclass
class Clients:
    """Requests to a frontend, no two of which begin alike unless they are told to."""

    port: int
    _numbers: count[int] = field(default_factory=lambda: count(1))

    async def ask(self, prompt_tokens: int, max_tokens: int, number: int | None = None) -> None:
        """One request; the number says which prompt it is."""
        first = next(self._numbers) if number is None else number
        prompt = [first, *range(1, prompt_tokens)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
        answer = await post(self.port, "/v1/completions", body)
        expect("tokens", answer["usage"]["completion_tokens"], max_tokens)

    async def ask_again_and_again(self) -> None:
        """What one client of the load does."""
        while True:
            await self.ask(PROMPT, ANSWER)


def main(peers: Peers) -> None:
    """Start the engine and the frontend, then look at it under one load after the other."""
    handshake, http = free_port(), free_port()
    with (
        rust_frontend(peers, handshake, http, *PARSERS) as frontend,
        mock_engine(handshake, *ENGINE),
    ):
        frontend.wait_for_http(f"http://127.0.0.1:{http}/health")
        for check in (check_prefixes, check_scaling, check_usage, check_preemptions):
            repeat(check, Clients(http))
            ok(check.__name__.removeprefix("check_"))


def repeat(check: Callable[[Clients], Awaitable[None]], clients: Clients) -> None:
    """Let one of several attempts do: on a machine with much else to do, what is shown may lag behind."""
    for attempt in range(1, ATTEMPTS):
        try:
            return trio.run(check, clients)
        except* CheckError as errors:
            print(f"attempt {attempt}: {errors.exceptions}", flush=True)
    return trio.run(check, clients)


async def check_prefixes(clients: Clients) -> None:
    """The same prompt again is found up to its last full block, another one is not."""
    length, before = 4 * BLOCK, await metrics(clients.port)
    for number in (1001, 1001, 1002):
        await clients.ask(length, 1, number)
    found = (length - 1) // BLOCK * BLOCK  # a token at least is computed, which gives the first one
    await eventually("the queries", lambda: has_more(clients, before, "queries", 3 * length))
    await eventually("the hits", lambda: has_more(clients, before, "hits", found))


async def has_more(clients: Clients, before: Counter[str], name: str, expected: int) -> bool:
    """Whether so many tokens were asked for, or found, since."""
    name = f"vllm:prefix_cache_{name}_total"
    return (await metrics(clients.port))[name] - before[name] == expected


async def check_scaling(clients: Clients) -> None:
    """Replicas follow the load, up and down, and no request of it is preempted."""
    before = await metrics(clients.port)
    async with looking(clients) as looks:
        for number in STAGES:
            begin = len(looks)
            async with trio.open_nursery() as nursery:
                for _ in range(number):
                    nursery.start_soon(clients.ask_again_and_again)
                await trio.sleep(STAGE_TIME)
                nursery.cancel_scope.cancel()
            check_stage(number, looks[begin:])
        await eventually("no request to be left", lambda: looks[-1].running == 0)
    after = await metrics(clients.port)
    expect("preemptions", preemptions(after) - preemptions(before), 0)
    expect("blocks in use at the end", looks[-1].blocks, 0)


def check_stage(number: int, looks: list[Look]) -> None:
    """The second half of the looks, as medians: the load has settled then, but for moments."""
    settled = looks[len(looks) // 2 :]
    got = [median(getattr(look, name) for look in settled) for name in ("running", "waiting")]
    expected = min(number, SEATS), max(number - SEATS, 0)
    expect(f"running and waiting of {number} clients", tuple(got), expected)
    expect(f"replicas for {number} clients", settled[-1].replicas, math.ceil(number / SEATS))
    low = expected[0] * math.ceil(PROMPT / BLOCK)
    high = expected[0] * math.ceil((PROMPT + ANSWER) / BLOCK)
    blocks = median(look.blocks for look in settled)
    if not low <= blocks <= high:
        raise CheckError(f"{blocks} blocks in use with {number} clients, not {low} to {high}")
    print(
        f"{number} clients: running, waiting {got}, blocks {blocks}, replicas {settled[-1].replicas}"
    )


@asynccontextmanager
async def looking(clients: Clients) -> AsyncIterator[list[Look]]:
    """Let the autoscaler look as long as the block runs; gives what it has seen so far."""
    looks: list[Look] = []
    autoscaler = Autoscaler()

    async def look_again_and_again() -> None:
        while True:
            looks.append(await look(clients.port, autoscaler))
            await trio.sleep(LOOK_INTERVAL)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look_again_and_again)
        yield looks
        nursery.cancel_scope.cancel()


async def look(port: int, autoscaler: Autoscaler) -> Look:
    """Read the metrics once, and decide."""
    figures = await metrics(port)
    running, waiting = figures["vllm:num_requests_running"], figures["vllm:num_requests_waiting"]
    blocks = round(figures["vllm:kv_cache_usage_perc"] * USABLE_BLOCKS, 6)
    return Look(running, waiting, blocks, autoscaler.decide(running, waiting))


async def check_usage(clients: Clients) -> None:
    """Each request has a block more with every 16 tokens, and gives all back."""
    prompt, answer = 2 * BLOCK + 1, 3 * BLOCK
    async with looking(clients) as looks:
        begin = len(looks)
        async with trio.open_nursery() as nursery:
            for _ in range(SEATS):
                nursery.start_soon(clients.ask, prompt, answer)
        seen = [look.blocks for look in looks[begin:] if look.running == SEATS]
        await eventually("all blocks to be free", lambda: looks[-1].blocks == 0)
    expect("that it only grows", seen, sorted(seen))
    at_end = math.ceil((prompt + answer - 1) / BLOCK)  # the last token is not computed
    low, high = SEATS * math.ceil(prompt / BLOCK), SEATS * at_end
    if len(set(seen)) < 2 or seen[0] < low or seen[-1] > high:
        raise CheckError(f"{seen} blocks in use by {SEATS} requests, not from {low} to {high}")
    print(f"{SEATS} requests: blocks {seen}")


async def check_preemptions(clients: Clients) -> None:
    """Requests that all fit when they begin, and not at their end, make room for each other."""
    before = await metrics(clients.port)
    async with looking(clients) as looks, trio.open_nursery() as nursery:
        for _ in range(SEATS):
            nursery.start_soon(clients.ask, PROMPT, 7 * BLOCK)
        await eventually("one to wait", lambda: any(look.waiting for look in looks))
        await eventually("it to be counted", lambda: has_preempted(clients, before))
    if (most := max(look.blocks for look in looks)) > USABLE_BLOCKS:
        raise CheckError(f"{most} blocks in use of {USABLE_BLOCKS}")


async def has_preempted(clients: Clients, before: Counter[str]) -> bool:
    """Whether the frontend tells of a preemption since."""
    return preemptions(await metrics(clients.port)) > preemptions(before)


def preemptions(figures: Counter[str]) -> float:
    """How many there were."""
    return figures["vllm:num_preemptions_total"]
