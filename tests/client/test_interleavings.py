"""Whatever happens in whatever order, every request ends exactly once, with the right tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.client.cores import GARBAGE, SENTINEL, CountingWaiter, Network, RecordingSink
from tests.client.pair import expected_tokens
from tests.client.world import make_request

from trio_vllm.client.utility_calls import UtilityCall
from trio_vllm.client.waves import WaveLeader
from trio_vllm.errors import (
    ClientClosedError,
    DuplicateRequestIdError,
    EngineCoreError,
    EngineDeadError,
    InvalidDataParallelRankError,
)
from trio_vllm.mock import MockEngineConfig
from trio_vllm.protocol import DpControlOutput, FinishReason, encode_outputs

ENGINES = 3
IDS = 4

engine_indices = st.integers(0, ENGINES - 1)
numbers = st.integers(0, IDS - 1)

ACTIONS = st.one_of(
    st.tuples(st.just("add"), numbers, st.integers(1, 4), st.none() | engine_indices),
    st.tuples(st.just("send")),
    st.tuples(st.just("take"), engine_indices),
    st.tuples(st.just("step"), engine_indices),
    st.tuples(st.just("output"), engine_indices),
    st.tuples(st.just("engine"), engine_indices),
    st.tuples(st.just("abort"), st.lists(numbers, max_size=3)),
    st.tuples(st.just("drop"), numbers),
    st.tuples(st.just("pause")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("call")),
    st.tuples(st.just("cancel_call")),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.1, 0.3])),
    st.tuples(
        st.just("die"), engine_indices, st.sampled_from(["kill", "sentinel", "garbage", "unheard"])
    ),
    st.tuples(st.just("lose"), engine_indices, st.sampled_from(["input", "output"])),
    st.tuples(st.just("stranger"), engine_indices, st.booleans()),
    st.tuples(st.just("notice"), engine_indices, st.integers(0, 3), st.booleans()),
)


@attrs.define
class Play:
    """The cores, and what is expected of each request and call."""

    net: Network
    leads: bool
    sinks: list[RecordingSink] = attrs.field(factory=list)
    newest: dict[int, RecordingSink] = attrs.field(factory=dict)
    calls: list[tuple[UtilityCall, CountingWaiter]] = attrs.field(factory=list)
    lost: set[int] = attrs.field(factory=set)

    def act(self, action: Sequence[Any]) -> None:
        name, *args = action
        getattr(self, name)(*args)
        self.check()

    def check(self) -> None:
        """What holds at any time."""
        core = self.net.client
        assert core.next_deadline > self.net.now
        assert core.send_time <= self.net.now + 0.005
        in_flight = [sink for sink in self.sinks if not sink.is_over]
        assert core.in_flight_count == len(in_flight)
        by_engine = core.statistics().requests_in_flight
        for index, count in by_engine.items():
            assert count == sum(sink.engine_index == index for sink in in_flight)

    def serves_nobody(self) -> bool:
        """Whether no request can be taken any more."""
        return self.net.client.failure is not None or not self.net.client.engine_indices

    # What the frontend does

    def add(self, number: int, max_tokens: int, rank: int | None) -> None:
        # An id is used again only after its request has finished: of one that was aborted, outputs
        # may still be on their way.
        before = self.newest.get(number)
        if before is not None and not before.is_over:
            with pytest.raises((DuplicateRequestIdError, EngineDeadError)):
                self.net.client.submit(before.request, RecordingSink(before.request))
            return
        generation = sum(sink.request_id.startswith(f"r{number}.") for sink in self.sinks)
        request = make_request(f"r{number}.{generation}", max_tokens, data_parallel_rank=rank)
        sink = RecordingSink(request)
        alive = set(range(ENGINES)) - self.lost
        try:
            self.net.submit(request, sink)
        except EngineDeadError:
            assert self.serves_nobody()
            assert not alive or self.leads
        except InvalidDataParallelRankError:
            assert rank in self.lost
        else:
            self.newest[number] = sink
            self.sinks.append(sink)

    def send(self) -> None:
        if self.net.client.send_time <= self.net.now:
            self.net.send()

    def abort(self, numbers: list[int]) -> None:
        self.net.client.abort([self.newest[n].request_id for n in numbers if n in self.newest])

    def drop(self, number: int) -> None:
        if sink := self.newest.get(number):
            sink.was_dropped = not sink.is_over
            self.net.client.drop(sink)

    def pause(self) -> None:
        self.net.client.pause_sending(self.net.now)

    def resume(self) -> None:
        self.net.client.resume_sending()

    def call(self) -> None:
        waiter = CountingWaiter()
        try:
            call = self.net.client.call_utility("is_sleeping", [], waiter)
        except EngineDeadError:
            assert self.serves_nobody()
        else:
            self.calls.append((call, waiter))
            self.net.send_urgent()

    def cancel_call(self) -> None:
        if self.calls:
            self.net.client.close_call(self.calls.pop(0)[0])

    # What engines do

    def take(self, index: int) -> None:
        self.net.engines[index].take(self.net.now)

    def step(self, index: int) -> None:
        self.net.engines[index].step(self.net.now)

    def output(self, index: int) -> None:
        self.net.deliver_output(self.net.engines[index])

    def engine(self, index: int) -> None:
        """All three."""
        self.send()
        for act in (self.take, self.step, self.output):
            act(index)

    # What happens to them

    def wait(self, seconds: float) -> None:
        self.net.pass_time(seconds)

    def die(self, index: int, how: str) -> None:
        engine = self.net.engines[index]
        if not engine.is_running:
            return
        self.lost.add(index)
        engine.die(*{"sentinel": [SENTINEL], "garbage": [GARBAGE]}.get(how, []))
        if how != "unheard":
            self.net.client.disconnected(self.net.now, engine_index=index)

    def lose(self, index: int, which: str) -> None:
        """A connection breaks, and the engine does not hear of it."""
        engine, core = self.net.engines[index], self.net.client
        self.lost.add(index)
        if which == "input":
            core.disconnected(self.net.now, engine_index=index)
        else:
            core.disconnected(self.net.now, connection=engine.connection)

    def stranger(self, index: int, is_well_formed: bool) -> None:
        """Nobody's connection brings a message, and breaks."""
        ids = [sink.request_id for sink in self.newest.values()]
        rows = b"".join(b"\x92" + bytes([0xA0 + len(i)]) + i.encode() + b"\x91\x07" for i in ids)
        outputs = b"\x92" + bytes([index, 0x90 + len(ids)]) + rows
        self.net.client.receive([outputs if is_well_formed else GARBAGE], 99, self.net.now)
        self.net.client.disconnected(self.net.now, connection=99)

    def notice(self, index: int, wave: int, is_start: bool) -> None:
        if self.leads:
            told = {"start_wave" if is_start else "wave_complete": wave}
            frames = encode_outputs(DpControlOutput(engine_index=index, **told))
            self.net.client.receive_notice([bytes(frame) for frame in frames], 20 + index)
            self.net.client.coordination_sends()

    # The end

    def finish(self) -> None:
        """Let engines finish half of what is left; the rest ends with the client."""
        for _ in range(20):
            self.net.client.resume_sending()
            for index in range(ENGINES - 1):
                self.engine(index)
        self.net.pass_time(1)
        self.check()
        self.net.client.fail(ClientClosedError())
        self.net.send()
        for index in range(ENGINES):
            while self.net.engines[index].inbox:
                self.take(index)

    def check_end(self) -> None:
        for sink in self.sinks:
            self.check_sink(sink)
        for call, waiter in self.calls:
            self.check_call(call, waiter)
            self.net.client.close_call(call)
        tables = self.net.client.statistics()
        assert not any(tables.requests_in_flight.values())
        assert (tables.utility_calls, tables.unsent_messages, tables.unsent_aborts) == (0, 0, 0)
        for engine in self.net.engines:
            assert not engine.core.has_unfinished or not engine.is_running

    def check_sink(self, sink: RecordingSink) -> None:
        """It has ended once, for a reason that it had, with the tokens of the engine it was on."""
        engine = self.net.engines[sink.engine_index]
        expected = expected_tokens(engine.core, sink.request)
        assert sink.token_ids == expected[: len(sink.token_ids)]
        assert sink.is_over
        if sink.end is FinishReason.LENGTH:
            assert sink.token_ids == expected
        elif isinstance(sink.end, EngineDeadError):
            assert sink.end.engine_index in self.lost
            assert sink.end.engine_index == sink.engine_index or self.leads
        elif isinstance(sink.end, EngineCoreError):
            assert isinstance(sink.end, ClientClosedError)
        else:
            assert sink.end in (None, FinishReason.ABORT)

    def check_call(self, call: UtilityCall, waiter: CountingWaiter) -> None:
        """Each engine has answered or is lost, and whoever waits was woken once."""
        assert call.is_settled
        assert waiter.count == 1
        assert set(call.results.values()) <= {False}
        assert set(call.failures) <= self.lost or self.net.client.failure is not None


def play_out(actions: Sequence[Sequence[Any]], chunk_size: int, *, leads: bool) -> None:
    config = MockEngineConfig(output_token_chunk_size=chunk_size, vocab_size=100)
    waves = WaveLeader(range(ENGINES), is_lockstep=True) if leads else None
    size = ENGINES if leads else 1
    play = Play(Network(ENGINES, config, waves=waves, data_parallel_size=size), leads)
    for action in actions:
        play.act(action)
    play.finish()
    play.check_end()


@settings(max_examples=150, derandomize=True)
@given(
    actions=st.lists(ACTIONS, max_size=40), chunk_size=st.sampled_from([1, 3]), leads=st.booleans()
)
@example(
    actions=[("add", 0, 2, 1), ("die", 1, "unheard"), ("add", 1, 2, None)],
    chunk_size=1,
    leads=False,
)
def test_every_request_ends_once(
    actions: list[tuple[Any, ...]], chunk_size: int, leads: bool
) -> None:
    play_out(actions, chunk_size, leads=leads)
