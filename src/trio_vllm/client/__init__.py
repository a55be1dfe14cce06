"""The client: drives engine cores over the transport. Public."""

from trio_vllm.client.answers import AnswerCheck as AnswerCheck
from trio_vllm.client.answers import LogprobsCheck as LogprobsCheck
from trio_vllm.client.answers import logprob_columns as logprob_columns
from trio_vllm.client.client import EngineCoreClient as EngineCoreClient
from trio_vllm.client.client import open_client as open_client
from trio_vllm.client.client import run_client as run_client
from trio_vllm.client.core import ClientStatistics as ClientStatistics
from trio_vllm.client.core import FrontendCore as FrontendCore
from trio_vllm.client.driver import CoreDriver as CoreDriver
from trio_vllm.client.engines import Engine as Engine
from trio_vllm.client.engines import EngineInfo as EngineInfo
from trio_vllm.client.engines import EngineSnapshot as EngineSnapshot
from trio_vllm.client.engines import LeastLoaded as LeastLoaded
from trio_vllm.client.engines import LeastWaiting as LeastWaiting
from trio_vllm.client.engines import LoadBalancer as LoadBalancer
from trio_vllm.client.streams import OutputStream as OutputStream
from trio_vllm.client.streams import Sink as Sink
from trio_vllm.client.streams import StreamOutput as StreamOutput
from trio_vllm.client.streams import as_request_ids as as_request_ids
from trio_vllm.client.streams import too_many_tokens as too_many_tokens
from trio_vllm.client.utility_calls import KvCacheGroup as KvCacheGroup
from trio_vllm.client.utility_methods import PauseMode as PauseMode
from trio_vllm.transport import Bootstrapped as Bootstrapped
from trio_vllm.transport import EngineSource as EngineSource
from trio_vllm.transport import HandshakeOwner as HandshakeOwner
