"""The connections in memory of `trio_vllm.transport`, for tests under an autojump clock."""

from trio_vllm.transport.memory import (
    MemoryReceiver,
    MemoryRouter,
    MemorySender,
    open_memory_connection,
)

__all__ = ["MemoryReceiver", "MemoryRouter", "MemorySender", "open_memory_connection"]
