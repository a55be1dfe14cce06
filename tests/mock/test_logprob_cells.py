"""`LogprobCells` writes what `LogprobModel.sample` gives, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from tests.mock.driver import drive

from trio_vllm.mock.content import LogprobModel, TokenSource, request_key
from trio_vllm.mock.encoding import TokenCells
from trio_vllm.mock.logprob_cells import MAX_COLUMNS, LogprobCells

ROWS, STEPS = 5, 4


@pytest.mark.parametrize("vocab_size", [1, 5, 32_000, 152_064, 2**31 - 1])
@pytest.mark.parametrize("columns", [1, 2, 6, MAX_COLUMNS])
@pytest.mark.parametrize("num_candidates", [None, 1, 3, 10**6])
def test_many_rows_are_as_one(vocab_size: int, columns: int, num_candidates: int | None) -> None:
    """Of any vocabulary, padded where it has fewer tokens than columns."""
    source, model = TokenSource(vocab_size), LogprobModel(vocab_size)
    cells = LogprobCells(source, model, columns, num_candidates)
    keys = [request_key(0, 0, str(row)) for row in range(ROWS)]
    out = np.zeros((ROWS, STEPS), cells.dtype)
    cells.fill(out, np.array(keys, np.uint64), np.arange(ROWS, dtype=np.uint64))

    for row, key in enumerate(keys):
        for step in range(STEPS):
            (token,) = source.draw(key, row + step, 1)
            packed = cells.pack(key, row + step, token)
            head = len(TokenCells.of(vocab_size).blank(0))
            assert out[row, step].tobytes() == packed[head:]


def test_steps_with_log_probabilities_are_made_at_once() -> None:
    """Also beside requests without; and again when a wide one, which takes the plain path, has gone."""
    driver = drive()
    driver.add("a", 200, params={"logprobs": 1})
    driver.add("b", 200)
    driver.step(2)
    counts = [len(driver.engine.steps(driver.now, 10))]
    driver.add("c", 200, params={"logprobs": 1})
    driver.add("wide", 3, params={"logprob_token_ids": [1, 2, 3]})
    driver.step(4)
    counts.append(len(driver.engine.steps(driver.now, 10)))

    assert counts == [10, 10]
    widths = [
        None if output.new_logprobs is None else output.new_logprobs.token_ids.shape[1]
        for output in driver.outputs("c")
    ]
    assert widths == [4, 4, 4, 2]
