"""Messages whose rows have log probabilities: read as a whole, they give what row by row they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llm.logprobs import make_logprobs
from tests.protocol.comparing import same
from tests.ready import ready_response

from trio_vllm.client import AnswerCheck, FrontendCore
from trio_vllm.concurrency import Waker
from trio_vllm.errors import DecodeError, EngineCoreError
from trio_vllm.llm.collector import Collector
from trio_vllm.llm.output import CompletionOutput
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    FinishReason,
    PrefillStats,
    RequestBatchOutputs,
    encode_outputs,
)

CONNECTION = 10
NAMES = tuple("abcdefgh")


class Client:
    """A client's core with requests on one engine, and the messages of that."""

    def __init__(self, sinks: list[Any], *, engine_index: int = 0) -> None:
        self.core = FrontendCore({engine_index: ready_response(engine_index)})
        self.engine_index = engine_index
        self.sinks = sinks
        for request, sink in sinks:
            self.core.submit(request, sink)

    def receive(self, *outputs: EngineCoreOutput, time: float = 1.0) -> None:
        """Handle a message with these outputs."""
        batch = RequestBatchOutputs(
            engine_index=self.engine_index,
            outputs=list(outputs),
            timestamp=time,
            weight_version="v1",
        )
        self.core.receive([bytes(f) for f in encode_outputs(batch)], CONNECTION, time)


def make_request(name: str, **params: Any) -> EngineCoreRequest:
    """A request of two tokens that asks for log probabilities."""
    asked: dict[str, Any] = {"max_tokens": 20, "logprobs": 1, **params}
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling_params=EngineCoreSamplingParams(**asked),
    )


def collecting_client(**params: Any) -> Client:
    """Requests whose outputs are collected to their ends."""
    requests = [make_request(name, **params) for name in NAMES]
    collectors = [Collector(r, 0, Waker(), lambda: 5.0, interval=0) for r in requests]
    return Client(list(zip(requests, collectors, strict=True)))


def output_of(name: str, token: int, width: int | None, **fields: Any) -> EngineCoreOutput:
    """A token, with log probabilities if there is a width."""
    logprobs = None if width is None else make_logprobs([token], width)
    return EngineCoreOutput(name, [token], new_logprobs=logprobs, **fields)


def end_of(collector: Collector) -> CompletionOutput | str:
    """What has become of a request."""
    if collector.error is not None:
        return str(collector.error)
    try:
        return collector.take_output()
    except DecodeError as error:
        return str(error)


@st.composite
def steps(draw: st.DrawFn) -> list[list[EngineCoreOutput]]:
    """Some messages: mostly of all requests in one layout, then the last of each."""
    messages = []
    for step in range(draw(st.integers(1, 4))):
        names = draw(st.sampled_from([NAMES, NAMES, NAMES[:5], NAMES[3:], ("x", *NAMES)]))
        width = draw(st.sampled_from([2, 2, 2, 5, 1, None]))
        fields: dict[str, Any] = {"prefill_stats": PrefillStats()} if step == 0 else {}
        odd = draw(st.sampled_from(["", *NAMES]))
        messages.append(
            [
                output_of(name, 100 * step + i, 3 if name == odd else width, **fields)
                for i, name in enumerate(names)
            ]
        )
    last = [output_of(name, 7, 2, finish_reason=FinishReason.LENGTH) for name in NAMES]
    return [*messages, last]


@settings(deadline=None)
@given(steps(), st.sampled_from([0, 1, 3]), st.sampled_from([2, 20]))
def test_a_message_is_handled_like_its_rows_alone(
    messages: list[list[EngineCoreOutput]], logprobs: int, max_tokens: int
) -> None:
    """Errors, too: too few columns, missing log probabilities, too many tokens."""
    whole, alone = (collecting_client(logprobs=logprobs, max_tokens=max_tokens) for _ in range(2))
    for time, outputs in enumerate(messages, 1):
        whole.receive(*outputs, time=float(time))
        for output in outputs:
            alone.receive(output, time=float(time))

    for (_, collector), (_, other) in zip(whole.sinks, alone.sinks, strict=True):
        assert same(end_of(collector), end_of(other))


@attrs.define
class NotingSink:
    """Notes how outputs come."""

    request_id: str
    takes: bool = True
    engine_index: int = -1
    answer_checks: Sequence[AnswerCheck] = ()
    kinds: list[str] = attrs.field(factory=list)
    outputs: list[EngineCoreOutput] = attrs.field(factory=list)

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        self.kinds.append("tokens")

    def add_raw_logprobs(self, token_ids: list[int], logprobs: Any, *_: object) -> bool:
        self.kinds.append(type(logprobs).__name__)
        return self.takes

    def add_output(self, output: EngineCoreOutput, timestamp: float, version: str | None) -> None:
        self.kinds.append("output")
        self.outputs.append(output)

    def fail(self, error: EngineCoreError) -> None:
        self.kinds.append(type(error).__name__)


def noting_client(*, takes: bool = True, engine_index: int = 0) -> Client:
    """Requests whose outputs are only noted."""
    sinks = [(make_request(name), NotingSink(name, takes)) for name in NAMES]
    return Client(sinks, engine_index=engine_index)


def test_rows_are_not_unpacked_from_the_second_message_on() -> None:
    """Until one comes without them, or in another layout."""
    client = noting_client()
    for width in (2, 2, 2, None, 2, 2, 5, 5):
        client.receive(*(output_of(name, 7, width) for name in NAMES))

    expected = ["list", "bytes", "bytes", "tokens", "list", "bytes", "list", "bytes"]
    assert [sink.kinds for _, sink in client.sinks] == [expected] * len(NAMES)


def test_the_first_and_the_last_row_of_a_request() -> None:
    """Their log probabilities are not decoded; what else they have comes besides."""
    client = noting_client()
    for _ in range(2):
        client.receive(*(output_of(name, 7, 2) for name in NAMES))
    rows = [output_of(name, 7, 2) for name in NAMES]
    rows[0].prefill_stats = PrefillStats(num_prompt_tokens=5)
    rows[5].finish_reason = FinishReason.LENGTH
    client.receive(*rows)

    kinds = [sink.kinds[2:] for _, sink in client.sinks]
    assert kinds == [["list", "output"], *[["bytes"]] * 4, ["list", "output"], *[["bytes"]] * 2]
    expected = [
        EngineCoreOutput("a", prefill_stats=PrefillStats(num_prompt_tokens=5)),
        EngineCoreOutput("f", finish_reason=FinishReason.LENGTH),
    ]
    assert same([output for _, sink in client.sinks for output in sink.outputs], expected)
    assert client.core.in_flight_count == len(NAMES) - 1


def test_a_sink_that_does_not_take_them_gets_outputs() -> None:
    """Decoded ones, the same as if they had come alone."""
    client = noting_client(takes=False)
    for _ in range(2):
        client.receive(*(output_of(name, 7, 2) for name in NAMES))

    for name, (_, sink) in zip(NAMES, client.sinks, strict=True):
        assert same(sink.outputs, [output_of(name, 7, 2)] * 2)


@pytest.mark.parametrize("count", [1, 3])
def test_few_rows_are_unpacked(count: int) -> None:
    """For them it does not pay."""
    client = noting_client()
    for _ in range(3):
        client.receive(*(output_of(name, 7, 2) for name in NAMES[:count]))

    assert client.sinks[0][1].kinds == ["list"] * 3


@pytest.mark.parametrize("engine_index", [127, 128, 255, 256, 65535])
@pytest.mark.parametrize("count", range(4, 9))
def test_engines_of_any_index(engine_index: int, count: int) -> None:
    """It is written in up to three bytes before the rows, which are found behind it."""
    client = noting_client(engine_index=engine_index)
    for _ in range(3):
        client.receive(*(output_of(name, 7, 2) for name in NAMES[:count]))

    kinds = [sink.kinds for _, sink in client.sinks]
    assert kinds == [["list", "bytes", "bytes"]] * count + [[]] * (len(NAMES) - count)
    assert client.core.dead_engines == {}
