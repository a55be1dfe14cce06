"""What frontends and coordinators send: both ways, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from tests.protocol.comparing import unpacked
from tests.protocol.packing import pack

from trio_vllm.errors import DecodeError, InvalidFieldError
from trio_vllm.protocol import (
    AbortRequests,
    CodecError,
    CoordinatorStats,
    EngineCoreRequest,
    EngineLoad,
    SamplingParams,
    StartDpWave,
    UtilityRequest,
    decode_coordinator_broadcast,
    decode_coordinator_stats,
    decode_engine_message,
    encode_abort,
    encode_add,
    encode_coordinator_stats,
    encode_start_dp_wave,
    encode_utility,
)


def add(**fields: Any) -> list[bytes]:
    """An ADD with these positions, as a frontend would write it."""
    names = [attribute.name for attribute in attrs.fields(EngineCoreRequest)]
    values: list[Any] = ["r", [1], None, {}, None, 1.0, *[None] * 5, 0, 0, 0, None, False]
    values += [None, None, None, False, None, None]
    for name, value in fields.items():
        values[names.index(name)] = value
    return [b"\x00", pack(values)]


def test_request_has_every_position() -> None:
    frames = encode_add(EngineCoreRequest(request_id="r", prompt_token_ids=[1]))

    assert len(unpacked(bytes(frames[1]))) == 22


@pytest.mark.parametrize("length", [6, 9, 22])
def test_shorter_requests_are_read(length: int) -> None:
    kind, payload = add(external_req_id="x")
    raw = unpacked(payload)

    message = decode_engine_message([kind, pack(raw[:length])])

    assert isinstance(message, EngineCoreRequest)
    assert message.external_req_id == ("x" if length == 22 else None)
    assert message.sampling_params is not None
    assert message.sampling_params.max_tokens == 16


def test_longer_request_is_read() -> None:
    kind, payload = add()

    message = decode_engine_message([kind, pack([*unpacked(payload), "new", {}])])

    assert isinstance(message, EngineCoreRequest)


def test_parameters_as_other_writers_send_them() -> None:
    params = {
        "temperature": 1,
        "top_k": -1,
        "seed": None,
        "max_tokens": None,
        "watermarking": None,
        "stop": ["a"],
        "brand_new": [1],
        "logit_bias": {5: 1},
        "_all_stop_token_ids": [3, 2],
        "structured_outputs": {"json": {"a": 1}, "_backend": None, "new": 0},
    }

    message = decode_engine_message(add(sampling_params=params))

    assert isinstance(message, EngineCoreRequest)
    read = message.sampling_params
    assert read is not None
    assert (read.temperature, read.top_k, read.max_tokens) == (1.0, -1, None)
    assert read.logit_bias == {5: 1.0}
    assert read.all_stop_token_ids == [3, 2]
    assert read.structured_outputs is not None
    assert read.structured_outputs.json == {"a": 1}


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"request_id": 5}, "request_id"),
    ({"prompt_token_ids": {}}, "prompt_token_ids"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids[0]"),
    ({"prompt_token_ids": ["a", 1]}, "prompt_token_ids[0]"),
    ({"prompt_token_ids": [1, 2**40]}, "prompt_token_ids[1]"),
    ({"mm_features": [{}]}, "mm_features[0]"),
    ({"sampling_params": []}, "sampling_params"),
    ({"sampling_params": {"temperature": None}}, "sampling_params.temperature"),
    ({"sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
    ({"sampling_params": {"max_tokens": 1.0}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"logit_bias": {"5": 1.0}}}, "sampling_params.logit_bias['5']"),
    ({"sampling_params": {"_eos_token_id": -1}}, "sampling_params.eos_token_id"),
    ({"sampling_params": {"structured_outputs": {"json": 5}}}, "sampling_params.structured_outputs.json"),
    ({"sampling_params": {"structured_outputs": {"choice": [1]}}}, "sampling_params.structured_outputs.choice[0]"),
    ({"pooling_params": {}}, "pooling_params"),
    ({"pooling_params": [None, -1]}, "pooling_params.dimensions"),
    ({"pooling_params": [*[None] * 5, None]}, "pooling_params.requires_token_ids"),
    ({"arrival_time": None}, "arrival_time"),
    ({"lora_request": ["a", 1]}, "lora_request"),
    ({"lora_request": ["a", 0, "p"]}, "lora_request.lora_int_id"),
    ({"lora_request": ["a", 1, "p", None, None]}, "lora_request.load_inplace"),
    ({"cache_salt": b"x"}, "cache_salt"),
    ({"data_parallel_rank": -1}, "data_parallel_rank"),
    ({"prompt_embeds": ["float32", [1], 1]}, "prompt_embeds.data"),
    ({"prompt_is_token_ids": [1]}, "prompt_is_token_ids[0]"),
    ({"client_index": None}, "client_index"),
    ({"current_wave": None}, "current_wave"),
    ({"priority": None}, "priority"),
    ({"trace_headers": {1: "a"}}, "trace_headers[1]"),
    ({"resumable": None}, "resumable"),
    ({"resumable": 0}, "resumable"),
    ({"abort_immediately": None}, "abort_immediately"),
    ({"kv_hints": {"protocol_version": "1"}}, "kv_hints"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "where"), BAD_REQUESTS)
def test_bad_request_is_refused_by_its_id(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_engine_message(add(**fields))

    assert caught.value.where == where
    assert caught.value.what == "an ADD message"
    assert caught.value.request_id == (None if "request_id" in fields else "r")


POSITION = {"offset": 0, "length": 1}
FEATURE = {"data": None, "modality": "image", "identifier": "i", "mm_position": POSITION}
BAD_FEATURES: list[tuple[dict[str, Any], str]] = [
    ({"modality": None}, ".modality"),
    ({"mm_position": {"offset": 0}}, ".mm_position"),
    ({"mm_position": {"offset": -1, "length": 1}}, ".mm_position.offset"),
    ({"mm_position": {**POSITION, "is_embed": [True]}}, ".mm_position.is_embed"),
    ({"data": {"a": {"data": None}}}, ".data['a']"),
    ({"data": {"a": {"data": "x", "field": ["batched", {}]}}}, ".data['a'].data"),
    ({"data": {"a": {"data": [1, None], "field": ["batched", {}]}}}, ".data['a'].data[1]"),
    ({"data": {"a": {"data": 1, "field": []}}}, ".data['a'].field"),
    ({"data": {"a": {"data": 1, "field": ["other", {}]}}}, ".data['a'].field"),
    ({"data": {"a": {"data": 1, "field": [["batched"], {}]}}}, ".data['a'].field"),
    ({"data": {"a": {"data": 1, "field": ["batched", {"x": 1}]}}}, ".data['a'].field['x']"),
    ({"data": {"a": {"data": 1, "field": ["shared", {}]}}}, ".data['a'].field"),
    (
        {"data": {"a": {"data": 1, "field": ["flat", {"slices": [[0, 1]]}]}}},
        ".data['a'].field.slices[0]",
    ),
    (
        {"data": {"a": {"data": 1, "field": ["flat", {"slices": [[0, 1, "x"]]}]}}},
        ".data['a'].field.slices[0]",
    ),
    ({"data": {"a": {"data": 1, "field": ["flat", {"slices": 5}]}}}, ".data['a'].field.slices"),
    (
        {"data": {"a": {"data": 1, "field": ["batched", {"keep_on_cpu": 1}]}}},
        ".data['a'].field.keep_on_cpu",
    ),
]


@pytest.mark.parametrize(("fields", "where"), BAD_FEATURES)
def test_bad_feature_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_engine_message(add(mm_features=[FEATURE | fields]))

    assert caught.value.where == f"mm_features[0]{where}"


@pytest.mark.parametrize("what", ["data", "slices"])
def test_deep_nests_in_features_are_refused(what: str) -> None:
    data, slices = ("NEST", []) if what == "data" else (1, "NEST")
    element = {"data": data, "field": ["flat", {"slices": slices}]}
    kind, payload = add(mm_features=[FEATURE | {"data": {"a": element}}])
    nest = b"\x91" * 900 + pack([0, 1, None])

    with pytest.raises(DecodeError, match="nests deeper than"):
        decode_engine_message([kind, payload.replace(pack("NEST"), nest)])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x00"],
        [b"", b"\x80"],
        [b"\x04", b"\x80"],
        [b"\x05", b"\x80"],
        [b"\x00\x00", b"\x80"],
        [b"x" * 10_000, b"\x80"],
        [b"\x00", b""],
        [b"\x01", b"\x80"],
        [b"\x01", b"\x91\x01"],
        [b"\x02", b"\x91\x01"],
        [b"\x02", b"\x92\x01\xff"],
        [b"\x02", b"\x92\xff\xc0"],
        [b"\x03", b"\x93\x00\x01\xa1a"],
        [b"\x03", b"\x94\x00\x01\xa1a\x80"],
        [b"\x03", b"\x94\xc0\x01\xa1a\x90"],
    ],
)
def test_bad_engine_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        decode_engine_message(frames)


@pytest.mark.parametrize(
    "call",
    [
        UtilityRequest(0, 1, "is_sleeping"),
        UtilityRequest(1, 2**64 - 1, "sleep", [1, "abort"]),
        UtilityRequest(0, -5, "collective_rpc", ["m", None, [], {"k": {1: b"x"}}]),
    ],
)
def test_utility_call_arrives(call: UtilityRequest) -> None:
    assert call == decode_engine_message(encode_utility(call))


@pytest.mark.parametrize(
    "call",
    [
        UtilityRequest(-1, 1, "a"),
        UtilityRequest(0, 2**64, "a"),
        UtilityRequest(0, 1, "\ud800"),
        UtilityRequest(0, 1, "a", "args"),  # type: ignore[arg-type]
        UtilityRequest(0, 1, "a", [{1, 2}]),
        UtilityRequest(0, 1, "a", [{(1,): 2}]),
        UtilityRequest(0, 1, "a", [object()]),
        UtilityRequest(0, 1, "a", [np.int64(1)]),
    ],
)
def test_utility_call_with_a_wrong_value_is_not_written(call: UtilityRequest) -> None:
    with pytest.raises(CodecError):
        encode_utility(call)


def test_aborts_arrive() -> None:
    assert decode_engine_message(encode_abort(["a", "b"])) == AbortRequests(["a", "b"])
    for wrong in ("abc", [1], None, ["\ud800"]):
        with pytest.raises(CodecError):
            encode_abort(wrong)  # type: ignore[arg-type]


def test_wave_arrives_either_way() -> None:
    for wave in (StartDpWave(3), StartDpWave(0, 65535)):
        frames = encode_start_dp_wave(wave)
        assert decode_engine_message(frames) == wave
        assert decode_coordinator_broadcast(frames) == wave


def test_bytes_in_place_of_an_engine_exclude_nobody() -> None:
    assert decode_coordinator_broadcast([b"\x02", pack([1, b"\0\0"])]) == StartDpWave(1)


@pytest.mark.parametrize(
    "frames", [[], [b"READY", b""], [b"ready"], [b"\x02"], [b"\x02", b""], [b"\x03", b"\x92\1\1"]]
)
def test_bad_broadcast_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        decode_coordinator_broadcast(frames)


def test_loads_arrive() -> None:
    for loads in (None, [], [EngineLoad(1, 2, 0.5), EngineLoad(0, 0)]):
        stats = CoordinatorStats(loads, 4, True)
        assert decode_coordinator_stats(encode_coordinator_stats(stats)) == stats
    with pytest.raises(DecodeError, match="2 frames"):
        decode_coordinator_stats([b"", b""])
    with pytest.raises(DecodeError) as caught:
        decode_coordinator_stats([pack([[[1, 2, 0.5], [1, None]], 0, False])])
    assert caught.value.where == "loads[1].num_running_reqs"


def test_error_of_a_caller_names_the_field_and_the_request() -> None:
    request = EngineCoreRequest(
        request_id="r", sampling_params=SamplingParams(extra_args={"a": [{1}]})
    )

    with pytest.raises(InvalidFieldError) as caught:
        encode_add(request)

    assert caught.value.request_id == "r"
    assert caught.value.field == "sampling_params.extra_args['a'][0]"
    assert isinstance(caught.value.__cause__, CodecError)
