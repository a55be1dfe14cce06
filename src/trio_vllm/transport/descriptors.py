"""`require_descriptors`: checks that file descriptors are left; without one ØMQ ends the process."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterable

from trio_vllm.errors import ConfigurationError

PER_SOCKET = 3
"""Descriptors of a ØMQ socket that is watched, beside those of its connections."""

PER_CONTEXT = 24
"""Descriptors of a ØMQ context, and some for whoever else opens one meanwhile."""


def require_descriptors(count: int, purpose: str, *, hint: str = "") -> None:
    """Ensure that so many descriptors can be opened; raise the soft limit if need be.

    Args:
      count: How many.
      purpose: What for, in words.
      hint: What else the user may do if there are too few.

    Raises:
      ConfigurationError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _has_room(count, soft):
        return
    if _is_less(soft, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if _has_room(count, hard):
            return
    raise ConfigurationError(
        f"{purpose} need {count} file descriptors, and {_free(hard)} are left of the limit of {hard}:"
        f" raise it (ulimit -n){hint}"
    )


def _has_room(count: int, limit: int) -> bool:
    if limit == resource.RLIM_INFINITY:
        return True
    # Counting what is open takes long where much is. The lowest free number is always given first, so
    # these are free if no others are.
    highest = range(limit - count, limit)
    return (highest.start > 2 and _none_is_open(highest)) or _free(limit) >= count


def _none_is_open(descriptors: Iterable[int]) -> bool:
    # Asked for each socket: one call of the system for all takes a quarter of the time of many.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    found = dict(poll.poll(0))
    return all(found.get(descriptor) == select.POLLNVAL for descriptor in descriptors)


def _free(limit: int) -> int:
    try:
        # Of which one is that of the listing itself.
        return max(limit - len(os.listdir("/proc/self/fd")) + 1, 0)
    except OSError:  # there is none left to list them with
        return 0


def _is_less(soft: int, hard: int) -> bool:
    return soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard)
