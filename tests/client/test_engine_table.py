"""How an engine ends, and when: `EngineTable` and `EngineConnections` without tasks or a clock."""

from __future__ import annotations

import math

import pytest
from tests.ready import ready_response

from trio_vllm.client.engines import (
    CONNECTION_LOST,
    DISCONNECT_GRACE,
    REPORTED_DEATH,
    UNREADABLE,
    EngineConnections,
    EngineState,
    EngineTable,
)


def make_table(count: int = 3) -> EngineTable:
    return EngineTable({index: ready_response(index) for index in range(count)})


def test_a_disconnected_engine_is_due_after_its_grace_and_not_before() -> None:
    table = make_table()
    engine, cause = table.by_index[1], OSError()
    assert table.next_deadline == math.inf
    table.disconnect(engine, 10.0, cause)

    assert engine.state is EngineState.DISCONNECTED
    assert [alive.index for alive in table.alive] == [0, 2]
    assert table.next_deadline == 10.0 + DISCONNECT_GRACE
    assert table.expired(table.next_deadline - 0.01) == []
    assert table.expired(table.next_deadline) == [(engine, cause)]


def test_the_first_break_sets_the_deadline() -> None:
    table = make_table()
    table.disconnect(table.by_index[0], 10.0)
    table.disconnect(table.by_index[0], 11.0, OSError())

    assert table.expired(10.0 + DISCONNECT_GRACE) == [(table.by_index[0], None)]


def test_deadlines_are_kept_for_each_engine() -> None:
    table = make_table()
    for index, now in ((2, 10.0), (0, 10.1)):
        table.disconnect(table.by_index[index], now)
    assert table.next_deadline == 10.0 + DISCONNECT_GRACE
    table.mark_dead(table.by_index[2], CONNECTION_LOST, None)

    assert table.next_deadline == 10.1 + DISCONNECT_GRACE
    assert [engine.index for engine in table.dead] == [2]


@pytest.mark.parametrize("reason", [REPORTED_DEATH, UNREADABLE])
@pytest.mark.parametrize("is_disconnected", [False, True])
def test_a_dead_engine_has_no_deadline_and_its_first_error(
    reason: str, is_disconnected: bool
) -> None:
    table = make_table()
    engine, cause = table.by_index[1], OSError()
    if is_disconnected:
        table.disconnect(engine, 10.0)
    error = table.mark_dead(engine, reason, cause)
    table.disconnect(engine, 20.0)

    assert (engine.state, engine.error) == (EngineState.DEAD, error)
    assert (error.engine_index, error.reason, error.__cause__) == (1, reason, cause)
    assert table.next_deadline == math.inf
    assert [alive.index for alive in table.alive] == [0, 2]


# Connections --------------------------------------------------------------------------------------


def test_a_connection_becomes_an_engines_by_its_first_message() -> None:
    connections = EngineConnections([0, 1])
    assert connections.engine_of(7) is None
    assert connections.claim(7, 1)

    assert connections.engine_of(7) == 1
    assert connections.claim(7, 1)


def test_an_engine_has_one_connection_and_a_connection_one_engine() -> None:
    connections = EngineConnections([0, 1])
    assert connections.claim(7, 1)

    assert not connections.claim(8, 1)
    assert not connections.claim(7, 0)
    assert connections.claim(8, 0)


def test_an_output_corrects_a_name() -> None:
    connections = EngineConnections([0, 1])
    assert connections.claim(7, 0)
    assert not connections.claim(8, 0)

    assert not connections.claim(7, 1)
    assert connections.claim(7, 1, has_output=True)
    assert connections.engine_of(7) == 1
    assert connections.claim(8, 0)


def test_nothing_corrects_an_output() -> None:
    connections = EngineConnections([0, 1])
    assert connections.claim(7, 0, has_output=True)

    assert not connections.claim(7, 1, has_output=True)
    assert not connections.claim(8, 0, has_output=True)
    assert [connections.is_proved(connection) for connection in (7, 8)] == [True, False]


def test_no_connection_becomes_that_of_an_engine_that_is_none() -> None:
    connections = EngineConnections([0, 1])

    assert not connections.claim(7, 2)
    assert connections.engine_of(7) is None


def test_what_comes_by_no_known_connection_is_believed_if_an_engine_is_named() -> None:
    connections = EngineConnections([0, 1])

    assert [connections.claim(None, index) for index in (0, 1, 0, 2)] == [True, True, True, False]
    assert connections.engine_of(None) is None


def test_strangers_that_come_and_go_are_not_kept() -> None:
    """Whatever engines they name, and if one of them is taken for an engine."""
    connections = EngineConnections([0, 1])
    connections.claim(0, 0, has_output=True)
    for stranger in range(1, 30_000):
        for has_output in (False, True):
            for engine_index in (0, 1, 2):
                connections.claim(stranger, engine_index, has_output=has_output)

    assert len(connections) == 2
    assert connections.engine_of(0) == 0
