"""The frontend's side: drives engine cores."""

from trio_vllm.client._client import EngineCoreClient, open_client
from trio_vllm.client._inflight import Sink
from trio_vllm.client._ready import EngineFleet
from trio_vllm.client._stream import OutputStream, StreamOutput
from trio_vllm.client._waker import Waker

__all__ = [
    "EngineCoreClient",
    "EngineFleet",
    "OutputStream",
    "Sink",
    "StreamOutput",
    "Waker",
    "open_client",
]
