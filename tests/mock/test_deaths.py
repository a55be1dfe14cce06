"""What a real engine does not survive, rule by rule, and what is left of the engine then."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import ormsgpack
import pytest
import trio
from tests.mock.driver import Driver, drive, pack_add, raw_request
from tests.transport.startup import RawFrontend

from trio_vllm import (
    EngineDeadError,
    GenerateRequest,
    HandshakeOwner,
    SamplingParams,
    open_client,
    open_llm,
)
from trio_vllm.concurrency import running
from trio_vllm.errors import PeerGoneError
from trio_vllm.mock import (
    Lockstep,
    MockEngineConfig,
    ServeOptions,
    serve_in_memory,
    serve_mock_engines,
)
from trio_vllm.mock.deaths import PARAMS_RULES, REQUEST_RULES, Thread
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestBatchOutputs,
    decode_outputs,
    encode_init,
)
from trio_vllm.testing import mock_llm
from trio_vllm.transport import FrameReceiver, FrontendChannels, InMemory, Received
from trio_vllm.transport.zmq_context import open_context

POOLING = {"sampling_params": None}
TOKEN_EMBED = [None, None, None, None, "token_embed"]


def late(mode: str, key: str, uses: int | None = None) -> dict[str, Any]:
    """A pooling request that takes part in late interaction."""
    return {**POOLING, "pooling_params": [*TOKEN_EMBED, False, None, [mode, key, uses]]}


MORTAL = {"vocab_size": 100, "max_model_len": 50, "die_like_an_engine": True}

BY_REQUEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # rule: options of the engine, fields of the request
    "an adapter without a path": ({}, {"lora_request": ["x", 1, ""]}),
    "a pooling request that wants its output in parts": (
        {"supported_tasks": ("generate", "embed")},
        {**POOLING, "pooling_params": [*[None] * 4, "embed", False, None, None, None, 0]},
    ),
    "a client_index that no client has": ({}, {"client_index": 1}),
    "an id that is in flight": ({}, {"request_id": "healthy"}),
    "a pooling task that the model does not support": (
        {},
        {**POOLING, "pooling_params": [None, None, None, None, "embed"]},
    ),
    "sampling parameters for a model that only pools": ({"supported_tasks": ("embed",)}, {}),
    "an empty prompt": ({}, {"prompt_token_ids": []}),
    "a prompt that leaves no room in max_model_len": ({}, {"prompt_token_ids": [1] * 50}),
    "prompt_token_ids beyond the vocabulary": ({}, {"prompt_token_ids": [1, 100]}),
    "an adapter that cannot be loaded": (
        {"max_loras": 1, "max_lora_rank": 8},
        {"lora_request": ["x", 1, "/nowhere"]},
    ),
    "stop tokens beyond the vocabulary, with min_tokens": (
        {},
        {"params": {"stop_token_ids": [100], "min_tokens": 1}},
    ),
    "logit_bias beyond the vocabulary": ({}, {"params": {"logit_bias": {100: 1.0}}}),
    "allowed_token_ids beyond the vocabulary": ({}, {"params": {"allowed_token_ids": [100]}}),
    "logprob_token_ids beyond the vocabulary": ({}, {"params": {"logprob_token_ids": [100]}}),
    "more logprobs than the vocabulary has tokens": ({}, {"params": {"logprobs": 101}}),
    "a document of a late-interaction query that is not there": (
        {"supported_tasks": ("generate", "token_embed")},
        late("score_doc", "q"),
    ),
    "a late-interaction query that does not tell its uses": (
        {"supported_tasks": ("generate", "token_embed")},
        late("cache_query", "q"),
    ),
}

BY_PARAMS: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 2.5},
    "frequency_penalty": {"frequency_penalty": -2.5},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "temperature": {"temperature": 3.0},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -2},
    "min_p": {"min_p": 1.5},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"max_tokens": 4, "min_tokens": 5},
    "logprobs": {"logprobs": -2},
    "prompt_logprobs": {"prompt_logprobs": -2},
    "stream_interval": {"stream_interval": 0},
    "n": {"n": 2, "temperature": 0.0},
    "structured_outputs": {"structured_outputs": {"regex": "a", "grammar": "b"}},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2}},
}


def engine_with(is_mortal: bool, **config: Any) -> Driver:
    """An engine with a request that runs, if it generates."""
    driver = drive(**{**MORTAL, "die_like_an_engine": is_mortal, **config})
    if "generate" in driver.engine.config.supported_tasks:
        driver.add("healthy", 5)
        driver.step()
    return driver


def send(driver: Driver, fields: dict[str, Any]) -> None:
    driver.add(
        fields.get("request_id", "bad"), **{k: v for k, v in fields.items() if k != "request_id"}
    )


def test_embeddings_of_no_width_are_no_prompt() -> None:
    """However many they are, an engine could not compute them: refused or deadly as no prompt is."""
    for count in (3, 2**40):
        fields = {"prompt_token_ids": None, "prompt_embeds": ["float32", [count, 0], 1]}
        mortal, immortal = engine_with(True), engine_with(False)
        for driver in (mortal, immortal):
            driver.handle(pack_add(raw_request("bad", **fields), b""))
        immortal.run()

        assert "an empty prompt" in str(mortal.engine.death)
        assert immortal.finish_reason("bad") is FinishReason.ERROR


def test_each_rule_has_a_test() -> None:
    """The table is whole, here too."""
    assert [rule.name for rule in REQUEST_RULES] == [*BY_REQUEST]
    assert [rule.name for rule in PARAMS_RULES] == [*BY_PARAMS]


@pytest.mark.parametrize("rule", REQUEST_RULES, ids=lambda rule: rule.name)
def test_a_request_kills(rule: Any) -> None:
    """The thread that it does, for the reason that it has."""
    config, fields = BY_REQUEST[rule.name]
    driver = engine_with(True, **config)
    send(driver, fields)

    death = driver.engine.death
    assert death is not None
    assert (death.thread, death.reason) == (rule.thread, rule.reason)
    assert rule.name in str(death)
    assert driver.engine.is_dead is (rule.thread is Thread.MAIN)


@pytest.mark.parametrize("name", BY_REQUEST)
def test_without_the_option_a_request_kills_nothing(name: str) -> None:
    """Requests that run come to their end, and new ones are taken."""
    config, fields = BY_REQUEST[name]
    driver = engine_with(False, **config)
    send(driver, fields)
    driver.run()

    assert driver.engine.death is None
    assert driver.call("is_sleeping") is False
    if "generate" in driver.engine.config.supported_tasks:
        driver.add("next", 3)
        driver.run()
        assert driver.finish_reason("healthy") is FinishReason.LENGTH
        assert driver.finish_reason("next") is FinishReason.LENGTH


@pytest.mark.parametrize("name", BY_PARAMS)
@pytest.mark.parametrize("is_mortal", [True, False])
def test_what_a_constructor_refuses_makes_deaf(name: str, is_mortal: bool) -> None:
    """Whether it is seen while the message is decoded, or after that."""
    driver = engine_with(is_mortal)
    params = {"temperature": 1.0, **BY_PARAMS[name]}
    driver.add("bad", params.pop("max_tokens", 4), params=params)

    assert driver.engine.is_deaf is is_mortal
    if is_mortal:
        assert driver.engine.death is not None
        assert driver.engine.death.thread is Thread.INPUT
    driver.run()
    assert driver.finish_reason("healthy") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("frames", "thread"),
    [
        ([b"\x00", b"\xc1"], Thread.INPUT),
        ([b"\x09", b"\x90"], Thread.INPUT),
        ([b"\x03", ormsgpack.packb([0, 1])], Thread.INPUT),
        (pack_add(raw_request("a", "many")), Thread.INPUT),
        (pack_add(raw_request("a", lora_request=["x", 0, "p"])), Thread.INPUT),
        ([b"\x04", b""], Thread.MAIN),
        ([b"\x03", ormsgpack.packb([0, 1, "handle_fault_tolerance", []])], Thread.INPUT),
        ([b"\x03", ormsgpack.packb([7, 1, "is_sleeping", []])], Thread.OUTPUT),
        (
            [b"\x03", ormsgpack.packb([0, 1, "collective_rpc", ["get_kv_cache_spec"]])],
            Thread.OUTPUT,
        ),
        ([b"\x03", ormsgpack.packb([0, 1, "collective_rpc", ["get_model"]])], Thread.OUTPUT),
    ],
)
def test_other_messages_kill_too(frames: list[bytes], thread: Thread) -> None:
    """Those that cannot be read, and some calls; without the option they do not."""
    mortal, immortal = engine_with(True), engine_with(False)
    mortal.handle(frames)
    immortal.handle(frames)

    assert mortal.engine.death is not None
    assert mortal.engine.death.thread is thread
    assert immortal.engine.death is None


def test_a_dead_engine_makes_no_step() -> None:
    """And takes nothing."""
    driver = engine_with(True)
    driver.add("bad", prompt_token_ids=[])

    assert not driver.has_work
    before = len(driver.sent)
    driver.add("late", 3)
    driver.post("is_sleeping")
    assert len(driver.sent) == before


def test_the_first_death_stays() -> None:
    """Whatever comes after it."""
    driver = engine_with(True)
    driver.add("bad", client_index=1)
    driver.handle([b"\x00", b"\xc1"])
    assert driver.engine.is_mute
    assert driver.engine.summary.errors == 1


def test_what_the_engine_answers_kills_nothing() -> None:
    """The input thread guards the making of a request; a paused engine and one that ends refuse."""
    driver = engine_with(True)
    driver.add("no params", sampling_params=None)
    driver.add("no length", None)
    driver.post("pause_generation", "wait")
    driver.add("empty", prompt_token_ids=[])
    driver.engine.shut_down(driver.now, drain=True)
    driver.add("shut", prompt_token_ids=[])

    assert driver.engine.death is None
    reasons = [driver.finish_reason(one) for one in ("no params", "no length", "empty", "shut")]
    assert reasons == [FinishReason.ERROR] * 3 + [FinishReason.ABORT]


def test_what_is_aborted_at_once_never_runs() -> None:
    """So that only what kills in the queue does."""
    driver = engine_with(True)
    driver.add("a", prompt_token_ids=[], abort_immediately=True)
    assert driver.engine.death is None
    driver.add("healthy", abort_immediately=True)
    assert driver.engine.is_dead


def test_a_query_is_kept_for_its_documents() -> None:
    """As many as it says."""
    driver = drive(supported_tasks=("token_embed",), die_like_an_engine=True)
    driver.add("query", **late("cache_query", "q", 2))
    for name in ("one", "two"):
        driver.add(name, **late("score_doc", "q"))
        assert driver.engine.death is None
    driver.add("three", **late("score_doc", "q"))
    assert driver.engine.is_dead


# Adapters ---------------------------------------------------------------------------------------


def adapter(folder: Path, **config: Any) -> str:
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({}, None),
        ({"r": 16}, "LoRA rank 16 is greater than max_lora_rank 8."),
        ({"rank_pattern": {"q_proj": 9}}, "LoRA rank 9 is greater than max_lora_rank 8."),
        ({"bias": "all"}, "Adapter bias is not supported."),
        ({"r": 0}, "LoRA rank `r` must be a positive integer, got 0."),
        ({"r": None}, "Missing required configuration fields: {'r'}"),
    ],
)
def test_adapters_are_looked_at(tmp_path: Path, config: dict[str, Any], fault: str | None) -> None:
    """By a call and by a request, in the engine's words; an adapter that is loaded is not again."""
    path = adapter(tmp_path, **config)
    driver = drive(max_loras=1, max_lora_rank=8)
    driver.add("a", 1, lora_request=["x", 1, path])
    driver.run()
    if fault is None:
        assert driver.finish_reason("a") is FinishReason.LENGTH
        (tmp_path / "adapter_config.json").unlink()
        assert driver.call("add_lora", ["x", 1, path]) is True
        assert "No adapter found" in driver.fail("add_lora", ["x", 1, path, None, True])
        return
    (output,) = driver.outputs("a")
    assert output.error is not None
    assert output.error.message == fault
    assert f"Worker failed with error '{fault}'" in driver.fail("add_lora", ["x", 1, path])
    assert driver.call("list_loras") == []


def test_an_adapter_that_is_not_there() -> None:
    """Only with a rank given: without one, any adapter will do."""
    fault = "Loading lora x failed: No adapter found for /nowhere"
    assert fault in drive(max_loras=1, max_lora_rank=8).fail("add_lora", ["x", 1, "/nowhere"])
    assert drive(max_loras=1).call("add_lora", ["x", 1, "/nowhere"]) is True


# What clients see -------------------------------------------------------------------------------


MORTAL_CONFIG = MockEngineConfig(die_like_an_engine=True, step_interval=0.005)


async def test_a_client_in_memory_sees_an_engine_die(autojump_clock: object) -> None:
    """And its other requests with it."""
    async with mock_llm(MORTAL_CONFIG) as mock:
        async with trio.open_nursery() as nursery:

            async def run(prompt: list[int]) -> None:
                params = SamplingParams(max_tokens=1000)
                with pytest.raises(EngineDeadError):
                    await mock.llm.generate(GenerateRequest(prompt, sampling_params=params))

            nursery.start_soon(run, [1, 2])
            await trio.sleep(2.5)
            nursery.start_soon(run, [1, 32_000])
        assert not mock.llm.client.is_healthy


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for sockets."""
    with tempfile.TemporaryDirectory(prefix="mock-") as name:
        yield Path(name)


async def test_a_client_sees_the_farewell_and_the_process_fails(folder: Path) -> None:
    """Over sockets."""
    options = ServeOptions(handshake_address=f"ipc://{folder}/handshake")
    owner = HandshakeOwner(handshake_address=options.handshake_address, ready_timeout=20)
    failure = pytest.RaisesExc(EngineDeadError, match="beyond the vocabulary: the embedding")
    with trio.fail_after(20), pytest.RaisesGroup(failure):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_mock_engines, MORTAL_CONFIG, options)
            async with open_llm(owner) as llm:
                with pytest.raises(EngineDeadError):
                    await llm.generate(GenerateRequest([1, 32_000]))


DEAF = [b"\x00", b"\xc1"]
MUTE = pack_add(raw_request("b", client_index=1))


@asynccontextmanager
async def frontend_of(folder: Path, config: MockEngineConfig) -> AsyncIterator[tuple[Any, bytes]]:
    """A frontend without a client, and the id of its engine, which must fail when it is left."""
    options = ServeOptions(handshake_address=f"ipc://{folder}/handshake")
    failure = pytest.RaisesExc(EngineDeadError, match="the frontend has gone after")
    with trio.fail_after(20), pytest.RaisesGroup(failure):
        async with trio.open_nursery() as nursery, open_context() as context:
            frontend = RawFrontend.bind(context, folder)
            nursery.start_soon(serve_mock_engines, config, options)
            engine_id, _ = await frontend.handshake.receive()
            await frontend.handshake.send([engine_id, *encode_init(frontend.init())])
            await frontend.inputs[0].receive()
            await frontend.handshake.receive()
            yield frontend, bytes(engine_id)


async def read_to_end(frontend: Any) -> list[EngineCoreOutput]:
    """The outputs up to the first that is a last one."""
    outputs: list[EngineCoreOutput] = []
    while not outputs or not outputs[-1].finished:
        batch = decode_outputs(await frontend.outputs[0].receive())
        assert isinstance(batch, RequestBatchOutputs)
        outputs += batch.outputs
    return outputs


async def test_a_deaf_engine_finishes_and_hangs_up(folder: Path) -> None:
    """It closes the connections by which requests come, and only those."""
    async with frontend_of(folder, MORTAL_CONFIG) as (frontend, engine_id):
        await frontend.inputs[0].send([engine_id, *pack_add(raw_request("a", 20))])
        await frontend.inputs[0].send([engine_id, *DEAF])

        assert len(await read_to_end(frontend)) == 20
        with pytest.raises(PeerGoneError):
            while True:
                await frontend.inputs[0].send([engine_id, *pack_add(raw_request("b", 20))])
                await trio.sleep(0.01)
        with trio.move_on_after(0.1):
            outputs = decode_outputs(await frontend.outputs[0].receive())
            assert isinstance(outputs, RequestBatchOutputs)
            assert outputs.outputs == []  # statistics are all that comes
        frontend.close()


async def test_a_mute_engine_listens_and_says_nothing(folder: Path) -> None:
    """The connection of its outputs is closed, that of its inputs is not."""
    async with frontend_of(folder, MORTAL_CONFIG) as (frontend, engine_id):
        await frontend.inputs[0].send([engine_id, *MUTE])
        await trio.sleep(0.1)
        await frontend.inputs[0].send([engine_id, *pack_add(raw_request("a", 2))])

        with trio.move_on_after(0.2) as patience:
            await read_to_end(frontend)
        assert patience.cancelled_caught
        frontend.close()


@pytest.mark.parametrize("frames", [DEAF, MUTE])
async def test_in_memory_connections_break_too(autojump_clock: object, frames: list[bytes]) -> None:
    """So that a client is told, which has sent nothing of the kind itself."""

    def tap(channels: FrontendChannels) -> FrontendChannels:
        return attrs.evolve(channels, inputs=[_Poisoned(channels.inputs[0], frames)])

    meeting = InMemory()
    serve = partial(serve_in_memory, MORTAL_CONFIG, meeting, 0, lockstep=Lockstep(), tap=tap)
    async with running(serve), open_client(meeting) as client:
        with pytest.raises(EngineDeadError):
            async with client.call(
                EngineCoreRequest(
                    request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams()
                )
            ) as outputs:
                async for _ in outputs:
                    pass
                # A deaf engine gives this one its tokens.
                await client.is_sleeping()


@attrs.frozen
class _Poisoned:
    """An input with a message behind each request."""

    _receiver: FrameReceiver
    _poison: list[bytes]

    async def receive_batch(self, limit: int) -> list[Received]:
        batch = await self._receiver.receive_batch(limit)
        is_add = any(frames[0] == b"\x00" for frames, _ in batch)
        return [*batch, (self._poison, None)] if is_add else batch

    def receive_batch_nowait(self, limit: int) -> list[Received]:
        return self._receiver.receive_batch_nowait(limit)
