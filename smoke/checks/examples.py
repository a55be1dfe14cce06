"""Runs every program in ``examples/`` against mock engines."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trio_vllm.mock import MockEngineConfig
from trio_vllm.testing import mock_engine

EXAMPLES = Path(__file__).parents[2] / "examples"

NEEDED = {
    "batch": (),
    "data_parallel": (),
    "fastapi_app": ("fastapi", "httpx"),
    "metrics": ("prometheus_client",),
    "rl_loop": (),
    "test_routing_policy": ("pytest",),
    "text": ("jinja2", "tokenizers"),
}
"""What each needs besides the package."""


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    """Start an example beside the check."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(name: str, *arguments: str, **environment: str) -> str:
    """Run an example; gives what it prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def batch(folder: Path) -> None:
    """Each line is answered once, whatever becomes of engines; one that fails is told."""
    lengths = [n % 20 + 1 for n in range(2000)]
    write_prompts(folder / "in", lengths[:20])
    with mock_engine() as engines:
        run("batch", str(folder / "in"), str(folder / "out"), engines.handshake_address)
        assert read_lengths(folder / "out") == lengths[:20]
        # The next run has more to do, and does no more than that. Some lines fail.
        write_prompts(folder / "in", [*lengths[:20], -1, 7])
        with open(folder / "in", "a", encoding="utf-8") as prompts:
            prompts.write('oops\n{"prompt": "text"}\n{"prompt_token_ids": "text"}\n')
        arguments = [str(folder / "in"), str(folder / "out"), engines.handshake_address]
        done = start("batch", *arguments)
        _, log = done.communicate(timeout=120)
        faults = sorted(line.split(":")[0] for line in log.splitlines())
        assert (done.returncode, faults) == (1, [f"line {n}" for n in (21, 23, 24, 25)]), log
        assert len(engines.engine.requests) == 21, engines.engine
    expect_usage("batch", "only-one-file")
    for number in (signal.SIGKILL, signal.SIGTERM):
        end_engines_midway(folder, lengths, number)


def expect_usage(name: str, *arguments: str) -> None:
    """Too few arguments are told in one line."""
    done = start(name, *arguments)
    _, log = done.communicate(timeout=60)
    assert (done.returncode, log.startswith(f"usage: {name}.py "), log.count("\n")) == (
        1,
        True,
        1,
    ), log


def end_engines_midway(folder: Path, lengths: list[int], number: int) -> None:
    """End the engine that the example has started; it starts another, and loses nothing."""
    prompts, out, pid = folder / "in", folder / f"out-{number}", folder / "pid"
    write_prompts(prompts, lengths)
    command = f"echo $$ > {pid}; exec {sys.executable} -m trio_vllm mock-engine --no-reconnect"
    command += " --step-interval 2ms --handshake-address {address}"
    process = start("batch", str(prompts), str(out), "sh", "-c", command)
    while not out.exists() or out.read_text().count("\n") < 500:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(int(pid.read_text()), number)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert "start 1 of 3: engine 0 is dead" in log, log
    assert read_lengths(out) == lengths


def write_prompts(path: Path, lengths: list[int]) -> None:
    """A prompt for each of the numbers of tokens."""
    prompts = [{"prompt_token_ids": [n + 1], "max_tokens": k} for n, k in enumerate(lengths)]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def read_lengths(path: Path) -> list[int]:
    """The numbers of tokens by line; each line is there once."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = {int(answer["line"]): len(answer["token_ids"]) for answer in answers}
    assert len(answers) == len(lengths), "a line was completed twice"
    return [lengths[number] for number in sorted(lengths)]


def data_parallel(_: Path) -> None:
    """All four engines are used, and pins hold."""
    with mock_engine(engine_count=4) as engines:
        out = run("data_parallel", engines.handshake_address)
    assert [f"pinned to {n}: answered by {n}" in out for n in range(4)] == [True] * 4, out


def metrics(_: Path) -> None:
    """Ten requests of nine tokens are counted."""
    with mock_engine() as engines:
        out = run("metrics", engines.handshake_address)
    assert "vllm:generation_tokens_total" in out, out
    assert " 90.0" in out, out


def rl_loop(_: Path) -> None:
    """Each round samples with the weights of its own."""
    with mock_engine() as engines:
        out = run("rl_loop", engines.handshake_address)
    assert out.splitlines() == [f"round {n}: 12 samples of step-{n}" for n in range(3)], out


def text(folder: Path) -> None:
    """With a model's folder of our own: a vocabulary of words, a template, an end-of-text id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "</s>", "hello", "world"]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    with mock_engine(answers={(2,): [2, 3]}) as engines:
        out = run("text", str(folder), "hello", engines.handshake_address)
    assert out.strip() == "hello world", out
    with mock_engine(MockEngineConfig(output="echo")) as engines:
        out = run("text", str(folder), "world hello", engines.handshake_address)
    assert out.strip() == "world hello", out
    expect_usage("text")
    done = start("text", "Qwen/Qwen3-0.6B", "hello")
    _, log = done.communicate(timeout=60)
    assert (done.returncode, "is no folder with a tokenizer.json" in log) == (1, True), log


def fastapi_app(_: Path) -> None:
    """A request over HTTP is answered by the engine."""
    script = (
        "from fastapi.testclient import TestClient; from fastapi_app import app\n"
        "with TestClient(app) as client:\n"
        "    print(client.post('/generate', json={'token_ids': [1]}).json())"
    )
    with mock_engine(answers={(1,): [2, 3]}) as engines:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=EXAMPLES,
            env={**os.environ, "HANDSHAKE_ADDRESS": engines.handshake_address},
        )
    assert done.stdout.strip() == "{'token_ids': [2, 3], 'finish_reason': 'stop'}", done.stderr


def routing_policy(_: Path) -> None:
    """An hour of traffic, as a test."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    path = str(EXAMPLES / "test_routing_policy.py")
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=240)
    assert "2 passed" in done.stdout, done.stdout


RUNS: dict[str, Callable[[Path], None]] = {
    "batch": batch,
    "data_parallel": data_parallel,
    "fastapi_app": fastapi_app,
    "metrics": metrics,
    "rl_loop": rl_loop,
    "test_routing_policy": routing_policy,
    "text": text,
}


def main() -> None:
    """Run them all; one that lacks a library is skipped, loudly."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == RUNS.keys() == NEEDED.keys(), names
    for name, check in RUNS.items():
        if missing := [module for module in NEEDED[name] if not importlib.util.find_spec(module)]:
            print(f"SKIPPED examples/{name}.py: there is no {', '.join(missing)}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))
        print(f"ok examples/{name}.py")
