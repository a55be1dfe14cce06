"""What the model can do is asked for at first, and kept to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.cancelling import was_cancelled_at
from tests.client.pair import open_pair
from tests.client.scripted import Failure, scripted_engines
from tests.client.world import World, make_request, open_world
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_vllm.client import (
    EngineCoreClient,
    HandshakeOwner,
    OutputStream,
    client as _opening,
    open_client,
)
from trio_vllm.client.engines import LOSS_GRACE
from trio_vllm.errors import (
    ClientClosedError,
    DecodeError,
    EngineDeadError,
    UnsupportedFieldError,
    UtilityCallFailedError,
    UtilityResultError,
    UtilityTimeoutError,
)
from trio_vllm.protocol import EngineCoreRequest, PoolingParams
from trio_vllm.transport import EngineChannels

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
            client.submit(make_request(), OutputStream("r"))

        assert engines.calls == {0: ASKED}


async def test_generation_asks_nothing() -> None:
    async with scripted_engines({}) as (client, engines):
        async with client.call(make_request()):
            pass

        assert engines.calls == {0: []}


async def test_other_limits_stay() -> None:
    options = {"vocab_size": 10}
    async with open_pair(supported_tasks=("embed",), client_options=options) as (world, _):
        before = world.client._limits
        await world.client.learn_supported_tasks()

        assert 10 == before.vocab_size == world.client._limits.vocab_size
        assert before.max_model_len == world.client._limits.max_model_len
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
            await world.client.learn_supported_tasks()
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
                await world.client.learn_supported_tasks(timeout=5)

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
        assert "get_supported_tasks" == asked.method == again.method
        await world.engine.answer(asked.call_id, ["classify"])  # late, for nobody
        assert ends == []
        await world.engine.answer(again.call_id, ["embed"])

        assert ends == [None]
        assert world.client._limits.supported_tasks == ["embed"]
        world.assert_tidy()


async def test_an_engine_that_dies_meanwhile_is_not_needed() -> None:
    async with open_world(2) as world, trio.open_nursery() as nursery:
        ends = await learn_in(world, nursery)
        await world.engines[0].answer(world.engines[0].call().call_id, ["embed"])
        await world.engines[1].die()
        await trio.sleep(2 * LOSS_GRACE)
        await world.engines[0].answer(world.engines[0].call().call_id, ["embed"])

        assert ends == [None]
        assert world.client._limits.supported_tasks == ["embed"]


async def test_when_the_last_engine_dies_so_does_the_request() -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        ends = await learn_in(world, nursery)
        await world.engine.say_farewell()

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
                await client.learn_supported_tasks()
        answers["get_supported_tasks"] = ["embed"]
        await client.learn_supported_tasks()

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
            world.client._limits = world.client.fleet.limits(vocab_size=None)
            number += 1
        assert number > 2


async def test_it_always_checkpoints() -> None:
    async with open_pair() as (world, _):
        for _ in range(2):
            with assert_checkpoints():
                await world.client.learn_supported_tasks()


# As a client opens -------------------------------------------------------------------------------


@asynccontextmanager
async def opened_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineCoreClient]:
    """`open_client`, with the connections of a world whose own client is closed."""

    @asynccontextmanager
    async def open_frontend(_mode: object) -> AsyncIterator[EngineChannels]:
        yield world.client._links

    monkeypatch.setattr(_opening, "open_frontend", open_frontend)
    world.client.close()
    async with open_client(HandshakeOwner(handshake_address="tcp://127.0.0.1:1")) as client:
        yield client


async def test_a_new_client_does_not_wait_long_for_that(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves what it is asked for."""
    async with open_world() as world, opened_over(world, monkeypatch) as client:
        assert trio.current_time() == _opening.LEARNING_TIMEOUT
        assert "what the engines support is not known" in caplog.text
        client.submit(make_request(), OutputStream("r"))
        assert [request.request_id for request in world.engine.requests()] == ["r"]


async def test_a_new_client_may_find_that_no_engine_can_be_relied_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_world(2) as world, trio.open_nursery() as nursery:
        engine = world.engines[0]
        for _ in range(2):  # the world's own client may take one
            nursery.start_soon(engine.say, b"what nobody can read, nor tell who says it")
        async with opened_over(world, monkeypatch) as client:
            with pytest.raises(DecodeError):
                client.submit(make_request(), OutputStream("r"))


async def test_a_new_client_may_find_its_engine_dead(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Whoever has a request hears of it."""
    async with open_world() as world:
        world.engine.vanish()
        async with opened_over(world, monkeypatch) as client:
            with pytest.raises(EngineDeadError):
                client.submit(make_request(), OutputStream("r"))
