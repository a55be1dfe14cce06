"""Our client and mock engines whose single connections are reset or freeze, while one or the other waits.

Each connection of engine 0 goes through a proxy of its own. Engine 1 has none, and serves on.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.proxy import Proxy, open_proxy
from tests.wire.test_losses import LOSS_LIMIT

from trio_vllm.client import EngineCoreClient, open_client
from trio_vllm.errors import EngineDeadError, InvalidDataParallelRankError
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines
from trio_vllm.protocol import EngineAddresses, EngineCoreRequest, HandshakeInit, SamplingParams
from trio_vllm.transport import HandshakeOwner
from trio_vllm.transport.engine import _Joining

HEARTBEAT = 0.6


@attrs.define
class Rig:
    """A client, and the proxies of engine 0 by the names of its addresses."""

    client: EngineCoreClient
    proxies: dict[str, Proxy]

    async def break_connection(self, name: str, how: str) -> None:
        (connection,) = self.proxies[name].connections
        if how == "freeze":
            connection.freeze()
        else:
            await connection.reset()


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery) -> dict[str, Proxy]:
    """Lets engine 0 connect through proxies, which are here by name once it has its addresses."""
    proxies: dict[str, Proxy] = {}
    receive_init = _Joining.receive_init

    async def hold(name: str, target: str, task_status: trio.TaskStatus[str]) -> None:
        async with open_proxy(target) as proxy:
            proxies[name] = proxy
            task_status.started(proxy.address)
            await trio.sleep_forever()

    async def receive_changed_init(joining: _Joining) -> HandshakeInit:
        init = await receive_init(joining)
        if joining._engine_id.engine_index or proxies:
            return init
        told = init.addresses
        changed: dict[str, Any] = {
            "inputs": [await nursery.start(hold, "input", told.inputs[0])],
            "outputs": [await nursery.start(hold, "output", told.outputs[0])],
        }
        if told.coordinator_input is not None:
            changed |= {
                name: await nursery.start(hold, name, getattr(told, name))
                for name in ("coordinator_input", "coordinator_output")
            }
        return attrs.evolve(init, addresses=attrs.evolve(told, **changed))

    monkeypatch.setattr(_Joining, "receive_init", receive_changed_init)
    return proxies


@asynccontextmanager
async def connected(
    folder: Path,
    proxies: dict[str, Proxy],
    *,
    how: str,
    lockstep: bool = False,
    engine_heartbeats: float = math.inf,
) -> AsyncIterator[Rig]:
    address = f"ipc://{folder}/handshake"
    mode = HandshakeOwner(
        handshake_address=address,
        engine_count=2,
        coordinator=lockstep,
        heartbeat_timeout=HEARTBEAT if how == "freeze" else math.inf,
    )
    config = MockEngineConfig(lockstep=lockstep, step_interval=0.01)
    options = ServeOptions(
        handshake_address=address, engine_count=2, heartbeat_timeout=engine_heartbeats
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_mock_engines, config, options)
            async with open_client(mode) as client:
                yield Rig(client, proxies)
            nursery.cancel_scope.cancel()


def request(request_id: str, max_tokens: int, rank: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        data_parallel_rank=rank,
    )


async def read(client: EngineCoreClient, asked: EngineCoreRequest) -> int:
    """How many tokens a whole completion has."""
    async with client.call(asked) as outputs:
        return sum([len(item.output.new_token_ids) async for item in outputs])


@pytest.mark.parametrize("how", ["reset", "freeze"])
@pytest.mark.parametrize("name", ["input", "output"])
async def test_in_mid_stream(
    tmp_path: Path, proxies: dict[str, Proxy], name: str, how: str
) -> None:
    """The request fails with its engine, in seconds, and not with fewer tokens; the other serves."""
    async with connected(tmp_path, proxies, how=how) as rig:
        async with rig.client.call(request("doomed", 500, 0)) as outputs:
            await anext(outputs)
            begin = trio.current_time()
            await rig.break_connection(name, how)
            with pytest.raises(EngineDeadError) as caught:
                async for _ in outputs:
                    pass

        assert caught.value.engine_index == 0
        assert trio.current_time() - begin < LOSS_LIMIT
        assert rig.client.engine_indices == [1]
        assert await read(rig.client, request("safe", 3, 1)) == 3


@pytest.mark.parametrize("how", ["reset", "freeze"])
@pytest.mark.parametrize("name", ["input", "output"])
async def test_during_the_startup(
    tmp_path: Path,
    proxies: dict[str, Proxy],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: str,
) -> None:
    """Before READY. The engine notices as well, and starts again; or it is lost soon after."""
    send_ready, broken = _Joining.wait_coordinator_ready, list[str]()

    async def break_and_go_on(joining: _Joining, addresses: EngineAddresses) -> Any:
        if not joining._engine_id.engine_index and not broken:
            broken.append(name)
            while not proxies[name].connections:  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.01)
            (connection,) = proxies[name].connections
            if how == "freeze":
                connection.freeze()
            else:
                await connection.reset()
        return await send_ready(joining, addresses)

    monkeypatch.setattr(_Joining, "wait_coordinator_ready", break_and_go_on)
    async with connected(tmp_path, proxies, how=how, engine_heartbeats=HEARTBEAT) as rig:
        begin = trio.current_time()
        with suppress(EngineDeadError, InvalidDataParallelRankError):
            assert await read(rig.client, request("maybe", 3, 0)) == 3
        assert trio.current_time() - begin < LOSS_LIMIT
        assert await read(rig.client, request("safe", 3, 1)) == 3
    assert broken == [name]


@pytest.mark.parametrize("how", ["reset", "freeze"])
@pytest.mark.parametrize("name", ["input", "output"])
async def test_of_an_idle_engine(
    tmp_path: Path, proxies: dict[str, Proxy], name: str, how: str
) -> None:
    """It is known before the next request, which goes to the other one."""
    async with connected(tmp_path, proxies, how=how) as rig:
        assert await read(rig.client, request("before", 3, 0)) == 3
        await rig.break_connection(name, how)
        with trio.fail_after(LOSS_LIMIT):
            while list(rig.client.dead_engines) != [0]:  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.01)

        assert await read(rig.client, request("safe", 3, 1)) == 3


@pytest.mark.parametrize("name", ["input", "output"])
async def test_under_a_utility_call(tmp_path: Path, proxies: dict[str, Proxy], name: str) -> None:
    """The call waits for an answer that cannot come; it fails with the engine."""
    async with connected(tmp_path, proxies, how="freeze") as rig:
        assert await read(rig.client, request("before", 3, 0)) == 3
        await rig.break_connection(name, "freeze")
        with trio.fail_after(LOSS_LIMIT), pytest.raises(Exception, match="engine 0") as caught:
            await rig.client.call_utility("is_sleeping")

    assert isinstance(caught.value.__cause__, EngineDeadError)


@pytest.mark.parametrize("how", ["reset", "freeze"])
@pytest.mark.parametrize("name", ["coordinator_input", "coordinator_output"])
async def test_of_the_coordinator(
    tmp_path: Path, proxies: dict[str, Proxy], name: str, how: str
) -> None:
    """Engines in lockstep are lost together: what the one missed, all wait for."""
    async with connected(tmp_path, proxies, how=how, lockstep=True) as rig:
        assert await read(rig.client, request("before", 3, 0)) == 3
        async with rig.client.call(request("doomed", 2000, 1)) as outputs:
            await anext(outputs)
            begin = trio.current_time()
            await rig.break_connection(name, how)
            with pytest.raises(EngineDeadError):
                async for _ in outputs:
                    pass

        assert trio.current_time() - begin < LOSS_LIMIT
        assert not rig.client.is_healthy


def test_each_address_of_an_engine_is_known_here() -> None:
    """Whoever gives engines one more connection has to break it here too."""
    names = {attribute.name for attribute in attrs.fields(EngineAddresses)}
    assert names == {
        "inputs",
        "outputs",
        "coordinator_input",
        "coordinator_output",
        "frontend_stats_publish_address",
    }
