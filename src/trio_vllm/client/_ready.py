"""What all engines together told of themselves when they registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trio_vllm.protocol import EngineCoreReadyResponse, KvEventsConfig, RequestLimits


@attrs.frozen
class EngineFleet:
    """The ready responses by engine index, and what follows from them for the whole.

    Which figure is the least, the sum or the first is upstream's choice: see
    ``MPClient._apply_ready_response`` in ``vllm/v1/engine/core_client.py`` and
    ``engine-core-client/src/client.rs``.
    """

    ready_responses: Mapping[int, EngineCoreReadyResponse]
    max_model_len: int = attrs.field(init=False)
    """Prompt and output tokens that fit every engine."""

    @max_model_len.default
    def _least_max_model_len(self) -> int:
        return min(response.max_model_len for response in self._all)

    @property
    def _all(self) -> list[EngineCoreReadyResponse]:
        return list(self.ready_responses.values())

    def _first(self, name: str) -> Any:
        """The first value that is not None."""
        values = (getattr(response, name) for response in self._all)
        return next((value for value in values if value is not None), None)

    @property
    def model_dtype(self) -> str:
        """The model's number type, such as ``bfloat16``."""
        return self._all[0].dtype

    @property
    def vllm_version(self) -> str:
        """The version that the first engine reports."""
        return self._all[0].vllm_version

    @property
    def block_size(self) -> int:
        """Tokens per KV-cache block."""
        return self._all[0].block_size

    @property
    def num_gpu_blocks(self) -> int:
        """KV-cache blocks of all engines together."""
        return sum(response.num_gpu_blocks for response in self._all)

    @property
    def world_size(self) -> int:
        """Accelerators of one engine."""
        return self._all[0].world_size

    @property
    def data_parallel_size(self) -> int:
        """Engines that run in lockstep; 1 if each runs for itself."""
        return self._all[0].data_parallel_size

    @property
    def max_num_seqs(self) -> int:
        """Requests that all engines together run at once."""
        return sum(response.max_num_seqs for response in self._all)

    @property
    def supports_lora(self) -> bool:
        """Whether every engine takes adapters."""
        return all(response.supports_lora for response in self._all)

    @property
    def max_loras(self) -> int:
        """Adapters that fit into one batch of every engine."""
        return min(response.max_loras for response in self._all)

    @property
    def enable_sleep_mode(self) -> bool:
        """Whether every engine can give its memory back."""
        return all(response.enable_sleep_mode for response in self._all)

    @property
    def supports_draft_weight_updates(self) -> bool:
        """Whether every engine takes new weights for its draft model."""
        return all(response.supports_draft_weight_updates for response in self._all)

    @property
    def kv_cache_size_tokens(self) -> int | None:
        """Tokens that the KV cache of one engine holds, if an engine says."""
        return self._first("kv_cache_size_tokens")  # type: ignore[no-any-return]

    @property
    def kv_cache_max_concurrency(self) -> float | None:
        """Requests of full length that the KV cache of one engine holds, if an engine says."""
        return self._first("kv_cache_max_concurrency")  # type: ignore[no-any-return]

    @property
    def kv_events_config(self) -> KvEventsConfig | None:
        """Where KV-cache events are published, if they are."""
        return self._first("kv_events_config")  # type: ignore[no-any-return]

    @property
    def weight_transfer_backend(self) -> str | None:
        """How new weights reach the engines, if they can."""
        return self._first("weight_transfer_backend")  # type: ignore[no-any-return]

    @property
    def effective_attention_block_size(self) -> int | None:
        """The block size of attention, if all engines agree."""
        sizes = {response.effective_attention_block_size for response in self._all}
        return sizes.pop() if len(sizes) == 1 else None

    def limits(self, *, vocab_size: int | None) -> RequestLimits:
        """What a request must keep to."""
        return RequestLimits.of(self._all, vocab_size=vocab_size)
