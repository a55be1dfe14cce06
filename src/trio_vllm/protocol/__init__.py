"""The wire vocabulary of vLLM's engine cores, sans IO: frames to values and back.

Public for users who need more than the root package exports. Nothing here waits, reads a clock or
draws a number; state machines return what is to be done. ``decode_*`` take the frames of a message
and raise `DecodeError`; ``encode_*`` give the frames and raise `CodecError`, or for a request
`InvalidFieldError`, which names it.

Sources: vLLM 0.33.0, ``vllm/v1`` and ``rust/src/engine-core-client``; 0.32.0 is read as well.
"""

from trio_vllm.protocol.arrays import (
    Array as Array,
    Tensor as Tensor,
)
from trio_vllm.protocol.codec import (
    Buffer as Buffer,
    CodecError as CodecError,
    ForeignExtension as ForeignExtension,
    Frames as Frames,
)
from trio_vllm.protocol.coordination import (
    COORDINATOR_READY as COORDINATOR_READY,
    SUBSCRIBE as SUBSCRIBE,
    CoordinatorStats as CoordinatorStats,
    EngineLoad as EngineLoad,
    Waves as Waves,
    decode_coordinator_broadcast as decode_coordinator_broadcast,
    decode_coordinator_notice as decode_coordinator_notice,
    decode_coordinator_stats as decode_coordinator_stats,
    encode_coordinator_stats as encode_coordinator_stats,
    encode_first_request_notice as encode_first_request_notice,
)
from trio_vllm.protocol.handshake import (
    MAX_ENGINES as MAX_ENGINES,
    EngineAddresses as EngineAddresses,
    EngineCoreReadyResponse as EngineCoreReadyResponse,
    EngineId as EngineId,
    HandshakeInit as HandshakeInit,
    HandshakeReport as HandshakeReport,
    HandshakeStatus as HandshakeStatus,
    KvEventsConfig as KvEventsConfig,
    decode_init as decode_init,
    decode_ready_response as decode_ready_response,
    decode_report as decode_report,
    encode_init as encode_init,
    encode_ready_response as encode_ready_response,
    encode_report as encode_report,
)
from trio_vllm.protocol.logprobs import (
    Logprobs as Logprobs,
    PositionLogprobs as PositionLogprobs,
    SamplingMask as SamplingMask,
    TokenLogprob as TokenLogprob,
)
from trio_vllm.protocol.multimodal import (
    MultiModalFeatureSpec as MultiModalFeatureSpec,
    MultiModalField as MultiModalField,
    MultiModalFieldElem as MultiModalFieldElem,
    PlaceholderRange as PlaceholderRange,
)
from trio_vllm.protocol.output import (
    ENGINE_CORE_DEAD as ENGINE_CORE_DEAD,
    DpControlOutput as DpControlOutput,
    EngineCoreEvent as EngineCoreEvent,
    EngineCoreOutput as EngineCoreOutput,
    EngineCoreOutputs as EngineCoreOutputs,
    EngineDead as EngineDead,
    EventType as EventType,
    FinishReason as FinishReason,
    OutputsMessage as OutputsMessage,
    RequestBatchOutputs as RequestBatchOutputs,
    RequestErrorInfo as RequestErrorInfo,
    UndecodedBatch as UndecodedBatch,
    UtilityCallOutput as UtilityCallOutput,
    decode_outputs as decode_outputs,
    decode_outputs_lazily as decode_outputs_lazily,
    encode_outputs as encode_outputs,
    plain_token_ids as plain_token_ids,
    row_request_id as row_request_id,
)
from trio_vllm.protocol.request import (
    AbortRequests as AbortRequests,
    EngineCoreRequest as EngineCoreRequest,
    EngineMessage as EngineMessage,
    KvHintAction as KvHintAction,
    KvHintsEnvelope as KvHintsEnvelope,
    LateChunkingParams as LateChunkingParams,
    LateInteractionParams as LateInteractionParams,
    LoRARequest as LoRARequest,
    PoolingParams as PoolingParams,
    RequestType as RequestType,
    StartDpWave as StartDpWave,
    decode_engine_message as decode_engine_message,
    encode_abort as encode_abort,
    encode_add as encode_add,
    encode_start_dp_wave as encode_start_dp_wave,
    encode_utility as encode_utility,
    request_label as request_label,
)
from trio_vllm.protocol.sampling import (
    EngineCoreSamplingParams as EngineCoreSamplingParams,
    RepetitionDetectionParams as RepetitionDetectionParams,
    SamplingParams as SamplingParams,
    StructuredOutputsParams as StructuredOutputsParams,
)
from trio_vllm.protocol.startup import (
    FrontendStartup as FrontendStartup,
    Phase as Phase,
)
from trio_vllm.protocol.stats import (
    CudagraphStats as CudagraphStats,
    IterationDetails as IterationDetails,
    KvCacheEvictionEvent as KvCacheEvictionEvent,
    PerfStats as PerfStats,
    PrefillStats as PrefillStats,
    PrefixCacheStats as PrefixCacheStats,
    RequestSpecDecodeMetrics as RequestSpecDecodeMetrics,
    SchedulerStats as SchedulerStats,
    SpecDecodingStats as SpecDecodingStats,
)
from trio_vllm.protocol.structs import defaults_of as defaults_of, index_of as index_of
from trio_vllm.protocol.token_ids import as_token_ids as as_token_ids, plain_items as plain_items
from trio_vllm.protocol.utility import (
    UtilityOutput as UtilityOutput,
    UtilityRequest as UtilityRequest,
)
