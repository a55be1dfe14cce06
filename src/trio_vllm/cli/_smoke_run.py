"""Runs smokes: where the engines come from, what is told of it all, and the exit code."""

from __future__ import annotations

import logging
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import attrs
import trio

from trio_vllm import EngineCoreClient, EngineCoreError, HandshakeOwner, Llm, open_llm
from trio_vllm.cli._app import FAILED
from trio_vllm.cli._engine_process import engine_process
from trio_vllm.cli._own_engines import EnginesEndedError, Need, mock_engines
from trio_vllm.cli._report import Report, print_json, print_table
from trio_vllm.cli._smoke_options import PORT, SmokeOptions, address_in, filled_in
from trio_vllm.cli._smokes import SmokeError
from trio_vllm.cli._stop import until_stopped

EXPECTED = (EngineCoreError, EnginesEndedError, OSError, SmokeError)
"""What engines, the system or the user can cause; all else is a bug of ours."""

Smoke = Callable[[Llm, Report], Awaitable[None]]


async def run_smokes(
    options: SmokeOptions, command: Sequence[str], smokes: Mapping[str, Smoke]
) -> int:
    """Run ``smokes``, by name, one after the other; give the exit code.

    A smoke that is stopped by a signal has not passed, so a stop is no success here: its exit code
    is 128 and the signal's number, as in shells.
    """
    run = _Run(options, command)
    reports = {name: Report(name, quiet=options.json) for name in smokes}

    async def work() -> None:
        await run.run([(reports[name], smoke) for name, smoke in smokes.items()])

    with _logging(to_stderr=options.verbose):
        stopped_by = await until_stopped(work)
    if stopped_by is not None:
        _complain(f"stopped by {stopped_by.name} before it was done")
        return 128 + stopped_by
    return _conclude(list(reports.values()), as_json=options.json)


@attrs.frozen
class _Run:
    options: SmokeOptions
    command: Sequence[str]

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
                            await smoke(llm, report)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[Llm, str]]:
        """Start the engines, if they are ours to start, and connect; gives the address too."""
        address = self._handshake_address()
        mode = HandshakeOwner(
            handshake_address=address,
            engine_count=self.options.engine_count,
            host=self.options.host,
            ready_timeout=self.options.ready_timeout,
        )
        need = Need()
        async with AsyncExitStack() as stack:
            if self.options.spawn:
                command, verbose = filled_in(self.command, address), self.options.verbose
                process = engine_process(command, need.engines_ended, verbose=verbose)
                await stack.enter_async_context(process)
            if self.options.mock:
                engines = mock_engines(address, self.options.engine_count, need.engines_ended)
                await stack.enter_async_context(engines)
            stack.enter_context(need.block())
            client_index = self.options.client_index
            llm = await stack.enter_async_context(open_llm(mode, client_index=client_index))
            try:
                yield llm, address
            finally:
                need.end()

    def _handshake_address(self) -> str:
        address = self.options.handshake_address
        if address is None and self.options.spawn:
            address = address_in(self.command)
        address = address or f"tcp://127.0.0.1:{PORT}"
        return address.replace(PORT, str(_free_port())) if PORT in address else address

    def _introduce(self, report: Report, client: EngineCoreClient, address: str) -> None:
        report.put("model", self.options.model)
        report.put("handshake_address", address)
        report.put("engine_count", self.options.engine_count)
        report.put("input_address", client.input_address)
        report.put("output_address", client.output_address)
        report.put("engine_identities", [list(identity) for identity in client.engine_identities])

    @contextmanager
    def _failing(self, *reports: Report) -> Iterator[None]:
        """Take what is raised for the failure of those that have not failed before.

        The time goes to the only one of them, or to those that have not begun.
        """
        begin = trio.current_time()
        try:
            yield
        except Exception as error:
            if self.options.debug:
                traceback.print_exc()
            for report in reports:
                report.failure = report.failure or _reason(error)
        for report in reports:
            if len(reports) == 1 or not report.seconds:
                report.seconds = trio.current_time() - begin


def _conclude(reports: list[Report], *, as_json: bool) -> int:
    """Print the verdict; give the exit code."""
    for report in reports:
        if report.failure is not None:
            _complain(report.failure if len(reports) == 1 else f"{report.name}: {report.failure}")
    if as_json:
        print_json(reports)
    elif len(reports) > 1:
        print_table(reports)
    return 0 if all(report.passed for report in reports) else FAILED


def _complain(text: str) -> None:
    print(f"llm-smoke: {' '.join(text.split())}", file=sys.stderr, flush=True)


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


def _free_port() -> int:
    """A TCP port that nobody listens on; the engines must be told it before we bind it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _logging(*, to_stderr: bool) -> Iterator[None]:
    """Print what the package logs, or not even what Python prints of it by default."""
    logger = logging.getLogger("trio_vllm")
    level = logger.level
    handler = logging.StreamHandler() if to_stderr else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    if to_stderr:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
