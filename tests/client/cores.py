"""The client's core and mock engines' cores, which call each other: no tasks, no clock, no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
from tests.client.pair import has_work
from tests.ready import ready_response

from trio_vllm.client import AnswerCheck, FrontendCore
from trio_vllm.client.engines import QueuedMessage
from trio_vllm.errors import EngineCoreError, PeerGoneError
from trio_vllm.mock import MockEngine, MockEngineConfig
from trio_vllm.protocol import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Frames,
    RequestBatchOutputs,
    encode_outputs,
)


class RecordingSink:
    """A `Sink` that keeps everything, and suffers nothing after the end."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.request_id = request.request_id
        self.engine_index = -1
        self.answer_checks: Sequence[AnswerCheck] = ()
        self.token_ids: list[int] = []
        self.end: FinishReason | EngineCoreError | None = None
        self.was_dropped = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more may come."""
        return self.end is not None or self.was_dropped

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        assert not self.is_over
        self.token_ids += token_ids

    def add_raw_logprobs(self, *_: object) -> bool:
        return False

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        assert not self.is_over
        self.token_ids += output.new_token_ids
        self.end = output.finish_reason

    def fail(self, error: EngineCoreError) -> None:
        assert not self.is_over
        self.end = error


@attrs.define
class CountingWaiter:
    """Counts how often it is woken."""

    count: int = 0

    def wake(self) -> None:
        """Count."""
        self.count += 1


@attrs.define
class EngineProcess:
    """A mock engine, and what is under way between it and the client."""

    core: MockEngine
    inbox: deque[Frames] = attrs.field(factory=deque)
    outbox: deque[Frames] = attrs.field(factory=deque)
    is_running: bool = True
    """Whether the process lives, and so takes messages."""

    @property
    def connection(self) -> int:
        """The number of its connection for outputs."""
        return 10 + self.core.engine_index

    def take(self, now: float) -> None:
        """Handle one message."""
        if self.is_running and self.inbox:
            self._relay(self.core.handle(self.inbox.popleft(), now))

    def step(self, now: float) -> None:
        """Make a step, if there is work."""
        if self.is_running and has_work(self.core, now):
            self._relay(self.core.step(now))

    def _relay(self, outgoing: list[tuple[int, Any]]) -> None:
        self.outbox += [[bytes(frame) for frame in frames] for _, frames in outgoing]

    def die(self, *last_words: bytes) -> None:
        """End the process; what it has sent arrives."""
        self.is_running = False
        self.inbox.clear()
        self.outbox += [[frame] for frame in last_words]


SENTINEL = ENGINE_CORE_DEAD
GARBAGE = b"\x92\x00\xa1x"


class Network:
    """The two cores' sides of the wire, and the time; the test says what happens when."""

    def __init__(self, engine_count: int, config: MockEngineConfig, **options: Any) -> None:
        """``options`` are those of `FrontendCore`, and of the ready responses before ``core_``."""
        ready = {key: options.pop(key) for key in list(options) if key == "data_parallel_size"}
        responses = {index: ready_response(index, **ready) for index in range(engine_count)}
        self.client = FrontendCore(responses, **options)
        self.engines = [EngineProcess(MockEngine(config, index)) for index in responses]
        self.now = 100.0
        for engine in self.engines:
            hello = encode_outputs(RequestBatchOutputs(engine_index=engine.core.engine_index))
            engine.outbox.append([bytes(frame) for frame in hello])
            self.deliver_output(engine)

    def deliver_output(self, engine: EngineProcess) -> None:
        """Let the client handle one message of an engine."""
        if engine.outbox:
            self.client.receive(engine.outbox.popleft(), engine.connection, self.now)

    def submit(self, request: EngineCoreRequest, sink: RecordingSink) -> None:
        """Submit a request as a driver does."""
        self.client.submit(request, sink)
        self.send_urgent()
        self.client.confirm(sink)
        self.pass_time(0)

    def send_urgent(self) -> None:
        """Send what must not wait."""
        while messages := self.client.urgent_sends():
            self._send(messages)

    def send(self) -> None:
        """Send everything."""
        while messages := self.client.sends():
            self._send(messages)

    def _send(self, messages: list[QueuedMessage]) -> None:
        for message in messages:
            engine = self.engines[message.engine.index]
            if engine.is_running:
                engine.inbox.append([bytes(frame) for frame in message.frames])
            else:
                error = PeerGoneError(message.engine.engine_id)
                self.client.undeliverable(message, error, self.now)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, deadline by deadline."""
        end = self.now + seconds
        while self.client.next_deadline <= end:
            self.now = max(self.now, self.client.next_deadline)
            self.client.tick(self.now)
        self.now = end
