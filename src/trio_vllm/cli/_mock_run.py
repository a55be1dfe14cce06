"""Runs mock engines for the command line: signals, log lines, the summary, the exit code."""

from __future__ import annotations

import gc
import logging
import math
import signal
import sys
import traceback

import trio

from trio_vllm._background import running
from trio_vllm.cli._mock_options import MockOptions
from trio_vllm.mock import MockEngineConfig, ServeOptions, Summary, serve_mock_engines

FAILED = 1


async def run_mock_engines(options: MockOptions) -> int:
    """Run them until a signal stops them; gives the exit code."""
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        level=logging.INFO,
    )
    # What has been imported stays; and cycles, which the collector is for, are rare here.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        summary = await _until_stopped(options)
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        print(f"mock-engine: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return FAILED
    if summary is not None:
        logging.getLogger("trio_vllm.mock").info("%s", _line(summary))
    return 0


async def _until_stopped(options: MockOptions) -> Summary | None:
    """Run them until a signal asks them to end; None if a second one did not let them."""
    shutdown = trio.Event()
    summary = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:

        async def watch() -> None:
            async for _ in received:
                if shutdown.is_set():
                    scope.cancel(reason="a second signal")
                shutdown.set()

        with trio.CancelScope() as scope:
            async with running(watch):
                summary = await serve_mock_engines(
                    _config(options), _serve_options(options), shutdown=shutdown
                )
    return summary


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
    )


def _serve_options(options: MockOptions) -> ServeOptions:
    return ServeOptions(
        handshake_address=options.handshake_address,
        start_index=options.engine_start_index,
        engine_count=options.engine_count,
        step_interval=options.step_interval,
        reconnect=options.reconnect,
        startup_timeout=math.inf if options.startup_timeout is None else options.startup_timeout,
        shutdown_timeout=options.shutdown_timeout,
    )


def _line(summary: Summary) -> str:
    return (
        f"summary: requests={summary.requests} tokens={summary.tokens}"
        f" tokens_per_second={summary.tokens_per_second:.0f} finished={summary.finished}"
        f" aborted={summary.aborted} errors={summary.errors}"
    )
