"""`RequestTracing`: an OpenTelemetry span per request; needs the extra ``trio-vllm[tracing]``.

    from trio_vllm.llm.tracing import RequestTracing

    async with open_llm(mode, observers=[RequestTracing()]) as llm: ...

Name and attributes are those of ``OutputProcessor.do_tracing`` in ``vllm/v1/engine/output_processor.py``;
what an engine does not tell has no attribute. The parent is what the request's ``trace_headers`` name,
else the caller's current span; the engine gets headers that name the span.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trio_vllm.errors import how_to_install

try:
    from opentelemetry import context, trace
    from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tracing needs opentelemetry: {how_to_install('tracing')}", name=error.name
    ) from error

from trio_vllm.llm.observers import FinishedCompletion, Observer
from trio_vllm.protocol import EngineCoreRequest, EngineCoreSamplingParams, FinishReason

SPAN_NAME = "llm_request"

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTracing(Observer):
    """Observer that makes a span of each engine request; ``n`` completions are as many.

    It ends with the last output. A request that is refused or fails has an error for its status.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """Without a provider OpenTelemetry's global one is asked."""
        self._tracer = trace.get_tracer("trio_vllm", tracer_provider=tracer_provider)
        self._spans: dict[str, Span] = {}

    def trace_headers(self, request: EngineCoreRequest) -> Mapping[str, str] | None:
        headers: Any = request.trace_headers
        if headers is not None and not _are_headers(headers):
            return None  # for the client to refuse
        span = self._tracer.start_span(
            SPAN_NAME,
            context=_PROPAGATOR.extract(headers or {}, context.get_current()),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(request.arrival_time),
        )
        self._spans[request.request_id] = span
        carrier = dict(headers or {})
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        return carrier or None

    def finished(self, engine_index: int, completion: FinishedCompletion) -> None:
        if (span := self._spans.pop(completion.request_id, None)) is None:
            return
        span.set_attributes(_attributes(completion))
        if completion.finish_reason is FinishReason.ERROR:
            span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(completion.arrival_time + completion.timings.e2e_latency))

    def over(self, request_id: str, failure: str) -> None:
        if (span := self._spans.pop(request_id, None)) is not None:
            span.set_status(StatusCode.ERROR, failure)
            span.end()


def _are_headers(headers: object) -> bool:
    return isinstance(headers, Mapping) and all(
        isinstance(text, str) for pair in headers.items() for text in pair
    )


def _nanoseconds(time: float) -> int:
    return round(time * 1e9)


def _attributes(completion: FinishedCompletion) -> dict[str, Any]:
    usage, timings = completion.usage, completion.timings
    values = {
        "gen_ai.request.id": completion.external_request_id,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.output_tokens,
        "gen_ai.latency.time_to_first_token": timings.time_to_first_token,
        "gen_ai.latency.e2e": timings.e2e_latency,
        "gen_ai.latency.time_in_queue": timings.queued_time,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_time,
        "gen_ai.latency.time_in_model_decode": timings.decode_time,
        "gen_ai.latency.time_in_model_inference": timings.inference_time,
        **_parameters(completion.sampling_params),
    }
    return {name: value for name, value in values.items() if value is not None}


def _parameters(params: EngineCoreSamplingParams | None) -> dict[str, Any]:
    """Upstream leaves out those that are 0."""
    if params is None:
        return {}
    return {
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens or None,
        "gen_ai.request.temperature": params.temperature or None,
        "gen_ai.request.top_p": params.top_p or None,
    }
