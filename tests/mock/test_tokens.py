"""What tokens depend on, and that both ways of drawing them agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mock.driver import drive

from trio_vllm.mock.content import TokenSource, hash_at, hashes, request_key

U64S = st.integers(0, 2**64 - 1)
VOCAB_SIZES = st.integers(1, 2**31)


@given(
    keys=st.lists(U64S, min_size=1, max_size=5),
    first=st.integers(0, 2**40),
    count=st.integers(1, 40),
    size=VOCAB_SIZES,
)
def test_a_batch_is_drawn_as_each_token_alone(
    keys: list[int], first: int, count: int, size: int
) -> None:
    """Where and with whom a token is drawn does not matter."""
    source = TokenSource(size)
    out = np.empty((len(keys), count), np.uint64)

    source.fill(out, np.array(keys, np.uint64), np.full(len(keys), first, np.uint64))

    alone = [[source.draw(key, first + i, 1)[0] for i in range(count)] for key in keys]
    assert alone == out.tolist()


@pytest.mark.parametrize("shape", [(3, 20_000), (20_000, 3), (1, 0), (2, 40_000)])
def test_large_batches_are_drawn_piece_by_piece(shape: tuple[int, int]) -> None:
    """More than fits the room for hashing at once."""
    rows, count = shape
    source = TokenSource(50_000)
    keys, firsts = np.arange(rows, dtype=np.uint64), np.full(rows, 7, np.uint64)
    out = np.empty(shape, ">u2")

    source.fill(out, keys, firsts)

    for row in {0, rows - 1}:
        for column in range(0, count, 997):
            assert source.draw(row, 7 + column, 1) == [int(out[row, column])]


def test_hashes_are_those_of_splitmix64() -> None:
    """The first states that the reference implementation makes of seed 0 are known."""
    golden = 0x9E3779B97F4A7C15
    assert hash_at(0, 1) == 0xE220A8397B1DCDAF
    assert hash_at(golden, 1) == 0x6E789E6AA1B965F4
    assert hashes(5, 3, 2).tolist() == [hash_at(5, 3), hash_at(5, 4)]


def test_keys_depend_on_all_three() -> None:
    """Seed, engine and id each change the key."""
    keys = [request_key(0, 0, "a"), request_key(1, 0, "a"), request_key(0, 1, "a")]
    assert len({*keys, request_key(0, 0, "b"), request_key(0, 0, "")}) == 5


def test_tokens_spread_over_the_vocabulary() -> None:
    """All tokens come, none much more often than others."""
    drawn = TokenSource(10).draw(request_key(0, 0, "x"), 0, 10_000)

    counts = np.bincount(drawn, minlength=10)
    assert counts.min() > 900
    assert counts.max() < 1100


@pytest.mark.parametrize("vocab_size", [1, 2, 65_536, 65_537, 151_936, 2**31])
def test_tokens_stay_within_the_vocabulary(vocab_size: int) -> None:
    """Also at the limits of how they are written."""
    driver = drive(vocab_size=vocab_size)
    driver.add("a", 200)

    driver.run()

    tokens = driver.tokens("a")
    assert len(tokens) == 200
    assert all(0 <= token < vocab_size for token in tokens)
    assert vocab_size == 1 or max(tokens) >= vocab_size // 2


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 50, 64])
def test_tokens_do_not_depend_on_the_chunk_size(chunk_size: int) -> None:
    """Nor on what runs beside."""
    alone = drive()
    alone.add("a", 50)
    alone.run()
    driver = drive(output_token_chunk_size=chunk_size)
    driver.add("b", 30)
    driver.step()
    driver.add("a", 50)
    driver.add("longer id", 7)

    driver.run()

    assert alone.tokens("a") == driver.tokens("a")
    assert -(-50 // chunk_size) == len(driver.outputs("a"))


def test_seed_and_engine_index_change_the_tokens() -> None:
    """And nothing else was needed to get the same ones again."""

    def tokens(engine_index: int, seed: int) -> list[int]:
        driver = drive(engine_index, seed=seed)
        driver.add("a", 8)
        driver.run()
        return driver.tokens("a")

    assert tokens(0, 0) == tokens(0, 0)
    assert len({tuple(tokens(index, seed)) for index in (0, 300) for seed in (0, 2**64 - 1)}) == 4
