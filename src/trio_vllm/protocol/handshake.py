"""The startup messages: HELLO, INIT, READY and the registration.

Mirrors upstream ``vllm/v1/engine/utils.py`` and ``engine-core-client/src/protocol/handshake.rs``.
Writers raise `CodecError` for a value that has no place in the message: a bug of the caller.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import (
    BOOL,
    FLOAT,
    I64,
    I64S,
    STR,
    U32,
    U64,
    Buffer,
    Codec,
    enumeration,
    list_of,
    map_of,
    misfit,
    optional,
)
from trio_vllm.protocol.msgpack import decode_payload, pack
from trio_vllm.protocol.structs import map_struct

MAX_ENGINES = 2**16
"""An engine id has two bytes."""


class EngineId(bytes):
    """The ØMQ routing id of an engine: its index as two little-endian bytes."""

    __slots__ = ()

    @classmethod
    def of(cls, engine_index: int) -> EngineId:
        """The id of the engine with this index; `ValueError` beyond two bytes."""
        if not 0 <= engine_index < MAX_ENGINES:
            raise ValueError(f"engine index {engine_index} does not fit two bytes")
        return cls(engine_index.to_bytes(2, "little"))

    @property
    def engine_index(self) -> int:
        """The index it stands for; `DecodeError` if these bytes are no engine id."""
        if len(self) != 2:
            raise DecodeError("an engine id", "", f"must be two bytes, not {bytes(self)[:16]!r}")
        return int.from_bytes(self, "little")


class HandshakeStatus(enum.Enum):
    """What an engine reports on the handshake socket."""

    HELLO = "HELLO"
    READY = "READY"


@attrs.frozen(kw_only=True)
class HandshakeReport:
    """An engine's HELLO (it lives) or READY (its model is loaded)."""

    status: HandshakeStatus
    local: bool = False
    headless: bool = True
    parallel_config_hash: str | None = None
    """Of an engine that runs in lockstep with others."""


@attrs.frozen(kw_only=True)
class EngineAddresses:
    """Where an engine has to connect: one input and one output address per client."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


@attrs.frozen(kw_only=True)
class HandshakeInit:
    """The frontend's answer to HELLO."""

    addresses: EngineAddresses
    parallel_config: dict[str, int | str | list[int]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class KvEventsConfig:
    """Where and how an engine publishes KV-cache events."""

    enable_kv_cache_events: bool = False
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


@attrs.frozen(kw_only=True)
class EngineCoreReadyResponse:
    """What an engine tells of itself when it registers on an input socket."""

    max_model_len: int
    """Prompt and output tokens that fit the context."""
    num_gpu_blocks: int
    block_size: int
    """Tokens per KV-cache block."""
    dp_stats_address: str | None = None
    dtype: str
    """The model's, such as ``bfloat16``."""
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    """The engine's index."""
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: KvEventsConfig | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None


_REPORT: Codec[HandshakeReport] = map_struct(
    HandshakeReport,
    {
        "status": enumeration(HandshakeStatus),
        "local": BOOL,
        "headless": BOOL,
        "parallel_config_hash": optional(STR),
    },
    required=("status",),
)


def _check_parallel_value(value: Any, context: Any) -> int | str | list[int]:
    # An engine refuses nil and booleans here.
    if type(value) is int:
        return I64.decode(value, context)
    if type(value) is str:
        return STR.decode(value, context)
    if type(value) is list:
        return I64S.decode(value, context)
    raise misfit("an integer, a string or a list of integers", value)


_INIT: Codec[HandshakeInit] = map_struct(
    HandshakeInit,
    {
        "addresses": map_struct(
            EngineAddresses,
            {
                "inputs": list_of(STR),
                "outputs": list_of(STR),
                "coordinator_input": optional(STR),
                "coordinator_output": optional(STR),
                "frontend_stats_publish_address": optional(STR),
            },
            required=("inputs", "outputs"),
        ),
        "parallel_config": map_of(
            STR, Codec("a setting", _check_parallel_value, _check_parallel_value)
        ),
    },
    required=("addresses", "parallel_config"),
)

_KV_EVENTS_CONFIG: Codec[KvEventsConfig] = map_struct(
    KvEventsConfig,
    {
        "enable_kv_cache_events": BOOL,
        "publisher": STR,
        "endpoint": STR,
        "replay_endpoint": optional(STR),
        "buffer_steps": U64,
        "hwm": U64,
        "max_queue_size": U64,
        "topic": STR,
    },
)

_READY_RESPONSE: Codec[EngineCoreReadyResponse] = map_struct(
    EngineCoreReadyResponse,
    {
        "max_model_len": U64,
        "num_gpu_blocks": U64,
        "block_size": U64,
        "dp_stats_address": optional(STR),
        "dtype": STR,
        "vllm_version": STR,
        "world_size": U64,
        "data_parallel_size": U64,
        "tensor_parallel_size": U32,
        "pipeline_parallel_size": U32,
        "decode_context_parallel_size": U32,
        "data_parallel_rank": U32,
        "max_num_seqs": U64,
        "max_num_batched_tokens": U64,
        "instance_id": STR,
        "supports_lora": BOOL,
        "max_loras": U32,
        "mamba_block_size": optional(U64),
        "kv_cache_size_tokens": optional(U64),
        "kv_cache_max_concurrency": optional(FLOAT),
        "kv_events_config": optional(_KV_EVENTS_CONFIG),
        "weight_transfer_backend": optional(STR),
        "enable_sleep_mode": BOOL,
        "supports_draft_weight_updates": BOOL,
        "effective_attention_block_size": optional(U64),
        "coord_store_port": U32,
        "coordinator_input_address": optional(STR),
        "coordinator_output_address": optional(STR),
    },
    required=(
        "max_model_len",
        "num_gpu_blocks",
        "block_size",
        "dtype",
        "vllm_version",
        "world_size",
        "data_parallel_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "data_parallel_rank",
        "max_num_seqs",
        "max_num_batched_tokens",
        "instance_id",
        "supports_lora",
        "max_loras",
    ),
)


def encode_report(report: HandshakeReport) -> bytes:
    """The payload of a HELLO or READY."""
    return pack(_REPORT.encode(report, []))


def decode_report(payload: Buffer) -> HandshakeReport:
    """Read a HELLO or READY; raises `DecodeError`."""
    return decode_payload(_REPORT, payload, (), "a HELLO or READY message")


def encode_init(init: HandshakeInit) -> bytes:
    """The payload of an INIT."""
    return pack(_INIT.encode(init, []))


def decode_init(payload: Buffer) -> HandshakeInit:
    """Read an INIT; raises `DecodeError`."""
    return decode_payload(_INIT, payload, (), "an INIT message")


def encode_ready_response(response: EngineCoreReadyResponse) -> bytes:
    """The payload of a registration."""
    return pack(_READY_RESPONSE.encode(response, []))


def decode_ready_response(payload: Buffer) -> EngineCoreReadyResponse:
    """Read a registration; raises `DecodeError`."""
    return decode_payload(_READY_RESPONSE, payload, (), "a registration")
