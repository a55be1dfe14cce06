"""Ends what we have started if we are killed and cannot do it ourselves."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

END_GROUP = 'cat; kill -s TERM -- "-$0"; sleep 5; kill -s KILL -- "-$0"'
"""For a shell. Nothing is written to its input, which the system closes when we are gone."""


@contextmanager
def guarding(group: int) -> Iterator[None]:
    """Let a shell watch over the block, and end a process group should we die in it.

    It has a session of its own: what is sent to ours, to the last SIGKILL, does not reach it.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", END_GROUP, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:
        try:
            yield
        finally:
            guard.kill()  # before its input is closed
