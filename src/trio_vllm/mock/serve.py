"""`serve_mock_engines` joins a frontend, serves it, and does both again with the next."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, assert_never

import attrs
import trio

from trio_vllm.concurrency import check_library, running
from trio_vllm.errors import (
    ConfigurationError,
    EngineCoreError,
    EngineDeadError,
    InternalError,
    StartupError,
)
from trio_vllm.mock.config import MockEngineConfig, ServeOptions
from trio_vllm.mock.deaths import Death
from trio_vllm.mock.engine import MockEngine, answers_of, data_parallel_size, ready_response
from trio_vllm.mock.events import (
    EngineDied,
    LogEntry,
    MessageIgnored,
    PaceLost,
    RequestFinished,
    RequestRefused,
    RequestStarted,
    Summary,
)
from trio_vllm.mock.publishing import KvEventFeed, publishing_kv_events
from trio_vllm.mock.runner import EngineRunner, Lockstep, RunnerLimits
from trio_vllm.mock.statuses import EngineStatuses
from trio_vllm.mock.transfers import SideChannel, TransferHub, open_side_channel
from trio_vllm.protocol import EngineCoreReadyResponse, FinishReason, HandshakeInit
from trio_vllm.transport import (
    DESCRIPTORS_PER_ENGINE,
    EngineLingers,
    FrontendChannels,
    FrontendDisconnect,
    descriptors_per_engine,
    join_frontend,
    require_descriptors,
)
from trio_vllm.values import define, frozen

if TYPE_CHECKING:  # only tests connect in memory
    from trio_vllm.transport import InMemory

log = logging.getLogger("trio_vllm.mock")


Tap: TypeAlias = Callable[[int, FrontendChannels], FrontendChannels]


@frozen(kw_only=True)
class ServeLimits:
    """Times and sizes that only tests change."""

    retry_delay: float = 0.5
    """Seconds from the loss of a frontend to the first message to the next."""
    report_interval: float = 30.0
    """Seconds between two log lines that say that there is no frontend yet."""
    output_high_water_mark: int = 1000
    """Messages that a client may be behind before its requests stop and wait for it."""
    last_outputs_time: float = 2.0
    """Seconds that a frontend may take, once requests are aborted, to make room for the messages
    about that."""
    lingers: EngineLingers = attrs.field(factory=EngineLingers)
    runner: RunnerLimits = attrs.field(factory=RunnerLimits)


async def serve_mock_engines(  # noqa: ASYNC128
    config: MockEngineConfig,
    options: ServeOptions,
    *,
    shutdown: trio.Event | None = None,
    limits: ServeLimits = ServeLimits(),  # noqa: B008  (frozen)
    tap: Tap = lambda _index, channels: channels,
    states: EngineStatuses | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> Summary:
    """Run mock engines until ``shutdown`` is set; gives the counts of them all.

    ``tap`` may put something of its own between an engine, named by its index, and its channels.
    ``states`` can be read meanwhile.

    For `trio.Nursery.start` it has started when every engine has joined a frontend, which has to
    come from somewhere else meanwhile.

    Raises:
      EngineDeadError: One engine could not go on, or could not start, which has ended the others.
        Without ``reconnect`` that includes that its frontend has gone or has not come in time.
      ConfigurationError: ``handshake_address`` is unusable, or a file that an option names.
      InternalError: An engine crashed.

    Cancellation:
      Ends the engines at once; their requests are neither drained nor aborted.
    """
    check_library("serve_mock_engines", "trio", "trio_vllm.testing.mock_engine")
    shutdown = trio.Event() if shutdown is None else shutdown
    if config.is_scheduled and config.prefix_caching_hash_seed is None:
        seed = os.environ.get("PYTHONHASHSEED")
        config = attrs.evolve(config, prefix_caching_hash_seed=seed)
    answers_of(
        config, options.engine_start_index
    )  # fails now if it must, and not at the first frontend
    states = EngineStatuses() if states is None else states
    service = _Service(config, options, limits, shutdown, tap, states, task_status)
    await service.run()
    return states.total


@define
class _Service:
    """The engines of one call."""

    _config: MockEngineConfig
    _options: ServeOptions
    _limits: ServeLimits
    _shutdown: trio.Event
    _tap: Tap
    _states: EngineStatuses
    _task_status: trio.TaskStatus[None]
    _lockstep: Lockstep = attrs.field(factory=Lockstep, init=False)
    _missing: set[int] = attrs.field(init=False)
    """Engines that have not joined a frontend since the start."""
    _has_joined: bool = attrs.field(default=False, init=False)
    """Whether a frontend has answered any of them."""
    _sessions: set[_Session] = attrs.field(factory=set, init=False)
    _losses: int = attrs.field(default=0, init=False)
    """Engines whose frontend has gone since garbage was collected."""
    _failure: Exception | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        options = self._options
        self._missing = set(range(options.engine_start_index, options.last_index + 1))
        self._states.expect(self._missing)

    async def run(self) -> None:
        """Run all engines; the failure of one is the failure of all."""
        options = self._options
        self._require_descriptors(DESCRIPTORS_PER_ENGINE)
        log.info(
            "%s: joining the frontend at %s", options.engines_in_words, options.handshake_address
        )
        async with running(self._report, self._end_sessions), trio.open_nursery() as nursery:
            for engine_index in sorted(self._missing):
                nursery.start_soon(self._guard, engine_index, nursery.cancel_scope)
        if self._failure is not None:
            raise self._failure

    def _require_descriptors(self, per_engine: int) -> None:
        count = self._options.engine_count
        require_descriptors(
            per_engine * count,
            f"{count} engines",
            hint=", or spread the engines over more processes (--processes)",
        )

    async def _guard(self, engine_index: int, all_engines: trio.CancelScope) -> None:
        await trio.lowlevel.checkpoint()
        try:
            async with (
                publishing_kv_events(self._config, engine_index) as events,
                open_side_channel(self._config, engine_index) as side_channel,
            ):
                await self._run_engine(engine_index, _Feeds(events, side_channel))
        except Exception as error:  # whatever it is: half of the engines is worse than none
            if self._failure is None:
                self._failure = _failure_of(engine_index, error)
                all_engines.cancel(reason=f"engine {engine_index} failed")

    async def _run_engine(self, engine_index: int, feeds: _Feeds) -> None:
        """Serve one frontend after the other."""
        await trio.lowlevel.checkpoint()
        while not self._shutdown.is_set():
            try:
                gone = await self._serve_frontend(engine_index, feeds)
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
                self._collect_garbage()
            with trio.move_on_after(self._limits.retry_delay):
                await self._shutdown.wait()

    def _collect_garbage(self) -> None:
        """Free what engines had for the frontend that has left them all.

        It refers to itself; where collections are rare, as in the command, each frontend would add to
        what is kept.
        """
        self._losses += 1
        if self._losses >= self._options.engine_count:
            self._losses = 0
            gc.collect()

    async def _serve_frontend(self, engine_index: int, feeds: _Feeds) -> str | None:
        """Join a frontend and serve it; gives which address has gone, None after a shutdown."""
        session = _Session()
        self._sessions.add(session)
        try:
            with session.scope:
                async with join_frontend(
                    self._options.handshake_address,
                    engine_index=engine_index,
                    ready_response=partial(self._ready_response, engine_index),
                    loading_time=self._loading_time(engine_index),
                    timeout=self._options.startup_timeout,
                    heartbeat_timeout=self._options.heartbeat_timeout,
                    output_high_water_mark=self._limits.output_high_water_mark,
                    lingers=self._limits.lingers,
                ) as channels:
                    tapped = self._tap(engine_index, channels)
                    await self._serve(engine_index, tapped, session, feeds)
        finally:
            self._sessions.discard(session)
        if session.lost_address is not None and session.death is not None:
            # It would come back to life if it joined the next one.
            raise EngineDeadError(engine_index, f"the frontend has gone after {session.death}")
        return session.lost_address

    def _loading_time(self, engine_index: int) -> float:
        """Seconds; an engine loads for its first frontend, and the next ones find it loaded."""
        if engine_index not in self._missing:
            return 0.0
        return self._config.startup_duration * self._config.time_scale

    def _ready_response(self, engine_index: int, init: HandshakeInit) -> EngineCoreReadyResponse:
        if not self._has_joined:
            # Only now is it known how many connections there will be, besides those of the handshakes.
            self._has_joined = True
            if (per_engine := descriptors_per_engine(init.addresses)) > DESCRIPTORS_PER_ENGINE:
                self._require_descriptors(per_engine)
        size = 1
        if self._config.lockstep:
            size = data_parallel_size(init, self._options.last_index + 1)
        return ready_response(
            self._config,
            engine_index,
            data_parallel_size=size,
            dp_stats_address=init.addresses.frontend_stats_publish_address,
        )

    async def _report(self) -> None:
        """Task: say from time to time that there is no frontend."""
        await trio.lowlevel.checkpoint()
        while self._missing:
            await trio.sleep(self._limits.report_interval)
            if self._missing and not self._shutdown.is_set():
                address = self._options.handshake_address
                log.info("engine %d: still joining the frontend at %s", min(self._missing), address)

    async def _end_sessions(self) -> None:
        """Task: end all sessions in order when that is asked for."""
        await self._shutdown.wait()
        patience = self._options.shutdown_timeout
        self._shut_down(drain=patience > 0)
        if patience:
            await trio.sleep(patience)
            self._shut_down(drain=False)
        await trio.sleep(self._limits.last_outputs_time)
        for session in list(self._sessions):
            session.scope.cancel(reason="the frontend does not take the last outputs")

    def _shut_down(self, *, drain: bool) -> None:
        for session in list(self._sessions):
            session.shut_down(drain=drain)

    async def _serve(
        self,
        engine_index: int,
        channels: FrontendChannels,
        session: _Session,
        feeds: _Feeds,
    ) -> None:
        engine = MockEngine(
            self._config,
            engine_index,
            client_count=len(channels.outputs),
            has_coordinator=channels.coordinator is not None,
        )
        runner = EngineRunner(
            engine,
            channels,
            on_idle_check=partial(self._on_idle_check, engine, feeds),
            limits=self._limits.runner,
        )
        feeds.restart(runner)
        self._note_joined(engine_index, channels)
        self._states.join(engine)
        self._lockstep.runners.add(runner)
        try:
            async with running(*runner.pumps(), partial(session.watch, channels.disconnects)):
                session.runner = runner
                await runner.run()
        except Exception:
            runner.send_dead_sentinel()
            raise
        finally:
            self._lockstep.runners.discard(runner)
            session.death = engine.death
            if session.lost_address is not None:
                # Whoever counts wants each request to end, and these have nobody to tell.
                with trio.CancelScope(shield=True):
                    await _abort_requests(engine, self._limits.runner.clock)
            self._states.leave(engine)
            log_entries(engine_index, engine.events.pop_entries())

    def _note_joined(self, engine_index: int, channels: FrontendChannels) -> None:
        clients = len(channels.outputs)
        coordinated = ", with a coordinator" if channels.coordinator is not None else ""
        log.info("engine %d: serving %d client(s)%s", engine_index, clients, coordinated)
        if engine_index in self._missing:
            self._missing.discard(engine_index)
            if not self._missing:
                self._task_status.started()

    def _on_idle_check(self, engine: MockEngine, feeds: _Feeds) -> None:
        feeds.publish_from(engine)
        if entries := engine.events.pop_entries():
            log_entries(engine.engine_index, entries)
        if self._config.lockstep:
            self._lockstep.settle(self._limits.runner.clock())


@frozen
class _Feeds:
    """What an engine tells to others than its frontend."""

    _events: KvEventFeed | None
    _side_channel: SideChannel | None

    def restart(self, runner: EngineRunner) -> None:
        """Begin with another `MockEngine`."""
        if self._events is not None:
            self._events.restart()
        if self._side_channel is not None:
            self._side_channel.release = runner.release

    def publish_from(self, engine: MockEngine) -> None:
        """Tell what an engine has noted."""
        if self._events is not None:
            self._events.publish_from(engine)
        if self._side_channel is not None:
            self._side_channel.tell(engine.pop_fetched())


@define(eq=False)
class _Session:
    """One engine's time with one frontend."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    runner: EngineRunner | None = attrs.field(default=None, init=False)
    """Set once the frontend is joined."""
    lost_address: str | None = attrs.field(default=None, init=False)
    death: Death | None = attrs.field(default=None, init=False)
    """What its engine has died of, if it dies like a real one."""

    async def watch(self, disconnects: trio.abc.ReceiveChannel[FrontendDisconnect]) -> None:
        """Task: end this session when a connection breaks."""
        disconnect = await disconnects.receive()
        self.lost_address = disconnect.address
        self.scope.cancel(reason="the frontend has gone")

    def shut_down(self, *, drain: bool) -> None:
        """End it in order."""
        if self.runner is None:
            self.scope.cancel(reason="shut down before a frontend was joined")
        else:
            self.runner.shut_down(drain=drain)


async def serve_in_memory(  # noqa: ASYNC910 (serving is a checkpoint)
    config: MockEngineConfig,
    meeting: InMemory,
    engine_index: int,
    *,
    lockstep: Lockstep,
    tap: Callable[[FrontendChannels], FrontendChannels] = lambda channels: channels,
    transfers: TransferHub | None = None,
) -> None:
    """Run one mock engine for the frontend of its process, by trio's clock, until cancelled.

    Args:
      config: How it behaves.
      meeting: Where the frontend is.
      engine_index: Its number.
      lockstep: That of all engines which end a wave together.
      tap: Puts something between the engine and its channels.
      transfers: Leads to the engines that it fetches KV blocks from, or keeps them for.
    """
    size = len(meeting.engine_indices) if config.lockstep else 1
    response = ready_response(config, engine_index, data_parallel_size=size)
    channels = tap(meeting.join(engine_index, response))
    engine = MockEngine(config, engine_index, has_coordinator=channels.coordinator is not None)

    hub = transfers or TransferHub()

    def on_idle_check() -> None:
        log_entries(engine_index, engine.events.pop_entries())
        hub.tell(engine.pop_fetched())
        if config.lockstep:
            lockstep.settle(trio.current_time())

    limits = RunnerLimits(clock=trio.current_time)
    runner = EngineRunner(engine, channels, on_idle_check=on_idle_check, limits=limits)
    lockstep.runners.add(runner)
    hub.join(config, engine_index, runner.release)
    try:
        async with running(*runner.pumps()):
            await runner.run()
    except EngineDeadError as error:
        log.warning("%s", error)
        runner.send_dead_sentinel()
        meeting.leave(engine_index)
    finally:
        lockstep.runners.discard(runner)


async def _abort_requests(engine: MockEngine, clock: Callable[[], float]) -> None:
    """Abort what an engine has, with turns for others if that is much."""
    engine.shut_down(clock(), drain=False)
    await trio.lowlevel.checkpoint()
    while engine.has_unfinished:
        engine.step(clock())
        await trio.lowlevel.checkpoint()


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


def log_entries(engine_index: int, entries: Iterable[LogEntry]) -> None:
    """Log a line for each: requests that come and go at info level, faults as warnings."""
    for entry in entries:
        match entry:
            case RequestStarted():
                log.info(
                    "engine %d: request taken request_id=%s prompt_len=%d max_tokens=%d"
                    " chunk_size=%d",
                    engine_index,
                    _loggable(entry.request_id),
                    entry.prompt_len,
                    entry.max_tokens,
                    entry.chunk_size,
                )
            case RequestFinished():
                aborted = entry.finish_reason is FinishReason.ABORT
                log.info(
                    "engine %d: request %s request_id=%s prompt_len=%d output_tokens=%d"
                    " finish_reason=%s",
                    engine_index,
                    "aborted" if aborted else "finished",
                    _loggable(entry.request_id),
                    entry.prompt_len,
                    entry.output_tokens,
                    entry.finish_reason,
                )
            case RequestRefused():
                log.warning(
                    "engine %d: request refused request_id=%s answered=%s: %s",
                    engine_index,
                    _loggable(entry.request_id),
                    "yes" if entry.answered else "no",
                    entry.reason,
                )
            case MessageIgnored():
                log.warning("engine %d: message ignored: %s", engine_index, entry.reason)
            case EngineDied():
                log.warning(
                    "engine %d: its %s has died of %s",
                    engine_index,
                    entry.death.thread.value,
                    entry.death,
                )
            case PaceLost():
                log.warning(
                    "engine %d: this machine is too slow for the times asked for: %.3f s behind",
                    engine_index,
                    entry.seconds,
                )
            case _:
                assert_never(entry)


def _loggable(request_id: str) -> str:
    """A request id in one word of a line, whatever a frontend made of it."""
    text = request_id if len(request_id) <= 200 else f"{request_id[:200]}..."
    return text if text.isprintable() and " " not in text and text else repr(text)
