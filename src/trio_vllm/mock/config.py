"""`MockEngineConfig` and `ServeOptions`: the options of mock engines, declared once.

The command ``mock-engine`` reads its options, their defaults, bounds and help from these classes. The
module imports attrs alone, so that showing the help costs no more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from trio_vllm.errors import ConfigurationError

MAX_ENGINES = 2**16
"""Engine ids have two bytes."""
MAX_VOCAB_SIZE = 2**31
"""With log probabilities, token ids are signed 32-bit integers on the wire."""
MAX_SEED = 2**64 - 1
MAX_COUNT = 2**63 - 1
MAX_VECTOR_SIZE = 2**20

Section = Mapping[str, str]


def _section(title: str) -> Section:
    return {"section": title}


# Under which heading the help shows an option.
ENGINES = _section("Engines")
TOKENS = _section("Tokens")
FIGURES = _section("What the engines say of themselves")
LIFE = _section("Life")

DTYPES = ("float16", "bfloat16", "float32")


@attrs.frozen
class Check:
    """Validates one option; raises `ConfigurationError` that names it."""

    fault_in: Callable[[Any], str | None]
    """Returns what is wrong with a value, to be read after the option's name."""

    def __call__(self, _instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        fault = self.fault_in(value)
        if fault is not None:
            raise ConfigurationError(f"{attribute.name} {fault}, got {value!r}")


def _integer(low: int, high: int = MAX_COUNT, *, optional: bool = False) -> Check:
    def fault_in(value: Any) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, int):
            return "must be an integer"
        if value < low:
            return f"must be >= {low}"
        return f"must be <= {high}" if value > high else None

    return Check(fault_in)


@Check
def _seconds(value: Any) -> str | None:
    # the comparison also refuses nan
    return None if isinstance(value, int | float) and value >= 0 else "must not be negative"


@Check
def _positive_seconds(value: Any) -> str | None:
    return None if isinstance(value, int | float) and value > 0 else "must be more than 0"


@Check
def _dtype(value: Any) -> str | None:
    return None if value in DTYPES else f"must be one of {', '.join(DTYPES)}"


@Check
def _address(value: Any) -> str | None:
    if re.fullmatch(r"ipc://.+", value):
        return None
    port = re.fullmatch(r"tcp://.+:([0-9]{1,5})", value)
    if port is None or not 1 <= int(port[1]) <= 65535:
        return "must be tcp://HOST:PORT or ipc://PATH"
    return None


@attrs.frozen(kw_only=True)
class MockEngineConfig:
    """How mock engines behave and what they say of themselves.

    Raises:
      ConfigurationError: An option has a value that makes no sense.
    """

    log_requests: bool = False
    """Log a line for each request that starts or ends."""

    output_token_chunk_size: int = attrs.field(
        default=1, validator=_integer(1, 2**16 - 1), metadata=TOKENS
    )
    """Tokens that each request gets per step."""
    vocab_size: int = attrs.field(
        default=32_000, validator=_integer(1, MAX_VOCAB_SIZE), metadata=TOKENS
    )
    """Tokens are drawn from 0 up to, but without, this number."""
    seed: int = attrs.field(default=0, validator=_integer(0, MAX_SEED), metadata=TOKENS)
    """Tokens depend on this, the engine's index and the request id, and on nothing else."""
    stop_at_eos: bool = attrs.field(default=False, metadata=TOKENS)
    """Let a request's end-of-text token end it when it is drawn. Off, lengths are exact. Stop
    tokens that a request names always end it."""
    embedding_size: int = attrs.field(
        default=64, validator=_integer(1, MAX_VECTOR_SIZE), metadata=TOKENS
    )
    """Numbers in the answer to a pooling request that does not say."""
    num_labels: int = attrs.field(
        default=1, validator=_integer(1, MAX_VECTOR_SIZE), metadata=TOKENS
    )
    """Probabilities in the answer to a request to classify. With 1, as of models that score, it is
    any number from 0 to 1, otherwise they sum to 1."""

    max_model_len: int = attrs.field(default=1_048_576, validator=_integer(1), metadata=FIGURES)
    """Prompt and output tokens together never exceed this."""
    num_gpu_blocks: int = attrs.field(default=0, validator=_integer(0), metadata=FIGURES)
    """Only reported."""
    block_size: int = attrs.field(default=16, validator=_integer(1), metadata=FIGURES)
    """Only reported."""
    kv_cache_size_tokens: int | None = attrs.field(
        default=None, validator=_integer(0, optional=True), metadata=FIGURES
    )
    """Only reported."""
    max_num_seqs: int = attrs.field(default=256, validator=_integer(1), metadata=FIGURES)
    """Only reported: all requests run at once."""
    max_num_batched_tokens: int = attrs.field(default=8192, validator=_integer(1), metadata=FIGURES)
    """Only reported: a prompt is prefilled in one step."""
    dtype: Literal["float16", "bfloat16", "float32"] = attrs.field(
        default="float32", validator=_dtype, metadata=FIGURES
    )
    """Only reported."""
    vllm_version: str = attrs.field(default="0.33.0", metadata=FIGURES)
    """Only reported."""
    instance_id: str = attrs.field(default="mock-engine", metadata=FIGURES)
    """Only reported."""
    max_loras: int = attrs.field(default=0, validator=_integer(0, 2**31 - 1), metadata=FIGURES)
    """How many adapters an engine holds; 0 is an engine without LoRA."""
    supported_tasks: tuple[str, ...] = attrs.field(default=("generate",), metadata=FIGURES)
    """The answer to get_supported_tasks, separated by commas. Pooling is served all the same."""
    lockstep: bool = attrs.field(default=False, metadata=FIGURES)
    """Follow data-parallel waves, as engines of a mixture-of-experts model do."""
    enable_sleep_mode: bool = attrs.field(default=True, metadata=FIGURES)
    """Only reported."""

    step_interval: float = attrs.field(default=0.0, validator=_seconds, metadata=LIFE)
    """Seconds between the steps of an engine, at least. 0 is as fast as can be, which floods a
    frontend that is slower: it gets to aborts only once it has caught up."""


@attrs.frozen(kw_only=True)
class ServeOptions:
    """Where mock engines serve, how many, and for how long.

    Raises:
      ConfigurationError: An option has a value that makes no sense.
    """

    handshake_address: str = attrs.field(
        default="tcp://127.0.0.1:29550", validator=_address, metadata=ENGINES
    )
    """Where the frontend waits for engines, or will wait."""
    engine_count: int = attrs.field(default=1, validator=_integer(1, MAX_ENGINES), metadata=ENGINES)
    """How many engines there are."""
    engine_start_index: int = attrs.field(
        default=0, validator=_integer(0, MAX_ENGINES - 1), metadata=ENGINES
    )
    """The index of the first one; with 4, a second host adds engines to the four of the first."""
    reconnect: bool = attrs.field(default=True, metadata=LIFE)
    """When the frontend has gone, wait for the next one."""
    startup_timeout: float = attrs.field(
        default=math.inf, validator=_positive_seconds, metadata=LIFE
    )
    """Seconds that each answer of the frontend may take during the startup."""
    shutdown_timeout: float = attrs.field(default=0.0, validator=_seconds, metadata=LIFE)
    """Seconds that requests may take to end after SIGINT or SIGTERM; then they are aborted. A
    second signal ends all at once."""

    def __attrs_post_init__(self) -> None:
        if self.last_index >= MAX_ENGINES:
            raise ConfigurationError(
                f"The last engine's index would be {self.last_index},"
                f" and {MAX_ENGINES - 1} at most."
            )

    @property
    def last_index(self) -> int:
        """The index of the last engine."""
        return self.engine_start_index + self.engine_count - 1

    @property
    def engines_in_words(self) -> str:
        """Names the engines, for messages."""
        first, last = self.engine_start_index, self.last_index
        return f"engine {first}" if first == last else f"engines {first} to {last}"
