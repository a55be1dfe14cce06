"""The frontend's startup over real connections, and all that may come in between."""

from __future__ import annotations

import math
import os
import resource
import socket as stdlib_socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
import trio
from tests.ready import ready_response
from tests.transport.peers import LIMIT
from tests.transport.startup import (
    HELLO,
    READY,
    TICK,
    RawEngine,
    beside,
    cancel_everywhere,
    listening_socket,
    until,
)
from tests.transport.test_endpoints import has_ipv6
from trio.testing import MockClock

from trio_vllm.errors import AddressInUseError, ConfigurationError, PeerGoneError, StartupError
from trio_vllm.protocol import (
    ENGINE_CORE_DEAD,
    EngineAddresses,
    EngineId,
    encode_ready_response,
)
from trio_vllm.spawn import free_port
from trio_vllm.transport import (
    Bootstrapped,
    Disconnect,
    EngineChannels,
    HandshakeOwner,
    zmq_context,
)
from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context
from trio_vllm.transport.zmq_monitor import ConnectionTable

Script = Callable[[], Awaitable[object]]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/handshake"


@pytest.fixture
def engine(context: ZmqContext, address: str) -> RawEngine:
    return RawEngine(context, address)


async def check_links(links: EngineChannels, engine: RawEngine) -> None:
    """A request arrives at this engine, an output from it, and its end is known."""
    links.requests.send_nowait([engine.engine_id, b"\x00", b"request"])
    assert await engine.input.receive() == [b"\x00", b"request"]
    engine.output.send_nowait([b"output", b"aux"])
    ((frames, connection),) = await links.outputs.receive_batch(10)
    assert frames == [b"output", b"aux"]
    engine.die()
    assert {await links.disconnects.receive(), await links.disconnects.receive()} == {
        Disconnect(engine_index=engine.engine_index),
        Disconnect(connection=connection),
    }
    with pytest.raises(PeerGoneError):
        while True:  # the socket itself hears of it a moment later than the monitor
            links.requests.send_nowait([engine.engine_id, b"\x00", b"too late"])
            await trio.lowlevel.checkpoint()


async def fail(mode: HandshakeOwner | Bootstrapped, script: Script) -> StartupError:
    """Run a startup that fails while ``script`` runs."""
    with trio.fail_after(LIMIT):
        async with beside(script):
            with pytest.raises(StartupError) as caught:
                async with mode.connect():
                    raise AssertionError("it did not fail")
    return caught.value


async def succeed(mode: HandshakeOwner | Bootstrapped, script: Script) -> list[int]:
    """Run a startup that succeeds while ``script`` runs; gives the engines."""
    with trio.fail_after(LIMIT):
        async with beside(script), mode.connect() as links:
            return list(links.ready_responses)


# As it should be --------------------------------------------------------------------------------


async def test_one_engine(engine: RawEngine, address: str) -> None:
    with trio.fail_after(LIMIT):
        async with beside(engine.start):
            async with HandshakeOwner(handshake_address=address).connect() as links:
                assert links.input_address.startswith("tcp://127.0.0.1:")
                assert links.output_address.startswith("tcp://127.0.0.1:")
                assert list(links.ready_responses) == [0]

                await check_links(links, engine)


async def test_three_engines_in_any_order(context: ZmqContext, address: str) -> None:
    """Outputs of all come together; each loss is told with the right index."""
    engines = [RawEngine(context, address, index) for index in (2, 0, 1)]

    async def start() -> None:
        addresses = [await engine.say_hello() for engine in engines]
        engines[1].register(addresses[1])
        for engine in engines:
            engine.say_ready()
        engines[0].register(addresses[0])
        engines[2].register(addresses[2])

    mode = HandshakeOwner(handshake_address=address, engine_count=3)
    with trio.fail_after(LIMIT):
        async with beside(start), mode.connect() as links:
            assert list(links.ready_responses) == [0, 1, 2]
            for engine in engines:
                await check_links(links, engine)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_host(engine: RawEngine, address: str, host: str) -> None:
    with trio.fail_after(LIMIT):
        async with beside(engine.start):
            mode = HandshakeOwner(handshake_address=address, host=host)
            async with mode.connect() as links:
                assert links.input_address.startswith("tcp://[::1]:")
                await check_links(links, engine)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_ipv6_handshake(context: ZmqContext) -> None:
    address = f"tcp://[::1]:{free_port()}"
    mode = HandshakeOwner(handshake_address=address)

    assert await succeed(mode, RawEngine(context, address).start) == [0]


async def test_chosen_addresses(engine: RawEngine, address: str, tmp_path: Path) -> None:
    mode = HandshakeOwner(
        handshake_address=address,
        input_address=f"ipc://{tmp_path}/in",
        output_address=f"ipc://{tmp_path}/out",
    )
    with trio.fail_after(LIMIT):
        async with beside(engine.start), mode.connect() as links:
            assert (mode.input_address, mode.output_address) == (
                links.input_address,
                links.output_address,
            )
            await check_links(links, engine)


# Bootstrapped -----------------------------------------------------------------------------------


def bootstrapped(
    tmp_path: Path,
    *,
    ready_timeout: float = TICK,
    engine_start_index: int = 0,
    engine_count: int = 1,
) -> Bootstrapped:
    return Bootstrapped(
        input_address=f"ipc://{tmp_path}/in",
        output_address=f"ipc://{tmp_path}/out",
        ready_timeout=ready_timeout,
        engine_start_index=engine_start_index,
        engine_count=engine_count,
    )


async def test_bootstrapped_by_address(context: ZmqContext, tmp_path: Path, address: str) -> None:
    """Its engines need not begin at 0."""
    mode = bootstrapped(tmp_path, ready_timeout=LIMIT, engine_start_index=4, engine_count=2)
    engines = [RawEngine(context, address, index) for index in (5, 4)]
    addresses = EngineAddresses(inputs=[mode.input_address], outputs=[mode.output_address])

    async def register() -> None:
        await trio.lowlevel.checkpoint()
        for engine in engines:
            engine.register(addresses)

    with trio.fail_after(LIMIT):
        async with beside(register), mode.connect() as links:
            assert list(links.ready_responses) == [4, 5]
            for engine in engines:
                await check_links(links, engine)


@pytest.mark.parametrize("family", ["tcp", "ipc"])
async def test_bootstrapped_by_descriptor(
    context: ZmqContext, tmp_path: Path, address: str, family: str
) -> None:
    """The supervisor listens already; engines may have connected before we exist."""
    places: list[object]
    if family == "tcp":
        kind, places = stdlib_socket.AF_INET, [("127.0.0.1", 0)] * 2
    else:
        kind, places = stdlib_socket.AF_UNIX, [f"{tmp_path}/in", f"{tmp_path}/out"]
    engine = RawEngine(context, address)
    with listening_socket(kind, places[0]) as inputs, listening_socket(kind, places[1]) as outputs:
        names = [
            f"tcp://127.0.0.1:{listener.getsockname()[1]}" if family == "tcp" else f"ipc://{place}"
            for listener, place in zip((inputs, outputs), places, strict=True)
        ]
        engine.register(EngineAddresses(inputs=names[:1], outputs=names[1:]))
        await trio.testing.wait_all_tasks_blocked(0.05)
        mode = Bootstrapped(
            input_address=names[0],
            output_address=names[1],
            input_listener=os.dup(inputs.fileno()),
            output_listener=os.dup(outputs.fileno()),
        )
        with trio.fail_after(LIMIT):
            async with mode.connect() as links:
                assert names == [links.input_address, links.output_address]
                await check_links(links, engine)


async def test_bootstrapped_without_engines(tmp_path: Path) -> None:
    error = await fail(bootstrapped(tmp_path, engine_count=3), trio.sleep_forever)

    assert (error.phase, error.missing_engines) == ("registration", [0, 1, 2])


async def test_engine_of_an_earlier_frontend_does_not_register(
    context: ZmqContext, tmp_path: Path, address: str, patient_clock: MockClock
) -> None:
    """It connects again, and that is all; the error knows of such engines."""
    mode = bootstrapped(tmp_path)
    engine = RawEngine(context, address)
    addresses = EngineAddresses(inputs=[mode.input_address], outputs=[mode.output_address])

    async def connect() -> None:
        await trio.lowlevel.checkpoint()
        engine.connect(addresses)

    error = await fail(mode, connect)

    (note,) = error.notes
    assert note.startswith("1 of the connections to the input socket said nothing")
    assert "has served another frontend does not register again" in note


# What may not be there --------------------------------------------------------------------------


async def test_no_engine(address: str) -> None:
    mode = HandshakeOwner(handshake_address=address, engine_count=2, ready_timeout=TICK)

    error = await fail(mode, trio.sleep_forever)

    note = (
        f"no engine has connected to {address} in 0.3 s; is it started with"
        " --data-parallel-rpc-port PORT (a mock with"
        f" --handshake-address {address})? has it served another frontend before?"
    )
    assert (
        error.phase,
        error.missing_engines,
        error.seconds,
        error.notes,
    ) == ("HELLO", [0, 1], TICK, [note])
    assert (
        str(error)
        == f"startup failed while waiting for HELLO from engine 0, 1 (gave up after 0.3 s); {note}"
    )


@pytest.mark.parametrize("reached", ["HELLO", "registration", "READY"])
async def test_engine_that_gets_stuck(
    context: ZmqContext, address: str, patient_clock: MockClock, reached: str
) -> None:
    """The other one is complete; the phase is the one the stuck one has not reached."""
    engines = [RawEngine(context, address, index) for index in range(2)]

    async def start() -> None:
        await engines[0].start()
        addresses = await engines[1].say_hello()
        if reached == "registration":
            engines[1].register(addresses)
        elif reached == "READY":
            engines[1].say(READY)

    mode = HandshakeOwner(handshake_address=address, engine_count=2, ready_timeout=TICK)
    error = await fail(mode, start)

    phase = "registration" if reached == "READY" else "READY"
    assert (phase, [1], []) == (error.phase, error.missing_engines, error.notes)


# What should not be there -----------------------------------------------------------------------


async def test_second_engine_with_the_same_index(
    context: ZmqContext, engine: RawEngine, address: str, patient_clock: MockClock
) -> None:
    """ØMQ does not let us hear it, but its connection is seen."""

    async def start() -> None:
        addresses = await engine.say_hello()
        RawEngine(context, address).say(HELLO)
        engine.register(addresses)
        engine.say(READY)

    mode = HandshakeOwner(handshake_address=address, engine_count=2, ready_timeout=TICK)
    error = await fail(mode, start)

    assert (error.phase, error.missing_engines) == ("HELLO", [1])
    (note,) = error.notes
    assert note.startswith("1 of the connections to the handshake socket said nothing")
    assert "does not hear a second engine with the same index" in note


async def test_second_engine_comes_when_the_first_is_ready(
    context: ZmqContext, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def start() -> None:
        await RawEngine(context, address).start()
        await until(lambda: caplog.text.count("waiting for HELLO") == 4)
        while "said HELLO after READY" not in caplog.text:
            # ØMQ does not hear it before it has seen the end of the first one's connection.
            RawEngine(context, address).say(HELLO)
            await trio.sleep(0.01)
        await RawEngine(context, address, 1).start()

    caplog.set_level("INFO")
    assert await succeed(HandshakeOwner(handshake_address=address, engine_count=2), start) == [0, 1]


async def test_engines_that_are_not_expected(
    context: ZmqContext, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are told nothing; the expected one starts."""
    strangers = [RawEngine(context, address, index) for index in (1, 2, 65535)]
    engine = RawEngine(context, address)

    async def start() -> None:
        for stranger in strangers:
            stranger.say(HELLO)
        await until(lambda: caplog.text.count("which is not expected") == 3)
        await engine.start()

    assert await succeed(HandshakeOwner(handshake_address=address), start) == [0]
    for index in (1, 2, 65535):
        assert f"engine {index}, which is not expected, spoke on the handshake" in caplog.text


async def test_garbage_before_everything(
    context: ZmqContext, address: str, patient_clock: MockClock
) -> None:
    """Each of it is named if the startup fails, and does no harm if it does not."""
    engine = RawEngine(context, address)

    async def start() -> None:
        engine.say(READY)
        engine.say(b"\xc1")
        engine.say(HELLO, b"")
        engine.say(b"")
        addresses = await engine.say_hello()
        engine.register(addresses, b"\x80")
        engine.input.send_nowait([b"1", b"2"])

    mode = HandshakeOwner(handshake_address=address, ready_timeout=TICK)
    error = await fail(mode, start)

    assert error.phase == "READY"
    notes = "; ".join(error.notes)
    assert "engine 0 said READY out of turn" in notes
    assert "engine 0 sent garbage: cannot decode" in notes
    assert "a message of 3 frames came on the handshake socket" in notes
    assert "a message of 3 frames came on the input socket" in notes
    assert "said nothing" not in notes

    engine = RawEngine(context, address)

    async def start_anyway() -> None:
        await start()
        engine.register(await engine.say_hello())
        engine.say_ready()

    assert await succeed(HandshakeOwner(handshake_address=address), start_anyway) == [0]


MOST_REAL_SECONDS = 10.0
"""Until ØMQ's own thread has told of a connection: on a busy machine that takes longer than the patience of a clock."""


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[ConnectionTable]:
    """The tables of connections that are made during the test."""
    made: list[ConnectionTable] = []

    def make(*args: Any, **options: Any) -> ConnectionTable:
        made.append(ConnectionTable(*args, **options))
        return made[-1]

    monkeypatch.setattr(zmq_context, "ConnectionTable", make)
    return made


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait while no virtual time passes: a task that always goes on keeps the clock from jumping."""
    end = time.monotonic() + MOST_REAL_SECONDS
    while not condition():
        assert time.monotonic() < end
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b""])
async def test_stranger_on_the_handshake_port(
    patient_clock: MockClock, tables: list[ConnectionTable], greeting: bytes, leaves: bool
) -> None:
    """ØMQ ends the connection of who speaks something else."""
    port = free_port()

    def is_told() -> bool:
        if leaves or greeting:
            return any(table.non_zmq_connections for table in tables)
        return any(table.connection_count for table in tables)

    async def call() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(greeting)
            if not leaves:
                await wait_until(is_told)
                await trio.sleep_forever()
        await wait_until(is_told)

    mode = HandshakeOwner(handshake_address=f"tcp://127.0.0.1:{port}", ready_timeout=TICK)
    error = await fail(mode, call)

    assert (error.phase, error.missing_engines) == ("HELLO", [0])
    (note,) = error.notes
    fault = "ended without a message" if leaves or greeting else "said nothing"
    assert note.startswith(f"1 of the connections to the handshake socket {fault}")


# Engines that die and come back -----------------------------------------------------------------


@pytest.mark.parametrize("reached", ["HELLO", "registration", "READY"])
async def test_engine_dies_and_comes_back(
    context: ZmqContext, address: str, reached: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, first = RawEngine(context, address, 1), RawEngine(context, address)

    async def start() -> None:
        addresses = await first.say_hello()
        if reached != "HELLO":
            first.register(addresses)
        if reached == "READY":
            first.say(READY)
        steps = ["", "HELLO", "registration", "READY"].index(reached)
        await until(lambda: caplog.text.count("waiting for HELLO") == 1 + steps)
        first.die()
        left = "left before" if reached == "HELLO" else "was lost during startup"
        await until(lambda: left in caplog.text)
        await start_again()
        await other.start()

    async def start_again() -> None:
        # Likewise: until ØMQ has seen the end of the first one's connection.
        while True:
            engine = RawEngine(context, address)
            with trio.move_on_after(0.1):
                await engine.start()
                return
            engine.die()

    caplog.set_level("INFO")
    mode = HandshakeOwner(handshake_address=address, engine_count=2)

    assert await succeed(mode, start) == [0, 1]
    if reached == "HELLO":
        assert "engine 0 said HELLO again" in caplog.text
    else:
        assert "engine 0 was lost during startup" in caplog.text


async def test_engine_that_dies_while_it_loads(
    context: ZmqContext, address: str, patient_clock: MockClock
) -> None:
    engine = RawEngine(context, address)

    async def start() -> None:
        await engine.say_hello()
        engine.die()

    error = await fail(HandshakeOwner(handshake_address=address, ready_timeout=TICK), start)

    assert (error.phase, error.missing_engines) == ("READY", [0])
    assert error.notes == ["engine 0 left before it was READY"]


async def test_engine_that_dies_when_it_is_complete(
    context: ZmqContext, address: str, patient_clock: MockClock
) -> None:
    """The startup may be over by then; the loss is told in either case."""
    engine = RawEngine(context, address)

    async def start() -> None:
        await engine.start()
        engine.die()

    mode = HandshakeOwner(handshake_address=address, ready_timeout=TICK)
    failure: StartupError | None = None
    with trio.fail_after(LIMIT):
        async with beside(start):
            try:
                async with mode.connect() as links:
                    assert await links.disconnects.receive() == Disconnect(engine_index=0)
            except StartupError as error:
                failure = error

    if failure is not None:
        assert (failure.phase, failure.missing_engines) == ("HELLO", [0])
        assert "engine 0 was lost during startup" in failure.notes


# Time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", ["HELLO", "INIT", "registration", "farewell", "complete"])
async def test_engine_that_leaves_is_told_soon(
    context: ZmqContext, address: str, reached: str
) -> None:
    """Though another one may still load for long."""
    engine = RawEngine(context, address)

    async def start() -> None:
        if reached == "HELLO":
            engine.say(HELLO)
            await engine.handshake.receive()
        else:
            addresses = await engine.say_hello()
            if reached != "INIT":
                engine.register(addresses)
            if reached == "farewell":
                engine.output.send_nowait([ENGINE_CORE_DEAD])
            if reached == "complete":
                engine.say_ready()
            await trio.sleep(0.1)
        engine.die()

    begin = trio.current_time()
    error = await fail(
        HandshakeOwner(handshake_address=address, engine_count=2, restart_grace=0.5), start
    )

    assert trio.current_time() - begin < LIMIT / 3
    assert (error.phase, error.missing_engines, error.seconds) == ("HELLO", [0], 0.5)
    assert error.notes[0] in {
        "engine 0 left before it was READY",
        "engine 0 was lost during startup",
    }


async def test_engine_that_is_lost_is_told_soon_though_its_ready_comes_later(
    context: ZmqContext, address: str
) -> None:
    """It was under way, and is no new start. Nor is a second HELLO in bytes that cannot be read."""
    engine = RawEngine(context, address)

    async def start() -> None:
        engine.register(await engine.say_hello())
        await trio.sleep(0.2)
        engine.input.close()
        await trio.sleep(0.3)
        engine.say(b"no report")
        engine.say(READY)
        await trio.sleep_forever()

    begin = trio.current_time()
    error = await fail(
        HandshakeOwner(handshake_address=address, engine_count=2, restart_grace=1.0), start
    )

    assert trio.current_time() - begin < LIMIT / 3
    assert (error.missing_engines, error.seconds) == ([0], 1.0)


async def test_engine_that_registers_with_garbage_is_told_soon(
    context: ZmqContext, address: str
) -> None:
    engine = RawEngine(context, address)

    async def start() -> None:
        payload = ormsgpack.unpackb(b"".join(encode_ready_response(ready_response(0))))
        payload["max_model_len"] = -1
        engine.register(await engine.say_hello(), ormsgpack.packb(payload))
        await trio.sleep_forever()

    error = await fail(HandshakeOwner(handshake_address=address, restart_grace=0.2), start)

    assert (error.missing_engines, error.seconds) == ([0], 0.2)
    assert "engine 0 sent garbage" in error.notes[0]
    assert "max_model_len" in error.notes[0]


async def test_engine_that_starts_again_in_time(context: ZmqContext, address: str) -> None:
    async def start() -> None:
        engine = RawEngine(context, address)
        await engine.say_hello()
        engine.die()
        await trio.sleep(0.3)
        await RawEngine(context, address).start()

    mode = HandshakeOwner(handshake_address=address, restart_grace=LIMIT / 2)
    assert await succeed(mode, start) == [0]


async def test_limit_of_the_whole_startup(context: ZmqContext, address: str) -> None:
    """Each message comes in time, all together do not."""

    async def start() -> None:
        for index in range(100):
            await RawEngine(context, address, index).say_hello()
            await trio.sleep(TICK / 5)

    mode = HandshakeOwner(
        handshake_address=address, engine_count=100, ready_timeout=LIMIT, startup_timeout=TICK
    )
    error = await fail(mode, start)

    assert (error.phase, error.seconds) == ("HELLO", TICK)
    assert len(error.missing_engines) > 90


async def test_nobody_comes_to_a_tcp_port() -> None:
    port = free_port()
    mode = HandshakeOwner(handshake_address=f"tcp://127.0.0.1:{port}", ready_timeout=TICK)

    error = await fail(mode, trio.sleep_forever)

    assert error.notes == [
        f"no engine has connected to tcp://127.0.0.1:{port} in 0.3 s; is it started with"
        f" --data-parallel-rpc-port {port} (a mock with --handshake-address tcp://127.0.0.1:{port})?"
        " has it served another frontend before?"
    ]


async def test_garbage_wins_no_time(context: ZmqContext, address: str) -> None:
    """Nor does an engine that restarts for ever: the startup ends although they go on."""
    engine = RawEngine(context, address)

    async def start_again_and_again() -> None:
        number = 0
        while True:
            addresses = await engine.say_hello()
            engine.register(addresses)
            engine.say(b"%d" % number)
            RawEngine(context, address, number % 1000 + 1).say(HELLO)
            number += 1
            await trio.sleep(TICK / 10)

    await fail(HandshakeOwner(handshake_address=address, ready_timeout=TICK), start_again_and_again)


async def test_progress_wins_time(
    context: ZmqContext, address: str, patient_clock: MockClock
) -> None:
    """The limit is that of the next message, not of all."""
    engines = [RawEngine(context, address, index) for index in range(3)]

    async def start() -> None:
        for engine in engines:
            patient_clock.jump(0.6 * TICK)
            await engine.start()

    mode = HandshakeOwner(handshake_address=address, engine_count=3, ready_timeout=TICK)

    assert await succeed(mode, start) == [0, 1, 2]


# Addresses and numbers that cannot work ---------------------------------------------------------


async def test_handshake_address_in_use() -> None:
    with listening_socket(stdlib_socket.AF_INET, ("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AddressInUseError) as caught:
            async with HandshakeOwner(handshake_address=address).connect():
                raise AssertionError("it did not fail")

    assert caught.value.address == address
    assert str(caught.value) == f"address {address} is already in use"


async def test_input_address_in_use(tmp_path: Path) -> None:
    with listening_socket(stdlib_socket.AF_INET, ("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        mode = Bootstrapped(input_address=address, output_address=f"ipc://{tmp_path}/out")
        with pytest.raises(AddressInUseError, match=address):
            async with mode.connect():
                raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    "mode",
    [
        HandshakeOwner(handshake_address="somewhere"),
        HandshakeOwner(handshake_address="tcp://127.0.0.1"),
        HandshakeOwner(handshake_address="tcp://192.0.2.1:1"),
        HandshakeOwner(handshake_address="tcp://127.0.0.1:0", host="192.0.2.1"),
        HandshakeOwner(handshake_address="tcp://127.0.0.1:0", host="127.0.0.1:80"),
        HandshakeOwner(handshake_address="tcp://127.0.0.1:0", output_address="udp://x"),
        Bootstrapped(input_address="tcp://127.0.0.1:0", output_address="x"),
        Bootstrapped(input_address="ipc://", output_address="tcp://127.0.0.1:0"),
    ],
    ids=str,
)
async def test_unusable_address(mode: HandshakeOwner | Bootstrapped) -> None:
    with pytest.raises(ConfigurationError, match=r"address|listen"):
        async with mode.connect():
            raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    "options",
    [
        {"engine_count": 0},
        {"engine_count": -1},
        {"engine_count": 65537},
        {"ready_timeout": 0},
        {"ready_timeout": -1.0},
        {"ready_timeout": math.nan},
        {"heartbeat_timeout": 0},
    ],
    ids=str,
)
def test_impossible_numbers(options: dict[str, float]) -> None:
    """They are refused before anything is opened."""
    with pytest.raises(ConfigurationError):
        HandshakeOwner(handshake_address="tcp://127.0.0.1:1", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        Bootstrapped(input_address="", output_address="", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("handshake_address", 29550, "a string such as 'tcp://127.0.0.1:29550', not 29550"),
        ("input_address", b"tcp://127.0.0.1:1", "a string such as"),
        ("coordinator_address", 1, "a string such as"),
        ("host", None, "a string, not None"),
        ("bind_host", 0, "a string, not 0"),
        ("engine_count", "2", "an integer, not '2'"),
        ("engine_start_index", 1.5, "an integer, not 1.5"),
        ("data_parallel_size", "4", "an integer"),
        ("output_listener", "5", "an integer"),
        ("ready_timeout", "30", "a number of seconds, not '30'"),
        ("restart_grace", None, "a number of seconds"),
        ("coordinator", "no", "True or False, not 'no'"),
        ("parallel_config", ["data_parallel_master_port"], "a mapping"),
    ],
)
def test_values_of_wrong_types(name: str, value: Any, wanted: str) -> None:
    """They are refused by each of the modes that has the field, with its name."""
    handshake: dict[str, Any] = {"handshake_address": "tcp://127.0.0.1:1"}
    bootstrap: dict[str, Any] = {"input_address": "", "output_address": ""}
    modes = [(HandshakeOwner, handshake), (Bootstrapped, bootstrap)]
    having = [(mode, given) for mode, given in modes if name in mode.__annotations__]

    for mode, given in having:
        with pytest.raises(TypeError, match=f"^{name} must be {wanted}"):
            mode(**{**given, name: value})

    assert having


@pytest.mark.parametrize(
    ("start", "count", "size", "is_possible"),
    [
        (0, 65536, None, True),
        (65535, 1, None, True),
        (65535, 2, None, False),
        (-1, 2, None, False),
        (2, 2, 4, True),
        (2, 3, 4, False),
        (0, 1, 0, False),
        (65535, 2, 70000, False),
    ],
)
def test_range_of_engines(start: int, count: int, size: int | None, is_possible: bool) -> None:
    def make() -> Bootstrapped:
        return Bootstrapped(
            input_address="tcp://127.0.0.1:1",
            output_address="tcp://127.0.0.1:2",
            engine_start_index=start,
            engine_count=count,
            data_parallel_size=size,
        )

    if is_possible:
        assert range(start, start + count) == make().engine_indices
    else:
        with pytest.raises(ConfigurationError, match="do not fit"):
            make()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "", "0"])
def test_wildcard_is_not_told_to_engines(host: str) -> None:
    with pytest.raises(ConfigurationError, match="no address that engines could connect to"):
        HandshakeOwner(handshake_address="tcp://127.0.0.1:1", host=host)


@pytest.mark.parametrize("name", ["input_address", "output_address"])
@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://*:5"])
def test_wildcard_address_is_not_told_to_engines(name: str, address: str) -> None:
    with pytest.raises(ConfigurationError, match="none that engines could connect to"):
        HandshakeOwner(handshake_address="tcp://127.0.0.1:1", **{name: address})  # type: ignore[arg-type]


async def test_listening_everywhere(engine: RawEngine, address: str) -> None:
    """The engines are told of one interface."""
    mode = HandshakeOwner(handshake_address=address, host="127.0.0.1", bind_host="0.0.0.0")
    with trio.fail_after(LIMIT):
        async with beside(engine.start), mode.connect() as links:
            assert links.input_address.startswith("tcp://127.0.0.1:")
            assert links.output_address.startswith("tcp://127.0.0.1:")
            await check_links(links, engine)


@pytest.mark.parametrize("kind", ["closed", "file", "not listening", "other family"])
async def test_listener_that_is_none(tmp_path: Path, kind: str) -> None:
    """ØMQ would abort the process."""
    with stdlib_socket.socket() as quiet, stdlib_socket.socket(stdlib_socket.AF_UNIX) as unix:
        unix.bind(f"{tmp_path}/other")
        unix.listen()
        file = os.open(os.devnull, os.O_RDONLY)
        descriptor = {
            "closed": 9999,
            "file": file,
            "not listening": quiet.fileno(),
            "other family": unix.fileno(),
        }[kind]
        mode = Bootstrapped(
            input_address="tcp://127.0.0.1:5555",
            output_address=f"ipc://{tmp_path}/out",
            input_listener=descriptor,
        )
        with pytest.raises(ConfigurationError, match=f"descriptor {descriptor}"):
            async with mode.connect():
                raise AssertionError("it did not fail")
        os.close(file)


# Leaving ----------------------------------------------------------------------------------------


async def test_cancelling_leaves_nothing_behind(tmp_path: Path, address: str) -> None:
    """At every step of a startup and of the block after it."""

    async def run() -> None:
        async with open_context() as context:
            engine = RawEngine(context, address)
            async with (
                beside(engine.start),
                HandshakeOwner(handshake_address=address).connect() as links,
            ):
                engine.die()
                await links.disconnects.receive()

    assert await cancel_everywhere(run) > 5


async def test_last_request_gets_out(engine: RawEngine, address: str) -> None:
    """Also if the block is left at once, by an error or by being cancelled."""
    with trio.fail_after(LIMIT):
        async with beside(engine.start):
            with trio.CancelScope() as scope:
                async with HandshakeOwner(handshake_address=address).connect() as links:
                    for number in range(1000):
                        links.requests.send_nowait([EngineId.of(0), b"\x01", b"%d" % number])
                    scope.cancel()
                    await trio.lowlevel.checkpoint()

        for number in range(1000):
            assert await engine.input.receive() == [b"\x01", b"%d" % number]


async def test_leaving_does_not_wait_for_a_dead_engine(engine: RawEngine, address: str) -> None:
    with trio.fail_after(LIMIT):
        async with (
            beside(engine.start),
            HandshakeOwner(handshake_address=address).connect(linger=LIMIT) as links,
        ):
            engine.die()
            await links.disconnects.receive()
            begin = trio.current_time()

    assert trio.current_time() - begin < LIMIT / 2


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize(("size", "frames"), [(1_000_000, 1), (1_000_000, 100), (60_000, 20)])
async def test_what_nobody_reads_does_not_pile_up(
    context: ZmqContext, engine: RawEngine, address: str, size: int, frames: int
) -> None:
    """After the startup an engine has nothing to say on the input socket, and a stranger never."""
    stranger = context.socket(SocketType.DEALER, send_high_water_mark=1)
    with trio.fail_after(LIMIT):
        async with (
            beside(engine.start),
            HandshakeOwner(handshake_address=address).connect() as links,
        ):
            stranger.connect(links.input_address)
            before = resident_bytes()
            with trio.move_on_after(TICK):
                for _ in range(500):
                    await stranger.send([bytes(size)] * frames)

            assert resident_bytes() - before < 100_000_000
            await check_links(links, engine)


async def test_huge_report_is_not_even_received(context: ZmqContext, address: str) -> None:
    stranger = RawEngine(context, address, 1)

    async def call() -> None:
        stranger.say(bytes(2_000_000))

    error = await fail(HandshakeOwner(handshake_address=address, ready_timeout=TICK), call)

    assert not any("engine 1" in note for note in error.notes)


def accepted_connection(address: str) -> stdlib_socket.socket:
    """A copy of the socket of this process that was accepted at this address."""
    port = int(address.rpartition(":")[2])
    for entry in list(Path("/proc/self/fd").iterdir()):
        if "socket:" not in os.path.realpath(entry):
            continue
        copy = stdlib_socket.socket(fileno=os.dup(int(entry.name)))
        if copy.family == stdlib_socket.AF_INET and copy.getsockname()[1] == port:
            with suppress(OSError):
                copy.getpeername()
                return copy
        copy.close()
    raise AssertionError("there is none")


async def test_connections_are_kept_alive(context: ZmqContext, address: str) -> None:
    """So that a host that vanishes is noticed, whatever is under way to it."""
    engine = RawEngine(context, address)
    with trio.fail_after(LIMIT):
        async with (
            beside(engine.start),
            HandshakeOwner(handshake_address=address).connect() as links,
        ):
            with accepted_connection(links.input_address) as connection:
                tcp = stdlib_socket.IPPROTO_TCP
                assert connection.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_KEEPALIVE)
                options = [
                    connection.getsockopt(tcp, option)
                    for option in (
                        stdlib_socket.TCP_KEEPIDLE,
                        stdlib_socket.TCP_KEEPINTVL,
                        stdlib_socket.TCP_KEEPCNT,
                        stdlib_socket.TCP_USER_TIMEOUT,
                    )
                ]

    assert options == [10, 5, 3, 24_000]
