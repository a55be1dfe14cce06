"""`run_smokes` finds the engines that the options name, runs smokes on them, and reports the results."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial

import attrs
import trio

from trio_vllm import (
    EngineCoreClient,
    EngineCoreError,
    HandshakeOwner,
    Llm,
    SpawnedEngine,
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
from trio_vllm.cli.smokes import Report, Smoke, SmokeError
from trio_vllm.concurrency import running
from trio_vllm.mock import MockEngineConfig, ServeOptions, serve_mock_engines
from trio_vllm.processes import EndTimes
from trio_vllm.spawn import SPAWNED_END, free_port

NAME = "llm-smoke"


class EnginesEndedError(Exception):
    """Engines of ours ended while they were needed."""


EXPECTED = (EngineCoreError, EnginesEndedError, OSError, SmokeError)
"""What engines, the system or the user can cause; all else is a bug of ours."""


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
    run = _Run(options, command, end_times)
    reports = {name: Report(name, quiet=options.json) for name in smokes}

    async def work() -> None:
        await run.run([(reports[name], smoke) for name, smoke in smokes.items()])

    with (
        logging_to_stderr("%(levelname)s %(message)s")
        if options.verbose
        else logging_to(logging.NullHandler())
    ):
        stopped_by = await until_stopped(work)
    if stopped_by is not None:
        print_line(NAME, f"stopped by {stopped_by.name} before it was done")
        return 128 + stopped_by
    return _conclude(list(reports.values()), as_json=options.json)


@attrs.frozen
class _Run:
    options: SmokeOptions
    command: Sequence[str]
    end_times: EndTimes

    async def run(self, smokes: Sequence[tuple[Report, Smoke]]) -> None:
        """Run each smoke on fresh engines, if they are ours to start; else all on the same.

        An engine serves one connection in its life.
        """
        await trio.lowlevel.checkpoint()
        batches = [[smoke] for smoke in smokes]
        if not self.options.spawn and not self.options.mock:
            batches = [list(smokes)]
        for batch in batches:
            with self._failing(*(report for report, _ in batch)):
                async with self._connected() as (llm, address):
                    for report, smoke in batch:
                        with self._failing(report):
                            self._introduce(report, llm.client, address)
                            await smoke(llm, report, self.options.of(report.name))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[Llm, str]]:
        """Start the engines, if they are ours to start, and connect; gives the address too."""
        engines = RequiredEngines()
        async with AsyncExitStack() as stack:
            mode = await stack.enter_async_context(self._engine_source(engines))
            stack.enter_context(engines.needed_by_block())
            client_index = self.options.client_index
            llm = await stack.enter_async_context(open_llm(mode, client_index=client_index))
            try:
                yield llm, mode.handshake_address
            finally:
                engines.needed_no_more()

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
            on_line=show if self.options.verbose else None,
            end_times=self.end_times,
        )

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

    @contextmanager
    def _failing(self, *reports: Report) -> Iterator[None]:
        """Take what is raised for the failure of those that have not failed before.

        The time goes to the only one of them, or to those that have not begun.
        """
        begin = trio.current_time()
        try:
            yield
        except OutputError:
            raise  # there is nothing to report to
        except Exception as error:
            if self.options.debug:
                print_traceback(error)
            for report in reports:
                if report.failure is None:
                    report.failure = one_line(_reason(error))
                    report.failure_kind = type(error).__name__
        for report in reports:
            if len(reports) == 1 or not report.seconds:
                report.seconds = trio.current_time() - begin


# Engines of ours ----------------------------------------------------------------------------------


class RequiredEngines:
    """Engines that this command has started, and a block that needs them."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._reason = ""
        self._is_over = False

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
        """Task: note the end of a command."""
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


def _conclude(reports: list[Report], *, as_json: bool) -> int:
    """Print the verdict; give the exit code."""
    for report in reports:
        if report.failure is not None:
            name = "" if len(reports) == 1 else f"{report.name}: "
            print_line(NAME, f"{name}{report.failure}")
    if as_json:
        write_output(_as_json(reports))
    elif len(reports) > 1:
        _print_table(reports)
    return 0 if all(report.passed for report in reports) else FAILED


def _as_json(reports: list[Report]) -> str:
    """One object: the only report, or all under the names of their smokes."""
    if len(reports) == 1:
        return json.dumps(reports[0].as_dict(), allow_nan=False)
    smokes = {report.name: report.as_dict() for report in reports}
    document = {"passed": all(report.passed for report in reports), "smokes": smokes}
    return json.dumps(document, allow_nan=False)


def _print_table(reports: list[Report]) -> None:
    """A line per smoke."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("smoke", "result", "seconds", "reason")
    for report in reports:
        result = Text("passed", "green") if report.passed else Text("failed", "red")
        # Never a plain string, which would be markup.
        reason = Text(report.failure or "")
        table.add_row(report.name, result, f"{report.seconds:.1f}", reason)
    console = Console(soft_wrap=False, highlight=False)
    with console.capture() as printed:
        console.print(table)
    write_output(printed.get().rstrip("\n"))


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
