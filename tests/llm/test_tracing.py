"""A span per request, under vLLM's names, and one trace from the caller to the engine."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import trio
from tests.client.world import make_output
from tests.llm.world import LlmWorld, make_prompt, open_llm_world
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_vllm.errors import RequestError
from trio_vllm.protocol import (
    EngineCoreEvent,
    EventType,
    FinishReason,
    RequestErrorInfo,
)

sdk = pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from trio_vllm.llm.tracing import RequestTracing  # noqa: E402

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "rojo=00f067aa0ba902b7"}


class Traces:
    """The tracing of one test."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = sdk.TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = RequestTracing(self.provider)

    def spans(self) -> list[Any]:
        """Those that have ended."""
        return list(self.exporter.get_finished_spans())

    def span(self) -> Any:
        """The only one."""
        (span,) = self.spans()
        return span


def ids(span: Any) -> tuple[str, str]:
    """Of its trace and its own, as headers have them."""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def run_request(world: LlmWorld, **fields: Any) -> Any:
    """A request that takes 3 s, with 3 tokens, the first after 0.5 s; gives what the engine got."""
    await world.start(partial(world.llm.generate, make_prompt(**fields)))
    (request,) = world.engine.requests()
    events = [EngineCoreEvent(EventType.QUEUED, 50.0), EngineCoreEvent(EventType.SCHEDULED, 51.0)]
    world.pass_time(0.5)
    await world.engine.send(make_output([7], request.request_id, events=events), timestamp=54.0)
    world.pass_time(2.5)
    last = make_output([8, 2], request.request_id, finish_reason=FinishReason.STOP)
    await world.engine.send(last, timestamp=60.0)
    return request


async def test_the_attributes_of_a_request() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        await run_request(world, max_tokens=9, top_p=0.5, temperature=0.25)

    span = traces.span()
    assert (span.name, span.kind, span.status.status_code) == (
        "llm_request",
        trace.SpanKind.SERVER,
        trace.StatusCode.UNSET,
    )
    assert (span.start_time, span.end_time) == (1_000 * 10**9, 1_003 * 10**9)
    assert dict(span.attributes) == {
        "gen_ai.request.id": "x",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.temperature": 0.25,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_in_model_prefill": 3.0,
        "gen_ai.latency.time_in_model_decode": 6.0,
        "gen_ai.latency.time_in_model_inference": 9.0,
    }


async def test_what_an_engine_does_not_tell_has_no_attribute() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt(temperature=0.0)))
        await world.finish(world.engine.requests()[0].request_id)

    assert not {
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_in_model_prefill",
        "gen_ai.request.temperature",
    } & set(traces.span().attributes)


async def test_the_caller_s_trace_goes_on_to_the_engine() -> None:
    """Other headers of the request stay as they are."""
    traces = Traces()
    headers = {**HEADERS, "x-other": "1"}
    async with open_llm_world(observers=[traces.observer]) as world:
        request = await run_request(world, request_trace_headers=headers)

    span = traces.span()
    trace_id, span_id = ids(span)
    assert trace_id == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert request.trace_headers == {**headers, "traceparent": f"00-{trace_id}-{span_id}-01"}


async def test_without_headers_the_current_span_is_the_parent() -> None:
    traces = Traces()
    tracer = traces.provider.get_tracer("test")
    async with open_llm_world(observers=[traces.observer]) as world:
        with tracer.start_as_current_span("caller") as caller:
            request = await run_request(world)

    ours, _ = traces.spans()
    assert ours.parent.span_id == caller.get_span_context().span_id
    assert ids(ours)[0] in request.trace_headers["traceparent"]


async def test_each_completion_has_a_span() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        await world.start(
            lambda: world.llm.generate(make_prompt(n=2, request_trace_headers=HEADERS))
        )
        requests = world.engine.requests()
        for request in requests:
            await world.finish(request.request_id)

    sent = [request.trace_headers["traceparent"] for request in requests if request.trace_headers]
    assert sent == [f"00-{TRACE}-{ids(span)[1]}-01" for span in traces.spans()]


async def test_who_leaves_ends_the_span() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        async with world.llm.stream(make_prompt()):
            await wait_all_tasks_blocked()

    assert traces.span().attributes["gen_ai.usage.completion_tokens"] == 0
    assert traces.span().status.status_code is trace.StatusCode.UNSET


REFUSED = RequestErrorInfo(code="engine_paused", message="the engine is paused")


async def test_a_request_that_an_engine_refuses_is_an_error() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.finish(request.request_id, [], finish_reason=FinishReason.ERROR, error=REFUSED)

    status = traces.span().status
    assert (status.status_code, status.description) == (trace.StatusCode.ERROR, REFUSED.message)


async def test_an_error_of_a_request_that_ran_is_an_error() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        (request,) = world.engine.requests()
        await world.finish(request.request_id, [7], finish_reason=FinishReason.ERROR)

    assert traces.span().status.status_code is trace.StatusCode.ERROR
    assert traces.span().attributes["gen_ai.usage.completion_tokens"] == 1


async def test_a_request_that_we_refuse_is_an_error() -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        with pytest.raises(RequestError):
            await world.llm.generate(make_prompt(request_priority=2**31))

    assert "priority" in traces.span().status.description


@pytest.mark.parametrize("headers", [7, {"traceparent": 7}])
async def test_headers_that_are_none_are_refused(headers: Any) -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        with pytest.raises(RequestError, match="trace_headers"):
            await world.llm.generate(make_prompt(request_trace_headers=headers))

    assert traces.spans() == []


async def test_a_request_that_fails_with_its_engine_is_an_error(autojump_clock: MockClock) -> None:
    traces = Traces()
    async with open_llm_world(observers=[traces.observer]) as world:
        await world.start(lambda: world.llm.generate(make_prompt()))
        await world.engine.die()
        await trio.sleep(1)

    assert traces.span().status.status_code is trace.StatusCode.ERROR


async def test_without_a_provider_headers_are_handed_on() -> None:
    """OpenTelemetry then makes no spans, and keeps what the caller said."""
    async with open_llm_world(observers=[RequestTracing()]) as world:
        request = await run_request(world, request_trace_headers=HEADERS)
        other = await run_request(world)

    assert (request.trace_headers, other.trace_headers) == (HEADERS, None)


def test_opentelemetry_is_imported_only_when_asked_for() -> None:
    program = "import sys, trio_vllm, trio_vllm.llm; print('opentelemetry' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
