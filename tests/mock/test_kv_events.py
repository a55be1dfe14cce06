"""KV-cache events without a cache: messages, replay, endpoints."""

import ormsgpack
import pytest

from trio_vllm.mock.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    offset_port,
)

REPLAY_FROM_1 = [b"me", b"", (1).to_bytes(8, "big")]


def test_batches_are_numbered() -> None:
    """Topic, sequence number, and time, events and rank."""
    publisher = EventPublisher(ormsgpack.packb, topic="kv", data_parallel_rank=3)
    publisher.publish([AllBlocksCleared()], 1.5)
    topic, number, payload = publisher.publish([BlockRemoved(7)], 2.5)
    assert (topic, number) == (b"kv", bytes(7) + b"\x01")
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
    assert ormsgpack.unpackb(payload) == [2.5, [removed], 3]


def test_session_of_stored_blocks_is_told() -> None:
    """Only of requests that have one."""
    stored = BlockStored(
        block_hashes=[1], parent_block_hash=None, token_ids=[2], block_size=1, extra_keys=[None]
    )
    assert "session_id" not in stored.to_wire()
    stored.session_id = "s"
    assert stored.to_wire()["session_id"] == "s"


def test_replay_begins_where_it_is_asked_to() -> None:
    """Each batch again, and an end."""
    publisher = EventPublisher(ormsgpack.packb, topic="kv")
    batches = [publisher.publish([AllBlocksCleared()], float(time)) for time in range(3)]
    answers = list(publisher.replay(REPLAY_FROM_1))
    again = [[b"me", b"", *frames] for frames in batches[1:]]
    assert answers == [*again, [b"me", b"", b"", END_OF_REPLAY, b""]]


def test_replay_has_only_the_newest_batches() -> None:
    """Older ones are dropped."""
    publisher = EventPublisher(ormsgpack.packb, buffer_steps=1)
    for time in range(4):
        publisher.publish([AllBlocksCleared()], float(time))
    numbers = [frames[3] for frames in publisher.replay(REPLAY_FROM_1)]
    assert numbers == [(3).to_bytes(8, "big"), END_OF_REPLAY]


def test_malformed_replay_request_has_no_answer() -> None:
    """Upstream logs it and goes on."""
    publisher = EventPublisher(ormsgpack.packb)
    assert list(publisher.replay([b"me", b"from the start"])) == []


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("tcp://*:0", "tcp://*:0"),
        ("inproc://cache", "inproc://cache_dp2"),
        ("", ""),
    ],
)
def test_each_rank_has_its_endpoint(endpoint: str, expected: str) -> None:
    """Ports count up; port 0 is left to the system."""
    assert offset_port(endpoint, 2) == expected
    assert offset_port(endpoint, 0) == endpoint


def test_endpoint_of_another_kind_is_refused() -> None:
    """As upstream does."""
    with pytest.raises(ValueError, match="ipc:///tmp/x"):
        offset_port("ipc:///tmp/x", 1)
