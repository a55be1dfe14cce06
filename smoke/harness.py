"""What the checks share: the programs that they run, requests, and how they fail.

A check is a module with ``main``, which raises if something is not as it must be. Those in ``peers/``
are handed the `Peers` of one version of vLLM. See ``run.py`` for how they are picked.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import trio

from processes import Process, running
from provision import Peers
from trio_vllm import GenerateOutput, GenerateRequest, HandshakeOwner, Llm, SamplingParams
from trio_vllm.spawn import free_port as free_port

PROMPT = (1, 2, 3)

PATIENCE = 60.0
"""Seconds that a request may take once there is an engine."""

READY_TIMEOUT = 240.0
"""Seconds for each step of a real engine's startup, on a busy machine."""

CONTEXT = 512
"""Tokens that fit the context of a real engine, unless its options say otherwise."""

LOSS_LIMIT = 2.0
"""Seconds in which the end of a process must be known."""

SETTLE_TIMEOUT = 30.0
"""Seconds after which what has been sent must show in logs and figures."""

VLLM_OPTIONS = ("--load-format", "dummy", "--enforce-eager", "--dtype", "float32")

PARSERS = ("--reasoning-parser", "none", "--tool-call-parser", "none")
"""Options of the Rust frontend: the tiny model has no such tokens as its family's parsers look for.
"""


class CheckError(Exception):
    """Something is not as it must be."""


def expect(what: str, got: object, expected: object) -> None:
    """Fail unless both are equal."""
    if got != expected:
        raise CheckError(f"{what}: {got!r}, not {expected!r}")


async def eventually(what: str, look: Callable[[], Any]) -> None:
    """Wait until ``look`` gives something true; it may be async."""
    deadline = trio.current_time() + SETTLE_TIMEOUT
    while True:
        seen = look()
        if await seen if hasattr(seen, "__await__") else seen:
            return
        if trio.current_time() > deadline:
            raise CheckError(f"waited for {what} in vain")
        await trio.sleep(0.1)


def ok(what: str, seconds: float | None = None) -> None:
    """Tell of a step that has passed."""
    print(f"ok {what}" + ("" if seconds is None else f" {seconds:.2f} s"), flush=True)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Tell how long a step took, if it has passed."""
    begin = time.monotonic()
    yield
    ok(what, time.monotonic() - begin)


# Requests -----------------------------------------------------------------------------------------


async def generate(
    llm: Llm,
    max_tokens: int | None,
    *,
    prompt: tuple[int, ...] | list[int] = PROMPT,
    rank: int | None = None,
    **params: Any,
) -> GenerateOutput:
    """Complete a prompt, on a certain engine if ``rank`` says so; it gets as many tokens as asked.

    Only a token or a text that stops it may end it earlier, and then the caller has named one.
    """
    request = GenerateRequest(
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        data_parallel_rank=rank,
    )
    with trio.fail_after(PATIENCE):
        output = await llm.generate(request)
    if max_tokens is not None and not params.keys() & {"stop_token_ids", "eos_token_id"}:
        counts = [len(completion.token_ids) for completion in output.completions]
        expect("tokens of each completion", counts, [max_tokens] * len(counts))
    return output


def owner(port: int, **options: Any) -> HandshakeOwner:
    """How real engines meet us."""
    address = f"tcp://127.0.0.1:{port}"
    return HandshakeOwner(
        **{"handshake_address": address, "ready_timeout": READY_TIMEOUT, **options}
    )


# Programs -----------------------------------------------------------------------------------------


def our_command(name: str) -> list[str]:
    """One of the package's commands."""
    return [sys.executable, "-m", "trio_vllm", name]


def mock_engine(handshake_port: int, *args: str) -> AbstractContextManager[Process]:
    """Run mock engines behind the frontend that listens on ``handshake_port``."""
    address = f"tcp://127.0.0.1:{handshake_port}"
    command = [*our_command("mock-engine"), "--handshake-address", address]
    return running("mock-engine", [*command, "--log-requests", *args])


def headless_command(peers: Peers, model: Path, port: int | str, *args: str) -> list[str]:
    """The command of a real engine; of a repeated option the last counts."""
    options = (*VLLM_OPTIONS, "--max-model-len", str(CONTEXT), *_dial(port, 1), "--headless")
    return [*peers.vllm, "serve", str(model), *options, *args]


def headless_engine(
    peers: Peers, port: int, *args: str, model: Path | None = None
) -> AbstractContextManager[Process]:
    """Run a real engine that dials the handshake on ``port``, 20 to 30 s after its start.

    It serves one frontend and then is of no more use. ``args`` are more options of ``vllm serve``.
    """
    command = headless_command(peers, model or peers.model, port, *args)
    name = f"the engine of vLLM {peers.version}"
    return running(name, command, environment=peers.environment)


def python_frontend(
    peers: Peers, handshake_port: int, http_port: int, *args: str
) -> AbstractContextManager[Process]:
    """Run vLLM's Python frontend; HTTP answers about 25 s after its start, with an engine.

    The model is called ``tiny``. ``args`` are more options of ``vllm serve``.
    """
    options = (*VLLM_OPTIONS, *_dial(handshake_port, 0), *_serve_http(http_port))
    return running(
        f"the Python frontend of vLLM {peers.version}",
        [*peers.vllm, "serve", peers.model, *options, *args],
        environment=peers.environment,
    )


def rust_frontend(
    peers: Peers, handshake_port: int, http_port: int, *args: str
) -> AbstractContextManager[Process]:
    """Run vLLM's Rust frontend; it waits for engines within a second.

    The model is called ``tiny``. ``args`` are more options of ``vllm-rs serve``.
    """
    options = ("--data-parallel-size-local", "0", "--handshake-port", str(handshake_port))
    return running(
        "vLLM's Rust frontend",
        [peers.vllm_rs, "serve", peers.model, *options, *_serve_http(http_port), *args],
    )


def make_lockstep_model(peers: Peers, folder: Path) -> Path:
    """The tiny model, claiming experts that it does not have.

    That is enough for vLLM to run its engines like those of a mixture-of-experts model.
    """
    model = folder / "tiny-lockstep"
    shutil.copytree(peers.model, model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_experts": 2}))
    return model


def _dial(port: int | str, local_engines: int) -> tuple[str, ...]:
    address = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))
    return (*address, "--data-parallel-size-local", str(local_engines))


def _serve_http(port: int) -> tuple[str, ...]:
    return ("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port))
