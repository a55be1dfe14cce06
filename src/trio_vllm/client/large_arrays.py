"""`with_own_arrays` copies the large arrays of a request that its caller could change, in a thread.

ØMQ is lent what cannot change, and copies the rest as it is sent, for which everything else would wait:
about 0.1 s for 200 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import trio

from trio_vllm.protocol import EngineCoreRequest, MultiModalFeatureSpec, Tensor

LARGE = 4 * 1024 * 1024
"""Bytes from which on an array is worth a thread: they take some 2 ms to copy."""

MAX_NESTING = 16
"""Lists in lists that are looked into; deeper ones are refused later."""


async def with_own_arrays(requests: Sequence[EngineCoreRequest]) -> Sequence[EngineCoreRequest]:  # noqa: ASYNC910
    """Give requests, which share their arrays, with copies of those that are large and may change.

    As a rule there are none, and this is no checkpoint.

    Cancellation:
      Waits for the copy, and nothing has happened.
    """
    if not has_large_arrays(requests[0]):
        return requests  # noqa: ASYNC910
    # A limiter of its own: the default one may be used up by the application.
    changes = await trio.to_thread.run_sync(_copies, requests[0], limiter=trio.CapacityLimiter(1))
    return [attrs.evolve(request, **changes) for request in requests]


def has_large_arrays(request: EngineCoreRequest) -> bool:
    """Whether a request has an array that is large and may change."""
    if request.mm_features is None and request.prompt_embeds is None:
        return False
    return _is_large(request.prompt_embeds) or any(map(_is_large, _values(request.mm_features)))


def _values(features: Any) -> Iterator[Any]:
    """The values of features; what has a wrong type is refused later."""
    if isinstance(features, list | tuple):
        for feature in features:
            if isinstance(feature, MultiModalFeatureSpec) and isinstance(feature.data, dict):
                yield from (getattr(element, "data", None) for element in feature.data.values())


def _is_large(value: Any, depth: int = 0) -> bool:
    match value:
        case Tensor(data=memoryview() as view):
            return view.nbytes >= LARGE and view.c_contiguous and not view.readonly
        case np.ndarray():
            is_lent = value.flags.c_contiguous and not value.flags.writeable
            return value.nbytes >= LARGE and not is_lent
        case list() | tuple() if depth < MAX_NESTING:
            return any(_is_large(item, depth + 1) for item in value)
    return False


def _copies(request: EngineCoreRequest) -> dict[str, Any]:
    """The fields of a request that have arrays."""
    features = request.mm_features
    return {
        "prompt_embeds": _copied(request.prompt_embeds),
        "mm_features": features and [_copied_feature(feature) for feature in features],
    }


def _copied_feature(feature: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    if not any(map(_is_large, _values([feature]))):
        return feature
    data = {
        name: attrs.evolve(element, data=_copied(element.data))
        for name, element in (feature.data or {}).items()
    }
    return attrs.evolve(feature, data=data)


def _copied(value: Any, depth: int = 0) -> Any:
    """A value with each large array in it replaced by a copy; numpy copies while others run."""
    if not _is_large(value, depth):
        return value
    if isinstance(value, Tensor):
        flat = np.frombuffer(value.data, np.uint8)
        return attrs.evolve(value, data=_frozen_copy(flat).data)
    if isinstance(value, np.ndarray):
        return _frozen_copy(value)
    return [_copied(item, depth + 1) for item in value]


def _frozen_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy
