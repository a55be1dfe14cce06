"""What vLLM's own Rust clients offer, and where it is here, or why it is not.

Names are those of ``rust/src/engine-core-client`` and ``rust/src/llm`` of vLLM 0.33. On the right
stands a path from the package, with a parameter in parentheses where one does the work.
"""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest

import trio_vllm
import trio_vllm.client
import trio_vllm.llm
import trio_vllm.protocol


@attrs.frozen
class Missing:
    """It is not here, because …"""

    reason: str


Table = dict[str, "str | Missing"]

ENGINE_CORE_CLIENT: Table = {
    # making and ending it
    "connect": "open_client",
    "connect_with_input_output_addresses": "Bootstrapped.input_address",
    "shutdown": "EngineCoreClient.close",
    # what is known
    "input_address": "EngineCoreClient.input_address",
    "output_address": "EngineCoreClient.output_address",
    "engine_count": "EngineCoreClient.engine_indices",
    "engine_indices": "EngineCoreClient.engine_indices",
    "known_engine_indices": Missing("engine ids always are indices here, others are not let in"),
    "engine_identities": "EngineCoreClient.engine_identities",
    "ready_responses": "EngineInfo.ready_responses",
    "model_dtype": "EngineCoreClient.model_dtype",
    "vllm_version": "EngineCoreClient.vllm_version",
    "max_model_len": "EngineCoreClient.max_model_len",
    "total_num_gpu_blocks": "EngineInfo.num_gpu_blocks",
    "world_size": "EngineInfo.world_size",
    "data_parallel_size": "EngineInfo.data_parallel_size",
    "model_name": Missing("engines do not tell it; metrics take it: LlmMetrics(model_name=…)"),
    # health
    "is_healthy": "EngineCoreClient.is_healthy",
    "health_error": "EngineCoreClient.failure",
    "health watch": "EngineCoreClient.wait_failed",
    # requests
    "call": "EngineCoreClient.call",
    "abort": "EngineCoreClient.abort",
    "scheduler stats": "EngineCoreClient.scheduler_stats",
    "engine_stats_enabled": Missing("statistics that an engine does not send are not there"),
    # utility calls
    "call_utility": "EngineCoreClient.call_utility",
    "call_utility_consensus": "EngineCoreClient.call_utility_consensus",
    "collective_rpc": "EngineCoreClient.collective_rpc",
    "is_sleeping": "EngineCoreClient.is_sleeping",
    "sleep": "EngineCoreClient.sleep",
    "wake_up": "EngineCoreClient.wake_up",
    "release_kv_cache_memory": "EngineCoreClient.release_kv_cache_memory",
    "reset_mm_cache": "EngineCoreClient.reset_mm_cache",
    "reset_encoder_cache": "EngineCoreClient.reset_encoder_cache",
    "reset_prefix_cache": "EngineCoreClient.reset_prefix_cache",
    "add_lora": "EngineCoreClient.add_lora",
    "remove_lora": "EngineCoreClient.remove_lora",
    "pause_scheduler": "EngineCoreClient.pause_generation",
    "pause_generation": "EngineCoreClient.pause_generation",
    "resume_scheduler": "EngineCoreClient.resume_scheduler",
    "is_scheduler_paused": "EngineCoreClient.is_scheduler_paused",
    "get_weight_version": "EngineCoreClient.get_weight_version",
    "set_weight_version": "EngineCoreClient.set_weight_version",
    "start_profile": "EngineCoreClient.start_profile",
    "stop_profile": "EngineCoreClient.stop_profile",
    "init_weight_transfer_engine": "EngineCoreClient.init_weight_transfer_engine",
    "start_weight_update": "EngineCoreClient.start_weight_update",
    "start_draft_weight_update": "EngineCoreClient.start_draft_weight_update",
    "update_weights": "EngineCoreClient.update_weights",
    "finish_weight_update": "EngineCoreClient.finish_weight_update",
    "shutdown_weight_transfer_engine": "EngineCoreClient.shutdown_weight_transfer_engine",
}

CONFIG: Table = {
    "TransportMode::HandshakeOwner.handshake_address": "HandshakeOwner.handshake_address",
    "TransportMode::HandshakeOwner.advertised_host": "HandshakeOwner.host",
    "TransportMode::HandshakeOwner.engine_count": "HandshakeOwner.engine_count",
    "TransportMode::HandshakeOwner.ready_timeout": "HandshakeOwner.ready_timeout",
    "TransportMode::HandshakeOwner.local_input_address": "HandshakeOwner.input_address",
    "TransportMode::Bootstrapped.input_address": "Bootstrapped.input_address",
    "TransportMode::Bootstrapped.output_address": "Bootstrapped.output_address",
    "TransportMode::Bootstrapped.engine_start_index": "Bootstrapped.engine_start_index",
    "TransportMode::Bootstrapped.engine_count": "Bootstrapped.engine_count",
    "TransportMode::Bootstrapped.data_parallel_size": "Bootstrapped.data_parallel_size",
    "TransportMode::Bootstrapped.ready_timeout": "Bootstrapped.ready_timeout",
    "client_index": "open_client(client_index)",
    "model_name": Missing("see EngineCoreClient.model_name"),
}

OUTPUT_STREAM: Table = {
    "request_id": "OutputStream(request_id)",
    "engine_index": "StreamOutput.engine_index",
    "timestamp": "StreamOutput.timestamp",
    "weight_version": "StreamOutput.weight_version",
    "output": "StreamOutput.output",
    "next": "OutputStream.__anext__",
    "drop": "EngineCoreClient.call",
    "AbortCause::StopStringMatched": Missing("stop strings need a tokenizer, which is above us"),
}

LLM: Table = {
    "new": "Llm(client)",
    "with_log_stats": "open_llm(stats_interval)",
    "with_request_id_randomization": "Llm(randomize_request_ids)",
    "with_stream_interval": "Llm(stream_interval)",
    "engine_core_client": Missing("it is the attribute Llm.client"),
    "generate": "Llm.stream",
    "generate + collect_output": "Llm.generate",
    "encode": "Llm.encode",
    "abort": "Llm.abort",
    "shutdown": "Llm.shutdown",
}

GENERATE_REQUEST: Table = {
    name: f"GenerateRequest.{name}"
    for name in (
        "request_id",
        "prompt_token_ids",
        "sampling_params",
        "mm_features",
        "arrival_time",
        "cache_salt",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
        "reasoning_parser_kwargs",
        "reasoning_ended",
        "lora_request",
    )
}

GENERATE_OUTPUT: Table = {
    "request_id": "CompletionOutput.engine_request_id",
    "prompt_info.prompt_token_ids": "GenerateOutput.prompt_token_ids",
    "prompt_info.prompt_logprobs": "CompletionOutput.prompt_logprobs",
    "prompt_info.prompt_token_id_logprobs": "CompletionOutput.prompt_token_id_logprobs",
    "token_ids": "CompletionOutput.token_ids",
    "logprobs": "CompletionOutput.logprobs",
    "sampling_mask": "CompletionOutput.sampling_masks",
    "finish_reason": "CompletionOutput.finish_reason",
    "finish_reason.stop_reason": "CompletionOutput.stop_reason",
    "finished": "CompletionDelta.finished",
    "error": "CompletionOutput.error",
    "mm_cache_miss_hashes": "CompletionOutput.mm_cache_miss_hashes",
    "kv_transfer_params": "CompletionOutput.kv_transfer_params",
    "ec_transfer_params": "CompletionOutput.ec_transfer_params",
    "routed_experts": "CompletionOutput.routed_experts",
    "weight_versions": "CompletionOutput.weight_versions",
    "spec_decode_metrics": "CompletionOutput.spec_decode_metrics",
    "usage.prompt_token_count": "Usage.prompt_tokens",
    "usage.output_token_count": "Usage.output_tokens",
    "usage.cached_token_count": "Usage.cached_tokens",
    "timestamps": "CompletionOutput.timings",
}

ENCODE: Table = {
    "EncodeRequest.task": "PoolingParams.task",
    "EncodeRequest.pooling_params": "EncodeRequest.pooling_params",
    "EncodeOutput.request_id": "CompletionOutput.engine_request_id",
    "EncodeOutput.prompt_token_ids": "EncodeOutput.prompt_token_ids",
    "EncodeOutput.output": "EncodeOutput.data",
    "EncodeOutput.cached_token_count": "Usage.cached_tokens",
}

TABLES = {
    "EngineCoreClient": ENGINE_CORE_CLIENT,
    "EngineCoreClientConfig": CONFIG,
    "EngineCoreOutputStream": OUTPUT_STREAM,
    "Llm": LLM,
    "GenerateRequest": GENERATE_REQUEST,
    "GenerateOutput": GENERATE_OUTPUT,
    "Encode": ENCODE,
}


def public(name: str) -> Any:
    """The object of this name at the root, or else in one of the public packages."""
    homes = (trio_vllm, trio_vllm.llm, trio_vllm.client, trio_vllm.protocol)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


@pytest.mark.parametrize(
    ("upstream", "ours"),
    [
        pytest.param(name, ours, id=f"{type_name}.{name}")
        for type_name, table in TABLES.items()
        for name, ours in table.items()
    ],
)
def test_it_is_here_or_there_is_a_reason(upstream: str, ours: str | Missing) -> None:
    if isinstance(ours, Missing):
        assert ours.reason
        return
    path, _, parameter = ours.removesuffix(")").partition("(")
    first, *others = path.split(".")
    found = public(first)
    for name in others:
        found = getattr(found, name)
    if parameter:
        assert parameter in inspect.signature(found).parameters
    else:
        assert inspect.getdoc(found) or path.split(".")[-1] in _fields(path)


def _fields(path: str) -> list[str]:
    """The fields of the attrs class that a path leads into."""
    return [field.name for field in attrs.fields(public(path.split(".")[0]))]


async def test_what_is_an_attribute_of_the_instance() -> None:
    from tests.client.world import open_world

    async with open_world() as world:
        llm = trio_vllm.Llm(world.client)

        assert llm.client is world.client
        assert list(world.client.engine_info.ready_responses) == [0]
