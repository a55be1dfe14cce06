"""`Waves` and the messages between engines, their data-parallel coordinator and frontends.

Theory of operation. The engines of a mixture-of-experts model step together; a wave is one period
in which all of them run. While any of them has work, all run; when none has, all stop at once, which
ends the wave. An idle engine that gets a request cannot begin alone. From vLLM 0.33 on it notifies
the coordinator, which wakes the others. Before that it did so only for a request of an older wave;
for others the frontend had to see that the engines were idle, and notify the coordinator. So with
every request that is sent to seemingly idle engines the others are woken, which does no harm if they
run already or are woken twice. Only the engines' own notices say that they run, since a paused
engine does not wake.

Mirrors upstream ``vllm/v1/engine/coordinator.py`` and
``engine-core-client/src/coordinator/inproc.rs``. Encoders raise `CodecError` for a value that does
not fit the message.
"""

from __future__ import annotations

from trio_vllm.errors import DecodeError
from trio_vllm.protocol.codec import Buffer, Frames, UInt32
from trio_vllm.protocol.handshake import EngineId
from trio_vllm.protocol.msgpack import decode_frame, pack
from trio_vllm.protocol.output import DpControlOutput, UndecodedBatch, decode_outputs_lazily
from trio_vllm.protocol.request import RequestType, StartDpWave, decode_start_dp_wave
from trio_vllm.protocol.structs import as_array, codec_of
from trio_vllm.values import define

SUBSCRIBE = b"\x01"
"""Sent into an XPUB socket by an engine, or a frontend, that subscribes to all topics."""
COORDINATOR_READY = b"READY"
"""The broadcast, alone in its frame, that follows the subscription of the last engine."""


@as_array()
@define
class EngineLoad:
    """The load of one engine."""

    num_waiting_reqs: UInt32
    num_running_reqs: UInt32
    kv_cache_usage: float = 0.0


@as_array()
@define
class CoordinatorStats:
    """The coordinator's statistics for frontends; ``loads`` is in rank order, None if unchanged."""

    loads: list[EngineLoad] | None
    current_wave: UInt32
    engines_running: bool


_STATS = codec_of(CoordinatorStats)


def decode_coordinator_broadcast(frames: Frames) -> StartDpWave | None:
    """Decode what a coordinator sends to engines; None for its READY, which may come repeatedly.

    Raises `DecodeError`.
    """
    if len(frames) == 1 and frames[0] == COORDINATOR_READY:
        return None
    if len(frames) == 2 and frames[0] == RequestType.START_DP_WAVE.value:
        return decode_start_dp_wave(frames[1:])
    raise DecodeError("a coordinator broadcast", "", f"unknown, {len(frames)} frames")


def encode_coordinator_stats(stats: CoordinatorStats) -> list[Buffer]:
    """Encode a coordinator's statistics for frontends."""
    return [pack(_STATS.encode(stats, []))]


def decode_coordinator_stats(frames: Frames) -> CoordinatorStats:
    """Decode a coordinator's statistics for frontends; raises `DecodeError`."""
    return decode_frame(_STATS, frames, "a coordinator's stats")


@define
class Waves:
    """The state of data-parallel waves as a coordinator, or a frontend that follows one, knows it."""

    current_wave: int = 0
    engines_running: bool = False

    def send_request(self, engine_index: int) -> StartDpWave | None:
        """Record a request of the current wave; gives the message that wakes the others, if needed."""
        if self.engines_running:
            return None
        return StartDpWave(self.current_wave, exclude_engine_index=engine_index)

    def receive_notice(self, notice: DpControlOutput) -> StartDpWave | None:
        """Record a wave notice of an engine; gives the message that wakes others, if needed."""
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
        """Record that an engine connected again; gives the message that it may have missed."""
        return StartDpWave(self.current_wave) if self.engines_running else None

    def follow(self, stats: CoordinatorStats) -> None:
        """Adopt what another process, which is the coordinator, published."""
        self.current_wave = stats.current_wave
        self.engines_running = stats.engines_running


def decode_coordinator_notice(frames: Frames) -> DpControlOutput | None:
    """Decode what an engine sends to its coordinator; None for statistics.

    Raises `DecodeError` also for other output messages.
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
    """Encode a frontend's notice of a request to an idle engine, for coordinators before 0.33."""
    return [pack([bytes(EngineId.of(engine_index)), wave])]
