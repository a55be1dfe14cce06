"""`run_smokes` finds the engines that the options name, runs smokes on them, and reports the results."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial

import attrs
import trio

from trio_vllm import (
    EngineCommandError,
    EngineCoreClient,
    EngineCoreError,
    HandshakeOwner,
    Llm,
    SpawnedEngine,
    StartupError,
    open_llm,
    spawn_engine,
)
from trio_vllm.cli.app import (
    FAILED,
    OutputError,
    logging_to,
    logging_to_stderr,
    one_line,
    print_line,
    print_traceback,
    until_stopped,
    write_output,
)
from trio_vllm.cli.smoke_options import SmokeOptions
from trio_vllm.cli.smoke_report import Report, as_json, as_junit, print_verdicts
from trio_vllm.cli.smokes import Smoke, SmokeError, check
from trio_vllm.concurrency import running
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines
from trio_vllm.processes import EndTimes
from trio_vllm.spawn import SPAWNED_END, free_port
from trio_vllm.values import frozen

NAME = "llm-smoke"


class EnginesEndedError(Exception):
    """Engines of ours ended after they were ready, while they were needed."""


EXPECTED = (EngineCoreError, EnginesEndedError, OSError, SmokeError)
"""What engines, the system or the user can cause; all else is a bug of ours."""


@frozen(str=False)
class TimeLimitError(Exception):
    """The time for all smokes together is over."""

    seconds: float
    awaited: str

    def __str__(self) -> str:
        text = f"it was not done after {self.seconds:g} s (--timeout)"
        return f"{text}, while waiting for {self.awaited}" if self.awaited else text


STARTUP_GRACE = 0.2
"""Seconds that a startup gets beyond the time limit, to say itself what it has been waiting for."""


async def run_smokes(
    options: SmokeOptions,
    command: Sequence[str],
    smokes: Mapping[str, Smoke],
    end_times: EndTimes = SPAWNED_END,
) -> int:
    """Run ``smokes``, by name, one after the other; give the exit code.

    A smoke that is stopped by a signal has not passed, so a stop is no success here: its exit code
    is 128 and the signal's number, as in shells.
    """
    is_quiet = options.quiet or options.prints_json
    reports = {name: Report(name, quiet=is_quiet) for name in smokes}
    run = _Run(options, command, end_times, list(reports.values()))

    async def work() -> None:
        await run.run([(reports[name], smoke) for name, smoke in smokes.items()])

    logging_lines = logging_to_stderr("%(levelname)s %(message)s")
    with logging_lines if options.verbose else nullcontext(), logging_to(_Warnings(run)):
        stopped_by = await until_stopped(work)
    if stopped_by is not None:
        reason = f"stopped by {stopped_by.name} before it was done"
        run.give_up(reason, stopped_by.name)
        print_line(NAME, reason)
        return _write_results(run.reports, options) or 128 + stopped_by
    _print_failures(run.reports, options)
    failed = _write_results(run.reports, options)
    return failed or (0 if all(report.passed for report in run.reports) else FAILED)


class _Warnings(logging.Handler):
    """Puts what the client warns of into the report of the current smoke."""

    def __init__(self, run: _Run) -> None:
        super().__init__(logging.WARNING)
        self._run = run
        # Errors are reasons of failures, and our own mock engines only see the other end.
        self.addFilter(lambda record: record.levelno == logging.WARNING)
        self.addFilter(lambda record: not record.name.startswith("trio_vllm.mock"))

    def emit(self, record: logging.LogRecord) -> None:
        for report in self._run.unfinished[:1]:
            report.warnings.append(one_line(record.getMessage()))


@frozen
class _Run:
    options: SmokeOptions
    command: Sequence[str]
    end_times: EndTimes
    reports: list[Report]
    limit: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    """Around all smokes."""

    @property
    def unfinished(self) -> list[Report]:
        """The smokes that are not over; the first is the current one."""
        return [report for report in self.reports if report.result is None]

    async def run(self, smokes: Sequence[tuple[Report, Smoke]]) -> None:
        """Run each smoke on fresh engines, if they are ours to start; else all on the same.

        A real engine serves one connection in its life.
        """
        await trio.lowlevel.checkpoint()
        batches = [[smoke] for smoke in smokes]
        if not self.options.spawn and not self.options.mock:
            batches = [list(smokes)]
        self.limit.deadline = trio.current_time() + self.options.timeout
        failure = None
        try:
            with self.limit:  # noqa: ASYNC912
                for batch in batches:
                    await self._run_batch(batch)
        except TimeLimitError as error:
            failure = error
        if self.limit.cancelled_caught:
            awaited = next((report.awaited for report in self.unfinished), "")
            failure = TimeLimitError(self.options.timeout, awaited)
        if failure is not None:
            self.give_up(one_line(str(failure)), type(failure).__name__)

    async def _run_batch(self, batch: Sequence[tuple[Report, Smoke]]) -> None:
        """Run smokes on one connection."""
        reports = [report for report, _ in batch]
        with self._failing(reports):
            self._put_heading(reports[0])
            async with self._connected(reports) as (llm, address):
                for number, (report, smoke) in enumerate(batch):
                    if not llm.client.is_healthy:
                        break
                    if number:
                        self._put_heading(report)
                    with self._failing([report]):
                        self._introduce(report, llm.client, address)
                        await smoke(llm, report, self.options.of(report.name))
                        report.end("passed")
        for report in reports:
            if report.result is None:
                report.end("skipped", "not run, since there is no engine any more")

    def _put_heading(self, report: Report) -> None:
        if len(self.reports) > 1:
            report.put_heading()

    def give_up(self, reason: str, kind: str) -> None:
        """Note that the current smoke has not ended, and that those behind it are left out."""
        for report in self.unfinished[:1]:
            report.end("failed", reason, kind)
        for report in self.unfinished:
            report.end("skipped", f"not run: {reason}")

    @asynccontextmanager
    async def _connected(self, reports: Sequence[Report]) -> AsyncIterator[tuple[Llm, str]]:
        """Start the engines, if they are ours to start, and connect; gives the address too."""
        engines = RequiredEngines()
        reports[0].awaited = "the engines"
        async with AsyncExitStack() as stack:
            mode = await stack.enter_async_context(self._engine_source(engines))
            stack.callback(_keep_log, mode, reports)
            stack.enter_context(engines.needed_by_block())
            with self._sign_of_life(mode.handshake_address), self._timed_startup():
                client_index = self.options.client_index
                llm = await stack.enter_async_context(open_llm(mode, client_index=client_index))
            engines.are_ready.set()
            try:
                yield llm, mode.handshake_address
            finally:
                engines.needed_no_more()

    @property
    def _time_left(self) -> float:
        """Seconds; a startup must have some."""
        return max(self.limit.deadline - trio.current_time(), 0.001)

    @contextmanager
    def _timed_startup(self) -> Iterator[None]:
        """Let a startup that ends with the time for all of it say what it has been waiting for."""
        deadline = self.limit.deadline
        self.limit.deadline = deadline + STARTUP_GRACE
        try:
            yield
        except EngineCommandError:
            raise
        except StartupError as error:
            if trio.current_time() < deadline:
                raise
            awaited = "; ".join([error.awaited, *error.notes])
            raise TimeLimitError(self.options.timeout, awaited) from error
        finally:
            self.limit.deadline = deadline

    @asynccontextmanager
    async def _engine_source(
        self, engines: RequiredEngines
    ) -> AsyncIterator[HandshakeOwner | SpawnedEngine]:
        options = self.options
        if options.spawn:
            async with self._spawned_engine() as spawned, running(partial(engines.watch, spawned)):
                yield spawned
            return
        mode = HandshakeOwner(
            handshake_address=options.handshake_address or f"tcp://127.0.0.1:{free_port()}",
            engine_count=options.engine_count,
            host=options.host,
            ready_timeout=options.ready_timeout,
            startup_timeout=self._time_left,
        )
        if not options.mock:
            yield mode
            return
        async with mock_engines(mode.handshake_address, options.engine_count, engines.ended):
            yield mode

    def _spawned_engine(self) -> AbstractAsyncContextManager[SpawnedEngine]:
        def show(line: str) -> None:
            print_line("engine", line)

        return spawn_engine(
            self.command,
            engine_count=self.options.engine_count,
            handshake_address=self.options.handshake_address,
            host=self.options.host,
            ready_timeout=self.options.ready_timeout,
            startup_timeout=self._time_left,
            on_line=show if self.options.verbose else None,
            end_times=self.end_times,
        )

    def _sign_of_life(self, address: str) -> AbstractContextManager[object]:
        """Show on a terminal that we wait, and for what."""
        if self.options.quiet or self.options.verbose or not sys.stderr.isatty():
            return nullcontext()
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        # Standard output may be another file, so it must not be redirected to this console.
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
        )
        count = self.options.engine_count
        engines = "an engine" if count == 1 else f"{count} engines"
        progress.add_task(f"waiting for {engines} at {address}", total=None)
        return progress

    def _introduce(self, report: Report, client: EngineCoreClient, address: str) -> None:
        if self.options.model is not None:
            report.put("model", self.options.model)
        report.put("handshake_address", address)
        report.put("engine_count", self.options.engine_count)
        report.put("input_address", client.input_address)
        report.put("output_address", client.output_address)
        report.put("engine_identities", [list(identity) for identity in client.engine_identities])
        first, *_ = client.engine_info.ready_responses.values()
        for fact in ("vllm_version", "dtype", "max_model_len", "num_gpu_blocks", "block_size"):
            report.put(fact, getattr(first, fact))
        self._check_size(client)

    def _check_size(self, client: EngineCoreClient) -> None:
        """Engines in lockstep are as many as they say; others say 1, however many there are."""
        for index, response in client.engine_info.ready_responses.items():
            size = response.data_parallel_size
            check(
                size in (1, self.options.engine_count),
                f"engine {index} is one of {size} (data_parallel_size), but --engine-count is"
                f" {self.options.engine_count}",
            )

    @contextmanager
    def _failing(self, reports: Sequence[Report]) -> Iterator[None]:
        """Take what is raised for the failure of the first of them that is not over."""
        begin = trio.current_time()
        try:
            yield
        except (OutputError, TimeLimitError):
            raise  # there is nothing to report to, or it is the failure of the current one
        except Exception as error:
            if self.options.debug:
                print_traceback(error)
            failed = next((report for report in reports if report.result is None), reports[-1])
            if failed.result != "failed":
                failed.end("failed", one_line(_reason(error)), type(error).__name__)
        finally:
            if not reports[0].seconds or len(reports) == 1:
                reports[0].seconds = trio.current_time() - begin


# Engines of ours ----------------------------------------------------------------------------------


class RequiredEngines:
    """Engines that this command has started, and a block that needs them."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._reason = ""
        self._is_over = False
        self.are_ready = trio.Event()

    @contextmanager
    def needed_by_block(self) -> Iterator[None]:
        """Run the block; `EnginesEndedError` if the engines end before `needed_no_more`."""
        with self._scope:
            yield
        if self._scope.cancelled_caught and self._reason:
            raise EnginesEndedError(self._reason)

    def ended(self, reason: str) -> None:
        """End the block, unless it needs them no more."""
        if not self._is_over:
            self._reason = reason
            self._scope.cancel(reason=reason)

    async def watch(self, spawned: SpawnedEngine) -> None:
        """Task: note the end of a command after its engines were ready; before, it is the start that fails."""
        await self.are_ready.wait()
        self.ended(await spawned.wait_ended())

    def needed_no_more(self) -> None:
        """From now on the engines may end: some do when their frontend goes."""
        self._is_over = True


@asynccontextmanager
async def mock_engines(
    address: str, engine_count: int, on_end: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve the frontend at ``address`` while the block runs; an earlier end is told ``on_end``."""
    options = ServeOptions(handshake_address=address, engine_count=engine_count, reconnect=False)

    async def serve() -> None:
        await trio.lowlevel.checkpoint()
        try:
            await serve_mock_engines(MockEngineConfig(), options)
        except EngineCoreError as error:
            on_end(f"mock engine: {error}")

    async with running(serve):
        yield


# The verdict --------------------------------------------------------------------------------------


def _keep_log(mode: HandshakeOwner | SpawnedEngine, reports: Sequence[Report]) -> None:
    if isinstance(mode, SpawnedEngine):
        for report in reports:
            report.engine_log = mode.log


def _print_failures(reports: list[Report], options: SmokeOptions) -> None:
    """Say on standard error what was wrong."""
    for report in reports:
        name = "" if len(reports) == 1 else f"{report.name}: "
        if not options.quiet:
            for warning in report.warnings:
                if warning not in (report.failure or ""):
                    print_line(NAME, f"{name}warning: {warning}")
        if report.result == "failed":
            print_line(NAME, f"{name}{report.failure}")


def _write_results(reports: list[Report], options: SmokeOptions) -> int:
    """Write the file that was asked for, and the verdict; `FAILED` if the file cannot be written."""
    fault = _write_junit(reports, options)
    if options.prints_json:
        write_output(as_json(reports, full=options.json_full, fault=fault))
    elif len(reports) > 1 and not options.quiet:
        print_verdicts(reports)
    return 0 if fault is None else FAILED


def _write_junit(reports: list[Report], options: SmokeOptions) -> str | None:
    """Write the file that was asked for; why that has failed, if it has."""
    if options.junit is None:
        return None
    try:
        options.junit.write_text(as_junit(reports) + "\n", encoding="utf-8")
    except OSError as error:
        fault = f"cannot write {options.junit}: {error.strerror}"
        print_line(NAME, fault)
        return fault
    return None


def _reason(error: Exception) -> str:
    """What an exception says, and what its causes say besides."""
    if not isinstance(error, EXPECTED):
        return f"{type(error).__name__}: {error} (a bug of llm-smoke; --debug shows where)"
    texts = [str(error)]
    cause = error.__cause__
    while isinstance(cause, EngineCoreError):
        if not any(str(cause) in text for text in texts):
            texts.append(str(cause))
        cause = cause.__cause__
    return ": ".join(texts)
