"""Messages between engines, their data-parallel coordinator and frontends.

Mirrors upstream ``vllm/v1/engine/coordinator.py``. A wave is one running period of all engines
together; only engines that run in lockstep (mixture-of-experts models) care for it. Writers raise
`CodecError` for a value that has no place in the message: a bug of the caller.
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import (
    BOOL,
    FLOAT,
    U16,
    U32,
    AuxFrames,
    Buffer,
    Codec,
    Frames,
    list_of,
    optional,
)
from trio_vllm.protocol.handshake import EngineId
from trio_vllm.protocol.msgpack import decode_payload, pack
from trio_vllm.protocol.output import DpControlOutput, UndecodedBatch, decode_outputs_lazily
from trio_vllm.protocol.structs import array_struct

# MERGED protocol/_wave: Data-parallel waves as a coordinator, or a frontend that follows one, sees them.
#
# Theory of operation. The engines of a mixture-of-experts model step together. While any of them has
# work, all run; when none has, all stop at once, which ends the wave. An idle engine that gets a
# request cannot begin alone. From vLLM 0.33 on it tells the coordinator, who wakes the others. Before
# that it did so only for a request of an older wave, and otherwise waited: the frontend had to see
# that the engines were idle, and tell. So with every request that is sent to seemingly idle engines
# the others are woken, which does no harm if they run already or are told twice. Only the engines'
# own notices say that they run, since a paused engine does not wake.
#
# Mirrors upstream ``vllm/v1/engine/coordinator.py`` and
# ``engine-core-client/src/coordinator/inproc.rs``.


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


START_DP_WAVE_PAYLOAD: Codec[StartDpWave] = array_struct(
    StartDpWave,
    2,
    {
        "wave": U32,
        "exclude_engine_index": Codec("an index or nil", _decode_exclude, _encode_exclude),
    },
)

_ENGINE_LOAD: Codec[EngineLoad] = array_struct(
    EngineLoad, 2, {"num_waiting_reqs": U32, "num_running_reqs": U32, "kv_cache_usage": FLOAT}
)

_COORDINATOR_STATS: Codec[CoordinatorStats] = array_struct(
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


@attrs.define
class Waves:
    """Which wave it is, and whether the engines run it or wait for it."""

    current_wave: int = 0
    engines_running: bool = False

    def send_request(self, engine_index: int) -> StartDpWave | None:
        """A request of the current wave goes to this engine; whom to wake for it, if needed."""
        if self.engines_running:
            return None
        return StartDpWave(self.current_wave, exclude_engine_index=engine_index)

    def receive_notice(self, notice: DpControlOutput) -> StartDpWave | None:
        """An engine tells its coordinator of a wave's start or end; whom to wake, if needed."""
        if notice.wave_complete is not None and notice.wave_complete >= self.current_wave:
            self.current_wave = notice.wave_complete + 1
            self.engines_running = False
        wave = notice.start_wave
        if wave is None or wave < self.current_wave:
            return None
        if wave == self.current_wave and self.engines_running:
            return None
        self.current_wave = wave
        self.engines_running = True
        return StartDpWave(wave, exclude_engine_index=notice.engine_index)

    def receive_subscription(self) -> StartDpWave | None:
        """An engine's connection was broken and is back; what it may have missed."""
        return StartDpWave(self.current_wave) if self.engines_running else None

    def follow(self, stats: CoordinatorStats) -> None:
        """Another process is the coordinator, and this is what it published."""
        self.current_wave = stats.current_wave
        self.engines_running = stats.engines_running


def decode_coordinator_notice(frames: Frames) -> DpControlOutput | None:
    """Read what an engine sends to its coordinator; None for statistics.

    Raises `DecodeError` also for what can be read and has no business there.
    """
    message = decode_outputs_lazily(frames)
    match message:
        case DpControlOutput():
            return message
        case UndecodedBatch(rows=[], finished_requests=None):
            return None
        case _:
            engine_index = getattr(message, "engine_index", None)
            reason = "has something else than statistics or waves"
            raise DecodeError("a notice to the coordinator", "", reason, engine_index)


def encode_first_request_notice(engine_index: int, wave: int) -> list[Buffer]:
    """Tell a coordinator of vLLM before 0.33 that an engine got a request while all were idle."""
    return [pack([bytes(EngineId.of(engine_index)), wave])]
