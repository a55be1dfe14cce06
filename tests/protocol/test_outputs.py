"""What engines send: both ways, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.comparing import same, unpacked
from tests.protocol.packing import pack

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    ENGINE_CORE_DEAD,
    CodecError,
    CudagraphStats,
    DpControlOutput,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineDead,
    EventType,
    FinishReason,
    IterationDetails,
    KvCacheEvictionEvent,
    Logprobs,
    OutputsMessage,
    PerfStats,
    PrefillStats,
    PrefixCacheStats,
    RequestBatchOutputs,
    RequestErrorInfo,
    RequestSpecDecodeMetrics,
    SamplingMask,
    SchedulerStats,
    SpecDecodingStats,
    Tensor,
    UndecodedBatch,
    UtilityCallOutput,
    UtilityOutput,
    bare_token_ids,
    decode_outputs,
    decode_outputs_lazily,
    encode_outputs,
    index_of,
    row_request_id,
)
from trio_vllm.protocol.structs import codec_of


def full_output() -> EngineCoreOutput:
    """Something in every position."""
    logprobs = Logprobs(
        np.array([[5, 5], [6, 7]], np.int32),
        np.array([[-0.5, -np.inf], [np.nan, 0]], np.float32),
        np.array([1, 0], np.int64),
    )
    return EngineCoreOutput(
        "r",
        [5, 6],
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=attrs.evolve(logprobs, ranks=np.array([2, 3], np.int32)),
        pooling_output=Tensor.from_numpy(np.ones(100, np.float16)),
        finish_reason=FinishReason.STOP,
        stop_reason=6,
        events=[EngineCoreEvent(EventType.QUEUED, 1.0), EngineCoreEvent(EventType.PREEMPTED, 2.5)],
        kv_transfer_params={"a": [1, {"b": None}]},
        ec_transfer_params={},
        trace_headers={"traceparent": "0"},
        prefill_stats=PrefillStats(num_prompt_tokens=3, num_computed_tokens=3),
        routed_experts=np.zeros((2, 2, 40), np.int16),
        num_nans_in_logits=2,
        mm_cache_miss_hashes=["h"],
        new_sampling_mask=SamplingMask(np.array([1, 2, 3]), np.array([0, 1, 3])),
        spec_decode_metrics=RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[1, 0]),
        prompt_token_id_logprobs=np.array([[-np.inf]], np.float32),
        error=RequestErrorInfo(code="engine_paused", message="later", retryable=True),
    )


FULL_STATS = SchedulerStats(
    num_running_reqs=1,
    num_kv_fetch_reqs_by_stage={"in_progress": 2},
    kv_cache_usage=0.5,
    iteration_details=IterationDetails(iteration_index=1, elapsed_ms=0.5, is_dummy=True),
    prefix_cache_stats=PrefixCacheStats(reset=True, hits_by_source={"host": 1}),
    connector_prefix_cache_stats=PrefixCacheStats(),
    kv_cache_eviction_events=[KvCacheEvictionEvent(lifetime_seconds=1.0, reuse_gaps_seconds=[0.5])],
    spec_decoding_stats=SpecDecodingStats(num_spec_tokens=1, num_accepted_tokens_per_pos=[2**63]),
    kv_connector_stats={"any": "thing"},
    ec_connector_stats={},
    waiting_lora_adapters={"a": 1},
    cudagraph_stats=CudagraphStats(runtime_mode="FULL"),
    perf_stats=PerfStats(num_flops_per_gpu=2**63, debug_stats={"x": 1.5}),
)

BATCH = RequestBatchOutputs(
    engine_index=3,
    outputs=[full_output(), EngineCoreOutput("s", [1])],
    scheduler_stats=FULL_STATS,
    timestamp=12.5,
    finished_requests=["r"],
    weight_version="default",
)

OUTPUTS = [
    BATCH,
    RequestBatchOutputs(),
    UtilityCallOutput(output=UtilityOutput(2**64 - 1, result={"a": [1, None]}), timestamp=1.5),
    UtilityCallOutput(output=UtilityOutput(-(2**63)), engine_index=1),
    UtilityCallOutput(output=UtilityOutput(0, "it failed")),
    DpControlOutput(wave_complete=0, engine_index=2),
    DpControlOutput(start_wave=7, timestamp=0.5),
]


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_outputs_arrive(outputs: Any) -> None:
    frames = encode_outputs(outputs)

    assert same(outputs, decode_outputs([bytes(frame) for frame in frames]))
    assert same(outputs, decode_outputs([memoryview(frame) for frame in frames]))


def test_output_messages_have_every_position() -> None:
    """Strict readers want all of them."""
    raw = unpacked(bytes(encode_outputs(BATCH)[0]))

    assert len(raw) == 9
    assert {len(raw[1][0]), len(raw[1][1])} == {len(attrs.fields(EngineCoreOutput))}
    assert len(raw[2]) == len(attrs.fields(SchedulerStats))
    assert [len(raw[1][0][2]), len(raw[1][0][3])] == [4, 5]


def test_void_utility_result_is_written_as_a_pair() -> None:
    """A bare nil trips an assertion of upstream's Python client."""
    (payload,) = encode_outputs(UtilityCallOutput(output=UtilityOutput(5)))

    assert unpacked(bytes(payload))[4] == [5, None, [None, None]]


def test_failed_utility_call_has_no_result() -> None:
    (payload,) = encode_outputs(UtilityCallOutput(output=UtilityOutput(5, "why")))

    assert unpacked(bytes(payload))[4] == [5, "why", None]
    with pytest.raises(CodecError, match=r"utility_output\.result must be nil"):
        encode_outputs(UtilityCallOutput(output=UtilityOutput(5, "why", result=1)))


@pytest.mark.parametrize(
    ("outputs", "where"),
    [
        (RequestBatchOutputs(engine_index=-1), "engine_index"),
        (RequestBatchOutputs(outputs=[EngineCoreOutput("a", [-1])]), "outputs[0].new_token_ids[0]"),
        (
            RequestBatchOutputs(outputs=[EngineCoreOutput("a", [1], new_logprobs=1)]),  # type: ignore[arg-type]
            "outputs[0].new_logprobs",
        ),
        (
            RequestBatchOutputs(outputs=[EngineCoreOutput("a", [1], stop_reason=1.5)]),  # type: ignore[arg-type]
            "outputs[0].stop_reason",
        ),
        (
            RequestBatchOutputs(outputs=[EngineCoreOutput("a", [1], finish_reason=9)]),  # type: ignore[arg-type]
            "outputs[0].finish_reason",
        ),
        (
            RequestBatchOutputs(outputs=[EngineCoreOutput("a", new_sampling_mask=[1])]),  # type: ignore[arg-type]
            "outputs[0].new_sampling_mask",
        ),
        (RequestBatchOutputs(outputs=["a"]), "outputs[0]"),  # type: ignore[list-item]
        (RequestBatchOutputs(scheduler_stats={}), "scheduler_stats"),  # type: ignore[arg-type]
        (
            RequestBatchOutputs(scheduler_stats=SchedulerStats(current_wave=None)),  # type: ignore[arg-type]
            "scheduler_stats.current_wave",
        ),
        (RequestBatchOutputs(finished_requests="abc"), "finished_requests"),  # type: ignore[arg-type]
        (UtilityCallOutput(output=UtilityOutput(2**64)), "utility_output.call_id"),
        (UtilityCallOutput(output=UtilityOutput(1, result={1, 2})), "utility_output.result"),
        (
            UtilityCallOutput(output=UtilityOutput(1, result=[{"a": object()}])),
            "utility_output.result[0]['a']",
        ),
        (DpControlOutput(), ""),
        (DpControlOutput(wave_complete=1, start_wave=1), ""),
    ],
)
def test_bug_of_an_engine_is_a_form_error(outputs: Any, where: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode_outputs(outputs)

    assert caught.value.where == where


def test_farewell() -> None:
    assert decode_outputs([ENGINE_CORE_DEAD]) == EngineDead()
    assert decode_outputs([memoryview(ENGINE_CORE_DEAD)]) == EngineDead()
    for frames in ([ENGINE_CORE_DEAD, b""], [ENGINE_CORE_DEAD + b"!"], [ENGINE_CORE_DEAD[:-1]]):
        with pytest.raises(DecodeError):
            decode_outputs(frames)


ROW = ["r", [1]]
BAD_OUTPUTS: list[tuple[Any, str]] = [
    (None, ""),
    ({}, ""),
    ("text", ""),
    ([None], "engine_index"),
    (["0"], "engine_index"),
    ([-1], "engine_index"),
    ([0, None], "outputs"),
    ([0, {}], "outputs"),
    ([0, [], None, None], "timestamp"),
    ([0, [], None, "now"], "timestamp"),
    ([0, [], None, 0.0, {}], "utility_output"),
    ([0, [], None, 0.0, []], "utility_output"),
    ([0, [], None, 0.0, [None]], "utility_output.call_id"),
    ([0, [], None, 0.0, None, "abc"], "finished_requests"),
    ([0, [], None, 0.0, None, ["a", 1]], "finished_requests[1]"),
    ([0, [], None, 0.0, None, None, -1], "wave_complete"),
    ([0, [], None, 0.0, None, None, None, 1.0], "start_wave"),
    ([0, [], None, 0.0, None, None, None, None, 1], "weight_version"),
    ([0, [], None, 0.0, None, None, 1, 1], ""),
    ([0, [ROW], None, 0.0, [1]], ""),
    ([0, [], {"a": 1}, 0.0, None, None, 1], ""),
    ([0, [], None, 0.0, [1], None, 1], ""),
    ([0, [], [], 0.0], "scheduler_stats"),
    ([0, [], {"num_running_reqs": -1}], "scheduler_stats.num_running_reqs"),
    ([0, [], {"num_running_reqs": None}], "scheduler_stats.num_running_reqs"),
    ([0, [], {"kv_cache_usage": "full"}], "scheduler_stats.kv_cache_usage"),
    ([0, [], {"prefix_cache_stats": None}], "scheduler_stats.prefix_cache_stats"),
    ([0, [], {"spec_decoding_stats": {}}], "scheduler_stats.spec_decoding_stats"),
    (
        [0, [], {"kv_cache_eviction_events": [{}, {"idle_seconds": None}]}],
        "scheduler_stats.kv_cache_eviction_events[1].idle_seconds",
    ),
    (
        [0, [], {"waiting_lora_adapters": {"a": -1}}],
        "scheduler_stats.waiting_lora_adapters['a']",
    ),
    ([0, [], {"waiting_lora_adapters": {1: 1}}], "scheduler_stats.waiting_lora_adapters[1]"),
]


@given(
    st.tuples(
        st.sampled_from([0, 7, 2**32 - 1, 2**32, -1, True, None, 1.0]),
        st.sampled_from([[], [ROW], None, {}]),
        st.sampled_from([None, {"num_running_reqs": 1}]),
        st.sampled_from([0.0, 1.5, 3, None, "now"]),
        st.sampled_from([None, [1]]),
        st.sampled_from([None, ["r"], []]),
        st.sampled_from([None, 4]),
        st.sampled_from([None, 4]),
        st.sampled_from([None, "default", 1]),
        st.just("unknown"),
    ),
    st.integers(0, 10),
)
def test_every_batch_is_what_its_declaration_says(raw: tuple[Any, ...], length: int) -> None:
    """Those without peculiarities, which are read in a shorter way, too."""
    array = list(raw[:length])
    try:
        message = codec_of(OutputsMessage).decode(array, [])
    except CodecError:
        with pytest.raises(DecodeError):
            decode_outputs_lazily([pack(array)])
        return
    if message.utility_output is not None or message.wave_complete or message.start_wave:
        return

    batch = decode_outputs_lazily([pack(array)])

    assert isinstance(batch, UndecodedBatch)
    assert batch.engine_index == message.engine_index
    assert batch.rows == message.outputs
    assert (batch.timestamp, batch.has_stats) == (
        message.timestamp,
        message.scheduler_stats is not None,
    )
    assert batch.finished_requests == message.finished_requests
    assert batch.weight_version == message.weight_version


@pytest.mark.parametrize(("raw", "where"), BAD_OUTPUTS)
def test_bad_outputs_are_refused(raw: Any, where: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_outputs([pack(raw)])

    assert caught.value.what == "outputs"
    assert caught.value.where == where
    index = raw[0] if type(raw) is list and type(raw[0]) is int else None
    assert caught.value.engine_index == index
    assert caught.value.request_id is None


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        ([2**63, 5], "the failure_message must be a string, not 5"),
        ([1, None, []], "the result must be an array [type info, value], not list"),
        ([1, None, 5], "the result must be an array [type info, value], not 5"),
        ([1, "it failed", 5], "it failed"),
    ],
)
def test_a_bad_answer_is_the_failure_of_its_call(raw: list[Any], failure: str) -> None:
    message = decode_outputs([pack([0, [], None, 0.0, raw])])

    assert isinstance(message, UtilityCallOutput)
    assert message.output == UtilityOutput(raw[0], failure)


def row(**fields: Any) -> list[Any]:
    """A row with these fields, as an engine would write it."""
    names = [attribute.name for attribute in attrs.fields(EngineCoreOutput)]
    values: list[Any] = ["r", [1], *[None] * (len(names) - 2)]
    for name, value in {"num_nans_in_logits": 0, **fields}.items():
        values[names.index(name)] = value
    return values


IDS = ["<i4", [1, 1], b""]
BAD_ROWS: list[tuple[Any, str]] = [
    (None, ""),
    ({}, ""),
    ([], ""),
    (["r"], ""),
    ([5, [1]], "request_id"),
    (["r", None], "new_token_ids"),
    (["r", [None]], "new_token_ids[0]"),
    (["r", [1, -1]], "new_token_ids[1]"),
    (["r", [True, 1]], "new_token_ids[0]"),
    (["r", [1, 2**32]], "new_token_ids[1]"),
    (["r", [1, 1.0]], "new_token_ids[1]"),
    (row(new_logprobs={}), "new_logprobs"),
    (row(new_logprobs=[1, 2]), "new_logprobs"),
    (row(new_logprobs=[1, 2, 3]), "new_logprobs.token_ids"),
    (row(new_logprobs=[["<i4", [1, 1], 9], None, None]), "new_logprobs.token_ids.data"),
    (row(pooling_output=["f4", [1], 1]), "pooling_output.dtype"),
    (row(finish_reason=5), "finish_reason"),
    (row(finish_reason=-1), "finish_reason"),
    (row(finish_reason="stop"), "finish_reason"),
    (row(finish_reason=True), "finish_reason"),
    (row(stop_reason=1.5), "stop_reason"),
    (row(stop_reason=[]), "stop_reason"),
    (row(events=[[1, 2.0]]), "events[0]"),
    (row(events=[{"type": 1}]), "events[0]"),
    (row(events=[{"type": 4, "timestamp": 1.0}]), "events[0].type"),
    (row(kv_transfer_params=[]), "kv_transfer_params"),
    (row(kv_transfer_params={1: 2}), "kv_transfer_params[1]"),
    (row(trace_headers={"a": None}), "trace_headers['a']"),
    (row(prefill_stats={"num_prompt_tokens": -1}), "prefill_stats.num_prompt_tokens"),
    (row(routed_experts=[]), "routed_experts"),
    (row(num_nans_in_logits=None), "num_nans_in_logits"),
    (row(num_nans_in_logits=-1), "num_nans_in_logits"),
    (row(mm_cache_miss_hashes="a"), "mm_cache_miss_hashes"),
    (row(new_sampling_mask=[]), "new_sampling_mask"),
    (row(new_sampling_mask=[None, None, 1]), "new_sampling_mask"),
    (row(new_sampling_mask=[None, None]), "new_sampling_mask.token_ids"),
    (row(spec_decode_metrics={}), "spec_decode_metrics"),
    (row(prompt_token_id_logprobs=["float32", [1], None]), "prompt_token_id_logprobs.data"),
    (row(error={"code": "x"}), "error"),
    (row(error="text"), "error"),
]


@pytest.mark.parametrize(("raw", "where"), BAD_ROWS)
def test_bad_row_hurts_only_its_request(raw: Any, where: str) -> None:
    batch = decode_outputs_lazily([pack([4, [["good", [1]], raw]])])

    assert isinstance(batch, UndecodedBatch)
    assert batch.decode_row(batch.rows[0]).request_id == "good"
    with pytest.raises(DecodeError) as caught:
        batch.decode_row(batch.rows[1])
    assert caught.value.where == where
    assert caught.value.engine_index == 4
    assert caught.value.request_id == row_request_id(raw)


@pytest.mark.parametrize(
    ("raw", "token_ids"),
    [
        (["r", [1, 2]], [1, 2]),
        (row()[:18], [1]),
        (row(), [1]),
        (row(finish_reason=1), None),
        (row(num_nans_in_logits=1), None),
        ([*row(), None], [1]),
        ([*row(), 1], None),
        (["r"], None),
        (["r", "ab"], None),
        (["r", None], None),
        (["r", []], None),
        (["r", [True]], None),
        (["r", [1, 2.0]], None),
        (None, None),
        ([], None),
    ],
)
def test_plain_rows(raw: Any, token_ids: list[int] | None) -> None:
    assert token_ids == bare_token_ids(raw)


NEW_FIELDS: list[Any] = [None, 0, False, 0.0, "", [], {}]
"""What fields that a later release adds may hold in a row that carries only tokens."""


@pytest.mark.parametrize("length", range(2, 40))
def test_plain_rows_of_any_length(length: int) -> None:
    """A release that adds fields does not make its rows slow."""
    whole = [*row(), *([None] * 40)]

    assert bare_token_ids(whole[:length]) == [1]


@pytest.mark.parametrize("length", range(17, 25))
@pytest.mark.parametrize("name", ["new_logprobs", "finish_reason", "error", "num_nans_in_logits"])
def test_rows_that_carry_more_are_not_plain(length: int, name: str) -> None:
    """Whatever the length, a field that has a value is seen."""
    position = index_of(EngineCoreOutput, name)
    whole = [*row(), *([None] * 24)][:length]
    if position < length:
        whole[position] = 1
        assert bare_token_ids(whole) is None


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("new", NEW_FIELDS, ids=repr)
def test_plain_rows_with_defaults_in_new_fields(new: Any, count: int) -> None:
    """Defaults of new fields need not be nil."""
    assert bare_token_ids([*row(), *([new] * count)]) == [1]
    assert bare_token_ids([*row(), None, new, None]) == [1]


@pytest.mark.parametrize("new", [1, True, "new", [None], {"a": 1}], ids=repr)
@pytest.mark.parametrize("nils", range(5))
def test_new_fields_with_a_value_are_ignored(new: Any, nils: int) -> None:
    """Such a row is decoded in full, to the same output."""
    longer = [*row(), *([None] * nils), new]
    batch = decode_outputs_lazily([pack([0, [longer]])])

    assert isinstance(batch, UndecodedBatch)
    assert bare_token_ids(batch.rows[0]) is None
    assert same(batch.decode_row(batch.rows[0]), EngineCoreOutput("r", [1]))


@pytest.mark.parametrize("length", range(2, 20))
def test_a_plain_row_is_one_of_defaults(length: int) -> None:
    """The short cut agrees with the decoder in each position."""
    for position in range(2, length):
        changed = row()[:length]
        changed[position] = 1 if changed[position] is None else None
        assert bare_token_ids(changed) is None


def test_statistics_are_read_on_demand() -> None:
    batch = decode_outputs_lazily([pack([0, [], {"num_running_reqs": 3, "new_key": 1}])])
    bare = decode_outputs_lazily([pack([])])

    assert isinstance(batch, UndecodedBatch)
    assert isinstance(bare, UndecodedBatch)
    assert batch.has_stats
    assert batch.decode_stats() == SchedulerStats(num_running_reqs=3)
    assert not bare.has_stats
    assert bare.decode_stats() is None


def test_shorter_and_longer_outputs_are_read() -> None:
    longer = [0, [[*row(error={"code": "c", "message": "m", "new": 1}), 1, 2]], None, 1]

    (output,) = decode_outputs([pack(longer)]).outputs  # type: ignore[union-attr]

    assert output.error == RequestErrorInfo(code="c", message="m")
    assert decode_outputs([pack([])]) == RequestBatchOutputs()
    assert decode_outputs([pack([1, [], None, 2.0, None, None, None, None, None, "new"])]) == (
        RequestBatchOutputs(engine_index=1, timestamp=2.0)
    )
    assert decode_outputs([pack([1, [], None, 2.0, [7]])]) == UtilityCallOutput(
        engine_index=1, timestamp=2.0, output=UtilityOutput(7)
    )
