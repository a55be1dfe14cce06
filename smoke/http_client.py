"""A client for the OpenAI-like HTTP server of a vLLM frontend, small enough to open hundreds of."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

MAX_LINE = 2**20
"""Bytes; longer lines are not from a server that we know."""


class HttpError(Exception):
    """The server answered with an error, or with something that is no answer."""


async def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Send a JSON object; give the JSON that comes back."""
    async with exchange(port, "POST", path, body) as lines:
        return json.loads("\n".join([line async for line in lines]))


async def get(port: int, path: str) -> str:
    """Get a text."""
    async with exchange(port, "GET", path) as lines:
        return "\n".join([line async for line in lines])


@asynccontextmanager
async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Send a JSON object and iterate over the JSON of the events that come back.

    Leaving the block before the last one breaks the connection.
    """
    async with exchange(port, "POST", path, {**body, "stream": True}) as lines:

        async def decoded() -> AsyncIterator[Any]:
            async for line in lines:
                data = line.removeprefix("data: ")
                if data != line and data != "[DONE]":
                    yield json.loads(data)

        yield decoded()


@asynccontextmanager
async def exchange(
    port: int, method: str, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator[AsyncIterator[str]]:
    """Make a request over a connection of its own; the value gives the lines of the answer."""
    payload = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(head.encode() + payload)
        reader = _Reader(stream)
        status = await reader.line()
        headers = {}
        while line := await reader.line():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip().lower()
        chunked = headers.get("transfer-encoding") == "chunked"
        lines = _split(reader.chunks() if chunked else reader.rest())
        if status.split()[1:2] != ["200"]:
            raise HttpError(f"{path}: {status}: {[line async for line in lines]}")
        yield lines


class _Reader:
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._data = bytearray()

    async def _more(self) -> None:
        data = await self._stream.receive_some()
        if not data:
            raise HttpError("the connection was closed in the middle of an answer")
        self._data += data

    async def line(self) -> str:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > MAX_LINE:
                raise HttpError("a line without end")
            await self._more()
        line = self._data[:end].decode()
        del self._data[: end + 2]
        return line

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.line(), 16):
            while len(self._data) < size + 2:
                await self._more()
            yield bytes(self._data[:size])
            del self._data[: size + 2]

    async def rest(self) -> AsyncIterator[bytes]:
        yield bytes(self._data)
        async for data in self._stream:
            yield bytes(data)


async def _split(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The lines of a text that comes in parts."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r").decode()
    if rest:
        yield rest.decode()
