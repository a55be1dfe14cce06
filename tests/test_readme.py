"""README and docs: the program runs, commands are understood, and what is named is there."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trio_vllm
from trio_vllm import GenerateRequest, SamplingParams, mock, testing
from trio_vllm.cli import llm_smoke, mock_engine
from trio_vllm.llm import metrics as metrics
from trio_vllm.testing import mock_llm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]

APPS = {"llm-smoke": llm_smoke.app, "mock-engine": mock_engine.app}


def blocks(language: str, text: str = README) -> list[str]:
    """The code in this language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """What the shell is told to run of ours."""
    start = rf"(?:^|[;&] )(?:[A-Z]+=\S+ )?(?:\S*/)?((?:{'|'.join(APPS)})\b[^;&\n]*)"
    for block in (block for text in (README, *PAGES) for block in blocks("console", text)):
        for command in re.findall(start, block.replace("\\\n", " "), re.MULTILINE):
            yield shlex.split(command)


def test_the_program_runs(tmp_path: Path) -> None:
    """With mock engines beside it, at another address."""
    (program,) = blocks("python")
    default = "tcp://127.0.0.1:29550"
    address = f"ipc://{tmp_path}/handshake"
    assert default in program
    mock_engine = [sys.executable, "-m", "trio_vllm", "mock-engine", "--handshake-address", address]
    with subprocess.Popen(mock_engine, stderr=subprocess.PIPE, text=True) as mock:
        done = subprocess.run(
            [sys.executable, "-c", program.replace(default, address)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        mock.terminate()
        _, log = mock.communicate()

    assert done.stderr == ""
    final, *deltas = done.stdout.splitlines()
    assert final.endswith("] length Usage(prompt_tokens=3, output_tokens=16, cached_tokens=0)")
    assert sum(len(delta.split(",")) for delta in deltas) == 16
    shown = without_numbers(blocks("text")[1]).splitlines()
    assert [line for line in shown if line not in without_numbers(log).splitlines()] == []


def without_numbers(text: str) -> str:
    """The same with another number in the place of each."""
    return re.sub(r"\d+", "0", text)


def test_the_output_of_llm_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints, name by name; values that are not drawn anew are the same."""
    shown = blocks("text")[0].splitlines()

    assert llm_smoke.main(["generate", "--mock"]) == 0

    printed = capsys.readouterr().out.splitlines()
    drawn = ("handshake_address", "input_address", "output_address", "request_id", "token_ids")
    assert [line.partition("=")[0] for line in shown] == [
        line.partition("=")[0] for line in printed
    ]
    assert [line for line in shown if not line.startswith(drawn)] == [
        line for line in printed if not line.startswith(drawn)
    ]


def programs() -> dict[str, str]:
    """The whole programs in the docs, by the page and their number there."""
    return {
        f"{page.parent.name}-{page.stem}-{number}": code
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for number, code in enumerate(blocks("python", page.read_text(encoding="utf-8")))
        if re.search(r"^(trio|asyncio)\.run\(", code, re.MULTILINE)
    }


@pytest.mark.parametrize("name", programs())
def test_programs_of_the_docs_run(name: str) -> None:
    """Against a mock engine, or one that they start themselves."""
    with testing.mock_engine() as engines:
        code = programs()[name].replace("tcp://127.0.0.1:29550", engines.handshake_address)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


async def test_the_rule_of_load_balancing(autojump_clock: MockClock) -> None:
    """That of the docs: it looks at the caches, and at the requests if these are equal."""
    page = (ROOT / "docs/howto/data_parallel.md").read_text(encoding="utf-8")
    (code,) = (code for code in blocks("python", page) if "class EmptiestCache" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    config = mock.MockEngineConfig(num_gpu_blocks=100, max_model_len=1000, step_time=1.0)
    params = SamplingParams(max_tokens=5)

    async with mock_llm(config, engine_count=3, load_balancer=names["EmptiestCache"]()) as mocks:
        chosen: list[int] = []

        async def generate(length: int, rank: int | None = None) -> None:
            request = GenerateRequest(
                prompt_token_ids=range(length), sampling_params=params, data_parallel_rank=rank
            )
            output = await mocks.llm.generate(request)
            if rank is None:
                chosen.append(output.completions[0].engine_index)

        async with trio.open_nursery() as nursery:
            for length, rank in ((900, 0), (10, 2), (10, 2), (10, 2), (500, 1)):
                nursery.start_soon(generate, length, rank)
            await trio.sleep(1.5)  # all have told of their caches
            nursery.start_soon(generate, 10)

    assert chosen == [2]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=str)
def test_pieces_of_the_docs_are_python(page: Path) -> None:
    """Also those that are no whole programs, and the names that they import are there."""
    for code in blocks("python", page.read_text(encoding="utf-8")):
        tree = compile(code, str(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trio_vllm"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("command", sorted(set(map(shlex.join, commands()))))
def test_commands_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the model that one of them names."""
    model = tmp_path / "path/to/Qwen3-0.6B"
    model.mkdir(parents=True)
    (model / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(command)

    APPS[name].parse_args(arguments, exit_on_error=False, print_error=False)


def test_there_are_commands() -> None:
    """Of both programs."""
    assert set(APPS) == {name for name, *_ in commands()}


def test_names_are_there() -> None:
    """Everything in the table of what there is."""
    table = README.partition("## What there is")[2].partition("\n## ")[0]
    public = [getattr(trio_vllm, name) for name in dir(trio_vllm) if not name.startswith("_")]
    known = {name for owner in (trio_vllm, mock, metrics, *public) for name in dir(owner)}

    for code in re.findall("`([^`]+)`", table):
        if not code.startswith(("trio_vllm.", "trio-vllm[")):
            name = (
                code.removeprefix("llm.").removeprefix("trio.").partition("(")[0].partition("=")[0]
            )
            assert name in known, code
