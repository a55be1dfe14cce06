"""Drive headless vLLM engine cores from trio, token in and token out.

Here is what most programs use: connecting, requests, outputs, errors. The rest is in these public
packages and modules:

- `trio_vllm.llm`: the facade's further types; `trio_vllm.llm.metrics`: Prometheus metrics;
  `trio_vllm.llm.tracing`: OpenTelemetry;
- `trio_vllm.monitor`: a live table of the engines on a terminal;
- `trio_vllm.client`: the client of the engines;
- `trio_vllm.protocol`: all that is said over the wire;
- `trio_vllm.errors`: all exceptions;
- `trio_vllm.mock`: mock engines;
- `trio_vllm.asyncio`: the same from a program on asyncio;
- `trio_vllm.testing`: mock engines and a frontend double for tests.

`trio_vllm.transport`, `trio_vllm.endpoint`, `trio_vllm.cli`, `trio_vllm.processes` and `trio_vllm.concurrency` are internal. Each name is imported
when it is first used, so that importing the package costs nothing and the commands answer fast.
"""

from __future__ import annotations

from trio_vllm._lazy import install_lazy_importer

TYPE_CHECKING = False  # type checkers know better; importing it from typing would take 10 ms

if TYPE_CHECKING or not install_lazy_importer(__name__):
    from trio_vllm.client import Bootstrapped as Bootstrapped
    from trio_vllm.client import EngineCoreClient as EngineCoreClient
    from trio_vllm.client import HandshakeOwner as HandshakeOwner
    from trio_vllm.client import PauseMode as PauseMode
    from trio_vllm.client import open_client as open_client
    from trio_vllm.errors import ClientClosedError as ClientClosedError
    from trio_vllm.errors import ConfigurationError as ConfigurationError
    from trio_vllm.errors import DecodeError as DecodeError
    from trio_vllm.errors import EngineCommandEndedError as EngineCommandEndedError
    from trio_vllm.errors import EngineCommandError as EngineCommandError
    from trio_vllm.errors import EngineCoreError as EngineCoreError
    from trio_vllm.errors import EngineDeadError as EngineDeadError
    from trio_vllm.errors import InternalError as InternalError
    from trio_vllm.errors import RequestError as RequestError
    from trio_vllm.errors import StartupError as StartupError
    from trio_vllm.errors import UtilityError as UtilityError
    from trio_vllm.llm import CompletionDelta as CompletionDelta
    from trio_vllm.llm import CompletionOutput as CompletionOutput
    from trio_vllm.llm import EncodeOutput as EncodeOutput
    from trio_vllm.llm import EncodeRequest as EncodeRequest
    from trio_vllm.llm import GenerateOutput as GenerateOutput
    from trio_vllm.llm import GenerateRequest as GenerateRequest
    from trio_vllm.llm import GenerateStream as GenerateStream
    from trio_vllm.llm import Llm as Llm
    from trio_vllm.llm import Observer as Observer
    from trio_vllm.llm import open_llm as open_llm
    from trio_vllm.protocol import DpControlOutput as DpControlOutput
    from trio_vllm.protocol import EngineCoreOutput as EngineCoreOutput
    from trio_vllm.protocol import EngineCoreOutputs as EngineCoreOutputs
    from trio_vllm.protocol import EngineCoreReadyResponse as EngineCoreReadyResponse
    from trio_vllm.protocol import EngineCoreRequest as EngineCoreRequest
    from trio_vllm.protocol import EngineCoreSamplingParams as EngineCoreSamplingParams
    from trio_vllm.protocol import EngineId as EngineId
    from trio_vllm.protocol import FinishReason as FinishReason
    from trio_vllm.protocol import Logprobs as Logprobs
    from trio_vllm.protocol import LoRARequest as LoRARequest
    from trio_vllm.protocol import PoolingParams as PoolingParams
    from trio_vllm.protocol import PositionLogprobs as PositionLogprobs
    from trio_vllm.protocol import RequestBatchOutputs as RequestBatchOutputs
    from trio_vllm.protocol import SamplingParams as SamplingParams
    from trio_vllm.protocol import StructuredOutputsParams as StructuredOutputsParams
    from trio_vllm.protocol import TokenLogprob as TokenLogprob
    from trio_vllm.protocol import UtilityCallOutput as UtilityCallOutput
    from trio_vllm.spawn import SpawnedEngine as SpawnedEngine
    from trio_vllm.spawn import spawn_engine as spawn_engine
