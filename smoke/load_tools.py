"""Public load tools, as the checks run them: what they send to which server, and what they measure.

A tool needs many seconds for its imports, so that one process makes several runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import tail
from provision import Peers, find_guidellm

PROMPT_TOKENS = 20

PERCENTILE = 5
"""Of the times to the first token. What waits for a processor comes later, never earlier, and on a busy
machine that is most of them; what an engine was asked for all have in common."""


class LoadToolError(Exception):
    """A tool has failed."""


@dataclass(frozen=True)
class Load:
    """What is asked of a server: random prompts, evenly by rate or, without one, each after the other."""

    count: int
    output_tokens: int
    rate: float | None = None


@dataclass(frozen=True)
class Run:
    """A load on one engine behind a server on this machine."""

    port: int
    rank: int
    load: Load

    @property
    def url(self) -> str:
        """Of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def file_name(self) -> str:
        """Of the result."""
        return f"{self.port}-{self.rank}.json"


@dataclass(frozen=True)
class Measured:
    """What a tool says, in milliseconds."""

    ttft: float
    """At `PERCENTILE`."""
    median_ttft: float
    tpot: float
    """Between two tokens of a request: the median."""

    @property
    def jitter(self) -> float:
        """How much later half of the first tokens come: what the machine adds, if the engine has no part in it."""
        return self.median_ttft - self.ttft


class LoadTool(ABC):
    """A tool, with the tiny model's tokenizer."""

    name: str
    entry: str
    """What ``repeat.py`` runs."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def measure(self, runs: Sequence[Run], timeout: float) -> dict[Run, Measured]:
        """Make these runs, one after the other, in so many seconds."""
        with tempfile.TemporaryDirectory(prefix="trio-vllm-smoke-") as folder:
            lines = [json.dumps(self.arguments(run, Path(folder))) for run in runs]
            self._repeat(lines, folder, timeout)
            return {run: self._read(run, Path(folder)) for run in runs}

    def _repeat(self, lines: list[str], folder: str, timeout: float) -> None:
        script = Path(__file__).with_name("repeat.py")
        environment = {**os.environ, **self.environment, "NO_PROXY": "127.0.0.1"}
        ended = subprocess.run(
            [self.python, script, self.entry],
            input="\n".join(lines),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if ended.returncode:
            raise LoadToolError(f"{self.name} ended with {ended.returncode}:\n{tail(ended.stdout)}")

    def _read(self, run: Run, folder: Path) -> Measured:
        result = json.loads((folder / run.file_name).read_text())
        completed = self.completed(result)
        if completed != run.load.count:
            raise LoadToolError(f"{self.name}: {completed} of {run.load.count} requests succeeded")
        return self.measured(result)

    @property
    @abstractmethod
    def python(self) -> Path:
        """The Python that has the tool."""

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables for it."""

    @abstractmethod
    def arguments(self, run: Run, folder: Path) -> list[str]:
        """Its command line, with the result in this folder."""

    @abstractmethod
    def completed(self, result: Any) -> int:
        """How many requests have succeeded."""

    @abstractmethod
    def measured(self, result: Any) -> Measured:
        """What is in its result."""


class VllmBench(LoadTool):
    """``vllm bench serve``."""

    name = "vllm bench serve"
    entry = "vllm.entrypoints.cli.main:main"

    @property
    def python(self) -> Path:
        """That of the peers."""
        return self.peers.python

    @property
    def environment(self) -> dict[str, str]:
        """That of the peers."""
        return self.peers.environment

    def arguments(self, run: Run, folder: Path) -> list[str]:
        """Lengths are exact: end-of-text is ignored."""
        load = run.load
        pace = ["--max-concurrency=1"]
        if load.rate is not None:
            pace = [f"--request-rate={load.rate:g}", "--burstiness=1000"]
        return [
            *("vllm", "bench", "serve", "--backend=openai", "--model=tiny", "--ignore-eos"),
            *("--dataset-name=random", f"--random-input-len={PROMPT_TOKENS}", *pace),
            *(f"--num-prompts={load.count}", f"--random-output-len={load.output_tokens}"),
            *(f"--tokenizer={self.peers.model}", f"--base-url={run.url}"),
            *("--header", f"X-data-parallel-rank={run.rank}"),
            *("--save-result", f"--result-dir={folder}", f"--result-filename={run.file_name}"),
            *("--percentile-metrics=ttft,tpot", f"--metric-percentiles={PERCENTILE}"),
        ]

    def completed(self, result: Any) -> int:
        """How many requests have succeeded."""
        completed: int = result["completed"]
        return completed

    def measured(self, result: Any) -> Measured:
        """Its gaps between events count the last one, which has no token; its TPOT does not."""
        ttft = result[f"p{PERCENTILE}_ttft_ms"]
        return Measured(ttft, result["median_ttft_ms"], result["median_tpot_ms"])


class GuideLlm(LoadTool):
    """``guidellm run``."""

    name = "guidellm"
    entry = "guidellm.cli:cli"

    @property
    def python(self) -> Path:
        """That of its own environment."""
        found = find_guidellm()
        assert found is not None, "run.py provides for it"
        return found

    @property
    def environment(self) -> dict[str, str]:
        """One process sends: each more takes seconds to start."""
        return {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}

    def arguments(self, run: Run, folder: Path) -> list[str]:
        """What there is to say stands in a file."""
        scenario = folder / f"scenario-{run.file_name}"
        scenario.write_text(json.dumps({"spec": self._spec(run, folder)}))
        return ["guidellm", "run", f"--config={scenario}", "--disable-console-interactive"]

    def _spec(self, run: Run, folder: Path) -> dict[str, object]:
        load = run.load
        backend = {
            "kind": "openai_http",
            "target": run.url,
            "model": "tiny",
            "request_format": "/v1/completions",
            "extras": {"headers": {"X-data-parallel-rank": str(run.rank)}},
        }
        text = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": load.output_tokens}
        pace = {"kind": "constant", "rate": load.rate} if load.rate else {"kind": "synchronous"}
        return {
            "backend": backend,
            "profile": pace,
            "constraints": [{"kind": "max_requests", "count": load.count}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(self.peers.model)},
            "data": [{"kind": "synthetic_text", **text}],
            "data_loader": {"kind": "pytorch", "prefetch_factor": load.count},
            "outputs": [{"kind": "json", "path": str(folder / run.file_name)}],
        }

    def completed(self, result: Any) -> int:
        """How many requests have succeeded."""
        completed: int = result["benchmarks"][0]["metrics"]["request_totals"]["successful"]
        return completed

    def measured(self, result: Any) -> Measured:
        """What it calls ITL is the mean gap of a request; its TPOT counts the first token, too."""
        metrics = result["benchmarks"][0]["metrics"]
        ttft = metrics["time_to_first_token_ms"]["successful"]
        itl = metrics["inter_token_latency_ms"]["successful"]
        return Measured(ttft["percentiles"][f"p{PERCENTILE:02}"], ttft["median"], itl["median"])
