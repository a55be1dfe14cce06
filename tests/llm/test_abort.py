"""`Llm.abort` and `Llm.shutdown`: by the caller's ids, of which one may stand for several."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.llm.world import make_prompt, open_llm_world
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.errors import ClientClosedError, DuplicateRequestIdError
from trio_vllm.protocol import FinishReason


async def test_what_there_is_is_the_result() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.engine.emit(request.request_id, [7, 8])
        world.pass_time(3)
        world.llm.abort(["x"])
        await wait_all_tasks_blocked()

        output = outcome.get()
        assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, [7, 8])
        assert output.usage.output_tokens == 2
        assert output.timings.e2e_latency == 3.0
        assert world.engine.aborts() == [[request.request_id]]
        world.assert_tidy()


async def test_an_id_stands_for_all_requests_that_have_it() -> None:
    async with open_llm_world() as world:
        outcomes = [
            await world.start(lambda: world.llm.generate(make_prompt("x"))) for _ in range(3)
        ]
        other = await world.start(lambda: world.llm.generate(make_prompt("y")))
        ids = [request.request_id for request in world.engine.requests()]
        await world.finish(ids[1])
        world.llm.abort(["unknown", "x"])
        await wait_all_tasks_blocked()

        assert [outcome.get().finish_reason for outcome in outcomes] == [
            FinishReason.ABORT,
            FinishReason.LENGTH,
            FinishReason.ABORT,
        ]
        assert not other.is_over
        assert world.engine.aborts() == [[ids[0], ids[2]]]


async def test_no_ids_are_all() -> None:
    async with open_llm_world() as world:
        outcomes = [
            await world.start(partial(world.llm.generate, make_prompt(name)))
            for name in ("x", "y", None)
        ]
        world.llm.abort()
        await wait_all_tasks_blocked()

        assert {outcome.get().finish_reason for outcome in outcomes} == {FinishReason.ABORT}
        world.assert_tidy()


@pytest.mark.parametrize("ids", [["unknown"], ["x"]])
async def test_unknown_and_finished_ids_are_ignored(ids: list[str]) -> None:
    async with open_llm_world() as world:
        await world.start(lambda: world.llm.generate(make_prompt("x")))
        running = await world.start(lambda: world.llm.generate(make_prompt("y")))
        await world.finish(world.engine.requests()[0].request_id)
        world.llm.abort(ids)
        await wait_all_tasks_blocked()

        assert not running.is_over
        assert world.engine.received() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([5], "must be strings, not int"),
        ([make_prompt("a")], "must be strings, not GenerateRequest"),
        (None, "must be several ids, not None"),
        (make_prompt("a"), "must be several ids, not GenerateRequest"),
    ],
)
async def test_what_is_no_id_is_a_type_error(given: Any, said: str) -> None:
    """It would abort nothing, without a word."""
    async with open_llm_world() as world:
        for abort in (world.llm.abort, world.llm.client.abort):
            with pytest.raises(TypeError, match=said):
                abort(given)


async def test_a_string_is_not_a_list_of_ids() -> None:
    async with open_llm_world() as world:
        with pytest.raises(TypeError, match="not a string"):
            world.llm.abort("xy")


async def test_a_stream_ends_with_the_abort() -> None:
    async with open_llm_world() as world:
        async with world.llm.stream(make_prompt()) as stream:
            world.llm.abort(["x"])

            assert [delta.finish_reason async for delta in stream] == [FinishReason.ABORT]


async def test_ids_that_are_not_randomized_must_be_unique() -> None:
    async with open_llm_world(randomize_request_ids=False) as world:
        first = await world.start(lambda: world.llm.generate(make_prompt()))
        second = await world.start(lambda: world.llm.generate(make_prompt()))

        assert isinstance(second.error, DuplicateRequestIdError)
        world.llm.abort(["x"])
        await wait_all_tasks_blocked()
        assert first.get().finish_reason is FinishReason.ABORT
        world.assert_tidy()


async def test_an_id_that_is_used_again_is_not_forgotten_with_its_first_request() -> None:
    async with open_llm_world(randomize_request_ids=False) as world:
        async with world.llm.stream(make_prompt()):
            await world.finish("x")
            second = await world.start(lambda: world.llm.generate(make_prompt()))
        assert not second.is_over
        world.llm.abort(["x"])
        await wait_all_tasks_blocked()

        assert second.get().finish_reason is FinishReason.ABORT
        assert world.engine.aborts() == [["x"]]
        world.assert_tidy()


async def test_shutting_down_aborts_everything_and_closes_the_client() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        with assert_checkpoints():
            await world.llm.shutdown()
        await wait_all_tasks_blocked()

        assert outcome.get().finish_reason is FinishReason.ABORT
        assert world.engine.aborts() == [[request.request_id]]
        with pytest.raises(ClientClosedError):
            await world.llm.generate(make_prompt())
        await world.llm.shutdown()
        world.assert_tidy()
