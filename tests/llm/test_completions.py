"""Several completions of one prompt: as many engine requests, one result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import pytest
import trio
from tests.client.world import make_output
from tests.llm.world import make_prompt, open_llm_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm import Llm
from trio_vllm.client import Engine
from trio_vllm.errors import DecodeError, EngineDeadError
from trio_vllm.llm import Usage
from trio_vllm.protocol import FinishReason, PrefillStats
from trio_vllm.testing import mock_llm


async def test_children_are_named_and_seeded_as_upstream_does() -> None:
    async with open_llm_world() as world:
        await world.start(lambda: world.llm.generate(make_prompt(n=3, seed=40, temperature=0.5)))
        children = world.engine.requests()

    parent = children[0].request_id.removeprefix("0_")
    assert [f"{index}_{parent}" for index in range(3)] == [c.request_id for c in children]
    assert {child.external_req_id for child in children} == {"x"}
    params = [child.sampling_params for child in children]
    assert [(p.n, p.seed, p.temperature) for p in params if p is not None] == [
        (1, 40, 0.5),
        (1, 41, 0.5),
        (1, 42, 0.5),
    ]


@pytest.mark.parametrize("seed", [None, -1])
async def test_without_a_seed_children_have_none(seed: int | None) -> None:
    async with open_llm_world() as world:
        await world.start(lambda: world.llm.generate(make_prompt(n=2, seed=seed)))

        assert [r.sampling_params.seed for r in world.engine.requests() if r.sampling_params] == [
            None,
            None,
        ]


async def test_a_child_that_is_the_only_one_has_the_parents_name() -> None:
    async with open_llm_world(randomize_request_ids=False) as world:
        await world.start(lambda: world.llm.generate(make_prompt(n=1, seed=3)))

        (request,) = world.engine.requests()
        assert request.request_id == "x"


async def test_the_results_are_one() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(n=2)))
        first, second = (request.request_id for request in world.engine.requests())
        await world.engine.send(
            make_output(
                [8],
                second,
                finish_reason=FinishReason.STOP,
                stop_reason=8,
                prefill_stats=PrefillStats(num_cached_tokens=2),
            )
        )
        assert not outcome.is_over
        await world.engine.send(
            make_output([7], first, prefill_stats=PrefillStats(num_cached_tokens=1))
        )
        await world.finish(first, [9])

        output = outcome.get()
        assert [(c.index, c.token_ids) for c in output.completions] == [(0, [7, 9]), (1, [8])]
        assert [completion.finish_reason for completion in output.completions] == [
            FinishReason.LENGTH,
            FinishReason.STOP,
        ]
        assert output.usage == Usage(prompt_tokens=3, output_tokens=3, cached_tokens=1)
        assert output.prompt_logprobs is None
        for field in ("token_ids", "logprobs", "finish_reason", "stop_reason", "error", "timings"):
            with pytest.raises(ValueError, match=rf"2 completions: read completions\[i\].{field}"):
                getattr(output, field)
        world.assert_tidy()


async def test_completions_may_come_from_several_engines() -> None:
    async with open_llm_world(2) as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(n=4)))
        for engine in world.world.engines:
            for request in engine.requests():
                await engine.send(
                    make_output([7], request.request_id, finish_reason=FinishReason.LENGTH)
                )

        assert [c.engine_index for c in outcome.get().completions] == [0, 1, 0, 1]


async def test_a_stream_delivers_each_completion_on_its_own() -> None:
    async with open_llm_world() as world:
        async with world.llm.stream(make_prompt(n=2)) as stream:
            await wait_all_tasks_blocked()
            first, second = (request.request_id for request in world.engine.requests())
            await world.engine.emit(second, [8])
            assert _brief(await anext(stream)) == (1, [8])
            await world.engine.send(make_output([7], first), make_output([9], second))
            assert [_brief(await anext(stream)) for _ in range(2)] == [(0, [7]), (1, [9])]
            await world.finish(first, [10])
            assert _brief(await anext(stream)) == (0, [10])
            await world.engine.emit(second, [11])
            await world.finish(second, [12])
            assert [_brief(delta) async for delta in stream] == [(1, [11, 12])]
        world.assert_tidy()


async def test_a_slow_caller_hears_of_all_completions_in_turn() -> None:
    async with open_llm_world() as world:
        async with world.llm.stream(make_prompt(n=3)) as stream:
            await wait_all_tasks_blocked()
            ids = [request.request_id for request in world.engine.requests()]
            heard = []
            for token in range(7):
                await world.engine.send(*[make_output([token], child) for child in ids])
                heard.append((await anext(stream)).index)

    assert heard == [0, 1, 2, 0, 1, 2, 0]


async def test_if_one_fails_the_others_are_aborted() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(n=3)))
        ids = [request.request_id for request in world.engine.requests()]
        await world.engine.send(finished_requests=[ids[1]])

        assert isinstance(outcome.error, DecodeError)
        await wait_all_tasks_blocked()
        assert ids == sorted(itertools.chain(*world.engine.aborts()))
        world.assert_tidy()


async def test_if_one_engine_dies_the_completions_of_others_are_aborted(
    autojump_clock: MockClock,
) -> None:
    async with open_llm_world(2) as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(n=2)))
        (other,) = world.world.engines[1].requests()
        await world.world.engines[0].die()
        await trio.sleep(1)

        assert isinstance(outcome.error, EngineDeadError)
        assert world.world.engines[1].aborts() == [[other.request_id]]
        world.assert_tidy()


async def test_a_stream_delivers_what_came_of_all_before_an_error() -> None:
    async with open_llm_world() as world:
        async with world.llm.stream(make_prompt(n=2, stream_interval=10)) as stream:
            await wait_all_tasks_blocked()
            first, second = (request.request_id for request in world.engine.requests())
            await world.engine.send(make_output([7], first), make_output([8], second))
            await anext(stream)
            await anext(stream)
            await world.engine.emit(first, [9])
            await world.finish(second, [10])
            await world.engine.send(finished_requests=[first])

            assert [_brief(await anext(stream)) for _ in range(2)] == [(0, [9]), (1, [10])]
            with pytest.raises(DecodeError):
                await anext(stream)


async def test_an_abort_ends_all_of_them() -> None:
    async with open_llm_world() as world:
        outcome = await world.start(lambda: world.llm.generate(make_prompt(n=2)))
        first, second = (request.request_id for request in world.engine.requests())
        await world.finish(first)
        world.llm.abort(["x"])
        await wait_all_tasks_blocked()

        assert [completion.finish_reason for completion in outcome.get().completions] == [
            FinishReason.LENGTH,
            FinishReason.ABORT,
        ]
        assert world.engine.aborts() == [[second]]


@attrs.define
class AbortingRule:
    """A rule of load balancing that aborts all there is first."""

    llm: Llm | None = None

    def choose(self, engines: Sequence[Engine]) -> Engine:
        """Take the first engine."""
        if self.llm is not None:
            self.llm.abort()
        return engines[0]


async def test_an_abort_while_they_are_submitted_ends_those_that_were() -> None:
    rule = AbortingRule()
    async with mock_llm(engine_count=2, load_balancer=rule) as mocks:
        rule.llm = mocks.llm
        output = await mocks.llm.generate(make_prompt(n=3, max_tokens=4))

    assert [completion.finish_reason for completion in output.completions] == [
        FinishReason.ABORT,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]


def _brief(delta: object) -> tuple[int, list[int]]:
    return delta.index, delta.token_ids  # type: ignore[attr-defined]
