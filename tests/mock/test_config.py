"""What a mock engine may be told."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trio_vllm import ConfigurationError
from trio_vllm.mock import MockEngineConfig, Summary, ready_response
from trio_vllm.mock.engine import data_parallel_size
from trio_vllm.protocol import (
    EngineAddresses,
    HandshakeInit,
    decode_ready_response,
    encode_ready_response,
)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", 2**31 + 1),
        ("output_token_chunk_size", 0),
        ("output_token_chunk_size", 65_536),
        ("seed", -1),
        ("seed", 2**64),
        ("max_model_len", 0),
        ("embedding_size", 0),
        ("block_size", 0),
        ("num_gpu_blocks", -1),
        ("max_loras", -1),
        ("dtype", "int8"),
        ("kv_cache_size_tokens", -1),
        ("step_interval", -1.0),
        ("step_interval", float("nan")),
        ("vocab_size", "many"),
    ],
)
def test_nonsense_is_refused(option: str, value: Any) -> None:
    """At construction, not when it hurts."""
    with pytest.raises(ConfigurationError, match=option):
        MockEngineConfig(**{option: value})


def test_what_an_engine_registers_with() -> None:
    """The figures of the configuration, and what depends on the frontend."""
    config = MockEngineConfig(
        max_model_len=77,
        num_gpu_blocks=5,
        block_size=32,
        max_num_seqs=9,
        max_num_batched_tokens=99,
        dtype="bfloat16",
        vllm_version="0.1",
        instance_id="me",
        max_loras=3,
        kv_cache_size_tokens=160,
        enable_sleep_mode=False,
    )
    ready = ready_response(config, 3, data_parallel_size=4, dp_stats_address="ipc://x")
    wire = decode_ready_response(encode_ready_response(ready))

    assert ready == wire
    assert (
        wire.max_model_len,
        wire.num_gpu_blocks,
        wire.block_size,
        wire.max_num_seqs,
        wire.max_num_batched_tokens,
    ) == (77, 5, 32, 9, 99)
    assert (
        wire.dtype,
        wire.vllm_version,
        wire.instance_id,
        wire.dp_stats_address,
    ) == ("bfloat16", "0.1", "me", "ipc://x")
    assert (
        wire.data_parallel_rank,
        wire.data_parallel_size,
        wire.supports_lora,
        wire.max_loras,
    ) == (3, 4, True, 3)
    assert (wire.kv_cache_size_tokens, wire.enable_sleep_mode) == (160, False)


def test_the_default_has_no_lora() -> None:
    """A frontend refuses an engine whose two answers differ."""
    ready = ready_response(MockEngineConfig(), 0)

    assert (ready.supports_lora, ready.max_loras) == (False, 0)
    assert ready.max_model_len == 1_048_576


def test_summaries_add_up() -> None:
    """Of several engines; the time is that of the earliest and the latest."""
    one = Summary(requests=1, tokens=20, finished=3, aborted=4, errors=5, begin=10.0, end=20.0)
    other = attrs.evolve(one, begin=15.0, end=30.0)

    assert one + other == Summary(2, 40, 6, 8, 10, 10.0, 30.0)
    assert one == one + Summary()
    assert one.tokens_per_second == (one + other).tokens_per_second == 2.0
    assert Summary().tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("said", "expected"), [(4, 4), (1, 1), (None, 3), (-5, 3), (0, 3), (2**16 + 1, 3), ("4", 3)]
)
def test_size_of_a_lockstep(said: int | str | None, expected: int) -> None:
    """A frontend that says nonsense is not believed; the registration could not even be written."""
    settings: dict[str, Any] = {} if said is None else {"data_parallel_size": said}
    addresses = EngineAddresses(inputs=["tcp://a:1"], outputs=["tcp://a:2"])
    init = HandshakeInit(addresses=addresses, parallel_config=settings)

    assert data_parallel_size(init, 3) == expected
