"""`EngineCoreClient`: requests in, outputs out, over any number of engines; `open_client` makes it.

Mirrors ``rust/src/engine-core-client/src/client.rs`` and ``vllm/v1/engine/core_client.py``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from trio_vllm.client.core import (
    ClientStatistics,
    FrontendCore,
    ResultsListener,
    StatsListener,
)
from trio_vllm.client.driver import CoreDriver
from trio_vllm.client.engines import EngineInfo, EngineSnapshot, LoadBalancer
from trio_vllm.client.streams import OutputStream, as_request_ids
from trio_vllm.client.utility_calls import UTILITY_TIMEOUT
from trio_vllm.client.utility_methods import UtilityMethods
from trio_vllm.client.versions import START_WAVE
from trio_vllm.client.waves import WaveFollower, WaveLeader
from trio_vllm.concurrency import explains_misuse
from trio_vllm.errors import ConfigurationError, EngineCoreError, EngineDeadError
from trio_vllm.protocol import EngineCoreRequest, EngineId, SchedulerStats
from trio_vllm.transport import (
    EngineChannels,
    EngineSource,
    FollowerChannels,
    LeaderChannels,
)

_log = logging.getLogger("trio_vllm.client")


class EngineCoreClient(UtilityMethods):
    """Drives connected engine cores; made by `open_client`."""

    def __init__(self, driver: CoreDriver) -> None:
        self.driver = driver
        """Submits requests with a `Sink` of one's own, as `Llm` does."""
        self._core = driver.core

    # What is known ------------------------------------------------------------------------------

    @property
    def engine_info(self) -> EngineInfo:
        """What the engines told of themselves."""
        return self._core.info

    @property
    def input_address(self) -> str:
        """Where engines fetch their requests."""
        return self.driver.channels.input_address

    @property
    def output_address(self) -> str:
        """Where engines bring their outputs."""
        return self.driver.channels.output_address

    @property
    def engine_identities(self) -> list[EngineId]:
        """The ØMQ ids of all engines of the startup, in index order."""
        return [EngineId.of(index) for index in sorted(self.engine_info.ready_responses)]

    @property
    def engine_indices(self) -> list[int]:
        """The engines that are connected and alive."""
        return self._core.engine_indices

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that fit every engine."""
        return self.engine_info.max_model_len

    @property
    def model_dtype(self) -> str:
        """The model's number type, such as ``bfloat16``."""
        return self.engine_info.model_dtype

    @property
    def vllm_version(self) -> str:
        """The version that the first engine reports."""
        return self.engine_info.vllm_version

    @property
    def supported_tasks(self) -> list[str] | None:
        """What the model can do, such as ``["generate"]``; None if the engines have not said yet."""
        tasks = self._core.facts.limits.supported_tasks
        return None if tasks is None else list(tasks)

    @property
    def in_flight_count(self) -> int:
        """Requests that have not ended."""
        return self._core.in_flight_count

    def statistics(self) -> ClientStatistics:
        """What is in the client's tables now."""
        return self.driver.statistics()

    def engine_snapshots(self) -> dict[int, EngineSnapshot]:
        """What is known of each engine now, the dead too, by index."""
        return self._core.engine_snapshots()

    def scheduler_stats(self) -> dict[int, SchedulerStats]:
        """The newest statistics of each living engine that sent any; `DecodeError` if garbled."""
        return self._core.scheduler_stats()

    def on_scheduler_stats(self, listener: StatsListener) -> Callable[[], None]:
        """Have ``listener`` called with each engine's index and statistics as they come.

        It must not wait or raise. There can be several; the function that is returned removes this
        one. Without any, the statistics of a single engine are not even decoded.
        """
        return self._core.add_stats_listener(listener)

    def on_utility_results(self, listener: ResultsListener) -> Callable[[], None]:
        """Have ``listener`` called with each utility call of this client that succeeds.

        It gets the method, the arguments, and the results by engine index, and must not wait or
        raise. There can be several; the function that is returned removes this one.
        """
        return self._core.add_results_listener(listener)

    # Health -------------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether all engines are alive and the client is open."""
        return not self._core.dead_engines and self._core.failure is None

    @property
    def stalled_engines(self) -> list[int]:
        """The living engines that have requests of ours, run none, and have sent nothing for a while.

        They may be paused or asleep, or have a request that they can never schedule. A log line has
        said so; they are taken off the list with their next output.
        """
        return self._core.stalled_engines

    @property
    def dead_engines(self) -> Mapping[int, EngineDeadError]:
        """The engines that were lost, each with the first reason."""
        return self._core.dead_engines

    @property
    def failure(self) -> EngineCoreError | None:
        """Why this client serves no request any more; None while it does."""
        return self._core.failure

    async def wait_failed(self) -> EngineCoreError:
        """Wait until no engine is left to serve requests, or the client is closed; gives the reason."""
        return await self.driver.wait_failed()

    # Requests -----------------------------------------------------------------------------------

    @explains_misuse("client.call", instead="trio_vllm.asyncio.open_llm")
    @asynccontextmanager
    async def call(self, request: EngineCoreRequest) -> AsyncIterator[OutputStream]:
        """Send a request; ``async with client.call(request) as outputs`` iterates over them.

        Leaving the block early, for whatever reason, aborts the request. What it depends on and is not
        known of the engines yet is found out first; see `CoreDriver.prepare`.

        With ``resumable`` it is a chunk of a session, which ends like a request of its own; the next
        chunk has the same id, and goes to the same engine once this one has ended. One without
        ``resumable`` ends the session: no engine answers it, so its only output, with
        `FinishReason.STOP`, is ours. A session that is left open is ended by `abort`.

        Raises:
          RequestError: The request was refused, nothing was sent.
          UtilityError: The engines would not say what they support.
          EngineDeadError: No engine is left.
          ClientClosedError: The client is closed.
        """
        if not isinstance(request, EngineCoreRequest):
            raise TypeError(f"call takes an EngineCoreRequest(...), not {type(request).__name__}")
        await self.driver.wait_turn()
        if self.driver.lacks_facts(request):
            await self.driver.prepare(request)
        (request,) = await self.driver.own_arrays([request])
        params = request.sampling_params
        stream = OutputStream(request.request_id, None if params is None else params.max_tokens)
        self.driver.submit(request, stream)
        try:
            yield stream
        finally:
            self.driver.drop(stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each gets a last output with `FinishReason.ABORT`, the engines are told.

        Ids that are not in flight are ignored. More than some hundred end one after the other, with turns
        for other tasks in between.
        """
        self.driver.abort(as_request_ids(request_ids))

    def abort_all(self) -> None:
        """Abort every request in flight."""
        self.driver.abort_all()

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
        return await self.driver.call_utility(method, *args, timeout=timeout)

    def close(self) -> None:
        """Abort what is in flight and serve no request any more; idempotent.

        Each waiting task gets `ClientClosedError`. `open_client` does this at the end of its block.
        """
        self.driver.close()


# Opening --------------------------------------------------------------------------------------------


@explains_misuse("open_client", instead="trio_vllm.asyncio.open_llm, and its `llm.trio.client`")
@asynccontextmanager
async def open_client(
    mode: EngineSource,
    *,
    client_index: int = 0,
    vocab_size: int | None = None,
    hidden_size: int | None = None,
    embedding_size: int | None = None,
    is_multimodal: bool = False,
    accepts_prompt_embeds: bool = False,
    model_runner_v2: bool = True,
    structured_outputs_backend: str = "xgrammar",
    load_balancer: LoadBalancer | None = None,
    learning_timeout: float = 5.0,
    stall_time: float = 10.0,
) -> AsyncIterator[EngineCoreClient]:
    """Connect to engine cores: ``async with open_client(mode) as client`` drives them.

    Args:
      mode: How we come by the engines: `EngineSource` says which ways there are; `HandshakeOwner` is the usual one.
      client_index: Which of the frontend's clients we are; engines answer on that output address.
        They are told but one address by us, so other clients need a supervisor (`Bootstrapped`).
      vocab_size: Number of the model's token ids. An engine dies of an id beyond it and does not
        tell its size. Unless it is stated here, it is found out, by a request for one token, before
        the first request whose sampling parameters have an id, or a number of log probabilities,
        from 256 on: fewer token ids has no model. The ids of a prompt are checked if the size is
        known by then; none is asked for because of them.
      hidden_size: Width of the model's embeddings. Prompts of embeddings are refused without it.
      embedding_size: Width of the vectors that the model pools a prompt to, ``hidden_size`` unless
        it is stated. An answer of another width is an error of its request, and so is one that has
        not the ``dimensions`` that were asked for.
      is_multimodal: Whether the model takes more than text. Otherwise ``mm_features`` are refused,
        for which such an engine would wait for ever.
      accepts_prompt_embeds: Whether the engines run with ``--enable-prompt-embeds``; others ignore
        embeddings without a word, so they are refused.
      model_runner_v2: Whether an engine may run vLLM's second model runner, as it does on GPUs. That
        one dies of more than 1,024 ``allowed_token_ids``, and the like, so these are refused.
      structured_outputs_backend: For requests that name none. An engine keeps the backend of its
        first constrained request, so another one is refused once no engine can have it. That is why
        this is not ``"auto"``, as upstream's is: one schema that xgrammar cannot do would have every
        later request of that engine refused, if it happened to be the first.
      load_balancer: Chooses the engine of a request that is not pinned; `LeastLoaded` if None.
      learning_timeout: Seconds that engines which have just started may take to say what the model
        supports. One that pools dies of a request to generate and the other way round, so they are
        asked. If they do not answer, that is logged, and they are asked again before the first
        pooling request.
      stall_time: Seconds without an output after which `EngineCoreClient.stalled_engines` has an
        engine with requests of which it runs none.

    Raises:
      ConfigurationError: An address is unusable, the engines need a coordinator, or would not
        answer to ``client_index``.
      StartupError: Engines are missing after the mode's timeout; tells which, and in which phase.
      InternalError: A bug of this package, never a peer's doing.

    Leaving the block aborts what is in flight; after it nothing of the client runs. What the block
    raises comes out as it is.

    Cancellation:
      Leaves nothing behind, at any point.
    """
    if isinstance(mode, str):
        raise TypeError(f"a mode is no string: write HandshakeOwner({mode!r})")
    if client_index and mode.is_for_one_client:
        raise ConfigurationError(
            f"client_index must be 0, not {client_index}: these engines are told one output address,"
            " and would answer on one that does not exist; only a supervisor's (Bootstrapped) have"
            " several clients"
        )
    async with (
        mode.connect() as channels,
        run_client(
            channels,
            client_index=client_index,
            structured_outputs_backend=structured_outputs_backend,
            load_balancer=load_balancer,
            stall_time=stall_time,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            embedding_size=embedding_size,
            is_multimodal=is_multimodal,
            accepts_prompt_embeds=accepts_prompt_embeds,
            model_runner_v2=model_runner_v2,
        ) as client,
    ):
        try:
            await client.driver.learn_supported_tasks(timeout=learning_timeout)
        except EngineCoreError as error:
            _log.warning("what the engines support is not known: %s", error)
        yield client


@asynccontextmanager
async def run_client(
    channels: EngineChannels, *, client_index: int = 0, **options: Any
) -> AsyncIterator[EngineCoreClient]:
    """Drive the engines at the far end of open channels, and ask them nothing first.

    ``options`` are those of `FrontendCore`.
    """
    core = FrontendCore(
        channels.ready_responses, waves=_waves(channels), client_index=client_index, **options
    )
    driver = CoreDriver(channels, core)
    async with driver.running():
        yield EngineCoreClient(driver)


def _waves(channels: EngineChannels) -> WaveLeader | WaveFollower | None:
    """Our part in the engines' waves, if there is a coordinator."""
    info = EngineInfo.of(channels.ready_responses)
    is_lockstep = info.data_parallel_size > 1
    match channels.coordination:
        case LeaderChannels(subscribers=subscribers):
            return WaveLeader(
                info.ready_responses, is_lockstep=is_lockstep, subscribers=subscribers
            )
        case FollowerChannels():
            must_notify = info.is_older_than(START_WAVE)
            return WaveFollower(is_lockstep=is_lockstep, must_notify=must_notify)
        case None:
            return None
