"""The rules that say which engine gets a request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.cores import RecordingSink
from tests.client.world import make_request
from tests.ready import ready_response

from trio_vllm.client import FrontendCore, LeastLoaded, LeastWaiting, LoadBalancer
from trio_vllm.client.engines import Engine
from trio_vllm.errors import InvalidDataParallelRankError
from trio_vllm.protocol import SchedulerStats


def make_engines(*indices: int) -> list[Engine]:
    return [Engine(index, ready_response(index)) for index in indices]


NUMBERS = itertools.count()


def add(engine: Engine, count: int = 1) -> None:
    """Count requests of this client's."""
    for _ in range(count):
        engine.add(RecordingSink(make_request(f"r{next(NUMBERS)}")))


def end(engine: Engine) -> None:
    """Let the oldest request end."""
    engine.remove(next(iter(engine.requests)))


def report(engine: Engine, running: int, waiting: int = 0, usage: float = 0.0) -> None:
    engine.receive_stats(
        SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage)
    )


def choices(engines: list[Engine], count: int, balancer: LoadBalancer | None = None) -> list[int]:
    """Send so many requests; gives their engines."""
    balancer = balancer or LeastLoaded()
    chosen = []
    for _ in range(count):
        engine = balancer.choose(engines)
        add(engine)
        chosen.append(engine.index)
    return chosen


# The rule of the Rust frontend --------------------------------------------------------------------


def test_without_reports_what_is_in_flight_counts() -> None:
    """What was sent and has ended does not."""
    engines = make_engines(0, 1, 2)

    assert choices(engines, 4) == [0, 1, 2, 0]
    for index in (0, 0, 2):
        end(engines[index])

    assert choices(engines, 4) == [0, 2, 0, 1]


def test_ties_go_to_the_lowest_index() -> None:
    """Also beyond the 256 engines after which the order of their ids differs from it."""
    assert [LeastLoaded().choose(make_engines(1, 256, 257)).index for _ in range(3)] == [1] * 3


def test_reports_tell_of_the_requests_of_other_clients() -> None:
    engines = make_engines(0, 1)
    report(engines[0], running=2, waiting=1)
    report(engines[1], running=0)

    assert choices(engines, 5) == [1, 1, 1, 0, 1]


def test_report_includes_what_was_sent_before() -> None:
    engines = make_engines(0, 1)
    choices(engines, 4)
    report(engines[0], running=2)
    report(engines[1], running=2)

    assert choices(engines, 2) == [0, 1]


def test_report_that_is_behind_does_not_hide_what_is_in_flight() -> None:
    """The engine said that it was idle before our requests reached it."""
    engines = make_engines(0, 1)
    choices(engines, 3)
    report(engines[0], running=0)

    assert choices(engines, 1) == [1]


def test_what_was_sent_since_the_report_and_has_ended_is_taken_back() -> None:
    """FAULTS C11: two short requests come and go between two reports."""
    engines = make_engines(0, 1)
    report(engines[0], running=0)
    report(engines[1], running=1)
    add(engines[0], 2)
    end(engines[0])
    end(engines[0])

    assert choices(engines, 1) == [0]


def test_what_a_report_has_counted_counts_until_the_next_one() -> None:
    engines = make_engines(0, 1)
    add(engines[0], 2)
    report(engines[0], running=2)
    report(engines[1], running=1)
    end(engines[0])
    end(engines[0])

    assert choices(engines, 1) == [1]


@given(st.lists(st.tuples(st.sampled_from("arp"), st.integers(0, 3), st.integers(0, 9))))
def test_choice_is_the_least_of_the_written_rule(steps: list[tuple[str, int, int]]) -> None:
    """The rule in plain lists; of each request, whether a report may have counted it."""
    engines = make_engines(0, 1, 2, 3)
    in_flight: list[list[bool]] = [[], [], [], []]
    reported: dict[int, int] = {}
    for step, index, count in steps:
        if step == "a":
            add(engines[index])
            in_flight[index].append(False)
        elif step == "r" and in_flight[index]:
            end(engines[index])
            in_flight[index].pop(0)
        elif step == "p":
            report(engines[index], running=count, waiting=1)
            reported[index] = count + 1
            in_flight[index] = [True] * len(in_flight[index])
        scores = [
            max(len(mine), reported[i] + mine.count(False)) if i in reported else len(mine)
            for i, mine in enumerate(in_flight)
        ]

        assert LeastLoaded().choose(engines).index == scores.index(min(scores))


# The rule of the Python frontend ------------------------------------------------------------------


def test_ties_go_round() -> None:
    assert choices(make_engines(0, 1, 2), 6, LeastWaiting()) == [0, 1, 2, 0, 1, 2]


def test_each_client_begins_with_another_engine() -> None:
    firsts = [LeastWaiting(client_index=i, client_count=2) for i in range(2)]

    assert [choices(make_engines(0, 1, 2, 3), 1, balancer) for balancer in firsts] == [[0], [2]]


def test_other_clients_are_taken_to_send_as_much() -> None:
    """Two in flight of one of three clients are six; four reported are less."""
    engines = make_engines(0, 1)
    add(engines[0], 2)
    report(engines[1], running=4)

    assert choices(engines, 1, LeastWaiting(client_count=3)) == [1]


@pytest.mark.parametrize(("usage", "chosen"), [(0.5, 0), (0.9, 1), (1.0, 1)])
def test_a_queue_weighs_more_where_the_cache_is_full(usage: float, chosen: int) -> None:
    engines = make_engines(0, 1)
    report(engines[0], running=1, waiting=2, usage=usage)
    report(engines[1], running=5)

    assert LeastWaiting().choose(engines).index == chosen


# In the client ------------------------------------------------------------------------------------


class Last:
    """Choose the last engine."""

    def choose(self, engines: Sequence[Engine]) -> Engine:
        return engines[-1]


def test_a_rule_of_ones_own() -> None:
    """It is not asked about what is pinned, or has no choice."""
    responses = {index: ready_response(index) for index in range(3)}
    core = FrontendCore(responses, load_balancer=Last())
    ranks = {"any": None, "pinned": 1}
    sinks = [RecordingSink(make_request(n, data_parallel_rank=r)) for n, r in ranks.items()]
    for sink in sinks:
        core.submit(sink.request, sink)
    assert [sink.engine_index for sink in sinks] == [2, 1]

    for index in (1, 2):
        core.disconnected(0.0, engine_index=index)
    alone = RecordingSink(make_request("alone"))
    core.submit(alone.request, alone)
    assert alone.engine_index == 0


def test_pinned_to_an_engine_that_is_not_there() -> None:
    core = FrontendCore({index: ready_response(index) for index in (3, 4)})
    core.disconnected(0.0, engine_index=4)

    for rank in (0, 4):
        request = make_request("r", data_parallel_rank=rank)
        with pytest.raises(InvalidDataParallelRankError) as caught:
            core.submit(request, RecordingSink(request))
        assert (caught.value.request_id, caught.value.data_parallel_rank) == ("r", rank)
        assert caught.value.engine_indices == [3]
