"""Mock engines in this process, with the options of the command line."""

from __future__ import annotations

import gc
import math

import trio

from trio_vllm.cli._mock_options import MockOptions
from trio_vllm.mock import MockEngineConfig, ServeOptions, Summary, serve_mock_engines


async def serve_here(options: MockOptions, *, shutdown: trio.Event) -> Summary:
    """Run all engines of ``options`` until ``shutdown``; raises what `serve_mock_engines` does."""
    # What has been imported stays; and cycles, which the collector is for, are rare here.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    return await serve_mock_engines(_config(options), _serve_options(options), shutdown=shutdown)


def _config(options: MockOptions) -> MockEngineConfig:
    return MockEngineConfig(
        vocab_size=options.vocab_size,
        seed=options.seed,
        output_token_chunk_size=options.output_token_chunk_size,
        stop_at_eos=options.stop_at_eos,
        embedding_size=options.embedding_size,
        log_requests=options.log_requests,
        max_model_len=options.max_model_len,
        num_gpu_blocks=options.num_gpu_blocks,
        block_size=options.block_size,
        kv_cache_size_tokens=options.kv_cache_size_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=options.dtype,
        vllm_version=options.vllm_version,
        instance_id=options.instance_id,
        max_loras=options.max_loras,
        supported_tasks=tuple(options.supported_tasks.split(",")),
        lockstep=options.lockstep,
        step_interval=options.step_interval,
    )


def _serve_options(options: MockOptions) -> ServeOptions:
    return ServeOptions(
        handshake_address=options.handshake_address,
        engine_start_index=options.engine_start_index,
        engine_count=options.engine_count,
        reconnect=options.reconnect,
        startup_timeout=math.inf if options.startup_timeout is None else options.startup_timeout,
        shutdown_timeout=options.shutdown_timeout,
    )
