"""What the model can do is asked for at first, and kept to."""

from __future__ import annotations

import attrs
import pytest
import trio
from tests.cancelling import was_cancelled_at
from tests.client.pair import open_pair
from tests.client.scripted import Failure, scripted_engines
from tests.client.world import World, hand_driven, make_request, open_world
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.client import EngineCoreClient, OutputStream, open_client
from trio_vllm.client.engines import DISCONNECT_GRACE
from trio_vllm.errors import (
    ClientClosedError,
    EngineDeadError,
    UnsupportedFieldError,
    UtilityCallFailedError,
    UtilityResultError,
    UtilityTimeoutError,
)
from trio_vllm.protocol import EngineCoreRequest, PoolingParams

ASKED: list[tuple[str, list[object]]] = [("get_supported_tasks", [])]


def make_pooling_request(request_id: str = "p", task: str = "embed") -> EngineCoreRequest:
    return make_request(request_id, sampling_params=None, pooling_params=PoolingParams(task=task))


async def refused(client: EngineCoreClient, request: EngineCoreRequest, reason: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=reason):
        async with client.call(request):
            raise AssertionError("it was sent")


async def test_a_pooling_request_is_not_sent_to_a_model_that_generates() -> None:
    async with scripted_engines({"get_supported_tasks": ["generate"]}) as (client, engines):
        await refused(client, make_pooling_request(), "'embed' is not supported")
        await refused(client, make_pooling_request(), "'embed' is not supported")
        async with client.call(make_request()):
            pass

        assert engines.calls == {0: ASKED}


async def test_a_generation_request_is_not_sent_to_a_model_that_is_known_to_pool() -> None:
    async with scripted_engines({"get_supported_tasks": ["embed"]}) as (client, engines):
        await refused(client, make_pooling_request(task="classify"), "'classify' is not supported")
        async with client.call(make_pooling_request()):
            pass
        await refused(client, make_request(), "only pools")
        with pytest.raises(UnsupportedFieldError):
            client.driver.submit(make_request(), OutputStream("r"))

        assert engines.calls == {0: ASKED}


async def test_generation_asks_nothing() -> None:
    async with scripted_engines({}) as (client, engines):
        async with client.call(make_request()):
            pass

        assert engines.calls == {0: []}


async def test_other_limits_stay() -> None:
    options = {"vocab_size": 10}
    async with open_pair(supported_tasks=("embed",), client_options=options) as (world, _):
        before = world.client.driver.core.facts.limits
        await world.client.driver.learn_supported_tasks()

        after = attrs.evolve(before, supported_tasks=["embed"])
        assert world.client.driver.core.facts.limits == after
        async with world.client.call(make_pooling_request()) as outputs:
            assert [o.output.pooling_output is not None async for o in outputs] == [True]


async def test_concurrent_requests_ask_once() -> None:
    async with scripted_engines({"get_supported_tasks": ["embed"]}, ["0.33.0"] * 2) as pair:
        client, engines = pair

        async def pool(number: int) -> None:
            async with client.call(make_pooling_request(f"p{number}")):
                pass

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(pool, number)

        assert engines.calls == {0: ASKED, 1: ASKED}


async def learn_in(world: World, nursery: trio.Nursery) -> list[BaseException | None]:
    """Learn beside the test, up to the wait; the list gets how it ends."""
    ends: list[BaseException | None] = []

    async def learn() -> None:
        try:
            await world.client.driver.learn_supported_tasks()
        except Exception as error:
            ends.append(error)
        else:
            ends.append(None)

    nursery.start_soon(learn)
    await wait_all_tasks_blocked()
    return ends


async def test_asking_again_does_not_take_longer(autojump_clock: MockClock) -> None:
    """All attempts share the time that there is."""
    async with open_world(2) as world, trio.open_nursery() as nursery:

        async def learn() -> None:
            with pytest.raises(UtilityTimeoutError):
                await world.client.driver.learn_supported_tasks(timeout=5)

        nursery.start_soon(learn)
        await trio.sleep(4)
        await world.engines[0].die()
        await trio.sleep(0.5)
        first = world.engines[1].call()
        await world.engines[1].answer(first.call_id, ["embed"])
        assert first.method == world.engines[1].call().method
    assert trio.current_time() == 5


async def test_who_waits_asks_again_for_one_that_was_cancelled() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        async with trio.open_nursery() as first:
            await learn_in(world, first)
            asked = world.engine.call()
            ends = await learn_in(world, nursery)
            assert world.engine.received() == []
            first.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        again = world.engine.call()
        assert asked.method == again.method == "get_supported_tasks"
        await world.engine.answer(asked.call_id, ["classify"])  # late, for nobody
        assert ends == []
        await world.engine.answer(again.call_id, ["embed"])

        assert ends == [None]
        assert world.client.supported_tasks == ["embed"]
        world.assert_tidy()


async def test_an_engine_that_dies_meanwhile_is_not_needed() -> None:
    async with open_world(2) as world, trio.open_nursery() as nursery:
        ends = await learn_in(world, nursery)
        await world.engines[0].answer(world.engines[0].call().call_id, ["embed"])
        await world.engines[1].die()
        await trio.sleep(2 * DISCONNECT_GRACE)
        await world.engines[0].answer(world.engines[0].call().call_id, ["embed"])

        assert ends == [None]
        assert world.client.supported_tasks == ["embed"]


async def test_when_the_last_engine_dies_so_does_the_request() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        ends = await learn_in(world, nursery)
        await world.engine.send_sentinel()

        assert [type(end) for end in ends] == [EngineDeadError]
        world.assert_tidy()


async def test_a_closed_client_asks_nobody() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        ends = await learn_in(world, nursery)
        world.client.close()
        await wait_all_tasks_blocked()

        assert [type(end) for end in ends] == [ClientClosedError]
        with pytest.raises(ClientClosedError):
            async with world.client.call(make_pooling_request()):
                raise AssertionError("it was sent")


@pytest.mark.parametrize(
    ("answer", "error"),
    [(Failure("no"), UtilityCallFailedError), ({"a": 1}, UtilityResultError)],
)
async def test_engines_that_do_not_say_are_asked_again(
    answer: object, error: type[Exception]
) -> None:
    answers = {"get_supported_tasks": answer}
    async with scripted_engines(answers) as (client, engines):
        for _ in range(2):
            with pytest.raises(error):
                await client.driver.learn_supported_tasks()
        answers["get_supported_tasks"] = ["embed"]
        await client.driver.learn_supported_tasks()

        assert engines.calls == {0: ASKED * 3}


async def test_cancelled_anywhere_it_leaves_nothing_behind() -> None:
    async with open_pair(2, supported_tasks=("embed",)) as (world, mocks):

        async def pool() -> None:
            async with world.client.call(make_pooling_request()) as outputs:
                assert len([output async for output in outputs]) == 1

        number = 1
        while await was_cancelled_at(number, pool):
            await wait_all_tasks_blocked()
            world.assert_tidy()
            assert not any(mock.has_unfinished for mock in mocks)
            core = world.client.driver.core
            core.facts.learn(supported_tasks=None)
            number += 1
        assert number > 2


async def test_it_always_checkpoints() -> None:
    async with open_pair() as (world, _):
        for _ in range(2):
            with assert_checkpoints():
                await world.client.driver.learn_supported_tasks()


# As a client opens -------------------------------------------------------------------------------


async def test_a_new_client_does_not_wait_long_for_that(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves what it is asked for."""
    source = hand_driven()
    async with open_client(source, learning_timeout=3) as client:
        assert trio.current_time() == 3
        assert "what the engines support is not known" in caplog.text
        assert client.supported_tasks is None
        client.driver.submit(make_request(), OutputStream("r"))
        assert [request.request_id for request in source.engines[0].requests()] == ["r"]


async def test_a_new_client_may_find_its_engine_dead(autojump_clock: MockClock) -> None:
    """Whoever has a request hears of it."""
    source = hand_driven()
    source.engines[0].vanish()
    async with open_client(source) as client:
        with pytest.raises(EngineDeadError):
            client.driver.submit(make_request(), OutputStream("r"))
