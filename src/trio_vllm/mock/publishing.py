"""`publishing_kv_events`: an engine's KV-cache events on sockets, for routers that follow its cache."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

from trio_vllm.concurrency import running
from trio_vllm.errors import ConfigurationError
from trio_vllm.mock.config import KvEventsOptions, MockEngineConfig
from trio_vllm.mock.engine import MockEngine
from trio_vllm.mock.kv_events import EventPublisher, offset_port
from trio_vllm.protocol import pack
from trio_vllm.transport import KvEventSockets, open_kv_event_sockets
from trio_vllm.values import define


def _endpoints(config: KvEventsOptions, engine_index: int) -> tuple[str, str | None]:
    try:
        replay = config.replay_endpoint
        return (
            offset_port(config.endpoint, engine_index),
            None if replay is None else offset_port(replay, engine_index),
        )
    except ValueError as error:
        raise ConfigurationError(f"kv_events_config: {error}, as several engines take") from None


@define(eq=False)
class KvEventFeed:
    """The sockets of one engine, and what goes out there for the `MockEngine` of the moment."""

    _config: KvEventsOptions
    _engine_index: int
    _sockets: KvEventSockets
    _clock: Callable[[], float]
    _publisher: EventPublisher = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from 0 again: the engine begins with an empty cache."""
        self._publisher = EventPublisher(
            pack,
            topic=self._config.topic,
            data_parallel_rank=self._engine_index,
            buffer_steps=self._config.buffer_steps,
        )

    def publish_from(self, engine: MockEngine) -> None:
        """Publish what an engine has noted."""
        for events in engine.pop_kv_events():
            self._sockets.publish(self._publisher.publish(events, self._clock()))

    async def answer_replays(self) -> None:
        """Task: repeat what is asked for."""
        await trio.lowlevel.checkpoint()
        while self._sockets.repeats:
            request = await self._sockets.receive_request()
            for frames in self._publisher.replay([bytes(frame) for frame in request]):
                await self._sockets.answer(frames)


@asynccontextmanager
async def publishing_kv_events(
    config: MockEngineConfig, engine_index: int, *, clock: Callable[[], float] = time.time
) -> AsyncIterator[KvEventFeed | None]:
    """Open the sockets of one engine, if it publishes its events.

    Raises:
      ConfigurationError: An address is unusable.
      AddressInUseError: An address is taken.
    """
    events = config.kv_events
    if events is None:
        yield None
        return
    endpoint, replay_endpoint = _endpoints(events, engine_index)
    async with open_kv_event_sockets(
        endpoint,
        replay_endpoint,
        high_water_mark=events.hwm,
        replay_limit=2 * (events.buffer_steps + 1),
    ) as sockets:
        feed = KvEventFeed(events, engine_index, sockets, clock)
        async with running(partial(feed.answer_replays)):
            yield feed
