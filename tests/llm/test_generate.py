"""`Llm.generate`: one final result, with all that is known of it."""

from __future__ import annotations

import re
import time
import weakref
from typing import Any

import numpy as np
import pytest
import trio
from tests.client.world import make_output
from tests.llm.logprobs import make_logprobs
from tests.llm.world import make_prompt, open_llm_world
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.concurrency import Waker
from trio_vllm.errors import (
    ClientClosedError,
    DecodeError,
    EmptyPromptError,
    EngineDeadError,
    InvalidFieldError,
)
from trio_vllm.llm import GenerateOutput, Usage, WeightVersionSpan
from trio_vllm.llm.collector import Collector
from trio_vllm.protocol import (
    EngineCoreEvent,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    EventType,
    FinishReason,
    KvHintAction,
    KvHintsEnvelope,
    LoRARequest,
    PrefillStats,
    RequestErrorInfo,
    RequestSpecDecodeMetrics,
    SamplingMask,
)


async def test_the_result_comes_when_all_of_it_is_there() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.engine.emit(request.request_id, [7, 8])
        await world.engine.emit(request.request_id, [9])
        assert not outcome.is_over
        await world.finish(request.request_id, [2], finish_reason=FinishReason.STOP, stop_reason=2)

        output = outcome.get()

        assert (
            output.request_id,
            output.prompt_token_ids,
            output.token_ids,
        ) == ("x", [1, 2, 3], [7, 8, 9, 2])
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 2)
        assert output.usage == Usage(prompt_tokens=3, output_tokens=4)
        (completion,) = output.completions
        assert (completion.index, completion.engine_request_id, completion.engine_index) == (
            0,
            request.request_id,
            0,
        )
        world.assert_tidy()


async def test_every_field_of_a_request_reaches_the_engine() -> None:
    hints = KvHintsEnvelope(
        protocol_version="1",
        message_id="m",
        actions=[KvHintAction(action_id="a", action_type="t", action_version="1", payload={})],
    )
    fields: dict[str, Any] = {
        "arrival_time": 12.5,
        "cache_salt": "salt",
        "trace_headers": {"traceparent": "00"},
        "priority": -3,
        "data_parallel_rank": 0,
        "session_id": "s",
        "kv_hints": hints,
        "reasoning_parser_kwargs": {"a": 1},
        "reasoning_ended": True,
        "lora_request": LoRARequest(lora_name="l", lora_int_id=1, lora_path="p"),
    }
    async with open_llm_world(supports_lora=True, max_loras=1) as world:
        request = make_prompt("x", **{f"request_{name}": value for name, value in fields.items()})
        facts = world.llm.client.driver.core.facts
        facts.note_results("add_lora", [["l", 1, "p"]], {0: True})  # it was loaded before
        await world.start(lambda: world.llm.generate(request))
        (got,) = world.engine.requests()

    assert fields == {name: getattr(got, name) for name in fields}
    assert (got.external_req_id, got.prompt_token_ids) == ("x", [1, 2, 3])


async def test_what_the_caller_leaves_out_is_filled_in() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(None, max_tokens=None)))
        (got,) = world.engine.requests()
        await world.finish(got.request_id)

    assert got.arrival_time == 1_000.0
    assert got.sampling_params is not None
    assert got.sampling_params.max_tokens == 512 - 3
    assert re.fullmatch(r"[0-9a-f]{32}", outcome.get().request_id)


async def test_engines_see_the_callers_id_with_a_random_end() -> None:
    async with open_llm_world() as world:
        for _ in range(2):
            await world.start(lambda: world.llm.generate(make_prompt()))
        ids = [request.request_id for request in world.engine.requests()]

    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"x-[0-9a-f]{8}", request_id) for request_id in ids)


async def test_or_the_callers_id_as_it_is() -> None:
    async with open_llm_world(randomize_request_ids=False) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))

        (request,) = world.engine.requests()
        assert (request.request_id, request.external_req_id) == ("x", "x")


# Logprobs and the like ----------------------------------------------------------------------------


async def test_logprobs_are_joined_and_cut_to_what_was_asked_for() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(logprobs=1)))
        (request,) = world.engine.requests()
        # The engine's rows are as wide as the widest request of its step.
        for token_ids, width in (([7], 4), ([8, 9], 2), ([10], 5)):
            part = make_logprobs(token_ids, width)
            await world.engine.emit(request.request_id, token_ids, new_logprobs=part)
        await world.finish(request.request_id, [11], new_logprobs=make_logprobs([11], 2))

        logprobs = outcome.get().logprobs

        assert logprobs is not None
        assert [position.token.token_id for position in logprobs] == [7, 8, 9, 10, 11]
        assert {len(position.entries) for position in logprobs} == {2}


def test_columns_of_other_requests_are_not_kept() -> None:
    """They may be as many as the vocabulary."""
    request = EngineCoreRequest(
        request_id="x",
        prompt_token_ids=[1],
        sampling_params=EngineCoreSamplingParams(logprobs=1, prompt_logprobs=0),
    )
    collector = Collector(request, 0, Waker(), time.time, interval=0)
    wide = [make_logprobs([7], 1000), make_logprobs([2, 3], 1000)]
    arrays = [array for part in wide for array in (part.token_ids, part.logprobs)]
    kept = [weakref.ref(array if array.base is None else array.base) for array in arrays]
    collector.add_output(
        make_output([7], "x", new_logprobs=wide[0], new_prompt_logprobs_tensors=wide[1]), 0.0, None
    )
    assert all(reference() is not None for reference in kept)

    del wide, arrays

    assert [reference() for reference in kept] == [None] * 4


@pytest.mark.parametrize(
    ("params", "columns"),
    [
        ({"logprobs": 0}, 1),
        ({"logprobs": 3}, 4),
        ({"logprobs": -1}, 7),
        ({"logprob_token_ids": [4, 5]}, 3),
        ({"logprobs": 2, "logprob_token_ids": [4, 5]}, 3),
    ],
)
async def test_columns_of_logprobs(params: dict[str, Any], columns: int) -> None:
    async with open_llm_world(client_options={"vocab_size": 6}) as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(**params)))
        (request,) = world.engine.requests()
        await world.finish(request.request_id, [5], new_logprobs=make_logprobs([5], 7))

        logprobs = outcome.get().logprobs
        assert logprobs is not None
        assert logprobs.token_ids.shape == (1, columns)


async def test_no_logprobs_is_none() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        await world.finish(world.engine.requests()[0].request_id)

        assert (outcome.get().logprobs, outcome.get().prompt_logprobs) == (None, None)


async def test_values_that_are_no_numbers_are_kept() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(logprobs=2)))
        (request,) = world.engine.requests()
        logprobs = make_logprobs([7, 8], 3)
        logprobs.logprobs[0] = np.nan
        logprobs.ranks[0] = 0
        logprobs.logprobs[1, 2] = -np.inf
        await world.finish(request.request_id, [7, 8], new_logprobs=logprobs)

        got = outcome.get().logprobs
        assert got is not None
        assert np.isnan(got.positions[0].token.logprob)
        assert got.positions[0].token.rank == 0
        assert got.positions[1].entries[2].logprob == -np.inf


async def test_prompt_logprobs_may_come_in_several_chunks_before_the_first_token() -> None:
    async with open_llm_world() as world:
        prompt = make_prompt(prompt_logprobs=1, request_prompt_token_ids=[1, 2, 3, 4, 5])
        outcome = await world.start(lambda: world.llm.generate(prompt))
        (request,) = world.engine.requests()
        for token_ids in ([2, 3], [4]):
            chunk = make_logprobs(token_ids, 2)
            await world.engine.emit(request.request_id, new_prompt_logprobs_tensors=chunk)
        last = make_logprobs([5], 2)
        await world.finish(request.request_id, [7], new_prompt_logprobs_tensors=last)

        logprobs = outcome.get().prompt_logprobs
        assert logprobs is not None
        assert [position.token.token_id for position in logprobs] == [2, 3, 4, 5]


@pytest.mark.parametrize("columns", [0, 2])
async def test_prompt_logprobs_of_a_prompt_of_one_token_are_empty(columns: int) -> None:
    async with open_llm_world() as world:
        request = make_prompt(prompt_logprobs=1, request_prompt_token_ids=[1])
        outcome = await world.start(lambda: world.llm.generate(request))
        (got,) = world.engine.requests()
        empty = make_logprobs([], columns)
        await world.finish(got.request_id, new_prompt_logprobs_tensors=empty)

        logprobs = outcome.get().prompt_logprobs
        assert logprobs is not None
        assert logprobs.positions == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("new_logprobs", make_logprobs([7], 2)),
        ("new_logprobs", make_logprobs([7, 8, 9], 2)),
        ("new_sampling_mask", SamplingMask(np.array([1, 2]))),
        ("new_sampling_mask", SamplingMask(np.array([1, 2]), np.array([0, 0, 1, 2]))),
    ],
    ids=["logprobs-short", "logprobs-long", "mask-short", "mask-long"],
)
async def test_rows_that_do_not_match_the_tokens_hurt_one_request(field: str, value: Any) -> None:
    async with open_llm_world() as world:
        bad = await world.start(lambda: world.llm.generate(make_prompt("bad", logprobs=1)))
        good = await world.start(lambda: world.llm.generate(make_prompt("good", logprobs=1)))
        bad_id, good_id = (request.request_id for request in world.engine.requests())
        await world.engine.send(
            make_output([7, 8], bad_id, **{field: value}),
            make_output([7], good_id, new_logprobs=make_logprobs([7], 2)),
        )
        await world.finish(good_id, [8], new_logprobs=make_logprobs([8], 2))

        assert isinstance(bad.error, DecodeError)
        assert (bad.error.where, bad.error.request_id) == (field, bad_id)
        assert good.get().token_ids == [7, 8]
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == [[bad_id]]
        world.assert_tidy()


async def test_arrays_of_all_outputs_are_joined() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        mask = SamplingMask(np.array([5, 6], np.int32))
        await world.engine.emit(
            request.request_id,
            [7],
            routed_experts=np.ones((4, 2, 1), np.int16),
            new_sampling_mask=mask,
            prompt_token_id_logprobs=np.array([[-1.0]], np.float32),
            num_nans_in_logits=2,
        )
        await world.finish(
            request.request_id,
            [8],
            routed_experts=np.zeros((1, 2, 1), np.int16),
            new_sampling_mask=mask,
            num_nans_in_logits=3,
        )

        (completion,) = outcome.get().completions
        assert completion.routed_experts is not None
        assert completion.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 0]
        assert [mask.token_ids.tolist() for mask in completion.sampling_masks] == [[5, 6], [5, 6]]
        assert completion.prompt_token_id_logprobs is not None
        assert completion.prompt_token_id_logprobs.tolist() == [[-1.0]]
        assert completion.num_nans_in_logits == 5


@pytest.mark.parametrize("field", ["routed_experts", "prompt_token_id_logprobs"])
@pytest.mark.parametrize("shapes", [[(1, 2), (1, 3)], [(1, 2), (2,)], [()]])
async def test_arrays_that_do_not_fit_each_other(field: str, shapes: list[tuple[int, ...]]) -> None:
    """Each is well-formed by itself, so it is not known before they are put together."""
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        for shape in shapes:
            array: dict[str, Any] = {field: np.zeros(shape, np.float32)}
            await world.engine.emit(request.request_id, [7], **array)
        await world.finish(request.request_id)

        error = outcome.error
        assert isinstance(error, DecodeError)
        assert (request.request_id, 0) == (error.request_id, error.engine_index)
        assert error.where == f".{field}"
        world.assert_tidy()


# The end ------------------------------------------------------------------------------------------


async def test_what_comes_with_the_last_output() -> None:
    metrics = RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[1, 0, 3])
    fields: dict[str, Any] = {
        "kv_transfer_params": {"remote_block_ids": [1, 2]},
        "ec_transfer_params": {"a": "b"},
        "trace_headers": {"traceparent": "00"},
        "spec_decode_metrics": metrics,
    }
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        await world.finish(world.engine.requests()[0].request_id, **fields)

        (completion,) = outcome.get().completions
        assert fields == {name: getattr(completion, name) for name in fields}
        assert outcome.get().kv_transfer_params == {"remote_block_ids": [1, 2]}


async def test_what_the_engine_has_against_a_request_is_an_output() -> None:
    error = RequestErrorInfo(code="engine_paused", message="paused", retryable=True)
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        await world.finish(
            world.engine.requests()[0].request_id,
            [],
            finish_reason=FinishReason.ERROR,
            error=error,
            mm_cache_miss_hashes=["h"],
        )

        output = outcome.get()
        assert (FinishReason.ERROR, [], error) == (
            output.finish_reason,
            output.token_ids,
            output.error,
        )
        assert output.completions[0].mm_cache_miss_hashes == ["h"]
        assert output.timings.time_to_first_token is None


async def test_an_abort_by_the_engine_is_an_output() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.engine.emit(request.request_id, [7])
        await world.finish(request.request_id, [], finish_reason=FinishReason.ABORT)

        assert (outcome.get().finish_reason, outcome.get().token_ids) == (FinishReason.ABORT, [7])


async def test_the_engine_dies(autojump_clock: MockClock) -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        await world.engine.die()
        await trio.sleep(1)

        assert isinstance(outcome.error, EngineDeadError)
        assert str(outcome.error) == str(world.world.client.dead_engines[0])
        world.assert_tidy()


async def test_after_the_block_the_client_is_closed() -> None:
    async with open_llm_world() as world:
        pass

    with pytest.raises(ClientClosedError):
        await world.llm.generate(make_prompt())
    world.assert_tidy()


@pytest.mark.parametrize(
    ("request_fields", "error"),
    [
        ({"request_prompt_token_ids": []}, EmptyPromptError),
        ({"request_prompt_token_ids": [1] * 512, "max_tokens": None}, InvalidFieldError),
        ({"request_priority": 2**31}, InvalidFieldError),
        ({"n": 0}, InvalidFieldError),
        ({"n": 16_385}, InvalidFieldError),
        ({"n": True}, InvalidFieldError),
        ({"n": 2, "seed": 2**63 - 1}, InvalidFieldError),
        ({"n": 2, "seed": "x"}, InvalidFieldError),
        ({"logprobs": "x"}, InvalidFieldError),
        ({"logprob_token_ids": 3}, InvalidFieldError),
        ({"extra_args": [1]}, InvalidFieldError),
        ({"stream_interval": 0}, InvalidFieldError),
    ],
    ids=str,
)
async def test_bad_requests_are_refused_and_nothing_is_sent(
    request_fields: dict[str, Any], error: type[Exception]
) -> None:
    async with open_llm_world() as world:
        with pytest.raises(error):
            await world.llm.generate(make_prompt(**request_fields))

        assert world.engine.received() == []
        world.assert_tidy()


async def test_parameters_that_are_none_are_refused() -> None:
    request = make_prompt()
    object.__setattr__(request, "sampling_params", {"max_tokens": 3})
    async with open_llm_world() as world:
        with pytest.raises(InvalidFieldError, match="sampling_params"):
            await world.llm.generate(request)


async def test_generate_always_checkpoints() -> None:
    async with open_llm_world() as world:

        async def answer() -> None:
            await wait_all_tasks_blocked()
            await world.finish(world.engine.requests()[0].request_id)

        world.nursery.start_soon(answer)
        with assert_checkpoints():
            output: GenerateOutput = await world.llm.generate(make_prompt())

    assert output.token_ids == [7]


# Caches, weights ----------------------------------------------------------------------------------

CACHED = PrefillStats(num_prompt_tokens=3, num_computed_tokens=1, num_cached_tokens=2)


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (None, 2),
        ({}, 2),
        ({"do_remote_prefill": True}, 2),
        ({"do_remote_prefill": True, "remote_prefill_cached_tokens": 1}, 1),
        ({"do_remote_prefill": True, "remote_prefill_cached_tokens": 99}, 3),
        ({"do_remote_prefill": True, "remote_prefill_cached_tokens": -5}, 0),
        ({"do_remote_prefill": True, "remote_prefill_cached_tokens": "1"}, 2),
        ({"do_remote_prefill": False, "remote_prefill_cached_tokens": 1}, 2),
    ],
    ids=str,
)
async def test_cached_tokens_are_those_of_the_engine_that_did_the_prefill(
    transfer: dict[str, Any] | None, expected: int
) -> None:
    extra_args = None if transfer is None else {"kv_transfer_params": transfer}
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(extra_args=extra_args)))
        await world.finish(world.engine.requests()[0].request_id, prefill_stats=CACHED)

        usage = outcome.get().usage
        assert (3, 1, expected) == (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["a", "a", "a"], [(0, 6, "a")]),
        (["a", "b", "b"], [(0, 2, "a"), (2, 6, "b")]),
        (["a", None, "a"], [(0, 6, "a")]),
        (["a", None, "b"], [(0, 4, "a"), (4, 6, "b")]),
        ([None, "a", "a"], [(2, 6, "a")]),
        ([None, None, None], []),
    ],
)
async def test_weight_versions(
    versions: list[str | None], expected: list[tuple[int, int, str]]
) -> None:
    """Tokens without a label continue the span before them, as upstream."""
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        for version in versions:
            await world.engine.send(make_output([7, 8], request.request_id), weight_version=version)
        await world.finish(request.request_id, [])

        (completion,) = outcome.get().completions
        assert [WeightVersionSpan(start=s, end=e, version=v) for s, e, v in expected] == list(
            completion.weight_versions
        )


# Times --------------------------------------------------------------------------------------------


def event(kind: EventType, timestamp: float) -> EngineCoreEvent:
    return EngineCoreEvent(kind, timestamp)


async def test_timings() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        world.pass_time(0.5)
        events = [event(EventType.QUEUED, 50.0), event(EventType.SCHEDULED, 51.0)]
        await world.engine.send(make_output([7], request.request_id, events=events), timestamp=54.0)
        world.pass_time(0.5)
        again = [event(EventType.PREEMPTED, 54.5), event(EventType.SCHEDULED, 55.0)]
        await world.engine.send(make_output([], request.request_id, events=again), timestamp=55.5)
        await world.engine.send(make_output([8, 9], request.request_id), timestamp=56.0)
        world.pass_time(2.0)
        last = make_output([10], request.request_id, finish_reason=FinishReason.LENGTH)
        await world.engine.send(last, timestamp=60.0)

        timings = outcome.get().timings

        assert (timings.e2e_latency, timings.time_to_first_token) == (3.0, 0.5)
        assert (
            timings.queued_time,
            timings.prefill_time,
            timings.decode_time,
            timings.inference_time,
        ) == (1.0, 3.0, 6.0, 9.0)
        assert timings.inter_token_latencies == (2.0, 4.0)
        assert timings.mean_time_per_output_token == 2.0


async def test_timings_without_events_are_what_is_left() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(
            lambda: world.llm.generate(make_prompt(request_arrival_time=990.0))
        )
        await world.finish(world.engine.requests()[0].request_id)

        timings = outcome.get().timings

        assert (timings.e2e_latency, timings.time_to_first_token) == (10.0, 10.0)
        assert (
            timings.queued_time,
            timings.prefill_time,
            timings.inference_time,
        ) == (None, None, None)
        assert (
            timings.decode_time,
            timings.inter_token_latencies,
            timings.mean_time_per_output_token,
        ) == (0.0, (), None)


async def test_a_timestamp_of_zero_is_none() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.engine.send(make_output([7], request.request_id), timestamp=0.0)
        last = make_output([8], request.request_id, finish_reason=FinishReason.LENGTH)
        await world.engine.send(last, timestamp=0.0)

        timings = outcome.get().timings
        assert (timings.decode_time, timings.inter_token_latencies) == (None, ())
