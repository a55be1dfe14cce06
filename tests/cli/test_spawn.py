"""``--spawn``: engines of our own, as processes, and their end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
from tests.cli import fake_engine
from tests.proc import is_alive

from trio_vllm.cli.llm_smoke import main
from trio_vllm.cli.smoke_options import GenerateOptions
from trio_vllm.cli.smoke_runner import run_smokes
from trio_vllm.cli.smokes import SMOKES, generate
from trio_vllm.processes import EndTimes

ENGINE = [sys.executable, "-u", fake_engine.__file__]


def pids(text: str) -> list[int]:
    """The processes that tell of themselves in a log."""
    return [int(pid) for pid in re.findall(r"with pid (\d+)", text)]


def test_each_smoke_gets_a_fresh_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """Its log is shown on demand, and it is ended before the next one starts."""
    assert main(["all", "--spawn", "--verbose", "--", *ENGINE, "{address}"]) == 0
    out, err = capfd.readouterr()

    engines = pids(err)
    assert len(set(engines)) == len(SMOKES)
    assert not any(map(is_alive, engines))
    assert f"engine: fake engine with pid {engines[0]}" in err
    assert out.count("passed") == len(SMOKES)
    addresses = re.findall(r"(?m)^handshake_address=(tcp://127\.0\.0\.1:[0-9]+)$", out)
    assert len(addresses) == len(SMOKES)


def test_the_log_is_not_shown_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    """And with an address given, it is filled in."""
    address = "ipc:///tmp/x/y"

    assert main(["generate", "--spawn", f"--handshake-address={address}", "--", "/bin/false"]) == 1
    assert "engine: " not in capfd.readouterr().err


@pytest.mark.parametrize("limit", ["--ready-timeout-secs", "--timeout"])
def test_an_engine_of_ours_has_served_nobody(limit: str, capfd: pytest.CaptureFixture[str]) -> None:
    """So it is not asked for when it does not come in time."""
    assert main(["generate", limit, "0.3", "--spawn", "--", "sleep", "60", "{port}"]) == 1

    err = capfd.readouterr().err
    assert "no engine has connected to tcp://127.0.0.1:" in err
    assert re.search(r"--handshake-address tcp://127\.0\.0\.1:\d+\)\?$", err.strip())


def test_an_early_end_is_reported_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """With its exit code and last words; nobody waits for HELLO any more."""
    begin = time.monotonic()

    assert main(["generate", "--spawn", "--", *ENGINE, "{address}", "fail"]) == 1

    assert time.monotonic() - begin < 60
    assert capfd.readouterr().err == "llm-smoke: the engine command ended with 1: no memory\n"


def test_an_early_end_is_no_death(capfd: pytest.CaptureFixture[str]) -> None:
    """Nor is the death of an engine a failure to start: a gate can tell one from the other."""
    kinds = []
    for how in ("fail", "die"):
        assert main(["generate", "--spawn", "--json", "--", *ENGINE, "{address}", how]) == 1
        kinds.append(json.loads(capfd.readouterr().out)["failure_kind"])

    assert kinds[0] == "EngineCommandEndedError"
    assert kinds[1] in ("EngineDeadError", "EnginesEndedError")  # what is known first


def test_a_killed_engine_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """In mid-request, with what is known first: its connection or its end."""
    assert main(["generate", "--spawn", "--", *ENGINE, "{address}", "die"]) == 1

    (line,) = capfd.readouterr().err.splitlines()
    assert "engine 0 is dead" in line or "the engine command died of SIGKILL" in line


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_the_signal_that_ended_the_command_is_named(
    capfd: pytest.CaptureFixture[str], number: int, name: str
) -> None:
    """Or numbered, if it has no name."""
    script = f"import os; os.kill(os.getpid(), {number})"

    assert main(["generate", "--spawn", "--", sys.executable, "-c", script, "1"]) == 1
    assert capfd.readouterr().err == f"llm-smoke: the engine command died of {name}\n"


def test_a_command_that_does_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback."""
    assert main(["generate", "--spawn", "--", "/no/such/engine", "{port}"]) == 1
    assert capfd.readouterr().err == (
        "llm-smoke: cannot start /no/such/engine: No such file or directory\n"
    )


async def test_a_stubborn_engine_is_killed_with_its_children(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM, and after a while SIGKILL, to the whole group."""
    options = GenerateOptions(spawn=True, verbose=True)
    command = [*ENGINE, "{address}", "stubborn", "child"]

    exit_code = await run_smokes(options, command, {"generate": generate}, EndTimes(0.2, 0.2))

    assert exit_code == 0

    engine, child = pids(capfd.readouterr().err)
    assert not is_alive(engine)
    assert not is_alive(child)


def test_the_children_of_an_engine_that_ends_are_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """Also if it does not care for them itself."""
    tokens = ["generate", "--spawn", "--verbose", "--", *ENGINE, "{address}", "child"]

    assert main(tokens) == 0

    engine, child = pids(capfd.readouterr().err)
    assert not is_alive(engine)
    assert not is_alive(child)


def test_a_log_without_line_breaks_does_not_pile_up(capfd: pytest.CaptureFixture[str]) -> None:
    """Its last bytes are its last words."""
    script = "import sys; sys.stdout.write('x' * 300_000 + 'end')"

    assert main(["generate", "--spawn", "--", sys.executable, "-c", script, "1"]) == 1

    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("xxend")
    assert len(line) < 600


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_readers_that_go_away(options: list[str]) -> None:
    """Nobody reads that it has passed, so it has not; there is no traceback about it."""
    command = [sys.executable, "-m", "trio_vllm", "llm-smoke", "generate", *options, "--spawn"]
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(
        [*command, "--", *ENGINE, "{address}"], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
