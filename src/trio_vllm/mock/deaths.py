"""`Deaths`: what a real engine core does not survive, by rule, with the reason in vLLM.

An engine core has three threads, and each dies in its own way. If the main loop raises, the engine says
ENGINE_CORE_DEAD to every client and its process ends. If the thread that takes input raises, requests
that run come to their end, and then the engine hears of nothing any more. If the thread that sends
raises, the engine goes on, and nobody hears of it. In the last two cases the connections of that thread
are closed, and the process lives on.

Sources: ``vllm/v1/engine/core.py`` (``run_engine_core``, ``process_input_sockets``,
``process_output_sockets``, ``add_request``), ``vllm/v1/core/sched/scheduler.py`` (``add_request``),
``vllm/sampling_params.py`` and ``vllm/lora/request.py`` (``__post_init__``), of 0.33.0.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Iterator

from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.late_interaction import LateQueries, late_params
from trio_vllm.protocol import (
    GENERATION_TASKS,
    UNENCODABLE_RESULTS,
    EngineCoreRequest,
    EngineCoreSamplingParams,
    Frames,
    LoRARequest,
    UtilityRequest,
)
from trio_vllm.values import define, frozen


class Thread(enum.Enum):
    """Which thread of an engine core dies."""

    MAIN = "main loop"
    INPUT = "input thread"
    OUTPUT = "output thread"


@frozen
class Death:
    """What an engine died of."""

    thread: Thread
    cause: str
    """What it was sent, in words."""
    reason: str
    """Why that is the end, in vLLM."""

    def __str__(self) -> str:
        return f"{self.cause}: {self.reason}"


@define
class Situation:
    """What an engine is and has, as far as it matters to a request that comes."""

    config: MockEngineConfig
    client_count: int
    in_flight: Callable[[str], bool]
    """Whether a request of this id is unfinished, and no chunk can follow it."""
    adapter_fault: Callable[[LoRARequest], str | None]
    """Why an adapter cannot be loaded, if so."""
    queries: LateQueries

    @property
    def tasks(self) -> Collection[str]:
        """What the model supports."""
        return self.config.supported_tasks


@frozen
class RequestRule:
    """A kind of request that kills, and why."""

    name: str
    thread: Thread
    reason: str
    applies: Callable[[EngineCoreRequest, Situation], bool]
    at_once: bool = False
    """Whether it kills when it is added, and not when it runs."""


@frozen
class ParamsRule:
    """Sampling parameters that vLLM's constructor refuses while the message is decoded."""

    name: str
    applies: Callable[[EngineCoreSamplingParams], bool]


EXECUTOR_FAILED = b"\x04"

PARAMS_RULES = (
    ParamsRule("presence_penalty", lambda p: not -2 <= p.presence_penalty <= 2),
    ParamsRule("frequency_penalty", lambda p: not -2 <= p.frequency_penalty <= 2),
    ParamsRule("repetition_penalty", lambda p: not 0 < p.repetition_penalty < math.inf),
    ParamsRule("temperature", lambda p: not 0 <= p.temperature <= 2),
    ParamsRule("top_p", lambda p: not 0 < p.top_p <= 1),
    ParamsRule("top_k", lambda p: p.top_k < -1),
    ParamsRule("min_p", lambda p: not 0 <= p.min_p <= 1),
    ParamsRule("max_tokens", lambda p: p.max_tokens is not None and p.max_tokens < 1),
    ParamsRule("min_tokens", lambda p: p.max_tokens is not None and p.min_tokens > p.max_tokens),
    ParamsRule("logprobs", lambda p: p.logprobs is not None and p.logprobs < -1),
    ParamsRule(
        "prompt_logprobs", lambda p: p.prompt_logprobs is not None and p.prompt_logprobs < -1
    ),
    ParamsRule(
        "stream_interval", lambda p: p.stream_interval is not None and p.stream_interval < 1
    ),
    ParamsRule("n", lambda p: p.n < 1 or (p.n > 1 and p.temperature < 1e-5)),
    ParamsRule("structured_outputs", lambda p: _has_wrong_constraints(p)),
    ParamsRule("repetition_detection", lambda p: _has_wrong_patterns(p)),
)
"""``SamplingParams._verify_args`` and the constructors of what it holds."""


def generates(tasks: Collection[str]) -> bool:
    """Whether a model with these tasks samples tokens."""
    return any(task in GENERATION_TASKS for task in tasks)


def _has_wrong_constraints(params: EngineCoreSamplingParams) -> bool:
    outputs = params.structured_outputs
    if outputs is None:
        return False
    return sum(getattr(outputs, name) is not None for name in outputs.CONSTRAINTS) != 1


def _has_wrong_patterns(params: EngineCoreSamplingParams) -> bool:
    patterns = params.repetition_detection
    if patterns is None:
        return False
    is_endless = patterns.max_pattern_size > 0 and patterns.min_count < 2
    return patterns.min_pattern_size > patterns.max_pattern_size or is_endless


def prompt_length(wire: EngineCoreRequest) -> int:
    """How many tokens, or embeddings, a prompt has; those of no width do not count.

    Any number of them takes no memory in the message, and so may be any.
    """
    if wire.prompt_token_ids is not None:
        return len(wire.prompt_token_ids)
    if wire.prompt_embeds is not None and wire.prompt_embeds.shape:
        count, *sizes = wire.prompt_embeds.shape
        return 0 if 0 in sizes else count
    return 0


def _params(wire: EngineCoreRequest) -> EngineCoreSamplingParams:
    return wire.sampling_params or EngineCoreSamplingParams()


def _max(token_ids: Iterable[int] | None) -> int:
    return max(token_ids or (), default=-1)


def _is_unknown_query(wire: EngineCoreRequest, situation: Situation) -> bool:
    late = late_params(wire, "score_doc")
    return late is not None and late.query_key not in situation.queries


def _is_unused_query(wire: EngineCoreRequest, _: Situation) -> bool:
    late = late_params(wire, "cache_query")
    return late is not None and late.query_uses is None


REQUEST_RULES = (
    RequestRule(
        "an adapter without a path",
        Thread.INPUT,
        "LoRARequest.__post_init__ raises while the message is decoded",
        lambda wire, _: wire.lora_request is not None and not wire.lora_request.lora_path,
        at_once=True,
    ),
    RequestRule(
        "a pooling request that wants its output in parts",
        Thread.INPUT,
        "PoolingParams.__post_init__ raises while the message is decoded",
        lambda wire, _: wire.pooling_params is not None and wire.pooling_params.output_kind != 2,
        at_once=True,
    ),
    RequestRule(
        "a client_index that no client has",
        Thread.OUTPUT,
        "process_output_sockets has no socket of that index",
        lambda wire, at: not 0 <= wire.client_index < at.client_count,
        at_once=True,
    ),
    RequestRule(
        "an id that is in flight",
        Thread.MAIN,
        "Scheduler.add_request asserts that ids are new",
        lambda wire, at: at.in_flight(wire.request_id),
        at_once=True,
    ),
    RequestRule(
        "a pooling task that the model does not support",
        Thread.MAIN,
        "EngineCore.add_request raises ValueError",
        lambda wire, at: (
            wire.pooling_params is not None and (wire.pooling_params.task not in at.tasks)
        ),
        at_once=True,
    ),
    RequestRule(
        "sampling parameters for a model that only pools",
        Thread.MAIN,
        "the model runner finds no pooling parameters for a request of its batch",
        lambda wire, at: wire.pooling_params is None and not generates(at.tasks),
    ),
    RequestRule(
        "an empty prompt",
        Thread.MAIN,
        "the scheduler asserts that there are tokens to compute",
        lambda wire, _: prompt_length(wire) < 1,
    ),
    RequestRule(
        "a prompt that leaves no room in max_model_len",
        Thread.MAIN,
        "the scheduler finds no token that it could compute, or the batch has no room for it",
        lambda wire, at: prompt_length(wire) >= at.config.max_model_len,
    ),
    RequestRule(
        "prompt_token_ids beyond the vocabulary",
        Thread.MAIN,
        "the embedding of the token is out of range",
        lambda wire, at: _max(wire.prompt_token_ids) >= at.config.vocab_size,
    ),
    RequestRule(
        "an adapter that cannot be loaded",
        Thread.MAIN,
        "the worker loads it in a step, outside of any guard",
        lambda wire, at: (
            wire.lora_request is not None
            and at.config.max_loras > 0
            and at.adapter_fault(wire.lora_request) is not None
        ),
    ),
    RequestRule(
        "stop tokens beyond the vocabulary, with min_tokens",
        Thread.MAIN,
        "they are masked by index until min_tokens is reached",
        lambda wire, at: (
            _params(wire).min_tokens > 0
            and max(_max(_params(wire).stop_token_ids), _max(_params(wire).all_stop_token_ids))
            >= at.config.vocab_size
        ),
    ),
    RequestRule(
        "logit_bias beyond the vocabulary",
        Thread.MAIN,
        "logits are changed by index",
        lambda wire, at: _max(_params(wire).logit_bias) >= at.config.vocab_size,
    ),
    RequestRule(
        "allowed_token_ids beyond the vocabulary",
        Thread.MAIN,
        "all other logits are masked by index",
        lambda wire, at: _max(_params(wire).allowed_token_ids) >= at.config.vocab_size,
    ),
    RequestRule(
        "logprob_token_ids beyond the vocabulary",
        Thread.MAIN,
        "log probabilities are gathered by index",
        lambda wire, at: _max(_params(wire).logprob_token_ids) >= at.config.vocab_size,
    ),
    RequestRule(
        "more logprobs than the vocabulary has tokens",
        Thread.MAIN,
        "the most probable tokens are chosen among fewer",
        lambda wire, at: (_params(wire).logprobs or 0) > at.config.vocab_size,
    ),
    RequestRule(
        "a document of a late-interaction query that is not there",
        Thread.MAIN,
        "the pooler raises for a key that it does not keep",
        _is_unknown_query,
    ),
    RequestRule(
        "a late-interaction query that does not tell its uses",
        Thread.MAIN,
        "the pooler asserts that they are told",
        _is_unused_query,
    ),
)
"""What kills an engine once it is decoded, or while it is; the first that applies is the cause."""


@define
class Deaths:
    """Says of each message whether an engine dies of it."""

    situation: Situation

    def of_bytes(self, frames: Frames, fault: str) -> Death:
        """The death by a message that cannot be read."""
        if frames and bytes(frames[0]) == EXECUTOR_FAILED:
            return Death(Thread.MAIN, "EXECUTOR_FAILED", "the main loop raises for its workers")
        return Death(Thread.INPUT, fault, "process_input_sockets decodes outside of any guard")

    def of_request(self, wire: EngineCoreRequest, *, is_refused: bool) -> Death | None:
        """The death by a request, if it is one that kills.

        Args:
          wire: The request.
          is_refused: Whether the main loop takes no request of its kind now.
        """
        for death in self._causes(wire):
            if death.thread is not Thread.MAIN or not is_refused:
                return death
        return None

    def _causes(self, wire: EngineCoreRequest) -> Iterator[Death]:
        who = f"request {wire.request_id!r}"
        for params_rule in PARAMS_RULES if wire.sampling_params is not None else ():
            if params_rule.applies(_params(wire)):
                reason = "a constructor refuses it while the message is decoded"
                yield Death(Thread.INPUT, f"{who} with a wrong {params_rule.name}", reason)
        if fails_in_preprocessing(wire):
            return
        for rule in REQUEST_RULES:
            runs = not wire.abort_immediately
            if (runs or rule.at_once) and rule.applies(wire, self.situation):
                yield Death(rule.thread, f"{who} with {rule.name}", rule.reason)

    def of_call(self, call: UtilityRequest) -> Death | None:
        """The death by a utility call, if it is one that kills."""
        who = f"utility call {call.method!r}"
        if call.method == "handle_fault_tolerance":
            reason = "process_input_sockets has nobody to hand it to"
            return Death(Thread.INPUT, who, reason)
        if not 0 <= call.client_index < self.situation.client_count:
            reason = "process_output_sockets has no socket of that index"
            return Death(Thread.OUTPUT, f"{who} with a client_index that no client has", reason)
        if call.method == "collective_rpc" and call.args and call.args[0] in UNENCODABLE_RESULTS:
            reason = "process_output_sockets cannot encode the result"
            return Death(Thread.OUTPUT, f"{who} of {call.args[0]!r}", reason)
        return None


def fails_in_preprocessing(wire: EngineCoreRequest) -> bool:
    """Whether the input thread answers a request with an error, under a guard; it does not say why."""
    if wire.sampling_params is None:
        return wire.pooling_params is None
    return wire.pooling_params is None and wire.sampling_params.max_tokens is None
