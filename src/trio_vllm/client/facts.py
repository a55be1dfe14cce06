"""`EngineFacts`: what a client knows of its engines before it trusts them with a request.

An engine's registration tells little of it, and an engine does not survive a request that it cannot
serve. So what a request depends on is learned when one first needs it (`CoreDriver.prepare`: the
supported tasks, the size of the vocabulary, whether an adapter loads), or stated by the caller as the
client opens (the width of embeddings, whether the model takes more than text). A request that needs
what is not known is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trio_vllm.client.engines import Engine
from trio_vllm.client.input_processing import (
    RequestLimits,
    callers_id,
    needs_vocab_size,
)
from trio_vllm.client.late_interaction import (
    SentQueries,
    late_interaction_engine,
    late_interaction_of,
)
from trio_vllm.client.versions import LATCHING
from trio_vllm.errors import InvalidFieldError, UnsupportedFieldError
from trio_vllm.protocol import (
    CACHE_RESETS,
    GENERATION_TASKS,
    EngineCoreRequest,
    LateInteractionParams,
    LoRARequest,
)
from trio_vllm.values import define

Adapter = tuple[str, str]
"""Name and path."""

_CLEARING = (*CACHE_RESETS, "release_kv_cache_memory")
"""Utility calls after which workers have no queries any more."""
_PAUSES = frozenset({"pause_scheduler", "pause_generation"})
"""The same, unless their second argument says that caches stay."""


def _clears_queries(method: str, args: Sequence[Any]) -> bool:
    """Whether workers have no queries any more after a utility call."""
    if method == "collective_rpc":
        return args[0] in CACHE_RESETS if args else False
    if method == "sleep":  # of level 0 it only pauses
        return list(args[:1]) != [0]
    return method in _CLEARING or (method in _PAUSES and list(args[1:2]) != [False])


def _backend(request: EngineCoreRequest) -> str | None:
    """The structured-outputs backend that a request was filled with, if it is constrained."""
    params = request.sampling_params
    if params is None or params.structured_outputs is None:
        return None
    return params.structured_outputs.backend


@define(eq=False)
class EngineFacts:
    """What is known of the engines, all together."""

    limits: RequestLimits
    """What a request must keep to."""
    _adapters: dict[int, Adapter] = attrs.field(factory=dict, init=False)  # by id; on every engine
    _queries: SentQueries = attrs.field(factory=SentQueries, init=False)
    # By request id, queries that have not been answered.
    _pending_queries: dict[str, LateInteractionParams] = attrs.field(factory=dict, init=False)
    # By engine index, the backend, and the first request that has it until that is over.
    _backends: dict[int, tuple[str, str]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if self.limits.late_interaction_queries is None:
            self.learn(late_interaction_queries=self._queries)

    def learn(self, **known: Any) -> None:
        """Note fields of the limits."""
        self.limits = attrs.evolve(self.limits, **known)

    # What a request needs -----------------------------------------------------------------------

    def lacks(self, request: EngineCoreRequest) -> bool:
        """Whether anything has to be learned before a request may be submitted."""
        # Most requests name no token and no adapter, and pool nothing: a question each.
        return (
            (request.pooling_params is not None and self.lacks_tasks(request))
            or (self.limits.vocab_size is None and self.lacks_vocab_size(request))
            or (request.lora_request is not None and self.lacks_adapter(request))
        )

    def lacks_tasks(self, request: EngineCoreRequest) -> bool:
        """Whether it matters for a request what the model can do, and is not known."""
        return request.pooling_params is not None and self.limits.supported_tasks is None

    def lacks_vocab_size(self, request: EngineCoreRequest) -> bool:
        """Whether the size of the vocabulary matters for a request, and can be found out."""
        if self.limits.vocab_size is not None or not needs_vocab_size(request):
            return False
        tasks = self.limits.supported_tasks
        return tasks is None or not GENERATION_TASKS.isdisjoint(tasks)

    def lacks_adapter(self, request: EngineCoreRequest) -> bool:
        """Whether a request names an adapter that is to be loaded first."""
        lora: Any = request.lora_request
        if not isinstance(lora, LoRARequest):
            return False
        return lora.load_inplace or lora.lora_int_id not in self._adapters

    # Adapters -----------------------------------------------------------------------------------

    def check_adapter(self, request: EngineCoreRequest) -> None:
        """Refuse an adapter that is not loaded, or an id that another one has."""
        lora = request.lora_request
        if lora is None:
            return
        loaded = self._adapters.get(lora.lora_int_id)
        if loaded is None:
            reason = "names an adapter that has not been loaded: await add_lora(…) or prepare(…)"
            raise UnsupportedFieldError(callers_id(request), "lora_request", reason)
        self.check_adapter_id(request, lora)

    def check_adapter_id(self, request: EngineCoreRequest, lora: LoRARequest) -> None:
        """Refuse an adapter under an id by which the engines have another one."""
        loaded = self._adapters.get(lora.lora_int_id)
        if loaded is None or loaded == (lora.lora_name, lora.lora_path) or lora.load_inplace:
            return
        reason = (
            f"has the lora_int_id {lora.lora_int_id}, by which the engines have the adapter"
            f" {loaded[0]!r} from {loaded[1]!r}: take another id, or remove_lora it first"
        )
        raise InvalidFieldError(callers_id(request), "lora_request", reason)

    def note_call(self, method: str, args: list[Any]) -> None:
        """Note that a utility call is sent, which may undo what is known."""
        if method == "remove_lora" and args:
            self._adapters.pop(args[0], None)
        elif _clears_queries(method, args):
            self._queries.clear()
            # They may be answered before the caches are cleared, or after.
            self._pending_queries.clear()

    def note_results(self, method: str, args: Sequence[Any], results: Mapping[int, Any]) -> None:
        """Note what every engine answered to a utility call."""
        if method == "add_lora" and all(result is True for result in results.values()):
            name, lora_int_id, path, *_ = args[0]
            self._adapters[lora_int_id] = (name, path)

    # Late interaction ---------------------------------------------------------------------------

    def engine_of_query(
        self, params: LateInteractionParams, indices: Sequence[int], alive: Sequence[int]
    ) -> int:
        """The index of the engine for a query, or for a document.

        It is the one that every client of these engines would choose, if it is alive; documents
        follow their query.
        """
        known = None
        if params.mode != "cache_query":
            known = self._queries.engine_of(params.query_key)
        if known is not None:
            return known
        index = indices[late_interaction_engine(params.query_key, len(indices))]
        if index in alive:
            return index
        return alive[late_interaction_engine(params.query_key, len(alive))]

    def check_engine_of_query(self, request: EngineCoreRequest, engine_index: int) -> None:
        """Refuse a document that is pinned to another engine than its query is kept by."""
        params = late_interaction_of(request)
        if params is None or params.mode == "cache_query":
            return
        known = self._queries.engine_of(params.query_key)
        if known not in (None, engine_index):
            reason = f"must be {known}, the engine that has the query {params.query_key!r}"
            raise InvalidFieldError(callers_id(request), "data_parallel_rank", reason)

    # Structured outputs --------------------------------------------------------------------------

    def able(self, request: EngineCoreRequest, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those of some engines that have, or can still get, the backend of a request.

        Raises `UnsupportedFieldError` if all have another one.
        """
        backend = _backend(request)
        if backend is None or not self._backends:
            return engines
        kept = [self._backends.get(engine.index, (backend,))[0] for engine in engines]
        able = [engine for engine, name in zip(engines, kept, strict=True) if name == backend]
        if not able:
            names = " or ".join(sorted({*kept}))
            reason = (
                f"must be {names}, not {backend}: an engine of this version keeps the backend of its"
                " first constrained request"
            )
            where = "sampling_params.structured_outputs.backend"
            raise UnsupportedFieldError(callers_id(request), where, reason)
        return able

    def _note_backend(self, request: EngineCoreRequest, engine_index: int) -> None:
        backend = _backend(request)
        if backend is not None and self.limits.vllm_version.startswith(LATCHING):
            self._backends.setdefault(engine_index, (backend, request.request_id))

    def _note_end_of_first(self, request_id: str, engine_index: int, *, has_failed: bool) -> None:
        """An engine that fails its first constrained request may well not have that backend."""
        backend, first_id = self._backends.get(engine_index, ("", ""))
        if first_id != request_id:
            return
        if has_failed:
            del self._backends[engine_index]
        else:
            self._backends[engine_index] = backend, ""

    # The life of a request ----------------------------------------------------------------------

    def submitted(self, request: EngineCoreRequest, engine_index: int) -> None:
        """Note a request that is on its way to an engine."""
        self._note_backend(request, engine_index)
        params = late_interaction_of(request)
        if params is None:
            return
        if params.mode == "cache_query":
            # Until it is answered, a document could overtake it.
            self._pending_queries[request.request_id] = params
        else:
            self._queries.add(params)

    def ended(
        self,
        request_id: str,
        engine_index: int,
        *,
        answered: bool = False,
        has_failed: bool = False,
    ) -> None:
        """Note that a request is over: with a pooled prompt, or with an error, or in another way."""
        if self._backends:
            self._note_end_of_first(request_id, engine_index, has_failed=has_failed)
        params = self._pending_queries.pop(request_id, None) if self._pending_queries else None
        if params is not None and answered:
            self._queries.add(params, engine_index)

    def lost_engine(self, engine_index: int) -> None:
        """Note that an engine is gone, with all that it kept."""
        self._queries.forget_engine(engine_index)
        self._backends.pop(engine_index, None)
