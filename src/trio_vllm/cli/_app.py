"""What both commands have in common: how options are read, and how wrong ones are reported."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.config import Dict, Env

FAILED = 1
"""The exit code if it could not be done."""

WRONG_USAGE = 2
"""The exit code for a command line that makes no sense."""


def read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A source of options for cyclopts: the TOML file that ``--config`` names.

    Its keys are the options' names. Those at the top are for every command, those in a table with a
    command's name are for this one and win. What other sources gave before this one stays.
    """
    argument = arguments.get("--config", None)
    if argument is None or not argument.tokens:
        return
    path = Path(argument.tokens[-1].value)
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CycloptsError(msg=f"--config {path}: {error.strerror}.") from error
    except ValueError as error:  # what is no TOML, or no text
        raise CycloptsError(msg=f"--config {path}: {error}.") from error
    for use_tables in (True, False):
        source = Dict(options, source=str(path), use_commands_as_keys=use_tables)
        source(app, commands, arguments)


def _shown_default(value: object) -> object:
    """That a flag is off by default goes without saying."""
    return None if value is False else value


def new_app(name: str, description: str, **options: Any) -> App:
    """An app that reads the command line, then ``NAME_*`` variables, then ``--config FILE.toml``."""
    prefix = name.upper().replace("-", "_") + "_"
    return App(
        name=name,
        help=description,
        version=lambda: importlib.metadata.version("trio-vllm"),
        config=[Env(prefix, command=False), read_config_file],
        default_parameter=Parameter(negative=(), show_env_var=False, show_default=_shown_default),
        backend="trio",
        result_action="return_value",
        # Markdown would take a third of the time that showing the help takes.
        help_format="plaintext",
        version_format="plaintext",
        **options,
    )


def invoke(app: App, tokens: Sequence[str] | None = None) -> int:
    """Run the command that ``tokens`` (or this process's arguments) ask for; gives the exit code."""
    try:
        exit_code: int | None = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        print_line(app, str(error))
        return WRONG_USAGE
    return exit_code or 0


def print_line(app: App, text: str) -> None:
    """Say one thing on standard error, in one line whatever it is made of."""
    print(f"{app.name[0]}: {' '.join(text.split())}", file=sys.stderr, flush=True)
