"""`HandshakeReport`, `HandshakeInit` and `EngineCoreReadyResponse`: HELLO and READY, INIT, registration.

Mirrors upstream ``vllm/v1/engine/utils.py`` and ``engine-core-client/src/protocol/handshake.rs``.
Encoders raise `CodecError` for a value that does not fit the message.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.limits import MAX_ENGINES
from trio_vllm.protocol.codec import (
    I64,
    I64S,
    STR,
    Codec,
    Frames,
    UInt32,
    UInt64,
    wrong_type,
)
from trio_vllm.protocol.msgpack import decode_frame, pack
from trio_vllm.protocol.structs import REQUIRED, codec_of
from trio_vllm.values import frozen


class EngineId(bytes):
    """The ØMQ routing id of an engine: its index as two little-endian bytes."""

    __slots__ = ()

    @classmethod
    def of(cls, engine_index: int) -> EngineId:
        """Make the id of the engine with this index; `ValueError` beyond two bytes."""
        if not 0 <= engine_index < MAX_ENGINES:
            raise ValueError(f"engine index {engine_index} does not fit two bytes")
        return cls(engine_index.to_bytes(2, "little"))

    @property
    def engine_index(self) -> int:
        """The engine index; `DecodeError` if these bytes are no engine id."""
        if len(self) != 2:
            raise DecodeError("an engine id", "", f"must be two bytes, not {bytes(self)[:16]!r}")
        return int.from_bytes(self, "little")


class HandshakeStatus(enum.Enum):
    """The state that an engine reports on the handshake socket."""

    HELLO = "HELLO"
    READY = "READY"


@frozen(kw_only=True)
class HandshakeReport:
    """An engine's HELLO (it lives) or READY (its model is loaded)."""

    status: HandshakeStatus
    local: bool = False
    headless: bool = True
    parallel_config_hash: str | None = None
    """Of an engine that runs in lockstep with others."""


def _check_parallel_value(value: Any, context: Any) -> int | str | list[int]:
    # An engine refuses nil and booleans here.
    if type(value) is int:
        return I64.decode(value, context)
    if type(value) is str:
        return STR.decode(value, context)
    if type(value) is list:
        return I64S.decode(value, context)
    raise wrong_type("an integer, a string or a list of integers", value)


ParallelSetting = Annotated[
    int | str | list[int], Codec("a setting", _check_parallel_value, _check_parallel_value)
]


@frozen(kw_only=True)
class EngineAddresses:
    """The addresses that an engine connects to: one input and one output per client."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


@frozen(kw_only=True)
class HandshakeInit:
    """The frontend's answer to HELLO."""

    addresses: EngineAddresses
    parallel_config: Annotated[dict[str, ParallelSetting], REQUIRED] = attrs.field(factory=dict)


@frozen(kw_only=True)
class KvEventsConfig:
    """An engine's configuration of its publisher of KV-cache events."""

    enable_kv_cache_events: bool = False
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: UInt64 = 10_000
    hwm: UInt64 = 100_000
    max_queue_size: UInt64 = 100_000
    topic: str = ""


@frozen(kw_only=True)
class EngineCoreReadyResponse:
    """The registration of an engine on an input socket: its limits and configuration."""

    max_model_len: UInt64
    """Prompt and output tokens that fit the context."""
    num_gpu_blocks: UInt64
    block_size: UInt64
    """Tokens per KV-cache block."""
    dp_stats_address: str | None = None
    dtype: str
    """The model's, such as ``bfloat16``."""
    vllm_version: str
    world_size: UInt64
    data_parallel_size: UInt64
    tensor_parallel_size: UInt32
    pipeline_parallel_size: UInt32
    decode_context_parallel_size: UInt32
    data_parallel_rank: UInt32
    """The engine's index."""
    max_num_seqs: UInt64
    max_num_batched_tokens: UInt64
    instance_id: str
    supports_lora: bool
    max_loras: UInt32
    mamba_block_size: UInt64 | None = None
    kv_cache_size_tokens: UInt64 | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: KvEventsConfig | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: UInt64 | None = None
    coord_store_port: UInt32 = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None


_REPORT = codec_of(HandshakeReport)
_INIT = codec_of(HandshakeInit)
_READY_RESPONSE = codec_of(EngineCoreReadyResponse)


def encode_report(report: HandshakeReport) -> list[bytes]:
    """Encode a HELLO or READY."""
    return [pack(_REPORT.encode(report, []))]


def decode_report(frames: Frames) -> HandshakeReport:
    """Decode a HELLO or READY, without the routing id; raises `DecodeError`."""
    return decode_frame(_REPORT, frames, "a HELLO or READY message")


def encode_init(init: HandshakeInit) -> list[bytes]:
    """Encode an INIT."""
    return [pack(_INIT.encode(init, []))]


def decode_init(frames: Frames) -> HandshakeInit:
    """Decode an INIT, without the routing id; raises `DecodeError`."""
    return decode_frame(_INIT, frames, "an INIT message")


def encode_ready_response(response: EngineCoreReadyResponse) -> list[bytes]:
    """Encode a registration."""
    return [pack(_READY_RESPONSE.encode(response, []))]


def decode_ready_response(frames: Frames) -> EngineCoreReadyResponse:
    """Decode a registration, without the routing id; raises `DecodeError`."""
    return decode_frame(_READY_RESPONSE, frames, "a registration")
