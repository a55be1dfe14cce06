"""KV-cache events on real sockets, as a router subscribes to them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
import trio
from tests.mock.driver import drive
from tests.mock.test_serve import Serving, options_for, owner

from trio_vllm import (
    ConfigurationError,
    EngineCoreClient,
    EngineCoreRequest,
    SamplingParams,
    open_client,
)
from trio_vllm.errors import AddressInUseError
from trio_vllm.mock import MockEngineConfig
from trio_vllm.mock.block_hashes import BlockHasher, event_hash
from trio_vllm.mock.publishing import publishing_kv_events
from trio_vllm.transport.zmq_context import SocketType, open_context

SUBSCRIBE_TO_ALL = b"\x01"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for sockets."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


def events_config(folder: Path, **fields: Any) -> str:
    """JSON as upstream reads it."""
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
            "topic": "kv-events",
            **fields,
        }
    )


async def generate(client: EngineCoreClient, request_id: str, prompt: list[int]) -> None:
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
    )
    async with client.call(request) as outputs:
        async for _ in outputs:
            pass


async def test_events_are_published_and_repeated(folder: Path) -> None:
    """Topic, number and batch; the hashes are those of sha256_cbor with the seed."""
    serving = Serving(
        options_for(folder),
        kv_events_config=events_config(folder),
        prefix_caching_hash_algo="sha256_cbor",
        prefix_caching_hash_seed="0",
        block_size=4,
        max_model_len=64,
    )
    async with trio.open_nursery() as nursery, open_context() as context:
        nursery.start_soon(serving.run)
        subscriber = context.socket(SocketType.XSUB)
        subscriber.connect(f"ipc://{folder}/events")
        subscriber.send_nowait([SUBSCRIBE_TO_ALL])
        async with open_client(owner(serving.options)) as client:
            for number in range(100):  # what comes before a subscriber is there is lost to it
                await generate(client, f"r{number}", list(range(number, number + 9)))
                with trio.move_on_after(0.1):
                    batches = [[bytes(frame) for frame in await subscriber.receive()]]
                    break
            prompt = list(range(500, 509))
            await generate(client, "last", prompt)
            with trio.fail_after(10):
                batches.append([bytes(frame) for frame in await subscriber.receive()])
            asking = context.socket(SocketType.DEALER)
            asking.connect(f"ipc://{folder}/replay")
            asking.send_nowait([b"", number.to_bytes(8, "big")])
            with trio.fail_after(10):
                answers = [[bytes(f) for f in await asking.receive()] for _ in range(3)]
            serving.shutdown.set()

    assert [batch[:2] for batch in batches] == [
        [b"kv-events", one.to_bytes(8, "big")] for one in (number, number + 1)
    ]
    _, (stored,), rank = ormsgpack.unpackb(batches[1][2])
    hasher = BlockHasher("sha256_cbor", "0")
    first = hasher.hash_block(None, prompt[:4], None)
    second = hasher.hash_block(first, prompt[4:8], None)
    assert rank == 0
    assert stored["type"] == "BlockStored"
    assert stored["block_hashes"] == [event_hash(first), event_hash(second)]
    assert stored["token_ids"] == prompt[:8]
    assert answers == [
        [b"", *batches[0]],
        [b"", *batches[1]],
        [b"", b"", (-1).to_bytes(8, "big", signed=True), b""],
    ]


async def test_each_engine_has_its_own_port(folder: Path) -> None:
    """Which an address without a port cannot have."""
    events = events_config(folder)
    with pytest.raises(ConfigurationError, match="as several engines take"):
        async with publishing_kv_events(MockEngineConfig(kv_events_config=events), 1):
            pass


async def test_a_taken_address_is_told(folder: Path) -> None:
    """Rather than that nobody hears of events."""
    config = MockEngineConfig(kv_events_config=events_config(folder))
    async with publishing_kv_events(config, 0):
        with pytest.raises(AddressInUseError):
            async with publishing_kv_events(config, 0):
                pass


@pytest.mark.parametrize(
    "events", [None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}']
)
async def test_nothing_is_opened_unless_asked_for(events: str | None) -> None:
    """As upstream decides it."""
    config = MockEngineConfig(kv_events_config=events)
    async with publishing_kv_events(config, 0) as feed:
        assert feed is None
    driver = drive(kv_events_config=events, schedule=True)
    driver.add("a", 1, prompt_token_ids=list(range(100)))
    driver.run()
    assert driver.engine.pop_kv_events() == []


def test_events_take_a_schedule() -> None:
    """Nothing is cached without one."""
    events = '{"enable_kv_cache_events": true}'
    with pytest.raises(ConfigurationError, match="kv_events_config takes a schedule"):
        MockEngineConfig(kv_events_config=events, schedule=False)
    assert MockEngineConfig(kv_events_config="{}", schedule=False).kv_events is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "must be a JSON object"),
        ("{", "must be JSON"),
        ('{"port": 1}', "unknown key 'port'"),
        ('{"hwm": "many"}', "wrong hwm"),
        ('{"buffer_steps": -1}', "wrong buffer_steps"),
        ('{"enable_kv_cache_events": 1}', "wrong enable_kv_cache_events"),
        ('{"publisher": "kafka"}', "knows the publishers zmq and null"),
    ],
)
def test_unusable_configurations_are_refused(text: str, reason: str) -> None:
    """With what is wrong."""
    with pytest.raises(ConfigurationError, match=reason):
        MockEngineConfig(kv_events_config=text)
