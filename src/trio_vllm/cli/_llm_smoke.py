"""``llm-smoke``: checks headless engines end to end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from trio_vllm.cli._app import FAILED, WRONG_USAGE, invoke, new_app
from trio_vllm.cli._smoke_options import (
    GENERATE_MAX_TOKENS,
    LOGPROBS_MAX_TOKENS,
    AllOptions,
    GenerateOptions,
    LogprobsOptions,
    UtilityOptions,
    check_usage,
)

app = new_app(
    "llm-smoke",
    "Check headless vLLM engines end to end, over their own protocol.\n\n"
    "An engine serves one connection in its life: start a fresh one for each run, or let --spawn do"
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
    from trio_vllm.cli import _smokes
    from trio_vllm.cli._smoke_run import run_smokes

    smoke = partial(_smokes.generate, options=options, max_tokens=options.max_tokens)
    return await run_smokes(options, command, {"generate": smoke})


@app.command(validator=check_usage)
async def utility(
    *command: Command, options: Annotated[UtilityOptions, Flat] = UtilityOptions()
) -> int:
    """Reset the engines' caches, put them to sleep and wake them up."""
    from trio_vllm.cli import _smokes
    from trio_vllm.cli._smoke_run import run_smokes

    smoke = partial(_smokes.utility, options=options)
    return await run_smokes(options, command, {"utility": smoke})


@app.command(validator=check_usage)
async def logprobs(
    *command: Command, options: Annotated[LogprobsOptions, Flat] = LogprobsOptions()
) -> int:
    """Complete a prompt, and check the log probabilities of its tokens and of the new ones."""
    from trio_vllm.cli import _smokes
    from trio_vllm.cli._smoke_run import run_smokes

    smoke = partial(_smokes.logprobs, options=options, max_tokens=options.max_tokens)
    return await run_smokes(options, command, {"logprobs": smoke})


@app.command(name="all", validator=check_usage)
async def all_smokes(*command: Command, options: Annotated[AllOptions, Flat] = AllOptions()) -> int:
    """Run generate, utility and logprobs, and sum up.

    With --spawn and --mock each gets fresh engines, otherwise all share one connection.
    """
    from trio_vllm.cli import _smokes
    from trio_vllm.cli._smoke_run import run_smokes

    generate_tokens = options.max_tokens or GENERATE_MAX_TOKENS
    logprobs_tokens = options.max_tokens or LOGPROBS_MAX_TOKENS
    return await run_smokes(
        options,
        command,
        {
            "generate": partial(_smokes.generate, options=options, max_tokens=generate_tokens),
            "utility": partial(_smokes.utility, options=options),
            "logprobs": partial(_smokes.logprobs, options=options, max_tokens=logprobs_tokens),
        },
    )


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    tokens = sys.argv[1:] if tokens is None else tokens
    if not tokens:  # a gate that runs nothing must not pass
        app.help_print(tokens, console=app.error_console)
        return WRONG_USAGE
    try:
        exit_code = invoke(app, tokens)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads what we print, so Python need not try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return exit_code
