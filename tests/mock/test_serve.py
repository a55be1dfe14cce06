"""Mock engines behind a frontend, over ØMQ."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.mock.driver import drive_many, pack_add, raw_request
from tests.proxy import open_proxy
from tests.transport.startup import RawFrontend

from trio_vllm import (
    ConfigurationError,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    HandshakeOwner,
    InternalError,
    SamplingParams,
    StartupError,
    open_client,
)
from trio_vllm.errors import UnsupportedFieldError
from trio_vllm.mock import (
    MockEngine,
    MockEngineConfig,
    ServeOptions,
    Summary,
    serve_mock_engines,
)
from trio_vllm.mock.encoding import Outgoing
from trio_vllm.mock.engine import ABORTS_AT_ONCE
from trio_vllm.mock.runner import EngineRunner
from trio_vllm.mock.serve import ServeLimits, _abort_requests
from trio_vllm.protocol import (
    HandshakeStatus,
    RequestBatchOutputs,
    decode_outputs,
    decode_ready_response,
    decode_report,
    encode_init,
)
from trio_vllm.transport import EngineLingers, join_frontend
from trio_vllm.transport.zmq_context import open_context

TIMEOUT = 30.0
"""Seconds for what must happen."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for sockets."""
    with tempfile.TemporaryDirectory(prefix="mock-") as name:
        yield Path(name)


def options_for(folder: Path, **options: Any) -> ServeOptions:
    return ServeOptions(handshake_address=f"ipc://{folder}/handshake", **options)


def owner(options: ServeOptions) -> HandshakeOwner:
    """The client's side of the same."""
    return HandshakeOwner(
        handshake_address=options.handshake_address,
        engine_count=options.engine_count,
        ready_timeout=TIMEOUT,
    )


def make_request(request_id: str, max_tokens: int) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1, 2], sampling_params=params)


async def generate(client: EngineCoreClient, request_id: str, max_tokens: int) -> FinishReason:
    count = 0
    async with client.call(make_request(request_id, max_tokens)) as outputs:
        async for delivered in outputs:
            output = delivered.output
            count += len(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason is not FinishReason.LENGTH or count == max_tokens
                return output.finish_reason
    raise AssertionError("the request has no end")


class Serving:
    """Serves beside a test; the outcome is there afterwards."""

    def __init__(
        self, options: ServeOptions, limits: ServeLimits | None = None, **config: Any
    ) -> None:
        self.options = options
        self.limits = limits or ServeLimits()
        self.config = MockEngineConfig(**config)
        self.shutdown = trio.Event()
        self.summary: Summary | None = None

    async def run(self) -> None:
        with trio.fail_after(TIMEOUT):
            self.summary = await serve_mock_engines(
                self.config, self.options, shutdown=self.shutdown, limits=self.limits
            )


async def test_engines_serve_a_client(folder: Path) -> None:
    """Each gets its share, and the summary counts all."""
    serving = Serving(options_for(folder, engine_count=3))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving.run)
        async with open_client(owner(serving.options)) as client:
            assert client.max_model_len == 1_048_576
            assert client.vllm_version == "0.33.0"
            for i in range(9):
                assert await generate(client, f"r{i}", 5) is FinishReason.LENGTH
            serving.shutdown.set()

    assert serving.summary is not None
    assert (
        serving.summary.requests,
        serving.summary.tokens,
        serving.summary.finished,
        serving.summary.aborted,
        serving.summary.errors,
    ) == (9, 45, 9, 0, 0)
    assert serving.summary.tokens_per_second > 0


async def test_a_new_client_knows_what_the_engines_support(folder: Path) -> None:
    """A request to generate is refused that would kill a real engine."""
    serving = Serving(options_for(folder), supported_tasks=("embed",))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving.run)
        async with open_client(owner(serving.options)) as client:
            with pytest.raises(UnsupportedFieldError, match="only pools"):
                await generate(client, "a", 5)
            serving.shutdown.set()

    assert serving.summary is not None
    assert serving.summary.requests == 0


async def test_starting_waits_until_all_have_joined(folder: Path) -> None:
    """So whoever starts them needs a frontend that comes from elsewhere."""
    options = options_for(folder, engine_count=2)
    connected = trio.Event()

    async def frontend() -> None:
        async with open_client(owner(options)):
            connected.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(frontend)
        with trio.fail_after(TIMEOUT):
            await nursery.start(serve_mock_engines, MockEngineConfig(), options)
            await connected.wait()
        nursery.cancel_scope.cancel()


async def test_an_engine_loads_once_between_init_and_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend that waits for it has its HELLO; the next one need not wait."""
    loading_times: list[float] = []

    def join(*args: Any, loading_time: float, **options: Any) -> Any:
        loading_times.append(loading_time)
        return join_frontend(*args, loading_time=loading_time, **options)

    monkeypatch.setattr("trio_vllm.mock.serve.join_frontend", join)
    serving = Serving(options_for(folder), startup_duration=0.4, time_scale=0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving.run)
        begin = trio.current_time()
        async with open_client(owner(serving.options)):
            assert trio.current_time() - begin >= 0.2
        async with open_client(owner(serving.options)):
            assert loading_times == [0.2, 0.0]
        serving.shutdown.set()


async def test_a_frontend_may_leave_while_an_engine_loads(folder: Path) -> None:
    """Both are told what was waited for."""
    serving = Serving(options_for(folder, reconnect=False), startup_duration=1e6)

    async def serve() -> None:
        with pytest.raises(EngineDeadError, match="while waiting for its model to load"):
            await serving.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        impatient = attrs.evolve(owner(serving.options), ready_timeout=0.5)
        with pytest.raises(StartupError, match="READY") as caught:
            await open_client(impatient).__aenter__()

    assert caught.value.missing_engines == [0]


async def test_the_next_frontend_is_served_as_well(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the first leaves in the middle of a request."""
    caplog.set_level(logging.INFO, "trio_vllm.mock")
    serving = Serving(options_for(folder, engine_count=2), log_requests=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving.run)
        for life in range(3):
            async with open_client(owner(serving.options)) as client:
                assert await generate(client, f"life {life}", 3) is FinishReason.LENGTH
                async with client.call(make_request(f"left {life}", 1_000_000)) as outputs:
                    await anext(outputs)
                    client.close()
        serving.shutdown.set()

    assert serving.summary is not None
    summary = serving.summary
    assert (summary.requests, summary.finished, summary.aborted) == (6, 3, 3)
    lines = caplog.text
    assert "engine 1: serving 1 client(s)" in lines
    assert "engine 1: the frontend has gone" in lines
    assert "request taken request_id='life 2' prompt_len=2 max_tokens=3 chunk_size=1" in lines
    assert "request finished request_id='life 2' prompt_len=2 output_tokens=3" in lines
    assert "finish_reason=length" in lines


async def test_a_lost_frontend_leaves_nothing(folder: Path) -> None:
    """Its requests count as aborted, and what they took is freed although collections are rare."""
    serving = Serving(options_for(folder))
    gc.collect()
    gc.disable()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.run)
            for life in range(4):
                async with open_client(owner(serving.options)) as client:
                    async with client.call(make_request(f"life {life}", 10_000_000)) as outputs:
                        await anext(outputs)
                        count = sum(isinstance(o, MockEngine) for o in gc.get_objects())
                        assert count <= 2  # the last one may still be at its end
                        client.close()
            serving.shutdown.set()
    finally:
        gc.enable()

    assert serving.summary is not None
    assert (serving.summary.requests, serving.summary.aborted) == (4, 4)


async def test_many_requests_of_a_lost_frontend_are_aborted_in_slices() -> None:
    """Others have their turns meanwhile."""
    engine = drive_many(10 * ABORTS_AT_ONCE).engine
    seen = list[int]()

    async def watch() -> None:
        while engine.has_unfinished:
            seen.append(sum(engine.counts))
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await _abort_requests(engine, lambda: 1e6)

    assert len(set(seen)) >= 5  # tasks run in any order
    assert engine.summary.aborted == 10 * ABORTS_AT_ONCE


async def test_without_reconnect_the_loss_of_the_frontend_is_the_end(folder: Path) -> None:
    """It is said which engine noticed."""
    serving = Serving(options_for(folder, engine_count=2, reconnect=False))
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDeadError, match="the frontend has gone")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.run)
            async with open_client(owner(serving.options)) as client:
                await generate(client, "a", 3)


async def test_without_reconnect_the_first_frontend_has_to_come(folder: Path) -> None:
    """Within the time that it is given."""
    serving = Serving(options_for(folder, reconnect=False, startup_timeout=0.1))

    with pytest.raises(EngineDeadError, match="INIT from the frontend") as caught:
        await serving.run()

    assert caught.value.engine_index == 0


async def test_a_frozen_frontend_is_noticed_by_heartbeats(folder: Path) -> None:
    """Its connection stands, but carries nothing any more."""
    options = options_for(folder, reconnect=False, heartbeat_timeout=1.0)
    async with open_context() as context:
        frontend = RawFrontend.bind(context, folder)
        output = frontend.outputs[0].bind("tcp://127.0.0.1:0")
        async with open_proxy(output) as proxy, trio.open_nursery() as nursery:

            async def answer_and_freeze() -> None:
                identity, _ = await frontend.handshake.receive()
                init = encode_init(frontend.init(outputs=[proxy.address]))
                frontend.handshake.send_nowait([identity, *init])
                await frontend.inputs[0].receive()
                while not proxy.connections:  # noqa: ASYNC110 (nobody tells)
                    await trio.sleep(0.01)
                await trio.sleep(0.1)
                proxy.connections[0].freeze()

            nursery.start_soon(answer_and_freeze)
            with pytest.raises(EngineDeadError, match=f"gone .{proxy.address}"):
                await Serving(options).run()


async def test_a_coordinator_costs_descriptors_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all engines need is known once a frontend has answered, and asked for before it is used."""
    asked: list[int] = []

    def require(count: int, purpose: str, *, hint: str = "") -> None:
        asked.append(count)
        if len(asked) > 1:
            raise ConfigurationError(f"{purpose} need {count} file descriptors{hint}")

    monkeypatch.setattr("trio_vllm.mock.serve.require_descriptors", require)
    options = options_for(folder, engine_count=3)
    async with open_context() as context, trio.open_nursery() as nursery:
        frontend = RawFrontend.bind(context, folder, clients=2)

        async def answer() -> None:
            identity, _ = await frontend.handshake.receive()
            coordinator = f"ipc://{folder}/coordinator"
            init = frontend.init(coordinator_input=coordinator, coordinator_output=coordinator)
            frontend.handshake.send_nowait([identity, *encode_init(init)])

        nursery.start_soon(answer)
        with pytest.raises(ConfigurationError, match=r"3 engines need 72 file .*--processes"):
            await Serving(options).run()

    assert asked == [3 * 8, 3 * 8 * 3]


async def test_with_reconnect_engines_wait_for_ever(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And say so."""
    caplog.set_level(logging.INFO, "trio_vllm.mock")
    limits = ServeLimits(report_interval=0.05, retry_delay=0.05)
    serving = Serving(options_for(folder, startup_timeout=0.2, engine_count=2), limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving.run)
        await trio.sleep(0.5)
        log = caplog.text  # from when one has joined, another one may be the first that has not
        async with open_client(owner(serving.options)) as client:
            await generate(client, "a", 3)
        serving.shutdown.set()

    assert "engine 1: startup failed while waiting for INIT" in log
    assert "engine 0: still joining the frontend at" in log
    assert "engine 1: still joining" not in log


@pytest.mark.parametrize("moment", [0.0, 0.1])
async def test_a_shutdown_without_a_frontend(folder: Path, moment: float) -> None:
    """Nothing has to be waited for."""
    serving = Serving(options_for(folder))
    async with trio.open_nursery() as nursery:
        if not moment:
            serving.shutdown.set()
        nursery.start_soon(serving.run)
        await trio.sleep(moment)
        serving.shutdown.set()

    assert serving.summary == Summary()


@pytest.mark.parametrize(
    ("timeout", "max_tokens", "reason"),
    [
        (0.0, 10_000_000, FinishReason.ABORT),
        (0.2, 10_000_000, FinishReason.ABORT),
        (60.0, 100, FinishReason.LENGTH),
    ],
)
async def test_a_shutdown_ends_requests(
    folder: Path, timeout: float, max_tokens: int, reason: FinishReason
) -> None:
    """They are aborted, at once or after a time in which they may end."""
    serving = Serving(
        options_for(folder, shutdown_timeout=timeout),
        step_interval=0.005,
        max_model_len=2**40,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving.run)
        async with open_client(owner(serving.options)) as client:
            async with trio.open_nursery() as beside:

                async def expect_end() -> None:
                    assert reason is await generate(client, "a", max_tokens)

                beside.start_soon(expect_end)
                await trio.sleep(0.1)
                serving.shutdown.set()


async def test_a_shutdown_does_not_wait_for_a_stuck_frontend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes no outputs, not even those that tell it."""
    limits = ServeLimits(
        output_high_water_mark=1, last_outputs_time=0.1, lingers=EngineLingers(outputs=0.1)
    )
    post = EngineRunner.post
    is_stuck = trio.Event()

    def noticed(runner: EngineRunner, messages: Sequence[Outgoing]) -> None:
        post(runner, messages)
        if runner.late_clients:
            is_stuck.set()

    monkeypatch.setattr(EngineRunner, "post", noticed)
    serving = Serving(options_for(folder), limits)
    async with open_context() as context, trio.open_nursery() as nursery:
        frontend = RawFrontend.bind(context, folder)
        nursery.start_soon(serving.run)
        engine_id, _ = await frontend.handshake.receive()
        init = frontend.init(outputs=[f"ipc://{folder}/nobody"])
        await frontend.handshake.send([engine_id, *encode_init(init)])
        await frontend.inputs[0].receive()
        await frontend.inputs[0].send([engine_id, *pack_add(raw_request("a", 1_000_000))])
        await is_stuck.wait()
        serving.shutdown.set()

    assert serving.summary is not None
    assert (serving.summary.requests, serving.summary.aborted) == (1, 1)


async def test_one_crash_ends_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend is told, and the exception says which engine it was."""
    step = MockEngine.step

    def crash(engine: MockEngine, now: float) -> Any:
        if engine.engine_index == 1 and engine.has_unfinished:
            raise ZeroDivisionError("a bug")
        return step(engine, now)

    monkeypatch.setattr(MockEngine, "step", crash)
    serving = Serving(options_for(folder, engine_count=3))
    with pytest.RaisesGroup(
        pytest.RaisesExc(InternalError, match="mock engine 1 crashed")
    ) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.run)
            async with open_client(owner(serving.options)) as client:
                request = EngineCoreRequest(
                    request_id="a",
                    prompt_token_ids=[1],
                    sampling_params=SamplingParams(max_tokens=5),
                    data_parallel_rank=1,
                )
                with pytest.raises(EngineDeadError):
                    async with client.call(request) as outputs:
                        async for _ in outputs:
                            pass

    assert isinstance(caught.value.exceptions[0].__cause__, ZeroDivisionError)


async def test_an_address_that_nobody_can_connect_to() -> None:
    """Is no engine's fault."""
    options = ServeOptions(handshake_address="tcp://*:5555")
    with pytest.raises(ConfigurationError):
        await serve_mock_engines(MockEngineConfig(), options)


def test_an_address_of_a_wrong_form() -> None:
    """Is refused by the options, with the reason."""
    with pytest.raises(ConfigurationError, match="has 1006 characters"):
        ServeOptions(handshake_address="ipc://" + "x" * 1000)


async def test_several_clients_and_what_engines_say_of_themselves(folder: Path) -> None:
    """An engine registers with each client, and answers on the output that a request names."""
    options = options_for(folder, engine_start_index=5)
    config = MockEngineConfig(lockstep=True)
    async with trio.open_nursery() as nursery, open_context() as context:
        frontend = RawFrontend.bind(context, folder, clients=2)
        nursery.start_soon(serve_mock_engines, config, options)
        with trio.fail_after(TIMEOUT):
            engine_id, hello = await frontend.handshake.receive()
            assert engine_id == b"\x05\x00"
            assert decode_report([hello]).status is HandshakeStatus.HELLO
            init = frontend.init(frontend_stats_publish_address="ipc://stats")
            await frontend.handshake.send([engine_id, *encode_init(init)])
            for socket in frontend.inputs:
                _, registration = await socket.receive()
                ready = decode_ready_response([registration])
                assert (ready.data_parallel_rank, ready.data_parallel_size) == (5, 6)
                assert ready.dp_stats_address == "ipc://stats"
            _, report = await frontend.handshake.receive()
            assert decode_report([report]).status is HandshakeStatus.READY
            for client_index in (1, 0):
                raw = raw_request("a", 1, client_index=client_index)
                await frontend.inputs[0].send([engine_id, *pack_add(raw)])
                outputs = decode_outputs(await frontend.outputs[client_index].receive())
                assert isinstance(outputs, RequestBatchOutputs)
                assert outputs.engine_index == 5
                assert [o.finish_reason for o in outputs.outputs] == [FinishReason.LENGTH]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("engine_count", 0),
        ("engine_count", 65_537),
        ("engine_start_index", -1),
        ("engine_start_index", 65_536),
        ("startup_timeout", 0.0),
        ("heartbeat_timeout", 0.0),
        ("shutdown_timeout", -1.0),
        ("handshake_address", "nowhere"),
        ("handshake_address", "tcp://127.0.0.1:0"),
    ],
)
def test_options_that_make_no_sense(option: str, value: Any) -> None:
    """Are refused before anything is started."""
    with pytest.raises(ConfigurationError, match=option):
        ServeOptions(**{option: value})


def test_the_last_engine_has_an_index_too() -> None:
    """Which two bytes must hold."""
    with pytest.raises(ConfigurationError, match="would be 65536"):
        ServeOptions(engine_start_index=65_535, engine_count=2)
