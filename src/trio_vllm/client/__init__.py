"""The frontend's side: drives engine cores."""

from trio_vllm.client.client import EngineCoreClient, open_client, run_client
from trio_vllm.client.core import ClientStatistics, FrontendCore
from trio_vllm.client.driver import CoreDriver
from trio_vllm.client.engines import EngineInfo, LeastLoaded, LeastWaiting, LoadBalancer
from trio_vllm.client.requests import OutputStream, Sink, StreamOutput
from trio_vllm.client.utility_calls import KvCacheGroup
from trio_vllm.client.utility_methods import PauseMode
from trio_vllm.transport import Bootstrapped, EngineSource, HandshakeOwner

__all__ = [
    "Bootstrapped",
    "ClientStatistics",
    "CoreDriver",
    "EngineCoreClient",
    "EngineInfo",
    "EngineSource",
    "FrontendCore",
    "HandshakeOwner",
    "KvCacheGroup",
    "LeastLoaded",
    "LeastWaiting",
    "LoadBalancer",
    "OutputStream",
    "PauseMode",
    "Sink",
    "StreamOutput",
    "open_client",
    "run_client",
]
