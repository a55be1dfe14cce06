"""Single connections that are reset or frozen: each is told, on either side."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.proxy import Proxy, open_proxy
from tests.ready import ready_response
from tests.transport.peers import LIMIT
from tests.transport.startup import RawEngine, RawFrontend, beside

from trio_vllm.errors import StartupError
from trio_vllm.protocol import EngineAddresses, encode_init, encode_ready_response
from trio_vllm.transport import (
    Bootstrapped,
    Disconnect,
    EngineChannels,
    FollowerChannels,
    FrontendDisconnect,
    HandshakeOwner,
    join_frontend,
)
from trio_vllm.transport.zmq_context import SocketType, ZmqContext
from trio_vllm.transport.zmq_socket import ZmqSocket

TOLD_WITHIN = 2.0


@attrs.define
class Rig:
    """A frontend, and an engine that is connected to it through proxies."""

    channels: EngineChannels
    engine: RawEngine
    input: Proxy
    output: Proxy


@asynccontextmanager
async def connected(
    context: ZmqContext, folder: Path, heartbeat_timeout: float = math.inf
) -> AsyncIterator[Rig]:
    handshake = f"ipc://{folder}/handshake"
    engine = RawEngine(context, handshake)
    proxies: list[Proxy] = []

    async with trio.open_nursery() as nursery:

        async def hold(target: str, task_status: trio.TaskStatus[Proxy]) -> None:
            async with open_proxy(target) as proxy:
                task_status.started(proxy)
                await trio.sleep_forever()

        async def start() -> None:
            addresses = await engine.say_hello()
            targets = (*addresses.inputs, *addresses.outputs)
            proxies.extend([await nursery.start(hold, target) for target in targets])
            engine.register(
                attrs.evolve(addresses, inputs=[proxies[0].address], outputs=[proxies[1].address])
            )
            engine.say_ready()

        mode = HandshakeOwner(handshake_address=handshake, heartbeat_timeout=heartbeat_timeout)
        async with beside(start), mode.connect() as channels:
            yield Rig(channels, engine, *proxies)
        nursery.cancel_scope.cancel()


async def output_connection(rig: Rig) -> int | None:
    rig.engine.output.send_nowait([b"output"])
    ((frames, connection),) = await rig.channels.outputs.receive_batch(5)
    assert frames == [b"output"]
    return connection


async def test_reset_output_connection(context: ZmqContext, tmp_path: Path) -> None:
    """ØMQ connects again, but what was under way is lost; so the break is told."""
    with trio.fail_after(LIMIT):
        async with connected(context, tmp_path) as rig:
            connection = await output_connection(rig)
            begin = trio.current_time()

            await rig.output.connections[0].reset()

            assert await rig.channels.disconnects.receive() == Disconnect(connection=connection)
            assert trio.current_time() - begin < TOLD_WITHIN
            assert await output_connection(rig) != connection


async def test_reset_input_connection(context: ZmqContext, tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with connected(context, tmp_path) as rig:
            begin = trio.current_time()

            await rig.input.connections[0].reset()

            assert await rig.channels.disconnects.receive() == Disconnect(engine_index=0)
            assert trio.current_time() - begin < TOLD_WITHIN


@pytest.mark.parametrize("side", ["input", "output"])
async def test_frozen_connection_with_heartbeats(
    context: ZmqContext, tmp_path: Path, side: str
) -> None:
    """Either is heard of by itself; the other one stands."""
    with trio.fail_after(LIMIT):
        async with connected(context, tmp_path, heartbeat_timeout=0.6) as rig:
            connection = await output_connection(rig)
            expected = Disconnect(engine_index=0)
            if side == "output":
                expected = Disconnect(connection=connection)

            getattr(rig, side).connections[0].freeze()

            assert await rig.channels.disconnects.receive() == expected


async def test_frozen_connection_without_heartbeats(context: ZmqContext, tmp_path: Path) -> None:
    """Nothing is told, and what was under way arrives when it is thawed."""
    with trio.fail_after(LIMIT):
        async with connected(context, tmp_path) as rig:
            connection = await output_connection(rig)
            rig.output.connections[0].freeze()
            rig.engine.output.send_nowait([b"late"])
            with trio.move_on_after(0.5):
                raise AssertionError(await rig.channels.outputs.receive_batch(5))

            rig.output.connections[0].thaw()

            assert await rig.channels.outputs.receive_batch(5) == [([b"late"], connection)]


@asynccontextmanager
async def frontend_behind_proxies(
    context: ZmqContext, folder: Path
) -> AsyncIterator[tuple[RawFrontend, dict[str, ZmqSocket], dict[str, Proxy]]]:
    """A frontend with a coordinator; its sockets, and the proxies that lead there, by name."""
    frontend = RawFrontend.bind(context, folder)
    kinds = {
        "input": SocketType.ROUTER,
        "output": SocketType.PULL,
        "broadcasts": SocketType.XPUB,
        "notices": SocketType.PULL,
    }
    sockets = {name: context.socket(kind) for name, kind in kinds.items()}
    async with AsyncExitStack() as stack:
        proxies: dict[str, Proxy] = {}
        for name, socket in sockets.items():
            address = socket.bind("tcp://127.0.0.1:0")
            proxies[name] = await stack.enter_async_context(open_proxy(address))
        yield frontend, sockets, proxies


async def let_in(
    frontend: RawFrontend, sockets: dict[str, ZmqSocket], proxies: dict[str, Proxy], cuts: int = 0
) -> None:
    """Start an engine; its connection for broadcasts breaks so many times before the gate opens."""
    identity, _ = await frontend.handshake.receive()
    init = frontend.init(
        inputs=[proxies["input"].address],
        outputs=[proxies["output"].address],
        coordinator_input=proxies["broadcasts"].address,
        coordinator_output=proxies["notices"].address,
    )
    frontend.handshake.send_nowait([identity, *encode_init(init)])
    for _ in range(cuts):
        assert await sockets["broadcasts"].receive() == [b"\x01"]
        await proxies["broadcasts"].connections[-1].reset()
        assert await sockets["broadcasts"].receive() == [b"\x00"]
    assert await sockets["broadcasts"].receive() == [b"\x01"]
    sockets["broadcasts"].send_nowait([b"READY"])


@pytest.mark.parametrize("side", ["input", "output", "broadcasts", "notices"])
@pytest.mark.parametrize("freezes", [False, True])
async def test_engine_is_told_of_its_clients_connections(
    context: ZmqContext, tmp_path: Path, side: str, freezes: bool
) -> None:
    """The break of any, those to the coordinator too; frozen ones are found by heartbeats."""
    with trio.fail_after(LIMIT):
        async with (
            frontend_behind_proxies(context, tmp_path) as (frontend, sockets, proxies),
            beside(partial(let_in, frontend, sockets, proxies)),
            join_frontend(
                frontend.handshake.address,
                engine_index=0,
                ready_response=lambda _: ready_response(0),
                heartbeat_timeout=2.0,
            ) as channels,
        ):
            assert channels.coordinator is not None
            for name, sender in (
                ("output", channels.outputs[0]),
                ("notices", channels.coordinator.notices),
            ):
                sender.send_nowait([b"output"])
                assert await sockets[name].receive() == [b"output"]
            (connection,) = proxies[side].connections
            if freezes:
                connection.freeze()
            else:
                await connection.reset()
            lost = await channels.disconnects.receive()

    client_index = 0 if side in {"input", "output"} else None
    assert lost == FrontendDisconnect(proxies[side].address, client_index)


async def test_broadcasts_that_break_before_the_gate_opens(
    context: ZmqContext, tmp_path: Path
) -> None:
    """ØMQ connects again, and so the engine hears when it does."""
    with trio.fail_after(LIMIT):
        async with (
            frontend_behind_proxies(context, tmp_path) as (frontend, sockets, proxies),
            beside(partial(let_in, frontend, sockets, proxies, cuts=2)),
            join_frontend(
                frontend.handshake.address,
                engine_index=0,
                ready_response=lambda _: ready_response(0),
            ),
        ):
            assert len(proxies["broadcasts"].connections) == 3


def bootstrapped(folder: Path, coordinator: str, **options: Any) -> Bootstrapped:
    """Follows a coordinator that listens, or will, at this address."""
    return Bootstrapped(
        input_address=f"ipc://{folder}/in",
        output_address=f"ipc://{folder}/out",
        coordinator_address=coordinator,
        **options,
    )


async def register_in_lockstep(context: ZmqContext, mode: Bootstrapped) -> None:
    await trio.lowlevel.checkpoint()
    engine = RawEngine(context, "ipc:///nowhere")
    addresses = EngineAddresses(inputs=[mode.input_address], outputs=[mode.output_address])
    response = attrs.evolve(ready_response(0), data_parallel_size=2)
    engine.register(addresses, *map(bytes, encode_ready_response(response)))


@pytest.mark.parametrize("how", ["reset", "freeze"])
async def test_follower_is_told_of_its_coordinators_connection(
    context: ZmqContext, tmp_path: Path, how: str
) -> None:
    """That it broke, and that it is back."""
    publisher = context.socket(SocketType.XPUB)
    with trio.fail_after(LIMIT):
        async with open_proxy(publisher.bind("tcp://127.0.0.1:0")) as proxy:
            mode = bootstrapped(tmp_path, proxy.address, heartbeat_timeout=0.6)
            async with (
                beside(partial(register_in_lockstep, context, mode)),
                mode.connect() as channels,
            ):
                assert isinstance(channels.coordination, FollowerChannels)
                link = channels.coordination.link
                assert link is not None
                assert await publisher.receive() == [b"\x01"]
                begin = trio.current_time()
                if how == "freeze":
                    proxy.connections[0].freeze()
                else:
                    await proxy.connections[0].reset()

                assert [await link.wait_change(), await link.wait_change()] == [False, True]
                assert trio.current_time() - begin < TOLD_WITHIN

                async def publish() -> None:
                    while await publisher.receive() != [b"\x01"]:
                        pass
                    publisher.send_nowait([b"published"])

                async with beside(publish):  # ØMQ subscribes again when there is a receiver
                    batch = await channels.coordination.publications.receive_batch(5)
                    assert [frames for frames, _ in batch] == [[b"published"]]


async def test_coordinator_that_does_not_listen(context: ZmqContext, tmp_path: Path) -> None:
    mode = bootstrapped(tmp_path, f"ipc://{tmp_path}/nobody", ready_timeout=0.5)
    with trio.fail_after(LIMIT):
        async with beside(partial(register_in_lockstep, context, mode)):
            with pytest.raises(StartupError) as caught:
                async with mode.connect():
                    raise AssertionError("it did not fail")

    assert caught.value.phase == "the connection to the coordinator"
    assert f"nobody listens at ipc://{tmp_path}/nobody" in str(caught.value)
