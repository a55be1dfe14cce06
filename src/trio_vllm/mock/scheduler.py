"""Which requests an engine has, and the steps that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trio_vllm.mock.fast_batch import DecodeBatch
from trio_vllm.mock.plain_batch import PlainBatch
from trio_vllm.protocol import EventType

if TYPE_CHECKING:
    from trio_vllm.mock.config import MockEngineConfig
    from trio_vllm.mock.content import TokenSource
    from trio_vllm.mock.encoding import Draft
    from trio_vllm.mock.engine import Counts
    from trio_vllm.mock.request import Request


class Scheduler:
    """All unfinished requests: waiting, on the fast path, or on the plain path.

    There is no limit to how many run at once. They wait for the next step, or for a pause to end.
    """

    def __init__(
        self,
        config: MockEngineConfig,
        source: TokenSource,
        client_count: int,
        *,
        fast_path: bool,
    ) -> None:
        self._fast = DecodeBatch(config, source, client_count)
        self._plain = PlainBatch(config, source)
        self._fast_path = fast_path
        self.steady_step = self._fast.steady_step
        """A step, if nobody waits and nobody is on the plain path; see there."""
        self.steady_steps = self._fast.steady_steps
        """The same for several."""
        self._unfinished: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}

    @property
    def counts(self) -> Counts:
        """Requests running and waiting."""
        return self._fast.count + self._plain.count, len(self._waiting)

    def get(self, request_id: str) -> Request | None:
        """An unfinished request."""
        return self._unfinished.get(request_id)

    def unfinished(self) -> list[Request]:
        """All of them, in the order in which they came."""
        return list(self._unfinished.values())

    def add(self, request: Request, now: float) -> None:
        """Let a request wait for its first step."""
        request.note(EventType.QUEUED, now)
        self._unfinished[request.request_id] = self._waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget an unfinished request; what it has ``emitted`` is up to date then."""
        del self._unfinished[request.request_id]
        self._take_back(request)

    def _take_back(self, request: Request) -> None:
        if self._waiting.pop(request.request_id, None) is None:
            batch = self._plain if request.shelf is None else self._fast
            batch.remove(request)

    def preempt_all(self, now: float) -> None:
        """Let all running requests wait again, before those that are waiting."""
        later = self._waiting
        running = [r for r in self._unfinished.values() if r.request_id not in later]
        for request in running:
            self._take_back(request)
            request.note(EventType.PREEMPTED, now)
        self._waiting = {request.request_id: request for request in running} | later

    # Steps --------------------------------------------------------------------------------------

    @property
    def tokens_made(self) -> int:
        """How many tokens there have been in all."""
        return self._fast.tokens_made + self._plain.tokens_made

    @property
    def is_all_fast(self) -> bool:
        """Whether no request is on the plain path."""
        return not self._plain.count

    def step(
        self, now: float, draft_for: Callable[[int], Draft], *, admit: bool
    ) -> tuple[list[Request], list[Request]]:
        """Any step: who came in, and who has finished."""
        joining = list(self._waiting.values()) if admit else []
        if joining:
            self._waiting = {}
        fast: list[Request] = []
        plain: list[Request] = []
        for request in joining:
            request.note(EventType.SCHEDULED, now)
            is_fast = self._fast_path and self._fast.accepts(request)
            (fast if is_fast else plain).append(request)
        finished = self._fast.step(fast, draft_for)
        if plain or self._plain.count:
            finished += self._plain.step(plain, draft_for)
        for request in finished:
            del self._unfinished[request.request_id]
        return joining, finished

    def forget_messages(self) -> None:
        """The envelope has changed."""
        self._fast.forget_messages()
