"""Startup messages: both ways, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.protocol.comparing import unpacked
from tests.protocol.packing import pack
from tests.ready import ready_response

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    CodecError,
    EngineAddresses,
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

READY = ready_response(
    dtype="bfloat16",
    supports_lora=True,
    max_loras=1,
    mamba_block_size=1,
    kv_cache_size_tokens=2**40,
    kv_cache_max_concurrency=1.5,
    kv_events_config=KvEventsConfig(topic="t"),
    weight_transfer_backend="nccl",
)


def test_reports_arrive() -> None:
    for report in (
        HandshakeReport(status=HandshakeStatus.HELLO, local=True, headless=False),
        HandshakeReport(status=HandshakeStatus.READY, parallel_config_hash="abc"),
    ):
        assert decode_report(encode_report(report)) == report
    assert decode_report([pack({"status": "HELLO", "more": 1})]) == HandshakeReport(
        status=HandshakeStatus.HELLO
    )


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        ([], ""),
        ({}, ""),
        ({"status": "BYE"}, "status"),
        ({"status": None}, "status"),
        ({"status": ["HELLO"]}, "status"),
        ({"status": "HELLO", "local": None}, "local"),
        ({"status": "HELLO", "headless": 1}, "headless"),
        ({"status": "HELLO", "parallel_config_hash": 1}, "parallel_config_hash"),
    ],
)
def test_bad_report_is_refused(raw: Any, where: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_report([pack(raw)])

    assert caught.value.where == where


ADDRESSES = EngineAddresses(inputs=["tcp://h:1"], outputs=["tcp://h:2"])


def test_init_arrives() -> None:
    init = HandshakeInit(
        addresses=attrs.evolve(
            ADDRESSES, coordinator_input="ipc://c", coordinator_output="ipc://d"
        ),
        parallel_config={"a": 1, "b": "text", "c": [1, 2], "d": -1},
    )

    assert decode_init(encode_init(init)) == init
    assert decode_init(encode_init(HandshakeInit(addresses=ADDRESSES))) == HandshakeInit(
        addresses=ADDRESSES
    )


@pytest.mark.parametrize("value", [None, True, 1.5, ["a"], [None], {}, 2**63, "\ud800"])
def test_parallel_setting_that_an_engine_refuses_is_not_written(value: Any) -> None:
    with pytest.raises(CodecError, match=r"parallel_config\['a'\]"):
        encode_init(HandshakeInit(addresses=ADDRESSES, parallel_config={"a": value}))


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        ({}, ""),
        ({"addresses": {}, "parallel_config": {}}, "addresses"),
        ({"addresses": {"inputs": [], "outputs": [1]}, "parallel_config": {}}, "addresses.outputs[0]"),
        ({"addresses": {"inputs": [], "outputs": []}}, ""),
        ({"addresses": {"inputs": [], "outputs": []}, "parallel_config": {"a": None}}, "parallel_config['a']"),
    ],
)  # fmt: skip
def test_bad_init_is_refused(raw: Any, where: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_init([pack(raw)])

    assert caught.value.where == where


def test_ready_response_arrives() -> None:
    (payload,) = encode_ready_response(READY)

    assert decode_ready_response([payload]) == READY
    assert len(unpacked(payload)) == 28


@pytest.mark.parametrize("name", ["max_model_len", "dtype", "supports_lora", "data_parallel_rank"])
def test_ready_response_without_a_required_key_is_refused(name: str) -> None:
    raw = unpacked(encode_ready_response(READY)[0])
    del raw[name]

    with pytest.raises(DecodeError, match=f"must have the key '{name}'"):
        decode_ready_response([pack(raw)])


def test_ready_response_of_another_version_is_read() -> None:
    raw = unpacked(encode_ready_response(READY)[0]) | {"new": 1}
    for name in ("coord_store_port", "coordinator_input_address", "dp_stats_address"):
        del raw[name]

    assert decode_ready_response([pack(raw)]) == READY


def test_engine_ids() -> None:
    assert EngineId.of(0) == b"\0\0"
    assert EngineId.of(256) == b"\0\1"
    assert [EngineId.of(index).engine_index for index in (0, 255, 256, 65535)] == [
        0,
        255,
        256,
        65535,
    ]
    for index in (-1, 65536):
        with pytest.raises(ValueError, match="does not fit"):
            EngineId.of(index)
    for wrong in (b"", b"\0", b"\0\0\0", b"x" * 1000):
        with pytest.raises(DecodeError):
            _ = EngineId(wrong).engine_index
