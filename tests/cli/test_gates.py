"""What ``llm-smoke`` gives to programs that read it: short JSON, JUnit, one time limit, silence."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import trio
from tests.cli import fake_engine
from tests.cli.conftest import RunSmoke
from tests.cli.fake_engine import FakeEngine

from trio_vllm import EngineCoreOutput, EngineCoreRequest, FinishReason
from trio_vllm.cli import mock_engine
from trio_vllm.cli.llm_smoke import app, main
from trio_vllm.cli.smokes import REQUEST_ID_PREFIX
from trio_vllm.spawn import free_port

Captured = pytest.CaptureFixture[str]

NO_ENGINE = ["--ready-timeout-secs", "0.05"]


def too_many_tokens(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
    """An output that no smoke lets pass."""
    yield EngineCoreOutput(request.request_id, [1], finish_reason=FinishReason.ABORT)


async def test_short_json(run_smoke: RunSmoke) -> None:
    """The verdict and the versions, and nothing that fills a log."""
    outcome = await run_smoke("generate", "--json", "--model", "m")

    report = json.loads(outcome.out)
    assert report.pop("seconds") > 0
    assert report.pop("trio_vllm_version")
    assert report == {
        "smoke": "generate",
        "passed": True,
        "result": "passed",
        "model": "m",
        "engine_count": 1,
        "vllm_version": "0.33.0",
        "skipped": [],
        "warnings": [],
    }


async def test_kind_of_a_failure(run_smoke: RunSmoke) -> None:
    """The exception's name, by which a gate can tell an engine that is missing from a wrong one."""
    missing = await run_smoke("generate", "--json", *NO_ENGINE, engines=[])
    wrong = await run_smoke("generate", "--json", engines=[FakeEngine(complete=too_many_tokens)])

    late = await run_smoke(
        "generate", "--json", "--output-timeout-secs", "0.1", engines=[FakeEngine(is_mute=True)]
    )

    kinds = [json.loads(outcome.out)["failure_kind"] for outcome in (missing, wrong, late)]
    assert kinds == ["StartupError", "SmokeError", "OutputTimeoutError"]


SPAWNED = [sys.executable, "-u", fake_engine.__file__, "{address}"]


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (["/no/such/engine", "{port}"], {"EngineCommandError"}),
        ([*SPAWNED, "fail"], {"EngineCommandEndedError"}),
        ([*SPAWNED, "die"], {"EngineDeadError", "EnginesEndedError"}),
    ],
)
def test_kind_of_an_end(
    command: list[str], kinds: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It could not be started, has ended while it started, or has ended later."""
    assert main(["generate", "--json", "--spawn", "--", *command]) == 1

    assert json.loads(capsys.readouterr().out)["failure_kind"] in kinds


def test_the_log_of_an_engine_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last lines are in the report; not if it has passed."""
    path = tmp_path / "junit.xml"
    tokens = ["generate", "--json-full", "--junit", str(path), "--spawn", "--", *SPAWNED]

    assert main([*tokens, "fail"]) == 1

    case = ElementTree.parse(path).getroot().find(".//testcase")
    assert case is not None
    *_, last = case.findtext("system-err", "").splitlines()
    assert last == "no memory"
    assert json.loads(capsys.readouterr().out)["engine_log"][-1] == "no memory"

    assert main(tokens) == 0

    assert ElementTree.parse(path).getroot().findtext(".//system-err") == ""
    assert "engine_log" not in json.loads(capsys.readouterr().out)


async def test_what_was_left_out(run_smoke: RunSmoke) -> None:
    """Is in the report."""
    outcome = await run_smoke("utility", "--json", "--skip-sleep-wake")

    assert json.loads(outcome.out)["skipped"] == ["sleep_wake"]


async def test_smokes_that_were_not_run(run_smoke: RunSmoke) -> None:
    """Are no failures of their own."""
    outcome = await run_smoke("all", "--json", *NO_ENGINE, engines=[])

    document = json.loads(outcome.out)
    assert (document["passed"], document["skipped"]) == (False, ["utility", "logprobs"])
    assert "failure_kind" not in document["smokes"]["utility"]


async def test_quiet(run_smoke: RunSmoke) -> None:
    """Success is silent, a failure is one line, JSON comes if it is asked for."""
    passed = await run_smoke("all", "-q")
    failed = await run_smoke("generate", "--quiet", *NO_ENGINE, engines=[])
    as_json = await run_smoke("generate", "-q", "--json")

    assert (passed.exit_code, passed.out, passed.err) == (0, "", "")
    assert (failed.exit_code, failed.out, failed.err.count("\n")) == (1, "", 1)
    assert json.loads(as_json.out)["passed"] is True


@pytest.mark.parametrize(
    "tokens", [["-v", "generate"], ["generate", "-v"], ["--verbose", "generate"]]
)
def test_verbose_before_and_after_the_command(
    tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of all commands may stand anywhere."""
    assert main([*tokens, "--mock"]) == 0

    assert "INFO waiting for HELLO of engines [0]" in capsys.readouterr().err


def test_a_command_of_engines_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind -- may have the name of a command."""
    spawn = ["--spawn", "--", "sh", "-c", "echo got $*; exit 3", "name", "{port}", "generate"]

    assert main(["-v", "generate", *spawn]) == 1

    assert re.search(r"(?m)^engine: got \d+ generate$", capsys.readouterr().err)


async def test_time_limit(run_smoke: RunSmoke) -> None:
    """One for all: the current smoke has failed, the others are left out."""
    engine = FakeEngine(is_mute=True)

    outcome = await run_smoke("all", "--timeout", "0.3", "--json", engines=[engine])

    document = json.loads(outcome.out)
    failure = document["smokes"]["generate"]
    assert outcome.exit_code == 1
    assert re.fullmatch(
        r"llm-smoke: generate: it was not done after 0\.3 s \(--timeout\), while waiting for the final"
        r" output of request llm-smoke-\S+\n",
        outcome.err,
    )
    assert failure["failure_kind"] == "TimeLimitError"
    assert failure["seconds"] > 0
    assert document["skipped"] == ["utility", "logprobs"]


async def test_time_limit_of_a_startup(run_smoke: RunSmoke) -> None:
    """It says which engine has not come how far."""
    outcome = await run_smoke("all", "--timeout", "0.2", "--json", engines=[])

    document = json.loads(outcome.out)
    assert outcome.err.startswith(
        "llm-smoke: generate: it was not done after 0.2 s (--timeout), while waiting for HELLO from"
        " engine 0; "
    )
    assert document["smokes"]["generate"]["failure_kind"] == "TimeLimitError"
    assert document["skipped"] == ["utility", "logprobs"]


async def test_time_limit_of_a_utility_call(run_smoke: RunSmoke) -> None:
    """It says which."""
    outcome = await run_smoke("utility", "--timeout", "0.3", engines=[FakeEngine(is_mute=True)])

    assert outcome.err.endswith("(--timeout), while waiting for the answer to is_sleeping\n")


async def test_one_prefix_of_request_ids(run_smoke: RunSmoke) -> None:
    """So that one search in an engine's log finds them all."""
    engine = FakeEngine()

    await run_smoke("all", engines=[engine])

    assert len(engine.requests) == 2
    assert all(r.request_id.startswith(REQUEST_ID_PREFIX) for r in engine.requests)


# JUnit --------------------------------------------------------------------------------------------


async def test_junit(run_smoke: RunSmoke, tmp_path: Path) -> None:
    """A case for each smoke, with the reason of a failure."""
    path = tmp_path / "junit.xml"
    engine = FakeEngine(is_sleeping=True)

    outcome = await run_smoke("all", "--junit", str(path), engines=[engine])

    (suite,) = ElementTree.parse(path).getroot()
    cases = {case.attrib["name"]: case for case in suite}
    assert outcome.exit_code == 1
    assert list(cases) == ["generate", "utility", "logprobs"]
    assert [suite.attrib[name] for name in ("tests", "failures", "skipped")] == ["3", "1", "0"]
    failure = cases["utility"].find("failure")
    assert failure is not None
    assert failure.attrib == {
        "type": "SmokeError",
        "message": "is_sleeping(initial) is true, expected was false",
    }
    assert cases["generate"].find("failure") is None
    assert "vllm_version=0.33.0" in cases["generate"].findtext("system-out", "")


async def test_junit_of_smokes_that_were_not_run(run_smoke: RunSmoke, tmp_path: Path) -> None:
    """They are skipped there, too."""
    path = tmp_path / "junit.xml"

    await run_smoke("all", "--junit", str(path), *NO_ENGINE, engines=[])

    root = ElementTree.parse(path).getroot()
    assert (root.attrib["failures"], root.attrib["skipped"]) == ("1", "2")
    assert len(root.findall(".//skipped")) == 2


UNWRITTEN = "cannot write /dev/full: No space left on device"


def test_junit_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Is a failure: the system that wants it would take the old one."""
    assert main(["generate", "--mock", "-q", "--junit", "/dev/full"]) == 1

    assert capsys.readouterr().err == f"llm-smoke: {UNWRITTEN}\n"


@pytest.mark.parametrize("command", ["generate", "all"])
def test_json_of_a_run_whose_junit_cannot_be_written(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what the exit code says."""
    assert main([command, "--mock", "--json", "--junit", "/dev/full"]) == 1

    document = json.loads(capsys.readouterr().out)
    names = ("passed", "result", "failure", "failure_kind")
    assert [document[name] for name in names] == [False, "failed", UNWRITTEN, "OSError"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", "--junit"),
        ("bench", "--junit"),
        ("bench", "--result-file"),
        ("bench", "--plot"),
    ],
)
@pytest.mark.parametrize(
    ("name", "reason"), [("missing/file.png", "There is no folder "), (".", "Is a folder")]
)
def test_files_that_could_not_be_written(
    command: str, option: str, name: str, reason: str, tmp_path: Path, capsys: Captured
) -> None:
    """Are refused before anything starts, and not made by that."""
    assert main([command, "--mock", option, str(tmp_path / name)]) == 2
    _, err = capsys.readouterr()
    assert f" for {option}. {reason}" in err

    assert main([command, "--mock", option, str(tmp_path / "x.png"), "--client-index=1"]) == 2
    assert not (tmp_path / "x.png").exists()


def test_files_without_permission(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the system is asked through us."""
    (tmp_path / "old").touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name == "old")

    assert main(["generate", "--mock", "--junit", str(tmp_path / "new")]) == 2
    assert "--junit. Cannot be written." in capsys.readouterr().err
    assert main(["generate", "--mock", "--junit", str(tmp_path / "old")]) == 0


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: Captured) -> None:
    assert main(["bench", "--mock", "--trace", str(tmp_path / "trace.jsonl")]) == 2
    assert "trace.jsonl cannot be read." in capsys.readouterr().err


def test_junit_of_what_others_have_written(tmp_path: Path) -> None:
    """It is XML whatever an engine says."""
    path = tmp_path / "junit.xml"
    script = "printf '\\033[2J<a>&\\0\\377'; exit 3"

    assert (
        main(
            ["generate", "-q", "--junit", str(path), "--spawn", "--", "sh", "-c", script, "{port}"]
        )
        == 1
    )

    failure = ElementTree.parse(path).getroot().find(".//failure")
    assert failure is not None
    assert "ended with 3" in failure.attrib["message"]


# Data-parallel size -------------------------------------------------------------------------------


async def test_engines_in_lockstep_with_others(run_smoke: RunSmoke) -> None:
    """One of four would wait for the other three."""
    outcome = await run_smoke("generate", engines=[FakeEngine(data_parallel_size=4)])

    assert outcome.exit_code == 1
    assert outcome.err == (
        "llm-smoke: engine 0 is one of 4 (data_parallel_size), but --engine-count is 1\n"
    )


async def test_more_engines_than_expected(
    address: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One too many that reports during the startup is warned of; the others are checked."""
    warning = "engine 1, which is not expected, spoke on the handshake socket"

    async def come_second() -> None:
        while warning not in caplog.text:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await FakeEngine(0).serve(address)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(FakeEngine(1).serve, address)
        nursery.start_soon(come_second)
        code = await app.run_async(["generate", "--json", "--handshake-address", address])
        nursery.cancel_scope.cancel()

    out, err = capsys.readouterr()
    assert (code, err) == (0, f"llm-smoke: warning: {warning}\n")
    assert json.loads(out)["warnings"] == [warning]


# On a terminal ------------------------------------------------------------------------------------


def test_sign_of_life() -> None:
    """On a terminal it says what it waits for; elsewhere nothing is added to the reason."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trio_vllm", "llm-smoke", "generate", "--ready-timeout-secs=1"]
    command += ["--handshake-address", f"tcp://127.0.0.1:{free_port()}"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe) as elsewhere,
        subprocess.Popen(
            command, stdout=pipe, stderr=theirs, env={**os.environ, "TERM": "xterm"}
        ) as process,
    ):
        os.close(theirs)
        shown = b"".join(iter(lambda: read(ours), b""))
        out, _ = process.communicate()
        out_elsewhere, err_elsewhere = elsewhere.communicate()
    os.close(ours)

    assert (out, out_elsewhere) == (b"", b"")
    assert b"waiting for an engine at tcp://127.0.0.1:" in shown
    assert err_elsewhere.count(b"\n") == 1


def read(descriptor: int) -> bytes:
    """What comes next from a terminal; nothing once its other side is closed."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("command", ["llm-smoke", "mock-engine"])
def test_completion(capsys: pytest.CaptureFixture[str], command: str, shell: str) -> None:
    """A script for the shell, which knows the options."""
    run = mock_engine.main if command == "mock-engine" else main

    assert run(["--completion", shell]) == 0

    script = capsys.readouterr().out
    assert ("engine-count" if command == "mock-engine" else "json-full") in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
