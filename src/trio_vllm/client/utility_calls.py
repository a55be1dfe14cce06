"""Utility calls: what is not sent, what must come back, and how the answers become one.

What a method takes and gives is defined by ``EngineCore`` and ``EngineCoreProc`` in upstream's
``vllm/v1/engine/core.py``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import trio

from trio_vllm.errors import (
    EngineCoreError,
    InconsistentUtilityResultsError,
    UtilityCallFailedError,
    UtilityRefusedError,
    UtilityResultError,
    copy_error,
)
from trio_vllm.protocol import UtilityCallOutput

# MERGED client/_utility_calls: The utility calls under way: who has been asked, who has answered.


T = TypeVar("T")

MACHINERY = frozenset(
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

UNSPEAKABLE = frozenset({"get_kv_cache_spec", "get_model"})
"""Methods of workers whose results have no MessagePack form: sending one ends the engine's output
thread, and it goes mute without a word."""


def check_utility_call(method: str, args: Sequence[Any]) -> None:
    """Refuse what is known to end an engine; `UtilityRefusedError`."""
    given: object = method
    if not isinstance(given, str):
        raise TypeError(f"method must be a string, not {given!r}")
    if method.startswith("_") or method in MACHINERY:
        raise UtilityRefusedError(method, "it is the engine's own machinery")
    if method == "handle_fault_tolerance":
        # The input thread handles it, unguarded; whether it can is not told to frontends.
        raise UtilityRefusedError(method, "an engine without fault tolerance goes deaf of it")
    if method == "collective_rpc" and args and args[0] in UNSPEAKABLE:
        reason = f"the result of {args[0]!r} cannot be sent, the engine would go mute"
        raise UtilityRefusedError(method, reason)


@attrs.frozen(kw_only=True)
class KvCacheGroup:
    """Layers of a model whose KV cache has one form."""

    group_idx: int
    kind: str
    """Such as ``full_attention`` or ``sliding_window``."""
    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Tokens that attention looks back, if it does not look at all of them."""


@attrs.frozen
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


def agreed(method: str, results: Mapping[int, T]) -> T:
    """The result that all engines gave; `InconsistentUtilityResultsError` if there is none."""
    result = first(results)
    if any(other != result for other in results.values()):
        raise InconsistentUtilityResultsError(method, dict(results))
    return result


def concatenated(results: Mapping[int, list[T]]) -> list[T]:
    """The results of all engines in one list, in the order of the engines."""
    return [item for result in results.values() for item in result]


def oldest_release(versions: Collection[str]) -> tuple[int, int] | None:
    """Major and minor number of the oldest of some versions of vLLM; None if one is no release.

    A development build may have, or lack, what the release of its number has.
    """
    releases = []
    for version in versions:
        found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?", version)
        if found is None:
            return None
        releases.append((int(found[1]), int(found[2])))
    return min(releases)


@attrs.define
class UtilityCall:
    """One method, asked of several engines."""

    call_id: int
    method: str
    missing: set[int]
    """Engines that have neither answered nor died."""
    results: dict[int, Any] = attrs.field(factory=dict)
    failures: dict[int, str] = attrs.field(factory=dict)
    error: EngineCoreError | None = None
    """The first reason, of ours, why an engine will not answer."""
    given_up: EngineCoreError | None = None
    """Why no engine will answer any more."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """Set when no engine is missing any more."""

    def outcome(self) -> dict[int, Any]:
        """The results by engine index, or raises for the failures; once it is settled."""
        if not self.failures:
            return dict(sorted(self.results.items()))
        if self.given_up is not None:
            raise copy_error(self.given_up)
        if self.error is not None and not self.results and len(self.failures) == 1:
            raise copy_error(self.error)
        raise UtilityCallFailedError(
            self.method, self.call_id, dict(sorted(self.failures.items())), sorted(self.results)
        ) from self.error

    def settle(self, engine_index: int) -> None:
        """Wait for this engine no longer."""
        self.missing.discard(engine_index)
        if not self.missing:
            self.settled.set()


class UtilityCalls:
    """The table of calls. An answer to a call that is not in it is dropped."""

    def __init__(self) -> None:
        self._calls: dict[int, UtilityCall] = {}
        self._call_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, method: str, engine_indices: Iterable[int]) -> UtilityCall:
        """Take a new call in."""
        call = UtilityCall(next(self._call_ids), method, set(engine_indices))
        self._calls[call.call_id] = call
        return call

    def close(self, call: UtilityCall) -> None:
        """Forget a call, answered or not."""
        self._calls.pop(call.call_id, None)

    def take(self, answer: UtilityCallOutput) -> None:
        """Hand an engine's answer to its call."""
        output, index = answer.output, answer.engine_index
        call = self._calls.get(output.call_id)
        if call is None or index not in call.missing:
            return
        if output.failure_message is not None:
            call.failures[index] = output.failure_message
        else:
            call.results[index] = output.result
        call.settle(index)

    def fail_engine(self, engine_index: int, error: EngineCoreError) -> None:
        """This engine will answer no call any more."""
        for call in self._calls.values():
            if engine_index in call.missing:
                call.failures[engine_index] = str(error)
                call.error = call.error or error
                call.settle(engine_index)

    def fail_all(self, error: EngineCoreError) -> None:
        """No engine will answer any call any more."""
        for call in self._calls.values():
            for engine_index in list(call.missing):
                call.given_up = error
                call.failures[engine_index] = str(error)
                call.settle(engine_index)
