"""`serve_metrics` serves what mock engines do as Prometheus metrics over HTTP. Needs ``trio-vllm[metrics]``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import h11
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from trio_vllm.mock import EngineStatus, EngineStatuses
from trio_vllm.values import frozen

log = logging.getLogger("trio_vllm.mock")

REQUEST_TIME = 5.0
"""Seconds that an HTTP request may take."""


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Listen for HTTP, and log where; `OSError` if that is not possible."""
    listeners = await trio.open_tcp_listeners(port, host=host)
    port = listeners[0].socket.getsockname()[1]
    log.info("metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)
    return listeners


async def serve_metrics(states: EngineStatuses, listeners: list[trio.SocketListener]) -> None:
    """Task: serve until cancelled, which closes the listeners."""
    await trio.serve_listeners(StateServer(states).answer, listeners)


# Metrics ------------------------------------------------------------------------------------------


class StateCollector:
    """Makes metrics of states: under vLLM's names where the thing is the same, else under our own."""

    def __init__(self, states: EngineStatuses) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """What each engine does and has done."""
        states = self._states.read()
        yield from _gauges(states)
        yield from _counters(states)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests that are over, by the reason.",
            labels=["engine", "finished_reason"],
        )
        for state in states:
            for reason, count in state.summary.finish_reasons.items():
                success.add_metric([str(state.engine_index), reason], count)
        yield success


def _gauges(states: Sequence[EngineStatus]) -> Iterator[Metric]:
    yield _family(
        GaugeMetricFamily("vllm:num_requests_running", "Requests that run.", labels=["engine"]),
        states,
        lambda state: state.running,
    )
    yield _family(
        GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", labels=["engine"]),
        states,
        lambda state: state.waiting,
    )
    yield _family(
        GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "KV cache in use; 1 is all.", labels=["engine"]
        ),
        states,
        lambda state: state.kv_cache_usage,
    )
    yield _family(
        GaugeMetricFamily("mock_engine:joined", "Whether it serves a frontend.", labels=["engine"]),
        states,
        lambda state: state.is_joined,
    )


def _counters(states: Sequence[EngineStatus]) -> Iterator[Metric]:
    for name, text, field in (
        ("vllm:prompt_tokens", "Prompt tokens of prefilled requests.", "prefilled_tokens"),
        ("vllm:generation_tokens", "Tokens made.", "tokens"),
        ("vllm:num_preemptions", "Preemptions of requests.", "preemptions"),
        ("vllm:prefix_cache_queries", "Tokens looked for in the cache.", "prefix_cache_queries"),
        ("vllm:prefix_cache_hits", "Tokens found in the cache.", "prefix_cache_hits"),
        ("mock_engine:requests", "Requests taken.", "requests"),
        ("mock_engine:asked_tokens", "Tokens that requests could get.", "tokens_asked"),
        ("mock_engine:errors", "Requests refused, messages not understood.", "errors"),
        ("mock_engine:seconds_behind", "Time lost to a slow machine.", "seconds_behind"),
    ):
        yield _family(
            CounterMetricFamily(name, text, labels=["engine"]),
            states,
            lambda state, field=field: getattr(state.summary, field),  # type: ignore[misc]
        )


def _family(
    family: GaugeMetricFamily | CounterMetricFamily,
    states: Iterable[EngineStatus],
    value: Callable[[EngineStatus], float],
) -> Metric:
    for state in states:
        family.add_metric([str(state.engine_index)], value(state))
    return family


# HTTP ---------------------------------------------------------------------------------------------


@frozen
class Page:
    """An answer."""

    status: int
    content_type: str
    body: bytes


class StateServer:
    """Answers ``/metrics``, ``/healthz`` (it lives) and ``/readyz`` (all engines have a frontend)."""

    def __init__(self, states: EngineStatuses) -> None:
        self._states = states
        self._registry = CollectorRegistry()
        self._registry.register(StateCollector(states))

    def page(self, method: str, path: str) -> Page:
        """The answer to a request."""
        if method not in ("GET", "HEAD"):
            return Page(405, "text/plain", b"only GET\n")
        match path.partition("?")[0]:
            case "/metrics":
                return Page(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
            case "/healthz":
                return self._health(is_ready=True)
            case "/readyz":
                states = self._states.read()
                is_ready = bool(states) and all(state.is_joined for state in states)
                return self._health(is_ready=is_ready)
            case _:
                return Page(404, "text/plain", b"there are /metrics, /healthz and /readyz\n")

    def _health(self, *, is_ready: bool) -> Page:
        states = self._states.read()
        joined = sum(state.is_joined for state in states)
        body = json.dumps({"engines": len(states), "joined": joined}) + "\n"
        return Page(200 if is_ready else 503, "application/json", body.encode())

    async def answer(self, stream: trio.abc.Stream) -> None:
        """Task: answer one request of a connection."""
        async with stream:
            with trio.move_on_after(REQUEST_TIME), suppress(trio.BrokenResourceError):
                await self._answer(stream)

    async def _answer(self, stream: trio.abc.Stream) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            request = await _receive_request(connection, stream)
        except h11.RemoteProtocolError:
            page, method = Page(400, "text/plain", b"that is no HTTP request\n"), ""
        else:
            if request is None:
                return
            method = request.method.decode()
            page = self.page(method, request.target.decode("ascii", "replace"))
        headers = [
            ("Content-Type", page.content_type),
            ("Content-Length", str(len(page.body))),
            ("Connection", "close"),
        ]
        head = connection.send(h11.Response(status_code=page.status, headers=headers)) or b""
        await stream.send_all(head + (b"" if method == "HEAD" else page.body))


async def _receive_request(
    connection: h11.Connection, stream: trio.abc.Stream
) -> h11.Request | None:
    """The next request; None if the connection ends without."""
    while True:  # noqa: ASYNC913
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some()))
        elif isinstance(event, h11.Request):
            return event  # noqa: ASYNC910
        else:
            return None  # noqa: ASYNC910
