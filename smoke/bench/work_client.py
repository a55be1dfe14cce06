"""A worker that measures the client by itself, without sockets: ``python -m bench.work_client``.

Each task opens its own `Llm` on messages made in advance; CPU times are those of this process.
"""

import gc
import os
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import ormsgpack
import trio
from prometheus_client import CollectorRegistry
from trio.testing import wait_all_tasks_blocked

from bench.meters import cpu_time_of, resident_bytes
from bench.unwired import ends_of, in_trio, tokens_for, unwired_llm
from bench.work_llm import generate, request, stream
from bench.workers import Answer, answer_orders, reply
from trio_vllm import GenerateRequest, Llm, Observer, SamplingParams
from trio_vllm.llm.metrics import LlmMetrics

GROUP = 1000
"""Requests that are made before their first tokens come."""


# Outputs ----------------------------------------------------------------------------------------


async def dispatch(*, concurrency: int, steps: int, short: bool) -> Answer:
    """Hand out tokens to requests that are waited for to their end; the yardstick only unpacks."""
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(generate, llm, request(max_tokens=steps + 1))
        ids = await feed.settled(concurrency)
        step, last = tokens_for(ids, short=short), ends_of(ids)
        yardstick = cpu_time_of(lambda: ormsgpack.unpackb(step[0]), steps)
        feed.batch_limit = 16
        begin = time.process_time()
        await feed.feed([step] * steps)
        seconds = time.process_time() - begin
        await feed.feed([last])
    outputs = concurrency * steps
    return {"value": outputs / seconds, "yardstick": outputs / yardstick}


async def observed(*, concurrency: int, steps: int) -> Answer:
    """Hand out tokens with an observer that keeps metrics; the yardstick does so without."""
    metrics = LlmMetrics(CollectorRegistry())
    return {
        "value": await dispatched(concurrency, steps, metrics),
        "yardstick": await dispatched(concurrency, steps),
    }


async def dispatched(concurrency: int, steps: int, *observers: Observer) -> float:
    """Tokens per CPU second, to requests that are waited for to their end."""
    async with unwired_llm(*observers) as (llm, feed), trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(generate, llm, request(max_tokens=steps + 1))
        ids = await feed.settled(concurrency)
        step, last = tokens_for(ids), ends_of(ids)
        feed.batch_limit = 16
        begin = time.process_time()
        await feed.feed([step] * steps)
        seconds = time.process_time() - begin
        await feed.feed([last])
    return concurrency * steps / seconds


async def wake_ups(*, concurrency: int, steps: int) -> Answer:
    """Wake the readers of streams for every token; the yardstick only wakes bare tasks."""
    yardstick = await bare_wake_ups(concurrency, steps)
    deliveries = 0

    async def read(llm: Llm) -> None:
        nonlocal deliveries
        count = await stream(llm, request(max_tokens=steps + 1))
        deliveries += count

    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(read, llm)
        ids = await feed.settled(concurrency)
        step, last = tokens_for(ids), ends_of(ids)
        begin = time.process_time()
        await feed.feed([step] * steps)
        await feed.feed([last])
        await wait_all_tasks_blocked()
        seconds = time.process_time() - begin
    return {"value": deliveries / seconds, "yardstick": yardstick}


async def bare_wake_ups(concurrency: int, steps: int) -> float:
    """How often trio can wake tasks that do nothing, per CPU second."""
    sleeping: list[trio.lowlevel.Task] = []

    async def sleep_over_and_over() -> None:
        for _ in range(steps):
            sleeping.append(trio.lowlevel.current_task())
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.SUCCEEDED)

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(sleep_over_and_over)
        await wait_all_tasks_blocked()
        begin = time.process_time()
        for _ in range(steps):
            woken = sleeping[:]
            sleeping.clear()
            for task in woken:
                trio.lowlevel.reschedule(task)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()  # after this one all of them have run
        seconds = time.process_time() - begin
    return concurrency * steps / seconds


# Requests ---------------------------------------------------------------------------------------


async def submissions(*, count: int, prompt_length: int) -> Answer:
    """CPU microseconds from the call of `Llm.generate` until it waits, its task included."""
    prompt = list(range(1, prompt_length + 1))
    wanted = GenerateRequest(prompt_token_ids=prompt, sampling_params=SamplingParams())
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:
        begin = time.process_time()
        for _ in range(count):
            nursery.start_soon(llm.generate, wanted)
        await feed.wait_sent(count)
        seconds = time.process_time() - begin
        raw = ormsgpack.unpackb(bytes(feed.sent[0][2]))
        yardstick = cpu_time_of(lambda: ormsgpack.packb(raw), count)
        nursery.cancel_scope.cancel()
    return {"value": seconds / count * 1e6, "yardstick": yardstick / count * 1e6}


# Memory -----------------------------------------------------------------------------------------


async def memory(*, count: int) -> NoReturn:
    """Bytes of a request that waits for its second token; those of a task that only sleeps.

    It is the last task of a worker.
    """
    async with unwired_llm() as (llm, feed), trio.open_nursery() as nursery:
        bare = await growth(lambda: sleepers(nursery, count))

        async def submit() -> None:
            wanted = request(max_tokens=1000)
            for _ in range(count // GROUP):
                for _ in range(GROUP):
                    nursery.start_soon(llm.generate, wanted)
                ids = await feed.settled(GROUP)
                await feed.feed([tokens_for(ids)])

        ours = await growth(submit)
        reply(value=ours / count, yardstick=bare / count)
        os._exit(0)  # to end so many tasks would take longer than to start them


async def sleepers(nursery: trio.Nursery, count: int) -> None:
    """Start tasks that do nothing."""
    for _ in range(count):
        nursery.start_soon(trio.sleep_forever)
    await wait_all_tasks_blocked()


async def growth(work: Callable[[], Awaitable[None]]) -> int:
    """By how many bytes the process grows."""
    gc.collect()
    gc.disable()  # else it would look at all of it again and again
    before = resident_bytes([os.getpid()])
    await work()
    grown = resident_bytes([os.getpid()]) - before
    gc.enable()
    return grown


if __name__ == "__main__":
    tasks = (dispatch, observed, wake_ups, submissions, memory)
    answer_orders({task.__name__: in_trio(task) for task in tasks})
