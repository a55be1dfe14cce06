"""The other side: engine cores without a model, to put behind any vLLM frontend."""

from ._engine import (
    COORDINATOR,
    MessageIgnored,
    MockEngine,
    MockEngineConfig,
    RequestFinished,
    RequestRefused,
    RequestStarted,
    Summary,
)
from ._serve import ServeOptions, serve_mock_engines

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
    "serve_mock_engines",
]
