"""`StepTimes` says how long a step of an engine takes, `RequestTimes` the tokens of a request."""

from __future__ import annotations

from trio_vllm.mock.config import MockEngineConfig
from trio_vllm.mock.scheduling import Step
from trio_vllm.mock.spread import Spread
from trio_vllm.values import frozen


@frozen
class StepTimes:
    """The duration of a step, from what it computes."""

    base: float
    per_request: float
    per_prefill_token: float
    per_context_token: float

    @classmethod
    def of(cls, config: MockEngineConfig) -> StepTimes:
        """The times that are asked for, to scale."""
        scale = config.time_scale
        return cls(
            max(config.step_time, config.step_interval) * scale,
            config.step_time_per_request * scale,
            config.step_time_per_prefill_token * scale,
            config.step_time_per_context_token * scale,
        )

    @property
    def is_zero(self) -> bool:
        """Whether steps take no time."""
        return not (
            self.base or self.per_request or self.per_prefill_token or self.per_context_token
        )

    def duration(self, step: Step) -> float:
        """How long a step takes; no time if it computes nothing."""
        if not step.num_tokens:
            return 0.0
        decoding = step.details.num_generation_requests
        # What is computed again after a preemption is as slow as a prompt.
        prefill = step.num_tokens - decoding
        return (
            self.base
            + self.per_request * decoding
            + self.per_prefill_token * prefill
            + self.per_context_token * step.context_length
        )


@frozen
class RequestTimes:
    """When the tokens of a request come, however many others there are."""

    first: Spread
    prefill_overhead: float
    prefill_per_token: Spread
    transfer: Spread
    between: Spread
    factor_under_load: float
    max_num_seqs: int
    scale: float

    @classmethod
    def of(cls, config: MockEngineConfig) -> RequestTimes:
        """The times that are asked for."""
        return cls(
            Spread(config.time_to_first_token, config.time_to_first_token_std_dev),
            config.prefill_overhead,
            Spread(config.prefill_time_per_token, config.prefill_time_std_dev),
            Spread(config.kv_cache_transfer_latency, config.kv_cache_transfer_latency_std_dev),
            Spread(config.inter_token_latency, config.inter_token_latency_std_dev),
            config.time_factor_under_load,
            config.max_num_seqs,
            config.time_scale,
        )

    def to_first_token(
        self, key: int, num_computed: int, num_running: int, *, is_remote: bool
    ) -> float:
        """From the admission to the first token.

        Args:
          key: Of the request.
          num_computed: Tokens of the prompt that were not cached.
          num_running: Requests that run, this one among them.
          is_remote: Whether the prompt was prefilled elsewhere, and its KV blocks are fetched.
        """
        if is_remote:
            time = self.transfer.draw(key, 0)
        elif self.first.mean:
            time = self.first.draw(key, 0)
        else:
            time = self.prefill_overhead + num_computed * self.prefill_per_token.draw(key, 0)
        return time * self._factor(num_running)

    def of_transfer(self, key: int) -> float:
        """From the begin of a transfer of KV blocks to its end."""
        return self.transfer.draw(key, 0) * self.scale

    def to_next_token(self, key: int, position: int, num_running: int) -> float:
        """From the last token to the one at this position.

        After a preemption it counts from the admission, and what is computed again takes no longer.
        """
        return self.between.draw(key, position) * self._factor(num_running)

    def _factor(self, num_running: int) -> float:
        others = (num_running - 1) / max(1, self.max_num_seqs - 1)
        return self.scale * (1 + (self.factor_under_load - 1) * others)
