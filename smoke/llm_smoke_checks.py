"""Runs ``llm-smoke`` as a process and looks at what it prints and how it ends."""

import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from harness import CheckError, our_command
from processes import Process, running

STOP_LIMIT = 1.0
"""Seconds from Ctrl-C to the end of the command."""

FIVE_IDS = r"token_ids=\[\d+(, \d+){4}\]"

ALL_PASS = (
    FIVE_IDS,
    "finish_reason=length",
    r"is_sleeping\(after_sleep\)=true",
    r"is_sleeping\(after_wake\)=false",
    "new_logprobs=1 rows of 3",
    "new_prompt_logprobs_tensors=479 rows of 2",
)


def llm_smoke(
    *tokens: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Process]:
    """Run the command while the block runs."""
    return running("llm-smoke", [*our_command("llm-smoke"), *tokens], environment=environment)


def expect_lines(process: Process, exit_code: int, *patterns: str, timeout: float = 60.0) -> None:
    """Wait for the end of the command: its exit code, and lines with all these patterns."""
    got = process.wait_for_exit(timeout)
    if got != exit_code:
        raise CheckError(f"exit code {got} instead of {exit_code}")
    for pattern in patterns:
        if not re.search(f"(?m)^{pattern}$", process.log()):
            raise CheckError(f"no line with {pattern!r}")
    if "Traceback" in process.log():
        raise CheckError("a traceback was printed")


def expect_end_within(
    process: Process, limit: float, pid: int, number: int, exit_code: int, reason: str
) -> float:
    """Send a signal that shall end the command, and give the seconds that its end took."""
    begin = time.monotonic()
    os.kill(pid, number)
    process.wait_for_exit()
    seconds = time.monotonic() - begin
    expect_lines(process, exit_code, f"llm-smoke: {reason}")
    if seconds > limit:
        raise CheckError(f"the end took {seconds:.2f} s, not {limit:g} s")
    return seconds


def begin_request(process: Process, timeout: float = 180.0) -> None:
    """Wait until a request is about to be sent."""
    process.wait_for_line("^prompt_token_ids=", timeout)
