"""A client for the OpenAI-like HTTP server of a vLLM frontend, small enough to open hundreds of."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio


class HttpError(Exception):
    """The server answered with an error, or with something that is no answer."""


async def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Send a JSON object; give the JSON that comes back."""
    async with exchange(port, "POST", path, body) as answer:
        return json.loads(await answer.text())


async def get(port: int, path: str) -> str:
    """Get a text."""
    async with exchange(port, "GET", path) as answer:
        return await answer.text()


@asynccontextmanager
async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator["Events"]:
    """Send a JSON object and iterate over the JSON of the events that come back.

    Leaving the block before the last one breaks the connection.
    """
    async with exchange(port, "POST", path, {**body, "stream": True}) as answer:
        yield Events(answer)


@asynccontextmanager
async def exchange(
    port: int, method: str, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator["Answer"]:
    """Make a request over a connection of its own; gives the answer if that is a success."""
    payload = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(head.encode() + payload)
        answer = Answer(stream)
        status = await answer.read_head()
        if status.split()[1:2] != ["200"]:
            raise HttpError(f"{path}: {status}: {await answer.text()}")
        yield answer


class Answer:
    """What comes back, as it comes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._data = bytearray()
        self._is_chunked = False
        self._is_over = False

    async def read_head(self) -> str:
        """Read up to the body; gives the status line."""
        status = await self._line()
        while header := await self._line():
            if header.lower() == "transfer-encoding: chunked":
                self._is_chunked = True
        return status

    async def text(self) -> str:
        """Read all the rest."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts).decode()

    async def part(self) -> bytes:
        """Read some more of the body; nothing at its end."""
        if self._is_chunked:
            return await self._chunk()
        if not self._data and not self._is_over:
            self._is_over = not await self._receive()
        part = bytes(self._data)
        self._data.clear()
        return part

    async def _chunk(self) -> bytes:
        if self._is_over:
            return b""
        size = int(await self._line(), 16)
        self._is_over = not size
        while len(self._data) < size + 2:
            if not await self._receive():
                raise HttpError("the connection was closed in the middle of an answer")
        chunk = bytes(self._data[:size])
        del self._data[: size + 2]
        return chunk

    async def _line(self) -> str:
        while (end := self._data.find(b"\r\n")) < 0:
            if not await self._receive():
                raise HttpError("the connection was closed in the middle of an answer")
        line = self._data[:end].decode()
        del self._data[: end + 2]
        return line

    async def _receive(self) -> bool:
        data = await self._stream.receive_some()
        self._data += data
        return bool(data)


class Events:
    """Server-sent events with JSON in them, up to the one that says that it is the last."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._data = b""

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> Any:
        while True:
            while b"\n" not in self._data:
                part = await self._answer.part()
                if not part:
                    raise StopAsyncIteration
                self._data += part
            line, _, self._data = self._data.partition(b"\n")
            if line.rstrip() == b"data: [DONE]":
                raise StopAsyncIteration
            if line.startswith(b"data: "):
                return json.loads(line[6:])
