"""Log probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trio_vllm.protocol import Logprobs


def make_logprobs(token_ids: Sequence[int], width: int) -> Logprobs:
    """A row for each token, of so many columns: the token itself, then others."""
    rows = len(token_ids)
    ids = np.tile(np.arange(width, dtype=np.int32) + 100, (rows, 1))
    if width:
        ids[:, 0] = token_ids
    values = np.tile(-np.arange(width, dtype=np.float32), (rows, 1))
    return Logprobs(ids, values, np.full(rows, 3, np.int64))
