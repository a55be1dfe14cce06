"""Runs every program in ``examples/`` against mock engines."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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
    """Each line is answered."""
    prompts = [{"prompt_token_ids": [n + 1], "max_tokens": n + 1} for n in range(20)]
    (folder / "in").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with mock_engine() as engines:
        run("batch", str(folder / "in"), str(folder / "out"), engines.handshake_address)
    answers = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    lengths = {int(answer["line"]): len(answer["token_ids"]) for answer in answers}
    assert lengths == {n: n + 1 for n in range(20)}, lengths


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
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    with mock_engine(answers={(2,): [2, 3]}) as engines:
        out = run("text", str(folder), "hello", engines.handshake_address)
    assert out.strip() == "hello world", out


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
