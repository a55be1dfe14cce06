"""`open_client` and `EngineCoreClient`: requests in, outputs out, over any number of engines.

Theory of operation. Three tasks run beside the caller's block: one takes what the engines send and
hands it to whoever waits for it, one tells engines of aborted requests, one hears of lost
connections (see `_lives.py`). Sending a request is a plain function call in the caller's task: the
input socket takes any number of messages and never blocks.

What an engine does, or its death, never raises out of these tasks. The first cause is kept per
engine; every waiter and every later call raises a fresh error made of it.

Mirrors ``rust/src/engine-core-client/src/client.rs`` and ``vllm/v1/engine/core_client.py``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from trio_vllm._background import running
from trio_vllm._errors import (
    ClientClosedError,
    DecodeError,
    DuplicateRequestIdError,
    EngineCoreError,
    EngineDeadError,
    PeerGoneError,
    UtilityTimeoutError,
    fresh,
)
from trio_vllm.client._aborts import PendingAborts
from trio_vllm.client._inflight import Inflight, Sink
from trio_vllm.client._lives import CONNECTION_LOST, REPORTED_DEATH, EngineLives
from trio_vllm.client._ready import EngineFleet
from trio_vllm.client._stream import OutputStream
from trio_vllm.client._utilities import UtilityMethods
from trio_vllm.client._utility_caller import UTILITY_TIMEOUT
from trio_vllm.client._utility_calls import UtilityCalls
from trio_vllm.client._utility_rules import check_utility_call
from trio_vllm.client._waker import Waker
from trio_vllm.protocol import (
    Balancer,
    Buffer,
    DpControlOutput,
    EngineCoreRequest,
    EngineDead,
    EngineId,
    Frames,
    RowBatch,
    SchedulerStats,
    UtilityCallOutput,
    UtilityRequest,
    check_request,
    encode_abort,
    encode_add,
    encode_utility,
    open_outputs,
    resolve_request,
)
from trio_vllm.transport import Bootstrapped, EngineLinks, HandshakeOwner, open_frontend

_log = logging.getLogger("trio_vllm.client")

BATCH = 16
"""Messages handled between two checkpoints: a message of 1,000 outputs takes about 1 ms."""


class EngineCoreClient(UtilityMethods):
    """Drives connected engine cores; made by `open_client`."""

    def __init__(
        self,
        links: EngineLinks,
        *,
        client_index: int = 0,
        vocab_size: int | None = None,
        structured_outputs_backend: str = "xgrammar",
    ) -> None:
        self._links = links
        self._client_index = client_index
        self._backend = structured_outputs_backend
        self.fleet = EngineFleet(links.ready_responses)
        """What the engines told of themselves."""
        self._limits = self.fleet.limits(vocab_size=vocab_size)
        self._balancer = Balancer(links.ready_responses)
        self._lives = EngineLives(
            links.ready_responses,
            on_loss=self._balancer.remove,
            on_death=self._bury,
            on_failure=self._fail,
        )
        self._aborts = PendingAborts()
        self._abort_waker = Waker()
        self._inflight = Inflight(on_release=self._balancer.release, on_abort=self._abort_on_engine)
        self._utility_calls = UtilityCalls()
        self._stats: dict[int, RowBatch] = {}
        self._stats_listener: Callable[[int, SchedulerStats], None] | None = None
        self._failure: EngineCoreError | None = None
        self._failed = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks of this client while the block runs, then close it; for `open_client`."""
        async with running(self._pump_outputs, self._pump_aborts, self._watch_lives):
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
        stats = {index: batch.decode_stats() for index, batch in sorted(self._stats.items())}
        return {index: value for index, value in stats.items() if value is not None}

    def on_scheduler_stats(self, listener: Callable[[int, SchedulerStats], None]) -> None:
        """Have ``listener`` called with each engine's index and statistics as they come.

        There is one listener; it must not wait or raise. Without one, the statistics of a single
        engine are not even decoded.
        """
        self._stats_listener = listener

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
            raise fresh(self._failure)
        if not self._balancer.engine_indices:
            # They are lost, but not pronounced dead yet.
            raise EngineDeadError(self._lives.living[0], CONNECTION_LOST)

    # Requests -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def call(self, request: EngineCoreRequest) -> AsyncIterator[OutputStream]:
        """Send a request; the block's value iterates over its outputs.

        Leaving the block early, for whatever reason, aborts the request.

        Raises:
          RequestError: The request was refused, nothing was sent.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
        """
        stream = OutputStream(request.request_id)
        self.submit(request, stream)
        try:
            yield stream
        finally:
            self.drop(stream)

    def submit(self, request: EngineCoreRequest, sink: Sink) -> None:
        """Send a request whose outputs go to ``sink``; the building block of `call` and `Llm`.

        The request is checked first, completed (stop ids, structured-output backend, client index)
        in a copy, and sent to the pinned or else the least loaded engine. An id should not be used
        again after an abort: outputs for the old request may still be on their way.

        Raises:
          RequestError: The request was refused, nothing was sent.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
        """
        self.raise_if_failed()
        request_id = request.request_id
        if request_id in self._inflight:
            raise DuplicateRequestIdError(request_id)
        request = resolve_request(request, self._client_index, self._backend)
        check_request(request, self._limits)
        message = encode_add(request)
        if self._aborts and request_id in self._aborts:
            self._send_aborts()  # an engine dies of an id that it still knows
        engine_index = self._balancer.choose(request_id, request.data_parallel_rank)
        while not self._send(engine_index, message):
            self.raise_if_failed()
            engine_index = self._balancer.choose(request_id, request.data_parallel_rank)
        sink.engine_index = engine_index
        self._inflight.add(sink)
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

    def _abort_on_engine(self, engine_index: int, request_id: str) -> None:
        self._aborts.add(engine_index, request_id)
        self._abort_waker.wake()

    def _send_aborts(self) -> None:
        for engine_index, request_ids in self._aborts.take().items():
            if engine_index in self.engine_indices:
                self._send(engine_index, encode_abort(request_ids))

    def _send(self, engine_index: int, message: list[Buffer]) -> bool:
        """Send to an engine; False if it is not there any more."""
        try:
            self._links.requests.send_nowait([EngineId.of(engine_index), *message])
        except PeerGoneError as error:
            self._lives.lose(engine_index, error)
            return False
        return True

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
          TypeError: An argument has no MessagePack form.

        Cancellation:
          Stops waiting. The engines still run the method; their answers are dropped.
        """
        self.raise_if_failed()
        check_utility_call(method, args)
        call = self._utility_calls.open(method, self.engine_indices)
        try:
            request = UtilityRequest(self._client_index, call.call_id, method, list(args))
            message = encode_utility(request)
            for engine_index in sorted(call.missing):
                self._send(engine_index, message)
            with trio.move_on_after(timeout):
                return await call.wait()
            raise UtilityTimeoutError(method, call.call_id, sorted(call.missing), timeout)
        finally:
            self._utility_calls.close(call)

    # What engines send --------------------------------------------------------------------------

    async def _pump_outputs(self) -> None:
        """Task: hand out what the engines send, for ever."""
        receive = self._links.outputs.receive_batch
        while True:
            for frames in await receive(BATCH):
                self._take_message(frames)

    def _take_message(self, frames: Frames) -> None:
        """Hand out one message of an engine."""
        try:
            message = open_outputs(frames)
            match message:
                case RowBatch():
                    self._take_batch(message)
                case UtilityCallOutput():
                    self._utility_calls.take(message)
                case DpControlOutput():
                    _log.warning("engine %d sent a wave notice here", message.engine_index)
                case EngineDead():
                    self._take_farewell()
        except DecodeError as error:
            self._lives.take_unreadable(error)

    def _take_batch(self, batch: RowBatch) -> None:
        if batch.engine_index in self._lives.dead:
            return
        self._inflight.take(batch)
        if batch.has_stats and batch.engine_index in self._lives.living:
            self._stats[batch.engine_index] = batch
            if self._stats_listener is not None or len(self._links.ready_responses) > 1:
                self._take_stats(batch)

    def _take_stats(self, batch: RowBatch) -> None:
        index = batch.engine_index
        try:
            stats = batch.decode_stats()
        except DecodeError as error:
            # They are for information only: not worth an engine and its requests.
            _log.warning("%s", error)
            return
        if stats is not None:
            self._balancer.report(index, stats.num_running_reqs, stats.num_waiting_reqs)
            if self._stats_listener is not None:
                self._stats_listener(index, stats)

    def _take_farewell(self) -> None:
        if self._is_lockstep and len(self._lives.living) > 1:
            self._fail(EngineDeadError(None, REPORTED_DEATH))
        else:
            self._lives.take_farewell()

    # The end ------------------------------------------------------------------------------------

    @property
    def _is_lockstep(self) -> bool:
        """Whether no engine can go on without the others."""
        return self.fleet.data_parallel_size > 1

    async def _watch_lives(self) -> None:
        """Task: find out which engines are gone."""
        await self._lives.watch(self._links.losses)

    def _bury(self, engine_index: int, error: EngineDeadError) -> None:
        """Make an engine's death known to all who wait for it."""
        self._balancer.remove(engine_index)
        self._stats.pop(engine_index, None)
        self._inflight.fail_engine(engine_index, error)
        self._utility_calls.fail_engine(engine_index, error)
        if not self._lives.living or self._is_lockstep:
            self._fail(error)

    def _fail(self, error: EngineCoreError) -> None:
        """Serve no request any more; the first reason is kept."""
        if self._failure is not None:
            return
        self._failure = error
        self._inflight.fail_all(error)
        self._utility_calls.fail_all(error)
        self._send_aborts()
        self._failed.set()

    def close(self) -> None:
        """Abort what is in flight and serve no request any more; idempotent.

        Whoever waits gets `ClientClosedError`. `open_client` does this at the end of its block.
        """
        self._fail(ClientClosedError())

    async def _pump_aborts(self) -> None:
        """Task: tell engines of aborted requests."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._aborts:
                await self._abort_waker.wait()
            self._send_aborts()


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
      vocab_size: Number of the model's token ids, if known. An engine dies of an id beyond it and
        does not tell its size, so with this such requests can be refused.
      structured_outputs_backend: For requests that name none.

    Raises:
      ConfigurationError: An address is unusable.
      StartupError: Engines are missing after the mode's timeout; tells which, and in which phase.
      InternalError: A bug of this package, never a peer's doing.

    Leaving the block aborts what is in flight; after it nothing of the client runs. What the block
    raises comes out as it is.

    Cancellation:
      Leaves nothing behind, at any point.
    """
    async with open_frontend(mode) as links:
        client = EngineCoreClient(
            links,
            client_index=client_index,
            vocab_size=vocab_size,
            structured_outputs_backend=structured_outputs_backend,
        )
        async with client.running():
            yield client
