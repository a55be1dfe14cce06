"""Messages between engines, their data-parallel coordinator and frontends.

Mirrors upstream ``vllm/v1/engine/coordinator.py``. A wave is one running period of all engines
together; only engines that run in lockstep (mixture-of-experts models) care for it. Writers raise
`FormError` for a value that has no place in the message: a bug of the caller.
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm._errors import DecodeError
from trio_vllm.protocol._containers import list_of, optional
from trio_vllm.protocol._forms import BOOL, FLOAT, U16, U32, AuxFrames, Buffer, Form, Frames
from trio_vllm.protocol._msgpack import decode_payload, pack
from trio_vllm.protocol._structs import array_struct

SUBSCRIBE = b"\x01"
"""Sent into an XPUB socket: one engine, or one frontend, listens."""
COORDINATOR_READY = b"READY"
"""Broadcast, alone in its frame, once every engine has subscribed."""
_START_DP_WAVE = b"\x02"  # RequestType.START_DP_WAVE, which is above us


@attrs.define
class StartDpWave:
    """Run wave ``wave``, all engines but ``exclude_engine_index`` (it runs already)."""

    wave: int
    exclude_engine_index: int | None = None


@attrs.define
class EngineLoad:
    """How busy one engine is."""

    num_waiting_reqs: int
    num_running_reqs: int
    kv_cache_usage: float = 0.0


@attrs.define
class CoordinatorStats:
    """What a coordinator publishes to frontends; ``loads`` is in rank order, None if unchanged."""

    loads: list[EngineLoad] | None
    current_wave: int
    engines_running: bool


def _decode_exclude(raw: Any, _: Frames) -> int | None:
    # After a first-request notice of a 0.32 frontend, upstream's coordinator passes on the engine
    # id as bytes here, which equals no index and so excludes nobody.
    if raw is None or type(raw) is bytes:
        return None
    return U16.decode(raw, ())


def _encode_exclude(value: int | None, _: AuxFrames) -> Any:
    return None if value is None else U16.encode(value, [])


START_DP_WAVE_PAYLOAD: Form[StartDpWave] = array_struct(
    StartDpWave,
    2,
    {
        "wave": U32,
        "exclude_engine_index": Form("an index or nil", _decode_exclude, _encode_exclude),
    },
)

_ENGINE_LOAD: Form[EngineLoad] = array_struct(
    EngineLoad, 2, {"num_waiting_reqs": U32, "num_running_reqs": U32, "kv_cache_usage": FLOAT}
)

_COORDINATOR_STATS: Form[CoordinatorStats] = array_struct(
    CoordinatorStats,
    3,
    {"loads": optional(list_of(_ENGINE_LOAD)), "current_wave": U32, "engines_running": BOOL},
)


def encode_start_dp_wave(message: StartDpWave) -> list[Buffer]:
    """The START_DP_WAVE message, for a coordinator's broadcast or an input socket."""
    return [_START_DP_WAVE, pack(START_DP_WAVE_PAYLOAD.encode(message, []))]


def decode_start_dp_wave(payload: Buffer) -> StartDpWave:
    """Read the payload of a START_DP_WAVE message; raises `DecodeError`."""
    return decode_payload(START_DP_WAVE_PAYLOAD, payload, (), "a START_DP_WAVE message")


def decode_coordinator_broadcast(frames: Frames) -> StartDpWave | None:
    """Read what a coordinator sends to engines; None for its READY, which may come repeatedly.

    Raises `DecodeError`.
    """
    if len(frames) == 1 and frames[0] == COORDINATOR_READY:
        return None
    if len(frames) == 2 and frames[0] == _START_DP_WAVE:
        return decode_start_dp_wave(frames[1])
    raise DecodeError("a coordinator broadcast", "", f"unknown, {len(frames)} frames")


def encode_coordinator_stats(stats: CoordinatorStats) -> list[Buffer]:
    """What a coordinator publishes to frontends."""
    return [pack(_COORDINATOR_STATS.encode(stats, []))]


def decode_coordinator_stats(frames: Frames) -> CoordinatorStats:
    """Read what a coordinator published to frontends; raises `DecodeError`."""
    what = "a coordinator's stats"
    if len(frames) != 1:
        raise DecodeError(what, "", f"has {len(frames)} frames, not 1")
    return decode_payload(_COORDINATOR_STATS, frames[0], frames, what)
