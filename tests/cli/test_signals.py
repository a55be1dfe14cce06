"""Stopping the command, whatever it is doing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from tests.cli import fake_engine
from tests.proc import is_alive, started

from trio_vllm.cli.smokes import SMOKES

ENGINE = [sys.executable, "-u", fake_engine.__file__]

LIMIT = 20.0
"""Seconds from the signal to the end. Promised is one, but a busy machine may take longer; without the
signal it would be thirty."""


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Whoever runs the tests under ``nohup`` ignores them, and what is started inherits that."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def llm_smoke(*tokens: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run the command as a process."""
    command = [sys.executable, "-m", "trio_vllm", "llm-smoke", *tokens, "--verbose"]
    return started(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Wait for a line with ``pattern``; give its first group, if it has one."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[found.re.groups]
    raise AssertionError(f"it ended before {pattern!r}")


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal, and give what is printed from then on; within the limit."""
    begin = time.monotonic()
    process.send_signal(number)
    rest, _ = process.communicate()
    assert time.monotonic() - begin < LIMIT
    return rest


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_while_it_waits_for_engines(address: str, number: signal.Signals, exit_code: int) -> None:
    """One line tells that it has not passed, and so does the exit code."""
    with llm_smoke("generate", "--handshake-address", address) as process:
        read_until(process, "waiting for HELLO")

        rest = stop(process, number)

    assert rest == f"llm-smoke: stopped by {number.name} before it was done\n"
    assert process.returncode == exit_code


def test_json_of_a_stop(address: str) -> None:
    """It is the same object as that of any failure, with the name of the signal."""
    with llm_smoke("all", "--json", "--handshake-address", address) as process:
        read_until(process, "waiting for HELLO")

        reason, text = stop(process, signal.SIGTERM).splitlines()

    document = json.loads(text)
    assert reason == "llm-smoke: stopped by SIGTERM before it was done"
    assert document["passed"] is False
    assert document["smokes"]["generate"]["failure_kind"] == "SIGTERM"
    assert document["skipped"] == [name for name in SMOKES if name != "generate"]
    assert process.returncode == 143


def test_in_mid_request(address: str) -> None:
    """The engines that it has started end with it, even those that do not want to."""
    engine = [*ENGINE, address, "mute", "stubborn"]
    tokens = ["generate", "--handshake-address", address, "--spawn", "--verbose", "--", *engine]
    with llm_smoke(*tokens) as process:
        pid = int(read_until(process, r"fake engine with pid (\d+)"))
        read_until(process, "^prompt_token_ids=")

        rest = stop(process, signal.SIGTERM)

    assert rest == "llm-smoke: stopped by SIGTERM before it was done\n"
    assert process.returncode == 143
    assert not is_alive(pid)


def test_engines_do_not_outlive_a_killed_command(address: str) -> None:
    """A shell sees to it, with all their children."""
    engine = [*ENGINE, address, "mute", "child"]
    tokens = ["generate", "--handshake-address", address, "--spawn", "--verbose", "--", *engine]
    with llm_smoke(*tokens) as process:
        pids = [int(read_until(process, rf"{name} with pid (\d+)")) for name in ("engine", "child")]
        process.kill()

    deadline = time.monotonic() + LIMIT
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_before_anything_has_begun() -> None:
    """While modules are imported there is no traceback either."""
    script = (
        "import os, signal, sys; sys.argv = ['llm-smoke', 'generate', '--mock'];"
        "import trio_vllm.cli as cli;"
        "sys.meta_path.insert(0, type('', (), {'find_spec': staticmethod("
        "lambda *_: os.kill(os.getpid(), signal.SIGINT))}));"
        "cli.run_llm_smoke()"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigint_counts_in_the_background(address: str) -> None:
    """A shell without job control starts background commands with SIGINT ignored."""
    tokens = f"generate --handshake-address {address} --verbose"
    command = f"'{sys.executable}' -m trio_vllm llm-smoke {tokens} 2>&1 & echo $!; wait $!"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as shell:
        pid = int(read_until(shell, r"^(\d+)$"))
        read_until(shell, "waiting for HELLO")
        subprocess.run(["kill", "-INT", str(pid)], check=True)
        rest, _ = shell.communicate()

    assert rest == "llm-smoke: stopped by SIGINT before it was done\n"
    assert shell.returncode == 130


def test_hangups_can_be_ignored(address: str) -> None:
    """``nohup`` means what it says."""
    command = [sys.executable, "-m", "trio_vllm", "llm-smoke", "generate", "--verbose"]
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with subprocess.Popen(
            [*command, "--handshake-address", address, "--ready-timeout-secs", "0.3"],
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            assert "waiting for HELLO" in process.stderr.readline()
            process.send_signal(signal.SIGHUP)
            _, rest = process.communicate()
    finally:
        signal.signal(signal.SIGHUP, previous)

    assert "gave up after 0.3 s" in rest
    assert process.returncode == 1
