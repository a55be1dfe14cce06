"""What all typed utility methods are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trio_vllm.client._ready import EngineFleet
from trio_vllm.client._utility_rules import WORKER_RESULTS, Result, agreed, concatenated

T = TypeVar("T")

UTILITY_TIMEOUT = 300.0
"""Seconds for a utility call, unless the caller says otherwise; loading an adapter counts."""


class UtilityCaller(ABC):
    """Somebody who can run a method of the engine core on all engines."""

    fleet: EngineFleet

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
        return agreed(method, await self.call_utility(method, *args, timeout=timeout))

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
          worker_timeout: Seconds that an engine waits for its workers; None is for ever.
          timeout: Seconds that we wait for the engines.

        Returns:
          The results of all workers, engine by engine.
        """
        rpc_args = (method, worker_timeout, list(args), None if kwargs is None else dict(kwargs))
        return concatenated(
            await self._call("collective_rpc", *rpc_args, result=WORKER_RESULTS, timeout=timeout)
        )

    async def _call(
        self, method: str, *args: Any, result: Result[T], timeout: float
    ) -> dict[int, T]:
        """Run a method; give the checked results by engine index."""
        return result.check(method, await self.call_utility(method, *args, timeout=timeout))
