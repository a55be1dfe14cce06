"""Engine cores without a model, to put behind any vLLM frontend."""

from trio_vllm.mock.config import MockEngineConfig, ServeOptions
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
