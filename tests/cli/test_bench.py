"""``llm-smoke bench``: each option has an effect, and what comes out can be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trio_vllm.cli.bench import planned_requests
from trio_vllm.cli.llm_smoke import main
from trio_vllm.cli.smoke_options import BenchOptions

SMALL = ["bench", "--mock", "--num-prompts", "5", "--input-len", "8", "--output-len", "4"]


def first(count: int = 20, **options: Any) -> list[tuple[float, int, int]]:
    """The first requests of a load: time, and both lengths."""
    requests = planned_requests(BenchOptions(**options))
    planned = [next(requests) for _ in range(count)]
    return [(p.time, len(p.prompt_token_ids), p.output_len) for p in planned]


def run_json(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main([*tokens, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0

    lines = capsys.readouterr().out.splitlines()
    figures = dict(line.split() for line in lines if "=" not in line)
    assert figures["completed"] == "5"
    assert figures["total_output_tokens"] == "20"
    assert "request_goodput" not in figures
    assert float(figures["p99_e2el_ms"].replace(",", "")) > 0


def test_json_and_percentiles_and_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--metric-percentiles", "50", "--metric-percentiles", "90"]
    options += ["--goodput", "ttft:60000", "--goodput", "e2el:0"]
    result = run_json(capsys, *SMALL, *options)

    assert result["passed"] is True
    assert result["request_goodput"] == 0
    assert {"p50_ttft_ms", "p90_itl_ms"} <= result.keys()
    assert "p99_ttft_ms" not in result


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_the_engines_meanwhile(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert main(SMALL) == 0

    shown = capsys.readouterr().err
    assert ("output tok/s" in shown) is is_terminal
    assert ("requests in flight" in shown) is is_terminal


def test_warm_up_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, *SMALL, "--num-warmups", "3")["completed"] == 5


def test_concurrency_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    one = run_json(capsys, *SMALL, "--max-concurrency", "1")
    all_at_once = run_json(capsys, *SMALL)

    assert one["max_concurrent_requests"] == 1
    assert all_at_once["max_concurrent_requests"] > 1


def test_a_duration_ends_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["bench", "--mock", "--duration", "0.3", "--request-rate", "100", "--output-len", "1"]
    result = run_json(capsys, *tokens, "--burstiness", "inf")

    assert 1 <= result["completed"] <= 31


def test_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    run_json(capsys, *SMALL, "--result-file", str(path))

    result = json.loads(path.read_text())
    assert result["request_rate"] == "inf"
    assert result["num_prompts"] == 5
    assert result["output_lens"] == [4] * 5
    assert len(result["ttfts"]) == len(result["itls"]) == 5


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it is sent, at the speed that is asked for."""
    path = tmp_path / "trace.jsonl"
    item = {"input_length": 9, "output_length": 2}
    path.write_text("".join(json.dumps({**item, "timestamp": n * 1000}) + "\n" for n in range(3)))

    result = run_json(capsys, "bench", "--mock", "--trace", str(path), "--trace-speed", "100")
    assert (result["completed"], result["total_input_tokens"]) == (3, 27)
    assert result["duration"] < 2


def test_a_trace_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")

    assert main(["bench", "--mock", "--trace", str(path)]) == 1
    assert "there is no 'timestamp'" in capsys.readouterr().err


def test_options_of_the_random_load() -> None:
    """Each changes the plan."""
    plain = first()
    assert plain == [(0.0, 1024, 128)] * 20
    assert first(input_len=5, output_len=3) == [(0.0, 5, 3)] * 20
    assert first(prefix_len=7, input_len=5)[0] == (0.0, 12, 128)
    assert len({length for _, length, _ in first(range_ratio=0.5)}) > 1
    assert first(request_rate=2.0, burstiness=float("inf"))[2][0] == 1.0
    assert first(request_rate=2.0) != first(request_rate=2.0, seed=1)
    prompt = next(planned_requests(BenchOptions(vocab_size=3))).prompt_token_ids
    assert set(prompt) == {0, 1, 2}


@pytest.mark.parametrize(
    "options",
    [
        ["--goodput", "fast"],
        ["--metric-percentiles", "101"],
        ["--range-ratio", "1"],
        ["--num-prompts", "0"],
        ["--request-rate", "0"],
    ],
)
def test_what_makes_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--mock", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_plotting_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so before anything starts."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert main(["bench", "--mock", "--plot", str(tmp_path / "load.png")]) == 2

    assert capsys.readouterr().err.endswith("--plot needs matplotlib: pip install matplotlib\n")


def test_plotting_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.png"
    run_json(capsys, *SMALL, "--plot", str(path))

    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--mock", "--plot", str(tmp_path / "load.txt")]) == 2
    assert "load.txt must end with one of ." in capsys.readouterr().err
