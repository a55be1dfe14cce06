"""What follows for the whole from what each engine said when it registered."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.world import hand_driven, make_request, open_world
from tests.ready import ready_response

from trio_vllm.client import EngineInfo, HandshakeOwner, OutputStream, open_client
from trio_vllm.errors import ClientClosedError, ConfigurationError, InvalidFieldError
from trio_vllm.protocol import KvEventsConfig, SchedulerStats
from trio_vllm.transport import InMemory


def fleet(*changes: dict[str, Any]) -> EngineInfo:
    return EngineInfo.of({index: ready_response(index, **c) for index, c in enumerate(changes)})


EVENTS = KvEventsConfig(enable_kv_cache_events=True)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("max_model_len", (512, 400), 400),
        ("num_gpu_blocks", (100, 50), 150),
        ("max_num_seqs", (8, 4), 12),
        ("block_size", (16, 32), 16),
        ("vllm_version", ("0.33.0", "0.32.0"), "0.33.0"),
        ("world_size", (4, 4), 4),
        ("data_parallel_size", (2, 2), 2),
        ("supports_lora", (True, False), False),
        ("max_loras", (4, 2), 2),
        ("enable_sleep_mode", (True, True), True),
        ("enable_sleep_mode", (True, False), False),
        ("supports_draft_weight_updates", (False, True), False),
        ("kv_cache_size_tokens", (None, 7), 7),
        ("kv_cache_max_concurrency", (1.5, 2.5), 1.5),
        ("kv_cache_max_concurrency", (None, None), None),
        ("kv_events_config", (None, EVENTS), EVENTS),
        ("weight_transfer_backend", (None, "nccl"), "nccl"),
        ("effective_attention_block_size", (16, 16), 16),
        ("effective_attention_block_size", (16, 32), None),
    ],
)
def test_figures(name: str, values: tuple[object, object], expected: object) -> None:
    assert getattr(fleet(*({name: value} for value in values)), name) == expected


def test_the_model_dtype_is_the_engines() -> None:
    assert fleet({"dtype": "bfloat16"}).model_dtype == "bfloat16"


def test_requests_must_suit_every_engine() -> None:
    engines = fleet({"max_model_len": 9, "supports_lora": True}, {"supports_lora": False})
    limits = engines.limits(vocab_size=7)

    assert (limits.max_model_len, limits.vocab_size, limits.supports_lora) == (9, 7, False)


async def test_the_client_passes_on_what_is_asked_most() -> None:
    async with open_world(2, max_model_len=99, dtype="float16", vllm_version="0.32.0") as world:
        client = world.client

        assert (
            client.max_model_len,
            client.model_dtype,
            client.vllm_version,
        ) == (99, "float16", "0.32.0")
        assert (client.input_address, client.output_address) == ("memory:in", "memory:out")
        assert client.engine_identities == [b"\x00\x00", b"\x01\x00"]
        assert client.engine_indices == [0, 1]
        assert client.in_flight_count == 0


async def test_statistics_of_the_newest_message_by_engine() -> None:
    async with open_world(2) as world:
        assert world.client.scheduler_stats() == {}
        await world.engines[1].report(running=1)
        await world.engines[1].report(running=2, waiting=3, kv_cache_usage=0.5)
        await world.engines[1].send()

        stats = world.client.scheduler_stats()

        assert list(stats) == [1]
        assert (
            stats[1].num_running_reqs,
            stats[1].num_waiting_reqs,
            stats[1].kv_cache_usage,
        ) == (2, 3, 0.5)


async def test_a_listener_hears_all_statistics() -> None:
    heard: list[tuple[int, int]] = []
    async with open_world() as world:
        await world.engine.report(running=1)
        world.client.on_scheduler_stats(
            lambda engine_index, stats: heard.append((engine_index, stats.num_running_reqs))
        )
        await world.engine.report(running=2)
        await world.engine.send()
        await world.engine.report(running=3)

    assert heard == [(0, 2), (0, 3)]


async def test_several_listeners_hear_the_same() -> None:
    """Until each is removed."""
    heard: list[tuple[str, int]] = []
    async with open_world() as world:
        client = world.client
        remove_a = client.on_scheduler_stats(lambda _, s: heard.append(("a", s.num_running_reqs)))
        remove_b = client.on_scheduler_stats(lambda _, s: heard.append(("b", s.num_running_reqs)))
        await world.engine.report(running=1)
        remove_a()
        remove_a()
        await world.engine.report(running=2)
        remove_b()
        await world.engine.report(running=3)

    assert heard == [("a", 1), ("b", 1), ("b", 2)]


async def test_a_listener_may_remove_itself() -> None:
    heard: list[int] = []
    async with open_world() as world:

        def listen(_: int, stats: SchedulerStats) -> None:
            heard.append(stats.num_running_reqs)
            remove()

        remove = world.client.on_scheduler_stats(listen)
        world.client.on_scheduler_stats(lambda _, stats: heard.append(stats.num_running_reqs))
        await world.engine.report(running=1)
        await world.engine.report(running=2)

    assert heard == [1, 1, 2]


async def test_open_client_drives_the_engines_of_its_source() -> None:
    source = hand_driven()
    options: dict[str, Any] = {"client_index": 2, "vocab_size": 10, "learning_timeout": 0.0}
    async with open_client(source, **options) as client:
        client.driver.submit(make_request(), OutputStream("r"))
        with pytest.raises(InvalidFieldError, match="vocabulary"):
            client.driver.submit(make_request("s", prompt_token_ids=[10]), OutputStream("s"))
        assert [request.client_index for request in source.engines[0].requests()] == [2]
    assert isinstance(client.failure, ClientClosedError)


@pytest.mark.parametrize("client_index", [1, -1])
async def test_engines_of_our_handshake_know_one_client(client_index: int) -> None:
    for mode in (HandshakeOwner(handshake_address="tcp://127.0.0.1:1"), InMemory()):
        with pytest.raises(ConfigurationError, match="one output address"):
            async with open_client(mode, client_index=client_index):
                raise AssertionError("nobody would answer")
