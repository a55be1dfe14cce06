"""Runs mock engines for the command line: signals, log lines, the summary, the exit code."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from typing import TYPE_CHECKING

import trio

from trio_vllm.cli._mock_options import MockOptions
from trio_vllm.concurrency import running

if TYPE_CHECKING:  # several processes come up faster if this one leaves the engines to them
    from trio_vllm.mock import Summary

FAILED = 1


async def run_mock_engines(options: MockOptions) -> int:
    """Run them until a signal stops them; gives the exit code."""
    set_up_log()
    await trio.lowlevel.checkpoint()
    try:
        summary = await _until_stopped(options)
    except Exception as error:
        print(f"mock-engine: {told(error, options)}", file=sys.stderr, flush=True)
        return FAILED
    if summary is not None:
        logging.getLogger("trio_vllm.mock").info("%s", _line(summary))
    return 0


def set_up_log() -> None:
    """Log to standard error; one write per line, so those of several processes do not mix."""
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        level=logging.INFO,
    )


def told(error: Exception, options: MockOptions) -> str:
    """Tell of a failure in one line, after its traceback if that is wanted."""
    if options.debug:
        traceback.print_exception(error)
    return " ".join(str(error).split())


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
                summary = await _serve(options, shutdown)
    return summary


async def _serve(options: MockOptions, shutdown: trio.Event) -> Summary:
    if options.processes > 1:
        from trio_vllm.cli._mock_processes import serve_in_processes

        return await serve_in_processes(options, shutdown=shutdown)
    from trio_vllm.cli._mock_serve import serve_here

    return await serve_here(options, shutdown=shutdown)


def _line(summary: Summary) -> str:
    return (
        f"summary: requests={summary.requests} tokens={summary.tokens}"
        f" tokens_per_second={summary.tokens_per_second:.0f} finished={summary.finished}"
        f" aborted={summary.aborted} errors={summary.errors}"
    )
