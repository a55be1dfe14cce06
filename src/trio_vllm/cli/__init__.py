"""The commands ``mock-engine`` and ``llm-smoke``: parse, call a public function, print, exit code.

Importing this package costs next to nothing, and showing a command's help not much more: what runs
a command is imported when it runs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

__all__ = ["collect_rarely", "run_llm_smoke", "run_mock_engine"]


def run_llm_smoke() -> NoReturn:
    """Run ``llm-smoke`` on the command line of this process."""
    collect_rarely()
    _open_standard_streams()
    _end_at_once_on_signals(lambda number: 128 + number)
    from trio_vllm.cli.llm_smoke import main

    sys.exit(main())


def run_mock_engine() -> NoReturn:
    """Run ``mock-engine`` on the command line of this process."""
    collect_rarely()
    _open_standard_streams()
    _end_at_once_on_signals(lambda number: 0)
    # numpy's threads for large matrices, which the mock does not have, would spin for 0.1 s at the start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from trio_vllm.cli.mock_engine import main

    exit_code = main()
    # Python looks for garbage as it ends: half a second of work for each thousand engines.
    gc.freeze()
    sys.exit(exit_code)


def collect_rarely() -> None:
    """Look for garbage in cycles, which are rare here, less often than Python does by itself.

    While modules are imported, which makes many objects and no garbage, that is a twentieth of the time.
    """
    gc.set_threshold(100_000, 20, 100)


def _open_standard_streams() -> None:
    """Let those that the caller has closed lead nowhere.

    Otherwise the next file or socket gets their descriptor, and what is printed; and Python prints to
    standard output what is meant for a standard error that is closed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gives the lowest free one, that is this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _end_at_once_on_signals(exit_code: Callable[[int], int]) -> None:
    """Until trio runs, and again once it has ended, there is nothing to clean up.

    Python's own way, an exception out of whatever happens to be imported, prints a traceback.
    """

    def end_at_once(number: int, _frame: FrameType | None) -> NoReturn:
        os._exit(exit_code(number))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)
