"""What others have written, and outputs that are closed, full or broken."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli import fake_engine

from trio_vllm.cli.app import LONGEST_TEXT, one_line
from trio_vllm.cli.llm_smoke import main

LLM_SMOKE = f"'{sys.executable}' -m trio_vllm llm-smoke"
MOCK_ENGINE = f"'{sys.executable}' -m trio_vllm mock-engine"

FULL = "cannot write to standard output: No space left on device"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line; ``rc`` of its first part is printed to standard error at the end."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)


# Texts of others ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain  text\n", "plain text"),
        ("\033[2Jgone\a", "\\x1b[2Jgone\\x07"),
        ("[/x] [red]é", "[/x] [red]é"),
        ("\u202eright to left", "\\u202eright to left"),
    ],
)
def test_one_line(text: str, expected: str) -> None:
    """It is printable and otherwise as it was."""
    assert one_line(text) == expected


@pytest.mark.parametrize("text", ["a" * 300_000 + "end", "\033" * 400 + "end"])
def test_long_texts_lose_their_middle(text: str) -> None:
    """Also if it is escaping that makes them long."""
    line = one_line(text)

    assert len(line) <= LONGEST_TEXT
    assert line.startswith(one_line(text[:10]))
    assert line.endswith("end")
    assert " ... " in line


@pytest.mark.parametrize("options", [[], ["--verbose"], ["--json"]])
def test_last_words_of_an_engine(capfd: pytest.CaptureFixture[str], options: list[str]) -> None:
    """They are no markup, move no cursor and fill no screen."""
    script = 'echo "[/x] $(printf "\\033[2J")$(head -c 30000 /dev/zero | tr "\\0" y)"; exit 3'

    assert main(["all", *options, "--spawn", "--", "sh", "-c", script, "{port}"]) == 1

    out, err = capfd.readouterr()
    assert "\033" not in out + err
    assert err.splitlines()[-1].startswith("llm-smoke: ")
    assert "the engine command ended with 3: [/x] \\x1b[2Jyyy" in err
    assert "failed" in out or '"passed": false' in out
    assert "yyy" in out
    assert max(map(len, err.splitlines())) < LONGEST_TEXT + 100


def test_tracebacks_are_escaped_too(capfd: pytest.CaptureFixture[str]) -> None:
    """They keep their lines."""
    script = "printf '\\033[2J'; exit 3"

    assert main(["generate", "--debug", "--spawn", "--", "sh", "-c", script, "{port}"]) == 1

    err = capfd.readouterr().err
    assert err.startswith("Traceback")
    assert "\033" not in err
    assert len(err.splitlines()) > 3


# Outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "exit_code", "err"),
    [
        (f"{LLM_SMOKE} generate --mock >&-", 0, ""),
        (f"{LLM_SMOKE} all --mock --json >&- 2>&- <&-", 0, ""),
        (f"{LLM_SMOKE} generate --mock >/dev/full", 1, f"llm-smoke: {FULL}\n"),
        (f"{LLM_SMOKE} all --mock --json >/dev/full", 1, f"llm-smoke: {FULL}\n"),
        (f"{LLM_SMOKE} --help >/dev/full", 1, f"llm-smoke: {FULL}\n"),
        (f"{LLM_SMOKE} --help >/dev/full 2>/dev/full", 1, ""),
        (f"{LLM_SMOKE} generate --mock --engine-count=0 2>/dev/full", 2, ""),
        (f"{LLM_SMOKE} generate --mock --engine-count=0 2>&-", 2, ""),
        (f"{MOCK_ENGINE} --help >&-", 0, ""),
        (f"{MOCK_ENGINE} --help >/dev/full", 1, f"mock-engine: {FULL}\n"),
        (f"{MOCK_ENGINE} --version >/dev/full", 1, f"mock-engine: {FULL}\n"),
    ],
)
def test_closed_and_full_outputs(command: str, exit_code: int, err: str) -> None:
    """A closed one is one that nobody wants; what a full one has lost is a failure."""
    done = shell(command)

    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", err)


@pytest.mark.parametrize(
    "command",
    [f"{LLM_SMOKE} all --mock", f"{LLM_SMOKE} all --mock --json", f"{LLM_SMOKE} all --help"],
)
def test_readers_that_leave(command: str) -> None:
    """Nothing is said about it, and it has not passed."""
    done = shell(f"{{ {command}; echo exit code $? >&2; }} | true")

    assert done.stderr == "exit code 1\n"


@pytest.mark.parametrize("log", ["/dev/full", "&-"])
@pytest.mark.parametrize("processes", [1, 2])
def test_mock_engines_serve_without_a_log(
    address: str, capfd: pytest.CaptureFixture[str], log: str, processes: int
) -> None:
    """And end as usual."""
    options = f"--handshake-address {address} --engine-count 2 --processes {processes}"
    with subprocess.Popen(
        ["sh", "-c", f"exec {MOCK_ENGINE} {options} --log-requests 2>{log}"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        exit_code = main(["generate", "--engine-count", "2", "--handshake-address", address])
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()

    assert (exit_code, capfd.readouterr().err) == (0, "")
    assert (process.returncode, out) == (0, "")


def test_descriptors_of_closed_outputs_are_not_used_again() -> None:
    """A socket under the number of standard output would get what is printed."""
    script = (
        "import os, sys; from trio_vllm.cli import _open_standard_streams as fill; fill();"
        "links = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)];"
        "os._exit(links != ['/dev/null'] * 3)"
    )

    assert shell(f"'{sys.executable}' -c \"{script}\" <&- >&- 2>&-").returncode == 0


# Sources of options -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [LLM_SMOKE + " generate --mock", MOCK_ENGINE])
def test_a_file_that_is_nested_deeply(tmp_path: Path, command: str) -> None:
    """It is refused as any wrong one."""
    file = tmp_path / "deep.toml"
    file.write_text(f"a = {'[' * 100_000}{']' * 100_000}\n")

    done = shell(f"{command} --config '{file}'")

    assert done.returncode == 2
    assert re.fullmatch(r"[a-z-]+: --config \S+: nested too deeply\.\n", done.stderr)


def test_unknown_variables_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, whichever command they may have been meant for."""
    monkeypatch.setenv("LLM_SMOKE_MAX_TOKEN", "3")
    monkeypatch.setenv("LLM_SMOKE_X\033[2J", "")
    monkeypatch.setenv("LLM_SMOKE_SLEEP_MODE", "keep")  # of another command
    monkeypatch.setenv("LLM_SMOKE_MAX_TOKENS", "4")
    monkeypatch.setenv("MOCK_ENGINE_NONSENSE", "7")  # of another app

    assert main(["generate", "--mock"]) == 0

    assert capfd.readouterr().err == (
        "llm-smoke: ignores what is no option: LLM_SMOKE_MAX_TOKEN, LLM_SMOKE_X\\x1b[2J\n"
    )


def test_unknown_variables_of_the_mock() -> None:
    """The same."""
    done = subprocess.run(
        [sys.executable, "-m", "trio_vllm", "mock-engine", "--engine-count=0"],
        env={**os.environ, "MOCK_ENGINE_SEEDS": "7", "MOCK_ENGINE_RECONNECT": "false"},
        capture_output=True,
        text=True,
    )

    first, second = done.stderr.splitlines()
    assert first == "mock-engine: ignores what is no option: MOCK_ENGINE_SEEDS"
    assert "--engine-count" in second


def test_an_engine_that_floods_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    """A verbose run shows each line cut."""
    script = f"print('z' * 50_000, flush=True); import runpy; runpy.run_path({fake_engine.__file__!r}, run_name='__main__')"
    command = [sys.executable, "-c", script, "{address}"]

    assert main(["generate", "--verbose", "--spawn", "--", *command]) == 0

    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("engine: zz")]
    assert [len(line) < LONGEST_TEXT + 20 for line in lines] == [True]
