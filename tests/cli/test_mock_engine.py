"""The command ``mock-engine``: what it takes and refuses, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from rich.console import Console
from tests.proc import children_of, started

from trio_vllm import (
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    HandshakeOwner,
    Llm,
    SamplingParams,
    open_llm,
)
from trio_vllm.cli.mock_engine import app, main
from trio_vllm.cli.mock_options import MockOptions
from trio_vllm.mock import MockEngineConfig, ServeOptions

TIMEOUT = 60.0
"""Seconds in which a process must have started, or ended."""


def parsed(*tokens: str) -> MockOptions:
    """The options that the command would get."""
    _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    given = {name: value for name, value in bound.arguments.items() if name != "config"}
    return MockOptions.of(**given)


def values(*tokens: str) -> dict[str, Any]:
    """The same by name, without those of the process."""
    options = parsed(*tokens)
    return {**attrs.asdict(options.engine), **attrs.asdict(options.serving)}


def refused(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    """Run what is wrong usage; give the one line that says so."""
    assert main(tokens) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mock-engine: ")
    return captured.err


def mock_engine(*tokens: str, **options: Any) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run the command as a process."""
    command = [sys.executable, "-m", "trio_vllm", "mock-engine", *tokens]
    return started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture
def address() -> Iterator[str]:
    """A handshake address."""
    with tempfile.TemporaryDirectory(prefix="mock-") as folder:
        yield f"ipc://{folder}/handshake"


def end(process: subprocess.Popen[str], *signals: int) -> tuple[int, str]:
    """Signal a process; give its exit code and what it has logged."""
    for number in signals:
        process.send_signal(number)
    _, log = process.communicate(timeout=TIMEOUT)
    return process.returncode, log


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody tells, of a process that is not ours."""
    with trio.fail_after(TIMEOUT):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


# Options ----------------------------------------------------------------------------------------


def test_defaults_are_those_of_vllms_mock_engine() -> None:
    """Where it has the option."""
    options = values()

    assert (
        options["handshake_address"],
        options["engine_count"],
        options["engine_start_index"],
        options["output_token_chunk_size"],
        options["vocab_size"],
        options["seed"],
        options["log_requests"],
        options["max_model_len"],
        options["reconnect"],
    ) == (
        "tcp://127.0.0.1:29550",
        1,
        0,
        1,
        32_000,
        0,
        False,
        1_048_576,
        True,
    )


def test_defaults_are_those_of_the_library() -> None:
    """They are written down once."""
    assert parsed() == MockOptions(engine=MockEngineConfig(), serving=ServeOptions())


def test_options_reach_another_process() -> None:
    """All of them, in one argument."""
    tokens = [
        "--supported-tasks",
        "embed,classify",
        "--engine-count",
        "4",
        "--step-interval",
        "0.5",
    ]
    options = parsed(*tokens, "--processes", "2", "--debug", "--startup-timeout", "3")

    assert MockOptions.from_json(options.to_json()) == options
    assert MockOptions.from_json(parsed().to_json()) == MockOptions()


@pytest.mark.parametrize(
    ("tokens", "name", "value"),
    [
        (["--handshake-address", "tcp://[::1]:5"], "handshake_address", "tcp://[::1]:5"),
        (["--engine-count", "65536"], "engine_count", 65_536),
        (["--engine-start-index", "4"], "engine_start_index", 4),
        (["--output-token-chunk-size", "8"], "output_token_chunk_size", 8),
        (["--vocab-size", "151936"], "vocab_size", 151_936),
        (["--seed", "18446744073709551615"], "seed", 2**64 - 1),
        (["--log-requests"], "log_requests", True),
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--stop-at-eos"], "stop_at_eos", True),
        (["--embedding-size", "8"], "embedding_size", 8),
        (["--num-labels", "3"], "num_labels", 3),
        (["--num-gpu-blocks", "9", "--no-schedule"], "num_gpu_blocks", 9),
        (["--block-size", "32"], "block_size", 32),
        (["--schedule"], "schedule", True),
        (["--no-schedule"], "schedule", False),
        (
            ["--no-enable-chunked-prefill", "--max-model-len", "64"],
            "enable_chunked_prefill",
            False,
        ),
        (["--kv-events-config", "{}"], "kv_events_config", "{}"),
        (["--prefix-caching-hash-seed", "0"], "prefix_caching_hash_seed", "0"),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--prefix-caching-hash-algo", "sha256_cbor"], "prefix_caching_hash_algo", "sha256_cbor"),
        (["--long-prefill-token-threshold", "5"], "long_prefill_token_threshold", 5),
        (["--scheduling-policy", "priority"], "scheduling_policy", "priority"),
        (["--enable-logging-iteration-details"], "enable_logging_iteration_details", True),
        (["--step-time", "8ms"], "step_time", 0.008),
        (["--step-time-per-request", "5e-5"], "step_time_per_request", 5e-5),
        (["--step-time-per-prefill-token", "0.5ms"], "step_time_per_prefill_token", 0.0005),
        (["--step-time-per-context-token", "1us"], "step_time_per_context_token", 1e-6),
        (["--time-to-first-token", "2s"], "time_to_first_token", 2.0),
        (["--inter-token-latency", "20ms"], "inter_token_latency", 0.02),
        (["--time-factor-under-load", "2"], "time_factor_under_load", 2.0),
        (["--time-scale", "0.5"], "time_scale", 0.5),
        (["--startup-duration", "1min"], "startup_duration", 60.0),
        (["--kv-cache-size-tokens", "99"], "kv_cache_size_tokens", 99),
        (["--max-num-seqs", "7"], "max_num_seqs", 7),
        (["--max-num-batched-tokens", "777"], "max_num_batched_tokens", 777),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--vllm-version", "1"], "vllm_version", "1"),
        (["--instance-id", "x"], "instance_id", "x"),
        (["--max-loras", "2"], "max_loras", 2),
        (["--max-lora-rank", "8", "--max-loras", "1"], "max_lora_rank", 8),
        (["--die-like-an-engine"], "die_like_an_engine", True),
        (["--supported-tasks", "generate,embed"], "supported_tasks", ("generate", "embed")),
        (["--pd-role", "prefill"], "pd_role", "prefill"),
        (["--pd-role", "both", "--kv-lease-duration", "1min"], "kv_lease_duration", 60.0),
        (["--pd-role", "both", "--kv-side-channel-host", "x"], "kv_side_channel_host", "x"),
        (["--pd-role", "both", "--kv-side-channel-port", "7"], "kv_side_channel_port", 7),
        (["--lockstep"], "lockstep", True),
        (["--no-reconnect"], "reconnect", False),
        (["--startup-timeout", "2.5"], "startup_timeout", 2.5),
        (["--heartbeat-timeout", "2.5"], "heartbeat_timeout", 2.5),
        (["--shutdown-timeout", "2.5"], "shutdown_timeout", 2.5),
        (["--step-interval", "0.01"], "step_interval", 0.01),
    ],
)
def test_options(tokens: Sequence[str], name: str, value: Any) -> None:
    """Each reaches its place."""
    assert values(*tokens)[name] == value


def test_profiles_hold_where_nothing_else_is_given(tmp_path: Path) -> None:
    """Those of the package by name, others by file."""
    like = values("--like", "llama-3.1-8b-l4", "--max-num-seqs", "9")
    assert (like["step_time"], like["max_num_seqs"]) == (0.0535, 9)
    file = tmp_path / "mine.toml"
    file.write_text('inter_token_latency = "20ms"\n')
    assert values("--profile", str(file))["inter_token_latency"] == 0.02


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["--tokenizer", "/nowhere"], "--tokenizer. "),
        (["--num-speculative-tokens", "2", "--acceptance-rate", "2"], "--acceptance-rate"),
        (["--acceptance-rate", "0.5"], "takes --num-speculative-tokens"),
        (
            ["--output", "song"],
            "--output. Must be one of random, prompt, echo or a file of answers",
        ),
        (["--output-tokens-mean", "0.5"], "Must be 0 or at least 1"),
        (["--output-tokens-mean", "9", "--output-tokens-std-dev", "5"], "is more than 30%"),
        (["--output-tokens-mean", "9", "--output", "echo"], "contradicts output echo"),
        (["--like", "nothing"], "no profile 'nothing'"),
        (["--like", "a", "--profile", "b"], "exclude each other"),
        (["--profile", "/nowhere/at/all.toml"], "cannot be read"),
        (["--kv-events-config", "{"], "--kv-events-config"),
        (["--vocab-size", "0"], "--vocab-size"),
        (["--output-token-chunk-size", "0"], "--output-token-chunk-size"),
        (["--engine-count", "0"], "--engine-count"),
        (["--engine-count", "65537"], "--engine-count"),
        (["--engine-start-index", "65535", "--engine-count", "2"], "index would be 65536"),
        (["--seed", "-1"], "--seed"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-lora-rank", "8"], "--max-lora-rank 8 takes --max-loras"),
        (["--pd-role", "neither"], "--pd-role"),
        (["--kv-lease-duration", "9"], "--kv-lease-duration takes --pd-role"),
        (["--pd-role", "decode", "--kv-lease-duration", "9"], "contradicts --pd-role decode"),
        (["--pd-role", "both", "--kv-side-channel-port", "0"], "--kv-side-channel-port"),
        (["--supported-tasks", "generate,embedding"], "unknown task 'embedding'"),
        (["--dtype", "int8"], "--dtype"),
        (["--handshake-address", "127.0.0.1:29550"], "--handshake-address"),
        (["--handshake-address", "tcp://127.0.0.1:0"], "--handshake-address"),
        (["--handshake-address", "tcp://::1:5"], "--handshake-address"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--startup-timeout", "0"], "--startup-timeout"),
        (["--heartbeat-timeout", "0"], "--heartbeat-timeout"),
        (["--step-time", "fast"], "--step-time"),
        (["--step-time", "-1ms"], "--step-time"),
        (["--max-model-len", "4096", "--num-gpu-blocks", "9"], "--num-gpu-blocks 9 are too few"),
        (
            ["--max-model-len", "4096", "--num-gpu-blocks", "9"],
            "; set --max-model-len to 128 or less",
        ),
        (["--max-num-batched-tokens", "9"], "less than --max-num-seqs 256"),
        (["--long-prefill-token-threshold", "9000"], "more than --max-num-batched-tokens 8192"),
        (["--no-enable-chunked-prefill"], "less than --max-model-len 1048576"),
        (["--schedule", "--output-token-chunk-size", "2"], "contradicts a schedule"),
        (["--scheduling-policy", "lottery"], "--scheduling-policy"),
        (["--inter-token-latency", "1s", "--step-time", "1s"], "one kind only"),
        (["--nonsense"], "--nonsense"),
        (["more"], "more"),
        (["--config", "/nowhere/at/all.toml"], "--config"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], tokens: Sequence[str], reason: str
) -> None:
    """One line, exit code 2."""
    assert reason in refused(capsys, *tokens)


def test_a_file_of_answers_is_read_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """So that the line that does not parse is told before anything starts."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"length": 1}\n{"length": "long"}\n')
    reason = refused(capsys, "--output", str(path))

    assert "--output" in reason
    assert f"{path}, line 2: length must be an integer of at least 1, got 'long'" in reason
    path.write_text('{"length": 1}\n')
    assert parsed("--output", str(path)).engine.output == str(path)


def test_other_sources_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line wins over the environment, and that over the file."""
    file = tmp_path / "mock.toml"
    file.write_text("seed = 1\nvocab-size = 11\nengine-count = 21\nreconnect = false\n")
    monkeypatch.setenv("MOCK_ENGINE_VOCAB_SIZE", "12")
    monkeypatch.setenv("MOCK_ENGINE_ENGINE_COUNT", "22")

    options = values("--config", str(file), "--engine-count", "23")

    assert (
        options["seed"],
        options["vocab_size"],
        options["engine_count"],
        options["reconnect"],
    ) == (1, 12, 23, False)


def test_the_help_says_how_to_start_a_frontend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds, and what is not validated."""
    # In narrow columns long names are broken.
    monkeypatch.setattr(app, "console", Console(width=200))
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "vllm-rs serve MODEL --data-parallel-size-local 0 --handshake-port 29550" in text
    assert "vllm serve MODEL --data-parallel-size-local 0" in text
    assert "It does not validate" in text
    for name in {*values(), "config", "debug", "processes"} - {"enable_sleep_mode"}:
        assert f"--{name.replace('_', '-')}" in text


# Life -------------------------------------------------------------------------------------------


def request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="it",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


async def use(llm: Llm) -> None:
    output = await llm.generate(request(5))
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 5


def owner(address: str, engine_count: int = 1) -> HandshakeOwner:
    return HandshakeOwner(
        handshake_address=address, engine_count=engine_count, ready_timeout=TIMEOUT
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly(address: str, number: int) -> None:
    """With a summary and exit code 0. Unless asked to it starts no other process."""
    tokens = ("--handshake-address", address, "--engine-count", "2", "--log-requests")
    with mock_engine(*tokens) as process:
        async with open_llm(owner(address, 2)) as llm:
            assert children_of(process.pid) == []
            for _ in range(3):
                await use(llm)
            code, log = await trio.to_thread.run_sync(end, process, number)

    assert code == 0
    assert len(re.findall("request taken request_id=it-.* max_tokens=5", log)) == 3
    assert len(re.findall("request finished request_id=it-.* output_tokens=5", log)) == 3
    assert re.search(
        r"summary: requests=3 tokens=15 tokens_per_second=\d+ finished=3 aborted=0 errors=0", log
    )


async def test_requests_may_end_first(address: str) -> None:
    """As long as the shutdown timeout lasts."""
    tokens = ("--handshake-address", address, "--step-interval", "0.02")
    with mock_engine(*tokens, "--shutdown-timeout", "60") as process:
        async with open_llm(owner(address)) as llm:
            async with llm.stream(request(20)) as deltas:
                received = [await anext(deltas)]
                process.send_signal(signal.SIGTERM)
                received += [delta async for delta in deltas]
            code, _ = await trio.to_thread.run_sync(end, process)

    assert sum(len(delta.token_ids) for delta in received) == 20
    assert received[-1].finish_reason is FinishReason.LENGTH
    assert code == 0


async def test_a_second_signal_ends_it_at_once(address: str) -> None:
    """Whatever time requests would have."""
    tokens = ("--handshake-address", address, "--engine-count", "2", "--step-interval", "0.02")
    with mock_engine(*tokens, "--shutdown-timeout", "600") as process:
        async with open_llm(owner(address, 2)) as llm:
            async with llm.stream(request(1_000_000)) as deltas:
                await anext(deltas)
                process.send_signal(signal.SIGTERM)
                # That the engine without requests ends tells that the first signal has come.
                await until(lambda: not llm.client.is_healthy)
                code, _ = await trio.to_thread.run_sync(end, process, signal.SIGTERM)
                with pytest.raises(EngineDeadError):
                    async for _ in deltas:
                        pass

    assert code == 0


def test_a_signal_before_there_is_a_frontend(address: str) -> None:
    """Ends it as well."""
    with mock_engine("--handshake-address", address) as process:
        assert process.stderr is not None
        assert "engine 0: joining the frontend" in process.stderr.readline()
        code, log = end(process, signal.SIGINT)

    assert code == 0
    assert "requests=0" in log


async def test_without_reconnect_it_fails_with_its_frontend(address: str) -> None:
    """One line says which engine and why."""
    tokens = ("--handshake-address", address, "--engine-count", "2", "--no-reconnect")
    with mock_engine(*tokens) as process:
        async with open_llm(owner(address, 2)) as llm:
            await use(llm)
        _, log = await trio.to_thread.run_sync(process.communicate, None, TIMEOUT)

    assert process.returncode == 1
    last = log.splitlines()[-1]
    assert re.fullmatch(r"mock-engine: engine [01] is dead: the frontend has gone \(.*\)", last)


def test_a_frontend_that_does_not_come() -> None:
    """Fails in time, and the traceback is there for who asks."""
    with tempfile.TemporaryDirectory(prefix="mock-") as folder:
        tokens = ("--handshake-address", f"ipc://{folder}/x", "--no-reconnect", "--debug")
        with mock_engine(*tokens, "--startup-timeout", "0.2") as process:
            code, log = end(process)

    assert code == 1
    assert "Traceback" in log
    assert "mock-engine: engine 0 is dead: startup failed while waiting for INIT" in log
