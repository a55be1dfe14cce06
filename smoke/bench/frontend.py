"""A bare frontend: starts engine cores, sends them requests, keeps what they answer.

It takes the layout of messages from the package and nothing else, and does as little as possible,
for it shares the machine with the engine that it measures.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ormsgpack
import zmq

from processes import Process, ProcessError, running
from trio_vllm.protocol import EngineCoreOutput, OutputsMessage, index_of

PROMPT_LENGTH = 32
ID_PATTERN = "bench-{:08x}-a1b2c3d4"
PLACEHOLDER = ID_PATTERN.format(0).encode()

FINISH_REASON = index_of(EngineCoreOutput, "finish_reason")
"""Where it stands in a row of outputs."""

ROWS = index_of(OutputsMessage, "outputs")
ANSWER = index_of(OutputsMessage, "utility_output")
"""Where the rows and the answer to a utility call stand in a message."""

LONGEST_ANSWER = 1000
"""Bytes of a message that may be one."""

STARTUP_TIMEOUT = 60.0
ADD = b"\0"
UTILITY = b"\3"

PATHS = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(PATHS)}
"""Lets a Python find this package, and what we find."""

Command = Callable[[str], Sequence[str | Path]]
"""The command that starts engines for a handshake address."""


class Frontend:
    """Connected engines; made by `connected`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.requests, self._input_address = _bound(context, zmq.ROUTER)
        self.outputs, self._output_address = _bound(context, zmq.PULL)
        self._handshake, self.address = _bound(context, zmq.ROUTER)
        self.process: Process
        self.hello_seconds = 0.0
        """From the start of the process until it reported."""
        self.ready_seconds = 0.0
        """Until the last engine was ready."""
        self._engine_ids: list[bytes] = []
        self._request_count = 0
        self._templates: dict[tuple[object, ...], bytes] = {}

    def pids(self) -> list[int]:
        """The processes of the engines."""
        return self.process.members()

    # Startup ------------------------------------------------------------------------------------

    def start(self, process: Process, engine_count: int, begin: float) -> None:
        """See the engines through the handshake."""
        self.process = process
        ready = 0
        poller = zmq.Poller()
        poller.register(self._handshake, zmq.POLLIN)
        poller.register(self.requests, zmq.POLLIN)
        while ready < engine_count or len(self._engine_ids) < engine_count:
            events = dict(poller.poll(100))
            if process.exit_code() is not None or time.perf_counter() - begin > STARTUP_TIMEOUT:
                raise ProcessError(f"{process.name} did not complete the handshake")
            if self._handshake in events:
                identity, payload = self._handshake.recv_multipart()
                if ormsgpack.unpackb(payload)["status"] == "HELLO":
                    self.hello_seconds = self.hello_seconds or time.perf_counter() - begin
                    self._handshake.send_multipart([identity, self._init()])
                else:
                    ready += 1
            if self.requests in events:
                self._engine_ids.append(self.requests.recv_multipart()[0])
        self.ready_seconds = time.perf_counter() - begin
        self._engine_ids.sort()

    def _init(self) -> bytes:
        addresses = {
            "inputs": [self._input_address],
            "outputs": [self._output_address],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
        }
        return ormsgpack.packb({"addresses": addresses, "parallel_config": {}})

    # Requests -----------------------------------------------------------------------------------

    def add(self, max_tokens: int, **params: Any) -> str:
        """Send a request with these sampling parameters to the next engine; gives its id."""
        key = (max_tokens, *map(str, params.items()))
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = _request_template(max_tokens, params)
        request_id = ID_PATTERN.format(self._request_count)
        engine_id = self._engine_ids[self._request_count % len(self._engine_ids)]
        self._request_count += 1
        payload = template.replace(PLACEHOLDER, request_id.encode())
        self.requests.send_multipart([engine_id, ADD, payload])
        return request_id

    def call(self, method: str, *args: Any, timeout: float = STARTUP_TIMEOUT) -> None:
        """Make a utility call on the first engine; outputs that come before its answer are lost."""
        payload = ormsgpack.packb([0, 1, method, list(args)])
        self.requests.send_multipart([self._engine_ids[0], UTILITY, payload])
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.outputs.poll(100):
                continue
            payload = self.outputs.recv()
            if len(payload) > LONGEST_ANSWER:
                continue  # outputs; an engine may make these faster than we can read them
            message = ormsgpack.unpackb(payload, option=ormsgpack.OPT_NON_STR_KEYS)
            if len(message) > ANSWER and message[ANSWER] is not None:
                if (failure := message[ANSWER][1]) is not None:
                    raise ProcessError(f"{method}: {failure}")
                return
        raise ProcessError(f"{method}: no answer after {timeout:g} s")

    def rows(self, timeout: float = 10.0) -> list[list[Any]]:
        """Wait for the next message; gives its outputs."""
        if not self.outputs.poll(int(timeout * 1000)):
            raise ProcessError(f"{self.process.name}: no output for {timeout:g} s")
        rows: list[list[Any]] = unpack_rows(self.outputs.recv())
        return rows

    def drain(self, silence: float = 0.2) -> None:
        """Drop what comes until nothing does for ``silence`` seconds."""
        while self.outputs.poll(int(silence * 1000)):
            self.outputs.recv()


@contextlib.contextmanager
def connected(name: str, command: Command, engine_count: int = 1) -> Iterator[Frontend]:
    """Start engines and shake hands; leaving the block ends them."""
    context = zmq.Context[zmq.Socket[bytes]]()
    try:
        frontend = Frontend(context)
        begin = time.perf_counter()
        with running(name, command(frontend.address), environment=ENVIRONMENT) as process:
            frontend.start(process, engine_count, begin)
            yield frontend
    finally:
        context.destroy(linger=0)


def _bound(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> tuple["zmq.Socket[bytes]", str]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.bind("tcp://127.0.0.1:*")
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def _request_template(max_tokens: int, params: dict[str, Any]) -> bytes:
    request_id = PLACEHOLDER.decode()
    params = {"temperature": 1.0, "max_tokens": max_tokens, "stop_token_ids": [], **params}
    prompt = list(range(1, PROMPT_LENGTH + 1))
    fields = [request_id, prompt, None, params, None, time.time(), *[None] * 5, 0, 0, 0]
    fields += [None, False, request_id, None, None, False, None, None]
    return ormsgpack.packb(fields)


def unpack_rows(payload: bytes | memoryview) -> list[list[Any]]:
    """The outputs of a message."""
    rows: list[list[Any]] = ormsgpack.unpackb(payload, ext_hook=lambda _, data: data)[ROWS]
    return rows


def finish_reason(row: list[Any]) -> int | None:
    """Why the request of this output is over; None if it is not."""
    reason: int | None = row[FINISH_REASON] if len(row) > FINISH_REASON else None
    return reason
