"""Which engine gets a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_vllm.client.engines import Balancer
from trio_vllm.errors import InvalidDataParallelRankError


def admit(balancer: Balancer, count: int = 1) -> list[int]:
    """Send so many requests; gives their engines."""
    chosen = []
    for _ in range(count):
        chosen.append(balancer.choose("r", None))
        balancer.admit(chosen[-1])
    return chosen


def test_single_engine_gets_everything() -> None:
    assert admit(Balancer([7]), 3) == [7, 7, 7]


def test_without_reports_what_is_in_flight_counts() -> None:
    """What was admitted and has ended does not."""
    balancer = Balancer([2, 0, 1])

    assert admit(balancer, 4) == [0, 1, 2, 0]
    for engine_index in (0, 0, 2):
        balancer.release(engine_index)

    assert admit(balancer, 4) == [0, 2, 0, 1]


def test_ties_go_to_the_lowest_index() -> None:
    """Also beyond the 256 engines after which the order of their ids differs from it."""
    balancer = Balancer([257, 256, 1])

    for _ in range(3):
        assert balancer.choose("r", None) == 1


def test_reports_tell_of_the_requests_of_other_clients() -> None:
    balancer = Balancer([0, 1])

    balancer.report(0, running=2, waiting=1)
    balancer.report(1, running=0, waiting=0)

    assert admit(balancer, 5) == [1, 1, 1, 0, 1]


def test_report_includes_what_was_admitted_before() -> None:
    balancer = Balancer([0, 1])
    admit(balancer, 4)

    balancer.report(0, running=2, waiting=0)
    balancer.report(1, running=2, waiting=0)

    assert admit(balancer, 2) == [0, 1]


def test_report_that_is_behind_does_not_hide_what_is_in_flight() -> None:
    """The engine said that it was idle before our requests reached it."""
    balancer = Balancer([0, 1])
    admit(balancer, 3)

    balancer.report(0, running=0, waiting=0)

    assert admit(balancer) == [1]


def test_pinned_request_goes_where_it_wants() -> None:
    balancer = Balancer([3, 4])
    balancer.report(4, running=100, waiting=0)

    assert balancer.choose("r", 4) == 4
    assert balancer.choose("r", None) == 3


def test_pinned_to_an_engine_that_is_not_there() -> None:
    balancer = Balancer([3, 4])
    balancer.remove(4)

    for rank in (0, 4, -1):
        with pytest.raises(InvalidDataParallelRankError) as caught:
            balancer.choose("r", rank)
        assert ("r", rank, [3]) == (
            caught.value.request_id,
            caught.value.data_parallel_rank,
            caught.value.engine_indices,
        )


def test_lost_engine_is_left_alone() -> None:
    """Its requests end and its reports come late; neither matters."""
    balancer = Balancer([0, 1])
    admit(balancer, 2)

    balancer.remove(0)
    balancer.remove(0)
    balancer.release(0)
    balancer.report(0, running=1, waiting=1)

    assert balancer.engine_indices == [1]
    assert admit(balancer, 2) == [1, 1]
    assert balancer.in_flight(1) == 3


@given(st.lists(st.tuples(st.sampled_from("arp"), st.integers(0, 3), st.integers(0, 9))))
def test_choice_is_the_least_of_the_written_rule(steps: list[tuple[str, int, int]]) -> None:
    """The rule of upstream's Rust client, kept in three plain dictionaries."""
    balancer = Balancer(range(4))
    in_flight = dict.fromkeys(range(4), 0)
    reported: dict[int, int] = {}
    admitted = dict.fromkeys(range(4), 0)
    for step, engine_index, count in steps:
        if step == "a":
            balancer.admit(engine_index)
            in_flight[engine_index] += 1
            admitted[engine_index] += 1
        elif step == "r" and in_flight[engine_index]:
            balancer.release(engine_index)
            in_flight[engine_index] -= 1
        elif step == "p":
            balancer.report(engine_index, running=count, waiting=1)
            reported[engine_index] = count + 1
            admitted[engine_index] = 0
        scores = [
            max(in_flight[i], reported[i] + admitted[i]) if i in reported else in_flight[i]
            for i in range(4)
        ]

        assert scores.index(min(scores)) == balancer.choose("r", None)
