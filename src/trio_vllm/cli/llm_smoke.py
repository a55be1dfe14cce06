"""`main` runs ``llm-smoke``, whose commands check headless engines end to end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import CycloptsError, Parameter

from trio_vllm.cli.app import WRONG_USAGE, invoke, new_app
from trio_vllm.cli.smoke_options import (
    AllOptions,
    BenchOptions,
    GenerateOptions,
    LogprobsOptions,
    SmokeOptions,
    UtilityOptions,
    check_usage,
)

app = new_app(
    "llm-smoke",
    "Check headless vLLM engines end to end, over their own protocol.\n\n"
    "A real engine serves one connection in its life: start a fresh one for each run, or let --spawn do"
    " it.\n\n"
    "Options are also read from the environment (LLM_SMOKE_MAX_TOKENS=3) and from a TOML file"
    " (--config). Exit codes: 0 passed, 1 failed, 2 wrong usage, 130 stopped by SIGINT, 143 by"
    " SIGTERM.",
)

Command = Annotated[
    str,
    Parameter(
        help="With --spawn: the command that starts the engines, after --. {port} and {address} in"
        " it stand for the handshake address; without --handshake-address a free port is taken."
        " Otherwise the address is the one that the command names."
    ),
]
Flat = Parameter(name="*")


@app.command(validator=check_usage)
async def generate(
    *command: Command, options: Annotated[GenerateOptions, Flat] = GenerateOptions()
) -> int:
    """Complete a prompt, and check that one final output comes with all tokens."""
    return await _run(options, command, "generate")


@app.command(validator=check_usage)
async def utility(
    *command: Command, options: Annotated[UtilityOptions, Flat] = UtilityOptions()
) -> int:
    """Reset the engines' caches, put them to sleep and wake them up."""
    return await _run(options, command, "utility")


@app.command(validator=check_usage)
async def logprobs(
    *command: Command, options: Annotated[LogprobsOptions, Flat] = LogprobsOptions()
) -> int:
    """Complete a prompt, and check the log probabilities of its tokens and of the new ones."""
    return await _run(options, command, "logprobs")


@app.command(name="all", validator=check_usage)
async def all_smokes(*command: Command, options: Annotated[AllOptions, Flat] = AllOptions()) -> int:
    """Run generate, utility and logprobs, and sum up.

    With --spawn and --mock each gets fresh engines, otherwise all share one connection.
    """
    return await _run(options, command)


@app.command(validator=check_usage)
async def bench(*command: Command, options: Annotated[BenchOptions, Flat] = BenchOptions()) -> int:
    """Send a load to the engines, and report latencies and throughput."""
    from trio_vllm.cli.bench import bench as run_bench
    from trio_vllm.cli.bench import check_files
    from trio_vllm.cli.smoke_runner import run_smokes

    try:
        check_files(options)
    except ValueError as error:
        raise CycloptsError(msg=str(error)) from error
    return await run_smokes(options, command, {"bench": run_bench})


async def _run(options: SmokeOptions, command: Sequence[str], *names: str) -> int:
    """Run the smokes of these names, or all of them."""
    from trio_vllm.cli.smoke_runner import run_smokes
    from trio_vllm.cli.smokes import SMOKES

    return await run_smokes(options, command, {name: SMOKES[name] for name in names or SMOKES})


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    tokens = _command_first(sys.argv[1:] if tokens is None else tokens)
    if not tokens:  # a gate that runs nothing must not pass
        app.help_print(tokens, console=app.error_console)
        return WRONG_USAGE
    return invoke(app, tokens)


def _command_first(tokens: Sequence[str]) -> Sequence[str]:
    """The same with the command in front: options of all commands may stand before it, too."""
    own = list(tokens[: tokens.index("--")]) if "--" in tokens else list(tokens)
    commands = {name for name in app if not name.startswith("-")}
    place = next((n for n, token in enumerate(own) if token in commands), 0)
    return [*own[place : place + 1], *own[:place], *tokens[place + 1 :]]
