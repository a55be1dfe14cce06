"""Mock engines behind a frontend: joining it, serving it, and doing both again with the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import trio
from attrs.validators import and_, ge, gt, le

from trio_vllm.concurrency import running
from trio_vllm.errors import (
    ConfigurationError,
    EngineCoreError,
    EngineDeadError,
    InternalError,
    StartupError,
)
from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.engine import MockEngine
from trio_vllm.mock.events import Summary, log, log_entries
from trio_vllm.mock.runner import EngineLoop, Lockstep, clock
from trio_vllm.protocol import MAX_ENGINES, EngineCoreReadyResponse, HandshakeInit
from trio_vllm.transport import (
    DESCRIPTORS_PER_ENGINE,
    FrontendChannels,
    FrontendDisconnect,
    join_frontend,
    require_descriptors,
)

RETRY_DELAY = 0.5
"""Seconds from the loss of a frontend to the first word to the next."""

REPORT_INTERVAL = 30.0
"""Seconds between two log lines that say that there is no frontend yet."""

OUTPUT_HIGH_WATER_MARK = 1000
"""Messages that a client may be behind before its engines stop and wait for it."""

LAST_OUTPUTS_TIME = 2.0
"""Seconds that a frontend may take, once requests are aborted, to make room for what tells it."""


def _check_count(instance: ServeOptions, _attribute: Any, count: int) -> None:
    last = instance.start_index + count - 1
    if last >= MAX_ENGINES:
        raise ValueError(f"engine_count: the last engine would be {last}, not {MAX_ENGINES - 1}")


@attrs.frozen(kw_only=True)
class ServeOptions:
    """Where mock engines serve, how many, and for how long; `ValueError` for nonsense."""

    handshake_address: str = "tcp://127.0.0.1:29550"
    """Where the frontend waits for engines."""
    start_index: int = attrs.field(default=0, validator=and_(ge(0), le(MAX_ENGINES - 1)))
    engine_count: int = attrs.field(default=1, validator=and_(ge(1), _check_count))
    """How many engines, from ``start_index`` on."""
    reconnect: bool = True
    """Whether to wait for another frontend when the one that was served has gone."""
    step_interval: float = attrs.field(default=0.0, validator=ge(0.0))
    """Seconds between the steps of an engine, at least. 0 is as fast as can be, which is more than
    some frontends stand: they only get to anything else once they have caught up."""
    startup_timeout: float = attrs.field(default=math.inf, validator=gt(0.0))
    """Seconds that each answer of the frontend may take during the startup."""
    shutdown_timeout: float = attrs.field(default=0.0, validator=ge(0.0))
    """Seconds that requests may take to end once a shutdown is asked for; 0 aborts them."""


async def serve_mock_engines(
    config: MockEngineConfig,
    options: ServeOptions,
    *,
    shutdown: trio.Event | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> Summary:
    """Run mock engines until ``shutdown`` is set; gives the counts of them all.

    For `trio.Nursery.start` it has started when every engine has joined a frontend, which has to
    come from somewhere else meanwhile.

    Raises:
      EngineDeadError: One engine could not go on, or could not start, which has ended the others.
        Without ``reconnect`` that includes that its frontend has gone or has not come in time.
      ConfigurationError: ``handshake_address`` is unusable.
      InternalError: An engine crashed.

    Cancellation:
      Ends the engines at once; their requests are neither drained nor aborted.
    """
    shutdown = trio.Event() if shutdown is None else shutdown
    service = _Service(config, options, shutdown, on_joined=lambda: task_status.started())
    await service.run()
    return service.summary


@attrs.define
class _Service:
    """The engines of one call."""

    _config: MockEngineConfig
    _options: ServeOptions
    _shutdown: trio.Event
    _on_joined: Callable[[], None]
    summary: Summary = attrs.field(factory=Summary, init=False)
    _lockstep: Lockstep = attrs.field(factory=Lockstep, init=False)
    _missing: set[int] = attrs.field(init=False)
    """Engines that have not joined a frontend since the start."""
    _failure: Exception | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        first = self._options.start_index
        self._missing = set(range(first, first + self._options.engine_count))

    async def run(self) -> None:
        """Run all engines; the failure of one is the failure of all."""
        first, last = min(self._missing), max(self._missing)
        engines = f"engine {first}" if first == last else f"engines {first} to {last}"
        require_descriptors(
            DESCRIPTORS_PER_ENGINE * len(self._missing),
            f"{len(self._missing)} engines",
            hint=", or spread the engines over more processes (--processes)",
        )
        log.info("%s: joining the frontend at %s", engines, self._options.handshake_address)
        async with trio.open_nursery() as nursery:
            for engine_index in sorted(self._missing):
                nursery.start_soon(self._guard, engine_index, nursery.cancel_scope)
        if self._failure is not None:
            raise self._failure

    async def _guard(self, engine_index: int, all_engines: trio.CancelScope) -> None:
        await trio.lowlevel.checkpoint()
        try:
            await self._run_engine(engine_index)
        except Exception as error:  # whatever it is: half of the engines is worse than none
            if self._failure is None:
                self._failure = _failure_of(engine_index, error)
                all_engines.cancel(reason=f"engine {engine_index} failed")

    async def _run_engine(self, engine_index: int) -> None:
        """Serve one frontend after the other."""
        await trio.lowlevel.checkpoint()
        while not self._shutdown.is_set():
            try:
                gone = await self._serve_frontend(engine_index)
            except StartupError as error:
                if not self._options.reconnect:
                    raise
                log.warning("engine %d: %s", engine_index, error)
            else:
                if gone is None:
                    return
                if not self._options.reconnect:
                    raise EngineDeadError(engine_index, f"the frontend has gone ({gone})")
                log.warning("engine %d: the frontend has gone (%s)", engine_index, gone)
            with trio.move_on_after(RETRY_DELAY):
                await self._shutdown.wait()

    async def _serve_frontend(self, engine_index: int) -> str | None:
        """Join a frontend and serve it; gives which address has gone, None after a shutdown."""
        life = _Life(self._options.shutdown_timeout)
        with life.scope:
            async with (
                running(
                    partial(life.end_on, self._shutdown), partial(self._report, engine_index, life)
                ),
                join_frontend(
                    self._options.handshake_address,
                    engine_index=engine_index,
                    ready_response=partial(self._ready_response, engine_index),
                    timeout=self._options.startup_timeout,
                    output_high_water_mark=OUTPUT_HIGH_WATER_MARK,
                ) as links,
            ):
                await self._serve(engine_index, links, life)
        return life.lost_address

    def _ready_response(self, engine_index: int, init: HandshakeInit) -> EngineCoreReadyResponse:
        size = 1
        if self._config.lockstep:
            known = init.parallel_config.get("data_parallel_size")
            ours = self._options.start_index + self._options.engine_count
            size = known if isinstance(known, int) else ours
        return self._config.ready_response(
            engine_index,
            data_parallel_size=size,
            dp_stats_address=init.addresses.frontend_stats_publish_address,
        )

    async def _report(self, engine_index: int, life: _Life) -> None:
        """Task: say from time to time that there is no frontend."""
        await trio.lowlevel.checkpoint()
        while life.loop is None:
            await trio.sleep(REPORT_INTERVAL)
            if engine_index == min(self._missing, default=None) and life.loop is None:
                address = self._options.handshake_address
                log.info("engine %d: still joining the frontend at %s", engine_index, address)

    async def _serve(self, engine_index: int, links: FrontendChannels, life: _Life) -> None:
        engine = MockEngine(
            self._config,
            engine_index,
            client_count=len(links.outputs),
            has_coordinator=links.coordinator is not None,
        )
        loop = EngineLoop(
            engine,
            links,
            after_slice=partial(self._after_slice, engine),
            step_interval=self._options.step_interval,
        )
        self._note_joined(engine_index, links)
        self._lockstep.loops.add(loop)
        try:
            async with running(*loop.pumps(), partial(life.watch, links.disconnects)):
                life.loop = loop
                await loop.run()
        except Exception:
            loop.say_farewell()
            raise
        finally:
            self._lockstep.loops.discard(loop)
            self.summary += engine.summary
            log_entries(engine_index, engine.journal.take())

    def _note_joined(self, engine_index: int, links: FrontendChannels) -> None:
        clients = len(links.outputs)
        coordinated = ", with a coordinator" if links.coordinator is not None else ""
        log.info("engine %d: serving %d client(s)%s", engine_index, clients, coordinated)
        if engine_index in self._missing:
            self._missing.discard(engine_index)
            if not self._missing:
                self._on_joined()

    def _after_slice(self, engine: MockEngine) -> None:
        if entries := engine.journal.take():
            log_entries(engine.engine_index, entries)
        if self._config.lockstep:
            self._lockstep.settle(clock())


@attrs.define
class _Life:
    """One engine's time with one frontend."""

    _shutdown_timeout: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    loop: EngineLoop | None = attrs.field(default=None, init=False)
    """Set once the frontend is joined."""
    lost_address: str | None = attrs.field(default=None, init=False)

    async def watch(self, disconnects: trio.abc.ReceiveChannel[FrontendDisconnect]) -> None:
        """Task: end this life when a connection breaks."""
        disconnect = await disconnects.receive()
        self.lost_address = disconnect.address
        self.scope.cancel(reason="the frontend has gone")

    async def end_on(self, shutdown: trio.Event) -> None:
        """Task: end this life in order when that is asked for."""
        await shutdown.wait()
        if self.loop is None:
            self.scope.cancel(reason="shut down before a frontend was joined")
            return
        self.loop.shut_down(drain=self._shutdown_timeout > 0)
        await trio.sleep(self._shutdown_timeout)
        self.loop.shut_down(drain=False)
        await trio.sleep(LAST_OUTPUTS_TIME)
        self.scope.cancel(reason="the frontend does not take the last outputs")


def _failure_of(engine_index: int, error: Exception) -> Exception:
    """What to raise for all engines."""
    if isinstance(error, ConfigurationError | EngineDeadError):
        return error
    failure: Exception
    if isinstance(error, InternalError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of a task beside the engine's own
    if isinstance(error, EngineCoreError):
        failure = EngineDeadError(engine_index, str(error))
    else:
        failure = InternalError(f"mock engine {engine_index} crashed, please report this")
    failure.__cause__ = error
    return failure
