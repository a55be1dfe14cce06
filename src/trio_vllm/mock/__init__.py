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

__all__ = [
    "COORDINATOR",
    "MessageIgnored",
    "MockEngine",
    "MockEngineConfig",
    "RequestFinished",
    "RequestRefused",
    "RequestStarted",
    "Summary",
]
