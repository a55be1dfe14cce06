"""One of the processes of ``mock-engine --processes``: some of its engines.

Not for people, so neither a command nor an option makes a process a worker, but this module as the
program does, which ``_mock_processes`` runs. Its one argument is `MockOptions` in JSON: an
environment or a file with options has been read, and must not be read a second time.

Standard input says nothing; its end is the request to shut down. It ends when the parent closes
it, and just so when the parent is killed. SIGINT and SIGTERM are blocked from the start: Ctrl-C
reaches all in the foreground, and what becomes of a worker is its parent's to decide.

Standard output gets a report, one line of JSON: the summary of the engines, or the failure that has
ended them.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trio_vllm.cli._mock_options import MockOptions
from trio_vllm.cli._mock_run import FAILED, set_up_log, told
from trio_vllm.concurrency import running

if TYPE_CHECKING:
    from trio_vllm.mock import Summary


def main(argument: str) -> int:
    """Run a worker; gives the exit code."""
    set_up_log()
    options = MockOptions(**json.loads(argument))
    exit_code, report = trio.run(_run, options)
    with suppress(BrokenPipeError):  # the parent was killed: nobody wants to know
        os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")
    return exit_code


async def _run(options: MockOptions) -> tuple[int, dict[str, Any]]:
    await trio.lowlevel.checkpoint()
    try:
        summary = await _serve_until_end_of_input(options)
    except Exception as error:
        return FAILED, {"failure": told(error, options)}
    return 0, {"summary": attrs.asdict(summary)}


async def _serve_until_end_of_input(options: MockOptions) -> Summary:
    from trio_vllm.cli._mock_serve import serve_here

    shutdown = trio.Event()

    async def watch() -> None:
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
            async for _ in stdin:
                pass
        shutdown.set()

    async with running(watch):
        return await serve_here(options, shutdown=shutdown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
