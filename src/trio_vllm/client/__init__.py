"""The frontend's side: drives engine cores."""

from trio_vllm.client.client import EngineCoreClient, open_client, run_client
from trio_vllm.client.engines import EngineInfo
from trio_vllm.client.requests import OutputStream, Sink, StreamOutput
from trio_vllm.client.utility_calls import KvCacheGroup
from trio_vllm.client.utility_methods import PauseMode
from trio_vllm.transport import Bootstrapped, EngineSource, HandshakeOwner

__all__ = [
    "Bootstrapped",
    "EngineCoreClient",
    "EngineInfo",
    "EngineSource",
    "HandshakeOwner",
    "KvCacheGroup",
    "OutputStream",
    "PauseMode",
    "Sink",
    "StreamOutput",
    "open_client",
]
