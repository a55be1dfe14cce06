"""Pooling outputs that a mock engine makes up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_vllm.protocol import Tensor

from ._tokens import hashes

if TYPE_CHECKING:
    from trio_vllm.protocol import PoolingParams

_PER_TOKEN = ("token_embed", "token_classify")


def pooled_shape(params: PoolingParams, prompt_len: int, size: int) -> tuple[int, int]:
    """How many vectors of how many numbers are asked for; ``size`` if it is not said."""
    return prompt_len if params.task in _PER_TOKEN else 1, params.dimensions or size


def pool(key: int, params: PoolingParams, prompt_len: int, size: int) -> Tensor:
    """A vector of length one, or one for each token of the prompt where the task is about tokens."""
    rows, size = pooled_shape(params, prompt_len, size)
    bits = hashes(key, 0, rows * size).reshape(rows, size)
    values = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-6))
    return Tensor.from_numpy(values if params.task in _PER_TOKEN else values[0])
