"""`Learner`: finds out what a request depends on, by harmless calls and requests, once for all."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol

import attrs
import trio

from trio_vllm.client.core import FrontendCore
from trio_vllm.client.input_processing import callers_id, check_request, fill_defaults
from trio_vllm.client.streams import OutputStream, Sink
from trio_vllm.client.utility_calls import STRINGS, UTILITY_TIMEOUT, first
from trio_vllm.errors import (
    AdapterError,
    EngineCoreError,
    EngineDeadError,
    RequestError,
    UnsupportedFieldError,
    UtilityCallFailedError,
    copy_error,
)
from trio_vllm.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    LoRARequest,
    vocabulary_question,
)
from trio_vllm.values import define


class Engines(Protocol):
    """Sends what is needed to learn; the `CoreDriver`."""

    core: FrontendCore

    async def call_utility(self, method: str, *args: Any, timeout: float) -> dict[int, Any]:
        """Run a method on every living engine."""
        ...

    def submit(self, request: EngineCoreRequest, sink: Sink) -> None:
        """Send a request."""
        ...

    def drop(self, sink: Sink) -> None:
        """Forget a request."""
        ...


@define(eq=False)
class _Run:
    """Something under way that other tasks wait for."""

    is_over: trio.Event = attrs.field(factory=trio.Event)
    error: EngineCoreError | None = None


class SharedRuns:
    """Runs what several tasks need at the same time only once; they share the outcome."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, _Run] = {}

    async def run(self, key: Hashable, function: Callable[[], Awaitable[None]]) -> None:
        """Run ``function``, or wait for the run of this key that is under way.

        Returns or raises as that does. If that is cancelled, who waits looks again for themselves:
        whether there is anything left to do is for the caller to ask.
        """
        if (other := self._runs.get(key)) is not None:
            await other.is_over.wait()
            if other.error is not None:
                raise copy_error(other.error)
            return
        run = self._runs[key] = _Run()
        try:
            await function()
        except EngineCoreError as error:
            run.error = error
            raise
        finally:
            del self._runs[key]
            run.is_over.set()


class Learner:
    """Learns the facts that a request lacks."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._runs = SharedRuns()

    async def learn_for(self, request: EngineCoreRequest) -> None:
        """Learn what a request depends on and is not known; see `CoreDriver.prepare`."""
        try:
            await self._learn_for(request)
        except RequestError as error:
            error.request_id = callers_id(request)  # it may be the copy of one of another request
            raise

    async def _learn_for(self, request: EngineCoreRequest) -> None:
        await trio.lowlevel.checkpoint()
        facts = self._engines.core.facts
        # Nothing is to be found out for one that is refused whatever comes of it.
        check_request(fill_defaults(request), facts.limits)
        while facts.lacks_tasks(request):
            await self._runs.run("tasks", self.learn_supported_tasks)
        while facts.lacks_vocab_size(request):
            await self._runs.run("vocabulary", lambda: self._learn_vocab_size(request))
        if facts.lacks_adapter(request):
            await self._load_adapter(request)

    # Tasks --------------------------------------------------------------------------------------

    async def learn_supported_tasks(self, *, timeout: float = UTILITY_TIMEOUT) -> None:
        """Ask the engines what the model can do; see `CoreDriver.learn_supported_tasks`."""
        await trio.lowlevel.checkpoint()
        facts, deadline = self._engines.core.facts, trio.current_time() + timeout
        while facts.limits.supported_tasks is None:
            left = max(deadline - trio.current_time(), 0)
            try:
                results = await self._engines.call_utility("get_supported_tasks", timeout=left)
            except UtilityCallFailedError as error:
                if not isinstance(error.__cause__, EngineDeadError):
                    raise
                continue  # one has died, the others serve on
            tasks = first(STRINGS.check("get_supported_tasks", results))
            facts.learn(supported_tasks=tasks)

    # The vocabulary -----------------------------------------------------------------------------

    async def _learn_vocab_size(self, request: EngineCoreRequest) -> None:
        """Ask an engine; costs a step of one token, and some 10 bytes per token of the vocabulary."""
        question = vocabulary_question(secrets.token_hex(8), request.priority)
        stream = OutputStream(question.request_id, max_tokens=1)
        self._engines.submit(question, stream)
        try:
            outputs = [item.output async for item in stream]
        finally:
            self._engines.drop(stream)
        size = _vocab_size(outputs)
        if size is None:
            reason = f"is not known and the engines do not tell it ({_end(outputs)}): state it"
            raise UnsupportedFieldError(callers_id(request), "vocab_size", reason)
        self._engines.core.facts.learn(vocab_size=size)

    # Adapters -----------------------------------------------------------------------------------

    async def _load_adapter(self, request: EngineCoreRequest) -> None:
        """Load an adapter into every engine: one that does not load would kill them in a request."""
        await trio.lowlevel.checkpoint()
        core, lora = self._engines.core, request.lora_request
        assert lora is not None
        key = attrs.astuple(lora)
        if lora.load_inplace:
            await self._runs.run(key, lambda: self._add_lora(request, lora))
            return
        while core.facts.lacks_adapter(request):
            await self._runs.run(key, lambda: self._add_lora(request, lora))

    async def _add_lora(self, request: EngineCoreRequest, lora: LoRARequest) -> None:
        core = self._engines.core
        core.facts.check_adapter_id(request, lora)
        wire_lora = list(attrs.astuple(lora))
        try:
            results = await self._engines.call_utility(
                "add_lora", wire_lora, timeout=UTILITY_TIMEOUT
            )
        except UtilityCallFailedError as error:
            text = "; ".join(f"engine {i}: {why}" for i, why in error.failures.items())
            raise AdapterError(callers_id(request), lora.lora_name, text) from error
        refusing = [str(index) for index, result in results.items() if result is not True]
        if refusing:
            reason = f"engine {', '.join(refusing)} did not take it"
            raise AdapterError(callers_id(request), lora.lora_name, reason)


def _vocab_size(outputs: list[EngineCoreOutput]) -> int | None:
    """The columns of log probabilities, but for that of the token itself."""
    for output in outputs:
        if output.new_logprobs is not None:
            return int(output.new_logprobs.token_ids.shape[1]) - 1
    return None


def _end(outputs: list[EngineCoreOutput]) -> str:
    last = outputs[-1] if outputs else None
    if last is None or last.finish_reason is None:
        return "no answer"
    return last.error.message if last.error is not None else f"{last.finish_reason.name}"
