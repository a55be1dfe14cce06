"""Joining a frontend over real connections, and all that may come in between."""

from __future__ import annotations

import math
import socket as stdlib_socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
import trio
from tests.ready import ready_response
from tests.transport.peers import LIMIT, receive_frames
from tests.transport.startup import (
    TICK,
    RawFrontend,
    cancel_everywhere,
    listening_socket,
)
from trio.testing import MockClock

from trio_vllm.errors import ConfigurationError, StartupError
from trio_vllm.protocol import (
    EngineId,
    HandshakeInit,
    HandshakeStatus,
    decode_ready_response,
    decode_report,
    encode_init,
)
from trio_vllm.spawn import free_port
from trio_vllm.transport import (
    EngineLingers,
    FrontendChannels,
    FrontendDisconnect,
    join_frontend,
)
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context
from trio_vllm.transport.zmq_monitor import set_linger
from trio_vllm.transport.zmq_socket import ZmqSocket

Script = Callable[[RawFrontend], Awaitable[object]]

LONG_TICK = 3 * TICK
"""For where ØMQ connects again and again, so that the `patient_clock` would never see an end."""


@pytest.fixture
def frontend(context: ZmqContext, tmp_path: Path) -> RawFrontend:
    return RawFrontend.bind(context, tmp_path)


@pytest.fixture
def two_clients(context: ZmqContext, tmp_path: Path) -> RawFrontend:
    return RawFrontend.bind(context, tmp_path, clients=2)


async def take_hello(frontend: RawFrontend) -> bytes:
    identity, payload = await frontend.handshake.receive()
    assert decode_report([payload]).status is HandshakeStatus.HELLO
    return bytes(identity)


async def answer(frontend: RawFrontend, *payload: bytes, **addresses: Any) -> None:
    """Take HELLO and send INIT, or something else in its place."""
    identity = await take_hello(frontend)
    payload = payload or tuple(encode_init(frontend.init(**addresses)))
    frontend.handshake.send_nowait([identity, *payload])


async def take_ready(frontend: RawFrontend) -> None:
    identity, payload = await frontend.handshake.receive()
    report = decode_report([payload])
    assert (report.status, report.local, report.headless) == (HandshakeStatus.READY, False, True)
    assert identity == EngineId.of(3)


def joining(address: str, timeout: float = math.inf, **options: Any) -> Any:
    return join_frontend(
        address,
        engine_index=3,
        ready_response=lambda _: ready_response(3),
        timeout=timeout,
        **options,
    )


async def fail(frontend: RawFrontend, script: Script, timeout: float = math.inf) -> StartupError:
    """Join a frontend that does as ``script`` says, in vain."""
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(script, frontend)
            with pytest.raises(StartupError) as caught:
                async with joining(frontend.handshake.address, timeout):
                    raise AssertionError("it did not fail")
            nursery.cancel_scope.cancel()
    return caught.value


async def check_links(links: FrontendChannels, frontend: RawFrontend) -> None:
    """Each client's request arrives, and each gets its own outputs."""
    for client, (requests, outputs) in enumerate(
        zip(frontend.inputs, frontend.outputs, strict=True)
    ):
        identity, payload = await requests.receive()
        assert (EngineId.of(3), ready_response(3)) == (identity, decode_ready_response([payload]))
        requests.send_nowait([identity, b"\x00", b"request %d" % client])
        links.outputs[client].send_nowait([b"output %d" % client, b"aux"])

        assert await receive_frames(links.inputs[client]) == [[b"\x00", b"request %d" % client]]
        assert await outputs.receive() == [b"output %d" % client, b"aux"]


# As it should be --------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2])
async def test_join(context: ZmqContext, tmp_path: Path, clients: int) -> None:
    frontend = RawFrontend.bind(context, tmp_path, clients)
    told: list[HandshakeInit] = []

    def describe(init: HandshakeInit) -> Any:
        told.append(init)
        return ready_response(3)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, frontend)
            async with join_frontend(
                frontend.handshake.address, engine_index=3, ready_response=describe
            ) as links:
                await take_ready(frontend)
                await check_links(links, frontend)

                assert links.coordinator is None
                assert told == [frontend.init()]
                for number, socket in enumerate(frontend.inputs):
                    socket.close()
                    lost = await links.disconnects.receive()
                    assert lost == FrontendDisconnect(socket.address, number)
                for number, socket in enumerate(frontend.outputs):
                    socket.close()
                    lost = await links.disconnects.receive()
                    assert lost == FrontendDisconnect(socket.address, number)


async def test_frontend_comes_later(tmp_path: Path, context: ZmqContext) -> None:
    async def come_late() -> None:
        await trio.testing.wait_all_tasks_blocked()
        await answer(RawFrontend.bind(context, tmp_path))

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_late)
            async with joining(f"ipc://{tmp_path}/handshake"):
                pass


async def test_gate(frontend: RawFrontend, context: ZmqContext, tmp_path: Path) -> None:
    """READY is said when the coordinator allows it, and not a moment sooner."""
    broadcasts = context.socket(SocketType.XPUB)
    notices = context.socket(SocketType.PULL)
    addresses = {
        "coordinator_input": broadcasts.bind(f"ipc://{tmp_path}/broadcasts"),
        "coordinator_output": notices.bind(f"ipc://{tmp_path}/notices"),
    }

    async def coordinate() -> None:
        await answer(frontend, **addresses)
        assert await broadcasts.receive() == [b"\x01"]
        broadcasts.send_nowait([b"\x02", b"\x92\x00\xc0"])
        with trio.move_on_after(0.1):
            await take_ready(frontend)
            raise AssertionError("it did not wait")
        broadcasts.send_nowait([b"READY"])
        broadcasts.send_nowait([b"\x02", b"\x92\x01\xc0"])
        await take_ready(frontend)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinate)
            async with joining(frontend.handshake.address) as links:
                assert await receive_frames(links.coordinator.broadcasts) == [
                    [b"\x02", b"\x92\x01\xc0"]
                ]
                links.coordinator.notices.send_nowait([b"notice"])
                assert await notices.receive() == [b"notice"]
                for socket in (broadcasts, notices):
                    socket.close()
                    lost = await links.disconnects.receive()
                    assert lost == FrontendDisconnect(socket.address, None)


# Nobody there, or somebody else -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
async def test_nobody_listens(tmp_path: Path, kind: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"ipc://{tmp_path}/nobody"
    with pytest.raises(StartupError) as caught:
        async with joining(address, TICK):
            raise AssertionError("it did not fail")

    assert caught.value.notes == [f"nobody listens at {address}"]
    assert str(caught.value) == (
        f"startup failed while waiting for INIT from the frontend at {address} (gave up after"
        f" 0.3 s); nobody listens at {address}"
    )


async def test_silent_listener(patient_clock: MockClock) -> None:
    with listening_socket(stdlib_socket.AF_INET, ("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StartupError) as caught:
            async with joining(address, TICK):
                raise AssertionError("it did not fail")

    assert caught.value.notes == [f"{address} is open, but says nothing"]


@pytest.mark.parametrize("response", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_other_service(response: bytes) -> None:
    """It is tried until the time is over: the right one may still take the place."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(response)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        address = f"tcp://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        with pytest.raises(StartupError) as caught:
            async with joining(address, LONG_TICK):
                raise AssertionError("it did not fail")
        nursery.cancel_scope.cancel()

    (note,) = caught.value.notes
    assert note.startswith(f"who listens at {address} has not answered in ZeroMQ's protocol")
    assert caught.value.seconds == LONG_TICK


async def test_frontend_that_does_not_answer(
    frontend: RawFrontend, patient_clock: MockClock
) -> None:
    error = await fail(frontend, take_hello, TICK)

    assert (TICK, f"INIT from the frontend at {frontend.handshake.address}") == (
        error.seconds,
        error.phase,
    )
    assert error.notes == [f"{frontend.handshake.address} is connected"]


async def test_second_engine_with_the_same_index(
    frontend: RawFrontend, patient_clock: MockClock
) -> None:
    """The frontend cannot hear it."""
    first = frontend.context.socket(SocketType.DEALER, identity=EngineId.of(3))
    first.connect(frontend.handshake.address)
    first.send_nowait([b"HELLO"])
    await frontend.handshake.receive()

    error = await fail(frontend, answer, TICK)

    assert error.notes == [f"{frontend.handshake.address} is connected"]


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0", "http://127.0.0.1:80"])
async def test_unusable_handshake_address(address: str) -> None:
    with pytest.raises(ConfigurationError, match="address"):
        async with joining(address):
            raise AssertionError("it did not fail")


@pytest.mark.parametrize("engine_index", [-1, 65536])
async def test_impossible_index(engine_index: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two bytes"):
        async with join_frontend(
            f"ipc://{tmp_path}/x",
            engine_index=engine_index,
            ready_response=lambda _: ready_response(),
        ):
            raise AssertionError("it did not fail")


# INIT that cannot be used -----------------------------------------------------------------------


def init(**changes: Any) -> bytes:
    addresses = {"inputs": ["ipc:///tmp/i"], "outputs": ["ipc:///tmp/o"], **changes}
    return ormsgpack.packb({"addresses": addresses, "parallel_config": {}})


@pytest.mark.parametrize(
    ("payload", "note"),
    [
        ([b"\xc1"], "cannot decode"),
        ([b""], "cannot decode"),
        ([b"\x80"], "must have the key 'addresses'"),
        ([init(), b""], "it has 2 frames"),
        ([init(inputs=[], outputs=[])], "it has 0 input and 0 output addresses"),
        ([init(outputs=["ipc:///tmp/o"] * 2)], "it has 1 input and 2 output addresses"),
        ([init(coordinator_input="ipc:///tmp/c")], "it has one coordinator address only"),
        ([init(coordinator_output="ipc:///tmp/c")], "it has one coordinator address only"),
        ([init(inputs=["nowhere"])], "address 'nowhere' is not"),
        ([init(outputs=["tcp://[::1:5"])], "address 'tcp://[::1:5' has"),
        (
            [init(coordinator_input="x", coordinator_output="ipc:///tmp/c")],
            "address 'x' is not",
        ),
    ],
    ids=str,
)
async def test_unusable_init(frontend: RawFrontend, payload: list[bytes], note: str) -> None:
    error = await fail(frontend, lambda frontend: answer(frontend, *payload))

    (noted,) = error.notes
    assert note in noted
    assert error.seconds == 0


# Frontend that leaves ---------------------------------------------------------------------------


async def test_frontend_leaves_before_init(frontend: RawFrontend) -> None:
    async def leave(frontend: RawFrontend) -> None:
        await take_hello(frontend)
        frontend.close()

    error = await fail(frontend, leave)

    assert error.notes == [f"{frontend.handshake.address} closed the connection"]
    assert error.seconds == 0


async def test_frontend_leaves_in_the_gate(frontend: RawFrontend, tmp_path: Path) -> None:
    async def leave(frontend: RawFrontend) -> None:
        address = f"ipc://{tmp_path}/nobody"
        await answer(frontend, coordinator_input=address, coordinator_output=address)
        await frontend.inputs[0].receive()
        frontend.close()

    error = await fail(frontend, leave)

    assert error.phase == f"READY from the coordinator at ipc://{tmp_path}/nobody"
    assert error.notes == [f"{frontend.handshake.address} closed the connection"]


async def test_gate_that_does_not_open(
    frontend: RawFrontend, tmp_path: Path, patient_clock: MockClock
) -> None:
    address = f"ipc://{tmp_path}/nobody"
    error = await fail(
        frontend,
        lambda frontend: answer(frontend, coordinator_input=address, coordinator_output=address),
        TICK,
    )

    assert (f"READY from the coordinator at {address}", TICK) == (error.phase, error.seconds)


async def test_input_socket_that_is_not_there(frontend: RawFrontend, tmp_path: Path) -> None:
    """READY is said all the same, as by upstream's engines."""
    nobody = f"ipc://{tmp_path}/nobody"

    async def mislead(frontend: RawFrontend) -> None:
        await answer(frontend, inputs=[nobody])
        await take_ready(frontend)

    error = await fail(frontend, mislead, LONG_TICK)

    assert error.phase == "the connection to the frontend's input socket"
    assert error.notes == [f"nobody listens at {nobody}"]


async def test_frontend_is_replaced_before_its_input_socket_is_there(
    context: ZmqContext, tmp_path: Path
) -> None:
    """Nobody will ever listen there, so we must not wait for it, whatever the timeout is."""

    async def be_replaced(first: RawFrontend) -> None:
        await answer(first, inputs=[f"ipc://{tmp_path}/nobody"])
        await take_ready(first)
        address = first.handshake.address
        first.handshake.close()
        context.socket(SocketType.ROUTER).bind(address)

    frontend = RawFrontend.bind(context, tmp_path)
    address = frontend.handshake.address
    error = await fail(frontend, be_replaced)

    assert error.phase == "the connection to the frontend's input socket"
    assert error.notes == [f"{address} is connected again"]


# Leaving ----------------------------------------------------------------------------------------


async def test_cancelling_leaves_nothing_behind(tmp_path: Path) -> None:
    """At every step of joining, and of the block after it."""

    async def run() -> None:
        async with open_context() as context:
            frontend = RawFrontend.bind(context, tmp_path)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, frontend)
                async with joining(frontend.handshake.address) as links:
                    await frontend.inputs[0].receive()
                    frontend.close()
                    await links.disconnects.receive()

    assert await cancel_everywhere(run) > 5


async def test_waiting_for_a_frontend_is_left_at_once(tmp_path: Path) -> None:
    begin = trio.current_time()
    with trio.move_on_after(0.1):
        async with joining(f"ipc://{tmp_path}/nobody", lingers=EngineLingers(ready=LIMIT)):
            raise AssertionError("it did not fail")

    assert trio.current_time() - begin < LIMIT / 2


async def leave_with_outputs(frontend: RawFrontend, *, client_lives: bool, **options: Any) -> float:
    """Send many outputs and leave; gives the seconds that took."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, frontend)
        async with joining(frontend.handshake.address, **options) as links:
            if not client_lives:
                frontend.inputs[0].close()
                frontend.outputs[0].close()
                await links.disconnects.receive()
            for number in range(1000):
                links.outputs[0].send_nowait([b"%d" % number])
            begin = trio.current_time()
    return trio.current_time() - begin


async def test_last_outputs_get_out(frontend: RawFrontend) -> None:
    with trio.fail_after(LIMIT):
        await leave_with_outputs(frontend, client_lives=True)

        for number in range(1000):
            assert await frontend.outputs[0].receive() == [b"%d" % number]


async def test_leaving_does_not_wait_for_a_client_that_is_gone(frontend: RawFrontend) -> None:
    lingers = EngineLingers(outputs=LIMIT)
    with trio.fail_after(LIMIT):
        seconds = await leave_with_outputs(frontend, client_lives=False, lingers=lingers)

    assert seconds < LIMIT / 2


async def test_output_high_water_mark(frontend: RawFrontend, tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: answer(frontend, outputs=[f"ipc://{tmp_path}/nobody"]))
            async with joining(frontend.handshake.address, output_high_water_mark=3) as links:
                (output,) = links.outputs
                assert isinstance(output, ZmqSocket)
                for _ in range(3):
                    output.send_nowait([b"output"])
                with pytest.raises(trio.WouldBlock):
                    output.send_nowait([b"one too many"])
                set_linger(output, 0)
