"""Rows that are handed over column by column (`TokenColumns`) leave the same as rows one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.client.world import make_request
from tests.examples import examples
from tests.ready import ready_response

from trio_vllm.client import FrontendCore
from trio_vllm.client.columns import MOST_OTHERS
from trio_vllm.concurrency import Waker
from trio_vllm.llm.collector import Collector
from trio_vllm.protocol import EngineCoreOutput, FinishReason, defaults_of, index_of
from trio_vllm.protocol.msgpack import pack

CONNECTION = 7
FEWEST_ROWS = 12
SHORT, VLLM = 2, len(attrs.fields(EngineCoreOutput))
DEFAULTS = [*defaults_of(EngineCoreOutput), *[None] * 5]
IDS = [f"request-{number:032}" for number in range(16)]
ODD_IDS = ["é" * 5, "x" * 40, "y", "z" * 300]
MEMBERS = [*IDS, *ODD_IDS[:2]]
ALL_IDS = [*IDS, *ODD_IDS]


def row(
    request_id: Any, token_ids: Sequence[Any] = (5,), length: int = VLLM, **fields: Any
) -> list[Any]:
    """A row as an engine of some version writes it."""
    values = [request_id, list(token_ids), *DEFAULTS[2:]]
    for name, value in fields.items():
        values[index_of(EngineCoreOutput, name)] = value
    return values[:length]


class CountingCollector(Collector):
    """Counts the rows that come one by one."""

    __slots__ = ("row_count",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.row_count = 0

    def add_tokens(self, token_ids: list[int], timestamp: float, version: str | None) -> None:
        self.row_count += 1
        super().add_tokens(token_ids, timestamp, version)


class Frontend:
    """A client's core with two engines, and all requests at the first one."""

    def __init__(self, limits: dict[str, int], *, streams: Sequence[str] = ()) -> None:
        self.core = FrontendCore({0: ready_response(0), 1: ready_response(1)})
        for engine in self.core._engines.by_index.values():
            engine.columns.fewest_rows = FEWEST_ROWS
        self.collectors = {
            request_id: self.submit(request_id, limit, interval=request_id in streams)
            for request_id, limit in limits.items()
        }
        self.submit("elsewhere", 100, rank=1)
        for collector in self.collectors.values():
            self.receive([row(collector.request_id)])

    def submit(
        self, request_id: str, limit: int, *, interval: int = 0, rank: int = 0
    ) -> CountingCollector:
        """Submit a request."""
        request = make_request(request_id, limit, data_parallel_rank=rank)
        collector = CountingCollector(request, 0, Waker(), lambda: 9.0, interval=interval)
        self.core.submit(request, collector)
        self.core.sends()
        return collector

    def receive(
        self,
        rows: Sequence[Any],
        timestamp: float = 1.0,
        version: str | None = None,
        finished: list[str] | None = None,
        stats: Any = None,
    ) -> None:
        """Take a message of the first engine."""
        payload = pack([0, list(rows), stats, timestamp, None, finished, None, None, version])
        if not self.core.receive_small([payload], CONNECTION, 100.0):
            self.core.receive([payload], CONNECTION, 100.0)

    def receive_one_by_one(
        self,
        rows: Sequence[Any],
        timestamp: float = 1.0,
        version: str | None = None,
        finished: list[str] | None = None,
    ) -> None:
        """Take a message like `receive`, in which nothing can be handled by columns."""
        for single in rows:
            self.receive([single], timestamp, version)
        self.receive([], timestamp, version, finished)

    def state(self) -> dict[str, Any]:
        """All that may be told apart."""
        return {
            "core": self.core.statistics(),
            "failure": repr(self.core.failure),
            "engines": [
                (list(engine.requests), set(engine.aborts), engine.state, engine.has_moved)
                for engine in self.core._engines.by_index.values()
            ],
            "collectors": {key: state_of(value) for key, value in self.collectors.items()},
        }


def state_of(collector: Collector) -> dict[str, Any]:
    """What a collector has."""
    names = set(Collector.__slots__) - {
        "_waker",
        "_clock",
        "answer_checks",
        "_params",
        "_arrival_time",
    }
    return {name: repr(getattr(collector, name)) for name in sorted(names)}


# What it is for -------------------------------------------------------------------------------


def rows_by_add_tokens(frontend: Frontend, rows: Sequence[Any], **message: Any) -> list[str]:
    """The ids of requests whose rows of this message came one by one."""
    before = {key: collector.row_count for key, collector in frontend.collectors.items()}
    frontend.receive(rows, **message)
    return [key for key, value in before.items() if frontend.collectors[key].row_count > value]


@pytest.fixture
def frontend() -> Frontend:
    """All requests have two tokens, and room for eight more."""
    frontend = Frontend(dict.fromkeys(MEMBERS, 10))
    frontend.receive([row(request_id) for request_id in MEMBERS])
    return frontend


def test_ids_of_many_lengths() -> None:
    """Then only those of ASCII characters are found, and not the very long ones."""
    ids = ["x" * length for length in (1, 5, 20, 31, 32, 40, 80, 127, 255, 256)] * 2
    ids = [f"{number}{text}"[: max(len(text), 2)] for number, text in enumerate(ids)]
    frontend = Frontend(dict.fromkeys([*ids, "é"], 10))
    rows = [row(request_id) for request_id in frontend.collectors]
    frontend.receive(rows)

    assert rows_by_add_tokens(frontend, rows) == [*(i for i in ids if len(i) > 255), "é"]


@pytest.mark.parametrize("length", [SHORT, VLLM, 24])
def test_all_by_columns(length: int) -> None:
    """Of requests that only collect, no row comes alone any more; all engines' rows are known."""
    frontend = Frontend(dict.fromkeys(MEMBERS, 10))
    rows = [row(request_id, [300], length) for request_id in MEMBERS]
    first = rows_by_add_tokens(frontend, rows)
    second = rows_by_add_tokens(frontend, rows)

    assert (first, second) == (MEMBERS, [])
    assert {tuple(c._token_ids) for c in frontend.collectors.values()} == {(5, 300, 300)}


def test_few_rows_come_one_by_one(frontend: Frontend) -> None:
    """For a message of few rows it costs more to take it apart."""
    few = IDS[: FEWEST_ROWS - 1]

    assert rows_by_add_tokens(frontend, [row(request_id) for request_id in few]) == few


def test_streams_come_one_by_one() -> None:
    """Their readers wait for each token; the others' rows come by columns all the same."""
    frontend = Frontend(dict.fromkeys(MEMBERS, 10), streams=IDS[:2])
    rows = [row(request_id) for request_id in MEMBERS]
    frontend.receive(rows)

    assert rows_by_add_tokens(frontend, rows) == IDS[:2]


def test_other_rows_come_one_by_one(frontend: Frontend) -> None:
    """An end, and what carries more than a token; so do rows of those who are new."""
    frontend.collectors["new"] = frontend.submit("new", 10)
    rows = [row(request_id) for request_id in [*MEMBERS, "new"]]
    rows[3] = row(IDS[3], finish_reason=1)
    rows[5] = row(IDS[5], num_nans_in_logits=1)

    assert rows_by_add_tokens(frontend, rows) == [IDS[3], IDS[5], "new"]
    assert frontend.collectors[IDS[3]].finished


def test_all_come_one_by_one_with_new_weights(frontend: Frontend) -> None:
    """Each notes the version."""
    rows = [row(request_id) for request_id in MEMBERS]
    counts = [len(rows_by_add_tokens(frontend, rows, version=v)) for v in (None, "a", "a", "b")]

    assert counts == [0, len(rows), 0, len(rows)]


def test_limit(frontend: Frontend) -> None:
    """Whose engine goes on after max_tokens fails at the very row, and alone."""
    rows = [row(request_id) for request_id in MEMBERS]
    for _ in range(8):
        assert rows_by_add_tokens(frontend, rows) == []
    collector = frontend.collectors[IDS[0]]
    assert collector.error is None
    frontend.receive([*rows[:1], *(row(f"nobody {number}") for number in range(20))])

    assert "goes on after 10 tokens" in str(collector.error)
    assert [c.error for c in frontend.collectors.values()].count(None) == len(MEMBERS) - 1


def test_twice_in_a_message(frontend: Frontend) -> None:
    """Then each row counts, in its order."""
    rows = [row(request_id) for request_id in MEMBERS]
    rows.append(row(IDS[0], [6]))

    assert rows_by_add_tokens(frontend, rows) == MEMBERS
    assert frontend.collectors[IDS[0]]._token_ids.tolist() == [5, 5, 5, 6]


@pytest.mark.parametrize(("count", "one_by_one"), [(MOST_OTHERS, 0), (MOST_OTHERS + 1, 18)])
def test_many_rows_of_others(frontend: Frontend, count: int, one_by_one: int) -> None:
    """In such a message all come one by one, with turns for other tasks."""
    rows = [row(request_id) for request_id in MEMBERS]
    rows += [row(f"{number:042}") for number in range(count)]

    assert len(rows_by_add_tokens(frontend, rows)) == one_by_one


def test_most_members() -> None:
    """There are no more than so many; the others' rows come one by one."""
    frontend = Frontend(dict.fromkeys(MEMBERS, 10))
    frontend.core._engines.by_index[0].columns.most_members = 16
    rows = [row(request_id) for request_id in MEMBERS]
    frontend.receive(rows)

    assert rows_by_add_tokens(frontend, rows) == MEMBERS[16:]


def test_nothing_is_left(frontend: Frontend) -> None:
    """When requests have ended, they are in no table."""
    frontend.receive([row(request_id) for request_id in MEMBERS])
    columns = frontend.core._engines.by_index[0].columns
    count = len(columns.places)
    frontend.core.abort(MEMBERS[:10])
    frontend.receive([row(request_id, finish_reason=0) for request_id in MEMBERS[10:]])

    assert (count, len(columns.places)) == (len(MEMBERS), 0)
    assert columns._collecting == 0


def test_parameters_that_change_later() -> None:
    """They are the caller's, and another request may be made of them; nothing is left all the same."""
    frontend = Frontend({})
    changes: list[tuple[int | None, int | None]] = [(None, 1), (1, None)]
    for before, after in changes:
        request = make_request(f"from {before}", 10)
        assert request.sampling_params is not None
        request.sampling_params.logprobs = before
        collector = Collector(request, 0, Waker(), lambda: 9.0, interval=0)
        frontend.core.submit(request, collector)
        request.sampling_params.logprobs = after
        frontend.core.abort([request.request_id])

        assert frontend.core._engines.by_index[0].columns._collecting == 0


# Any mixture -----------------------------------------------------------------------------------

TOKENS = st.sampled_from([0, 1, 127, 128, 255, 256, 0x91, 65535, 65536, 2**32 - 1])
BARE = st.builds(lambda token: {"token_ids": [token]}, TOKENS)
OTHERS: st.SearchStrategy[dict[str, Any] | None] = st.sampled_from(
    [
        None,  # no row
        {"finish_reason": FinishReason.STOP.value},
        {"finish_reason": FinishReason.LENGTH.value, "stop_reason": "a stop"},
        {"token_ids": []},
        {"token_ids": [1, 2]},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": [True]},
        {"token_ids": [1.0]},
        {"token_ids": "x"},
        {"events": [{"type": 1, "timestamp": 2.0}]},
        {"events": [{"type": "wrong"}]},
        {"num_nans_in_logits": 3},
        {"trace_headers": {"name": b"\x91\x05".decode("latin-1")}},
        {"length": 24},
        {"length": 17},
    ]
)
EXTRAS = st.sampled_from(
    [
        row("nobody"),
        row("elsewhere"),
        row(IDS[0]),
        row(IDS[-1], finish_reason=0),
        row(ODD_IDS[0]),
        row("é"),
    ]
)
JUNK = st.sampled_from([5, None, [], ["id"], [b"id", [1]], {"a": 1}, [[], [1]], 0xB7E351D984C62F0B])


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of `Frontend.receive`."""
    length = draw(st.sampled_from([SHORT, VLLM, VLLM, 24]))
    unusual = draw(st.dictionaries(st.sampled_from(ALL_IDS), OTHERS, max_size=4))
    rows = []
    for request_id in ALL_IDS:
        fields = unusual[request_id] if request_id in unusual else draw(BARE)
        if fields is not None:
            values: dict[str, Any] = {"length": VLLM if len(fields) > 1 else length, **fields}
            if set(fields) - {"token_ids", "length"}:
                values["length"] = VLLM
            rows.append(row(request_id, **values))
    extras = draw(st.lists(EXTRAS, max_size=2)) + draw(st.lists(JUNK, max_size=1)) * draw(
        st.sampled_from([0] * 9 + [1])
    )
    for extra in extras:
        rows.insert(draw(st.integers(0, len(rows))), extra)
    if draw(st.booleans()) and draw(st.booleans()):
        rows = draw(st.permutations(rows))
    return {
        "rows": rows,
        "timestamp": draw(st.sampled_from([1.5, 2.5, 0.0])),
        "version": draw(st.sampled_from(["a", "a", "a", "b", None])),
        "finished": draw(st.sampled_from([None, None, None, [IDS[1], "nobody"]])),
    }


ABORTS = st.lists(st.sampled_from(ALL_IDS), max_size=2)


@examples(100)
@given(
    steps=st.lists(st.tuples(messages(), ABORTS), min_size=1, max_size=6),
    limits=st.lists(st.sampled_from([3, 4, 6, 100]), min_size=len(ALL_IDS), max_size=len(ALL_IDS)),
    streams=st.lists(st.sampled_from(ALL_IDS), max_size=3),
)
def test_any_rows(
    steps: list[tuple[dict[str, Any], list[str]]], limits: list[int], streams: list[str]
) -> None:
    """Columns and single rows leave the same, whatever comes."""
    by_request = dict(zip(ALL_IDS, limits, strict=True))
    columns, plain = (Frontend(by_request, streams=streams) for _ in range(2))
    warm_up = {"rows": [row(request_id) for request_id in ALL_IDS], "version": "a"}
    for message, aborts in [(warm_up, []), *steps]:
        columns.receive(**message)
        plain.receive_one_by_one(**message)
        columns.core.abort(aborts)
        plain.core.abort(aborts)

        assert columns.state() == plain.state()
    counts = [sum(c.row_count for c in f.collectors.values()) for f in (columns, plain)]
    event("some by columns" if counts[0] < counts[1] else "none by columns")
    assert counts[0] <= counts[1]
