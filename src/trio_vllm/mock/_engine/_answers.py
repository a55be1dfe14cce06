"""What an engine answers outside of steps: ends, refusals, and results of utility calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_vllm.protocol import (
    DpControlOutput,
    EngineCoreOutput,
    FinishReason,
    RequestBatchOutputs,
    RequestErrorInfo,
    SchedulerStats,
    UtilityCallOutput,
    UtilityOutput,
    encode_outputs,
)

from ._messages import COORDINATOR, Outgoing

if TYPE_CHECKING:
    from ._admission import Refusal
    from ._load import Counts


@attrs.define
class Answers:
    """Messages to send, in order."""

    _engine_index: int
    now: float = 0.0
    """The time that they carry, that of the message or step in hand."""
    _messages: list[Outgoing] = attrs.field(factory=list, init=False)

    def take(self) -> list[Outgoing]:
        """Give up all messages."""
        messages = self._messages
        if messages:
            self._messages = []
        return messages

    def finish(
        self,
        client_index: int,
        request_ids: list[str],
        reason: FinishReason,
        error: RequestErrorInfo | None = None,
    ) -> None:
        """End requests that get no token any more."""
        outputs = RequestBatchOutputs(
            engine_index=self._engine_index,
            outputs=[
                EngineCoreOutput(request_id, finish_reason=reason, error=error)
                for request_id in request_ids
            ],
            timestamp=self.now,
            finished_requests=request_ids,
        )
        self._messages.append((client_index, encode_outputs(outputs)))

    def refuse(self, client_index: int, request_id: str, refusal: Refusal) -> None:
        """End a request with an error."""
        error = RequestErrorInfo(
            code=refusal.code, message=refusal.message, retryable=refusal.retryable
        )
        self.finish(client_index, [request_id], FinishReason.ERROR, error)

    def utility(self, client_index: int, output: UtilityOutput) -> None:
        """Answer a utility call."""
        message = UtilityCallOutput(
            engine_index=self._engine_index, output=output, timestamp=self.now
        )
        self._messages.append((client_index, encode_outputs(message)))

    def load(self, counts: Counts, step: int, wave: int) -> None:
        """Tell the coordinator how many requests run and wait."""
        running, waiting = counts
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            step_counter=step,
            current_wave=wave,
        )
        outputs = RequestBatchOutputs(
            engine_index=self._engine_index, scheduler_stats=stats, timestamp=self.now
        )
        self._messages.append((COORDINATOR, encode_outputs(outputs)))

    def wave(self, *, start_wave: int | None = None, wave_complete: int | None = None) -> None:
        """Tell the coordinator that a wave starts or is over."""
        notice = DpControlOutput(
            engine_index=self._engine_index,
            start_wave=start_wave,
            wave_complete=wave_complete,
            timestamp=self.now,
        )
        self._messages.append((COORDINATOR, encode_outputs(notice)))
