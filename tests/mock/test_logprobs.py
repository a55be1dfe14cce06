"""Log probabilities: shapes, order, and that they are those of a distribution."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import ormsgpack
import pytest
from tests.mock.driver import Driver, drive

from trio_vllm.mock.content import LogprobModel
from trio_vllm.protocol import Logprobs


def run(driver: Driver, *requests: tuple[str, dict[str, Any]], **fields: Any) -> None:
    for request_id, params in requests:
        driver.add(request_id, 6, params=params, **fields)
    driver.run()


def logprobs(driver: Driver, request_id: str) -> list[Logprobs]:
    found = [output.new_logprobs for output in driver.outputs(request_id)]
    assert None not in found
    return [item for item in found if item is not None]


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize(("wanted", "columns"), [(0, 1), (1, 2), (5, 6), (-1, 101), (500, 101)])
def test_sampled_tokens(wanted: int, columns: int, chunk_size: int) -> None:
    """The token itself, then the most probable ones in falling order."""
    driver = drive(vocab_size=100, output_token_chunk_size=chunk_size)
    run(driver, ("a", {"logprobs": wanted}))

    for output, found in zip(driver.outputs("a"), logprobs(driver, "a"), strict=True):
        assert found.token_ids.shape == (len(output.new_token_ids), columns)
        assert (np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i8")) == (
            found.token_ids.dtype,
            found.logprobs.dtype,
            found.ranks.dtype,
        )
        assert output.new_token_ids == found.token_ids[:, 0].tolist()
        for ids, values, rank in zip(found.token_ids, found.logprobs, found.ranks, strict=True):
            top, best = ids[1:].tolist(), values[1:].tolist()
            assert sorted(best, reverse=True) == best
            assert len(set(top)) == len(top)
            if rank < columns:
                assert (ids[0], values[0]) == (ids[rank], values[rank])
            if columns == 101:
                assert math.isclose(1.0, np.exp(values[1:]).sum(), rel_tol=1e-4)


OUTPUTS: list[dict[str, Any]] = [
    {},
    {"schedule": True},
    {"output": "prompt"},
    {"output": "echo"},
    {"output": "FILE"},
    {"output_token_chunk_size": 3},
    {"num_speculative_tokens": 3, "acceptance_rate": 0.7},
]


@pytest.mark.parametrize("config", OUTPUTS, ids=str)
@pytest.mark.parametrize(("params", "most"), [({"temperature": 0.0}, 1), ({"top_k": 4}, 4)])
def test_the_sampled_token_is_among_the_candidates(
    tmp_path: Path, config: dict[str, Any], params: dict[str, Any], most: int
) -> None:
    """A greedy request gets the most probable token, whatever the tokens are."""
    if config.get("output") == "FILE":
        path = tmp_path / "answers"
        path.write_text('{"tokens": [5, 5, 900, 7]}\n')
        config = {**config, "output": str(path)}
    driver = drive(vocab_size=1000, **config)
    params = {"logprobs": 5, "prompt_logprobs": 1, "ignore_eos": True, **params}
    driver.add("a", 200, prompt_token_ids=[*range(50, 250)], params=params)
    driver.run()

    found, ranks = logprobs(driver, "a"), set()
    assert driver.tokens("a") == [one for each in found for one in each.token_ids[:, 0]]
    for each in found:
        for ids, values, rank in zip(each.token_ids, each.logprobs, each.ranks, strict=True):
            assert (ids[0], values[0]) == (ids[rank], values[rank])
            ranks.add(int(rank))
    assert len(driver.tokens("a")) < 10 or ranks == {*range(1, most + 1)}
    assert ranks <= {*range(1, most + 1)}


def test_what_is_replayed_may_have_any_rank() -> None:
    """It was not sampled by this request."""
    driver = drive()
    trace = {"trace_decode_token_ids": [*range(100)], "temperature": 0.0, "logprobs": 0}
    driver.add("a", 100, params=trace)
    driver.run()
    assert max(int(rank) for each in logprobs(driver, "a") for rank in each.ranks) > 1


def test_the_whole_batch_is_as_wide_as_its_widest() -> None:
    """While both run; who asked for nothing gets nothing."""
    driver = drive()
    run(driver, ("a", {"logprobs": 1}), ("b", {"logprobs": 3}), ("c", {}))
    driver.add("d", 1, params={"logprobs": 0})
    driver.run()

    assert {found.token_ids.shape[1] for found in logprobs(driver, "a")} == {4}
    assert {found.token_ids.shape[1] for found in logprobs(driver, "b")} == {4}
    assert all(output.new_logprobs is None for output in driver.outputs("c"))
    assert {found.token_ids.shape[1] for found in logprobs(driver, "d")} == {1}


def test_named_tokens() -> None:
    """In the order of the request, padded to the width of the batch."""
    driver = drive(vocab_size=50)
    run(driver, ("a", {"logprob_token_ids": [7, 3]}), ("b", {"logprobs": -1}))

    for one, whole in zip(logprobs(driver, "a"), logprobs(driver, "b"), strict=True):
        assert one.token_ids[0, 1:3].tolist() == [7, 3]
        assert one.token_ids[0, 3:].tolist() == [0] * 48
        assert np.isneginf(one.logprobs[0, 3:]).all()
        assert whole.token_ids.shape[1] == 51
    driver = drive(vocab_size=50)
    run(driver, ("a", {"logprob_token_ids": [7, 3], "logprobs": 1}))
    alone = logprobs(driver, "a")
    driver = drive(vocab_size=50)
    run(driver, ("a", {"logprobs": -1}))
    for named, whole in zip(alone, logprobs(driver, "a"), strict=True):
        by_id = dict(zip(whole.token_ids[0, 1:].tolist(), whole.logprobs[0, 1:], strict=True))
        assert named.logprobs[0, 1:].tolist() == [by_id[7], by_id[3]]


@pytest.mark.parametrize(("length", "wanted"), [(1, 1), (2, 0), (480, 1), (480, 20), (5, -1)])
def test_prompts(length: int, wanted: int) -> None:
    """One row less than the prompt has tokens, on the first output only."""
    driver = drive(vocab_size=1000)
    prompt = [2**31 + 5, *range(1, length)]
    run(driver, ("a", {"prompt_logprobs": wanted}), prompt_token_ids=prompt)

    first, *rest = driver.outputs("a")
    found = first.new_prompt_logprobs_tensors
    assert found is not None
    columns = 1001 if wanted == -1 else wanted + 1
    assert found.token_ids.shape == found.logprobs.shape == (length - 1, columns)
    assert {np.dtype("<i4"), np.dtype("<f4")} == {
        found.token_ids.dtype,
        found.logprobs.dtype,
        found.ranks.dtype,
    }
    assert prompt[1:] == found.token_ids[:, 0].tolist()
    assert all(output.new_prompt_logprobs_tensors is None for output in rest)


def test_large_arrays_travel_in_frames_of_their_own() -> None:
    """Several requests' frames in one message are told apart."""
    driver = drive()
    driver.add("a", 1, params={"logprobs": 100, "prompt_logprobs": 2}, prompt_token_ids=[9] * 99)
    driver.add("b", 1, params={"logprobs": 100, "prompt_logprobs": 2}, prompt_token_ids=[8] * 99)
    driver.add("c", 1)
    ((_, frames),) = driver.engine.step(driver.now)
    driver.keep([(0, frames)])

    assert len(frames) == 11  # ids and values of both kinds for both, and ranks of both prompts
    for request_id, token in (("a", 9), ("b", 8)):
        (output,) = driver.outputs(request_id)
        assert output.new_logprobs is not None
        assert output.new_token_ids == output.new_logprobs.token_ids[:, 0].tolist()
        assert output.new_prompt_logprobs_tensors is not None
        assert set(output.new_prompt_logprobs_tensors.token_ids[:, 0].tolist()) == {token}


def test_named_tokens_of_a_prompt() -> None:
    """A row per position, minus infinity where there is no id."""
    ids = np.array([[1, 2], [3, -1], [-1, -1]], np.int32)
    driver = drive(vocab_size=10)
    wire = ["<i4", [3, 2], ormsgpack.Ext(3, ids.tobytes())]
    params = {"prompt_logprob_token_ids": wire}
    run(driver, ("a", params), prompt_token_ids=[1, 2, 3])

    first, *rest = driver.outputs("a")
    assert first.prompt_token_id_logprobs is not None
    found = first.prompt_token_id_logprobs
    assert (np.dtype("<f4"), (3, 2)) == (found.dtype, found.shape)
    assert np.isneginf(found).tolist() == [[False, False], [False, True], [True, True]]
    assert all(output.prompt_token_id_logprobs is None for output in rest)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 97, 70_000, 2**31])
def test_the_sampled_token_has_its_rank_in_any_vocabulary(size: int) -> None:
    """Rank one is at the head of the list, and so on."""
    model = LogprobModel(size)
    tokens = [0, size - 1, size // 2]

    found = model.sample(7, 0, tokens, model.width(5))

    assert tokens == found.token_ids[:, 0].tolist()
    assert (found.ranks >= 1).all()
    assert (found.ranks <= size).all()
    assert (found.logprobs <= 0).all()
    for row, rank in enumerate(found.ranks.tolist()):
        if rank < found.token_ids.shape[1]:
            assert tokens[row] == found.token_ids[row, rank]


def test_ranks_are_drawn_from_the_distribution() -> None:
    """Low ranks are the usual ones."""
    model = LogprobModel(32_000)
    found = model.sample(7, 0, [0] * 4000, 1)

    first = float(np.exp(model.sample(7, 0, [0], 2).logprobs[0, 1]))
    assert abs((found.ranks == 1).mean() - first) < 0.03
    assert found.ranks.max() > 50


def test_a_step_of_much_work_is_made_in_slices() -> None:
    """Whole vocabularies come in several messages, each request once a step."""
    driver = drive(vocab_size=100_000)
    for i in range(20):
        driver.add(f"r{i}", 2, params={"logprobs": -1})
    driver.step()

    first = sum(len(batch.outputs) for batch in driver.batches())
    assert 0 < first < 10

    driver.run()
    for i in range(20):
        assert [len(o.new_token_ids) for o in driver.outputs(f"r{i}")] == [1, 1]
    for batch in driver.batches():
        assert len({output.request_id for output in batch.outputs}) == len(batch.outputs)


def test_a_long_prefill_takes_several_steps() -> None:
    """While others get their tokens, and comes to the same as a short one."""
    driver, prompt = drive(), [i % 1000 for i in range(200_000)]
    driver.add("long", 2, params={"prompt_logprobs": 5}, prompt_token_ids=prompt)
    driver.add("other", 50)
    driver.step()
    assert driver.outputs("long") == []
    assert len(driver.tokens("other")) == 1

    driver.run()
    made = driver.outputs("long")[0].new_prompt_logprobs_tensors
    assert made is not None
    assert made.token_ids[:, 0].tolist() == prompt[1:]
    assert np.isfinite(made.logprobs).all()
    assert len(driver.tokens("long")) == 2

    short = drive()
    short.add("long", 2, params={"prompt_logprobs": 5}, prompt_token_ids=prompt[:50])
    short.run()
    part = short.outputs("long")[0].new_prompt_logprobs_tensors
    assert part is not None
    assert np.array_equal(part.token_ids, made.token_ids[:49])
    assert np.array_equal(part.ranks, made.ranks[:49])


def test_an_abort_in_the_middle_of_a_step() -> None:
    """The rest of the step goes to the others."""
    driver = drive(vocab_size=100_000)
    for i in range(20):
        driver.add(f"r{i}", 2, params={"logprobs": -1})
    driver.step()
    driver.abort("r19", "r0")
    driver.run()

    assert driver.outputs("r19") == []
    assert len(driver.tokens("r0")) == 1
    assert all(len(driver.tokens(f"r{i}")) == 2 for i in range(1, 19))
    assert not driver.engine.has_unfinished
