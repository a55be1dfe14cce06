"""Target: `MockEngine` under frontends that send whatever they like."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fuzz.decoders import check_text
from fuzz.framing import join, split
from fuzz.vectors import Frames, recorded
from trio_vllm.errors import DecodeError
from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.mock.encoding import COORDINATOR, Outgoing
from trio_vllm.protocol import (
    RequestBatchOutputs,
    UtilityCallOutput,
    decode_coordinator_broadcast,
    decode_outputs,
    encode_abort,
)

MAX_STEPS = 64
"""Steps that are made at the end for what is still deferred."""


def _number(frames: Frames) -> int:
    return frames[0][0] if frames and frames[0] else 0


@functools.cache
def config_of(setting: int) -> MockEngineConfig:
    """How an engine is; made once for each setting, because its checks take long."""
    is_scheduled = setting & 72 == 72  # there, an interval or several tokens at once cannot be
    return MockEngineConfig(
        schedule=is_scheduled,
        lockstep=setting & 4 == 4,
        output_token_chunk_size=3 if setting & 8 and not is_scheduled else 1,
        stop_at_eos=setting & 16 == 16,
        log_requests=setting & 32 == 32,
        step_interval=0.01 if setting & 64 and not is_scheduled else 0.0,
        max_loras=2,
        vocab_size=1000,
        max_model_len=4096,
        embedding_size=8,
    )


class Play:
    """An engine, and what its frontends have been sent."""

    def __init__(self, setting: int) -> None:
        self._client_count = 1 + (setting & 1)
        self._has_coordinator = setting & 2 == 2
        self.engine = MockEngine(
            config_of(setting),
            client_count=self._client_count,
            has_coordinator=self._has_coordinator,
            fast_path=setting & 128 == 0,
        )
        self._now = 100.0
        self._actions: dict[bytes, Callable[[Frames], None]] = {
            b"message": self._message,
            b"broadcast": self._broadcast,
            b"step": self._step,
            b"steps": self._steps,
            b"hold": self._hold,
            b"wave": lambda _: self._sent(self.engine.complete_wave(self._now)),
            b"shutdown": self._shut_down,
        }

    def act(self, name: bytes, frames: Frames) -> None:
        """Do what an action says; unknown ones are messages."""
        self._actions.get(name, self._message)(frames)
        running, waiting = self.engine.counts
        assert running >= 0
        assert waiting >= 0
        for entry in self.engine.events.pop_entries():
            assert str(entry)
        self._now += 0.001

    def _message(self, frames: Frames) -> None:
        self._sent(self.engine.handle(frames, self._now))

    def _broadcast(self, frames: Frames) -> None:
        try:
            notice = decode_coordinator_broadcast(frames)
        except DecodeError as error:
            check_text(str(error))
        else:
            if notice is not None:
                self.engine.start_wave(notice, self._now)

    def _step(self, _: Frames) -> None:
        due = self.engine.next_step_time(self._now)
        if due is not None:
            self._now = max(self._now, due)
            self._sent(self.engine.step(self._now))

    def _steps(self, frames: Frames) -> None:
        due = self.engine.next_step_time(self._now)
        if due is not None and due <= self._now:
            self._sent(self.engine.steps(self._now, 1 + _number(frames) % 32))

    def _hold(self, frames: Frames) -> None:
        mask = _number(frames)
        clients = {index for index in range(self._client_count) if mask >> index & 1}
        if self._has_coordinator and mask & 4:
            clients.add(COORDINATOR)
        self.engine.hold_clients(frozenset(clients), self._now)

    def _shut_down(self, frames: Frames) -> None:
        self._sent(self.engine.shut_down(self._now, drain=_number(frames) % 2 == 1))

    def _sent(self, messages: list[Outgoing]) -> None:
        """All that the engine sends can be read, and is for somebody there is."""
        for to, frames in messages:
            outputs = decode_outputs([bytes(frame) for frame in frames])
            if to == COORDINATOR:
                assert self._has_coordinator
                assert not isinstance(outputs, UtilityCallOutput)
            else:
                assert 0 <= to < self._client_count
                assert isinstance(outputs, RequestBatchOutputs | UtilityCallOutput)

    def finish(self) -> None:
        """Once all is aborted, nothing is left, and the engine sleeps."""
        self.engine.hold_clients(frozenset(), self._now)
        self._sent(self.engine.shut_down(self._now, drain=False))
        for _ in range(MAX_STEPS):
            due = self.engine.next_step_time(self._now)
            if due is None:
                break
            self._now = max(self._now, due) + 0.1
            self._sent(self.engine.step(self._now))
        else:
            raise AssertionError("the engine has work without end")
        assert not self.engine.has_unfinished, "a request was not aborted"


def fuzz_engine(data: bytes) -> None:
    """The first byte says how the engine is; actions follow, named by their first frames."""
    if not data:
        return
    play = Play(data[0])
    for name, *frames in split(data[1:]):
        play.act(name, frames)
    play.finish()


def engine_seeds() -> list[bytes]:
    """Recorded messages to engines, with steps in between, and all that else can happen."""
    messages = [frames for frames in recorded("input", limit=5000) if len(frames[0]) == 1]
    broadcasts = recorded("coordinator_input")
    others: list[Frames] = [
        [b"hold", b"\x01"],
        [b"hold", b"\x00"],
        [b"wave"],
        [b"shutdown", b"\x01"],
        [b"message", *map(bytes, encode_abort(["min-1", "a"]))],
    ]
    seeds = []
    for number, message in enumerate(messages):
        actions: list[Frames] = [[b"message", *message], [b"step"], [b"steps", b"\x10"], [b"step"]]
        actions.insert(number % 5, others[number % len(others)])
        actions.append([b"message", *messages[number * 7 % len(messages)]])
        actions.append([b"broadcast", *broadcasts[number % len(broadcasts)]])
        actions.append([b"step"])
        seeds.append(bytes([number % 256]) + join(actions))
    return seeds
