"""`spawn_engine`: engines as processes, from their start to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.cli import fake_engine
from tests.proc import is_alive, started

from trio_vllm import (
    ConfigurationError,
    EngineCommandEndedError,
    EngineCommandError,
    EngineDeadError,
    GenerateRequest,
    SamplingParams,
    SpawnedEngine,
    open_llm,
    spawn_engine,
)
from trio_vllm.processes import EndTimes

MOCK = [sys.executable, "-m", "trio_vllm", "mock-engine", "--no-reconnect"]
MOCK += ["--handshake-address", "{address}"]
FAKE = [sys.executable, "-u", fake_engine.__file__, "{address}"]
REQUEST = GenerateRequest(prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=4))


async def count_tokens(mode: SpawnedEngine) -> int:
    """How many tokens an engine answers a request with."""
    async with open_llm(mode) as llm:
        return len((await llm.generate(REQUEST)).token_ids)


async def test_an_engine_serves_and_ends_with_the_block() -> None:
    lines: list[str] = []
    async with spawn_engine(MOCK, on_line=lines.append) as mode:
        assert await count_tokens(mode) == 4
        pid = mode.pid

    assert not is_alive(pid)
    assert any("serving 1 client(s)" in line for line in lines)


async def test_there_is_one_connection_without_restart() -> None:
    async with spawn_engine(MOCK) as mode:
        await count_tokens(mode)
        with pytest.raises(ConfigurationError, match="restart=True"):
            await count_tokens(mode)


async def test_restart_starts_the_command_again() -> None:
    """For each further connection, at an address of its own; the former run is over by then."""
    async with spawn_engine(MOCK, restart=True) as mode:
        await count_tokens(mode)
        first = mode.pid
        assert await count_tokens(mode) == 4
        assert mode.pid != first
        assert not is_alive(first)


async def test_a_program_goes_on_after_a_death() -> None:
    """The error that tells of the death says how the command ended; the end of its log is a note."""
    async with spawn_engine(MOCK, restart=True) as mode:
        with pytest.raises(EngineDeadError) as caught:
            async with open_llm(mode) as llm:
                os.kill(mode.pid, signal.SIGKILL)
                raise await llm.client.wait_failed()
        assert str(caught.value) == (
            "engine 0 is dead: its connection was lost; the engine command died of SIGKILL"
        )
        assert caught.value.__notes__[0].startswith("The last lines of its log:\n")
        assert await count_tokens(mode) == 4


async def test_an_early_end_is_told_at_once() -> None:
    """With the last lines of its log, of which the text has the last."""
    begin = time.monotonic()
    script = "print('loading'); print('no memory'); raise SystemExit(3)"
    async with spawn_engine([sys.executable, "-c", script, "{port}"]) as mode:
        with pytest.raises(EngineCommandEndedError) as caught:
            await count_tokens(mode)

    assert time.monotonic() - begin < 60
    assert str(caught.value) == "the engine command ended with 3: no memory"
    assert caught.value.log == ["loading", "no memory"]
    assert caught.value.__notes__ == ["The last lines of its log:\nloading\nno memory"]
    assert caught.value.missing_engines == [0]


async def test_a_failed_start_can_be_tried_again(tmp_path: Path) -> None:
    script = f"import pathlib; p = pathlib.Path({str(tmp_path / 'n')!r}); p.open('a').write('x')"
    async with spawn_engine([sys.executable, "-c", script, "{port}"], restart=True) as mode:
        for _ in range(2):
            with pytest.raises(EngineCommandEndedError, match="the engine command ended with 0"):
                await count_tokens(mode)

    assert (tmp_path / "n").read_text() == "xx"


BESIDE = Path(sys.executable)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("/no/such/engine", "No such file or directory"),
        ("no-such-engine", "not found on PATH"),
        (BESIDE.name, f"not found on PATH; there is {BESIDE} next to this Python"),
        (str(Path(__file__)), "Permission denied"),
    ],
)
async def test_a_command_that_does_not_exist(program: str, reason: str) -> None:
    """One that is next to this Python is shown: the environment is not activated then."""
    with pytest.raises(EngineCommandError) as caught:
        async with spawn_engine([program, "{port}"], env={"PATH": "/nowhere"}):
            pytest.fail("it did not start")  # pragma: no cover

    assert str(caught.value) == f"cannot start {program}: {reason}"
    assert caught.value.__suppress_context__


async def test_a_command_without_an_address() -> None:
    with pytest.raises(ConfigurationError, match="names no port"):
        async with spawn_engine(["vllm", "serve"]):
            pytest.fail("it did not start")  # pragma: no cover


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mock-engine 'x", r"""not a string: write shlex\.split\("mock-engine 'x"\)"""),
        (["mock-engine", 29550], "list of strings; 29550 is none"),
    ],
)
async def test_a_command_that_is_no_list_of_strings(command: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        async with spawn_engine(command):
            pytest.fail("it did not start")  # pragma: no cover


async def test_variables_and_an_address_of_the_callers(tmp_path: Path) -> None:
    """The command sees both."""
    out = tmp_path / "out"
    script = f"import os, sys; open({str(out)!r}, 'w').write(os.environ['A'] + sys.argv[1])"
    command = [sys.executable, "-c", script, "{address}"]
    async with spawn_engine(command, env={"A": "a "}, handshake_address="ipc:///tmp/x") as mode:
        assert mode.handshake_address == "ipc:///tmp/x"
        assert await mode.wait_ended() == "the engine command ended with 0"
        assert mode.log == ()

    assert out.read_text() == "a ipc:///tmp/x"


async def test_what_the_block_raises_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with spawn_engine(MOCK) as mode:
            pid = mode.pid
            raise KeyError

    assert not is_alive(pid)


async def test_cancelling_ends_the_command_and_its_children() -> None:
    """Even if they do not want to end."""
    pids: list[int] = []
    with trio.CancelScope() as scope:
        command = [*FAKE, "stubborn", "child"]

        def take(line: str) -> None:
            if "with pid " in line:
                pids.append(int(line.rpartition(" ")[2]))
                if len(pids) == 2:
                    scope.cancel()

        async with spawn_engine(command, on_line=take, end_times=EndTimes(9.0, 0.1)) as mode:
            async with open_llm(mode) as llm:
                await llm.client.wait_failed()

    assert scope.cancelled_caught
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_the_command_ends_if_the_program_is_killed() -> None:
    script = textwrap.dedent(f"""
        import trio
        from trio_vllm import spawn_engine

        async def main():
            async with spawn_engine({MOCK!r}) as mode:
                print(mode.pid, flush=True)
                await trio.sleep_forever()

        trio.run(main)
    """)
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert is_alive(pid)
        program.send_signal(signal.SIGKILL)
        program.wait()

    end = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)
