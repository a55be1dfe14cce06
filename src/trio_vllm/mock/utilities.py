"""`EngineControl`: the utility methods of an engine, and the state that they change.

Names, arguments, results and failures are those of upstream's ``EngineCore`` and ``EngineCoreProc``
(``vllm/v1/engine/core.py``) as far as a frontend calls them. There a call is an attribute look-up, so
an unknown method fails in Python's words.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from trio_vllm.mock.adapters import AdapterCallError, Adapters
from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.late_interaction import LateQueries
from trio_vllm.mock.unlimited import Counts, Paused
from trio_vllm.protocol import CACHE_RESETS, LoRARequest, UtilityOutput, UtilityRequest
from trio_vllm.values import define, frozen

PAUSE_MODES = ("abort", "wait", "keep")
MEMORY = frozenset({"weights", "kv_cache"})
"""What sleeping gives up and waking up gets back, by tag."""


@define
class Pause:
    """The pause and sleep state of one engine, all there is of it.

    Mirrors ``pause_scheduler`` and its relatives in upstream ``vllm/v1/engine/core.py``.
    """

    scheduler: Paused = "no"
    refuses: bool = False
    """Whether new requests are refused rather than queued."""
    asleep: set[str] = attrs.field(factory=set)
    """Tags of the memory that is given up."""

    @property
    def is_paused(self) -> bool:
        """Whether there is a pause of any kind."""
        return self.scheduler != "no"

    def start(self, mode: str, *, refuse: bool) -> None:
        """Pause in one of the `PAUSE_MODES`."""
        self.scheduler = "all" if mode == "keep" else "new"
        self.refuses = refuse and mode != "keep"

    def resume(self) -> None:
        """End a pause."""
        self.scheduler, self.refuses = "no", False

    def sleep(self) -> None:
        """Give up all memory."""
        self.asleep |= MEMORY

    def wake_up(self, tags: list[str] | None) -> bool:
        """Get memory back, and end the pause if that was the last; whether it was.

        ``["scheduling"]`` only ends the pause. Tags that are not asleep change nothing.
        """
        if tags is not None and "scheduling" in tags:
            tags = [tag for tag in tags if tag != "scheduling"]
            if not tags:
                return self._resume_if_awake()
        if not tags:
            self.asleep.clear()
        elif self.asleep.issuperset(tags):
            self.asleep.difference_update(tags)
        return self._resume_if_awake()

    def _resume_if_awake(self) -> bool:
        if not self.asleep:
            self.resume()
        return not self.asleep


T = TypeVar("T")

_WORKER_METHODS = frozenset(
    {
        *CACHE_RESETS,
        "check_health",
        "finish_weight_update",
        "init_weight_transfer_engine",
        "reload_weights",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
"""The methods that ``collective_rpc`` knows; each answers nil per worker."""


_CANNOT_RESET = (
    "Failed to reset KV cache even when all the running requests are preempted and moved to the waiting"
    " queue. This is likely due to the presence of running requests waiting for remote KV transfer, which"
    " is not supported yet."
)


class RequestAction(enum.Enum):
    """What a call does to the requests of the engine."""

    ABORT_ALL = enum.auto()
    """End them, and tell their clients."""
    ABORT_ALL_AND_RESET = enum.auto()
    """And forget the prefix cache."""
    PREEMPT_ALL = enum.auto()
    """Put those that run back into the queue, and forget the prefix cache."""
    RESET_CACHE = enum.auto()
    """Forget the prefix cache, if no request runs."""


@frozen
class Outcome:
    """What comes of a utility call, for the engine to do in this order."""

    action: RequestAction | None = None
    output: UtilityOutput | None = None
    """The answer; None if it will come later, from `EngineControl.pop_overdue`."""


@frozen
class _Then:
    """What a method returns if there is more to be done than to send its result."""

    result: Any = None
    action: RequestAction | None = None
    waits: bool = False
    """Whether the answer is due when no request runs any more."""
    sleeps: bool = False
    """Whether memory is given up then."""
    resets: bool = False
    """Whether the prefix cache is forgotten then."""


@define
class EngineControl:
    """Answers utility calls, and keeps the state that they change."""

    _config: MockEngineConfig
    pause: Pause = attrs.field(factory=Pause, init=False)
    weight_version: str = attrs.field(default="default", init=False)
    """Which weights the tokens come from; stands in every message of a step."""
    adapters: Adapters = attrs.field(init=False)
    queries: LateQueries = attrs.field(factory=LateQueries, init=False)
    """Of late interaction; they go with the caches of the workers."""
    _deferred: list[tuple[UtilityRequest, _Then]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.adapters = Adapters(self._config.max_loras, self._config.max_lora_rank)

    def use_adapter(self, lora: LoRARequest) -> None:
        """Load an adapter for a request, which runs also where there is no room left for it."""
        with contextlib.suppress(AdapterCallError):
            self.adapters.add(lora)

    def call(
        self, request: UtilityRequest, counts: Counts, *, holds_blocks: bool = False
    ) -> Outcome:
        """Run a call.

        Args:
          request: The call.
          counts: Requests that run and wait.
          holds_blocks: Whether there are KV blocks in use which no preemption would free.
        """
        name = request.method
        methods = _Methods(self, self._config, counts, holds_blocks)
        method = None if name.startswith("_") else getattr(methods, name, None)
        try:
            if method is None:
                raise AttributeError(  # noqa: TRY301  one way to fail
                    f"'EngineCoreProc' object has no attribute '{name}'"
                )
            _check_arguments(name, request.args)
            result = method(*request.args)
        except (AttributeError, TypeError, ValueError, RuntimeError, AdapterCallError) as error:
            return Outcome(output=self.refuse(request, f"Call to {name} method failed: {error}"))
        then = result if isinstance(result, _Then) else _Then(result)
        if then.waits:
            self._deferred.append((request, then))
            return Outcome(then.action)
        return Outcome(then.action, UtilityOutput(request.call_id, result=then.result))

    @staticmethod
    def refuse(request: UtilityRequest, text: str) -> UtilityOutput:
        """The answer to a call that is not run, or fails."""
        return UtilityOutput(request.call_id, failure_message=text)

    @property
    def has_deferred(self) -> bool:
        """Whether calls wait for the engine to be idle."""
        return bool(self._deferred)

    @property
    def resets_when_idle(self) -> bool:
        """Whether one of these forgets the prefix cache then."""
        return any(then.resets for _, then in self._deferred)

    def pop_overdue(self) -> Sequence[tuple[int, UtilityOutput]]:
        """The answers, by client index, that are due since no request runs any more."""
        done, self._deferred = self._deferred, []
        for _, then in done:
            if then.sleeps:
                self.pause.sleep()
            if then.resets:
                self.queries.clear()
        return [(request.client_index, UtilityOutput(request.call_id)) for request, _ in done]


@functools.cache
def _parameters(name: str) -> list[inspect.Parameter]:
    """What a method takes."""
    _, *parameters = inspect.signature(getattr(_Methods, name)).parameters.values()
    return parameters


def _check_arguments(name: str, args: Sequence[Any]) -> None:
    """Fail on a wrong number of arguments, as upstream does: on too many without a word."""
    parameters, empty = _parameters(name), inspect.Parameter.empty
    if len(args) > len(parameters):
        raise TypeError
    if missing := [p.name for p in parameters[len(args) :] if p.default is empty]:
        names = " and ".join(map(repr, missing))
        plural = "s" * (len(missing) > 1)
        raise TypeError(
            f"EngineCore.{name}() missing {len(missing)} required positional argument{plural}:"
            f" {names}"
        )


@frozen
class _Methods:
    """The methods that can be called, by name; arguments are the caller's and of any type."""

    _control: EngineControl
    _config: MockEngineConfig
    _counts: Counts
    _holds_blocks: bool

    @property
    def _pause(self) -> Pause:
        return self._control.pause

    @property
    def _adapters(self) -> Adapters:
        return self._control.adapters

    @property
    def _has_running(self) -> bool:
        return self._counts[0] > 0

    # Pausing and sleeping

    def pause_scheduler(self, mode: Any = "abort", clear_cache: Any = True) -> _Then:
        return self._pause_in(mode, clear_cache, refuse=False)

    def pause_generation(self, mode: Any = "abort", clear_cache: Any = True) -> _Then:
        return self._pause_in(mode, clear_cache, refuse=True)

    def _pause_in(self, mode: Any, clear_cache: Any, *, refuse: bool) -> _Then:
        if mode not in PAUSE_MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        self._pause.start(mode, refuse=refuse)
        if mode == "wait" and self._has_running:
            return _Then(waits=True, resets=bool(clear_cache))
        if clear_cache:
            self._control.queries.clear()
        if mode == "abort":
            action = RequestAction.ABORT_ALL
            return _Then(action=RequestAction.ABORT_ALL_AND_RESET if clear_cache else action)
        if mode == "keep":
            return _Then(action=RequestAction.PREEMPT_ALL if clear_cache else None)
        return _Then(action=RequestAction.RESET_CACHE if clear_cache else None)

    def resume_scheduler(self) -> None:
        self._pause.resume()

    def is_scheduler_paused(self) -> bool:
        return self._pause.is_paused

    def sleep(self, level: Any = 1, mode: Any = "abort") -> _Then:
        paused = self._pause_in(mode, level >= 1, refuse=False)
        if level < 1:
            return paused
        if paused.waits:
            return attrs.evolve(paused, sleeps=True)
        self._pause.sleep()
        return paused

    def wake_up(self, tags: Any = None) -> bool:
        return self._pause.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self._pause.is_paused or bool(self._pause.asleep)

    def release_kv_cache_memory(self) -> _Then:
        if not self._pause.is_paused or any(self._counts):
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if self._pause.asleep:
            raise RuntimeError(
                "release_kv_cache_memory() requires all executor memory to be resident"
            )
        self._pause.asleep.add("kv_cache")
        self._control.queries.clear()
        return _Then(action=RequestAction.RESET_CACHE)

    # Caches

    def reset_prefix_cache(
        self, reset_running_requests: Any = False, reset_connector: Any = False
    ) -> _Then | bool:
        if reset_running_requests:
            if self._holds_blocks:
                raise RuntimeError(_CANNOT_RESET)
            return _Then(True, RequestAction.PREEMPT_ALL)
        if self._has_running or self._holds_blocks:
            return False
        return _Then(True, RequestAction.RESET_CACHE)

    def reset_mm_cache(self) -> None:
        self._control.queries.clear()

    def reset_encoder_cache(self) -> None:
        self._control.queries.clear()

    def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        return [
            {
                "group_idx": 0,
                "kind": "full_attention",
                "block_size": self._config.block_size,
                "sliding_window": None,
            }
        ]

    # Weights

    def get_weight_version(self) -> str:
        return self._control.weight_version

    def set_weight_version(self, weight_version: Any) -> None:
        if not isinstance(weight_version, str):
            raise TypeError(f"weight_version must be a string, got {weight_version!r}")
        self._control.weight_version = weight_version

    def compute_weight_checksums(self) -> list[dict[str, str]]:
        text = f"{self._config.seed}/{self._control.weight_version}"
        return [{"mock": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}]

    def save_sharded_state(self, path: Any, pattern: Any = None, max_size: Any = None) -> None:
        pass

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[None]:
        if method not in _WORKER_METHODS:
            raise AttributeError(_in_worker(f"'Worker' object has no attribute '{method}'"))
        if method in CACHE_RESETS:
            self._control.queries.clear()
        return [None]

    # Adapters

    def add_lora(self, lora_request: Any) -> bool:
        match lora_request:
            case [str(name), int(adapter_id), str(path), *others]:
                if adapter_id < 1:
                    raise ValueError(f"id must be > 0, got {adapter_id}")
                if not path:
                    raise ValueError("lora_path cannot be empty")
                lora = LoRARequest(
                    lora_name=name,
                    lora_int_id=adapter_id,
                    lora_path=path,
                    load_inplace=others[1:2] == [True],
                )
                return self._in_worker(self._adapters.add, lora)
        raise TypeError(f"Expected `LoRARequest`, got {lora_request!r}")

    def remove_lora(self, lora_id: Any) -> bool:
        _require_adapter_id(lora_id)
        return self._in_worker(self._adapters.remove, lora_id)

    def pin_lora(self, lora_id: Any) -> bool:
        _require_adapter_id(lora_id)
        return self._in_worker(self._adapters.pin, lora_id)

    def list_loras(self) -> list[int]:
        return self._in_worker(self._adapters.ids)

    def _in_worker(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except AdapterCallError as error:
            raise AdapterCallError(_in_worker(str(error))) from None

    # The rest

    def get_supported_tasks(self) -> list[str]:
        return list(self._config.supported_tasks)

    def execute_dummy_batch(self) -> None:
        pass

    def profile(
        self,
        is_start: Any = True,
        profile_prefix: Any = None,
        delay_iterations: Any = None,
        max_iterations: Any = None,
        profiler_kwargs: Any = None,
    ) -> None:
        pass


def _require_adapter_id(lora_id: Any) -> None:
    if lora_id < 1:  # the executor asserts it, before it asks a worker
        raise ValueError("lora_id must be greater than 0.")


def _in_worker(text: str) -> str:
    return (
        f"Worker failed with error '{text}', please check the stack trace above for the root cause"
    )
