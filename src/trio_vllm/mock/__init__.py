"""Mock engines: engine cores without a model, to put behind any vLLM frontend. Public."""

from trio_vllm.mock.config import MockEngineConfig as MockEngineConfig
from trio_vllm.mock.encoding import COORDINATOR as COORDINATOR
from trio_vllm.mock.engine import MockEngine as MockEngine
from trio_vllm.mock.events import MessageIgnored as MessageIgnored
from trio_vllm.mock.events import RequestFinished as RequestFinished
from trio_vllm.mock.events import RequestRefused as RequestRefused
from trio_vllm.mock.events import RequestStarted as RequestStarted
from trio_vllm.mock.events import Summary as Summary
from trio_vllm.mock.serve import ServeOptions as ServeOptions
from trio_vllm.mock.serve import serve_mock_engines as serve_mock_engines
