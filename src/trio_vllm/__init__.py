"""Drive headless vLLM engine cores from trio, token in and token out.

All public names are here, except those of the mock engine: they are in `trio_vllm.mock`. Each is
imported when it is first used, so that importing the package costs nothing and the commands answer
fast.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers know better; importing it from typing would take 10 ms

if TYPE_CHECKING:
    from trio_vllm.client import (
        Bootstrapped,
        EngineCoreClient,
        EngineInfo,
        HandshakeOwner,
        KvCacheGroup,
        OutputStream,
        PauseMode,
        StreamOutput,
        open_client,
    )
    from trio_vllm.errors import (
        AddressInUseError,
        ClientClosedError,
        ConfigurationError,
        DecodeError,
        DuplicateRequestIdError,
        EmptyPromptError,
        EngineCoreError,
        EngineDeadError,
        InconsistentUtilityResultsError,
        InternalError,
        InvalidDataParallelRankError,
        InvalidFieldError,
        PeerGoneError,
        RequestError,
        StartupError,
        UnsupportedFieldError,
        UtilityCallFailedError,
        UtilityError,
        UtilityRefusedError,
        UtilityResultError,
        UtilityTimeoutError,
    )
    from trio_vllm.llm import (
        CompletionOutput,
        EncodeOutput,
        EncodeRequest,
        GenerateOutput,
        GenerateRequest,
        GenerateStream,
        Llm,
        RequestTimings,
        Usage,
        WeightVersionSpan,
        open_llm,
    )
    from trio_vllm.protocol import (
        CudagraphStats,
        DpControlOutput,
        EngineCoreEvent,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreReadyResponse,
        EngineCoreRequest,
        EngineCoreSamplingParams,
        EngineId,
        EventType,
        FinishReason,
        IterationDetails,
        KvCacheEvictionEvent,
        KvEventsConfig,
        KvHintAction,
        KvHintsEnvelope,
        LateChunkingParams,
        LateInteractionParams,
        Logprobs,
        LoRARequest,
        MultiModalFeatureSpec,
        MultiModalField,
        MultiModalFieldElem,
        PerfStats,
        PlaceholderRange,
        PoolingParams,
        PositionLogprobs,
        PrefillStats,
        PrefixCacheStats,
        RepetitionDetectionParams,
        RequestBatchOutputs,
        RequestErrorInfo,
        RequestSpecDecodeMetrics,
        SamplingMask,
        SamplingParams,
        SchedulerStats,
        SpecDecodingStats,
        StructuredOutputsParams,
        Tensor,
        TokenLogprob,
        UtilityCallOutput,
        UtilityOutput,
    )

__all__ = [
    # Connecting
    "Bootstrapped",
    "HandshakeOwner",
    "open_client",
    "open_llm",
    # Prompts in, completions out
    "CompletionOutput",
    "EncodeOutput",
    "EncodeRequest",
    "GenerateOutput",
    "GenerateRequest",
    "GenerateStream",
    "Llm",
    "RequestTimings",
    "Usage",
    "WeightVersionSpan",
    # The engines' client
    "EngineCoreClient",
    "EngineInfo",
    "KvCacheGroup",
    "OutputStream",
    "PauseMode",
    "StreamOutput",
    # What a request says
    "EngineCoreRequest",
    "EngineCoreSamplingParams",
    "KvHintAction",
    "KvHintsEnvelope",
    "LateChunkingParams",
    "LateInteractionParams",
    "LoRARequest",
    "MultiModalFeatureSpec",
    "MultiModalField",
    "MultiModalFieldElem",
    "PlaceholderRange",
    "PoolingParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "Tensor",
    # What engines send
    "CudagraphStats",
    "DpControlOutput",
    "EngineCoreEvent",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReadyResponse",
    "EngineId",
    "EventType",
    "FinishReason",
    "IterationDetails",
    "KvCacheEvictionEvent",
    "KvEventsConfig",
    "Logprobs",
    "PerfStats",
    "PositionLogprobs",
    "PrefillStats",
    "PrefixCacheStats",
    "RequestBatchOutputs",
    "RequestErrorInfo",
    "RequestSpecDecodeMetrics",
    "SamplingMask",
    "SchedulerStats",
    "SpecDecodingStats",
    "TokenLogprob",
    "UtilityCallOutput",
    "UtilityOutput",
    # What is raised
    "AddressInUseError",
    "ClientClosedError",
    "ConfigurationError",
    "DecodeError",
    "DuplicateRequestIdError",
    "EmptyPromptError",
    "EngineCoreError",
    "EngineDeadError",
    "InconsistentUtilityResultsError",
    "InternalError",
    "InvalidDataParallelRankError",
    "InvalidFieldError",
    "PeerGoneError",
    "RequestError",
    "StartupError",
    "UnsupportedFieldError",
    "UtilityCallFailedError",
    "UtilityError",
    "UtilityRefusedError",
    "UtilityResultError",
    "UtilityTimeoutError",
]

_HOMES = ("errors", "protocol", "client", "llm")
"""Where the names come from, the cheapest first."""

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name in __all__:
            for home in _HOMES:
                module = import_module(f"{__name__}.{home}")
                if hasattr(module, name):
                    globals()[name] = value = getattr(module, name)
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
