"""Requests coming and going: what an ADD and an ABORT do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_vllm.protocol import FinishReason

from ._admission import Admission, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_vllm.protocol import EngineCoreRequest

    from ._answers import Answers
    from ._journal import Journal
    from ._pause import Pause
    from ._requests import Request
    from ._scheduler import Scheduler
    from ._sessions import Session, Sessions

PAUSED = Refusal("the engine is paused", "engine_paused", retryable=True)
DUPLICATE = Refusal("a request with this id is in flight")


@attrs.define(kw_only=True)
class Intake:
    """Decides on each request that comes, and accounts for each that is over."""

    _admission: Admission
    _scheduler: Scheduler
    _sessions: Sessions
    _answers: Answers
    _journal: Journal
    _pause: Pause
    _chunk_size: int
    _tells_ends: bool
    """Whether ``finished_requests`` is to name also requests that end without an output.

    As upstream, only where a coordinator is: a client that balances its load by the counts of one
    also counts by these ids what it has in flight.
    """
    _untold: dict[int, list[str]] = attrs.field(factory=dict, init=False)

    def add(self, wire: EngineCoreRequest) -> bool:
        """A request has come; whether it was taken."""
        session = self._sessions.get(wire.request_id)
        running = self._scheduler.get(wire.request_id)
        if session is not None and running is not None:
            session.queue.append(wire)
            return True
        if running is not None:
            self._refuse_duplicate(wire, running)
            return False
        if session is None:
            if self._pause.refuses and not wire.abort_immediately:
                self._refuse(wire, PAUSED)
                return False
            if wire.resumable:
                self._sessions.open(wire)
        elif not wire.resumable:
            self._sessions.close(wire.request_id)
            self._end_untold(wire.client_index, wire.request_id)
            return True
        return self._start(wire, session.emitted if session is not None else 0)

    def _refuse_duplicate(self, wire: EngineCoreRequest, running: Request) -> None:
        # An answer to the same client would be taken for one to the request that is running, and
        # end that.
        is_elsewhere = wire.client_index != running.client_index
        self._journal.refused(wire.request_id, DUPLICATE.message, answered=is_elsewhere)
        if is_elsewhere:
            self._answers.refuse(wire.client_index, wire.request_id, DUPLICATE)

    def _refuse(self, wire: EngineCoreRequest, refusal: Refusal) -> None:
        self._journal.refused(wire.request_id, refusal.message)
        self._answers.refuse(wire.client_index, wire.request_id, refusal)

    def _start(self, wire: EngineCoreRequest, emitted: int) -> bool:
        request = self._admission.admit(wire, emitted)
        if isinstance(request, Refusal):
            self._sessions.close(wire.request_id)
            self._refuse(wire, request)
            return False
        self._journal.started(request, self._chunk_size, self._answers.now)
        if wire.abort_immediately:
            self._account_for(request, FinishReason.ABORT)
            self._end_untold(request.client_index, request.request_id)
        elif request.end == emitted and not request.is_pooling:
            self._answers.finish(request.client_index, [request.request_id], request.finish_reason)
            self._account_for(request, request.finish_reason)
        else:
            self._scheduler.add(request, self._answers.now)
        return True

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request is over that the scheduler has forgotten; its session may go on."""
        session = self._sessions.get(request.request_id)
        self._account_for(request, reason)
        if session is None or reason is FinishReason.ABORT:
            return
        # Chunks may end as soon as they start. What follows the end of the session is no chunk.
        while session.queue and not self._is_busy(session, request.request_id):
            self.add(session.queue.popleft())

    def _account_for(self, request: Request, reason: FinishReason) -> None:
        self._journal.ended(request, reason)
        if reason is FinishReason.ABORT:
            self._sessions.close(request.request_id)
        else:
            self._sessions.chunk_ended(request.request_id, request.emitted)

    def _is_busy(self, session: Session, request_id: str) -> bool:
        is_open = self._sessions.get(request_id) is session
        return is_open and self._scheduler.get(request_id) is not None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop these requests without an answer; unknown ids do not matter."""
        for request_id in request_ids:
            request = self._scheduler.get(request_id)
            if request is not None:
                self._scheduler.remove(request)
                self.ended(request, FinishReason.ABORT)
                self._end_untold(request.client_index, request_id)
            elif (session := self._sessions.close(request_id)) is not None:
                self._end_untold(session.client_index, request_id)

    def abort_all(self) -> None:
        """Drop all requests and sessions, and tell their clients."""
        ended: dict[int, list[str]] = {}
        for request in self._scheduler.unfinished():
            self._scheduler.remove(request)
            self.ended(request, FinishReason.ABORT)
            ended.setdefault(request.client_index, []).append(request.request_id)
        for request_id, session in self._sessions.close_all():
            ended.setdefault(session.client_index, []).append(request_id)
        for client_index, request_ids in ended.items():
            self._answers.finish(client_index, request_ids, FinishReason.ABORT)

    def _end_untold(self, client_index: int, request_id: str) -> None:
        if self._tells_ends:
            self._untold.setdefault(client_index, []).append(request_id)

    def take_untold(self) -> dict[int, list[str]]:
        """Give up the ids, by client, of requests that ended without an output."""
        untold = self._untold
        if untold:
            self._untold = {}
        return untold
