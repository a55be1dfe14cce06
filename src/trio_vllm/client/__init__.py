"""The frontend's side: drives engine cores."""

from trio_vllm.client._client import EngineCoreClient
from trio_vllm.client._inflight import Sink
from trio_vllm.client._opening import open_client
from trio_vllm.client._ready import EngineFleet
from trio_vllm.client._stream import OutputStream, StreamOutput
from trio_vllm.client._utilities import PauseMode
from trio_vllm.client._utility_rules import KvCacheGroup
from trio_vllm.transport import Bootstrapped, HandshakeOwner

__all__ = [
    "Bootstrapped",
    "EngineCoreClient",
    "EngineFleet",
    "HandshakeOwner",
    "KvCacheGroup",
    "OutputStream",
    "PauseMode",
    "Sink",
    "StreamOutput",
    "open_client",
]
