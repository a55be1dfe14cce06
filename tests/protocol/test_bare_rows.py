"""What `find_bare_rows` takes out of a message are rows of it, and the rest is what is left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_vllm.protocol import (
    bare_row_pattern,
    decode_outputs_lazily,
    find_bare_rows,
    pack_id,
    unpack_id,
)
from trio_vllm.protocol.msgpack import pack
from trio_vllm.protocol.output import UndecodedBatch
from trio_vllm.protocol.row_patterns import MARK

REST = [None] * 11 + [0] + [None] * 5


def row(request_id: str, token: int) -> list[Any]:
    """A bare row."""
    return [request_id, [token], *REST]


PATTERN = bare_row_pattern(row("abc", 1), frozenset([4]))
LOOKALIKE = pack(row("xyz", 7))


def message(rows: list[Any], stats: Any = None, index: int = 0) -> list[bytes]:
    """A message of an engine."""
    return [pack([index, rows, stats, 1.5, None, ["r"], None, None, "version"])]


def check(frames: list[bytes]) -> int | None:
    """Compare with what unpacking gives; gives how many rows were found, None if it was left alone."""
    assert PATTERN is not None
    found = find_bare_rows(frames, PATTERN, 1)
    if found is None:
        return None
    whole = decode_outputs_lazily(frames)
    assert isinstance(whole, UndecodedBatch)
    rest = iter(whole.rows)
    taken = [
        row(str(unpack_id(packed_id)), token)
        for packed_id, token in zip(found.packed_ids, found.token_ids, strict=True)
    ]
    left = [raw for raw in rest if raw not in taken]
    assert found.others.rows == left
    assert len(taken) + len(left) == len(whole.rows)
    whole.rows = left
    assert found.others == whole
    return len(taken)


OTHER_ROWS = st.sampled_from(
    [
        ["abc", [1, 2], *REST],
        ["abcd", [1], *REST],
        ["abc", [1], *REST[:-1], LOOKALIKE],
        ["abc", [1], *REST[:-1], LOOKALIKE[1:] + LOOKALIKE],
        ["abc", [1], *REST[:-1], [row("inner", 5), row("abc", 5)]],
        ["abc", [2**32], *REST],
        ["abc", [-1], *REST],
        [],
        5,
        LOOKALIKE,
        MARK,
        None,
    ]
)
ROWS = st.builds(row, st.sampled_from(["abc", "xyz", "\u00e9x"]), st.integers(0, 2**32 - 1))


@given(
    rows=st.lists(st.one_of(ROWS, ROWS, ROWS, OTHER_ROWS), max_size=30),
    stats=st.sampled_from([None, None, {"a": 1}, LOOKALIKE, [row("abc", 1)]]),
)
def test_any_message(rows: list[Any], stats: Any) -> None:
    """Whatever looks like a row, and where."""
    check(message(rows, stats))


@pytest.mark.parametrize("token", [0, 127, 128, 255, 256, 0x9191, 65536, 0x919191, 2**32 - 1])
def test_all_tokens_are_found(token: int) -> None:
    """Of each size."""
    assert check(message([row("abc", token), row("xyz", token)])) == 2


@pytest.mark.parametrize("index", [0, 127, 128, 255, 256, 2**16 - 1])
def test_engines_of_any_index(index: int) -> None:
    """It is written in up to three bytes."""
    assert check(message([["abc", [1, 2], *REST], row("abc", 1)], index=index)) == 1


@pytest.mark.parametrize("count", [1, 15, 16, 70_000 // 50])
def test_others_are_left(count: int) -> None:
    """At each place."""
    other = ["abc", [1, 2], *REST]
    rows = [row("abc", number) for number in range(count)]

    assert check(message([other, *rows, other, other, *rows, other])) == 2 * count


@pytest.mark.parametrize(
    "frames",
    [
        message([["abc", [1], *REST[:-1], LOOKALIKE]]),
        message([row("abc", 1)], LOOKALIKE),
        message([MARK, row("abc", 1)]),
        message([row("abc", 1)], index=2**16),
        message([]),
        [b"\x99\x00\x91" + LOOKALIKE],
        [b"ENGINE_CORE_DEAD"],
        [b""],
    ],
)
def test_unusual_messages_are_left_alone(frames: list[bytes]) -> None:
    """One whose rows cannot be told apart for sure is for the slow path."""
    assert PATTERN is not None
    assert find_bare_rows(frames, PATTERN, 1) is None


@pytest.mark.parametrize("length", [1, 31, 32, 255, 256, 1000])
def test_ids(length: int) -> None:
    """They are found whatever their length, and come out as they were."""
    request_id = "x" * length
    packed_id = pack_id(request_id)
    pattern = bare_row_pattern(row(request_id, 1), frozenset([len(packed_id)]))
    assert pattern is not None
    found = find_bare_rows(message([row(request_id, 1)]), pattern, 1)

    assert found is not None
    assert [unpack_id(id_) for id_ in found.packed_ids] == [request_id]


@pytest.mark.parametrize("packed", [b"\xa2x", b"\xa1xy", b"\xd9\x01x", b"\xa1\xff"])
def test_what_is_no_id(packed: bytes) -> None:
    """Too short, too long, written too long, not UTF-8."""
    assert unpack_id(packed) is None


@pytest.mark.parametrize("fields", [["abc", [1, 2], *REST], ["abc", [1], 5, *REST[1:]], ["abc"], 5])
def test_no_pattern_of_other_rows(fields: Any) -> None:
    """It is made of a bare row with one token."""
    assert bare_row_pattern(fields, frozenset([4])) is None
