"""What holds in every schedule, and that the fast path makes the same ones."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.mock.replay import Json, OracleReplay

from trio_vllm.mock.scheduled_request import RequestStatus, ScheduledRequest
from trio_vllm.mock.scheduling import RowExtras, Sampled, Step

MAX_MODEL_LEN = 40

SEGMENTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 13)).map(list), min_size=1, max_size=3
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": SEGMENTS,
        "output": st.integers(0, 2),
        "max_tokens": st.integers(1, 25),
        "priority": st.integers(-1, 1),
        "arrival": st.sampled_from([0.0, 1.0, 2.0]),
    },
    optional={"cache_salt": st.just("a"), "skip_reading_prefix_cache": st.booleans()},
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), REQUESTS),
        st.tuples(st.just("add"), REQUESTS),
        st.tuples(st.just("step"), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("pause"), st.sampled_from(["no", "new", "all"])),
    ),
    max_size=25,
)


@st.composite
def engine_settings(draw: st.DrawFn) -> Json:
    """Options under which a request of the model's length fits."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    fewest = -(-MAX_MODEL_LEN // block_size) + 1
    chunked = draw(st.booleans())
    return {
        "block_size": block_size,
        "num_blocks": fewest + draw(st.integers(0, 2 * fewest)),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(6, 50) if chunked else st.integers(40, 80)),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 1, 7])),
        "num_speculative_tokens": draw(st.sampled_from([0, 0, 1, 3])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.booleans()),
        "hash": "sha256",
        "hash_seed": "0",
        "events": draw(st.booleans()),
        "release": draw(st.sampled_from([[0, 32], [0, 33]])),
    }


class Watched(OracleReplay):
    """Checks after each step what must hold."""

    def _record(
        self,
        step: Step,
        rows: list[ScheduledRequest],
        extras: dict[ScheduledRequest, RowExtras],
        sampled: dict[ScheduledRequest, Sampled],
    ) -> Json:
        assert step.num_tokens <= self.config.token_budget
        assert self.scheduler.num_running <= self.config.max_running
        tables = [one.table for one in self.order.values()]
        held = Counter(block for table in tables for block in table.blocks)
        assert 0 not in held
        assert len(held) + self.cache.free_count == self.cache.num_blocks - 1
        if not self.cache.enable_prefix_caching:
            assert all(count == 1 for count in held.values())
        return super()._record(step, rows, extras, sampled)


def run(options: Json, operations: list[tuple[Any, ...]], *, fast_path: bool) -> Watched:
    """Perform all, and then step until nothing is left to do."""
    replay = Watched(options, fast_path=fast_path)
    for number, (name, *arguments) in enumerate(operations):
        if name == "add":
            arguments = [{**arguments[0], "id": f"r{number}"}]
        replay.perform([name, *arguments])
    replay.perform(["pause", "no"])
    replay.perform(["step", 10_000])
    return replay


@given(engine_settings(), OPERATIONS)
def test_all_requests_end_and_all_blocks_come_back(
    options: Json, operations: list[tuple[Any, ...]]
) -> None:
    """Whatever happens on the way; and the fast path makes no difference."""
    replay = run(options, operations, fast_path=True)
    assert not replay.scheduler.has_work
    assert all(one.status is RequestStatus.FINISHED for one in replay.order.values())
    assert replay.cache.usage == 0.0
    assert replay.scheduler.reset_prefix_cache(0.0)
    rows = [row for step in replay.steps for row in step.get("rows", ())]
    ends = Counter(row[0] for row in rows if row[2])
    for name, count in ends.items():
        request = replay.order[name]
        delivered = sum(row[1] for row in rows if row[0] == name)
        assert (count, delivered) == (1, request.num_tokens - request.num_prompt_tokens)
        assert replay.left[request] == 0
    assert replay.steps == run(options, operations, fast_path=False).steps
