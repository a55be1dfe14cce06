"""The options of ``llm-smoke``, each documented once, and what makes no sense among them.

Names and defaults are those of the ``external_engine_*`` examples of vLLM's Rust crates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from trio_vllm.cli.app import MAX_ENGINES, check_address

READY_TIMEOUT = 30.0
"""Seconds; of the examples, which are started when the engine is."""

SPAWN_READY_TIMEOUT = 600.0
"""Seconds; upstream's for loading a model. A command that ends earlier is noticed at once."""

OUTPUT = Group("Output", sort_key=9)


def _check_seconds(_type: Any, value: float | None) -> None:
    if value is not None and not value > 0:  # also refuses what is not a number
        raise ValueError("Must be more than 0.")


def _check_host(_type: Any, value: str) -> None:
    if not re.fullmatch(r"[^\s/]+", value) or value.count(":") == 1:
        raise ValueError("Must be an address or a name, without a port.")


def _check_client_index(_type: Any, value: int) -> None:
    if value != 0:
        raise ValueError(
            "Must be 0: engines are given one pair of addresses, and would answer on one that does"
            " not exist."
        )


def _at_least(minimum: int, maximum: float = math.inf) -> Parameter:
    return Parameter(validator=Number(gte=minimum, lte=maximum))


@attrs.frozen(kw_only=True, slots=False)
class SmokeOptions:
    """What every smoke needs to know."""

    handshake_address: Annotated[str | None, Parameter(validator=check_address)] = None
    """Where the engines report, bound by us. With --mock it may be left out, with --spawn it is
    then what COMMAND names."""
    engine_count: Annotated[int, _at_least(1, MAX_ENGINES)] = 1
    """How many engines to wait for."""
    model: str = "Qwen/Qwen3-0.6B"
    """A label to print; the engines know their model."""
    host: Annotated[str, Parameter(validator=_check_host)] = "127.0.0.1"
    """Interface for requests and outputs, as the engines reach it."""
    client_index: Annotated[int, Parameter(validator=_check_client_index)] = 0
    """Which client of several we are; only 0 can work here."""
    ready_timeout_secs: Annotated[float | None, Parameter(validator=_check_seconds)] = None
    """Seconds that the next step of the engines' startup may take. [default: 30, with --spawn
    600]"""
    output_timeout_secs: Annotated[float, Parameter(validator=_check_seconds)] = 120.0
    """Seconds that an engine may take for the whole output of a request, or to answer a call."""
    mock: bool = False
    """Start mock engines in this process and check those."""
    spawn: bool = False
    """Start a fresh engine with COMMAND for each smoke, and end it with all its children."""
    config: Path | None = None
    """A TOML file with options: at the top for all commands, in a table for the one of its name."""
    json: Annotated[bool, Parameter(group=OUTPUT)] = False
    """Print one JSON object instead of name=value lines."""
    verbose: Annotated[bool, Parameter(group=OUTPUT)] = False
    """Report progress, and what a spawned engine prints, on standard error."""
    debug: Annotated[bool, Parameter(group=OUTPUT)] = False
    """Print the traceback of a failure."""

    @property
    def ready_timeout(self) -> float:
        """`ready_timeout_secs` or its default."""
        if self.ready_timeout_secs is not None:
            return self.ready_timeout_secs
        return SPAWN_READY_TIMEOUT if self.spawn else READY_TIMEOUT

    def of(self, smoke: str) -> SmokeOptions:
        """What one smoke of the command is run with."""
        return self


@attrs.frozen(kw_only=True, slots=False)
class GenerateOptions(SmokeOptions):
    """What ``generate`` needs besides."""

    max_tokens: Annotated[int, _at_least(1)] = 5
    """How many tokens to generate."""


@attrs.frozen(kw_only=True, slots=False)
class UtilityOptions(SmokeOptions):
    """What ``utility`` needs besides."""

    expected_is_sleeping: bool = False
    """The engines must sleep at first, instead of being awake."""
    reset_running_requests: bool = False
    """Let the reset of the prefix cache preempt running requests."""
    reset_external: bool = False
    """Let the reset of the prefix cache empty the cache behind the KV connector too."""
    sleep_level: Annotated[int, _at_least(0, 2)] = 1
    """0 gives no memory up, 1 moves the weights out, 2 drops them."""
    sleep_mode: Literal["abort", "wait", "keep"] = "abort"
    """What happens to requests in flight when the engines fall asleep."""
    skip_sleep_wake: bool = False
    """Do not put the engines to sleep."""


@attrs.frozen(kw_only=True, slots=False)
class PromptOptions(SmokeOptions):
    """What ``logprobs`` needs besides, and shares with ``all``."""

    logprobs: Annotated[int, _at_least(-1)] = 2
    """Log probabilities per generated token, besides its own; -1 is the whole vocabulary."""
    prompt_logprobs: Annotated[int, _at_least(-1)] = 1
    """The same per token of the prompt."""
    prompt_repeats: Annotated[int, _at_least(1, 1_000_000)] = 96
    """How often the prompt of 5 tokens is repeated."""


@attrs.frozen(kw_only=True, slots=False)
class LogprobsOptions(PromptOptions):
    """What ``logprobs`` needs besides."""

    max_tokens: Annotated[int, _at_least(1)] = 1
    """How many tokens to generate."""


@attrs.frozen(kw_only=True, slots=False)
class AllOptions(UtilityOptions, PromptOptions):
    """What all smokes together need."""

    max_tokens: Annotated[int | None, _at_least(1)] = None
    """How many tokens to generate. [default: 5 for generate, 1 for logprobs]"""

    def of(self, smoke: str) -> SmokeOptions:
        """What its own command would be run with: our values, its defaults where we have none."""
        kind = OPTIONS[smoke]
        values = {field.name: getattr(self, field.name) for field in attrs.fields(kind)}
        return kind(**{name: value for name, value in values.items() if value is not None})


OPTIONS: dict[str, type[SmokeOptions]] = {
    "generate": GenerateOptions,
    "utility": UtilityOptions,
    "logprobs": LogprobsOptions,
}

DEFAULTS = SmokeOptions()


def check_usage(command: Sequence[str] = (), options: SmokeOptions = DEFAULTS) -> None:
    """Refuse, by `ValueError`, options that do not go together."""
    if options.mock and options.spawn:
        raise ValueError("--mock and --spawn exclude each other.")
    if command and not options.spawn:
        raise ValueError(f"{command[0]!r} is not an option; a COMMAND needs --spawn.")
    if options.spawn and not command:
        raise ValueError("--spawn needs a command, best after --.")
    if options.handshake_address is None and not options.mock:
        if not options.spawn:
            raise ValueError("--handshake-address is needed, or --mock, or --spawn.")
        from trio_vllm.spawn import address_in

        if address_in(command) is None:
            raise ValueError("The command names no port: give --handshake-address.")
