"""What all engines together told of themselves when they registered."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs
import trio

from trio_vllm.client.input_processing import RequestLimits
from trio_vllm.errors import (
    DecodeError,
    EngineCoreError,
    EngineDeadError,
    InvalidDataParallelRankError,
)
from trio_vllm.protocol import EngineCoreReadyResponse, KvEventsConfig
from trio_vllm.transport import Disconnect

# MERGED protocol/_routing: Which engine gets a request: the pinned one, else the least loaded.
#
# The load of an engine is what this client has in flight there. Once the engine has reported
# statistics, it is what the engine said it had plus what was admitted since, if that is more: other
# clients may use it too. Ties go to the lowest index. Mirrors
# ``engine-core-client/src/client/state.rs``.
# MERGED client/_lives: Which engines are alive, and how one is found to be dead.
#
# Theory of operation. An engine goes in one of three ways.
#
# * Its connection is lost. It is sent nothing from then on, but what it sent before, over another
#   connection, may still be on its way: its requests fail `LOSS_GRACE` seconds later.
# * It sends ENGINE_CORE_DEAD, without saying who it is. If something else has come by the same
#   connection before, that told it. Otherwise, if a connection has broken in the last `LATE_FAREWELL`
#   seconds, it was that engine; else the only living engine is dead at once, and of several it is the
#   one whose connection breaks next. If none does within `FAREWELL_GRACE` seconds, an engine that
#   serves nobody cannot be told from the others, so none can be relied on.
# * It sends what cannot be read. What it says next cannot be trusted, so it is dead at once. Who it is
#   is known from the connection, or else from the message, if that much of it can be read.
#
# The first reason is kept. Engines in lockstep go together.


@attrs.frozen
class EngineInfo:
    """The ready responses by engine index, and what follows from them for the whole.

    Which figure is the least, the sum or the first is upstream's choice: see
    ``MPClient._apply_ready_response`` in ``vllm/v1/engine/core_client.py`` and
    ``engine-core-client/src/client.rs``.
    """

    ready_responses: Mapping[int, EngineCoreReadyResponse]
    max_model_len: int = attrs.field(init=False)
    """Prompt and output tokens that fit every engine."""

    @max_model_len.default
    def _least_max_model_len(self) -> int:
        return min(response.max_model_len for response in self._all)

    @property
    def _all(self) -> list[EngineCoreReadyResponse]:
        return list(self.ready_responses.values())

    def _first(self, name: str) -> Any:
        """The first value that is not None."""
        values = (getattr(response, name) for response in self._all)
        return next((value for value in values if value is not None), None)

    @property
    def model_dtype(self) -> str:
        """The model's number type, such as ``bfloat16``."""
        return self._all[0].dtype

    @property
    def vllm_version(self) -> str:
        """The version that the first engine reports."""
        return self._all[0].vllm_version

    @property
    def block_size(self) -> int:
        """Tokens per KV-cache block."""
        return self._all[0].block_size

    @property
    def num_gpu_blocks(self) -> int:
        """KV-cache blocks of all engines together."""
        return sum(response.num_gpu_blocks for response in self._all)

    @property
    def world_size(self) -> int:
        """Accelerators of one engine."""
        return self._all[0].world_size

    @property
    def data_parallel_size(self) -> int:
        """Engines that run in lockstep; 1 if each runs for itself."""
        return self._all[0].data_parallel_size

    @property
    def max_num_seqs(self) -> int:
        """Requests that all engines together run at once."""
        return sum(response.max_num_seqs for response in self._all)

    @property
    def supports_lora(self) -> bool:
        """Whether every engine takes adapters."""
        return all(response.supports_lora for response in self._all)

    @property
    def max_loras(self) -> int:
        """Adapters that fit into one batch of every engine."""
        return min(response.max_loras for response in self._all)

    @property
    def enable_sleep_mode(self) -> bool:
        """Whether every engine can give its memory back."""
        return all(response.enable_sleep_mode for response in self._all)

    @property
    def supports_draft_weight_updates(self) -> bool:
        """Whether every engine takes new weights for its draft model."""
        return all(response.supports_draft_weight_updates for response in self._all)

    @property
    def kv_cache_size_tokens(self) -> int | None:
        """Tokens that the KV cache of one engine holds, if an engine says."""
        return self._first("kv_cache_size_tokens")  # type: ignore[no-any-return]

    @property
    def kv_cache_max_concurrency(self) -> float | None:
        """Requests of full length that the KV cache of one engine holds, if an engine says."""
        return self._first("kv_cache_max_concurrency")  # type: ignore[no-any-return]

    @property
    def kv_events_config(self) -> KvEventsConfig | None:
        """Where KV-cache events are published, if they are."""
        return self._first("kv_events_config")  # type: ignore[no-any-return]

    @property
    def weight_transfer_backend(self) -> str | None:
        """How new weights reach the engines, if they can."""
        return self._first("weight_transfer_backend")  # type: ignore[no-any-return]

    @property
    def effective_attention_block_size(self) -> int | None:
        """The block size of attention, if all engines agree."""
        sizes = {response.effective_attention_block_size for response in self._all}
        return sizes.pop() if len(sizes) == 1 else None

    def limits(self, *, vocab_size: int | None) -> RequestLimits:
        """What a request must keep to."""
        return RequestLimits.of(self._all, vocab_size=vocab_size)


@attrs.define
class _Load:
    in_flight: int = 0
    reported: int | None = None
    """What the engine has, running or waiting, as it said last."""
    admitted_since_report: int = 0

    @property
    def score(self) -> int:
        if self.reported is None:
            return self.in_flight
        return max(self.in_flight, self.reported + self.admitted_since_report)


class Balancer:
    """Counts what each engine has to do and chooses one."""

    def __init__(self, engine_indices: Iterable[int]) -> None:
        self._loads = {index: _Load() for index in sorted(engine_indices)}

    @property
    def engine_indices(self) -> list[int]:
        """The engines that can be chosen."""
        return list(self._loads)

    def choose(self, request_id: str, data_parallel_rank: int | None) -> int:
        """The engine for a request; there must be one. Nothing is counted yet.

        Raises `InvalidDataParallelRankError` if the pinned engine is not there.
        """
        loads = self._loads
        if data_parallel_rank is None:
            if len(loads) == 1:
                return next(iter(loads))
            return min(loads, key=lambda engine_index: loads[engine_index].score)
        if data_parallel_rank not in loads:
            raise InvalidDataParallelRankError(request_id, data_parallel_rank, self.engine_indices)
        return data_parallel_rank

    def admit(self, engine_index: int) -> None:
        """Count a request that is sent to this engine."""
        load = self._loads[engine_index]
        load.in_flight += 1
        load.admitted_since_report += 1

    def release(self, engine_index: int) -> None:
        """Count a request that this engine is done with; unknown engines are ignored."""
        if load := self._loads.get(engine_index):
            load.in_flight -= 1

    def report(self, engine_index: int, running: int, waiting: int) -> None:
        """Take in what an engine says of itself; unknown engines are ignored."""
        if load := self._loads.get(engine_index):
            load.reported = running + waiting
            load.admitted_since_report = 0

    def in_flight(self, engine_index: int) -> int:
        """How many requests of this client the engine has."""
        return self._loads[engine_index].in_flight

    def remove(self, engine_index: int) -> None:
        """Choose this engine no more."""
        self._loads.pop(engine_index, None)


_log = logging.getLogger("trio_vllm.client")

LOSS_GRACE = 0.2
"""Seconds; on one host, outputs under way arrive within milliseconds."""

FAREWELL_GRACE = 10.0
"""Seconds; after its farewell an engine takes 5 s at most to end (``_send_engine_dead`` upstream)."""

LATE_FAREWELL = 2.0
"""Seconds that what an engine sent may lie unread when the client is behind."""

CONNECTION_LOST = "its connection was lost"
REPORTED_DEATH = "it reported ENGINE_CORE_DEAD"
UNREADABLE = "it sent a message that cannot be read"


class EngineLives:
    """Knows the living and the dead, and calls back when one goes."""

    def __init__(
        self,
        engine_indices: Iterable[int],
        *,
        is_lockstep: bool,
        on_loss: Callable[[int], None],
        on_death: Callable[[int, EngineDeadError], None],
        on_failure: Callable[[EngineCoreError], None],
    ) -> None:
        """
        Args:
          engine_indices: All of them; they are alive.
          is_lockstep: None can go on without the others.
          on_loss: An engine can be sent nothing any more.
          on_death: An engine is dead; a loss may have come before.
          on_failure: No engine can be relied on any more.
        """
        self.living = sorted(engine_indices)
        """Those that are not dead, lost or not."""
        self.dead: dict[int, EngineDeadError] = {}
        self._is_lockstep = is_lockstep
        self._on_loss = on_loss
        self._on_death = on_death
        self._on_failure = on_failure
        self._lost: dict[int, Exception | None] = {}  # and the cause, if it is known
        self._silent: list[int] = []  # lost a moment ago, without a farewell
        # Each is set when it is known who sent the farewell.
        self._farewells: deque[trio.Event] = deque()
        # Unbounded: holds one item per loss and farewell, of which each engine has one that counts.
        self._start, self._started = trio.open_memory_channel[Callable[[], Awaitable[None]]](
            math.inf
        )

    async def watch(self, disconnects: trio.abc.ReceiveChannel[Disconnect]) -> None:
        """Task: take the lost connections, and keep the times of grace; for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_disconnects, disconnects)
            async for waiting in self._started:
                nursery.start_soon(waiting)

    async def _take_disconnects(self, disconnects: trio.abc.ReceiveChannel[Disconnect]) -> None:
        async for disconnect in disconnects:
            if disconnect.engine_index is not None:
                self.lose(disconnect.engine_index)

    def lose(self, engine_index: int, cause: Exception | None = None) -> None:
        """An engine's connection is gone."""
        if engine_index in self._lost:
            return
        self._lost[engine_index] = cause
        if engine_index in self.living:
            self._on_loss(engine_index)
        self._start.send_nowait(partial(self._bury_lost, engine_index))

    async def _bury_lost(self, engine_index: int) -> None:
        await trio.sleep(LOSS_GRACE)
        if engine_index in self.dead:
            return  # this is no news, and tells nothing of other engines' farewells
        if self._farewells:
            self._farewells.popleft().set()
            self.die(engine_index, REPORTED_DEATH)
        else:
            self.die(engine_index, CONNECTION_LOST, self._lost[engine_index])
            self._silent.append(engine_index)
            await trio.sleep(LATE_FAREWELL)
            if engine_index in self._silent:
                self._silent.remove(engine_index)

    def take_farewell(self, sender: int | None) -> None:
        """An engine sent ENGINE_CORE_DEAD; None if it is not known which."""
        if sender in self.dead:
            if sender in self._silent:
                self._silent.remove(sender)
        elif sender in self.living:
            self.die(sender, REPORTED_DEATH)
        elif self._is_lockstep and len(self.living) > 1:
            self._on_failure(EngineDeadError(None, REPORTED_DEATH))
        elif self._silent:
            del self._silent[0]
        elif len(self.living) == 1:
            self.die(self.living[0], REPORTED_DEATH)
        elif len(self._farewells) < len(self.living):
            known = trio.Event()
            self._farewells.append(known)
            self._start.send_nowait(partial(self._await_sender, known))

    async def _await_sender(self, known: trio.Event) -> None:
        with trio.move_on_after(FAREWELL_GRACE):
            await known.wait()
        if not known.is_set():
            self._on_failure(EngineDeadError(None, REPORTED_DEATH))

    def take_unreadable(self, error: DecodeError, sender: int | None) -> None:
        """An engine sent a message that cannot be read; None if it is not known which."""
        if sender is None:
            sender = error.engine_index
        if sender in self.dead:
            return
        reason = f"{UNREADABLE}: {error}"
        if sender in self.living:
            self.die(sender, reason, error)
        elif len(self.living) == 1:
            self.die(self.living[0], reason, error)
        else:
            # Whose outputs are incomplete now is not known.
            self._on_failure(error)

    def die(self, engine_index: int, reason: str, cause: Exception | None = None) -> None:
        """An engine is dead."""
        if engine_index not in self.living:
            return
        error = EngineDeadError(engine_index, reason)
        error.__cause__ = cause
        _log.error("%s", error)
        self.living.remove(engine_index)
        self.dead[engine_index] = error
        self._on_death(engine_index, error)
        if not self.living or self._is_lockstep:
            self._on_failure(error)
