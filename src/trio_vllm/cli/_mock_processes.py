"""``mock-engine --processes``: starts the processes, and sees to it that they end together.

Each is a ``_mock_worker`` with some of the engines. What keeps it alive is a pipe that this process
holds open. That is closed to end it, and by the system if this process is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trio_vllm.cli._mock_options import MockOptions, engines_in_words
from trio_vllm.cli._process_end import end_in_words
from trio_vllm.concurrency import running

if TYPE_CHECKING:
    from trio_vllm.mock import Summary

log = logging.getLogger("trio_vllm.mock")

WORKER = "trio_vllm.cli._mock_worker"

GRACE = 8.0
"""Seconds from the end of the time for requests until a worker is killed.

Engines whose frontend is stuck take 2 to give up and 4 for the rest of their outputs.
"""

VANISHING_TIME = 1.0
"""Seconds that we wait for processes to vanish after SIGKILL, which they cannot escape."""


class WorkerEndedError(Exception):
    """A process with engines could not be started, or has ended otherwise than it should."""


async def serve_in_processes(options: MockOptions, *, shutdown: trio.Event) -> Summary:
    """Run the engines of ``options`` until ``shutdown`` is set; gives the counts of them all.

    Raises:
      WorkerEndedError: One process failed, which has ended the others at once.

    Cancellation:
      Kills the processes.
    """
    async with _started(shares(options)) as workers:
        supervision = _Supervision(options.shutdown_timeout, shutdown)
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(supervision.guard, worker, nursery.cancel_scope)
        if supervision.failure is not None:
            raise supervision.failure
    from trio_vllm.mock import Summary  # not before: workers that start need the processor for it

    return sum((Summary(**summary) for summary in supervision.summaries), Summary())


def shares(options: MockOptions) -> Iterator[MockOptions]:
    """Options for each process: neighbouring engines, as evenly as can be."""
    size, larger_ones = divmod(options.engine_count, options.processes)
    start = options.engine_start_index
    for number in range(options.processes):
        count = size + (number < larger_ones)
        yield attrs.evolve(
            options, engine_start_index=start, engine_count=count, processes=1, config=None
        )
        start += count


@attrs.frozen
class _Worker:
    engines: str
    process: trio.Process

    async def report(self) -> dict[str, Any]:
        """Wait for the line in which it tells of its end; empty if it has ended without."""
        assert self.process.stdout is not None
        line = b""
        async for chunk in self.process.stdout:
            line += chunk
            if line.endswith(b"\n"):
                report: dict[str, Any] = json.loads(line)
                return report
        return {}

    async def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.aclose()

    async def vanish(self) -> None:
        """Kill it if it still runs, and wait until it is gone."""
        self.process.kill()
        await self.ask_to_end()
        assert self.process.stdout is not None
        await self.process.stdout.aclose()
        await self.process.wait()


@asynccontextmanager
async def _started(all_options: Iterable[MockOptions]) -> AsyncIterator[list[_Worker]]:
    """Start workers, and leave none of them when the block is left."""
    workers: list[_Worker] = []
    try:
        with _signals_blocked():
            for options in all_options:
                workers.append(await _start(options))  # noqa: PERF401  (what has started must end)
        yield workers
    finally:
        with trio.move_on_after(VANISHING_TIME, shield=True):
            async with trio.open_nursery() as nursery:
                for worker in workers:
                    nursery.start_soon(worker.vanish)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block what ends us, here for the moment, and for good in processes that are started.

    Ctrl-C goes to all in the foreground, also to a worker that is too young to do anything about it.
    Processes inherit what is blocked, and so do the threads in which trio starts them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _start(options: MockOptions) -> _Worker:
    engines = engines_in_words(options)
    given = attrs.asdict(options, filter=lambda field, value: value != field.default)
    try:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", WORKER, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It shall find the modules that we have found, whatever lies in its folder.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except OSError as error:
        raise WorkerEndedError(
            f"cannot start the process of {engines}: {error.strerror}"
        ) from error
    log.info("%s: in process %d", engines, process.pid)
    return _Worker(engines, process)


@attrs.define
class _Supervision:
    """What has become of the workers."""

    _shutdown_timeout: float
    _shutdown: trio.Event
    summaries: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    failure: WorkerEndedError | None = attrs.field(default=None, init=False)

    async def guard(self, worker: _Worker, all_workers: trio.CancelScope) -> None:
        """Task: see one worker to its end; its failure is the failure of all."""
        await trio.lowlevel.checkpoint()
        try:
            self.summaries.append(await self._see_to_its_end(worker))
        except WorkerEndedError as error:
            if self.failure is None:
                self.failure = error
                all_workers.cancel(reason=str(error))

    async def _see_to_its_end(self, worker: _Worker) -> dict[str, Any]:
        """Wait for it, but once it shall end not for ever; gives the summary of its engines."""

        async def end_on_shutdown() -> None:
            await self._shutdown.wait()
            limit.deadline = trio.current_time() + self._shutdown_timeout + GRACE
            await worker.ask_to_end()

        report: dict[str, Any] = {}
        with trio.CancelScope() as limit:
            async with running(end_on_shutdown):
                report = await worker.report()
                limit.deadline = trio.current_time() + GRACE
                await worker.process.wait()
        if "failure" in report:
            raise WorkerEndedError(report["failure"])
        exit_code = worker.process.returncode
        if exit_code is None:
            raise WorkerEndedError(f"the process of {worker.engines} did not end, and was killed")
        if exit_code != 0 or "summary" not in report:
            raise WorkerEndedError(f"the process of {worker.engines} {end_in_words(exit_code)}")
        summary: dict[str, Any] = report["summary"]
        return summary
