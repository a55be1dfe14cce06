"""The pieces of code in the docs run, with what stands around them there; so do the files that they show."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import pydoc
import re
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CoroutineType
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trio_vllm
import trio_vllm.asyncio
from trio_vllm import (
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    HandshakeOwner,
    Llm,
    SamplingParams,
)
from trio_vllm.cli import llm_smoke
from trio_vllm.cli.mock_options import MockOptions
from trio_vllm.mock import MockEngineConfig, TransferHub
from trio_vllm.protocol import UtilityRequest
from trio_vllm.testing import mock_engine, mock_llm, open_frontend

DOCS = Path(__file__).parents[1] / "docs"

MOCK = f"{sys.executable} -m trio_vllm mock-engine"

VLLM = f"""#!/bin/sh
# In the place of `vllm serve --headless`.
while [ "$1" != --data-parallel-rpc-port ]; do shift; done
exec {MOCK} --handshake-address "tcp://127.0.0.1:$2"
"""

MY_ENGINE = f"""#!/bin/sh
exec {MOCK} --handshake-address "$2"
"""


def blocks(page: str, language: str = "python") -> list[str]:
    """The code of a page in a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"(?m)^```{language}\n((?s:.*?))^```", text)


async def run(piece: str, **names: Any) -> dict[str, Any]:
    """Run a piece, with these names besides the package's; gives all names afterwards."""
    public = (name for name in dir(trio_vllm) if not name.startswith("_"))
    names = {name: getattr(trio_vllm, name) for name in public} | {"trio": trio} | names
    code = compile(piece, "piece", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if isinstance(result, CoroutineType):
        await result
    return names


@contextmanager
def commands(folder: Path, **scripts: str) -> Iterator[None]:
    """Commands of other projects, in the place of which scripts run."""
    for name, script in scripts.items():
        (folder / name.replace("_", "-")).write_text(script, encoding="utf-8")
        (folder / name.replace("_", "-")).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        yield


@asynccontextmanager
async def any_engine() -> AsyncIterator[HandshakeOwner]:
    """The ``mode`` of the pieces."""
    with mock_engine() as engines:
        yield HandshakeOwner(engines.handshake_address)


def test_all_pieces_are_here() -> None:
    """Whole programs and tests are run elsewhere; who adds a piece adds what runs it."""
    pieces = {
        page.relative_to(DOCS).as_posix(): [
            code
            for code in blocks(str(page.relative_to(DOCS)))
            if not re.search(r"(?m)^(trio|asyncio)\.run\(", code)
        ]
        for page in DOCS.rglob("*.md")
    }

    assert {page: len(codes) for page, codes in pieces.items() if codes} == {
        "howto/asyncio.md": 1,
        "howto/data_parallel.md": 2,
        "howto/metrics.md": 3,
        "howto/simulate.md": 1,
        "howto/spawn.md": 2,
        "howto/testing.md": 5,
    }


def test_a_call_from_asyncio() -> None:
    """Of what has no method there."""
    *_, piece = blocks("howto/asyncio.md")

    async def main(address: str) -> None:
        async with trio_vllm.asyncio.open_llm(HandshakeOwner(address)) as llm:
            await run(piece, llm=llm)

    with mock_engine() as engines:
        asyncio.run(main(engines.handshake_address))

    calls = [m.method for m in engines.engine.messages if isinstance(m, UtilityRequest)]
    assert "reset_prefix_cache" in calls


async def test_lockstep() -> None:
    """Engines that the client leads."""
    *_, piece = blocks("howto/data_parallel.md")

    mode = (await run(piece))["mode"]

    assert (mode.coordinator, mode.engine_count) == (True, 4)


async def test_statistics(autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the last five seconds."""
    piece, _, _ = blocks("howto/metrics.md")
    request = GenerateRequest([1], sampling_params=SamplingParams(max_tokens=100_000))
    async with mock_llm(MockEngineConfig(step_interval=0.1)) as mock:
        async with mock.llm.stream(request):
            await run(piece, llm=mock.llm)

    assert 8 < float(capsys.readouterr().out) < 12


@pytest.mark.parametrize("number", [1, 2])
async def test_what_goes_with_an_llm(number: int) -> None:
    """A view that shows nothing without a terminal, and an observer."""
    piece = blocks("howto/metrics.md")[number]
    async with any_engine() as mode:
        names = await run(piece, mode=mode)

    assert isinstance(names["llm"], Llm)


async def test_prefill_and_decode(autojump_clock: MockClock) -> None:
    """The parameters of the one are what the other needs."""
    (piece,) = blocks("howto/simulate.md")
    hub = TransferHub()
    async with (
        mock_llm(MockEngineConfig(pd_role="prefill", schedule=True), transfers=hub) as prefill,
        mock_llm(
            MockEngineConfig(pd_role="decode", schedule=True, kv_side_channel_port=7000),
            transfers=hub,
        ) as decode,
    ):
        names = await run(piece, prefiller=prefill.llm, decoder=decode.llm, prompt=[1] * 40)

    assert names["first"].kv_transfer_params["do_remote_prefill"] is True
    assert names["output"].usage.output_tokens == 200


async def test_an_engine_of_the_program(tmp_path: Path) -> None:
    """Its command has a free port."""
    piece, _, _ = blocks("howto/spawn.md")
    with commands(tmp_path, vllm=VLLM):
        names = await run(piece, MODEL="a-model")

    assert isinstance(names["llm"], Llm)


async def test_an_engine_that_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After its death the work goes on."""
    _, piece, _ = blocks("howto/spawn.md")
    piece = f"async def program():\n{textwrap.indent(piece, '    ')}\nawait program()"
    request = GenerateRequest([1], sampling_params=SamplingParams(max_tokens=3))
    done: list[int] = []
    deaths = [EngineDeadError(0, "its connection was lost")]

    async def do_work(llm: Llm) -> None:
        if deaths:
            raise deaths.pop()
        done.append((await llm.generate(request)).usage.output_tokens)

    with commands(tmp_path, my_engine=MY_ENGINE):
        await run(
            piece,
            command=["my-engine", "--handshake", "{address}"],
            do_work=do_work,
            log=logging.getLogger("program"),
        )

    assert done == [3]
    assert "starting the engine again: engine 0 is dead" in caplog.text


async def test_engines_over_sockets() -> None:
    """For a program that opens its own connection."""
    *_, piece, _ = blocks("howto/testing.md")

    names = await run(piece)

    assert names["engines"].engines[1].engine_index == 1


async def test_a_frontend_double(tmp_path: Path) -> None:
    """Which does what it is told."""
    *_, piece = blocks("howto/testing.md")
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=4)
    )
    with commands(tmp_path, my_engine=MY_ENGINE):
        names = await run(piece, request=request, open_frontend=open_frontend)

    assert sum(len(output.new_token_ids) for output in names["outputs"]) == 4


def test_help_that_is_named() -> None:
    """It shows the fields or parameters, where a reader has no built pages."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    texts = [page.read_text(encoding="utf-8") for page in pages]
    commands = [code for text in texts for code in re.findall(r"`python -c '(.*)'`", text)]
    shown: list[str] = []
    for code in commands:
        exec(code, {"help": lambda thing: shown.append(pydoc.render_doc(thing))})

    assert len(shown) == sum("```{eval-rst}" in text for text in texts)
    assert all(len(text) > 1000 for text in shown)


# Files --------------------------------------------------------------------------------------------


async def test_the_file_of_answers(tmp_path: Path) -> None:
    """By id, by prompt, by number; the last line is for the fourth request."""
    (text,) = blocks("howto/simulate.md", "json")
    path = tmp_path / "answers.jsonl"
    path.write_text(text, encoding="utf-8")
    params = SamplingParams(max_tokens=1000)
    requests = [
        GenerateRequest([9], sampling_params=params, request_id="chatcmpl-order-66"),
        GenerateRequest([151644, 872, 5], sampling_params=params),
        GenerateRequest([9], sampling_params=params),
        GenerateRequest([9], sampling_params=params),
    ]
    async with mock_llm(MockEngineConfig(output=str(path))) as mock:
        outputs = [await mock.llm.generate(request) for request in requests]

    by_id, by_prompt, _, by_number = outputs
    assert (by_id.token_ids, by_id.finish_reason) == ([9707, 11, 1879], FinishReason.STOP)
    assert (len(by_prompt.token_ids), by_prompt.finish_reason) == (300, FinishReason.LENGTH)
    assert by_number.token_ids == [4, 5, 6]


def test_the_file_of_a_profile(tmp_path: Path) -> None:
    """Its times have units."""
    (text,) = blocks("howto/simulate.md", "toml")
    path = tmp_path / "profile.toml"
    path.write_text(text, encoding="utf-8")

    engine = MockOptions.of(profile=path).engine

    assert engine.step_time == 0.008
    assert engine.step_time_per_prefill_token == pytest.approx(60e-6)
    assert (engine.max_num_seqs, engine.num_gpu_blocks) == (256, 30_000)
    assert engine.max_model_len == 131_072


def test_the_file_of_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the top for all commands, in a table for one."""
    (text,) = blocks("reference/llm_smoke.md", "toml")
    path = tmp_path / "smoke.toml"
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        text = text.replace("tcp://127.0.0.1:29550", f"ipc://{folder}/handshake")
        path.write_text(text, encoding="utf-8")

        assert llm_smoke.main(["all", "--mock", "--config", str(path)]) == 0

    assert "prompt_repeats=10" in capsys.readouterr().out.splitlines()
