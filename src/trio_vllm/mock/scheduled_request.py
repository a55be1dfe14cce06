"""`ScheduledRequest` is a request as the scheduler sees it. Source: ``vllm/v1/request.py``."""

from __future__ import annotations

import enum

import attrs

from trio_vllm.mock.connector import KvTransfer
from trio_vllm.mock.kv_cache import BlockTable
from trio_vllm.protocol import EngineCoreEvent, EventType, PrefillStats
from trio_vllm.values import define


class RequestStatus(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    """It has blocks, which are being filled from another engine."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """Back in the queue; all of it is to be computed again, but for what the cache still has."""
    FINISHED = enum.auto()


@define(eq=False, kw_only=True)
class ScheduledRequest:
    """A request: how many tokens it has, and of how many the KV values are computed.

    There is no prefill phase and no decode phase: in each step a request is given tokens to compute,
    so that ``num_computed_tokens`` catches up with ``num_tokens``. When it has, the step samples
    the next token.

    While a `DecodeGroup` or a `TimedGroup` has the request, the group counts for it.
    """

    request_id: str
    num_prompt_tokens: int
    table: BlockTable
    priority: int = 0
    """The lowest number is the most important."""
    arrival_time: float = 0.0
    blocked: bool = False
    """Not ready to be scheduled, for example while its grammar is compiled."""
    transfer: KvTransfer | None = None
    """Its part in prefill/decode disaggregation."""
    transfer_time: float = 0.0
    """Seconds that fetching its blocks takes."""
    was_fetched: bool = attrs.field(default=False, init=False)
    """Whether its prompt was not computed here."""
    status: RequestStatus = attrs.field(default=RequestStatus.WAITING, init=False)
    num_tokens: int = attrs.field(
        default=attrs.Factory(lambda self: self.num_prompt_tokens, takes_self=True), init=False
    )
    num_computed_tokens: int = attrs.field(default=0, init=False)
    num_preemptions: int = attrs.field(default=0, init=False)
    num_draft_tokens: int = attrs.field(default=0, init=False)
    """Guessed by speculative decoding, to be verified in the next step."""
    is_prefill_chunk: bool = attrs.field(default=False, init=False)
    """Whether the last step left tokens of the request to be computed."""
    seat: int = attrs.field(default=-1, init=False)
    """Counts admissions: requests run, and their rows come, in this order."""
    events: list[EngineCoreEvent] = attrs.field(factory=list, init=False)
    """Not yet reported."""
    prefill_stats: PrefillStats | None = attrs.field(factory=PrefillStats, init=False)
    """Not yet reported."""

    @property
    def urgency(self) -> tuple[int, float, str]:
        """The smallest is scheduled first under the policy ``priority``."""
        return self.priority, self.arrival_time, self.request_id

    @property
    def is_decoding(self) -> bool:
        """Whether each step gives one token and nothing else.

        The last chunk of a prompt may also be one token long; its row has events to tell.
        """
        return self.num_computed_tokens + 1 == self.num_tokens and not self.events

    @property
    def only_decodes(self) -> bool:
        """Whether it is scheduled for one token, and that is all there is to tell.

        That of a prompt comes with its statistics, and after a preemption there are events.
        """
        is_scheduled = self.num_computed_tokens == self.num_tokens > self.num_prompt_tokens
        return is_scheduled and not self.events

    def record(self, event: EventType, now: float) -> None:
        """Note what happened, for the next row."""
        self.events.append(EngineCoreEvent(event, now))

    def begin_prefill(self, num_local: int, num_external: int = 0) -> None:
        """Note how much of the prompt the cache had; a repetition after preemption does not count.

        Args:
          num_local: Tokens that were in the prefix cache.
          num_external: Tokens that are fetched from another engine.
        """
        stats = self.prefill_stats
        if stats is not None and not self.num_preemptions:
            stats.num_prompt_tokens = self.num_prompt_tokens
            stats.num_cached_tokens = num_local + num_external
            stats.num_computed_tokens = self.num_prompt_tokens - stats.num_cached_tokens
            stats.num_local_cached_tokens = num_local
            stats.num_external_cached_tokens = num_external

    def take_events(self) -> list[EngineCoreEvent]:
        """The events that were not reported yet."""
        events, self.events = self.events, []
        return events

    def take_prefill_stats(self, block_size: int) -> PrefillStats | None:
        """The statistics of the prefill, once."""
        stats, self.prefill_stats = self.prefill_stats, None
        if stats is not None:
            in_cache = min(self.table.num_cached * block_size, stats.num_prompt_tokens)
            stats.num_cache_creation_tokens = max(0, in_cache - stats.num_cached_tokens)
        return stats
