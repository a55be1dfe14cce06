"""`MockEngineConfig` and `ServeOptions`: the options of mock engines, declared once.

The command ``mock-engine`` reads its options, their defaults, bounds and help from these classes. The
module imports attrs alone, so that showing the help costs no more.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SCHEDULING = _section("Scheduling")
LIFE = _section("Life")

POLICIES = ("fcfs", "priority")
HASH_ALGORITHMS = ("sha256", "sha256_cbor")
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


def _one_of(*values: str) -> Check:
    return Check(lambda value: None if value in values else f"must be one of {', '.join(values)}")


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
    """Prompt and output tokens of a request together never exceed this."""
    kv_cache_size_tokens: int | None = attrs.field(
        default=None, validator=_integer(0, optional=True), metadata=FIGURES
    )
    """Only reported."""
    dtype: Literal["float16", "bfloat16", "float32"] = attrs.field(
        default="float32", validator=_one_of(*DTYPES), metadata=FIGURES
    )
    """Only reported."""
    vllm_version: str = attrs.field(default="0.33.0", metadata=FIGURES)
    """What the engines say; with a schedule 0.32 has its own rules."""
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

    schedule: bool | None = attrs.field(default=None, metadata=SCHEDULING)
    """Schedule, cache and preempt as vLLM does, step by step. On by itself as soon as another option
    of this section is given. Off, the options of this section are only what the engines say of
    themselves, and all requests run at once."""
    max_num_seqs: int = attrs.field(default=256, validator=_integer(1), metadata=SCHEDULING)
    """How many requests run at once."""
    max_num_batched_tokens: int = attrs.field(
        default=8192, validator=_integer(1), metadata=SCHEDULING
    )
    """Tokens, of prompts and outputs, that are computed in one step."""
    enable_chunked_prefill: bool = attrs.field(default=True, metadata=SCHEDULING)
    """Compute a prompt that does not fit into a step in several."""
    long_prefill_token_threshold: int = attrs.field(
        default=0, validator=_integer(0), metadata=SCHEDULING
    )
    """Tokens that one prompt may get in a step while there are other requests; 0 is no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = attrs.field(
        default="fcfs", validator=_one_of(*POLICIES), metadata=SCHEDULING
    )
    """Who is admitted first and preempted last: by arrival, or by the priority of requests."""
    num_gpu_blocks: int = attrs.field(default=0, validator=_integer(0), metadata=SCHEDULING)
    """Blocks of the KV cache. 0 are 32,768, or more if one request of the model's length takes more;
    without a schedule it is what the engines say."""
    block_size: int = attrs.field(default=16, validator=_integer(1), metadata=SCHEDULING)
    """Tokens in a block of the KV cache."""
    enable_prefix_caching: bool = attrs.field(default=True, metadata=SCHEDULING)
    """Find blocks of earlier requests that begin with the same tokens; they take no time."""
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor"] = attrs.field(
        default="sha256", validator=_one_of(*HASH_ALGORITHMS), metadata=SCHEDULING
    )
    """How blocks are hashed. The seed is PYTHONHASHSEED, as in vLLM."""
    enable_logging_iteration_details: bool = attrs.field(default=False, metadata=SCHEDULING)
    """Tell in the statistics how many tokens of prompts and outputs each step computed."""

    step_interval: float = attrs.field(default=0.0, validator=_seconds, metadata=LIFE)
    """Seconds between the steps of an engine, at least. 0 is as fast as can be, which floods a
    frontend that is slower: it gets to aborts only once it has caught up."""

    def __attrs_post_init__(self) -> None:
        if self.is_scheduled:
            for fault in self._contradictions():
                raise ConfigurationError(fault)

    @property
    def is_scheduled(self) -> bool:
        """Whether requests are scheduled as vLLM does it."""
        if self.schedule is not None:
            return self.schedule
        return any(getattr(self, name) != default for name, default in _scheduling_defaults())

    @property
    def release(self) -> tuple[int, int]:
        """The release of vLLM whose rules hold: 0.33, unless an older one is claimed."""
        found = re.match(r"(\d+)\.(\d+)", self.vllm_version)
        return (int(found[1]), int(found[2])) if found else (0, 33)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, with the one that nobody gets."""
        if self.num_gpu_blocks or not self.is_scheduled:
            return self.num_gpu_blocks
        return max(DEFAULT_BLOCKS, self._blocks_of_longest)

    @property
    def _blocks_of_longest(self) -> int:
        """What one request of the model's length takes."""
        return -(-self.max_model_len // self.block_size) + 1

    def _contradictions(self) -> Iterator[str]:
        budget, length = self.max_num_batched_tokens, self.max_model_len
        if self.num_blocks < self._blocks_of_longest:
            yield (
                f"num_gpu_blocks {self.num_blocks} are too few for one request of max_model_len"
                f" {length}: with block_size {self.block_size} it takes {self._blocks_of_longest}"
            )
        if budget < self.max_num_seqs:
            yield (
                f"max_num_batched_tokens {budget} is less than max_num_seqs {self.max_num_seqs}:"
                " each request gets a token in a step"
            )
        if self.long_prefill_token_threshold > length:
            yield (
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} is more than"
                f" max_model_len {length}"
            )
        if self.long_prefill_token_threshold > budget:
            yield (
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} is more than"
                f" max_num_batched_tokens {budget}"
            )
        if not self.enable_chunked_prefill and budget < length:
            yield (
                f"max_num_batched_tokens {budget} is less than max_model_len {length}, which takes"
                " enable_chunked_prefill"
            )
        if self.output_token_chunk_size > 1:
            yield (
                f"output_token_chunk_size {self.output_token_chunk_size} contradicts a schedule, in"
                " which a step makes one token of each request"
            )


DEFAULT_BLOCKS = 32_768


@functools.cache
def _scheduling_defaults() -> Sequence[tuple[str, Any]]:
    """What, if it is not so, turns the schedule on."""
    fields = attrs.fields(MockEngineConfig)
    return [
        (field.name, field.default)
        for field in fields
        if field.metadata == SCHEDULING and field.name != "schedule"
    ]


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
