"""`SmokeOptions` declares the options of ``llm-smoke``; `check_usage` refuses what makes no sense among them.

Names and defaults are those of the ``external_engine_*`` examples of vLLM's Rust crates.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from trio_vllm.cli.app import check_address
from trio_vllm.limits import MAX_ENGINES
from trio_vllm.values import frozen

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


def _check_output_file(_type: Any, value: Path | None) -> None:
    """Refuse at the start what could not be written at the end."""
    if value is None:
        return
    if value.is_dir():
        raise ValueError("Is a folder.")
    if not value.parent.is_dir():
        raise ValueError(f"There is no folder {value.parent}.")
    if not os.access(value if value.exists() else value.parent, os.W_OK):
        raise ValueError("Cannot be written.")


OutputFile = Parameter(validator=_check_output_file)


def _at_least(minimum: int, maximum: float = math.inf) -> Parameter:
    return Parameter(validator=Number(gte=minimum, lte=maximum))


@frozen(kw_only=True, slots=False)
class SmokeOptions:
    """What every smoke needs to know."""

    handshake_address: Annotated[str | None, Parameter(validator=check_address)] = None
    """Where the engines report, bound by us. With --mock it may be left out, with --spawn it is
    then what COMMAND names."""
    engine_count: Annotated[int, _at_least(1, MAX_ENGINES)] = 1
    """How many engines to wait for."""
    model: str | None = None
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
    timeout: Annotated[float, Parameter(validator=_check_seconds)] = math.inf
    """Seconds that all of it may take, with the engines' startup."""
    mock: bool = False
    """Start mock engines in this process and check those."""
    spawn: bool = False
    """Start a fresh engine with COMMAND for each smoke, and end it with all its children."""
    config: Path | None = None
    """A TOML file with options: at the top for all commands, in a table for the one of its name."""
    json: Annotated[bool, Parameter(group=OUTPUT)] = False
    """Print one JSON object instead of name=value lines: verdict, reason, versions."""
    json_full: Annotated[bool, Parameter(group=OUTPUT)] = False
    """Print one JSON object with all that was found, too."""
    junit: Annotated[Path | None, OutputFile, Parameter(group=OUTPUT)] = None
    """Write a report there in the XML of JUnit, which CI systems show."""
    quiet: Annotated[bool, Parameter(group=OUTPUT, alias="-q")] = False
    """Print nothing but the reason of a failure, and JSON if it is asked for."""
    verbose: Annotated[bool, Parameter(group=OUTPUT, alias="-v")] = False
    """Report progress, and what a spawned engine prints, on standard error."""
    debug: Annotated[bool, Parameter(group=OUTPUT)] = False
    """Print the traceback of a failure."""

    @property
    def ready_timeout(self) -> float:
        """`ready_timeout_secs` or its default."""
        if self.ready_timeout_secs is not None:
            return self.ready_timeout_secs
        return SPAWN_READY_TIMEOUT if self.spawn else READY_TIMEOUT

    @property
    def prints_json(self) -> bool:
        """Whether standard output gets one JSON object."""
        return self.json or self.json_full

    def of(self, smoke: str) -> SmokeOptions:
        """What one smoke of the command is run with."""
        return self


@frozen(kw_only=True, slots=False)
class GenerateOptions(SmokeOptions):
    """What ``generate`` needs besides."""

    max_tokens: Annotated[int, _at_least(1)] = 5
    """How many tokens to generate."""


@frozen(kw_only=True, slots=False)
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


@frozen(kw_only=True, slots=False)
class WantedLogprobsOptions(SmokeOptions):
    """Which log probabilities ``logprobs`` asks for; ``all`` has these options, too."""

    logprobs: Annotated[int, _at_least(-1)] = 2
    """Log probabilities per generated token, besides its own; -1 is the whole vocabulary."""
    prompt_logprobs: Annotated[int, _at_least(-1)] = 1
    """The same per token of the prompt."""
    prompt_repeats: Annotated[int, _at_least(1, 1_000_000)] = 96
    """How often the prompt of 5 tokens is repeated."""


@frozen(kw_only=True, slots=False)
class LogprobsOptions(WantedLogprobsOptions):
    """What ``logprobs`` needs besides; ``all`` has one ``max_tokens`` for all smokes."""

    max_tokens: Annotated[int, _at_least(1)] = 1
    """How many tokens to generate."""


@frozen(kw_only=True, slots=False)
class AllOptions(UtilityOptions, WantedLogprobsOptions):
    """What all smokes together need."""

    max_tokens: Annotated[int | None, _at_least(1)] = None
    """How many tokens to generate. [default: 5 for generate, 1 for logprobs]"""

    def of(self, smoke: str) -> SmokeOptions:
        """What its own command would be run with: our values, its defaults where we have none."""
        kind = OPTIONS[smoke]
        values = {field.name: getattr(self, field.name) for field in attrs.fields(kind)}
        return kind(**{name: value for name, value in values.items() if value is not None})


LOAD = Group("Load", sort_key=5)
RESULTS = Group("Results", sort_key=6)


def _check_limits(_type: Any, limits: Sequence[str]) -> None:
    for limit in limits:
        if not re.fullmatch(r"(ttft|tpot|e2el):[0-9.]+", limit):
            raise ValueError("Must be ttft:MS, tpot:MS or e2el:MS.")


def _check_percentiles(_type: Any, values: Sequence[float]) -> None:
    if not all(0 <= value <= 100 for value in values):
        raise ValueError("Must be from 0 to 100.")


def _check_ratio(_type: Any, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError("Must be from 0 up to, but without, 1.")


Seconds = Parameter(validator=_check_seconds, group=LOAD)


@frozen(kw_only=True, slots=False)
class BenchOptions(SmokeOptions):
    """What ``bench`` needs besides; names and defaults are those of ``vllm bench serve``."""

    num_prompts: Annotated[int | None, _at_least(1), Parameter(group=LOAD)] = None
    """How many requests to send. [default: 1000, or what the trace or the duration gives]"""
    duration: Annotated[float, Seconds] = math.inf
    """Seconds after which no more are sent."""
    request_rate: Annotated[float, Seconds] = math.inf
    """Requests per second; inf is as fast as --max-concurrency allows."""
    burstiness: Annotated[float, Seconds] = 1.0
    """How evenly they come: 1 is a Poisson process, less comes in bursts, inf at fixed intervals."""
    max_concurrency: Annotated[int | None, _at_least(1), Parameter(group=LOAD)] = None
    """How many may be in flight."""
    input_len: Annotated[int, _at_least(1), Parameter(group=LOAD)] = 1024
    """Prompt tokens besides the common prefix."""
    output_len: Annotated[int, _at_least(1), Parameter(group=LOAD)] = 128
    """Tokens to generate."""
    range_ratio: Annotated[float, Parameter(validator=_check_ratio, group=LOAD)] = 0.0
    """Lengths are drawn from this fraction below to this fraction above."""
    prefix_len: Annotated[int, _at_least(0), Parameter(group=LOAD)] = 0
    """Tokens that all prompts begin with."""
    vocab_size: Annotated[int, _at_least(1), Parameter(group=LOAD)] = 1000
    """Prompts are made of token ids below this number."""
    seed: Annotated[int, _at_least(0), Parameter(group=LOAD)] = 0
    """Of lengths, tokens and times."""
    trace: Annotated[Path | None, Parameter(group=LOAD)] = None
    """A recorded load in place of a random one: Mooncake's JSON lines, or BurstGPT's .csv."""
    trace_speed: Annotated[float, Seconds] = 1.0
    """How much faster than recorded."""
    num_warmups: Annotated[int, _at_least(0), Parameter(group=LOAD)] = 0
    """Requests that are sent first and not counted."""
    percentiles: Annotated[
        tuple[float, ...],
        Parameter(validator=_check_percentiles, group=RESULTS, name="--metric-percentiles"),
    ] = (99.0,)
    """Of each latency, from 0 to 100; can be given several times."""
    goodput: Annotated[tuple[str, ...], Parameter(validator=_check_limits, group=RESULTS)] = ()
    """A limit in milliseconds, as ttft:200, tpot:50 or e2el:3000; requests that keep all of them
    count for request_goodput."""
    result_file: Annotated[Path | None, OutputFile, Parameter(group=RESULTS)] = None
    """Write the figures and those of each request there, in the form of ``vllm bench serve``."""
    plot: Annotated[Path | None, OutputFile, Parameter(group=RESULTS)] = None
    """Draw latencies over time into this file; needs matplotlib."""

    @property
    def limits(self) -> dict[str, float]:
        """The limits of `goodput` by name."""
        return {name: float(ms) for name, _, ms in (item.partition(":") for item in self.goodput)}


OPTIONS: dict[str, type[SmokeOptions]] = {
    "generate": GenerateOptions,
    "utility": UtilityOptions,
    "logprobs": LogprobsOptions,
}

DEFAULTS = SmokeOptions()


def check_usage(command: Sequence[str] = (), options: SmokeOptions = DEFAULTS) -> None:
    """Refuse, by `ValueError`, options that do not go together."""
    if options.quiet and options.verbose:
        raise ValueError("--quiet and --verbose exclude each other.")
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
            raise ValueError(
                "The command names no port: give --handshake-address, or put {port} into it."
            )
