"""Target: `FrontendCore` between callers and engines that do whatever they like."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from fuzz.decoders import check_text
from fuzz.framing import join, split
from fuzz.vectors import Frames, recorded
from trio_vllm.client import FrontendCore
from trio_vllm.client.utility_calls import UtilityCall
from trio_vllm.client.waves import WaveFollower, WaveLeader
from trio_vllm.concurrency import Waker
from trio_vllm.errors import (
    ClientClosedError,
    DecodeError,
    EngineCoreError,
    EngineDeadError,
    PeerGoneError,
    RequestError,
    UtilityCallFailedError,
    UtilityRefusedError,
)
from trio_vllm.llm.collector import Collector
from trio_vllm.mock import MockEngineConfig
from trio_vllm.mock.engine import ready_response
from trio_vllm.protocol import (
    SUBSCRIBE,
    EngineCoreOutput,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    FinishReason,
    RequestBatchOutputs,
    UtilityRequest,
    decode_engine_message,
    decode_outputs,
    encode_add,
    encode_outputs,
    encode_utility,
)

ENGINES = 2
SUBSCRIBERS = (30, 31)
"""The connections to the broadcasts that have subscribed during the startup."""
CONFIG = MockEngineConfig(max_model_len=4096, max_loras=1)
"""Made once: its checks took half of the time of an input."""
MAX_DROP_REASONS = 8
"""Kinds of messages that do not count; each is counted under its name."""


class CheckedSink(Collector):
    """A collector that nothing may happen to after the end; it is emptied in between."""

    def __init__(self, request: EngineCoreRequest) -> None:
        super().__init__(request, 0, Waker(), lambda: 0.0, interval=1)
        self.was_dropped = False
        self.count = 0

    __slots__ = ("count", "was_dropped")

    @property
    def is_over(self) -> bool:
        """Whether nothing more may come."""
        return super().is_over or self.was_dropped

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        assert not self.is_over, "tokens came after the end"
        super().add_tokens(token_ids, timestamp, version)

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        assert not self.is_over, "an output came after the end"
        assert output.request_id == self.request_id
        super().add_output(output, timestamp, version)

    def fail(self, error: EngineCoreError) -> None:
        assert not self.is_over, "an error came after the end"
        check_text(str(error))
        super().fail(error)

    def read(self) -> None:
        """Take what has come, as a stream does."""
        try:
            completion = self.take_delta()
        except DecodeError as error:
            check_text(str(error))
        else:
            assert all(0 <= token_id < 2**32 for token_id in completion.token_ids)


@attrs.define
class CountingWaiter:
    """Counts how often it is woken."""

    count: int = 0

    def wake(self) -> None:
        """Count."""
        self.count += 1


def _number(frames: Frames, at: int = 0) -> int:
    return frames[at][0] if len(frames) > at and frames[at] else 0


class Play:
    """A client core, and what is expected of each request and call."""

    def __init__(self, setting: int) -> None:
        self._is_leader = setting & 3 == 1
        self._is_follower = setting & 3 == 2
        waves: WaveLeader | WaveFollower | None = None
        if self._is_leader:
            waves = WaveLeader(
                range(ENGINES), is_lockstep=setting & 4 == 0, subscribers=SUBSCRIBERS
            )
        elif self._is_follower:
            waves = WaveFollower(is_lockstep=setting & 4 == 0, must_notify=setting & 8 == 0)
        size = ENGINES if waves is not None and setting & 4 == 0 else 1
        responses: dict[int, EngineCoreReadyResponse] = {
            index: ready_response(CONFIG, index, data_parallel_size=size)
            for index in range(ENGINES)
        }
        self.core = FrontendCore(responses, waves=waves, vocab_size=1000)
        self._now = 100.0
        self._sinks: list[CheckedSink] = []
        self._calls: list[tuple[UtilityCall, CountingWaiter]] = []
        self._has_listener = False
        self._actions: dict[bytes, Callable[[Frames], None]] = {
            b"submit": self._submit,
            b"from0": lambda frames: self.core.receive(frames, 10, self._now),
            b"from1": lambda frames: self.core.receive(frames, 11, self._now),
            b"stranger": lambda frames: self.core.receive(frames, 99, self._now),
            b"unknown": lambda frames: self.core.receive(frames, None, self._now),
            b"notice": self._notice,
            b"subscribe": self._subscribe,
            b"publish": self._publish,
            b"break": self._break,
            b"wait": self._wait,
            b"call": self._call,
            b"close": self._close_call,
            b"abort": self._abort,
            b"drop": self._drop,
            b"send": self._send,
            b"lost": self._lose_messages,
            b"pause": lambda _: self.core.pause_sending(self._now),
            b"stats": self._read_stats,
        }

    def act(self, name: bytes, frames: Frames) -> None:
        """Do what an action says; unknown ones are an engine's messages."""
        self._actions.get(name, self._actions[b"from0"])(frames)
        self._check()

    def _check(self) -> None:
        in_flight = [sink for sink in self._sinks if not sink.is_over]
        assert self.core.in_flight_count == len(in_flight), (
            "a request is neither over nor in flight"
        )
        if self.core.next_deadline <= self._now:  # the first request asks for a look at once
            self.core.tick(self._now)
        assert self.core.next_deadline > self._now, "a deadline that has passed stays"
        statistics = self.core.statistics()
        assert len(statistics.dropped) <= MAX_DROP_REASONS
        assert statistics.utility_calls == len(self._calls)
        if self.core.failure is not None:
            assert not in_flight, "the client has failed, and a request has not"

    # Callers

    def _submit(self, frames: Frames) -> None:
        try:
            request = decode_engine_message(frames)
        except DecodeError:
            return
        if not isinstance(request, EngineCoreRequest):
            return
        sink = CheckedSink(request)
        try:
            self.core.submit(request, sink)
        except EngineCoreError as error:
            self._check_refusal(error, RequestError)
            return
        self._sinks.append(sink)

    def _abort(self, frames: Frames) -> None:
        ids = [frame.decode(errors="replace") for frame in frames]
        self.core.abort([*ids, *(sink.request_id for sink in self._sinks[: len(ids) - 1])])

    def _drop(self, frames: Frames) -> None:
        if self._sinks:
            sink = self._sinks[_number(frames) % len(self._sinks)]
            self.core.drop(sink)
            sink.was_dropped = sink.was_dropped or not sink.is_over

    def _call(self, frames: Frames) -> None:
        try:
            request = decode_engine_message(frames)
        except DecodeError:
            return
        if not isinstance(request, UtilityRequest):
            return
        waiter = CountingWaiter()
        try:
            call = self.core.call_utility(request.method, request.args, waiter)
        except (EngineCoreError, TypeError) as error:
            self._check_refusal(error, (UtilityRefusedError, TypeError))
            return
        self._calls.append((call, waiter))

    def _check_refusal(self, error: Exception, expected: type | tuple[type, ...]) -> None:
        """It is what was asked that is wrong, or no engine, or the client, serves any more."""
        check_text(str(error))
        if not isinstance(error, expected):
            failure = self.core.failure or EngineDeadError(None)
            assert type(error) is type(failure), f"{error!r} is not among the documented"

    def _close_call(self, _: Frames) -> None:
        if self._calls:
            call, waiter = self._calls.pop(0)
            assert waiter.count == call.is_settled, "whoever waits is woken once"
            self.core.close_call(call)
            if call.is_settled:
                self._read_outcome(call)

    def _read_outcome(self, call: UtilityCall) -> None:
        try:
            call.outcome()
        except EngineCoreError as error:
            check_text(str(error)[:500])  # it has the words of every engine
            expected = (UtilityCallFailedError, EngineDeadError, type(self.core.failure))
            assert isinstance(error, expected), "an error that is not documented"  # noqa: PT017

    def _read_stats(self, _: Frames) -> None:
        if not self._has_listener:
            self._has_listener = True
            self.core.add_stats_listener(lambda index, stats: None)
        try:
            self.core.scheduler_stats()
        except DecodeError as error:
            check_text(str(error))

    # Engines

    def _notice(self, frames: Frames) -> None:
        if self._is_leader:
            self.core.receive_notice(frames, 20 + len(frames) % ENGINES)

    def _subscribe(self, frames: Frames) -> None:
        if self._is_leader:
            self.core.receive_subscription(frames[1:], _number(frames))

    def _publish(self, frames: Frames) -> None:
        if self._is_follower:
            self.core.receive_publication(frames)

    def _break(self, frames: Frames) -> None:
        number = _number(frames)
        if number < ENGINES:
            self.core.disconnected(self._now, engine_index=number)
        else:
            self.core.disconnected(self._now, connection=number)

    # Driver

    def _wait(self, frames: Frames) -> None:
        end = self._now + _number(frames) / 100
        while self.core.next_deadline <= end:
            self._now = max(self._now, self.core.next_deadline)
            self.core.tick(self._now)
        self._now = end

    def _send(self, _: Frames) -> None:
        for message in [*self.core.urgent_sends(), *self.core.sends()]:
            assert all(isinstance(frame, bytes | memoryview) for frame in message.frames)
        self.core.coordination_sends()
        assert not self.core.has_sends

    def _lose_messages(self, frames: Frames) -> None:
        for message in self.core.sends():
            if message.engine.index == _number(frames) % ENGINES:
                error = PeerGoneError(message.engine.engine_id)
                self.core.undeliverable(message, error, self._now)

    # The end

    def finish(self) -> None:
        """Close the client: all is over then, and the tables are empty."""
        self.core.fail(ClientClosedError())
        self._check()
        self._send([])
        for sink in self._sinks:
            sink.read()
        while self._calls:
            assert self._calls[0][0].is_settled
            self._close_call([])
        tables = self.core.statistics()
        assert not any(tables.requests_in_flight.values())
        assert (tables.utility_calls, tables.unsent_messages, tables.unsent_aborts) == (0, 0, 0)


def fuzz_client(data: bytes) -> None:
    """The first byte says which part we have in waves; actions follow, named by first frames."""
    if not data:
        return
    play = Play(data[0])
    for name, *frames in split(data[1:]):
        play.act(name, frames)
    play.finish()


# Seeds ----------------------------------------------------------------------------------------------


def client_seeds() -> list[bytes]:
    """Recorded requests, each with an answer, and all that else can happen."""
    requests = [frames for frames in recorded("input", limit=3000) if frames[0] == b"\x00"]
    outputs = recorded("output", limit=3000)
    notices = recorded("coordinator_output")
    publications = recorded("frontend_stats_publish")
    utility = [frames for frames in recorded("input") if frames[0] == b"\x03"]
    names = [b"from0", b"from1", b"stranger", b"unknown"]
    seeds = []
    for number, output in enumerate(outputs):
        request = requests[number % len(requests)]
        engine = names[number % 2]
        actions: list[Frames] = [
            [engine, *_hello(number % 2)],
            [b"submit", *_renamed(request, output)],
            [b"send"],
            [engine, *output],
        ]
        others: list[Frames] = [
            [b"call", *utility[number % len(utility)]],
            [b"notice", *notices[number % len(notices)]],
            [b"publish", *publications[number % len(publications)]],
            [b"break", bytes([number % 32])],
            [b"subscribe", b"\x20", SUBSCRIBE],
            [b"wait", b"\x1e"],
            [b"abort", b"a"],
            [b"drop", b"\x00"],
            [b"lost", bytes([number % 2])],
            [b"stats"],
            [b"pause"],
            [b"close"],
        ]
        extra = others[number % len(others)]
        actions.insert(number % 5, extra)
        seeds.append(bytes([number % 16]) + join(actions))
    return [*seeds, _whole_life()]


def _hello(engine_index: int) -> Frames:
    return [*map(bytes, encode_outputs(RequestBatchOutputs(engine_index=engine_index)))]


def _renamed(request: Frames, output: Frames) -> Frames:
    """The request under the id that an answer names, if both can be read and it names one."""
    try:
        message, answer = decode_engine_message(request), decode_outputs(output)
        assert isinstance(message, EngineCoreRequest)
        if not isinstance(answer, RequestBatchOutputs) or not answer.outputs:
            return request
        request_id, rank = answer.outputs[0].request_id, answer.engine_index
        message = attrs.evolve(message, request_id=request_id, data_parallel_rank=rank)
        return [*map(bytes, encode_add(message))]
    except EngineCoreError:
        return request


def _whole_life() -> bytes:
    """Simple requests with simple answers."""
    params = EngineCoreSamplingParams(max_tokens=3)
    request = EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=params)
    rows = [EngineCoreOutput("a", [5]), EngineCoreOutput("a", [6], finish_reason=FinishReason.STOP)]
    answers = [encode_outputs(RequestBatchOutputs(outputs=[row], timestamp=1.0)) for row in rows]
    call = encode_utility(UtilityRequest(0, 1, "is_sleeping", []))
    actions = [
        [b"submit", *encode_add(request)],
        [b"call", *call],
        *([b"from0", *answer] for answer in answers),
    ]
    return b"\x00" + join([[bytes(frame) for frame in action] for action in actions])
