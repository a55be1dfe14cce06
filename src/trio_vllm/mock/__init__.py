"""Mock engines: engine cores without a model, to put behind any vLLM frontend. Public.

Each name is imported when it is first used: the command shows its help without numpy and trio.
"""

from __future__ import annotations

from trio_vllm._lazy import install_lazy_importer

TYPE_CHECKING = False  # type checkers know better; importing it from typing would take 10 ms

if TYPE_CHECKING or not install_lazy_importer(__name__):
    from trio_vllm.mock.config import MockEngineConfig as MockEngineConfig
    from trio_vllm.mock.config import ServeOptions as ServeOptions
    from trio_vllm.mock.config import parse_duration as parse_duration
    from trio_vllm.mock.encoding import COORDINATOR as COORDINATOR
    from trio_vllm.mock.engine import MockEngine as MockEngine
    from trio_vllm.mock.engine import ready_response as ready_response
    from trio_vllm.mock.events import MessageIgnored as MessageIgnored
    from trio_vllm.mock.events import RequestFinished as RequestFinished
    from trio_vllm.mock.events import RequestRefused as RequestRefused
    from trio_vllm.mock.events import RequestStarted as RequestStarted
    from trio_vllm.mock.events import Summary as Summary
    from trio_vllm.mock.profile import load_profile as load_profile
    from trio_vllm.mock.profile import profile_names as profile_names
    from trio_vllm.mock.runner import Lockstep as Lockstep
    from trio_vllm.mock.serve import serve_in_memory as serve_in_memory
    from trio_vllm.mock.serve import serve_mock_engines as serve_mock_engines
    from trio_vllm.mock.statuses import EngineStatus as EngineStatus
    from trio_vllm.mock.statuses import EngineStatuses as EngineStatuses
    from trio_vllm.mock.structured import load_vocabulary as load_vocabulary
    from trio_vllm.mock.transfers import TransferHub as TransferHub
