"""What is missing without an extra is said with the command that installs it, also in a clone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trio_vllm.cli import mock_engine
from trio_vllm.errors import ConfigurationError, how_to_install
from trio_vllm.mock import MockEngineConfig

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("trio_vllm.monitor", "rich.console", "monitor"),
        ("trio_vllm.llm.tracing", "opentelemetry", "tracing"),
        ("trio_vllm.llm.metrics", "prometheus_client", "metrics"),
    ],
)
def test_modules(module: str, missing: str, extra: str) -> None:
    script = f"import sys; sys.modules['{missing}'] = None; import {module}"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    last = done.stderr.splitlines()[-1]
    assert extra in EXTRAS
    assert last.endswith(f": pip install 'trio-vllm[{extra}]', in a clone pip install '.[{extra}]'")


def test_metrics_of_the_mock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trio_vllm.cli.exporter", None)

    assert mock_engine.main(["--metrics-port", "0"]) == 1

    assert capsys.readouterr().err.endswith(f": {how_to_install('metrics')}\n")


def test_tokenizer_of_the_mock(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, *args: Any) -> object:
        return None if name == "llguidance" else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find)

    with pytest.raises(ConfigurationError) as caught:
        MockEngineConfig(tokenizer="path")

    assert how_to_install("structured") in str(caught.value)
