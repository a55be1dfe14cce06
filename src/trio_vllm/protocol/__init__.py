"""The wire vocabulary of vLLM's engine cores, sans IO: frames in, values out, and back.

Nothing here waits, reads a clock or draws a number. State machines return what is to be done.
Sources: vLLM 0.33.0, ``vllm/v1`` and ``rust/src/engine-core-client``; 0.32.0 is read as well.
"""

# Arrays
from ._arrays import Array, Tensor

# Waves and load
from ._coordination import (
    COORDINATOR_READY,
    SUBSCRIBE,
    CoordinatorStats,
    EngineLoad,
    StartDpWave,
    decode_coordinator_broadcast,
    decode_coordinator_stats,
    encode_coordinator_stats,
    encode_start_dp_wave,
)
from ._forms import Buffer, FormError, Frames

# Startup
from ._handshake import (
    MAX_ENGINES,
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineId,
    HandshakeInit,
    HandshakeReport,
    HandshakeStatus,
    KvEventsConfig,
    decode_init,
    decode_ready_response,
    decode_report,
    encode_init,
    encode_ready_response,
    encode_report,
)

# Requests
from ._logprobs import Logprobs, PositionLogprobs, SamplingMask, TokenLogprob
from ._lora import LoRARequest
from ._multimodal import (
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
)

# Outputs
from ._output import (
    ENGINE_CORE_DEAD,
    DpControlOutput,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDead,
    EventType,
    FinishReason,
    RequestBatchOutputs,
    RequestErrorInfo,
    RowBatch,
    UtilityCallOutput,
    decode_outputs,
    encode_outputs,
    open_outputs,
    plain_token_ids,
    row_request_id,
)
from ._pooling import LateChunkingParams, LateInteractionParams, PoolingParams
from ._request import (
    AbortRequests,
    EngineCoreRequest,
    EngineMessage,
    KvHintAction,
    KvHintsEnvelope,
    RequestType,
    decode_engine_message,
    encode_abort,
    encode_add,
    encode_utility,
)
from ._sampling import (
    EngineCoreSamplingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from ._stats import (
    CudagraphStats,
    IterationDetails,
    KvCacheEvictionEvent,
    PerfStats,
    PrefillStats,
    PrefixCacheStats,
    RequestSpecDecodeMetrics,
    SchedulerStats,
    SpecDecodingStats,
)
from ._utility import UtilityOutput, UtilityRequest

__all__ = [
    "COORDINATOR_READY",
    "ENGINE_CORE_DEAD",
    "MAX_ENGINES",
    "SUBSCRIBE",
    "AbortRequests",
    "Array",
    "Buffer",
    "CoordinatorStats",
    "CudagraphStats",
    "DpControlOutput",
    "EngineAddresses",
    "EngineCoreEvent",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReadyResponse",
    "EngineCoreRequest",
    "EngineCoreSamplingParams",
    "EngineDead",
    "EngineId",
    "EngineLoad",
    "EngineMessage",
    "EventType",
    "FinishReason",
    "FormError",
    "Frames",
    "HandshakeInit",
    "HandshakeReport",
    "HandshakeStatus",
    "IterationDetails",
    "KvCacheEvictionEvent",
    "KvEventsConfig",
    "KvHintAction",
    "KvHintsEnvelope",
    "LateChunkingParams",
    "LateInteractionParams",
    "LoRARequest",
    "Logprobs",
    "MultiModalFeatureSpec",
    "MultiModalField",
    "MultiModalFieldElem",
    "PerfStats",
    "PlaceholderRange",
    "PoolingParams",
    "PositionLogprobs",
    "PrefillStats",
    "PrefixCacheStats",
    "RepetitionDetectionParams",
    "RequestBatchOutputs",
    "RequestErrorInfo",
    "RequestSpecDecodeMetrics",
    "RequestType",
    "RowBatch",
    "SamplingMask",
    "SamplingParams",
    "SchedulerStats",
    "SpecDecodingStats",
    "StartDpWave",
    "StructuredOutputsParams",
    "Tensor",
    "TokenLogprob",
    "UtilityCallOutput",
    "UtilityOutput",
    "UtilityRequest",
    "decode_coordinator_broadcast",
    "decode_coordinator_stats",
    "decode_engine_message",
    "decode_init",
    "decode_outputs",
    "decode_ready_response",
    "decode_report",
    "encode_abort",
    "encode_add",
    "encode_coordinator_stats",
    "encode_init",
    "encode_outputs",
    "encode_ready_response",
    "encode_report",
    "encode_start_dp_wave",
    "encode_utility",
    "open_outputs",
    "plain_token_ids",
    "row_request_id",
]
