"""`EngineCoreClient`: requests in, outputs out, over any number of engines.

Theory of operation. Three tasks run beside the caller's block: one takes what the engines send and
hands it to whoever waits for it, one sends what can go together (see `_outbox.py`), one hears of
lost connections (see `_lives.py`). Submitting a request is a plain function call in the caller's
task: the input socket takes any number of messages and never blocks.

What an engine does, or its death, never raises out of these tasks. The first cause is kept per
engine; every waiter and every later call raises a fresh error made of it.

Mirrors ``rust/src/engine-core-client/src/client.rs`` and ``vllm/v1/engine/core_client.py``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trio_vllm.client.core import Dispatcher, Outbox, OutputPump, StatsListener
from trio_vllm.client.engines import CONNECTION_LOST, Balancer, EngineInfo, EngineLives
from trio_vllm.client.input_processing import fill_defaults, validate_and_encode
from trio_vllm.client.requests import Inflight, OutputStream, Sink
from trio_vllm.client.utility_calls import UtilityCalls, check_utility_call
from trio_vllm.client.utility_methods import UTILITY_TIMEOUT, UtilityMethods
from trio_vllm.client.waves import WaveFollower, WaveLeader, WaveTracker
from trio_vllm.concurrency import running
from trio_vllm.errors import (
    ClientClosedError,
    ConfigurationError,
    DuplicateRequestIdError,
    EngineCoreError,
    EngineDeadError,
    UtilityCallFailedError,
    UtilityTimeoutError,
    copy_error,
)
from trio_vllm.protocol import (
    Buffer,
    CodecError,
    EngineCoreRequest,
    EngineId,
    SchedulerStats,
    UtilityRequest,
    encode_utility,
)
from trio_vllm.transport import (
    Bootstrapped,
    EngineChannels,
    FollowerChannels,
    HandshakeOwner,
    LeaderChannels,
    open_frontend,
)

# MERGED client/_opening: `open_client`: from addresses to a client that serves requests.


_log = logging.getLogger("trio_vllm.client")

START_WAVE_RELEASE = (0, 33)
"""From here on idle engines themselves tell a coordinator of the requests that they get."""


class EngineCoreClient(UtilityMethods):
    """Drives connected engine cores; made by `open_client`."""

    def __init__(
        self,
        links: EngineChannels,
        *,
        client_index: int = 0,
        vocab_size: int | None = None,
        structured_outputs_backend: str = "xgrammar",
    ) -> None:
        self._links = links
        self._client_index = client_index
        self._backend = structured_outputs_backend
        self.fleet = EngineInfo(links.ready_responses)
        """What the engines told of themselves."""
        self._limits = self.fleet.limits(vocab_size=vocab_size)
        self._learning_tasks = trio.Lock()
        self._balancer = Balancer(links.ready_responses)
        self._lives = EngineLives(
            links.ready_responses,
            is_lockstep=self.fleet.data_parallel_size > 1,
            on_loss=self._balancer.remove,
            on_death=self._bury,
            on_failure=self._fail,
        )
        self._outbox = Outbox(
            links.requests, on_gone=self._lives.lose, on_unsent=self._send_elsewhere
        )
        self._inflight = Inflight(on_release=self._balancer.release, on_abort=self._outbox.abort)
        self._utility_calls = UtilityCalls()
        self._dispatcher = Dispatcher(
            self._inflight, self._utility_calls, self._balancer, self._lives
        )
        self._pump = OutputPump(links, self._dispatcher, self._outbox)
        self._waves = self._track_waves()
        self._failure: EngineCoreError | None = None
        self._failed = trio.Event()

    def _track_waves(self) -> WaveTracker | None:
        """Lead or follow the engines' waves, if there is a coordinator."""
        is_lockstep = self.fleet.data_parallel_size > 1
        match self._links.coordination:
            case LeaderChannels() as links:
                return WaveLeader(links, is_lockstep=is_lockstep, on_failure=self._fail)
            case FollowerChannels() as links:
                return WaveFollower(
                    links,
                    is_lockstep=is_lockstep,
                    must_notify=self._is_older_than(START_WAVE_RELEASE),
                    on_failure=self._fail,
                )
            case None:
                return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks of this client while the block runs, then close it; for `open_client`."""
        pumps = [self._pump.run, self._outbox.run, self._watch_lives]
        if self._waves is not None:
            pumps.append(self._waves.run)
        async with running(*pumps):
            try:
                yield
            finally:
                self.close()

    # What is known ------------------------------------------------------------------------------

    @property
    def input_address(self) -> str:
        """Where engines fetch their requests."""
        return self._links.input_address

    @property
    def output_address(self) -> str:
        """Where engines bring their outputs."""
        return self._links.output_address

    @property
    def engine_identities(self) -> list[EngineId]:
        """The ØMQ ids of all engines of the startup, in index order."""
        return [EngineId.of(index) for index in sorted(self._links.ready_responses)]

    @property
    def engine_indices(self) -> list[int]:
        """The engines that are connected and alive."""
        return self._balancer.engine_indices

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that fit every engine."""
        return self.fleet.max_model_len

    @property
    def model_dtype(self) -> str:
        """The model's number type, such as ``bfloat16``."""
        return self.fleet.model_dtype

    @property
    def vllm_version(self) -> str:
        """The version that the first engine reports."""
        return self.fleet.vllm_version

    @property
    def in_flight_count(self) -> int:
        """Requests that have not ended."""
        return len(self._inflight)

    def scheduler_stats(self) -> dict[int, SchedulerStats]:
        """The newest statistics of each living engine that sent any; `DecodeError` if garbled."""
        return self._dispatcher.scheduler_stats()

    def on_scheduler_stats(self, listener: StatsListener) -> None:
        """Have ``listener`` called with each engine's index and statistics as they come.

        There is one listener; it must not wait or raise. Without one, the statistics of a single
        engine are not even decoded.
        """
        self._dispatcher.stats_listener = listener

    # Health -------------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether all engines are alive and the client is open."""
        return not self._lives.dead and self._failure is None

    @property
    def dead_engines(self) -> Mapping[int, EngineDeadError]:
        """The engines that were lost, each with the first reason."""
        return dict(self._lives.dead)

    @property
    def failure(self) -> EngineCoreError | None:
        """Why this client serves no request any more; None while it does."""
        return self._failure

    async def wait_failed(self) -> EngineCoreError:
        """Wait until no engine is left to serve requests, or the client is closed; gives the reason."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    def raise_if_failed(self) -> None:
        """Raise the reason, if this client serves no request any more."""
        if self._failure is not None:
            raise copy_error(self._failure)
        if not self._balancer.engine_indices:
            # They are lost, but not pronounced dead yet.
            raise EngineDeadError(self._lives.living[0], CONNECTION_LOST)

    # Requests -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def call(self, request: EngineCoreRequest) -> AsyncIterator[OutputStream]:
        """Send a request; the block's value iterates over its outputs.

        Leaving the block early, for whatever reason, aborts the request. If it is not known yet what
        the engines support, they are asked before a pooling request.

        Raises:
          RequestError: The request was refused, nothing was sent.
          UtilityError: The engines would not say what they support.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
        """
        if request.pooling_params is not None:
            await self.learn_supported_tasks()
        stream = OutputStream(request.request_id)
        self.submit(request, stream)
        try:
            yield stream
        finally:
            self.drop(stream)

    async def learn_supported_tasks(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Ask the engines what the model can do, once; from then on requests must keep to it.

        An engine dies of a pooling task that it has not, and a pooling one of a request to
        generate.

        Raises:
          UtilityError: They would not say.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.

        Cancellation:
          The next call asks again.
        """
        if self._limits.supported_tasks is not None:
            await trio.lowlevel.checkpoint()
            return
        deadline = trio.current_time() + timeout
        async with self._learning_tasks:
            while self._limits.supported_tasks is None:
                left = max(deadline - trio.current_time(), 0)
                try:
                    tasks = await self.get_supported_tasks(timeout=left)
                except UtilityCallFailedError as error:
                    if not isinstance(error.__cause__, EngineDeadError):
                        raise
                    continue  # one has died, the others serve on
                self._limits = attrs.evolve(self._limits, supported_tasks=tasks)

    def submit(self, request: EngineCoreRequest, sink: Sink) -> None:
        """Send a request whose outputs go to ``sink``; the building block of `call` and `Llm`.

        The request is checked first, completed (stop ids, structured-output backend, client index)
        in a copy, and sent to the pinned or else the least loaded engine: at once if that is idle,
        else together with what other tasks submit in this turn of trio's, or in the 5 ms for which a
        client that is behind with handing out outputs waits. An id should not be used
        again after an abort: outputs for the old request may still be on their way. What the model
        can do is checked once `learn_supported_tasks` has found out.

        Raises:
          RequestError: The request was refused, nothing was sent.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
        """
        request_id = request.request_id
        self._outbox.prepare_id(request_id)  # which may find that engines are gone
        self.raise_if_failed()
        if request_id in self._inflight:
            raise DuplicateRequestIdError(request_id)
        request = fill_defaults(request, self._client_index, self._backend)
        if self._waves is not None:
            request = attrs.evolve(request, current_wave=self._waves.current_wave)
        message = validate_and_encode(request, self._limits)
        pinned = request.data_parallel_rank
        engine_index = self._balancer.choose(request_id, pinned)
        if self._balancer.in_flight(engine_index):
            self._outbox.post(engine_index, message, request_id if pinned is None else None)
        else:
            while not self._outbox.send(engine_index, message):
                self.raise_if_failed()
                engine_index = self._balancer.choose(request_id, pinned)
        if self._waves is not None:
            self._waves.send_request(engine_index)
        sink.engine_index = engine_index
        self._inflight.add(sink)
        self._balancer.admit(engine_index)

    def _send_elsewhere(self, request_id: str, message: list[Buffer]) -> None:
        """The engine that a request was posted to turned out to be gone: give it to another."""
        sink = self._inflight.get(request_id)
        if sink is None or not self._balancer.engine_indices:
            return  # it is over, or will be when the last engine is pronounced dead
        engine_index = self._balancer.choose(request_id, None)
        self._outbox.post(engine_index, message, request_id)
        # No need to tell of a wave: engines that have them are lost together.
        sink.engine_index = engine_index
        self._balancer.admit(engine_index)

    def drop(self, sink: Sink) -> None:
        """Forget a request and abort it, if it is still in flight; its sink hears nothing more."""
        self._inflight.drop(sink)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each gets a last output with `FinishReason.ABORT`, the engines are told.

        Ids that are not in flight are ignored.
        """
        if isinstance(request_ids, str):
            raise TypeError("request_ids must be several ids, not a string")
        self._inflight.abort(request_ids)

    def abort_all(self) -> None:
        """Abort every request in flight."""
        self._inflight.abort(self._inflight.request_ids)

    # Utility calls ------------------------------------------------------------------------------

    async def call_utility(
        self, method: str, *args: Any, timeout: float = UTILITY_TIMEOUT
    ) -> dict[int, Any]:
        """Run a method of the engine core on every living engine and wait for all outcomes.

        Args:
          method: Its name, such as ``"is_sleeping"``.
          args: Its positional arguments; anything that MessagePack can express.
          timeout: Seconds to wait for the last answer.

        Returns:
          The results by engine index.

        Raises:
          UtilityRefusedError: Engines are known not to survive this call; nothing was sent.
          UtilityCallFailedError: Engines answered with a failure; tells which, and which did not.
          UtilityTimeoutError: ``timeout`` passed; tells which engines have not answered.
          EngineDeadError: The only engine asked died, or none is left.
          ClientClosedError: The client is closed.
          TypeError: An argument has no MessagePack form, or ``timeout`` is no number.
          ValueError: ``timeout`` is negative or not a number.

        Cancellation:
          Stops waiting. The engines still run the method; their answers are dropped.
        """
        self._outbox.flush()  # what was submitted before comes before; engines may turn out gone
        self.raise_if_failed()
        check_utility_call(method, args)
        call = self._utility_calls.open(method, self.engine_indices)
        try:
            request = UtilityRequest(self._client_index, call.call_id, method, list(args))
            try:
                message = encode_utility(request)
            except CodecError as error:
                raise TypeError(f"utility call {method!r}: {error}") from error
            with trio.move_on_after(timeout):  # a senseless one is refused before anything is sent
                for engine_index in sorted(call.missing):
                    self._outbox.send(engine_index, message)
                await call.settled.wait()
            if call.missing:
                raise UtilityTimeoutError(method, call.call_id, sorted(call.missing), timeout)
            return call.outcome()
        finally:
            self._utility_calls.close(call)

    # Tasks --------------------------------------------------------------------------------------

    async def _watch_lives(self) -> None:
        """Task: find out which engines are gone."""
        await self._lives.watch(self._links.losses)

    # The end ------------------------------------------------------------------------------------

    def _bury(self, engine_index: int, error: EngineDeadError) -> None:
        """Make an engine's death known to all who wait for it."""
        self._balancer.remove(engine_index)
        self._dispatcher.forget(engine_index)
        self._inflight.fail_engine(engine_index, error)
        self._utility_calls.fail_engine(engine_index, error)

    def _fail(self, error: EngineCoreError) -> None:
        """Serve no request any more; the first reason is kept."""
        if self._failure is not None:
            return
        self._failure = error
        self._inflight.fail_all(error)
        self._utility_calls.fail_all(error)
        self._outbox.flush()
        self._failed.set()

    def close(self) -> None:
        """Abort what is in flight and serve no request any more; idempotent.

        Whoever waits gets `ClientClosedError`. `open_client` does this at the end of its block.
        """
        self._fail(ClientClosedError())


LEARNING_TIMEOUT = 5.0
"""Seconds that engines which have just started may take to say what they support."""


@asynccontextmanager
async def open_client(
    mode: HandshakeOwner | Bootstrapped,
    *,
    client_index: int = 0,
    vocab_size: int | None = None,
    structured_outputs_backend: str = "xgrammar",
) -> AsyncIterator[EngineCoreClient]:
    """Connect to engine cores; the block's value drives them.

    Args:
      mode: Whether we do the startup handshake or a supervisor has done it.
      client_index: Which of the frontend's clients we are; engines answer on that output address.
        They are told but one address by us, so other clients need a supervisor (`Bootstrapped`).
      vocab_size: Number of the model's token ids, if known. An engine dies of an id beyond it and
        does not tell its size, so with this such requests can be refused.
      structured_outputs_backend: For requests that name none.

    Raises:
      ConfigurationError: An address is unusable, the engines need a coordinator, or would not
        answer to ``client_index``.
      StartupError: Engines are missing after the mode's timeout; tells which, and in which phase.
      InternalError: A bug of this package, never a peer's doing.

    The engines are asked what the model supports, since one that pools dies of a request to generate
    and the other way round. If they do not answer in `LEARNING_TIMEOUT` seconds, that is logged, and
    they are asked again before the first pooling request.

    Leaving the block aborts what is in flight; after it nothing of the client runs. What the block
    raises comes out as it is.

    Cancellation:
      Leaves nothing behind, at any point.
    """
    if client_index and isinstance(mode, HandshakeOwner):
        raise ConfigurationError(
            f"client_index must be 0, not {client_index}: HandshakeOwner tells the engines one output"
            " address, and they would answer on one that does not exist"
        )
    async with open_frontend(mode) as links:
        client = EngineCoreClient(
            links,
            client_index=client_index,
            vocab_size=vocab_size,
            structured_outputs_backend=structured_outputs_backend,
        )
        async with client.running():
            try:
                await client.learn_supported_tasks(timeout=LEARNING_TIMEOUT)
            except EngineCoreError as error:
                _log.warning("what the engines support is not known: %s", error)
            yield client
