"""Utility calls: what is not sent, what must come back, and how the answers become one.

What a method takes and gives is defined by ``EngineCore`` and ``EngineCoreProc`` in upstream's
``vllm/v1/engine/core.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from trio_vllm._errors import (
    InconsistentUtilityResultsError,
    UtilityRefusedError,
    UtilityResultError,
)

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
