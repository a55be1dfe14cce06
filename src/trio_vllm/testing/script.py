"""`Answer` and `EngineRecord`: what a mock engine is to answer, and what it has received.

A script sits in the channels between a mock engine and its frontend: it notes each message, and turns
a scripted answer into a trace that the engine replays, in its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    Frames,
    RequestBatchOutputs,
    RequestErrorInfo,
    UtilityRequest,
    decode_engine_message,
    decode_outputs,
    encode_add,
    encode_outputs,
    is_vocabulary_question,
)
from trio_vllm.transport import FrameReceiver, FrameSender, FrontendChannels, Received
from trio_vllm.values import define, frozen


@frozen
class Answer:
    """What an engine answers to a prompt."""

    token_ids: Sequence[int] = ()
    """All tokens of the completion; ``max_tokens`` of the request may cut them."""
    finish_reason: FinishReason = FinishReason.STOP
    """How it ends, unless it is cut."""
    stop_reason: int | str | None = None
    error: str | None = None
    """The text of an error that the engine reports instead of tokens."""

    @property
    def is_missing(self) -> bool:
        """Whether there is no answer at all, not even an end."""
        return self.error is None and not self.token_ids


NEVER = Answer()
"""A request with this answer hangs, as at an engine that is stuck."""

Scripted: TypeAlias = Answer | Sequence[int]
"""An answer, or only its tokens."""

Answers: TypeAlias = (
    Mapping[tuple[int, ...], Scripted] | Callable[[EngineCoreRequest], Scripted | None]
)
"""By the token ids of the prompt, or a function of the request; what has none gets random tokens."""


@define
class EngineRecord:
    """What one engine has received, in order."""

    engine_index: int
    messages: list[EngineMessage] = attrs.field(factory=list, init=False)

    @property
    def requests(self) -> list[EngineCoreRequest]:
        """The requests of callers; their ids are those of the client, which adds to the callers'.

        The client's question for the size of the vocabulary is only in ``messages``.
        """
        return [
            message
            for message in self.messages
            if isinstance(message, EngineCoreRequest) and not is_vocabulary_question(message)
        ]

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the requests' prompts."""
        return [list(request.prompt_token_ids or ()) for request in self.requests]

    @property
    def aborted_ids(self) -> list[str]:
        """The ids of requests that the frontend has aborted."""
        aborts = [message for message in self.messages if isinstance(message, AbortRequests)]
        return [request_id for abort in aborts for request_id in abort.request_ids]

    @property
    def calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The utility calls, but for the question what the model supports, which all clients ask."""
        calls = [message for message in self.messages if isinstance(message, UtilityRequest)]
        return [(c.method, tuple(c.args)) for c in calls if c.method != "get_supported_tasks"]


@define
class Script:
    """Records and answers for one engine, over all frontends that it serves."""

    record: EngineRecord
    _answers: Answers | None = None
    _ends: dict[str, Answer] = attrs.field(factory=dict, init=False)
    """Answers under way whose end the engine would tell differently."""

    def tap(self, channels: FrontendChannels) -> FrontendChannels:
        """The channels with this script in between."""
        outputs = [_ScriptedSender(sender, self) for sender in channels.outputs]
        inputs = [_ScriptedReceiver(receiver, self, outputs) for receiver in channels.inputs]
        return attrs.evolve(channels, inputs=inputs, outputs=outputs)

    def take(self, frames: Frames, outputs: Sequence[FrameSender]) -> Frames | None:
        """Note a message; gives what the engine gets in its place, None for nothing."""
        try:
            message = decode_engine_message(frames)
        except DecodeError:
            return frames  # the engine says what is wrong with it
        self.record.messages.append(message)
        if not isinstance(message, EngineCoreRequest) or message.sampling_params is None:
            return frames
        answer = self._answer_to(message)
        if answer is None:
            return frames
        if answer.is_missing:
            return None
        if answer.error is not None:
            outputs[message.client_index].send_nowait(_refusal(self.record, message, answer.error))
            return None
        return self._with_trace(message, answer)

    def _answer_to(self, request: EngineCoreRequest) -> Answer | None:
        if self._answers is None or is_vocabulary_question(request):
            return None
        if callable(self._answers):
            scripted = self._answers(request)
        else:
            scripted = self._answers.get(tuple(request.prompt_token_ids or ()))
        return scripted if scripted is None or isinstance(scripted, Answer) else Answer(scripted)

    def _with_trace(self, request: EngineCoreRequest, answer: Answer) -> list[bytes]:
        params = request.sampling_params
        assert params is not None
        if params.max_tokens is None or params.max_tokens >= len(answer.token_ids):
            self._ends[request.request_id] = answer
        params = attrs.evolve(params, trace_decode_token_ids=list(answer.token_ids))
        frames = encode_add(attrs.evolve(request, sampling_params=params))
        return [bytes(frame) for frame in frames]

    def give(self, frames: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """What the frontend gets in place of a message of the engine."""
        if not self._ends:
            return frames
        message = decode_outputs([bytes(frame) for frame in frames])
        if not isinstance(message, RequestBatchOutputs):
            return frames
        outputs = [self._with_end(output) for output in message.outputs]
        return encode_outputs(attrs.evolve(message, outputs=outputs))

    def _with_end(self, output: EngineCoreOutput) -> EngineCoreOutput:
        if output.finish_reason is None:
            return output
        answer = self._ends.pop(output.request_id, None)
        if answer is None or output.finish_reason is not FinishReason.LENGTH:
            return output
        return attrs.evolve(
            output, finish_reason=answer.finish_reason, stop_reason=answer.stop_reason
        )


def _refusal(
    record: EngineRecord, request: EngineCoreRequest, text: str
) -> Sequence[bytes | memoryview]:
    error = RequestErrorInfo(code="scripted", message=text, retryable=False)
    output = EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)
    return encode_outputs(RequestBatchOutputs(engine_index=record.engine_index, outputs=[output]))


@frozen
class _ScriptedReceiver:
    """A `FrameReceiver` whose messages go through a script."""

    _receiver: FrameReceiver
    _script: Script
    _outputs: Sequence[FrameSender]

    async def receive_batch(self, limit: int) -> list[Received]:
        while True:
            if batch := self._through(await self._receiver.receive_batch(limit)):
                return batch

    def receive_batch_nowait(self, limit: int) -> list[Received]:
        return self._through(self._receiver.receive_batch_nowait(limit))

    def _through(self, batch: list[Received]) -> list[Received]:
        taken = [(self._script.take(frames, self._outputs), peer) for frames, peer in batch]
        return [(frames, peer) for frames, peer in taken if frames is not None]


@frozen
class _ScriptedSender:
    """A `FrameSender` whose messages go through a script."""

    _sender: FrameSender
    _script: Script

    def send_nowait(self, frames: Sequence[bytes | memoryview]) -> None:
        self._sender.send_nowait(self._script.give(frames))

    async def send(self, frames: Sequence[bytes | memoryview]) -> None:
        await self._sender.send(self._script.give(frames))
