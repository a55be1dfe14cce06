"""`run_mock_engines`: runs the engines of ``mock-engine`` in this process, or in several.

Each of several processes, a *worker*, is this module as the program, with some of the engines. It is
not for people, so neither a command nor an option makes a worker. Its one argument is `MockOptions` in
JSON: an environment or a file with options has been read, and must not be read a second time.

A worker's standard input says nothing but, at its end, the request to shut down. If it ends without, this
process was killed, and the worker kills itself: several processes die together, as one would. Stop signals are blocked in a worker from the
start: Ctrl-C reaches all in the foreground, and what becomes of a worker is its parent's to decide.
Its standard output gets lines of JSON: the states of its engines from time to time, if somebody
watches, and at its end a report, the summary of its engines or the failure that has ended them. With a
live view its log goes there too, since only the process that draws the view can print above it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trio_vllm import ConfigurationError
from trio_vllm.cli import collect_rarely
from trio_vllm.cli.app import (
    FAILED,
    STOP_SIGNALS,
    LineFormatter,
    logging_to,
    logging_to_stderr,
    one_line,
    print_line,
    print_traceback,
    until_stopped,
    write_error,
)
from trio_vllm.cli.mock_options import MockOptions
from trio_vllm.concurrency import running
from trio_vllm.errors import how_to_install
from trio_vllm.processes import (
    ChildProcess,
    EndTimes,
    ProcessFailedError,
    child_process,
    end_in_words,
)
from trio_vllm.values import define

if TYPE_CHECKING:  # several processes come up faster if this one leaves the engines to them
    from trio_vllm.mock import EngineStatus, EngineStatuses, Summary

log = logging.getLogger("trio_vllm.mock")

LOG_LAYOUT = "%(asctime)s %(levelname)s %(message)s"

WORKER = (sys.executable, "-P", "-m", "trio_vllm.cli.mock_processes")

STATE_INTERVAL = 0.5
"""Seconds between two reports of a process about its engines, if somebody watches."""

SHUT_DOWN = b"shut down\n"
"""The last words to a worker."""

STATES_PER_LINE = 100
"""Engines of which one line tells: some 30 KB, and `trio_vllm.processes.LONGEST_LINE` is the limit."""

GRACE = 8.0
"""Seconds from the end of the time for requests until a worker is killed.

Engines whose frontend is stuck take 2 to give up and 4 for the rest of their outputs.
"""


async def run_mock_engines(options: MockOptions) -> int:
    """Run them until a signal stops them; gives the exit code."""
    await trio.lowlevel.checkpoint()
    shutdown = trio.Event()
    work = partial(_serve_and_show, options, shutdown)
    with logging_to_stderr(LOG_LAYOUT):
        try:
            summary = await until_stopped(work, shutdown)
        except Exception as error:
            print_line("mock-engine", format_failure(error, options))
            return FAILED
        if not isinstance(summary, signal.Signals):
            log.info("%s", format_summary(summary))
    return 0


async def _serve_and_show(options: MockOptions, shutdown: trio.Event) -> Summary:
    """Run the engines, and let them be watched if that is asked for."""
    serve = serve_here if options.processes == 1 else serve_in_processes
    if not options.is_watched:
        return await serve(options, shutdown=shutdown)
    from trio_vllm.mock import EngineStatuses

    states = EngineStatuses()
    views: list[Callable[[], Awaitable[None]]] = []
    if options.metrics_port is not None:
        views.append(await _exporter(options.metrics_host, options.metrics_port, states))
    if options.live:
        from trio_vllm.cli.live_view import show_live

        views.append(partial(show_live, states))
    async with running(*views):
        return await serve(options, shutdown=shutdown, states=states)


async def _exporter(host: str, port: int, states: EngineStatuses) -> Callable[[], Awaitable[None]]:
    """Listen for HTTP; give the task that answers."""
    try:
        from trio_vllm.cli.exporter import listen, serve_metrics
    except ImportError as error:
        raise ConfigurationError(
            f"--metrics-port needs a library ({error}): {how_to_install('metrics')}"
        ) from error
    return partial(serve_metrics, states, await listen(host, port))


async def serve_here(
    options: MockOptions, *, shutdown: trio.Event, states: EngineStatuses | None = None
) -> Summary:
    """Run all engines of ``options`` until ``shutdown``; raises what `serve_mock_engines` does."""
    from trio_vllm.mock import serve_mock_engines

    gc.freeze()  # what has been imported stays
    return await serve_mock_engines(
        options.engine, options.serving, shutdown=shutdown, states=states
    )


def format_failure(error: Exception, options: MockOptions) -> str:
    """Tell of a failure in one line, after its traceback if that is wanted."""
    if options.debug:
        print_traceback(error)
    return one_line(str(error))


def format_summary(summary: Summary) -> str:
    """All counts in one line."""
    return (
        f"summary: requests={summary.requests} tokens={summary.tokens}"
        f" tokens_per_second={summary.tokens_per_second:.0f} finished={summary.finished}"
        f" aborted={summary.aborted} errors={summary.errors}"
        f" prompt_tokens={summary.prompt_tokens} tokens_asked={summary.tokens_asked}"
        f" seconds_behind={summary.seconds_behind:.3f}"
    )


# Several processes --------------------------------------------------------------------------------


async def serve_in_processes(
    options: MockOptions,
    *,
    shutdown: trio.Event,
    worker: Sequence[str] = WORKER,
    grace: float = GRACE,
    states: EngineStatuses | None = None,
) -> Summary:
    """Run the engines of ``options`` until ``shutdown`` is set; gives the counts of them all.

    Args:
      options: What all are told; ``processes`` says how many there are.
      shutdown: Ends them in order.
      worker: The command of a process, without its argument.
      grace: Seconds that a worker may take to end, besides the time for requests.
      states: Is kept up to date, if it is given.

    Raises:
      ProcessFailedError: One process failed, which has ended the others at once.

    Cancellation:
      Kills the processes.
    """
    supervision = _Supervision(options.serving.shutdown_timeout, grace, shutdown)
    if states is not None:
        from trio_vllm.mock import EngineStatus

        first, last = options.serving.engine_start_index, options.serving.last_index
        states.take(EngineStatus(engine_index=index) for index in range(first, last + 1))
        options = attrs.evolve(options, state_interval=STATE_INTERVAL)
    async with AsyncExitStack() as stack:
        with _stop_signals_blocked():
            workers = [
                await stack.enter_async_context(_running_worker(share, worker, states))
                for share in shares(options)
            ]
        async with trio.open_nursery() as nursery:
            for each in workers:
                nursery.start_soon(supervision.guard, each, nursery.cancel_scope)
    if supervision.failure is not None:
        raise supervision.failure
    from trio_vllm.mock import Summary  # not before: workers that start need the processor for it

    return sum((Summary(**summary) for summary in supervision.summaries), Summary())


def shares(options: MockOptions) -> Iterator[MockOptions]:
    """Options for each process: neighbouring engines, as evenly as can be."""
    serving = options.serving
    size, larger_ones = divmod(serving.engine_count, options.processes)
    start = serving.engine_start_index
    for number in range(options.processes):
        count = size + (number < larger_ones)
        share = attrs.evolve(serving, engine_start_index=start, engine_count=count)
        yield attrs.evolve(options, serving=share, processes=1)
        start += count


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals, here for the moment, and for good in processes that are started.

    Processes inherit what is blocked, and so do the threads in which trio starts them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@define(eq=False)
class _Worker:
    """A process with some of the engines."""

    engines: str
    _states: EngineStatuses | None
    process: ChildProcess = attrs.field(init=False)
    report: dict[str, Any] = attrs.field(factory=dict, init=False)
    """In which it tells of its end; empty if it has ended without."""
    has_reported: trio.Event = attrs.field(factory=trio.Event, init=False)

    def receive_line(self, line: str) -> None:
        """Take a line of its log, states of its engines, or its report."""
        document = json.loads(line)
        if "log" in document:
            write_error(document["log"])
            return
        if self._states is not None and "states" in document:
            from trio_vllm.mock import EngineStatus, Summary

            self._states.take(
                EngineStatus(**{**state, "summary": Summary(**state["summary"])})
                for state in document["states"]
            )
            return
        self.report = document
        self.has_reported.set()


@asynccontextmanager
async def _running_worker(
    options: MockOptions, command: Sequence[str], states: EngineStatuses | None
) -> AsyncIterator[_Worker]:
    """Start a worker, and leave nothing of it when the block is left."""
    worker = _Worker(options.serving.engines_in_words, states)
    async with child_process(
        f"the process of {worker.engines}",
        [*command, options.to_json()],
        on_line=worker.receive_line,
        own_session=False,
        times=EndTimes(0.0, 0.0),
        stdin=subprocess.PIPE,
        # It shall find the modules that we have found, whatever lies in its folder.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as worker.process:
        log.info("%s: in process %d", worker.engines, worker.process.pid)
        yield worker


@define
class _Supervision:
    """What has become of the workers."""

    _shutdown_timeout: float
    _grace: float
    _shutdown: trio.Event
    summaries: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    failure: ProcessFailedError | None = attrs.field(default=None, init=False)

    async def guard(self, worker: _Worker, all_workers: trio.CancelScope) -> None:
        """Task: see one worker to its end; its failure is the failure of all."""
        await trio.lowlevel.checkpoint()
        try:
            self.summaries.append(await self._see_to_its_end(worker))
        except ProcessFailedError as error:
            if self.failure is None:
                self.failure = error
                all_workers.cancel(reason=str(error))

    async def _see_to_its_end(self, worker: _Worker) -> dict[str, Any]:
        """Wait for it, once it is to end only for a while; gives the summary of its engines."""

        async def end_on_shutdown() -> None:
            await self._shutdown.wait()
            limit.deadline = trio.current_time() + self._shutdown_timeout + self._grace
            await worker.process.close_stdin(SHUT_DOWN)

        async def limit_end() -> None:
            await worker.has_reported.wait()
            limit.deadline = trio.current_time() + self._grace

        exit_code = None
        with trio.CancelScope() as limit:
            async with running(end_on_shutdown, limit_end):
                exit_code = await worker.process.wait()
        if "failure" in worker.report:
            raise ProcessFailedError(worker.report["failure"])
        if exit_code is None:
            raise ProcessFailedError(f"the process of {worker.engines} did not end, and was killed")
        if exit_code != 0 or "summary" not in worker.report:
            how = end_in_words(exit_code)
            raise ProcessFailedError(f"the process of {worker.engines} {how}")
        summary: dict[str, Any] = worker.report["summary"]
        return summary


# One of them --------------------------------------------------------------------------------------


def run_worker(argument: str) -> int:
    """Run the engines of this process; gives the exit code."""
    collect_rarely()
    options = MockOptions.from_json(argument)
    with logging_to_parent() if options.live else logging_to_stderr(LOG_LAYOUT):
        report = trio.run(_report_on_end, options)
    _tell(report)
    return FAILED if "failure" in report else 0


def logging_to_parent() -> AbstractContextManager[None]:
    """Let the package log to the process that draws the live view."""
    handler = _TellingHandler()
    handler.setFormatter(LineFormatter(LOG_LAYOUT))
    return logging_to(handler, logging.INFO)


class _TellingHandler(logging.Handler):
    """Tells our parent each line."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell({"log": self.format(record)})


def _tell(document: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the parent was killed: nobody wants to know
        os.write(sys.stdout.fileno(), json.dumps(document).encode() + b"\n")


async def _report_on_end(options: MockOptions) -> dict[str, Any]:
    await trio.lowlevel.checkpoint()
    try:
        summary = await _serve_until_end_of_input(options)
    except Exception as error:
        return {"failure": format_failure(error, options)}
    return {"summary": attrs.asdict(summary)}


async def _serve_until_end_of_input(options: MockOptions) -> Summary:
    shutdown = trio.Event()

    async def watch() -> None:
        said = b""
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
            async for chunk in stdin:
                said += chunk
        if said != SHUT_DOWN:
            os.kill(os.getpid(), signal.SIGKILL)
        shutdown.set()

    from trio_vllm.mock import EngineStatuses

    states = EngineStatuses()

    async def tell_states() -> None:
        while True:
            await trio.sleep(options.state_interval)
            for document in state_reports(states.read()):
                _tell(document)

    async with running(watch, tell_states):
        return await serve_here(options, shutdown=shutdown, states=states)


def state_reports(states: Sequence[EngineStatus]) -> Iterator[dict[str, Any]]:
    """What a line each tells of the engines."""
    told = [attrs.asdict(state) for state in states]
    for first in range(0, len(told), STATES_PER_LINE):
        yield {"states": told[first : first + STATES_PER_LINE]}


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1]))
