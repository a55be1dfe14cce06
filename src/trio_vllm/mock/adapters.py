"""`Adapters`: which LoRA adapters an engine holds, and what it says of those that it cannot load.

Mirrors ``LRUCacheWorkerLoRAManager`` (``vllm/lora/worker_manager.py``) and ``PEFTHelper``
(``vllm/lora/peft_helper.py``) upstream.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from trio_vllm.protocol import LoRARequest
from trio_vllm.values import define


class AdapterCallError(Exception):
    """An adapter call that an engine refuses, in the engine's words."""


def load_fault(lora: LoRARequest, max_rank: int) -> str | None:
    """Why the files of an adapter cannot be loaded, in vLLM's words; reads its configuration.

    Args:
      lora: The adapter.
      max_rank: The greatest rank that there is room for; 0 loads anything, without looking.
    """
    if not max_rank:
        return None
    try:
        text = Path(lora.lora_path, "adapter_config.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"Loading lora {lora.lora_name} failed: No adapter found for {lora.lora_path}"
    except OSError as error:
        return str(error)
    try:
        return _config_fault(json.loads(text), max_rank)
    except ValueError as error:
        return str(error)


def _config_fault(config: Any, max_rank: int) -> str | None:
    if not isinstance(config, dict):
        return "adapter_config.json is no JSON object"
    missing = {"r", "lora_alpha", "target_modules"} - config.keys()
    if missing:
        return f"Missing required configuration fields: {missing}"
    rank = config["r"]
    if not isinstance(rank, int) or rank < 1:
        return f"LoRA rank `r` must be a positive integer, got {rank}."
    highest = max([rank, *(config.get("rank_pattern") or {}).values()])
    faults = []
    if highest > max_rank:
        faults.append(f"LoRA rank {highest} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        faults.append("Adapter bias is not supported.")
    return " ".join(faults) or None


@define
class Adapters:
    """Adapter ids, least recently used first; as in upstream, one too many evicts the first."""

    capacity: int
    max_rank: int = 0
    """The greatest rank of an adapter; 0 loads any, without looking for its files."""
    _pinned: dict[int, bool] = attrs.field(factory=dict, init=False)

    def fault_of(self, lora: LoRARequest) -> str | None:
        """Why a request for this adapter cannot run, if so: it is not loaded and cannot be."""
        if lora.lora_int_id in self._pinned and not lora.load_inplace:
            return None
        return load_fault(lora, self.max_rank)

    def add(self, lora: LoRARequest) -> bool:
        """Load an adapter, or touch it; true in either case."""
        self._require_enabled()
        if (fault := self.fault_of(lora)) is not None:
            raise AdapterCallError(fault)
        pinned = self._pinned.pop(lora.lora_int_id, None)
        if pinned is None and len(self._pinned) >= self.capacity:
            self._evict()
        self._pinned[lora.lora_int_id] = bool(pinned) and not lora.load_inplace
        return True

    def _evict(self) -> None:
        for adapter_id, pinned in self._pinned.items():
            if not pinned:
                del self._pinned[adapter_id]
                return
        raise AdapterCallError("All items are pinned, cannot remove oldest from the cache.")

    def remove(self, adapter_id: int) -> bool:
        """Unload an adapter; whether there was one."""
        self._require_enabled()
        return self._pinned.pop(adapter_id, None) is not None

    def pin(self, adapter_id: int) -> bool:
        """Keep an adapter from being evicted."""
        self._require_enabled()
        if adapter_id not in self._pinned:
            raise AdapterCallError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        self._pinned[adapter_id] = True
        return True

    def ids(self) -> list[int]:
        """The ids of what is loaded."""
        self._require_enabled()
        return sorted(self._pinned)

    def _require_enabled(self) -> None:
        if not self.capacity:
            raise AdapterCallError("LoRA is not enabled. Use --enable-lora to enable LoRA.")
