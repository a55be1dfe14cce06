"""`UtilityCallTable` keeps the utility calls under way; `check_utility_call` refuses those that kill engines.

What a method takes and gives is defined by ``EngineCore`` and ``EngineCoreProc`` in upstream's
``vllm/v1/engine/core.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import attrs

from trio_vllm.errors import (
    EngineCoreError,
    EngineDeadError,
    InconsistentUtilityResultsError,
    UtilityCallFailedError,
    UtilityRefusedError,
    UtilityResultError,
    copy_error,
)
from trio_vllm.protocol import UNENCODABLE_RESULTS, UtilityOutput
from trio_vllm.values import define, frozen

T = TypeVar("T")

UTILITY_TIMEOUT = 300.0
"""Seconds for a utility call, unless the caller says otherwise; loading an adapter counts."""

ENGINE_INTERNAL_METHODS = frozenset(
    {
        "add_request",
        "preprocess_add_request",
        "process_input_sockets",
        "process_output_sockets",
        "run_busy_loop",
        "run_engine_core",
        "shutdown",
        "startup_handshake",
        "step",
        "step_with_batch_queue",
    }
)
"""Methods that an engine calls on itself. It can be told to by name, and does not survive it."""


def check_utility_call(method: str, args: Sequence[Any]) -> None:
    """Refuse what is known to end an engine; `UtilityRefusedError`."""
    given: object = method
    if not isinstance(given, str):
        raise TypeError(f"method must be a string, not {given!r}")
    if method.startswith("_") or method in ENGINE_INTERNAL_METHODS:
        raise UtilityRefusedError(method, "it is the engine's own machinery")
    if method == "handle_fault_tolerance":
        # The input thread handles it, unguarded; whether it can is not told to frontends.
        raise UtilityRefusedError(method, "an engine without fault tolerance goes deaf of it")
    if method == "collective_rpc" and args and args[0] in UNENCODABLE_RESULTS:
        reason = f"the result of {args[0]!r} cannot be sent, the engine would go mute"
        raise UtilityRefusedError(method, reason)


@frozen(kw_only=True)
class KvCacheGroup:
    """Layers of a model whose KV cache has one form."""

    group_idx: int
    kind: str
    """Such as ``full_attention`` or ``sliding_window``."""
    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Tokens that attention looks back, if it does not look at all of them."""


@frozen
class Result(Generic[T]):
    """What a method gives: in words, and a function from what came to that, or to `TypeError`."""

    expected: str
    read: Callable[[Any], T]

    def check(self, method: str, results: Mapping[int, Any]) -> dict[int, T]:
        """Read the result of each engine; `UtilityResultError` names the first that is wrong."""
        checked: dict[int, T] = {}
        for engine_index, result in results.items():
            try:
                checked[engine_index] = self.read(result)
            except TypeError as error:
                raise UtilityResultError(method, engine_index, self.expected, result) from error
        return checked


def _exactly(kind: type[T]) -> Callable[[Any], T]:
    def read(raw: Any) -> T:
        # Not isinstance: a boolean is no integer here.
        if type(raw) is not kind:
            raise TypeError(f"is a {type(raw).__name__}")
        return raw

    return read


def _each(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    return lambda raw: [read(item) for item in _list(raw)]


_list: Callable[[Any], list[Any]] = _exactly(list)
_dict: Callable[[Any], dict[Any, Any]] = _exactly(dict)
_int = _exactly(int)
_str = _exactly(str)


def _read_checksums(raw: Any) -> dict[str, str]:
    return {_str(name): _str(checksum) for name, checksum in _dict(raw).items()}


def _read_group(raw: Any) -> KvCacheGroup:
    group = _dict(raw)
    window = group.get("sliding_window")
    return KvCacheGroup(
        group_idx=_int(group.get("group_idx")),
        kind=_str(group.get("kind")),
        block_size=_int(group.get("block_size")),
        sliding_window=None if window is None else _int(window),
    )


BOOLEAN = Result("a boolean", _exactly(bool))
STRING = Result("a string", _str)
STRINGS = Result("a list of strings", _each(_str))
INTEGERS = Result("a list of integers", _each(_int))
WORKER_RESULTS = Result("a list with an item per worker", _list)
CHECKSUMS = Result("a list of maps from names to checksums", _each(_read_checksums))
KV_CACHE_GROUPS = Result("a list of KV-cache groups", _each(_read_group))


def first(results: Mapping[int, T]) -> T:
    """The result of the first engine."""
    return next(iter(results.values()))


def require_equal(method: str, results: Mapping[int, T]) -> T:
    """The result that all engines gave; `InconsistentUtilityResultsError` if there is none."""
    result = first(results)
    if any(other != result for other in results.values()):
        raise InconsistentUtilityResultsError(method, dict(results))
    return result


def concatenate(results: Mapping[int, list[T]]) -> list[T]:
    """The results of all engines in one list, in the order of the engines."""
    return [item for result in results.values() for item in result]


class Wakeable(Protocol):
    """What a task sleeps on, such as a `Waker`."""

    def wake(self) -> None:
        """Let the task go on."""
        ...


@define(eq=False)
class UtilityCall:
    """One method, asked of several engines."""

    call_id: int
    method: str
    missing: set[int]
    """Engines that have neither answered nor died."""
    _waiter: Wakeable
    results: dict[int, Any] = attrs.field(factory=dict, init=False)
    failures: dict[int, str] = attrs.field(factory=dict, init=False)
    _error: EngineCoreError | None = attrs.field(default=None, init=False)
    """Why an engine gave no result, if not by its own word; the first reason."""
    _client_error: EngineCoreError | None = attrs.field(default=None, init=False)
    """Why no engine will answer any more."""

    @property
    def is_settled(self) -> bool:
        """Whether no engine is missing any more."""
        return not self.missing

    def outcome(self) -> dict[int, Any]:
        """The results by engine index, or raises for the failures; once it is settled."""
        if not self.failures:
            return dict(sorted(self.results.items()))
        if self._client_error is not None:
            raise copy_error(self._client_error)
        if (
            isinstance(self._error, EngineDeadError)
            and len(self.failures) == 1
            and not self.results
        ):
            raise copy_error(self._error)
        raise UtilityCallFailedError(
            self.method, self.call_id, dict(sorted(self.failures.items())), sorted(self.results)
        ) from self._error

    def receive_result(self, engine_index: int, result: Any) -> None:
        """An engine ran the method."""
        self.results[engine_index] = result
        self._settle(engine_index)

    def receive_failure(self, engine_index: int, text: str) -> None:
        """An engine failed to run the method."""
        self.failures[engine_index] = text
        self._settle(engine_index)

    def fail(self, engine_index: int, error: EngineCoreError) -> None:
        """This engine's answer will not come, or cannot be read."""
        self._error = self._error or error
        self.receive_failure(engine_index, str(error))

    def fail_all(self, error: EngineCoreError) -> None:
        """The client serves no call any more."""
        if self.missing:
            self._client_error = error
        for engine_index in list(self.missing):
            self.receive_failure(engine_index, str(error))

    def _settle(self, engine_index: int) -> None:
        self.missing.discard(engine_index)
        if not self.missing:
            self._waiter.wake()


class UtilityCallTable:
    """The calls under way, by id. An answer that none of them waits for is dropped."""

    def __init__(self) -> None:
        self._calls: dict[int, UtilityCall] = {}
        self._call_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, method: str, engine_indices: Iterable[int], waiter: Wakeable) -> UtilityCall:
        """Take in a new call; ``waiter`` is woken when it is settled."""
        call = UtilityCall(next(self._call_ids), method, set(engine_indices), waiter)
        self._calls[call.call_id] = call
        return call

    def close(self, call: UtilityCall) -> None:
        """Forget a call, settled or not."""
        self._calls.pop(call.call_id, None)

    def receive(self, engine_index: int, output: UtilityOutput) -> None:
        """Hand an engine's answer to its call."""
        call = self._awaiting(output.call_id, engine_index)
        if call is None:
            return
        if output.failure_message is None:
            call.receive_result(engine_index, output.result)
        else:
            call.receive_failure(engine_index, output.failure_message)

    def _awaiting(self, call_id: int, engine_index: int) -> UtilityCall | None:
        call = self._calls.get(call_id)
        return call if call is not None and engine_index in call.missing else None

    def fail_engine(self, engine_index: int, error: EngineCoreError) -> None:
        """This engine will answer no call any more."""
        for call in self._calls.values():
            if engine_index in call.missing:
                call.fail(engine_index, error)

    def fail_all(self, error: EngineCoreError) -> None:
        """No engine will answer any call any more."""
        for call in self._calls.values():
            call.fail_all(error)
