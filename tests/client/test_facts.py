"""What is found out of engines before they are trusted with a request."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.client.cores import CountingWaiter, Network, RecordingSink
from tests.client.pair import open_pair
from tests.client.scripted import Failure, scripted_engines
from tests.client.world import World, hand_driven, make_request, open_world
from trio.testing import wait_all_tasks_blocked

from trio_vllm import open_llm
from trio_vllm.client import EngineCoreClient, OutputStream
from trio_vllm.errors import AdapterError, InvalidFieldError, UnsupportedFieldError
from trio_vllm.mock import MockEngineConfig
from trio_vllm.protocol import (
    EngineCoreRequest,
    FinishReason,
    LateInteractionParams,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)


async def run(client: EngineCoreClient, request: EngineCoreRequest) -> int:
    async with client.call(request) as outputs:
        return sum([len(item.output.new_token_ids) async for item in outputs])


def biased(token_id: int, request_id: str = "r") -> EngineCoreRequest:
    params = SamplingParams(max_tokens=2, logit_bias={token_id: 1.0})
    return make_request(request_id, sampling_params=params)


async def test_vocabulary_is_found_out_once_and_only_if_needed() -> None:
    async with open_pair(vocab_size=500) as (world, mocks):
        client = world.client
        await run(client, make_request(sampling_params=SamplingParams(max_tokens=2)))
        before = client.driver.core.facts.limits
        assert before.vocab_size is None

        with pytest.raises(InvalidFieldError, match="vocabulary of 500"):
            await run(client, biased(500))
        after = client.driver.core.facts.limits
        assert after.vocab_size == 500
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(run, client, biased(499, f"r{number}"))
        assert mocks[0].summary.requests == 1 + 1 + 3


ADAPTER = LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a")


def adapted(adapter: LoRARequest = ADAPTER, request_id: str = "r") -> EngineCoreRequest:
    return make_request(request_id, lora_request=adapter)


async def call(client: EngineCoreClient, request: EngineCoreRequest) -> None:
    async with client.call(request):
        pass


async def test_adapter_is_loaded_once_and_its_id_belongs_to_it() -> None:
    answers: dict[str, Any] = {"add_lora": True, "remove_lora": True}
    async with scripted_engines(answers, ["0.33.0"] * 2) as (client, engines):
        client.driver.core.facts.learn(supports_lora=True)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(call, client, adapted(request_id=f"r{number}"))
        assert [[name for name, _ in calls] for calls in engines.calls.values()] == [
            ["add_lora"]
        ] * 2

        other = LoRARequest(lora_name="a", lora_int_id=1, lora_path="/b")
        with pytest.raises(InvalidFieldError, match="take another id"):
            await call(client, adapted(other))
        await client.remove_lora(1)
        await call(client, adapted(other))
        assert [name for name, _ in engines.calls[0]] == ["add_lora", "remove_lora", "add_lora"]


async def test_adapter_that_does_not_load_is_the_error_of_its_request() -> None:
    async with scripted_engines({"add_lora": Failure("no such file")}) as (client, _):
        client.driver.core.facts.learn(supports_lora=True)
        with pytest.raises(AdapterError, match="no such file"):
            await call(client, adapted())


STATED: dict[str, Any] = {
    "vocab_size": 5,
    "hidden_size": 6,
    "embedding_size": 7,
    "is_multimodal": True,
    "accepts_prompt_embeds": True,
    "model_runner_v2": False,
}


async def test_what_the_caller_states_is_known() -> None:
    source = hand_driven()

    async def answer() -> None:
        await wait_all_tasks_blocked()
        (engine,) = source.engines
        await engine.answer(engine.call().call_id, ["generate"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        async with open_llm(source, **STATED) as llm:
            limits = llm.client.driver.core.facts.limits

    assert {name: getattr(limits, name) for name in STATED} == STATED


# Structured outputs --------------------------------------------------------------------------------


def constrained(
    backend: str, request_id: str = "r", *, rank: int | None = None
) -> EngineCoreRequest:
    constraint = StructuredOutputsParams(regex="a", backend=backend)
    params = SamplingParams(max_tokens=2, structured_outputs=constraint)
    return make_request(request_id, sampling_params=params, data_parallel_rank=rank)


def engine_of(world: World, request: EngineCoreRequest) -> int:
    """Which engine gets a request."""
    stream = OutputStream(request.request_id)
    world.client.driver.submit(request, stream)
    return stream.engine_index


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1"])
@pytest.mark.parametrize("rank", [None, 0])
async def test_an_engine_keeps_its_first_backend(version: str, rank: int | None) -> None:
    async with open_world(vllm_version=version) as world:
        engine_of(world, constrained("xgrammar"))
        with pytest.raises(UnsupportedFieldError, match="must be xgrammar, not guidance") as caught:
            engine_of(world, constrained("guidance", "other", rank=rank))
        engine_of(world, constrained("xgrammar", "same", rank=rank))
        engine_of(world, make_request("plain"))

        assert caught.value.field == "sampling_params.structured_outputs.backend"
        assert caught.value.request_id == "other"
        assert list(world.client.statistics().requests_in_flight.values()) == [3]


async def test_later_engines_may_take_several_backends() -> None:
    async with open_world(vllm_version="0.34.0") as world:
        engine_of(world, constrained("xgrammar"))

        assert engine_of(world, constrained("guidance", "other")) == 0


async def test_each_engine_may_have_another_backend() -> None:
    async with open_world(2, vllm_version="0.33.0") as world:
        engine_of(world, constrained("guidance"))
        requests = [
            constrained("xgrammar", "x"),
            *[constrained("guidance", f"g{n}") for n in "123"],
        ]

        assert [engine_of(world, request) for request in requests] == [1, 0, 0, 0]
        with pytest.raises(
            UnsupportedFieldError, match="must be guidance or xgrammar, not outlines"
        ):
            engine_of(world, constrained("outlines", "o"))
        with pytest.raises(UnsupportedFieldError, match="must be guidance, not xgrammar"):
            engine_of(world, constrained("xgrammar", "pinned", rank=0))


async def test_backend_that_an_engine_fails_with_at_first_is_not_its_own() -> None:
    """It may not be installed there."""
    async with open_world(vllm_version="0.33.0") as world:
        engine_of(world, constrained("outlines", "first"))
        await world.engine.emit("first", [], FinishReason.ERROR)
        engine_of(world, constrained("guidance", "second"))
        await world.engine.emit("second", [7], FinishReason.STOP)
        engine_of(world, constrained("guidance", "second"))
        await world.engine.emit("second", [], FinishReason.ERROR)

        with pytest.raises(UnsupportedFieldError, match="must be guidance, not outlines"):
            engine_of(world, constrained("outlines", "third"))


async def test_request_moves_to_an_engine_that_has_its_backend() -> None:
    async with open_world(3, vllm_version="0.33.0") as world:
        engine_of(world, constrained("xgrammar", "a", rank=0))
        engine_of(world, constrained("guidance", "b", rank=1))
        await world.engines[0].emit("a", [7], FinishReason.STOP)
        world.engines[0].vanish()

        assert engine_of(world, constrained("xgrammar", "c")) == 2
        assert engine_of(world, constrained("guidance", "d")) == 1


# Without trio ------------------------------------------------------------------------------------


def submit(net: Network, request: EngineCoreRequest) -> RecordingSink:
    sink = RecordingSink(request)
    net.submit(request, sink)
    return sink


def finish(net: Network) -> None:
    """Let all engines do what there is to do."""
    for _ in range(10):
        net.send()
        for engine in net.engines:
            while engine.inbox:
                engine.take(net.now)
            engine.step(net.now)
            while engine.outbox:
                net.deliver_output(engine)


def scored(mode: str, request_id: str, **fields: Any) -> EngineCoreRequest:
    uses = 2 if mode == "cache_query" else None
    late: Any = LateInteractionParams(mode=mode, query_key="query", query_uses=uses)
    pooling = PoolingParams(task="token_embed", late_interaction_params=late)
    return make_request(request_id, sampling_params=None, pooling_params=pooling, **fields)


def test_documents_follow_their_query() -> None:
    net = Network(3, MockEngineConfig(supported_tasks=("token_embed",)))
    with pytest.raises(InvalidFieldError, match="is of no query"):
        submit(net, scored("score_doc", "early"))
    query = submit(net, scored("cache_query", "q"))
    finish(net)
    with pytest.raises(InvalidFieldError, match="must be 2"):
        submit(net, scored("score_doc", "pinned", data_parallel_rank=0))
    documents = [submit(net, scored("score_doc", f"d{number}")) for number in range(2)]

    assert [sink.engine_index for sink in [query, *documents]] == [2, 2, 2]
    with pytest.raises(InvalidFieldError, match="is of no query"):
        submit(net, scored("score_doc", "late"))


@pytest.mark.parametrize(
    ("method", "args", "clears"),
    [
        ("reset_mm_cache", [], True),
        ("reset_encoder_cache", [], True),
        ("collective_rpc", ["reset_encoder_cache", None, [], {}], True),
        ("collective_rpc", ["check_health", None, [], {}], False),
        ("pause_scheduler", ["wait"], True),
        ("pause_generation", ["keep", False], False),
        ("sleep", [1, "abort"], True),
        ("sleep", [0, "abort"], False),
        ("reset_prefix_cache", [], False),
    ],
)
def test_queries_go_with_the_caches(method: str, args: list[Any], clears: bool) -> None:
    """A document that comes later is refused, or else the engine still has its query."""
    net = Network(1, MockEngineConfig(supported_tasks=("token_embed",)))
    submit(net, scored("cache_query", "q"))
    finish(net)
    for name, given in ((method, args), ("resume_scheduler", [])):
        net.client.call_utility(name, given, CountingWaiter())
        net.send_urgent()
        finish(net)

    if clears:
        with pytest.raises(InvalidFieldError, match="is of no query"):
            submit(net, scored("score_doc", "d"))
    else:
        document = submit(net, scored("score_doc", "d"))
        finish(net)
        assert document.end is FinishReason.STOP


@pytest.mark.parametrize("method", ["pause_scheduler", "reset_mm_cache"])
def test_query_under_way_counts_no_more_once_caches_are_cleared(method: str) -> None:
    """Its answer may come first, and a document for it would then kill the engine."""
    net = Network(1, MockEngineConfig(supported_tasks=("token_embed",)))
    query = submit(net, scored("cache_query", "q"))
    net.send()
    for name in (method, "resume_scheduler"):
        net.client.call_utility(
            name, ["wait"] if name == "pause_scheduler" else [], CountingWaiter()
        )
        finish(net)

    assert query.end is FinishReason.STOP
    with pytest.raises(InvalidFieldError, match="is of no query"):
        submit(net, scored("score_doc", "d"))


def chunk(**fields: Any) -> EngineCoreRequest:
    return make_request("s", sampling_params=SamplingParams(max_tokens=2), **fields)


def test_chunks_follow_their_session_and_its_end_is_ours() -> None:
    net = Network(2, MockEngineConfig())
    submit(net, make_request("other", sampling_params=SamplingParams(max_tokens=9999)))
    first = submit(net, chunk(resumable=True))
    finish(net)
    more = [submit(net, make_request(f"m{number}")) for number in range(3)]
    assert first.end is FinishReason.LENGTH
    with pytest.raises(InvalidFieldError, match="chunks before"):
        submit(net, chunk(resumable=True, data_parallel_rank=0))
    second = submit(net, chunk(resumable=True))
    finish(net)
    last = submit(net, chunk())

    assert [first.engine_index, second.engine_index, last.engine_index] == [1, 1, 1]
    assert (len(second.token_ids), last.token_ids, last.end) == (2, [], FinishReason.STOP)
    assert {sink.engine_index for sink in more} == {0, 1}


def test_request_that_is_aborted_as_it_comes_ends() -> None:
    net = Network(1, MockEngineConfig())
    sink = submit(net, make_request("a", abort_immediately=True))

    assert sink.end is FinishReason.ABORT
    assert net.client.in_flight_count == 0


def test_adapter_that_was_not_prepared_is_refused() -> None:
    net = Network(1, MockEngineConfig(max_loras=1))
    net.client.facts.learn(supports_lora=True)
    with pytest.raises(UnsupportedFieldError, match="has not been loaded"):
        submit(net, adapted())


def test_engine_that_runs_nothing_is_stalled(caplog: pytest.LogCaptureFixture) -> None:
    net = Network(1, MockEngineConfig(), stall_time=4)
    sink = submit(net, make_request("a"))
    net.pass_time(3)
    assert net.client.stalled_engines == []
    net.pass_time(3)

    assert net.client.stalled_engines == [0]
    assert caplog.text.count("has sent no output for 4 s") == 1
    finish(net)
    assert sink.token_ids != []
    assert net.client.stalled_engines == []
    net.client.abort_all()
    net.pass_time(9)
    assert net.client.next_deadline > net.now + 1e9
