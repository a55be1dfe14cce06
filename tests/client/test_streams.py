"""The outputs of a request reach whoever asked, in order, and end once."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.client.world import make_output, make_request, open_world
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.client import OutputStream
from trio_vllm.errors import DuplicateRequestIdError, EmptyPromptError, InvalidFieldError
from trio_vllm.protocol import (
    DpControlOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    FinishReason,
    StructuredOutputsParams,
    encode_outputs,
)


async def test_a_request_reaches_the_engine_completed_and_the_callers_is_unchanged() -> None:
    params = EngineCoreSamplingParams(
        stop_token_ids=[7], eos_token_id=2, structured_outputs=StructuredOutputsParams(regex="a*")
    )
    request = make_request(sampling_params=params, priority=3)
    options = {"vocab_size": 9, "client_index": 5, "structured_outputs_backend": "guidance"}
    async with open_world(client_options=options) as world:
        async with world.client.call(request):
            (got,) = world.engine.requests()

    assert isinstance(got, EngineCoreRequest)
    assert got.sampling_params is not None
    assert got.sampling_params.structured_outputs is not None
    assert (
        got.client_index,
        got.priority,
        got.sampling_params.all_stop_token_ids,
        got.sampling_params.structured_outputs.backend,
    ) == (5, 3, [2, 7], "guidance")
    assert (request.client_index, params.all_stop_token_ids) == (0, ())
    assert params.structured_outputs is not None
    assert params.structured_outputs.backend is None


async def test_outputs_come_in_order_and_the_stream_ends_after_the_last() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.send(
                *[make_output(tokens) for tokens in ([7], [8, 9])],
                timestamp=4.5,
                weight_version="w",
            )
            await world.engine.emit("r", [2], FinishReason.STOP, stop_reason=2)

            got = [output async for output in stream]

            assert [item.output.new_token_ids for item in got] == [[7], [8, 9], [2]]
            assert (got[0].engine_index, got[0].timestamp, got[0].weight_version) == (0, 4.5, "w")
            assert (
                got[2].output.finish_reason,
                got[2].output.stop_reason,
            ) == (FinishReason.STOP, 2)
            world.assert_tidy()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == []


async def test_a_reader_waits_for_the_next_output() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.engine.emit, "r", [7])
                with assert_checkpoints():
                    assert (await anext(stream)).output.new_token_ids == [7]
            await world.engine.emit("r", [8], FinishReason.LENGTH)
            with assert_checkpoints():
                await anext(stream)
            with assert_checkpoints(), pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_one_reader_at_a_time() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.__anext__)
                await wait_all_tasks_blocked()

                with pytest.raises(trio.BusyResourceError):
                    await anext(stream)

                await world.engine.emit("r", [7])


async def test_a_reader_who_was_overtaken_waits_for_the_next_output() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.emit("r", [7])
            got: list[list[int]] = []

            async def read() -> None:
                got.append((await anext(stream)).output.new_token_ids)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                nursery.start_soon(read)
                await wait_all_tasks_blocked()
                assert got == [[7]]
                await world.engine.emit("r", [8])
            assert got == [[7], [8]]


async def test_a_slow_reader_stalls_nobody_and_loses_nothing() -> None:
    async with open_world() as world:
        slow, fast = make_request("slow", 500), make_request("fast", 500)
        async with world.client.call(slow) as slow_stream, world.client.call(fast) as fast_stream:
            for token in range(500):
                await world.engine.send(make_output([token], "slow"), make_output([token], "fast"))
                assert (await anext(fast_stream)).output.new_token_ids == [token]

            assert list(range(500)) == [
                (await anext(slow_stream)).output.new_token_ids[0] for _ in range(500)
            ]


async def test_outputs_of_unknown_requests_are_dropped() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.emit("stranger", [1])
            await world.engine.emit("stranger", [1], FinishReason.LENGTH, num_nans_in_logits=2)
            await world.engine.send(finished_requests=["stranger"])
            await world.engine.emit("r", [7])

            assert (await anext(stream)).output.new_token_ids == [7]
            assert world.client.is_healthy


async def test_outputs_without_tokens_are_passed_on() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            await world.engine.emit("r")

            assert (await anext(stream)).output.new_token_ids == []


@pytest.mark.parametrize("request_id", ["x" * 1_000_000, "", "🦜", "a\x00b", "../x"])
async def test_odd_request_ids(request_id: str) -> None:
    async with open_world() as world:
        async with world.client.call(make_request(request_id)) as stream:
            (got,) = world.engine.requests()
            await world.engine.emit(got.request_id, [7], FinishReason.LENGTH)

            assert request_id == (await anext(stream)).output.request_id


async def test_a_lone_surrogate_is_a_request_error_and_the_client_lives_on() -> None:
    async with open_world() as world:
        with pytest.raises(InvalidFieldError, match="request_id"):
            async with world.client.call(make_request("\ud800")):
                raise AssertionError("it was sent")

        await world.round_trip()


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 2**64},
        {"seed": 2**63},
        {"temperature": 3.0},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [2**32]},
        {"logprobs": -2},
        {"n": 2},
    ],
    ids=str,
)
async def test_what_an_engine_would_die_of_is_not_sent(params: dict[str, object]) -> None:
    sampling_params = EngineCoreSamplingParams(**params)  # type: ignore[arg-type]
    async with open_world() as world:
        with pytest.raises(InvalidFieldError, match="sampling_params"):
            world.client.driver.submit(
                make_request(sampling_params=sampling_params), OutputStream("r")
            )

        assert world.engine.received() == []
        world.assert_tidy()
        await world.round_trip()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"priority": 2**31}, "priority"),
        ({"prompt_token_ids": [2**32]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 512}, "prompt_token_ids"),
        ({"sampling_params": None}, "sampling_params"),
    ],
    ids=["priority", "token", "negative", "too-long", "no-params"],
)
async def test_bad_fields_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    async with open_world() as world:
        with pytest.raises(InvalidFieldError) as caught:
            world.client.driver.submit(make_request("bad", **fields), OutputStream("bad"))

        assert caught.value.request_id == "bad"
        assert caught.value.field.startswith(name)
        assert world.engine.received() == []


async def test_an_empty_prompt_is_refused() -> None:
    async with open_world() as world:
        with pytest.raises(EmptyPromptError):
            world.client.driver.submit(make_request(prompt_token_ids=[]), OutputStream("r"))


async def test_an_id_in_flight_is_refused_and_its_first_request_goes_on() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as stream:
            with pytest.raises(DuplicateRequestIdError) as caught:
                async with world.client.call(make_request()):
                    raise AssertionError("it was sent")

            assert caught.value.request_id == "r"
            assert len(world.engine.requests()) == 1
            await world.engine.emit("r", [7], FinishReason.LENGTH)
            assert (await anext(stream)).output.new_token_ids == [7]
        await wait_all_tasks_blocked()
        assert world.engine.aborts() == []


async def test_a_finished_id_may_be_used_again_while_the_first_block_is_open() -> None:
    async with open_world() as world:
        async with world.client.call(make_request()) as first:
            await world.engine.emit("r", [1], FinishReason.LENGTH)
            second = OutputStream("r")
            world.client.driver.submit(make_request(), second)
            await anext(first)
        await wait_all_tasks_blocked()

        assert world.engine.aborts() == []
        await world.engine.emit("r", [2], FinishReason.LENGTH)
        assert (await anext(second)).output.new_token_ids == [2]
        world.assert_tidy()


async def test_a_wave_notice_on_the_main_channel_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_world() as world:
        notice = DpControlOutput(engine_index=0, wave_complete=1)
        await world.engine.say(*map(bytes, encode_outputs(notice)))

        assert "wave notice" in caplog.text
        await world.round_trip()
