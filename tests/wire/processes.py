"""Engines and frontends in processes of their own, to be killed and frozen.

Run as a script, this file is such a process; it prints a line when it is ready, and one for each
message that it receives.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio
from tests.ready import ready_response

from trio_vllm.transport import HandshakeOwner, join_frontend

ROOT = Path(__file__).parents[2]


@attrs.define
class PeerProcess:
    """A child process and what it prints."""

    process: trio.Process
    _text: bytes = b""

    async def wait_for_line(self) -> str:
        """Wait for the next line."""
        assert self.process.stdout is not None
        while b"\n" not in self._text:
            received = await self.process.stdout.receive_some()
            assert received, "the process has ended"
            self._text += received
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()


@asynccontextmanager
async def peer_process(*args: object) -> AsyncIterator[PeerProcess]:
    """Run this file with these arguments, and kill it on leaving."""
    command = [sys.executable, "-m", "tests.wire.processes", *map(str, args)]
    process = await trio.lowlevel.open_process(command, stdout=-1, cwd=ROOT)
    try:
        yield PeerProcess(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()


async def be_engine(address: str, engine_index: str) -> None:
    """Print the first frame of each request. One that is a number: hold the GIL so many seconds."""
    index = int(engine_index)
    async with join_frontend(
        address, engine_index=index, ready_response=lambda _: ready_response(index)
    ) as links:
        say("joined")
        while True:
            for frames, _ in await links.inputs[0].receive_batch(10):
                first = bytes(frames[0])
                if first.isdigit():
                    ctypes.PyDLL(None).sleep(int(first))
                say(first.hex())


async def be_frontend(address: str) -> None:
    """Wait for one engine, then for the end."""
    async with HandshakeOwner(handshake_address=address).connect():
        say("open")
        await trio.sleep_forever()


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        trio.run(be_engine, sys.argv[2], sys.argv[3])
    else:
        trio.run(be_frontend, sys.argv[2])
