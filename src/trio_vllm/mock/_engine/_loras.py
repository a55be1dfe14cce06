"""The LoRA adapters that an engine has loaded."""

from __future__ import annotations

import attrs


class AdapterError(Exception):
    """An adapter call that an engine refuses, in the engine's words."""


@attrs.define
class Adapters:
    """Adapter ids, least recently used first; as in upstream, one too many evicts the first."""

    capacity: int
    _pinned: dict[int, bool] = attrs.field(factory=dict, init=False)

    def add(self, adapter_id: int) -> bool:
        """Load an adapter, or touch it; whether it was new."""
        self._require_enabled()
        pinned = self._pinned.pop(adapter_id, None)
        if pinned is None and len(self._pinned) >= self.capacity:
            self._evict()
        self._pinned[adapter_id] = bool(pinned)
        return pinned is None

    def _evict(self) -> None:
        for adapter_id, pinned in self._pinned.items():
            if not pinned:
                del self._pinned[adapter_id]
                return
        raise AdapterError("All items are pinned, cannot remove oldest from the cache.")

    def remove(self, adapter_id: int) -> bool:
        """Unload an adapter; whether there was one."""
        self._require_enabled()
        if adapter_id < 1:
            raise AdapterError("lora_id must be greater than 0.")
        return self._pinned.pop(adapter_id, None) is not None

    def pin(self, adapter_id: int) -> bool:
        """Keep an adapter from being evicted."""
        self._require_enabled()
        if adapter_id not in self._pinned:
            raise AdapterError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        self._pinned[adapter_id] = True
        return True

    def ids(self) -> list[int]:
        """The ids of what is loaded."""
        self._require_enabled()
        return sorted(self._pinned)

    def _require_enabled(self) -> None:
        if not self.capacity:
            raise AdapterError("LoRA is not enabled. Use --enable-lora to enable LoRA.")
