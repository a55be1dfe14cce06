"""The options of ``mock-engine``, each documented once, and what makes no sense among them.

Those of vLLM's Rust ``vllm-mock-engine`` have its names, defaults and meaning.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from cyclopts import CycloptsError, Group, Parameter
from cyclopts.validators import Number

MAX_ENGINES = 2**16


ENGINES = Group("Engines", sort_key=0)
TOKENS = Group("Tokens", sort_key=1)
FIGURES = Group("What the engines say of themselves", sort_key=2)
LIFE = Group("Life", sort_key=3)


def _check_address(_type: Any, value: str) -> None:
    if re.fullmatch(r"ipc://.+", value):
        return
    port = re.fullmatch(r"tcp://.+:([0-9]{1,5})", value)
    if port is None or not 1 <= int(port[1]) <= 65535:
        raise ValueError("Must be tcp://HOST:PORT or ipc://PATH.")


def _check_seconds(_type: Any, value: float | None) -> None:
    if value is not None and not value >= 0:  # also refuses what is not a number
        raise ValueError("Must not be negative.")


def _check_startup_timeout(_type: Any, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError("Must be more than 0.")


def _number(low: int, high: int, group: Group = ENGINES) -> Parameter:
    return Parameter(validator=Number(gte=low, lte=high), group=group)


@attrs.frozen(kw_only=True, slots=False)
class MockOptions:
    """What ``mock-engine`` can be told."""

    handshake_address: Annotated[str, Parameter(group=ENGINES, validator=_check_address)] = (
        "tcp://127.0.0.1:29550"
    )
    """Where the frontend waits for engines, or will wait."""
    engine_count: Annotated[int, _number(1, MAX_ENGINES)] = 1
    """How many engines there are."""
    processes: Annotated[int, _number(1, MAX_ENGINES)] = 1
    """How many processes they are spread over, since one can use no more than one core."""
    engine_start_index: Annotated[int, _number(0, MAX_ENGINES - 1)] = 0
    """The index of the first one; with 4, a second host adds engines to the four of the first."""
    config: Path | None = None
    """A TOML file with options."""
    log_requests: bool = False
    """Log a line for each request that starts or ends."""
    debug: bool = False
    """Print the traceback of a failure."""

    output_token_chunk_size: Annotated[int, _number(1, 65_535, TOKENS)] = 1
    """Tokens that each request gets per step."""
    vocab_size: Annotated[int, _number(1, 2**31, TOKENS)] = 32_000
    """Tokens are drawn from 0 up to, but without, this number."""
    seed: Annotated[int, _number(0, 2**64 - 1, TOKENS)] = 0
    """Tokens depend on this, the engine's index and the request id, and on nothing else."""
    stop_at_eos: Annotated[bool, Parameter(group=TOKENS)] = False
    """Let a request's end-of-text token end it when it is drawn. Off, lengths are exact. Stop
    tokens that a request names always end it."""
    embedding_size: Annotated[int, _number(1, 2**20, TOKENS)] = 64
    """Numbers in the answer to a pooling request that does not say."""

    max_model_len: Annotated[int, _number(1, 2**63 - 1, FIGURES)] = 1_048_576
    """Prompt and output tokens together never exceed this."""
    num_gpu_blocks: Annotated[int, _number(0, 2**63 - 1, FIGURES)] = 0
    """Only reported."""
    block_size: Annotated[int, _number(1, 2**63 - 1, FIGURES)] = 16
    """Only reported."""
    kv_cache_size_tokens: Annotated[int | None, _number(0, 2**63 - 1, FIGURES)] = None
    """Only reported."""
    max_num_seqs: Annotated[int, _number(1, 2**63 - 1, FIGURES)] = 256
    """Only reported: all requests run at once."""
    max_num_batched_tokens: Annotated[int, _number(1, 2**63 - 1, FIGURES)] = 8192
    """Only reported: a prompt is prefilled in one step."""
    dtype: Annotated[Literal["float16", "bfloat16", "float32"], Parameter(group=FIGURES)] = (
        "float32"
    )
    """Only reported."""
    vllm_version: Annotated[str, Parameter(group=FIGURES)] = "0.33.0"
    """Only reported."""
    instance_id: Annotated[str, Parameter(group=FIGURES)] = "mock-engine"
    """Only reported."""
    max_loras: Annotated[int, _number(0, 2**31 - 1, FIGURES)] = 0
    """How many adapters an engine holds; 0 is an engine without LoRA."""
    supported_tasks: Annotated[str, Parameter(group=FIGURES)] = "generate"
    """The answer to get_supported_tasks, separated by commas. Pooling is served all the same."""
    lockstep: Annotated[bool, Parameter(group=FIGURES)] = False
    """Follow data-parallel waves, as engines of a mixture-of-experts model do."""

    step_interval: Annotated[float, Parameter(group=LIFE, validator=_check_seconds)] = 0.0
    """Seconds between the steps of an engine, at least. 0 is as fast as can be, which floods a
    frontend that is slower: it gets to aborts only once it has caught up."""
    reconnect: Annotated[bool, Parameter(group=LIFE, negative="--no-reconnect")] = True
    """When the frontend has gone, wait for the next one."""
    startup_timeout: Annotated[
        float | None, Parameter(group=LIFE, validator=_check_startup_timeout)
    ] = None
    """Seconds that each answer of the frontend may take during the startup. [default: no limit]"""
    shutdown_timeout: Annotated[float, Parameter(group=LIFE, validator=_check_seconds)] = 0.0
    """Seconds that requests may take to end after SIGINT or SIGTERM; then they are aborted. A
    second signal ends all at once."""


def check_together(options: MockOptions = MockOptions()) -> None:
    """Refuse, by `CycloptsError`, options that make sense one by one, but not together."""
    last = options.engine_start_index + options.engine_count - 1
    if last >= MAX_ENGINES:
        reason = f"The last engine's index would be {last}, and {MAX_ENGINES - 1} at most."
    elif options.processes > options.engine_count:
        reason = f"--processes {options.processes} is more than --engine-count."
    elif options.processes > 1 and options.lockstep:
        reason = "--lockstep takes --processes 1: engines agree on a wave only within a process."
    else:
        return
    raise CycloptsError(msg=reason)


def engines_in_words(options: MockOptions) -> str:
    """Name the engines."""
    first = options.engine_start_index
    last = first + options.engine_count - 1
    return f"engine {first}" if first == last else f"engines {first} to {last}"
