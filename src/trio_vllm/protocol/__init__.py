"""The wire vocabulary of vLLM's engine cores, sans IO: frames to values and back.

Public for users who need more than the root package exports. Nothing here waits, reads a clock or
draws a number; state machines return what is to be done. ``decode_*`` take the frames of a message
and raise `DecodeError`; ``encode_*`` give the frames and raise `CodecError`, or for a request
`InvalidFieldError`, which names it.

Sources: vLLM 0.33.0, ``vllm/v1`` and ``rust/src/engine-core-client``; 0.32.0 is read as well.
"""

from trio_vllm.protocol.add_decoder import AddDecoder as AddDecoder
from trio_vllm.protocol.arrays import Array as Array
from trio_vllm.protocol.arrays import Tensor as Tensor
from trio_vllm.protocol.bare_rows import BareRowPattern as BareRowPattern
from trio_vllm.protocol.bare_rows import BareRows as BareRows
from trio_vllm.protocol.bare_rows import bare_row_pattern as bare_row_pattern
from trio_vllm.protocol.bare_rows import find_bare_rows as find_bare_rows
from trio_vllm.protocol.bare_rows import pack_id as pack_id
from trio_vllm.protocol.bare_rows import unpack_id as unpack_id
from trio_vllm.protocol.codec import Buffer as Buffer
from trio_vllm.protocol.codec import CodecError as CodecError
from trio_vllm.protocol.codec import ForeignExtension as ForeignExtension
from trio_vllm.protocol.codec import Frames as Frames
from trio_vllm.protocol.coordination import COORDINATOR_READY as COORDINATOR_READY
from trio_vllm.protocol.coordination import SUBSCRIBE as SUBSCRIBE
from trio_vllm.protocol.coordination import CoordinatorStats as CoordinatorStats
from trio_vllm.protocol.coordination import EngineLoad as EngineLoad
from trio_vllm.protocol.coordination import Waves as Waves
from trio_vllm.protocol.coordination import (
    decode_coordinator_broadcast as decode_coordinator_broadcast,
)
from trio_vllm.protocol.coordination import decode_coordinator_notice as decode_coordinator_notice
from trio_vllm.protocol.coordination import decode_coordinator_stats as decode_coordinator_stats
from trio_vllm.protocol.coordination import encode_coordinator_stats as encode_coordinator_stats
from trio_vllm.protocol.coordination import (
    encode_first_request_notice as encode_first_request_notice,
)
from trio_vllm.protocol.handshake import EngineAddresses as EngineAddresses
from trio_vllm.protocol.handshake import EngineCoreReadyResponse as EngineCoreReadyResponse
from trio_vllm.protocol.handshake import EngineId as EngineId
from trio_vllm.protocol.handshake import HandshakeInit as HandshakeInit
from trio_vllm.protocol.handshake import HandshakeReport as HandshakeReport
from trio_vllm.protocol.handshake import HandshakeStatus as HandshakeStatus
from trio_vllm.protocol.handshake import KvEventsConfig as KvEventsConfig
from trio_vllm.protocol.handshake import decode_init as decode_init
from trio_vllm.protocol.handshake import decode_ready_response as decode_ready_response
from trio_vllm.protocol.handshake import decode_report as decode_report
from trio_vllm.protocol.handshake import encode_init as encode_init
from trio_vllm.protocol.handshake import encode_ready_response as encode_ready_response
from trio_vllm.protocol.handshake import encode_report as encode_report
from trio_vllm.protocol.logprob_rows import LogprobRow as LogprobRow
from trio_vllm.protocol.logprob_rows import LogprobsPattern as LogprobsPattern
from trio_vllm.protocol.logprob_rows import find_logprob_rows as find_logprob_rows
from trio_vllm.protocol.logprob_rows import logprobs_pattern as logprobs_pattern
from trio_vllm.protocol.logprob_rows import unpacked_row as unpacked_row
from trio_vllm.protocol.logprobs import Logprobs as Logprobs
from trio_vllm.protocol.logprobs import LogprobsCollector as LogprobsCollector
from trio_vllm.protocol.logprobs import PositionLogprobs as PositionLogprobs
from trio_vllm.protocol.logprobs import SamplingMask as SamplingMask
from trio_vllm.protocol.logprobs import TokenLogprob as TokenLogprob
from trio_vllm.protocol.msgpack import pack as pack
from trio_vllm.protocol.multimodal import MultiModalFeatureSpec as MultiModalFeatureSpec
from trio_vllm.protocol.multimodal import MultiModalField as MultiModalField
from trio_vllm.protocol.multimodal import MultiModalFieldElem as MultiModalFieldElem
from trio_vllm.protocol.multimodal import PlaceholderRange as PlaceholderRange
from trio_vllm.protocol.output import ENGINE_CORE_DEAD as ENGINE_CORE_DEAD
from trio_vllm.protocol.output import DpControlOutput as DpControlOutput
from trio_vllm.protocol.output import EngineCoreEvent as EngineCoreEvent
from trio_vllm.protocol.output import EngineCoreOutput as EngineCoreOutput
from trio_vllm.protocol.output import EngineCoreOutputs as EngineCoreOutputs
from trio_vllm.protocol.output import EngineDead as EngineDead
from trio_vllm.protocol.output import EventType as EventType
from trio_vllm.protocol.output import FinishReason as FinishReason
from trio_vllm.protocol.output import OutputsMessage as OutputsMessage
from trio_vllm.protocol.output import RequestBatchOutputs as RequestBatchOutputs
from trio_vllm.protocol.output import RequestErrorInfo as RequestErrorInfo
from trio_vllm.protocol.output import UndecodedBatch as UndecodedBatch
from trio_vllm.protocol.output import UtilityCallOutput as UtilityCallOutput
from trio_vllm.protocol.output import bare_token_ids as bare_token_ids
from trio_vllm.protocol.output import decode_outputs as decode_outputs
from trio_vllm.protocol.output import decode_outputs_in_pieces as decode_outputs_in_pieces
from trio_vllm.protocol.output import decode_outputs_lazily as decode_outputs_lazily
from trio_vllm.protocol.output import encode_output_rows as encode_output_rows
from trio_vllm.protocol.output import encode_outputs as encode_outputs
from trio_vllm.protocol.output import raw_logprobs_of as raw_logprobs_of
from trio_vllm.protocol.output import rest_of as rest_of
from trio_vllm.protocol.output import row_request_id as row_request_id
from trio_vllm.protocol.pieces import in_one_go as in_one_go
from trio_vllm.protocol.request import GENERATION_TASKS as GENERATION_TASKS
from trio_vllm.protocol.request import POOLING_TASKS as POOLING_TASKS
from trio_vllm.protocol.request import AbortRequests as AbortRequests
from trio_vllm.protocol.request import EngineCoreRequest as EngineCoreRequest
from trio_vllm.protocol.request import EngineMessage as EngineMessage
from trio_vllm.protocol.request import KvHintAction as KvHintAction
from trio_vllm.protocol.request import KvHintsEnvelope as KvHintsEnvelope
from trio_vllm.protocol.request import LateChunkingParams as LateChunkingParams
from trio_vllm.protocol.request import LateInteractionParams as LateInteractionParams
from trio_vllm.protocol.request import LoRARequest as LoRARequest
from trio_vllm.protocol.request import PoolingParams as PoolingParams
from trio_vllm.protocol.request import RequestType as RequestType
from trio_vllm.protocol.request import StartDpWave as StartDpWave
from trio_vllm.protocol.request import decode_engine_message as decode_engine_message
from trio_vllm.protocol.request import (
    decode_engine_message_in_pieces as decode_engine_message_in_pieces,
)
from trio_vllm.protocol.request import encode_abort as encode_abort
from trio_vllm.protocol.request import encode_add as encode_add
from trio_vllm.protocol.request import encode_start_dp_wave as encode_start_dp_wave
from trio_vllm.protocol.request import encode_utility as encode_utility
from trio_vllm.protocol.request import is_short_add as is_short_add
from trio_vllm.protocol.request import is_vocabulary_question as is_vocabulary_question
from trio_vllm.protocol.request import request_label as request_label
from trio_vllm.protocol.request import vocabulary_question as vocabulary_question
from trio_vllm.protocol.sampling import EngineCoreSamplingParams as EngineCoreSamplingParams
from trio_vllm.protocol.sampling import RepetitionDetectionParams as RepetitionDetectionParams
from trio_vllm.protocol.sampling import SamplingParams as SamplingParams
from trio_vllm.protocol.sampling import StructuredOutputsParams as StructuredOutputsParams
from trio_vllm.protocol.startup import FrontendStartup as FrontendStartup
from trio_vllm.protocol.startup import Phase as Phase
from trio_vllm.protocol.stats import CudagraphStats as CudagraphStats
from trio_vllm.protocol.stats import IterationDetails as IterationDetails
from trio_vllm.protocol.stats import KvCacheEvictionEvent as KvCacheEvictionEvent
from trio_vllm.protocol.stats import PerfStats as PerfStats
from trio_vllm.protocol.stats import PrefillStats as PrefillStats
from trio_vllm.protocol.stats import PrefixCacheStats as PrefixCacheStats
from trio_vllm.protocol.stats import RequestSpecDecodeMetrics as RequestSpecDecodeMetrics
from trio_vllm.protocol.stats import SchedulerStats as SchedulerStats
from trio_vllm.protocol.stats import SpecDecodingStats as SpecDecodingStats
from trio_vllm.protocol.structs import defaults_of as defaults_of
from trio_vllm.protocol.structs import index_of as index_of
from trio_vllm.protocol.token_ids import as_token_ids as as_token_ids
from trio_vllm.protocol.token_ids import plain_items as plain_items
from trio_vllm.protocol.utility import CACHE_RESETS as CACHE_RESETS
from trio_vllm.protocol.utility import UNENCODABLE_RESULTS as UNENCODABLE_RESULTS
from trio_vllm.protocol.utility import UtilityOutput as UtilityOutput
from trio_vllm.protocol.utility import UtilityRequest as UtilityRequest
