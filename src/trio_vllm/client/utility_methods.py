"""`UtilityMethods`: the methods of an engine core, and of its workers, typed.

Mirrors ``engine-core-client/src/client.rs`` and ``AsyncMPClient`` of
``vllm/v1/engine/core_client.py``, with the names of the engine's own methods.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs
import trio

from trio_vllm.client.engines import EngineInfo
from trio_vllm.client.utility_calls import (
    BOOLEAN,
    CHECKSUMS,
    INTEGERS,
    KV_CACHE_GROUPS,
    STRING,
    STRINGS,
    UTILITY_TIMEOUT,
    WORKER_RESULTS,
    KvCacheGroup,
    Result,
    concatenate,
    first,
    require_equal,
)
from trio_vllm.client.versions import PAUSE_GENERATION, PROFILER_KWARGS
from trio_vllm.errors import UtilityCallFailedError, UtilityRefusedError
from trio_vllm.protocol import LoRARequest

T = TypeVar("T")


class PauseMode(enum.Enum):
    """What happens to the requests in flight when engines pause; the values are on the wire."""

    ABORT = "abort"
    """They end at once, with `FinishReason.ABORT`."""
    WAIT = "wait"
    """They go on, and the pause begins when the last one has ended."""
    KEEP = "keep"
    """They stand still until the pause ends."""


class UtilityMethods(ABC):
    """Every method runs on all living engines at once, as engines in lockstep demand.

    What is said of `EngineCoreClient.call_utility` holds for each: it waits for every engine's
    outcome, ``timeout`` seconds at most; if one fails it raises `UtilityCallFailedError`, which
    tells which engines did run the method; cancelling stops the waiting, not the engines. A result
    of a wrong type is a `UtilityResultError`. Where the docstring says nothing else, the result is
    that of the first engine.
    """

    _is_profiling = False

    @property
    @abstractmethod
    def engine_info(self) -> EngineInfo:
        """What the engines told of themselves."""

    @abstractmethod
    async def call_utility(
        self, method: str, *args: Any, timeout: float = UTILITY_TIMEOUT
    ) -> dict[int, Any]:
        """Run a method on every living engine; give the results by engine index."""

    async def call_utility_consensus(
        self, method: str, *args: Any, timeout: float = UTILITY_TIMEOUT
    ) -> Any:
        """Run a method on every living engine, and give the result that all of them gave.

        Like `call_utility` otherwise.

        Raises:
          InconsistentUtilityResultsError: The results differ; lists them by engine.
        """
        return require_equal(method, await self.call_utility(method, *args, timeout=timeout))

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        worker_timeout: float | None = None,
        timeout: float = UTILITY_TIMEOUT,
    ) -> list[Any]:
        """Run a method of the workers on every worker of every engine.

        A result that MessagePack cannot express ends the engine's output: it goes mute. What is
        known to be such a method is refused.

        Args:
          method: Its name.
          args: Its positional arguments.
          kwargs: Its keyword arguments.
          worker_timeout: Seconds that an engine waits for its workers; infinity if None.
          timeout: Seconds that we wait for the engines.

        Returns:
          The results of all workers, engine by engine.
        """
        rpc_args = (method, worker_timeout, list(args), None if kwargs is None else dict(kwargs))
        return concatenate(
            await self._call("collective_rpc", *rpc_args, result=WORKER_RESULTS, timeout=timeout)
        )

    # What an engine is --------------------------------------------------------------------------

    async def get_supported_tasks(self, *, timeout: float = UTILITY_TIMEOUT) -> list[str]:
        """What the model can do, such as ``["generate"]``."""
        return first(await self._call("get_supported_tasks", result=STRINGS, timeout=timeout))

    async def get_kv_cache_group_metadata(
        self, *, timeout: float = UTILITY_TIMEOUT
    ) -> list[KvCacheGroup]:
        """How the model's KV cache is organised, as consumers of KV-cache events need it."""
        method = "get_kv_cache_group_metadata"
        return first(await self._call(method, result=KV_CACHE_GROUPS, timeout=timeout))

    # Caches -------------------------------------------------------------------------------------

    async def reset_prefix_cache(
        self,
        *,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        timeout: float = UTILITY_TIMEOUT,
    ) -> bool:
        """Forget the prefixes of all prompts; gives whether every engine has.

        Args:
          reset_running_requests: Preempt what runs; an engine that is at work does not forget
            otherwise.
          reset_connector: Empty the cache behind the KV connector too.
          timeout: Seconds to wait for the last engine.
        """
        args = (reset_running_requests, reset_connector)
        return await self._on_every_engine("reset_prefix_cache", *args, timeout=timeout)

    async def reset_mm_cache(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Forget all multimodal inputs."""
        await self.call_utility("reset_mm_cache", timeout=timeout)

    async def reset_encoder_cache(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Forget all outputs of encoders; needed after the weights have changed."""
        await self.call_utility("reset_encoder_cache", timeout=timeout)

    # Pausing and sleeping -----------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        timeout: float = UTILITY_TIMEOUT,
    ) -> None:
        """Step no more until `resume_scheduler`; returns when all engines stand still.

        New requests are refused by the engine, or with ``mode`` KEEP queued. An engine before
        vLLM 0.33 queues them in every mode.

        Args:
          mode: What happens to the requests in flight.
          clear_cache: Empty the caches once it stands still, as changed weights demand.
          timeout: Seconds to wait for the last engine. Afterwards the pause may still come.
        """
        args = (PauseMode(mode).value, clear_cache)
        if self.engine_info.is_older_than(PAUSE_GENERATION):
            await self.call_utility("pause_scheduler", *args, timeout=timeout)
            return
        deadline = trio.current_time() + timeout
        try:
            await self.call_utility("pause_generation", *args, timeout=timeout)
        except UtilityCallFailedError as error:
            if not _lacks_method(error):
                raise
        else:
            return
        time_left = max(deadline - trio.current_time(), 0)
        await self.call_utility("pause_scheduler", *args, timeout=time_left)

    async def resume_scheduler(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """End a pause; queued and kept requests go on."""
        await self.call_utility("resume_scheduler", timeout=timeout)

    async def is_scheduler_paused(self, *, timeout: float = UTILITY_TIMEOUT) -> bool:
        """Whether the engines are paused, in whatever mode.

        Raises:
          InconsistentUtilityResultsError: Some are and some are not.
        """
        return await self._agreed_boolean("is_scheduler_paused", timeout)

    async def sleep(
        self,
        level: int = 1,
        mode: PauseMode = PauseMode.ABORT,
        *,
        timeout: float = UTILITY_TIMEOUT,
    ) -> None:
        """Pause, and give memory up.

        Args:
          level: 0 gives none up, 1 moves the weights out and drops the KV cache, 2 drops both.
          mode: What happens to the requests in flight.
          timeout: Seconds to wait for the last engine.
        """
        await self.call_utility("sleep", level, PauseMode(mode).value, timeout=timeout)

    async def wake_up(
        self, tags: Sequence[str] | None = None, *, timeout: float = UTILITY_TIMEOUT
    ) -> bool:
        """Get memory back; gives whether every engine is fully awake, and so goes on.

        Args:
          tags: What to get back (``weights``, ``kv_cache``), or ``scheduling`` after level 0;
            None is everything.
          timeout: Seconds to wait for the last engine.
        """
        wire_tags = None if tags is None else list(tags)
        return await self._on_every_engine("wake_up", wire_tags, timeout=timeout)

    async def is_sleeping(self, *, timeout: float = UTILITY_TIMEOUT) -> bool:
        """Whether the engines sleep or are only paused.

        Raises:
          InconsistentUtilityResultsError: Some do and some do not.
        """
        return await self._agreed_boolean("is_sleeping", timeout)

    async def release_kv_cache_memory(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Give the memory of the KV cache up; engines refuse unless they are paused and idle."""
        await self.call_utility("release_kv_cache_memory", timeout=timeout)

    # Adapters -----------------------------------------------------------------------------------

    async def add_lora(self, lora: LoRARequest, *, timeout: float = UTILITY_TIMEOUT) -> bool:
        """Load an adapter; gives whether every engine did."""
        wire_lora = list(attrs.astuple(lora))  # its attributes are in wire order
        return await self._on_every_engine("add_lora", wire_lora, timeout=timeout)

    async def remove_lora(self, lora_int_id: int, *, timeout: float = UTILITY_TIMEOUT) -> bool:
        """Drop an adapter; gives whether every engine had it."""
        return await self._on_every_engine("remove_lora", lora_int_id, timeout=timeout)

    async def pin_lora(self, lora_int_id: int, *, timeout: float = UTILITY_TIMEOUT) -> bool:
        """Keep an adapter in memory for good; gives whether every engine does."""
        return await self._on_every_engine("pin_lora", lora_int_id, timeout=timeout)

    async def list_loras(self, *, timeout: float = UTILITY_TIMEOUT) -> set[int]:
        """The ids of the loaded adapters."""
        results = await self._call("list_loras", result=INTEGERS, timeout=timeout)
        return set(first(results))

    # Weights ------------------------------------------------------------------------------------
    #
    # New weights come in over a channel between trainer and workers that these calls only steer:
    # `init_weight_transfer_engine` once, then for each version `start_weight_update`,
    # `update_weights` any number of times and `finish_weight_update`. They mirror
    # ``vllm/v1/engine/async_llm.py``.

    async def get_weight_version(self, *, timeout: float = UTILITY_TIMEOUT) -> str:
        """The version that outputs are marked with; ``default`` until one is set.

        Raises:
          InconsistentUtilityResultsError: The engines have different ones.
        """
        method = "get_weight_version"
        return require_equal(method, await self._call(method, result=STRING, timeout=timeout))

    async def set_weight_version(self, version: str, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Mark outputs with this version from now on."""
        await self.call_utility("set_weight_version", version, timeout=timeout)

    async def init_weight_transfer_engine(
        self, init_info: Mapping[str, Any], *, timeout: float = UTILITY_TIMEOUT
    ) -> None:
        """Let the workers get ready for new weights; ``init_info`` is the transfer backend's."""
        await self._on_workers("init_weight_transfer_engine", timeout, init_info=dict(init_info))

    async def start_weight_update(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Begin to replace the model's weights."""
        await self._on_workers("start_weight_update", timeout)

    async def start_draft_weight_update(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Begin to replace the draft model's weights; see ``supports_draft_weight_updates``."""
        await self._on_workers("start_draft_weight_update", timeout)

    async def update_weights(
        self,
        update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        timeout: float = UTILITY_TIMEOUT,
    ) -> None:
        """Let the workers receive weights; ``update_info`` is the transfer backend's."""
        info: Any = (
            dict(update_info)
            if isinstance(update_info, Mapping)
            else [dict(part) for part in update_info]
        )
        await self._on_workers("update_weights", timeout, update_info=info)

    async def finish_weight_update(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Take the new weights into use."""
        await self._on_workers("finish_weight_update", timeout)

    async def shutdown_weight_transfer_engine(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Let the workers give up the channel of new weights."""
        await self._on_workers("shutdown_weight_transfer_engine", timeout)

    async def compute_weight_checksums(
        self, *, timeout: float = UTILITY_TIMEOUT
    ) -> list[dict[str, str]]:
        """The checksums of each worker's weights by their names, engine by engine."""
        method = "compute_weight_checksums"
        return concatenate(await self._call(method, result=CHECKSUMS, timeout=timeout))

    async def save_sharded_state(
        self,
        path: str,
        *,
        pattern: str | None = None,
        max_size: int | None = None,
        timeout: float = UTILITY_TIMEOUT,
    ) -> None:
        """Write the weights as each worker holds them.

        Args:
          path: An existing folder on the engines' machine.
          pattern: The names of the files; None is vLLM's own.
          max_size: Bytes of a file; None is vLLM's own.
          timeout: Seconds to wait for the last engine.
        """
        args = (path, pattern, max_size)
        await self.call_utility("save_sharded_state", *args, timeout=timeout)

    # Profiling ----------------------------------------------------------------------------------

    async def start_profile(
        self,
        prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
        timeout: float = UTILITY_TIMEOUT,
    ) -> None:
        """Let the workers' profiler run until `stop_profile`.

        Args:
          prefix: Begins the names of the files with the results.
          delay_iterations: Steps before it begins.
          max_iterations: Steps after which it ends by itself.
          profiler_kwargs: The profiler's own options; from vLLM 0.33 on.
          timeout: Seconds to wait for the last engine.

        Raises:
          UtilityRefusedError: It runs already, by a call of this client, or the engines know no
            ``profiler_kwargs``. Nothing was sent.
        """
        if self._is_profiling:
            raise UtilityRefusedError("profile", "the profiler runs already: stop it first")
        args: list[Any] = [True, prefix, delay_iterations, max_iterations]
        if profiler_kwargs is not None:
            if self.engine_info.is_older_than(PROFILER_KWARGS):
                raise UtilityRefusedError("profile", "these engines take no profiler_kwargs")
            args.append(dict(profiler_kwargs))
        self._is_profiling = True
        try:
            await self.call_utility("profile", *args, timeout=timeout)
        except UtilityCallFailedError as error:
            self._is_profiling = bool(error.succeeded)
            raise
        except TypeError:  # nothing was sent
            self._is_profiling = False
            raise

    async def stop_profile(
        self, prefix: str | None = None, *, timeout: float = UTILITY_TIMEOUT
    ) -> None:
        """Stop the profiler; another client may have started it."""
        try:
            await self.call_utility("profile", False, prefix, timeout=timeout)
        finally:
            self._is_profiling = False

    async def execute_dummy_batch(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Run one step without a request."""
        await self.call_utility("execute_dummy_batch", timeout=timeout)

    # Shared -------------------------------------------------------------------------------------

    async def _call(
        self, method: str, *args: Any, result: Result[T], timeout: float
    ) -> dict[int, T]:
        """Run a method; give the checked results by engine index."""
        return result.check(method, await self.call_utility(method, *args, timeout=timeout))

    async def _on_every_engine(self, method: str, *args: Any, timeout: float) -> bool:
        results = await self._call(method, *args, result=BOOLEAN, timeout=timeout)
        return all(results.values())

    async def _agreed_boolean(self, method: str, timeout: float) -> bool:
        return require_equal(method, await self._call(method, result=BOOLEAN, timeout=timeout))

    async def _on_workers(self, method: str, timeout: float, **kwargs: Any) -> None:
        await self.collective_rpc(method, kwargs=kwargs or None, timeout=timeout)


def _lacks_method(error: UtilityCallFailedError) -> bool:
    """Whether all engines say that they have no such method."""
    lack = f"has no attribute '{error.method}'"
    return not error.succeeded and all(lack in text for text in error.failures.values())
