"""``mock-engine``: engine cores without a model, behind any vLLM frontend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from trio_vllm import ConfigurationError
from trio_vllm.cli.app import WRONG_USAGE, invoke, new_app, print_line
from trio_vllm.cli.mock_options import GROUPS, MockOptions, with_options

app = new_app(
    "mock-engine",
    "Join a vLLM frontend as one or many engine cores that have no model: prompts take no time, and"
    " every request gets random tokens, always the same for the same id, up to its max_tokens.\n\n"
    "A frontend for one engine, to be started before or after it:\n\n"
    "vllm-rs serve MODEL --data-parallel-size-local 0 --handshake-port 29550\n\n"
    "vllm serve MODEL --data-parallel-size-local 0 --data-parallel-address 127.0.0.1"
    " --data-parallel-rpc-port 29550\n\n"
    "For four engines, add --data-parallel-size 4 there and --engine-count 4 here.\n\n"
    "It does not validate: sampling parameters, structured outputs (without --tokenizer), token ids"
    " of prompts and multimodal data are accepted as they are, and have no effect on the tokens.\n\n"
    "Options are also read from the environment (MOCK_ENGINE_SEED=7) and from a TOML file"
    " (--config). Exit codes: 0 stopped by SIGINT or SIGTERM, 1 failed, 2 wrong usage.",
    usage="Usage: mock-engine [OPTIONS]",
)


@app.default
@with_options
async def run(
    *,
    processes: Annotated[
        int, Parameter(validator=Number(gte=1, lte=2**16), group=GROUPS["Engines"])
    ] = 1,
    like: Annotated[str | None, Parameter(group=GROUPS["Scheduling"])] = None,
    profile: Annotated[Path | None, Parameter(group=GROUPS["Scheduling"])] = None,
    metrics_port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None,
    metrics_host: str = "127.0.0.1",
    live: bool = False,
    config: Path | None = None,
    debug: bool = False,
    **options: Any,
) -> int:
    """Run mock engines until a signal stops them.

    Args:
      processes: How many processes they are spread over, since one can use no more than one core.
      like: Schedule and take time as a known engine; other options win. Bounds from data sheets:
        llama-3.1-8b-h100, llama-3.1-8b-a100, llama-3.1-8b-l4, llama-3.1-70b-8xh100.
      profile: A TOML file in the form of such a profile.
      metrics_port: Serve Prometheus metrics at /metrics, and /healthz and /readyz, over HTTP at this
        port; 0 takes a free one, which the log names. Needs trio-vllm[metrics].
      metrics_host: The interface for that.
      live: Show on the terminal what each engine does, below the log.
      config: A TOML file with options.
      debug: Print the traceback of a failure.
    """
    from trio_vllm.cli.mock_processes import run_mock_engines

    # ``config`` was read by the app.
    own = {"metrics_port": metrics_port, "metrics_host": metrics_host, "live": live, "debug": debug}
    given = MockOptions.of(processes=processes, like=like, profile=profile, **own, **options)
    if given.engine.tokenizer is not None:
        from trio_vllm.mock import load_vocabulary

        load_vocabulary(given.engine.tokenizer)  # wrong usage if it cannot be read
    return await run_mock_engines(given)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    try:
        return invoke(app, tokens)
    except ConfigurationError as error:  # of options that make sense one by one only
        print_line("mock-engine", str(error))
        return WRONG_USAGE
