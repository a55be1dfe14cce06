"""Output messages, put together from rows that are encoded already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_vllm.protocol import (
    Buffer,
    EngineCoreOutput,
    RequestBatchOutputs,
    SchedulerStats,
    encode_outputs,
)

from ._rows import NIL, pack_array_header, pack_double, pack_str, pack_strs

if TYPE_CHECKING:
    from collections.abc import Sequence

COORDINATOR = -1
"""In the place of a client index: the message is for the data-parallel coordinator."""

Outgoing = tuple[int, list[Buffer]]
"""A client index, or `COORDINATOR`, and the frames to send there."""

_FIELDS = 9
# What `encode_outputs` writes around the rows of a message without anything else: no engine index
# of more than one byte and an array header before, nil statistics, time 0.0 and five nils behind.
_ROWS_END = -len(NIL + b"\xcb" + bytes(8) + NIL * 5)
_STATS_START, _STATS_END = 3, -len(b"\xcb" + bytes(8) + NIL * 5)


@attrs.define
class Draft:
    """What one client gets in one step."""

    pieces: list[Buffer] = attrs.field(factory=list)
    """Encoded rows, one or more a piece."""
    row_count: int = 0
    outputs: list[EngineCoreOutput] = attrs.field(factory=list)
    """Rows of the plain path."""
    finished: list[str] = attrs.field(factory=list)
    """Ids of requests that are over."""

    def add(self, piece: Buffer, row_count: int = 1) -> None:
        """Append encoded rows."""
        self.pieces.append(piece)
        self.row_count += row_count


class Envelope:
    """What all messages of an engine have in common around their rows."""

    def __init__(self, engine_index: int, weight_version: str) -> None:
        # Inside a message of nine fields; indices take one, two or three bytes.
        index = engine_index.to_bytes(2, "big")
        packed = index[1:] if engine_index < 128 else b"\xcd" + index
        self._start = pack_array_header(_FIELDS) + packed
        self._weight_version = pack_str(weight_version)

    def start(self, row_count: int) -> bytes:
        """Everything before the rows."""
        return self._start + pack_array_header(row_count)

    def end(self, finished: Sequence[str] = ()) -> bytes:
        """Everything behind the time."""
        listed = pack_strs(finished) if finished else NIL
        return b"".join((NIL, listed, NIL, NIL, self._weight_version))

    def seal(self, draft: Draft, stats: bytes, now: float) -> list[Buffer]:
        """The message of a draft; ``stats`` are encoded, nil for none."""
        pieces, aux = draft.pieces, []
        row_count = draft.row_count
        if draft.outputs:
            rows, *aux = encode_rows(draft.outputs)
            pieces = [*pieces, rows]
            row_count += len(draft.outputs)
        message = (
            self.start(row_count),
            *pieces,
            stats,
            b"\xcb",
            pack_double(now),
            self.end(draft.finished),
        )
        return [b"".join(message), *aux]


def encode_rows(outputs: list[EngineCoreOutput]) -> list[Buffer]:
    """Rows one behind the other, and the auxiliary frames that they refer to."""
    payload, *aux = encode_outputs(RequestBatchOutputs(outputs=outputs))
    start = 2 + len(pack_array_header(len(outputs)))
    return [memoryview(payload)[start:_ROWS_END], *aux]


class StatsTemplate:
    """Encoded `SchedulerStats` in which only a few numbers change, all of fixed width."""

    _MARKS = tuple(2**64 - 1 - i for i in range(6))

    def __init__(self) -> None:
        running, waiting, steps, wave, requests, queries = self._MARKS
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            step_counter=steps,
            current_wave=wave,
        )
        stats.prefix_cache_stats.requests = requests
        stats.prefix_cache_stats.queries = queries
        payload = bytes(encode_outputs(RequestBatchOutputs(scheduler_stats=stats))[0])
        self._bytes = bytearray(payload[_STATS_START:_STATS_END])
        marks = [mark.to_bytes(8, "big") for mark in self._MARKS]
        self._places = [slice(at, at + 8) for at in map(self._bytes.index, marks)]

    def fill(self, *numbers: int) -> bytes:
        """The statistics with these numbers.

        They are: requests running and waiting, step and wave (lockstep only), prefix-cache queries
        since the last statistics in requests and in tokens.
        """
        for place, number in zip(self._places, numbers, strict=True):
            self._bytes[place] = number.to_bytes(8, "big")
        return bytes(self._bytes)
