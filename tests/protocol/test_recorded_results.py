"""What users are after, got out of recorded messages: tokens, log probabilities, answers, loads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from tests.protocol.comparing import same
from tests.protocol.test_vectors import MESSAGES, read
from tests.recorded import Recording, each_version, recording, recordings

from trio_vllm.protocol import (
    CoordinatorStats,
    DpControlOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineId,
    HandshakeReport,
    HandshakeStatus,
    Logprobs,
    RequestBatchOutputs,
    StartDpWave,
    UndecodedBatch,
    UtilityCallOutput,
    UtilityRequest,
    bare_token_ids,
    decode_init,
    decode_outputs_lazily,
    row_request_id,
)


def values(scenario: Recording, channel: str, kind: type[Any] = object) -> list[Any]:
    """What was read on one kind of socket, in order."""
    return [
        value
        for message in scenario.messages
        if message.channel == channel
        and f"{scenario.label}-{message.seq}" in MESSAGES
        and isinstance(value := read(message), kind)
    ]


def outputs(scenario: Recording) -> dict[str, list[EngineCoreOutput]]:
    """The outputs of each request."""
    found = defaultdict(list)
    for batch in values(scenario, "output", RequestBatchOutputs):
        for output in batch.outputs:
            found[output.request_id].append(output)
    return found


def with_expected(key: str) -> pytest.MarkDecorator:
    found = [scenario for scenario in recordings() if key in scenario.expected]
    return pytest.mark.parametrize("scenario", found, ids=lambda scenario: scenario.label)


def records(logprobs: Logprobs) -> list[list[list[Any]]]:
    return [
        [[entry.token_id, entry.logprob, entry.rank] for entry in position.entries]
        for position in logprobs
    ]


def unviewed(logprobs: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """Expected records with the JSON view of infinities undone.

    Ids that were asked for one by one (``logprob_token_ids``) come without a rank; ours is then the
    number of the column, which means nothing.
    """
    return [
        [
            [token_id, float(v["float"]) if isinstance(v, dict) else v, column if r is None else r]
            for column, (token_id, v, r) in enumerate(position)
        ]
        for position in logprobs
    ]


@with_expected("requests")
def test_tokens_and_finish_of_each_request(scenario: Recording) -> None:
    found = outputs(scenario)

    for expected in scenario.expected["requests"]:
        parts = found[expected["request_id"]]
        token_ids, lengths = expected["token_ids"], expected["new_tokens_per_output"]
        if scenario.name == "pause_keep_resume":  # 20 messages of its notes are left out
            token_ids = token_ids[:11] + token_ids[31:]
            lengths = lengths[:11] + lengths[31:]
        assert token_ids == [i for part in parts for i in part.new_token_ids]
        assert lengths == [len(part.new_token_ids) for part in parts]
        assert parts[-1].finish_reason == expected["finish_reason"]
        assert parts[-1].stop_reason == expected["stop_reason"]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [
            expected["finish_reason"] is not None
        ]


@with_expected("requests")
def test_log_probabilities_are_exact(scenario: Recording) -> None:
    found = outputs(scenario)
    asked = {
        request.request_id: request.sampling_params
        for request in values(scenario, "input", EngineCoreRequest)
    }

    for expected in scenario.expected["requests"]:
        parts = found[expected["request_id"]]
        params = asked[expected["request_id"]]
        sampled = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        wide = [logprobs.token_ids.shape[1] for logprobs in sampled]
        if "logprob_columns_on_wire" in expected:
            assert wide == expected["logprob_columns_on_wire"]
        columns = max(wide, default=0) if params.logprobs is None else params.logprobs + 1
        assert unviewed(expected.get("logprobs", [])) == [
            record for logprobs in sampled for record in records(logprobs.cut(columns))
        ]
        prompt = [
            part.new_prompt_logprobs_tensors
            for part in parts
            if part.new_prompt_logprobs_tensors is not None
        ]
        assert unviewed(expected.get("prompt_logprobs", [])) == [
            record for logprobs in prompt for record in records(logprobs)
        ]


@with_expected("prompt_len")
def test_prompt_log_probabilities_begin_with_the_second_token(scenario: Recording) -> None:
    (request,) = values(scenario, "input", EngineCoreRequest)
    first, *others = outputs(scenario)[request.request_id]

    assert first.new_prompt_logprobs_tensors is not None
    assert len(first.new_prompt_logprobs_tensors) == scenario.expected["prompt_len"] - 1
    positions = first.new_prompt_logprobs_tensors.positions
    assert [p.token.token_id for p in positions] == list(request.prompt_token_ids[1:])
    assert all(output.new_prompt_logprobs_tensors is None for output in others)


@each_version
def test_infinities_survive(version: str) -> None:
    found = outputs(recording("logprobs_minus_inf", version))
    logprobs = [
        entry.logprob
        for parts in found.values()
        for part in parts
        for position in part.new_logprobs or ()
        for entry in position.entries
    ]

    assert -math.inf in logprobs


@with_expected("utility_outputs")
def test_answers_of_utility_calls(scenario: Recording) -> None:
    answers = [answer.output for answer in values(scenario, "output", UtilityCallOutput)]

    assert [
        (call_id, failure, result and result[1])
        for call_id, failure, result in scenario.expected["utility_outputs"]
    ] == [(answer.call_id, answer.failure_message, answer.result) for answer in answers]


@each_version
@pytest.mark.parametrize("name", ["utility_ok", "utility_fail"])
def test_answers_of_utility_calls_by_method(name: str, version: str) -> None:
    scenario = recording(name, version)
    methods = {call.call_id: call.method for call in values(scenario, "input", UtilityRequest)}
    answers = [answer.output for answer in values(scenario, "output", UtilityCallOutput)]

    assert {
        key: (failure, result and result[1])
        for key, (_, failure, result) in scenario.expected["utility_output_by_call"].items()
    } == {
        f"{answer.call_id} {methods[answer.call_id]}": (answer.failure_message, answer.result)
        for answer in answers
    }


@each_version
def test_call_ids_of_64_bits_with_or_without_sign(version: str) -> None:
    scenario = recording("utility_call_ids", version)
    asked = [call.call_id for call in values(scenario, "input", UtilityRequest)]
    answered = [answer.output.call_id for answer in values(scenario, "output", UtilityCallOutput)]

    assert set(map(int, scenario.expected["utility_output_by_call_id"])) == set(answered)
    assert asked == answered
    assert {-(2**63), 2**64 - 1} <= set(answered)


@with_expected("utility_calls")
def test_order_of_utility_calls(scenario: Recording) -> None:
    calls = values(scenario, "input", UtilityRequest)

    assert scenario.expected["utility_calls"] == [[call.method, call.args] for call in calls]


@with_expected("init_reply")
def test_addresses_of_the_init_message(scenario: Recording) -> None:
    inits = [
        decode_init(message.frames)
        for message in scenario.messages
        if (message.channel, message.sender) == ("handshake", "frontend")
    ]
    addresses = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")

    for expected, init in zip(scenario.expected["init_reply"], inits, strict=True):
        assert init.addresses.inputs == expected["addresses"]["inputs"]
        assert init.addresses.outputs == expected["addresses"]["outputs"]
        for name in addresses:
            assert getattr(init.addresses, name) == expected["addresses"].get(name)
        assert init.parallel_config == expected["parallel_config"]


@each_version
def test_ready_response(version: str) -> None:
    scenario = recording("engine_handshake_dp1", version)
    (response,) = values(scenario, "input")
    hello, init, ready = values(scenario, "handshake")

    for name, value in scenario.expected["ready_response"].items():
        assert value == getattr(response, name)
    assert hello == HandshakeReport(status=HandshakeStatus.HELLO)
    assert init.addresses.coordinator_input is None
    assert ready == HandshakeReport(status=HandshakeStatus.READY)


@with_expected("identities")
def test_engine_ids_are_little_endian(scenario: Recording) -> None:
    assert scenario.expected["identities"] == [EngineId.of(index).hex() for index in (0, 1)]


@with_expected("routing")
def test_where_requests_went(scenario: Recording) -> None:
    requests = values(scenario, "input", EngineCoreRequest)

    assert [
        (route["client_index"], route["current_wave"], route["data_parallel_rank"])
        for route in scenario.expected["routing"]
    ] == [(r.client_index, r.current_wave, r.data_parallel_rank) for r in requests]


@with_expected("add_current_wave")
def test_waves(scenario: Recording) -> None:
    requests = values(scenario, "input", EngineCoreRequest)
    broadcasts = values(scenario, "coordinator_input", StartDpWave)
    expected = [wave for _, (wave, _) in scenario.expected["start_dp_wave"]]

    assert scenario.expected["add_current_wave"] == [r.current_wave for r in requests]
    assert {wave.wave for wave in broadcasts} <= set(expected)


@with_expected("coordinator_output")
def test_what_engines_tell_the_coordinator(scenario: Recording) -> None:
    def summaries() -> Iterator[tuple[Any, ...]]:
        for value in values(scenario, "coordinator_output"):
            if isinstance(value, DpControlOutput):
                yield value.engine_index, None, None, value.wave_complete, value.start_wave
            else:
                stats = value.scheduler_stats
                load = (stats.num_running_reqs, stats.num_waiting_reqs)
                yield value.engine_index, *load, None, None

    assert [
        (e["engine_index"], e["running"], e["waiting"], e["wave_complete"], e["start_wave"])
        for e in scenario.expected["coordinator_output"]
    ] == list(summaries())


@with_expected("published")
def test_what_the_coordinator_tells_frontends(scenario: Recording) -> None:
    published = values(scenario, "frontend_stats_publish", CoordinatorStats)

    assert scenario.expected["published"] == [
        [
            [[e.num_waiting_reqs, e.num_running_reqs, e.kv_cache_usage] for e in stats.loads],
            stats.current_wave,
            stats.engines_running,
        ]
        for stats in published
    ]


@each_version
def test_cached_tokens_of_a_prefix_hit(version: str) -> None:
    scenario = recording("prefix_cache_hit", version)
    prefills = [
        output.prefill_stats
        for parts in outputs(scenario).values()
        for output in parts
        if output.prefill_stats is not None
    ]
    caches = [
        batch.scheduler_stats.prefix_cache_stats
        for batch in values(scenario, "output", RequestBatchOutputs)
        if batch.outputs
    ]

    for expected, stats in zip(scenario.expected["prefill_stats"], prefills, strict=True):
        assert all(value == getattr(stats, name) for name, value in expected.items())
    for expected, stats in zip(scenario.expected["prefix_cache_stats"], caches, strict=True):
        assert all(value == getattr(stats, name) for name, value in expected.items())


@each_version
def test_pooled_embedding(version: str) -> None:
    scenario = recording("pooling_embed", version)
    found = outputs(scenario)

    for request_id, expected in scenario.expected["pooling_output"].items():
        (output,) = found[request_id]
        assert output.pooling_output is not None
        assert (expected["dtype"], tuple(expected["shape"])) == (
            output.pooling_output.dtype,
            output.pooling_output.shape,
        )
        assert output.pooling_output.numpy().tolist() == expected["values"]


@with_expected("finish_reason")
def test_finish_reasons_at_shutdown(scenario: Recording) -> None:
    assert scenario.expected["finish_reason"] == {
        request_id: parts[-1].finish_reason for request_id, parts in outputs(scenario).items()
    }


def test_plain_rows_are_those_with_nothing_but_tokens() -> None:
    """The short cut of `bare_token_ids` gives what decoding the row would."""
    plain = 0
    for scenario in recordings():
        for message in scenario.messages:
            if message.channel != "output":
                continue
            batch = decode_outputs_lazily(message.frames)
            if not isinstance(batch, UndecodedBatch):
                continue
            for row in batch.rows:
                output = batch.decode_row(row)
                assert output.request_id == row_request_id(row)
                token_ids = bare_token_ids(row)
                plain += token_ids is not None
                assert token_ids in (None, output.new_token_ids)
                bare = EngineCoreOutput(output.request_id, output.new_token_ids)
                assert same(output, bare) == (token_ids is not None)
    assert plain > 50
