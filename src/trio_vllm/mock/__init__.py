"""Engine cores without a model, to put behind any vLLM frontend.

The options are imported at once, all else when it is first used: the command shows its help without
numpy and trio.
"""

from __future__ import annotations

from importlib import import_module

from trio_vllm.mock.config import MockEngineConfig, ServeOptions

TYPE_CHECKING = False  # type checkers know better; importing it from typing would take 10 ms

if TYPE_CHECKING:
    from trio_vllm.mock.encoding import COORDINATOR
    from trio_vllm.mock.engine import MockEngine, ready_response
    from trio_vllm.mock.events import (
        MessageIgnored,
        RequestFinished,
        RequestRefused,
        RequestStarted,
        Summary,
    )
    from trio_vllm.mock.serve import serve_mock_engines

__all__ = [
    "COORDINATOR",
    "MessageIgnored",
    "MockEngine",
    "MockEngineConfig",
    "RequestFinished",
    "RequestRefused",
    "RequestStarted",
    "ServeOptions",
    "Summary",
    "ready_response",
    "serve_mock_engines",
]

_HOMES = {
    "COORDINATOR": "encoding",
    "MockEngine": "engine",
    "ready_response": "engine",
    "serve_mock_engines": "serve",
}

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_HOMES.get(name, 'events')}")
        globals()[name] = value = getattr(module, name)
        return value
