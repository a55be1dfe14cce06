"""Data-parallel waves as a coordinator, or a frontend that follows one, sees them.

Theory of operation. The engines of a mixture-of-experts model step together. While any of them has
work, all run; when none has, all stop at once, which ends the wave. An idle engine that gets a
request cannot begin alone. From vLLM 0.33 on it tells the coordinator, who wakes the others. Before
that it did so only for a request of an older wave, and otherwise waited: the frontend had to see
that the engines were idle, and tell. So with every request that is sent to seemingly idle engines
the others are woken, which does no harm if they run already or are told twice. Only the engines'
own notices say that they run, since a paused engine does not wake.

Mirrors upstream ``vllm/v1/engine/coordinator.py`` and
``engine-core-client/src/coordinator/inproc.rs``.
"""

from __future__ import annotations

import attrs

from trio_vllm._errors import DecodeError
from trio_vllm.protocol._coordination import CoordinatorStats, StartDpWave
from trio_vllm.protocol._forms import Buffer, Frames
from trio_vllm.protocol._handshake import EngineId
from trio_vllm.protocol._msgpack import pack
from trio_vllm.protocol._output_message import DpControlOutput, RowBatch, open_outputs


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
    message = open_outputs(frames)
    match message:
        case DpControlOutput():
            return message
        case RowBatch(rows=[], finished_requests=None):
            return None
        case _:
            engine_index = getattr(message, "engine_index", None)
            reason = "has something else than statistics or waves"
            raise DecodeError("a notice to the coordinator", "", reason, engine_index)


def encode_first_request_notice(engine_index: int, wave: int) -> list[Buffer]:
    """Tell a coordinator of vLLM before 0.33 that an engine got a request while all were idle."""
    return [pack([bytes(EngineId.of(engine_index)), wave])]
