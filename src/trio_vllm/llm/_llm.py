"""`Llm`: prompts in, completions out, over an `EngineCoreClient`.

This is the one place that makes request ids and reads the wall clock. Mirrors ``rust/src/llm`` and,
for several completions of one prompt, ``vllm/v1/engine/parallel_sampling.py``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs
import trio

from trio_vllm._errors import InvalidFieldError, fresh
from trio_vllm.client import Bootstrapped, EngineCoreClient, HandshakeOwner, Waker, open_client
from trio_vllm.llm._collector import Collector
from trio_vllm.llm._output import CompletionOutput, EncodeOutput, GenerateOutput
from trio_vllm.llm._request import EncodeRequest, GenerateRequest, PromptRequest
from trio_vllm.protocol import EngineCoreRequest, EngineCoreSamplingParams

FINAL_ONLY = 0
"""The delivery interval of a request that is waited for to its end."""


class _Generation:
    """The engine requests of one caller's request, which share a waker."""

    def __init__(self, collectors: list[Collector], waker: Waker) -> None:
        self.collectors = collectors
        self._waker = waker

    async def wait_due(self) -> Collector | None:
        """Wait until some completion has a delivery; None when all have ended."""
        while True:
            if due := next((c for c in self.collectors if c.is_due), None):
                return due
            self._raise_error()
            if all(collector.finished for collector in self.collectors):
                return None
            await self._waker.wait()

    async def wait_finished(self) -> None:
        """Wait for the ends of all completions."""
        while not all(collector.finished for collector in self.collectors):
            self._raise_error()
            await self._waker.wait()

    def _raise_error(self) -> None:
        for collector in self.collectors:
            if collector.error is not None:
                raise fresh(collector.error)


class GenerateStream:
    """An asynchronous iterator over what is new of a prompt's completions; see `Llm.stream`.

    A caller who is slower than the engine gets several tokens at once. One task at a time may
    iterate.
    """

    def __init__(self, request_id: str, generation: _Generation) -> None:
        self.request_id = request_id
        """The caller's id."""
        self._generation = generation

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> CompletionOutput:
        """Wait for the next delivery.

        Raises:
          EngineDeadError: The engine died, or its connection was lost.
          DecodeError: An output of this request could not be read.
          ClientClosedError: The client was closed.
          trio.BusyResourceError: Another task is iterating.

        Cancellation:
          Loses nothing; what came in the meantime is part of the next delivery.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        collector = await self._generation.wait_due()
        await trio.lowlevel.cancel_shielded_checkpoint()
        if collector is None:
            raise StopAsyncIteration
        return collector.take()


class Llm:
    """Token in, token out; made by `open_llm`, or over a client of your own."""

    def __init__(self, client: EngineCoreClient, *, randomize_request_ids: bool = True) -> None:
        """With ``randomize_request_ids`` engines see ``{request_id}-{8 hex}``.

        Without it they see the caller's ids as they are, which then must be unique.
        """
        self.client = client
        self._randomize = randomize_request_ids
        self._internal_ids: dict[str, set[str]] = {}

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Complete a prompt and wait for the end.

        An abort (by `abort`, or by the engine as it shuts down) is a normal output with
        `FinishReason.ABORT`; what the engine has against the request is one with
        `FinishReason.ERROR` and its details.

        Raises:
          RequestError: The request was refused, nothing was sent.
          EngineDeadError: The engine died, or its connection was lost.
          DecodeError: An output of this request could not be read.
          ClientClosedError: The client is closed.

        Cancellation:
          Aborts the request.
        """
        external_id, children = self._children(request)
        with self._submitted(external_id, children, FINAL_ONLY) as generation:
            await generation.wait_finished()
            return GenerateOutput(
                request_id=external_id,
                prompt_token_ids=list(request.prompt_token_ids),
                completions=[collector.take() for collector in generation.collectors],
            )

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateStream]:
        """Complete a prompt; the block's value iterates over what is new.

        The first token is delivered at once, later ones when ``stream_interval`` of them are there.
        Leaving the block early, for whatever reason, aborts the request. Entering raises what
        `generate` raises before anything was sent, iterating the rest.
        """
        external_id, children = self._children(request)
        interval = request.sampling_params.stream_interval or 1
        with self._submitted(external_id, children, interval) as generation:
            yield GenerateStream(external_id, generation)

    async def encode(self, request: EncodeRequest) -> EncodeOutput:
        """Pool a prompt. Raises and is cancelled as `generate`."""
        external_id = self._external_id(request)
        child = self._engine_request(request, external_id, pooling_params=request.pooling_params)
        with self._submitted(external_id, [child], FINAL_ONLY) as generation:
            await generation.wait_finished()
            data, completion = generation.collectors[0].take_pooled()
            return EncodeOutput(
                request_id=external_id,
                prompt_token_ids=list(request.prompt_token_ids),
                data=data,
                completion=completion,
            )

    def abort(self, request_ids: Iterable[str] = ()) -> None:
        """End requests by the caller's ids, each with all engine requests it stands for.

        Unknown and finished ids are ignored. Without ids, everything in flight is aborted. Whoever
        waits gets what there is, with `FinishReason.ABORT`.
        """
        external_ids = list(request_ids) or list(self._internal_ids)
        for external_id in external_ids:
            self.client.abort(list(self._internal_ids.get(external_id, ())))

    async def shutdown(self) -> None:
        """Abort everything and close the client; idempotent. Later calls raise `ClientClosedError`."""
        self.abort()
        self.client.close()
        await trio.lowlevel.checkpoint()

    # From the caller's request to the engines' ----------------------------------------------------

    def _external_id(self, request: PromptRequest) -> str:
        return uuid.uuid4().hex if request.request_id is None else request.request_id

    def _children(self, request: GenerateRequest) -> tuple[str, list[EngineCoreRequest]]:
        """The caller's id, and one engine request per completion."""
        external_id = self._external_id(request)
        params = self._completed(request, external_id)
        parent = self._engine_request(
            request,
            external_id,
            sampling_params=params,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
        )
        if params.n == 1:
            return external_id, [parent]
        return external_id, [
            attrs.evolve(
                parent,
                request_id=f"{index}_{parent.request_id}",
                sampling_params=attrs.evolve(
                    params, n=1, seed=None if params.seed is None else params.seed + index
                ),
            )
            for index in range(params.n)
        ]

    def _completed(self, request: GenerateRequest, external_id: str) -> EngineCoreSamplingParams:
        """The sampling parameters, with a number for ``max_tokens``."""
        params = request.sampling_params
        if type(params.n) is not int or params.n < 1:
            raise InvalidFieldError(external_id, "sampling_params.n", "must be 1 or more")
        if params.max_tokens is not None:
            return params
        room = self.client.max_model_len - len(request.prompt_token_ids)
        return attrs.evolve(params, max_tokens=max(room, 1))

    def _engine_request(
        self, request: PromptRequest, external_id: str, **fields: Any
    ) -> EngineCoreRequest:
        internal_id = f"{external_id}-{uuid.uuid4().hex[:8]}" if self._randomize else external_id
        arrival = request.arrival_time
        return EngineCoreRequest(
            request_id=internal_id,
            external_req_id=external_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            arrival_time=time.time() if arrival is None else arrival,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            trace_headers=request.trace_headers,
            priority=request.priority,
            data_parallel_rank=request.data_parallel_rank,
            session_id=request.session_id,
            kv_hints=request.kv_hints,
            **fields,
        )

    @contextmanager
    def _submitted(
        self, external_id: str, children: list[EngineCoreRequest], interval: int
    ) -> Iterator[_Generation]:
        """Send the engine requests; at the end abort those that have not ended."""
        waker = Waker()
        collectors = [
            Collector(child, index, waker, time.time, interval=interval)
            for index, child in enumerate(children)
        ]
        internal_ids = self._internal_ids.setdefault(external_id, set())
        submitted: list[str] = []
        try:
            for child, collector in zip(children, collectors, strict=True):
                self.client.submit(child, collector)
                internal_ids.add(child.request_id)
                submitted.append(child.request_id)
            yield _Generation(collectors, waker)
        finally:
            for internal_id in submitted:
                self.client.drop(internal_id)
            internal_ids.difference_update(submitted)
            if not internal_ids:
                self._internal_ids.pop(external_id, None)


@asynccontextmanager
async def open_llm(
    mode: HandshakeOwner | Bootstrapped,
    *,
    randomize_request_ids: bool = True,
    client_index: int = 0,
    vocab_size: int | None = None,
    structured_outputs_backend: str = "xgrammar",
) -> AsyncIterator[Llm]:
    """Connect to engine cores; the block's value generates. See `Llm` and `open_client`."""
    async with open_client(
        mode,
        client_index=client_index,
        vocab_size=vocab_size,
        structured_outputs_backend=structured_outputs_backend,
    ) as client:
        yield Llm(client, randomize_request_ids=randomize_request_ids)
