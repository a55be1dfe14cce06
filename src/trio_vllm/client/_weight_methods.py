"""Utility methods that concern the weights of the model: their version, transfer and checksums.

Mirrors ``vllm/v1/engine/async_llm.py`` (``init_weight_transfer_engine`` and its relatives).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trio_vllm.client._utility_caller import UTILITY_TIMEOUT, UtilityCaller
from trio_vllm.client._utility_rules import CHECKSUMS, STRING, agreed, concatenated


class WeightMethods(UtilityCaller):
    """Every method runs on all engines, and fails if one of them fails; see `call_utility`.

    New weights come in over a channel between trainer and workers that these calls only steer:
    `init_weight_transfer_engine` once, then for each version `start_weight_update`,
    `update_weights` any number of times and `finish_weight_update`.
    """

    async def get_weight_version(self, *, timeout: float = UTILITY_TIMEOUT) -> str:
        """The version that outputs are marked with; ``default`` until one is set.

        Raises:
          InconsistentUtilityResultsError: The engines have different ones.
        """
        method = "get_weight_version"
        return agreed(method, await self._call(method, result=STRING, timeout=timeout))

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

    async def _on_workers(self, method: str, timeout: float, **kwargs: Any) -> None:
        await self.collective_rpc(method, kwargs=kwargs or None, timeout=timeout)

    async def compute_weight_checksums(
        self, *, timeout: float = UTILITY_TIMEOUT
    ) -> list[dict[str, str]]:
        """The checksums of each worker's weights by their names, engine by engine."""
        method = "compute_weight_checksums"
        return concatenated(await self._call(method, result=CHECKSUMS, timeout=timeout))

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
