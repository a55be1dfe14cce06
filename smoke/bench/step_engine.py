"""Engine cores that answer like vLLM's: a step gives each request a token, in one message.

``python -m bench.step_engine ADDRESS [--engines N] [--interval SECONDS]``. What they write is packed when
a request comes, so that they cost little next to who reads it. With an interval each makes a step so
often, one after the other; without, the only one makes them as fast as it can. A request with `ALONE` among
its ``extra_args`` gets messages of its own.
"""

import argparse
import dataclasses
import functools
import struct
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import ormsgpack

from bench.raw_engine import TOKEN, join
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprobs,
    PrefillStats,
    RequestBatchOutputs,
    RequestType,
    UtilityCallOutput,
    UtilityOutput,
    encode_outputs,
)

ALONE = "is_alone"


@dataclasses.dataclass
class Request:
    """What a request still gets, packed."""

    first: list[bytes]
    """A row, and the auxiliary frames that it refers to."""
    others: bytes
    last: bytes
    left: int
    """Tokens."""
    is_alone: bool
    """Whether its rows have messages of their own."""

    def take_frames(self) -> list[bytes]:
        """The row of its next token, and its auxiliary frames."""
        self.left -= 1
        frames, self.first = self.first, [self.others]
        return frames if self.left or len(frames) > 1 else [self.last]


class Engine:
    """One of them: its sockets and its requests."""

    def __init__(self, address: str, index: int) -> None:
        self._index = index
        self._requests, self._outputs = join(address, index)
        self._running: dict[str, Request] = {}
        batch = RequestBatchOutputs(engine_index=index, weight_version="default")
        no_rows_at_time_0 = b"\x90\xc0\xcb" + bytes(8)
        self._before, self._after = encode(batch)[0].split(no_rows_at_time_0)

    def take_requests(self, patience: float | None) -> None:
        """Take what has come; if there is nothing to do wait for it, so many seconds at most."""
        wait = None if patience is None else int(patience * 1000)
        while self._requests.poll(0 if self._running else wait):
            kind, payload, *_ = self._requests.recv_multipart()
            fields = ormsgpack.unpackb(payload, option=ormsgpack.OPT_NON_STR_KEYS)
            if kind == RequestType.ADD:
                self._running[fields[0]] = packed_request(fields)
            elif kind == RequestType.UTILITY:
                self._answer_call(*fields)

    def _answer_call(self, _client: int, call_id: int, method: str, _args: list[Any]) -> None:
        """Tell what is asked for at the start; all else succeeds without a result."""
        result = ["generate"] if method == "get_supported_tasks" else None
        answer = UtilityCallOutput(
            engine_index=self._index, output=UtilityOutput(call_id, result=result)
        )
        self._outputs.send_multipart(encode(answer))

    def step(self) -> None:
        """Give each request a token; a row with auxiliary frames has its message alone."""
        rows = []
        for request in self._running.values():
            row, *aux = request.take_frames()
            if aux or request.is_alone:
                self._send([row], aux)
            else:
                rows.append(row)
        if rows:
            self._send(rows)
        self._running = {name: r for name, r in self._running.items() if r.left}

    def _send(self, rows: list[bytes], aux: Sequence[bytes] = ()) -> None:
        count = b"\xdc" + len(rows).to_bytes(2, "big")
        now = b"\xc0\xcb" + struct.pack(">d", time.monotonic())
        message = b"".join((self._before, count, *rows, now, self._after))
        self._outputs.send_multipart([message, *aux])


def packed_request(request: list[Any]) -> Request:
    """Pack the rows of a request."""
    (name, prompt), params = request[:2], request[3]
    placeholder = "?" * len(name)
    first, others, last = packed_rows(
        placeholder,
        len(prompt),
        params["max_tokens"] == 1,
        params.get("logprobs"),
        params.get("prompt_logprobs"),
    )

    def own(row: bytes) -> bytes:
        return row.replace(placeholder.encode(), name.encode(), 1)

    row, *aux = first
    is_alone = ALONE in (params.get("extra_args") or ())
    return Request([own(row), *aux], own(others), own(last), params["max_tokens"], is_alone)


@functools.cache
def packed_rows(
    name: str, prompt_len: int, is_short: bool, count: int | None, prompt_count: int | None
) -> tuple[list[bytes], bytes, bytes]:
    """The first row with its auxiliary frames, the others and the last; a short one has only one."""
    row = EngineCoreOutput(name, [TOKEN])
    if count is not None:
        row.new_logprobs = some_logprobs(1, count + 1)
    others, last = packed_row(row), attrs.evolve(row, finish_reason=FinishReason.LENGTH)
    first = last if is_short else attrs.evolve(row)
    first.prefill_stats = PrefillStats(num_prompt_tokens=prompt_len)
    if prompt_count is not None:
        first.new_prompt_logprobs_tensors = some_logprobs(prompt_len - 1, prompt_count + 1)
    return packed_row(first), others[0], packed_row(last)[0]


def some_logprobs(rows: int, columns: int) -> Logprobs:
    """Of so many tokens, with so many candidates."""
    ids = np.full((rows, columns), TOKEN, np.int32)
    values = np.tile(-np.arange(1, columns + 1, dtype=np.float32), (rows, 1))
    return Logprobs(ids, values, np.ones(rows, np.int64))


def packed_row(output: EngineCoreOutput) -> list[bytes]:
    """A row as it stands in a message, and its auxiliary frames."""
    (empty,) = encode(RequestBatchOutputs())
    message, *aux = encode(RequestBatchOutputs(outputs=[output]))
    start = empty.index(b"\x90") + 1
    return [message[start : start - len(empty)], *aux]


def encode(outputs: EngineCoreOutputs) -> list[bytes]:
    """The frames of a message."""
    return [bytes(frame) for frame in encode_outputs(outputs)]


def main() -> None:
    """Join the frontend and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--interval", type=float)
    arguments = parser.parse_args()
    engines = [Engine(arguments.address, index) for index in range(arguments.engines)]
    if arguments.interval is None:
        while True:
            engines[0].take_requests(None)
            engines[0].step()
    pause, due = arguments.interval / len(engines), time.monotonic()
    while True:
        for engine in engines:
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
            engine.take_requests(0)
            engine.step()


if __name__ == "__main__":
    main()
