"""Runs each command of ours that README and docs show, as it stands there.

Ports are others, ``MODEL`` and files are made here, and ``vllm serve … --headless`` is a mock engine. What they show of vLLM's
own frontends is tried in ``peers/rust_frontend`` and ``peers/python_frontend``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import trio

from harness import expect, free_port, generate, ok, our_command
from processes import running
from trio_vllm import HandshakeOwner, open_llm

ROOT = Path(__file__).parents[2]

OURS = re.compile(
    r"^(?P<environment>(?:[A-Z]+=\S+ )*)(?:\S*/)?(?P<name>mock-engine|llm-smoke)\b(?P<rest>[^&;\n]*)"
)

VLLM = """#!/bin/sh
# In the place of `vllm serve --headless`.
while [ "$1" != --data-parallel-rpc-port ]; do shift; done
exec {mock_engine} --handshake-address "tcp://127.0.0.1:$2"
"""

SHORTENED = {"--num-prompts 500": "--num-prompts 20"}
"""At ten requests a second it would take long."""

MODULES = {
    "--plot": ("matplotlib",),
    "--tokenizer": ("llguidance", "tokenizers"),
    "--metrics-port": ("h11", "prometheus_client"),
}
"""What an option needs besides the package."""


def main() -> None:
    """Run them all; one that lacks a library is skipped, loudly."""
    found = sorted(set(commands()))
    expect("that there are many", len(found) > 15, True)
    for command in found:
        missing = [module for module in needed(command) if not importlib.util.find_spec(module)]
        if missing:
            print(f"SKIPPED {command}: there is no {', '.join(missing)}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(command, Path(folder))
        ok(command)


def needed(command: str) -> list[str]:
    """The modules without which a command cannot work."""
    return [
        module for option, modules in MODULES.items() if option in command for module in modules
    ]


def commands() -> Iterator[str]:
    """Each command of ours, in one line; of several in a line each."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"(?ms)^```console\n(.*?)^```", page.read_text("utf-8")):
            for line in re.split(r"\n|&& |[&;] ", block.replace("\\\n", " ")):
                if OURS.match(line.strip()):
                    yield " ".join(line.replace(" &", "").split())


def run(command: str, folder: Path) -> None:
    """Run one in a folder that has what it names, until it has done what it is for."""
    parts = OURS.match(command)
    assert parts is not None
    make_files(folder)
    for long, short in SHORTENED.items():
        command = command.replace(long, short)
    name, options = parts["name"], shlex.split(OURS.match(command)["rest"])  # type: ignore[index]
    environment = dict(item.split("=") for item in parts["environment"].split())
    environment["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    if name == "mock-engine":
        serve(options, environment, folder)
    elif "--handshake-address" in options:
        check_engine(options, environment, folder)
    else:
        complete([*our_command(name), *options], environment, folder)


def make_files(folder: Path) -> None:
    """What the commands name: an engine, a trace, a tokenizer."""
    shim = folder / "vllm"
    shim.write_text(VLLM.format(mock_engine=shlex.join(our_command("mock-engine"))))
    shim.chmod(0o755)
    lines = [{"timestamp": 100 * n, "input_length": 600, "output_length": 9} for n in range(9)]
    (folder / "mooncake_trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if importlib.util.find_spec("tokenizers"):
        make_tokenizer(folder / "path/to/Qwen3-0.6B")


def make_tokenizer(folder: Path) -> None:
    """One whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def serve(options: list[str], environment: Mapping[str, str], folder: Path) -> None:
    """Run mock engines, and a request on each."""
    count = int(options[options.index("--engine-count") + 1]) if "--engine-count" in options else 1
    port = free_port()
    given = without(options, "--handshake-address", "--metrics-port")
    address = f"tcp://127.0.0.1:{port}"
    given += ["--handshake-address", address]
    if "--metrics-port" in options:
        given += ["--metrics-port", "0"]
    mode = HandshakeOwner(address, engine_count=count, ready_timeout=60)

    async def use() -> None:
        async with open_llm(mode) as llm:
            for rank in range(count):
                await generate(llm, 3, rank=rank)

    with running(
        "mock-engine",
        in_folder([*our_command("mock-engine"), *given], folder),
        environment=environment,
    ):
        trio.run(use)


def check_engine(options: list[str], environment: Mapping[str, str], folder: Path) -> None:
    """Run ``llm-smoke``, and the engine that it waits for."""
    port = free_port()
    given = [
        *without(options, "--handshake-address"),
        "--handshake-address",
        f"tcp://127.0.0.1:{port}",
    ]
    engine = [*our_command("mock-engine"), "--handshake-address", f"tcp://127.0.0.1:{port}"]
    with running("mock-engine", engine):
        complete([*our_command("llm-smoke"), *given], environment, folder)


def complete(command: list[str], environment: Mapping[str, str], folder: Path) -> None:
    """Run a command to its end, which must be good."""
    with running(command[-1], in_folder(command, folder), environment=environment) as process:
        expect("the exit code", process.wait_for_exit(120), 0)


def in_folder(command: list[str], folder: Path) -> list[str]:
    """What runs a command in a folder."""
    return ["/bin/sh", "-c", f"cd {shlex.quote(str(folder))} && exec {shlex.join(command)}"]


def without(options: list[str], *names: str) -> list[str]:
    """The others, without these and their values."""
    left = iter(options)
    kept = []
    for option in left:
        if option in names:
            next(left)
        else:
            kept.append(option)
    return kept
