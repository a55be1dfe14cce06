"""An `Llm` whose engine is the benchmark itself: messages made in advance, no sockets."""

import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ormsgpack
import trio
from trio.testing import wait_all_tasks_blocked

from bench.workers import Answer
from ready import READY
from trio_vllm import EngineCoreReadyResponse, Llm, Observer
from trio_vllm.client import run_client
from trio_vllm.protocol import EngineCoreOutput, FinishReason, defaults_of, index_of
from trio_vllm.transport import Disconnect, EngineChannels, Received

TOKEN = 31_999
ROW = defaults_of(EngineCoreOutput)
"""What a real engine writes in a row without anything, but for the id and the token ids."""

FINISH_REASON = index_of(EngineCoreOutput, "finish_reason")

Message = list[bytes]


class Feed:
    """Both directions of a connection: keeps what the client sends, gives it what is put here."""

    def __init__(self) -> None:
        self.sent: list[Sequence[bytes | memoryview]] = []
        """Since the last `settled`."""
        self.batch_limit = 1
        """How many messages the client finds waiting at most."""
        self._waiting: list[Message] = []  # the next one last
        self._news = trio.Event()
        self._used_up = trio.Event()
        self._wanted = 0
        self._enough = trio.Event()

    async def wait_sent(self, count: int) -> None:
        """Wait until the client has sent so many messages, or has them sent already."""
        self._wanted, self._enough = count, trio.Event()
        if len(self.sent) < count:
            await self._enough.wait()

    async def settled(self, count: int) -> list[str]:
        """Wait until so many requests have been sent, and forget them; gives their ids."""
        await self.wait_sent(count)
        await wait_all_tasks_blocked()
        ids = [_request_id(frames[2]) for frames in self.sent]
        self.sent.clear()
        return ids

    async def feed(self, messages: Sequence[Message]) -> None:
        """Give the client messages, and wait until it has handled them."""
        self._waiting = list(reversed(messages))
        self._used_up = trio.Event()
        self._news.set()
        await self._used_up.wait()

    async def receive_batch(self, limit: int) -> list[Received]:
        """Give what is waiting, at most ``limit`` and `batch_limit`."""
        if not self._waiting:
            self._used_up.set()  # being here, the client is done with the last one
            self._news = trio.Event()
            await self._news.wait()
        else:
            await trio.lowlevel.checkpoint()
        return self.receive_batch_nowait(limit)

    def receive_batch_nowait(self, limit: int) -> list[Received]:
        """See `receive_batch`; all comes by one connection."""
        if not self._waiting:
            raise trio.WouldBlock
        count = min(limit, self.batch_limit, len(self._waiting))
        return [(self._waiting.pop(), 7) for _ in range(count)]

    def send_nowait(self, frames: Sequence[bytes | memoryview]) -> None:
        """Take what the client sends."""
        self.sent.append(frames)
        if len(self.sent) == self._wanted:
            self._enough.set()

    async def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Take what the client sends."""
        self.send_nowait(frames)
        await trio.lowlevel.checkpoint()


def _request_id(payload: bytes | memoryview) -> str:
    fields: list[Any] = ormsgpack.unpackb(bytes(payload), option=ormsgpack.OPT_NON_STR_KEYS)
    request_id: str = fields[0]
    return request_id


@asynccontextmanager
async def unwired_llm(*observers: Observer, **stated: Any) -> AsyncIterator[tuple[Llm, Feed]]:
    """Open an `Llm` on a `Feed`; ``stated`` is what is told of the model."""
    feed = Feed()
    _, disconnects = trio.open_memory_channel[Disconnect](0)
    ready = EngineCoreReadyResponse(**READY)
    channels = EngineChannels("", "", {0: ready}, feed, feed, disconnects)
    async with run_client(channels, **stated) as client:
        yield Llm(client, observers=observers), feed


def tokens_for(request_ids: Sequence[str], *, short: bool = False) -> Message:
    """A message with a token for each request, as vLLM writes it; ``short``, as the mock does."""
    rest = [] if short else ROW[2:]
    return message([[request_id, [TOKEN], *rest] for request_id in request_ids])


def ends_of(request_ids: Sequence[str]) -> Message:
    """A message with the last token of each request."""
    ended = list(ROW)
    ended[FINISH_REASON] = FinishReason.LENGTH.value
    rows = [[request_id, [TOKEN], *ended[2:]] for request_id in request_ids]
    return message(rows, list(request_ids))


def message(rows: list[list[Any]], finished: list[str] | None = None) -> Message:
    """A message of engine 0."""
    fields = [0, rows, None, time.monotonic(), None, finished, None, None, "default"]
    return [ormsgpack.packb(fields)]


def in_trio(task: Callable[..., Awaitable[Answer]]) -> Callable[..., Answer]:
    """A task as a plain function; the values of an order become its arguments."""

    def run(**order: Any) -> Answer:
        return trio.run(functools.partial(task, **order))

    return run
