"""`MockEngineConfig` and `ServeOptions`: the options of mock engines, declared once.

The command ``mock-engine`` reads its options, their defaults, bounds and help from these classes. The
module imports little besides attrs, so that showing the help costs no more.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from trio_vllm.endpoint import ADDRESS_FORMS, parse_endpoint
from trio_vllm.errors import ConfigurationError, how_to_install
from trio_vllm.limits import MAX_ENGINES
from trio_vllm.values import frozen

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
STEP_TIME = _section("Time of a step")
REQUEST_TIME = _section("Time of a request")
DISAGGREGATION = _section("Disaggregation")
LIFE = _section("Life")

NEWEST_RELEASE = (0, 33)
"""Major and minor number of the newest vLLM that mock engines behave like."""
POLICIES = ("fcfs", "priority")
PD_ROLES = ("prefill", "decode", "both")
HASH_ALGORITHMS = ("sha256", "sha256_cbor")
DTYPES = ("float16", "bfloat16", "float32")
TASKS = (
    "generate",
    "transcription",
    "realtime",
    "embed",
    "classify",
    "token_embed",
    "token_classify",
    "plugin",
    "embed&token_classify",
    "render",
)
"""What a model may support: upstream's ``vllm/tasks.py``."""


@frozen
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


UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
}
MAX_DEVIATION = 0.7
"""The part of a mean that a drawn time differs from it at most."""
MAX_STD_DEV = 0.3
"""The part of a mean that a standard deviation is at most, so that few draws are cut off."""


def parse_duration(text: str) -> float:
    """Seconds, from a number with or without a unit, such as ``20ms`` or ``1.5``.

    Raises:
      ValueError: The text is no duration.
    """
    found = re.fullmatch(r"\s*([-+]?(?:inf|[0-9.]+(?:e[-+]?[0-9]+)?))\s*([a-zµ]*)\s*", text)
    if found is None or found[2] not in {"", *UNITS}:
        raise ValueError(f"{text!r} is no duration such as 20ms, 1.5s or 2 (seconds)")
    return float(found[1]) * UNITS.get(found[2], 1.0)


def to_seconds(value: float | str) -> float:
    """The converter of each option that is a time: seconds, or a text such as ``20ms``.

    What is no time stays as it is, for the validator, which knows the option's name.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_duration(value)
    return value  # type: ignore[return-value]


def _time(is_fine: Callable[[float], bool], fault: str) -> Check:
    def fault_in(value: Any) -> str | None:
        if not isinstance(value, int | float):
            return "must be a time such as 20ms, 1.5s or 2 (seconds)"
        return None if is_fine(value) else fault

    return Check(fault_in)


# The comparisons also refuse nan.
_seconds = _time(lambda value: value >= 0, "must not be negative")
_finite_seconds = _time(lambda value: 0 <= value < math.inf, "must be finite and not be negative")
_positive_seconds = _time(lambda value: value > 0, "must be more than 0")


@Check
def _factor_from_1(value: Any) -> str | None:
    is_fine = isinstance(value, int | float) and 1 <= value < math.inf
    return None if is_fine else "must be at least 1"


@Check
def _scale(value: Any) -> str | None:
    is_fine = isinstance(value, int | float) and 0 < value < math.inf
    return None if is_fine else "must be more than 0"


@Check
def _share(value: Any) -> str | None:
    is_fine = isinstance(value, int | float) and 0 <= value <= 1
    return None if is_fine else "must be from 0 to 1"


def _one_of(*values: str, optional: bool = False) -> Check:
    def fault_in(value: Any) -> str | None:
        is_fine = value in values or (optional and value is None)
        return None if is_fine else f"must be one of {', '.join(values)}"

    return Check(fault_in)


@Check
def _address(value: Any) -> str | None:
    try:
        parse_endpoint(value, port_required=True)
    except ConfigurationError as error:
        return f"must be {ADDRESS_FORMS} ({error})"
    return None


@Check
def _tasks(value: Any) -> str | None:
    unknown = [task for task in value if task not in TASKS]
    return f"has an unknown task {unknown[0]!r}" if unknown else None


@Check
def _length(value: Any) -> str | None:
    is_fine = isinstance(value, int | float) and (value == 0 or 1 <= value <= MAX_COUNT)
    return None if is_fine else "must be 0 or at least 1"


OUTPUTS = ("random", "prompt", "echo")


@Check
def _output(value: Any) -> str | None:
    if value in OUTPUTS:
        return None
    try:
        _has_text(value)
    except ConfigurationError as error:
        return f"must be one of {', '.join(OUTPUTS)} or a file of answers ({error})"
    return None


def _has_text(path: str) -> bool:
    """Whether a file of answers can be read, and has texts among them."""
    # Only a file needs it, and it imports numpy.
    from trio_vllm.mock.answer_file import read_answer_file  # noqa: PLC0415

    return any(line.text is not None for line in read_answer_file(path))


@Check
def _tokenizer(value: Any) -> str | None:
    if value is None:
        return None
    if importlib.util.find_spec("llguidance") is None:
        return f"takes the package llguidance: {how_to_install('structured')}"
    is_there = (Path(value) / "tokenizer.json").is_file()
    return None if is_there else "must be a folder with a tokenizer.json"


@frozen(kw_only=True)
class KvEventsOptions:
    """Where KV-cache events are published: upstream's ``KVEventsConfig``, with its defaults."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """``zmq`` or ``null``; None is ``zmq`` if events are enabled."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept for a replay."""
    hwm: int = 100_000
    """Batches that a subscriber may be behind."""
    max_queue_size: int = 100_000
    """Without effect: nothing waits for a thread here."""
    topic: str = ""

    @classmethod
    def from_json(cls, text: str) -> KvEventsOptions:
        """Read the JSON of ``--kv-events-config``.

        Raises:
          ValueError: It is no such JSON; says what is wrong.
        """
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object")  # noqa: TRY004  a fault of the text
        known = attrs.fields_dict(cls)
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"has an unknown key {name!r}")
            default = known[name].default
            kind = str if default is None or isinstance(default, str) else type(default)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            is_right = is_number and value >= 0 if kind is int else isinstance(value, kind)
            if not is_right and not (value is None and default is None):
                raise ValueError(f"has a wrong {name}: {value!r}")
        if given.get("publisher") not in {None, "zmq", "null"}:
            raise ValueError("knows the publishers zmq and null")
        return cls(**given)

    @property
    def is_published(self) -> bool:
        """Whether there are sockets."""
        return self.enable_kv_cache_events and self.publisher != "null"


@Check
def _kv_events_config(value: Any) -> str | None:
    if value is None:
        return None
    try:
        KvEventsOptions.from_json(value)
    except ValueError as error:
        is_json = not isinstance(error, json.JSONDecodeError)
        return str(error) if is_json else f"must be JSON ({error})"
    return None


@frozen(kw_only=True)
class MockEngineConfig:
    """How mock engines behave and what they say of themselves.

    Times are seconds, or texts with a unit, such as ``"20ms"`` or ``"1.5s"``.

    Raises:
      ConfigurationError: An option has a value that makes no sense.
    """

    log_requests: bool = False
    """Log a line for each request that is taken, though it may have to wait, and for each that is over."""

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
    output: str = attrs.field(default="random", validator=_output, metadata=TOKENS)
    """random: tokens depend on the request id; prompt: on the prompt and the request's seed, greedy
    ones on the prompt alone; echo: they are the prompt's, which then ends; else a file of JSON lines
    with the answers."""
    output_tokens_mean: float = attrs.field(default=0.0, validator=_length, metadata=TOKENS)
    """How many tokens a request has that names an end-of-text token, which ends it, on average;
    max_tokens still holds. 0 is up to max_tokens."""
    output_tokens_std_dev: float = attrs.field(default=0.0, validator=_length, metadata=TOKENS)
    """Its standard deviation, at most 30 % of it; no length differs by more than 70 %."""
    tokenizer: str | None = attrs.field(default=None, validator=_tokenizer, metadata=TOKENS)
    """The folder of a model, with its tokenizer.json: structured outputs match what is asked for, and
    a file of answers may have texts. Takes the extra trio-vllm[structured]."""
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
    max_lora_rank: int = attrs.field(default=0, validator=_integer(0, 2**31 - 1), metadata=FIGURES)
    """Load adapters of this rank at most, and only those whose adapter_config.json is there. 0 loads
    any, without looking for its files."""
    supported_tasks: tuple[str, ...] = attrs.field(
        default=("generate",), validator=_tasks, metadata=FIGURES
    )
    """The answer to get_supported_tasks, separated by commas; what asks for another task is refused."""
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
    """How blocks are hashed; sha256_cbor is the same in all languages."""
    prefix_caching_hash_seed: str | None = attrs.field(default=None, metadata=SCHEDULING)
    """What the hashes begin with, in place of the variable PYTHONHASHSEED, which vLLM reads."""
    kv_events_config: str | None = attrs.field(
        default=None, validator=_kv_events_config, metadata=SCHEDULING
    )
    """Publish which blocks are cached and evicted; vLLM's JSON, such as
    {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", "topic": "kv-events"}. Each
    further engine has the next port."""
    num_speculative_tokens: int = attrs.field(
        default=0, validator=_integer(0, 256), metadata=SCHEDULING
    )
    """Draft tokens of a request that are verified in each step: speculative decoding."""
    acceptance_rate: float = attrs.field(default=0.7, validator=_share, metadata=SCHEDULING)
    """The probability that a draft token is accepted, if those before it were. Each step gives the
    accepted ones and one more."""
    enable_logging_iteration_details: bool = attrs.field(default=False, metadata=SCHEDULING)
    """Tell in the statistics how many tokens of prompts and outputs each step computed."""

    step_time: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=STEP_TIME
    )
    """How long each step takes."""
    step_time_per_request: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=STEP_TIME
    )
    """And for each request that gets a token but its first."""
    step_time_per_prefill_token: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=STEP_TIME
    )
    """And for each token of a prompt that is computed; cached ones cost nothing."""
    step_time_per_context_token: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=STEP_TIME
    )
    """And for each token that the requests of the step have so far."""
    time_to_first_token: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """From the admission of a request to its first token."""
    time_to_first_token_std_dev: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """Its standard deviation, at most 30 % of it; no time differs by more than 70 %."""
    prefill_overhead: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """What every prompt takes, if there is no --time-to-first-token."""
    prefill_time_per_token: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """What each token of a prompt takes besides that, unless it is cached."""
    prefill_time_std_dev: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """The standard deviation of the time per token."""
    inter_token_latency: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """From one token of a request to the next."""
    inter_token_latency_std_dev: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """Its standard deviation."""
    kv_cache_transfer_latency: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """In place of the prefill, if kv_transfer_params say that it was done elsewhere. With --pd-role
    also beside times of steps."""
    kv_cache_transfer_latency_std_dev: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=REQUEST_TIME
    )
    """Its standard deviation."""
    time_factor_under_load: float = attrs.field(
        default=1.0, validator=_factor_from_1, metadata=REQUEST_TIME
    )
    """How much longer all this takes when max_num_seqs requests run; with fewer it is in between."""

    pd_role: Literal["prefill", "decode", "both"] | None = attrs.field(
        default=None, validator=_one_of(*PD_ROLES, optional=True), metadata=DISAGGREGATION
    )
    """Give and take kv_transfer_params as vLLM's NIXL connector does: keep the blocks of a prompt for
    another engine (prefill), fetch them from one (decode), or both. The transfer takes
    --kv-cache-transfer-latency."""
    kv_lease_duration: float = attrs.field(
        default=30.0, converter=to_seconds, validator=_finite_seconds, metadata=DISAGGREGATION
    )
    """Seconds that blocks are kept which nobody fetches."""
    kv_connector_stats: bool = attrs.field(default=False, metadata=DISAGGREGATION)
    """Tell frontends of transfers as the NIXL connector does (vllm:nixl_*). vLLM's Python frontend shows
    them if it has --kv-transfer-config of its own; without it, it fails at them."""
    kv_side_channel_host: str = attrs.field(default="localhost", metadata=DISAGGREGATION)
    """Where other engines find this one, to tell it that they have fetched blocks."""
    kv_side_channel_port: int = attrs.field(
        default=5600, validator=_integer(1, 65_535), metadata=DISAGGREGATION
    )
    """The port there. Each further engine has the next."""

    step_interval: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_seconds, metadata=LIFE
    )
    """Seconds between the steps of an engine, at least. 0 is as fast as can be, which floods a
    frontend that is slower: it gets to aborts only once it has caught up."""
    startup_duration: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_finite_seconds, metadata=LIFE
    )
    """Time from the first frontend's INIT to READY, as if the engines loaded weights."""
    time_scale: float = attrs.field(default=1.0, validator=_scale, metadata=LIFE)
    """All times that an engine takes are multiplied by it: of a schedule, of KV transfers, the startup,
    and the interval of steps."""
    die_like_an_engine: bool = attrs.field(default=False, metadata=LIFE)
    """Die of what a real engine core does not survive: ENGINE_CORE_DEAD and exit code 1, or deaf or
    mute for good. Off, such a request is refused, and nothing else suffers."""

    def __attrs_post_init__(self) -> None:
        if self.max_lora_rank and not self.max_loras:
            raise ConfigurationError(f"max_lora_rank {self.max_lora_rank} takes max_loras")
        if self.pd_role is None and (given := self._given(DISAGGREGATION)):
            raise ConfigurationError(f"{given[0]} takes pd_role")
        if self.pd_role == "decode" and "kv_lease_duration" in self._given(DISAGGREGATION):
            raise ConfigurationError(
                "kv_lease_duration contradicts pd_role decode, which keeps none"
            )
        for fault in self._contradictions_in_content():
            raise ConfigurationError(fault)
        if self.is_scheduled:
            for fault in self._contradictions():
                raise ConfigurationError(fault)
        elif given := self._given(STEP_TIME) + self._given(REQUEST_TIME):
            raise ConfigurationError(f"{given[0]} takes a schedule, which is off")
        elif self.kv_events is not None:
            raise ConfigurationError("kv_events_config takes a schedule, which is off")

    @functools.cached_property  # asked for each message
    def is_scheduled(self) -> bool:
        """Whether requests are scheduled as vLLM does it."""
        if self.schedule is not None:
            return self.schedule
        return any(getattr(self, name) != default for name, default in _scheduling_defaults())

    @property
    def kv_events(self) -> KvEventsOptions | None:
        """Where KV-cache events are published, if they are."""
        if self.kv_events_config is None:
            return None
        events = KvEventsOptions.from_json(self.kv_events_config)
        return events if events.is_published else None

    @property
    def is_timed_by_request(self) -> bool:
        """Whether tokens come at times of their own, and not all in the step that computes them."""
        return bool(self._times_of_requests)

    @property
    def _times_of_requests(self) -> list[str]:
        given = self._given(REQUEST_TIME)
        if self.pd_role is None:
            return given
        return [name for name in given if name not in OF_TRANSFER]

    def _given(self, section: Section) -> list[str]:
        """The options of a section that are not as they are by default."""
        return [
            field.name
            for field in attrs.fields(MockEngineConfig)
            if field.metadata == section and getattr(self, field.name) != field.default
        ]

    @property
    def vllm_release(self) -> tuple[int, int]:
        """The release of vLLM whose rules hold: the newest, unless an older one is claimed."""
        found = re.match(r"(\d+)\.(\d+)", self.vllm_version)
        return (int(found[1]), int(found[2])) if found else NEWEST_RELEASE

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
        yield from self._contradictions_in_schedule()
        yield from self._contradictions_in_speculation()
        for deviation, mean in DEVIATIONS.items():
            yield from self._contradictions_in_deviation(deviation, mean)
        of_steps, of_requests = self._given(STEP_TIME), self._times_of_requests
        if self.step_interval:
            of_steps.append("step_interval")
        if of_steps and of_requests:
            yield (
                f"{of_requests[0]} is a time of a request, and {of_steps[0]} one of a step: there can"
                " be one kind only"
            )

    def _contradictions_in_content(self) -> Iterator[str]:
        yield from self._contradictions_in_deviation("output_tokens_std_dev", "output_tokens_mean")
        if self.output == "echo" and self.output_tokens_mean:
            yield "output_tokens_mean contradicts output echo, which is as long as the prompt"
        if self.output not in OUTPUTS and self.tokenizer is None and _has_text(self.output):
            yield f"output {self.output} has a text, which takes tokenizer"

    def _contradictions_in_deviation(self, deviation: str, mean: str) -> Iterator[str]:
        if getattr(self, deviation) > MAX_STD_DEV * getattr(self, mean):
            yield (
                f"{deviation} {getattr(self, deviation)} is more than {MAX_STD_DEV:.0%} of {mean}"
                f" {getattr(self, mean)}"
            )

    def _contradictions_in_speculation(self) -> Iterator[str]:
        if self.num_speculative_tokens and (given := self._times_of_requests):
            yield f"num_speculative_tokens takes times of a step, and {given[0]} is one of a request"
        default = attrs.fields(MockEngineConfig).acceptance_rate.default
        if self.acceptance_rate != default and not self.num_speculative_tokens:
            yield "acceptance_rate takes num_speculative_tokens"

    def _contradictions_in_schedule(self) -> Iterator[str]:
        budget, length = self.max_num_batched_tokens, self.max_model_len
        if self.num_blocks < self._blocks_of_longest:
            longest = max(1, (self.num_blocks - 1) * self.block_size)
            yield (
                f"num_gpu_blocks {self.num_blocks} are too few for one request of max_model_len"
                f" {length}: with block_size {self.block_size} it takes {self._blocks_of_longest};"
                f" set max_model_len to {longest} or less"
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


OF_TRANSFER = ("kv_cache_transfer_latency", "kv_cache_transfer_latency_std_dev")
"""Times that pass while a request waits, if it fetches blocks; they go with those of steps too."""
DEFAULT_BLOCKS = 32_768
TURNS_ON = (SCHEDULING, STEP_TIME, REQUEST_TIME)
DEVIATIONS = {
    "time_to_first_token_std_dev": "time_to_first_token",
    "prefill_time_std_dev": "prefill_time_per_token",
    "inter_token_latency_std_dev": "inter_token_latency",
    "kv_cache_transfer_latency_std_dev": "kv_cache_transfer_latency",
}


@functools.cache
def _scheduling_defaults() -> Sequence[tuple[str, Any]]:
    """What, if it is not so, turns the schedule on."""
    fields = attrs.fields(MockEngineConfig)
    return [
        (field.name, field.default)
        for field in fields
        if field.metadata in TURNS_ON and field.name not in {"schedule", "prefix_caching_hash_seed"}
    ]


@frozen(kw_only=True)
class ServeOptions:
    """Where mock engines serve, how many, and for how long.

    Times are seconds, or texts with a unit, such as ``"20ms"`` or ``"1.5s"``.

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
        default=math.inf, converter=to_seconds, validator=_positive_seconds, metadata=LIFE
    )
    """Seconds that each answer of the frontend may take during the startup."""
    heartbeat_timeout: float = attrs.field(
        default=math.inf, converter=to_seconds, validator=_positive_seconds, metadata=LIFE
    )
    """Seconds after which a frontend that does not answer ZeroMQ's heartbeats has gone. Not for one
    that uses the zmq.rs library: it breaks the connection when it sees a heartbeat."""
    shutdown_timeout: float = attrs.field(
        default=0.0, converter=to_seconds, validator=_seconds, metadata=LIFE
    )
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
