"""The coordinator's gate, and the ways to and from a coordinator, over real connections."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from tests.ready import ready_response
from tests.transport.peers import LIMIT, receive_frames
from tests.transport.startup import READY, TICK, RawEngine, beside
from trio.testing import MockClock

from trio_vllm.errors import ConfigurationError, StartupError
from trio_vllm.protocol import EngineAddresses, decode_init, encode_ready_response
from trio_vllm.transport import (
    Bootstrapped,
    FollowerChannels,
    HandshakeOwner,
    LeaderChannels,
)
from trio_vllm.transport.zmq_context import SocketType, ZmqContext


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/handshake"


@pytest.fixture
def engines(context: ZmqContext, address: str) -> list[RawEngine]:
    return [RawEngine(context, address, index) for index in range(2)]


def registration(engine: RawEngine, **changes: object) -> bytes:
    (payload,) = encode_ready_response(
        ready_response(engine.engine_index, data_parallel_size=2, **changes)
    )
    return payload


async def start(engine: RawEngine) -> None:
    """The startup of an engine in lockstep."""
    addresses = await engine.say_hello()
    engine.subscribe(addresses)
    engine.register(addresses, registration(engine))
    assert await engine.broadcasts.receive() == [b"READY"]
    engine.say_ready()


async def test_lead(engines: list[RawEngine], address: str) -> None:
    """All are let in together; then what is said reaches all, and what each says comes in."""

    async def start_all() -> None:
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(start, engine)

    mode = HandshakeOwner(handshake_address=address, engine_count=2, coordinator=True)
    with trio.fail_after(LIMIT):
        async with beside(start_all), mode.connect() as links:
            assert list(links.ready_responses) == [0, 1]
            assert isinstance(links.coordination, LeaderChannels)
            links.coordination.broadcasts.send_nowait([b"\x02", b"\x92\x00\x01"])
            for engine in engines:
                assert await engine.broadcasts.receive() == [b"\x02", b"\x92\x00\x01"]
                engine.notices.send_nowait([b"notice"])
                assert await receive_frames(links.coordination.notices) == [[b"notice"]]


async def test_gate_stays_closed(
    engines: list[RawEngine], address: str, patient_clock: MockClock
) -> None:
    """One has not come there; it is named, since it has not registered either."""

    async def start_one() -> None:
        addresses = await engines[1].say_hello()
        await engines[0].say_hello()
        engines[1].subscribe(addresses)
        engines[1].register(addresses, registration(engines[1]))
        assert await engines[1].broadcasts.receive() == [b"READY"]
        raise AssertionError("the gate was opened")

    mode = HandshakeOwner(
        handshake_address=address, engine_count=2, coordinator=True, ready_timeout=TICK
    )
    with trio.fail_after(LIMIT):
        async with beside(start_one):
            with pytest.raises(StartupError) as caught:
                async with mode.connect():
                    raise AssertionError("it did not fail")

    assert (
        caught.value.phase,
        caught.value.missing_engines,
    ) == ("subscription at the coordinator", [0])


async def test_engine_that_restarts_when_the_gate_is_open(
    context: ZmqContext, engines: list[RawEngine], address: str
) -> None:
    async def start_twice() -> None:
        first, other = engines
        addresses = await first.say_hello()
        first.subscribe(addresses)
        other.subscribe(await other.say_hello())
        assert await first.broadcasts.receive() == [b"READY"]
        first.die()
        again = RawEngine(context, address)
        again.subscribe(addresses)
        assert await again.broadcasts.receive() == [b"READY"]
        again.register(addresses, registration(again))
        other.register(addresses, registration(other))
        other.say(READY)
        while True:  # ØMQ does not hear it before it has seen the end of the first one
            with trio.move_on_after(0.1):
                await again.say_hello()
                break
            again = RawEngine(context, address)
        again.say(READY)

    mode = HandshakeOwner(handshake_address=address, engine_count=2, coordinator=True)
    with trio.fail_after(LIMIT):
        async with beside(start_twice), mode.connect() as links:
            assert list(links.ready_responses) == [0, 1]


async def test_subscribers_that_leave_during_the_startup_are_forgotten(
    context: ZmqContext, engines: list[RawEngine], address: str
) -> None:
    first, other = engines

    async def start_twice() -> None:
        addresses = await first.say_hello()
        first.subscribe(addresses)
        other.subscribe(await other.say_hello())
        assert await first.broadcasts.receive() == [b"READY"]
        for _ in range(5):
            stranger = RawEngine(context, address)
            stranger.subscribe(addresses)
            assert await stranger.broadcasts.receive() == [b"READY"]
            stranger.die()
            await trio.sleep(TICK / 5)
        for engine in engines:
            engine.register(addresses, registration(engine))
            engine.say_ready()

    mode = HandshakeOwner(handshake_address=address, engine_count=2, coordinator=True)
    with trio.fail_after(LIMIT):
        async with beside(start_twice), mode.connect() as links:
            assert isinstance(links.coordination, LeaderChannels)
            # The loss of the last may not have been known when there was reason to look.
            assert len(links.coordination.subscribers) <= 3


async def test_lockstep_without_coordinator(engines: list[RawEngine], address: str) -> None:
    """A request would wait for ever."""

    async def start_all() -> None:
        for engine in engines:
            engine.register(await engine.say_hello(), registration(engine))
            engine.say_ready()

    mode = HandshakeOwner(handshake_address=address, engine_count=2)
    with trio.fail_after(LIMIT):
        async with beside(start_all):
            with pytest.raises(ConfigurationError, match="needs coordinator=True"):
                async with mode.connect():
                    raise AssertionError("it did not fail")


@pytest.mark.parametrize("told_by", ["mode", "engine", "both", "nobody"])
async def test_follow(context: ZmqContext, tmp_path: Path, address: str, told_by: str) -> None:
    """An address that an engine tells comes before that of the mode."""
    publisher, other = context.socket(SocketType.XPUB), context.socket(SocketType.XPUB)
    right = publisher.bind(f"ipc://{tmp_path}/stats")
    wrong = other.bind(f"ipc://{tmp_path}/other")
    mode = Bootstrapped(
        input_address=f"ipc://{tmp_path}/in",
        output_address=f"ipc://{tmp_path}/out",
        coordinator_address={"mode": right, "both": wrong}.get(told_by),
    )
    engine = RawEngine(context, address)
    told = right if told_by in {"engine", "both"} else None

    async def register() -> None:
        await trio.lowlevel.checkpoint()
        addresses = EngineAddresses(inputs=[mode.input_address], outputs=[mode.output_address])
        engine.register(addresses, registration(engine, dp_stats_address=told))

    with trio.fail_after(LIMIT):
        async with beside(register), mode.connect() as links:
            if told_by == "nobody":
                assert links.coordination is None
                return
            assert isinstance(links.coordination, FollowerChannels)
            assert await publisher.receive() == [b"\x01"]
            publisher.send_nowait([b"published"])
            assert await receive_frames(links.coordination.publications) == [[b"published"]]
            links.coordination.notices.send_nowait([b"notice"])
            assert await publisher.receive() == [b"notice"]


async def test_settings_for_the_engines(
    engines: list[RawEngine], address: str, patient_clock: MockClock
) -> None:
    """They travel in INIT as they are."""
    settings: dict[str, int | str | list[int]] = {
        "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_master_port": 1234,
        "_data_parallel_master_port_list": [1235, 1236],
    }
    mode = HandshakeOwner(handshake_address=address, parallel_config=settings, ready_timeout=TICK)
    received: list[object] = []

    async def listen() -> None:
        engines[0].say(b"\x81\xa6status\xa5HELLO")
        (payload,) = await engines[0].handshake.receive()
        received.append(decode_init([payload]).parallel_config)

    with trio.fail_after(LIMIT):
        async with beside(listen):
            with pytest.raises(StartupError):
                async with mode.connect():
                    raise AssertionError("it did not fail")

    assert received == [settings]


@pytest.mark.parametrize("value", [None, True, 1.5, ["a"], {}, 2**64])
def test_settings_that_engines_refuse(value: object) -> None:
    with pytest.raises(ConfigurationError, match="parallel_config"):
        HandshakeOwner(
            handshake_address="tcp://127.0.0.1:1",
            parallel_config={"setting": value},  # type: ignore[dict-item]
        )
