"""What all tests have: no process outlives them, Ctrl-C is heard; and a clock for busy machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from hypothesis import settings
from tests.examples import USUAL
from trio.testing import MockClock

import trio_vllm

# How long an example may take would depend on what else the machine does.
settings.register_profile("thorough", deadline=None, max_examples=USUAL)
settings.register_profile("quick", deadline=None, max_examples=USUAL // 4)
settings.load_profile("quick")

MARK = "TRIO_VLLM_TESTS_MARK"

KILL_MARKED = 'cat; grep -lsF "$0" /proc/[0-9]*/environ | cut -d / -f 3 | xargs -r kill -s KILL --'
"""For a shell whose input ends when we do. It does not have the mark itself."""


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Mark whatever the tests start, and let a shell kill what has the mark once they are over."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        ["/bin/sh", "-c", KILL_MARKED, mark],
        stdin=subprocess.PIPE,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ):
        os.environ[MARK] = mark
        yield
        del os.environ[MARK]


@pytest.fixture(scope="session", autouse=True)
def code_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled code for the processes that tests start, where Python is told to leave none.

    They would compile the package anew each time, which takes longer than all else that they do. An
    installed package has its compiled code beside it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode and not Path(cache_from_source(trio_vllm.__file__)).exists():
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell lets what it runs in the background ignore it, all that is started there included."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def patient_clock() -> MockClock:
    """Jumps to the next deadline when nothing has happened for a while, and stands still otherwise.

    For what must give up some time after the last message, over real connections. ``autojump_clock``
    would not wait until a message has come through the operating system.
    """
    return MockClock(autojump_threshold=0.3)
