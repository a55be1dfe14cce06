"""What the command line takes and refuses, and where else options come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trio_vllm.cli import mock_engine
from trio_vllm.cli.llm_smoke import app, main
from trio_vllm.cli.mock_options import HOW_TO_WRITE_TIMES, WITH_TIMES
from trio_vllm.spawn import address_in, substitute_address


def parsed(*tokens: str) -> Any:
    """The options that a command would get."""
    _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    return bound.arguments["options"]


def refused(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    """Run what is wrong usage; give the one line that says so."""
    assert main(tokens) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("llm-smoke: ")
    return captured.err


COMMON = {
    "handshake_address": None,
    "engine_count": 1,
    "model": None,
    "host": "127.0.0.1",
    "client_index": 0,
    "ready_timeout": 30.0,
    "output_timeout_secs": 120.0,
    "spawn": False,
    "json": False,
    "verbose": False,
    "debug": False,
}

UTILITY = {
    "expected_is_sleeping": False,
    "reset_running_requests": False,
    "reset_external": False,
    "sleep_level": 1,
    "sleep_mode": "abort",
    "skip_sleep_wake": False,
}

LOGPROBS = {"logprobs": 2, "prompt_logprobs": 1, "prompt_repeats": 96}


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("generate", {"max_tokens": 5}),
        ("utility", UTILITY),
        ("logprobs", {**LOGPROBS, "max_tokens": 1}),
        ("all", {**UTILITY, **LOGPROBS, "max_tokens": None}),
    ],
)
def test_defaults_are_those_of_the_examples(command: str, defaults: dict[str, object]) -> None:
    """Whoever knows vLLM's examples need not learn anything."""
    options = parsed(command, "--mock")

    for name, value in {**COMMON, **defaults}.items():
        assert getattr(options, name) == value, name


@pytest.mark.parametrize("command", ["generate", "utility", "logprobs", "all"])
@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "--handshake-address is needed"),
        (["--handshake-address", "localhost:5555"], "tcp://HOST:PORT or ipc://PATH"),
        (["--handshake-address", "tcp://127.0.0.1"], "tcp://HOST:PORT or ipc://PATH"),
        (["--handshake-address", "tcp://127.0.0.1:0"], "tcp://HOST:PORT or ipc://PATH"),
        (["--handshake-address", "tcp://127.0.0.1:65536"], "tcp://HOST:PORT or ipc://PATH"),
        (["--handshake-address", "tcp://::1:5"], "write it as tcp://[::1]:5555"),
        (["--handshake-address", "ipc://"], "tcp://HOST:PORT or ipc://PATH"),
        (["--mock", "--engine-count", "0"], "Must be >= 1"),
        (["--mock", "--engine-count", "65537"], "Must be <= 65536"),
        (["--mock", "--host", "127.0.0.1:80"], "without a port"),
        (["--mock", "--host", ""], "without a port"),
        (["--mock", "--client-index", "1"], "Must be 0: engines are given one pair of addresses"),
        (["--mock", "--client-index", "-1"], "Must be 0"),
        (["--mock", "--ready-timeout-secs", "0"], "Must be more than 0"),
        (["--mock", "--ready-timeout-secs", "-1"], "Must be more than 0"),
        (["--mock", "--ready-timeout-secs", "nan"], "Must be more than 0"),
        (["--mock", "--output-timeout-secs", "-0.1"], "Must be more than 0"),
        (["--mock", "--output-timeout-secs", "soon"], "unable to convert"),
        (["--mock", "--spawn", "engine"], "exclude each other"),
        (["--mock", "engine"], "a COMMAND needs --spawn"),
        (["--spawn"], "--spawn needs a command"),
        (["--spawn", "--", "engine"], "give --handshake-address, or put {port} into it"),
        (["--mock", "--colour"], "Unknown option"),
    ],
)
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, tokens: list[str], reason: str
) -> None:
    """With the option and the reason in one line, and exit code 2."""
    assert reason in refused(capsys, command, *tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        ["generate", "--max-tokens", "0"],
        ["generate", "--max-tokens", "five"],
        ["utility", "--sleep-level", "3"],
        ["utility", "--sleep-level", "-1"],
        ["utility", "--sleep-mode", "deep"],
        ["utility", "--max-tokens", "1"],
        ["logprobs", "--max-tokens", "0"],
        ["logprobs", "--logprobs", "-2"],
        ["logprobs", "--prompt-logprobs", "-2"],
        ["logprobs", "--prompt-repeats", "0"],
        ["logprobs", "--prompt-repeats", "1000001"],
        ["all", "--max-tokens", "0"],
    ],
)
def test_values_out_of_range_are_refused(
    capsys: pytest.CaptureFixture[str], tokens: list[str]
) -> None:
    """The line names the option."""
    assert tokens[1] in refused(capsys, *tokens, "--mock")


@pytest.mark.parametrize("tokens", [["generat", "--mock"], ["--mock"]])
def test_an_unknown_command_is_refused(
    capsys: pytest.CaptureFixture[str], tokens: list[str]
) -> None:
    """Also an option without a command."""
    refused(capsys, *tokens)


def test_a_missing_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A gate that runs nothing must not pass; the help is on standard error."""
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: llm-smoke COMMAND" in captured.err


# Where options come from --------------------------------------------------------------------------


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option is also a variable; the command line wins."""
    monkeypatch.setenv("LLM_SMOKE_MAX_TOKENS", "7")
    monkeypatch.setenv("LLM_SMOKE_MOCK", "true")
    monkeypatch.setenv("LLM_SMOKE_HANDSHAKE_ADDRESS", "tcp://127.0.0.1:1")
    monkeypatch.setenv("LLM_SMOKE_SLEEP_MODE", "keep")  # not for generate

    options = parsed("generate")

    assert (
        options.max_tokens,
        options.mock,
        options.handshake_address,
    ) == (7, True, "tcp://127.0.0.1:1")
    assert parsed("generate", "--max-tokens", "8").max_tokens == 8
    assert parsed("utility").sleep_mode == "keep"


def test_a_flag_of_the_environment_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``--flag=false``."""
    monkeypatch.setenv("LLM_SMOKE_DEBUG", "true")

    assert parsed("generate", "--mock").debug
    assert not parsed("generate", "--mock", "--debug=false").debug


@pytest.mark.parametrize("value", ["0", "many"])
def test_nonsense_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """The line names the variable."""
    monkeypatch.setenv("LLM_SMOKE_ENGINE_COUNT", value)

    assert "LLM_SMOKE_ENGINE_COUNT" in refused(capsys, "generate", "--mock")


def test_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the command's table wins over the top, the environment over both."""
    path = tmp_path / "smoke.toml"
    path.write_text(
        'mock = true\nmodel = "top"\nengine-count = 2\n'
        '[generate]\nmax-tokens = 6\nmodel = "table"\n[utility]\nsleep-level = 2\n'
    )
    monkeypatch.setenv("LLM_SMOKE_ENGINE_COUNT", "3")

    generate = parsed("generate", "--config", str(path))
    utility = parsed("utility", "--config", str(path))

    assert (
        generate.mock,
        generate.model,
        generate.engine_count,
        generate.max_tokens,
    ) == (True, "table", 3, 6)
    assert (utility.model, utility.sleep_level) == ("top", 2)
    assert parsed("generate", "--config", str(path), "--model", "mine").model == "mine"


def test_config_file_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be named there too."""
    path = tmp_path / "smoke.toml"
    path.write_text("mock = true\nmax-tokens = 9\n")
    monkeypatch.setenv("LLM_SMOKE_CONFIG", str(path))

    assert parsed("generate").max_tokens == 9


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"max-token = 3", "[max-token]"),
        (b"[generate]\nmax-token = 3", "[max-token]"),
        (b"[generat]\nmax-tokens = 3", "[generat]"),
        (b"generate = 3", "[generate]"),
        (b"max-tokens = 0", "[max-tokens]"),
        (b"max-tokens = true", "[max-tokens]"),
        (b"max-tokens = ", "Invalid value"),
        (b"\xff", "decode"),
    ],
)
def test_a_wrong_config_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, reason: str
) -> None:
    """The line names the file, and what is wrong in it."""
    path = tmp_path / "smoke.toml"
    path.write_bytes(content)

    line = refused(capsys, "generate", "--mock", "--config", str(path))

    assert reason in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("name", "reason"), [("missing.toml", "No such file"), (".", "Is a directory")]
)
def test_a_config_file_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    """As any wrong option."""
    assert reason in refused(capsys, "generate", "--mock", "--config", str(tmp_path / name))


# Help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("generate", ["--max-tokens"]),
        ("utility", ["--expected-is-sleeping", "--sleep-mode"]),
        ("logprobs", ["--prompt-repeats"]),
        ("all", ["--prompt-repeats", "--sleep-mode", "--max-tokens"]),
    ],
)
def test_help(capsys: pytest.CaptureFixture[str], command: str, options: list[str]) -> None:
    """It lists all options, with one text for those that commands share."""
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for option in [*options, "--handshake-address", "--spawn", "--json", "COMMAND"]:
        assert option in text
    assert "[default: 30, with --spawn" in text


def test_help_of_mock_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no commands, and says in each group with times how to write one."""
    assert mock_engine.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: mock-engine [OPTIONS]\n")
    for title in WITH_TIMES:
        heading, first, *_ = text[text.index(f"─ {title} ─") :].split("\n")
        assert first.strip("│ ") == HOW_TO_WRITE_TIMES, heading


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the distribution's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out[0].isdigit()


def test_help_imports_nothing_heavy() -> None:
    """Somebody waits for it."""
    heavy = {"numpy", "ormsgpack", "trio", "zmq"}
    script = (
        "import sys; from trio_vllm.cli.llm_smoke import main; main(['all', '--help']);"
        f"print(sorted({heavy} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("before", "expected"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "2"}, "2")])
def test_mock_engine_starts_no_threads_for_matrices(before: dict[str, str], expected: str) -> None:
    """They spin as numpy is imported; who wants them can have them."""
    script = (
        "import os, sys; from trio_vllm.cli import run_mock_engine; sys.argv[1:] = ['--version']\n"
        "try: run_mock_engine()\n"
        "finally: print(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    others = {name: value for name, value in os.environ.items() if "OPENBLAS" not in name}

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=others | before
    )

    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize("arguments", [[], ["smoke"]])
def test_module_needs_a_command(arguments: list[str]) -> None:
    """``python -m trio_vllm`` runs either command and nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "trio_vllm", *arguments], capture_output=True, text=True
    )

    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m trio_vllm")


# The command of --spawn ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (["engine", "62100"], "tcp://127.0.0.1:62100"),
        (["engine", "62100", "--data-parallel-size", "2"], "tcp://127.0.0.1:62100"),
        (["engine", "--max-model-len", "512"], None),
        (["engine", "1", "2"], None),
        (["62100"], None),
        (["engine"], None),
        (["engine", "--at", "tcp://10.0.0.1:99", "7"], "tcp://10.0.0.1:99"),
        (["engine", "--at=ipc:///tmp/x"], "ipc:///tmp/x"),
        (["vllm", "serve", "--data-parallel-rpc-port", "7"], "tcp://127.0.0.1:7"),
        (
            ["vllm", "--data-parallel-rpc-port=7", "--data-parallel-address=10.0.0.1", "8"],
            "tcp://10.0.0.1:7",
        ),
        (["engine", "{port}", "62100"], "tcp://127.0.0.1:{port}"),
        (["engine", "--at={address}"], "tcp://127.0.0.1:{port}"),
    ],
)
def test_the_address_that_a_command_names(command: list[str], address: str | None) -> None:
    """It is found if there is only one that it can be."""
    assert address_in(command) == address


def test_placeholders_are_substitute_address() -> None:
    """Also within arguments."""
    assert substitute_address(["e", "--p={port}", "{address}", "{x}"], "tcp://h:5") == [
        "e",
        "--p=5",
        "tcp://h:5",
        "{x}",
    ]


def test_spawned_engines_get_more_time() -> None:
    """Unless the user says otherwise."""
    assert parsed("all", "--spawn", "--", "engine", "1").ready_timeout == 600
    assert (
        parsed("all", "--spawn", "--ready-timeout-secs=9", "--", "engine", "1").ready_timeout == 9
    )
