"""What becomes of each kind of request."""

from __future__ import annotations

from typing import Any

import numpy as np
import ormsgpack
import pytest
from tests.mock.driver import OMITTED, Driver, drive, pack_add, raw_request

from trio_vllm.mock import COORDINATOR, RequestRefused
from trio_vllm.protocol import EventType, FinishReason, RequestBatchOutputs

LENGTH, STOP, ABORT, ERROR = (
    FinishReason.LENGTH,
    FinishReason.STOP,
    FinishReason.ABORT,
    FinishReason.ERROR,
)


NO_EMBEDDINGS = ["float32", [2**40, 0], ormsgpack.Ext(3, b"")]


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def driver(request: pytest.FixtureRequest) -> Driver:
    """An engine on either path."""
    return drive(fast_path=request.param)


def error_of(driver: Driver, request_id: str) -> str:
    (output,) = driver.outputs(request_id)
    assert output.finish_reason is ERROR
    assert output.new_token_ids == []
    assert output.error is not None
    assert [request_id] in [batch.finished_requests for batch in driver.batches()]
    return output.error.message


def test_a_request_gets_its_tokens_and_a_length(driver: Driver) -> None:
    """One token a step, and the last output says that it is the last."""
    driver.add("a", 5)
    driver.run()

    outputs = driver.outputs("a")
    assert [len(output.new_token_ids) for output in outputs] == [1] * 5
    assert [output.finish_reason for output in outputs] == [None] * 4 + [LENGTH]
    assert not driver.has_work


def test_the_first_output_tells_of_the_prefill(driver: Driver) -> None:
    """Its events have monotonic times: of the ADD and of the step; nothing later repeats them."""
    driver.add("a", 3, prompt_token_ids=[5] * 300)
    driver.run()

    first, *rest = driver.outputs("a")
    assert first.events is not None
    told = [(event.type, event.timestamp) for event in first.events]
    assert told == [(EventType.QUEUED, 100.25), (EventType.SCHEDULED, 101.25)]
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_prompt_tokens == first.prefill_stats.num_computed_tokens == 300
    assert first.prefill_stats.num_cached_tokens == 0
    assert all(output.events is None and output.prefill_stats is None for output in rest)


def test_messages_say_when_and_by_whom(driver: Driver) -> None:
    """Each step is one message with the step's time, the engine's index and the weights."""
    driver = drive(40_000, fast_path=driver.is_fast)
    driver.add("a", 3)
    driver.add("b", 3)
    driver.run()

    batches = driver.batches()
    assert [batch.timestamp for batch in batches] == [101.5, 102.5, 103.5]
    assert {batch.engine_index for batch in batches} == {40_000}
    assert {batch.weight_version for batch in batches} == {"default"}
    assert [batch.finished_requests for batch in batches] == [None, None, ["a", "b"]]


def test_each_client_gets_its_own(driver: Driver) -> None:
    """Outputs go where the request says, not where it came from."""
    driver = drive(client_count=3)
    for client_index in (0, 2, 2):
        driver.add(f"{client_index}-{len(driver.sent)}", 2, client_index=client_index)
        driver.step()
    driver.run()

    for client_index in (0, 2):
        ids = {o.request_id for batch in driver.batches(client_index) for o in batch.outputs}
        assert ids
        assert all(request_id.startswith(str(client_index)) for request_id in ids)
    assert driver.batches(1) == []


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(0, 0), (1, 1), (7, 7), (OMITTED, 16), (2**32 - 1, 97)]
)
def test_max_tokens(driver: Driver, max_tokens: object, expected: int) -> None:
    """Absent is 16; the model's length is the limit, prompt included; 0 ends at once."""
    driver = drive(max_model_len=100, fast_path=driver.is_fast)
    driver.add("a", max_tokens)
    driver.run()

    assert len(driver.tokens("a")) == expected
    assert driver.finish_reason("a") is LENGTH
    assert len([b for b in driver.batches() if b.finished_requests == ["a"]]) == 1


def test_nothing_but_an_id() -> None:
    """Empty sampling parameters are all defaults."""
    driver = drive()
    driver.handle(pack_add(["a", [1], None, {}, None, 0.0]))
    driver.run()

    assert len(driver.tokens("a")) == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": None}, "the prompt is empty"),
        ({"prompt_token_ids": None, "prompt_embeds": NO_EMBEDDINGS}, "the prompt is empty"),
        ({"prompt_token_ids": [1] * 50}, "the prompt of 50 tokens leaves no room"),
        ({"prompt_token_ids": [1] * 51}, "the prompt of 51 tokens leaves no room"),
        ({"lora_request": ["ad", 1, "path"]}, "LoRA is not enabled"),
        ({"params": {"logprobs": -2}}, "logprobs must be at least -1"),
        ({"params": {"logprob_token_ids": [32_000]}}, "beyond the vocabulary"),
        (
            {"params": {"prompt_logprob_token_ids": ["<f4", [1, 1], ormsgpack.Ext(3, bytes(4))]}},
            "must be signed integers in rows",
        ),
        (
            {"sampling_params": None, "pooling_params": [None, None, None, None, "classify"]},
            "Unsupported task: 'classify' Supported tasks: ['embed']",
        ),
        (
            {"sampling_params": None, "pooling_params": []},
            "Unsupported task: None Supported tasks: ['embed']",
        ),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 2**32}, "max_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_embeds": ["float32", [1], 9]}, "prompt_embeds"),
        ({"mm_features": [{}]}, "mm_features"),
    ],
)
def test_what_cannot_run_gets_an_error(fields: dict[str, Any], message: str) -> None:
    """Each such request is answered, and another one is not disturbed."""
    driver = drive(max_model_len=50, supported_tasks=("generate", "embed"))
    driver.add("healthy", 5)
    driver.step()
    driver.add("bad", **fields)
    driver.run()

    assert message in error_of(driver, "bad")
    assert driver.finish_reason("healthy") is LENGTH
    assert driver.engine.summary.errors == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens must be set"),
        ({"sampling_params": None}, "neither sampling nor pooling"),
    ],
)
def test_some_errors_are_only_in_the_log(fields: dict[str, Any], message: str) -> None:
    """As of a real engine, whose input thread catches what it did not expect."""
    driver = drive()
    driver.add("bad", **fields)
    (output,) = driver.outputs("bad")
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, None)
    (entry,) = driver.engine.events.pop_entries()
    assert isinstance(entry, RequestRefused)
    assert message in entry.reason


def test_too_many_numbers_of_vectors_get_an_error() -> None:
    """A vector of each token of the prompt."""
    driver = drive(embedding_size=2**20, supported_tasks=("token_embed",))
    params = [None, None, None, None, "token_embed"]
    driver.add("a", sampling_params=None, pooling_params=params, prompt_token_ids=[1] * 65)

    assert "asks for 68157440 numbers" in error_of(driver, "a")


def test_dimensions_only_cut() -> None:
    """A model has no more than it has; an engine takes a slice."""
    driver = drive(embedding_size=8, supported_tasks=("embed",))
    params = [None, 2**27, None, None, "embed"]
    driver.add("a", sampling_params=None, pooling_params=params)
    driver.run()

    (output,) = driver.outputs("a")
    assert output.pooling_output is not None
    assert output.pooling_output.shape == (8,)


@pytest.mark.parametrize("schedule", [False, True])
def test_late_interaction_gives_numbers(schedule: bool) -> None:
    """0 for the query, and for a document how much its tokens are like those of the query."""
    driver = drive(schedule=schedule, supported_tasks=("token_embed",))
    base = [None, None, None, None, "token_embed", False, None]
    query = [*base, ["cache_query", "q", 2]]
    document = [*base, ["score_doc", "q", None]]
    driver.add("early", sampling_params=None, pooling_params=document)
    driver.add("query", sampling_params=None, pooling_params=query)
    for name in ("one", "two", "three"):
        driver.add(name, sampling_params=None, pooling_params=document)
    driver.run()

    values = {}
    for name in ("query", "one", "two"):
        (output,) = driver.outputs(name)
        assert output.pooling_output is not None
        assert output.pooling_output.shape == ()
        values[name] = float(output.pooling_output.numpy())
    assert values["query"] == 0
    assert values["one"] != values["two"]
    assert 0 < values["one"] < 3  # each of three tokens has a likeness of 1 at most
    for name in ("early", "three"):
        assert "query cache miss for key 'q'" in error_of(driver, name)


def test_too_many_logprobs_get_an_error() -> None:
    """Memory is the limit of what one output can hold."""
    driver = drive(vocab_size=2**31)
    driver.add("a", params={"logprobs": -1})

    assert "logprobs asks for 2147483648 numbers" in error_of(driver, "a")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\x01",
        b"\x80",
        b"\x91\xa1x\x00",
    ],
)
@pytest.mark.parametrize(
    "kind", [b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"", b"\x00\x00"]
)
def test_garbage_is_noted_and_ignored(kind: bytes, payload: bytes) -> None:
    """Nothing that arrives ends the engine."""
    driver = drive()
    driver.add("healthy", 5)
    driver.step()

    driver.handle([kind, payload])
    driver.handle([kind])
    driver.handle([])
    driver.run()

    assert driver.finish_reason("healthy") is LENGTH
    assert driver.engine.summary.errors >= 2
    assert len(driver.engine.events.pop_entries()) == driver.engine.summary.errors


def test_an_unreadable_request_is_answered_to_every_client() -> None:
    """Nobody can tell whose it was."""
    driver = drive(client_count=2)
    driver.handle(pack_add(["bad", "no prompt"]))

    assert [o.request_id for batch in driver.batches(0) for o in batch.outputs] == ["bad"]
    assert [o.request_id for batch in driver.batches(1) for o in batch.outputs] == ["bad"]


def test_an_unreadable_request_does_not_end_one_with_its_id() -> None:
    """An answer would."""
    driver = drive()
    driver.add("a", 5)
    driver.handle(pack_add(["a", "no prompt"]))
    driver.run()

    assert len(driver.tokens("a")) == 5
    assert driver.finish_reason("a") is LENGTH


def test_aux_frames_are_no_obstacle() -> None:
    """Whatever frames come with a request."""
    driver = drive()
    driver.handle(pack_add(raw_request("a"), b"\xab", b"\xab\xab"))
    embeds = np.zeros((40, 8), np.float32)
    raw = raw_request("b", prompt_token_ids=None, prompt_embeds=["float32", [40, 8], 1])
    driver.handle(pack_add(raw, embeds.tobytes()))
    driver.run()

    assert 4 == len(driver.tokens("a")) == len(driver.tokens("b"))
    stats = driver.outputs("b")[0].prefill_stats
    assert stats is not None
    assert stats.num_prompt_tokens == 40


@pytest.mark.parametrize("client_index", [1, 7, 2**32 - 1])
def test_a_client_that_does_not_exist(client_index: int) -> None:
    """Logged, answered nowhere, and nobody dies."""
    driver = drive()
    driver.add("lost", client_index=client_index)
    driver.post("is_sleeping", client_index=client_index)
    driver.add("a")
    driver.run()

    assert {to for to, _ in driver.sent} == {0}
    assert driver.outputs("lost") == []
    assert driver.finish_reason("a") is LENGTH
    assert driver.engine.summary.errors == 2


def test_a_duplicate_does_not_hurt_the_first(driver: Driver) -> None:
    """On the wire its refusal would end the first, so that is only in the journal."""
    driver.add("a", 6)
    driver.step(2)
    driver.add("a", 3)
    driver.run()

    assert len(driver.tokens("a")) == 6
    assert driver.finish_reason("a") is LENGTH
    (entry,) = driver.engine.events.pop_entries()
    assert "in flight" in str(entry)

    driver.add("a", 2)
    driver.run()
    assert len([t for o in driver.outputs("a") for t in o.new_token_ids]) == 8


def test_a_duplicate_of_another_client_is_refused(driver: Driver) -> None:
    """There the refusal hurts nobody."""
    driver = drive(client_count=2)
    driver.add("a", 6)
    driver.step()
    driver.add("a", 3, client_index=1)
    driver.run()

    (batch,) = [b for b in driver.batches(1) if b.outputs]
    assert [output.finish_reason for output in batch.outputs] == [ERROR]
    assert sum(len(o.new_token_ids) for b in driver.batches(0) for o in b.outputs) == 6


# Aborts -----------------------------------------------------------------------------------------


def test_an_abort_is_not_answered(driver: Driver) -> None:
    """As with a real engine; only the counts show it."""
    driver.add("a", 50)
    driver.add("b", 50)
    driver.step(3)
    before = len(driver.outputs("a"))

    driver.abort("a", "a", "nope")
    driver.step()

    assert before == len(driver.outputs("a"))
    assert driver.finish_reason("a") is None
    stats = driver.batches()[-1].scheduler_stats
    assert stats is not None
    assert stats.num_running_reqs == 1
    assert all(batch.finished_requests is None for batch in driver.batches())
    assert driver.engine.summary.aborted == 1


def test_the_last_abort_leaves_statistics_alone(driver: Driver) -> None:
    """A message without outputs tells that nothing runs."""
    driver.add("a", 50)
    driver.step()
    driver.abort("a")
    driver.run()

    last = driver.batches()[-1]
    assert last.outputs == []
    assert last.scheduler_stats is not None
    assert last.scheduler_stats.num_running_reqs == 0


def test_add_abort_add_at_once(driver: Driver) -> None:
    """The second life of an id is a whole one."""
    driver.abort("a")
    driver.add("a", 5)
    driver.abort("a", "b")
    driver.add("a", 3)
    driver.run()

    assert len(driver.tokens("a")) == 3
    assert driver.finish_reason("a") is LENGTH


def test_an_abort_after_the_end_changes_nothing(driver: Driver) -> None:
    """The id is unknown by then."""
    driver.add("a", 2)
    driver.run()
    count = len(driver.sent)

    driver.abort("a")
    driver.run()

    assert count == len(driver.sent)
    assert driver.engine.summary.aborted == 0


def test_abort_immediately(driver: Driver) -> None:
    """Added and aborted in one."""
    driver = drive(has_coordinator=True)
    driver.add("a", abort_immediately=True)
    driver.run()

    assert driver.outputs("a") == []
    assert driver.batches()[-1].finished_requests == ["a"]
    assert driver.engine.summary.aborted == 1


def test_with_a_coordinator_aborts_are_listed() -> None:
    """Such a frontend counts what is in flight by these ids."""
    driver = drive(has_coordinator=True, client_count=2)
    driver.add("a", 50)
    driver.add("b", 50, client_index=1)
    driver.add("c", 50)
    driver.step()
    driver.abort("a", "b")
    driver.step()

    assert driver.batches(0)[-1].finished_requests == ["a"]
    (batch,) = [b for b in driver.batches(1) if b.finished_requests]
    assert batch.finished_requests == ["b"]
    assert batch.outputs == []


# Stop tokens ------------------------------------------------------------------------------------


def stream(count: int, **config: Any) -> list[int]:
    driver = drive(**config)
    driver.add("a", count)
    driver.run()
    return driver.tokens("a")


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("fast_path", [True, False])
def test_a_stop_token_ends_its_request(fast_path: bool, chunk_size: int) -> None:
    """It is the last token sent, and the stop reason."""
    tokens = stream(5000)
    stop = tokens[4321]
    driver = drive(output_token_chunk_size=chunk_size, fast_path=fast_path)
    driver.add("a", 5000, params={"stop_token_ids": [stop, 99_999]})
    driver.run()

    end = tokens.index(stop) + 1
    assert tokens[:end] == driver.tokens("a")
    last = driver.outputs("a")[-1]
    assert (STOP, stop) == (last.finish_reason, last.stop_reason)


def test_a_stop_token_beats_the_length() -> None:
    """Both at the same token."""
    tokens = stream(3)
    driver = drive()
    driver.add("a", 3, params={"stop_token_ids": [tokens[2]]})
    driver.run()

    assert driver.finish_reason("a") is STOP


def test_stop_tokens_count_from_min_tokens() -> None:
    """Before that they are not even drawn."""
    size = 10
    tokens = stream(200, vocab_size=size)
    stop = tokens[0]
    driver = drive(vocab_size=size)
    params = {"stop_token_ids": [stop], "_all_stop_token_ids": [stop], "min_tokens": 60}
    params["_eos_token_id"] = 3
    driver.add("a", 200, params=params)
    driver.run()

    got = driver.tokens("a")
    assert not {stop, 3} & set(got[:60])
    assert 60 + tokens[60:].index(stop) + 1 == len(got)
    assert stop == got[-1]
    same = [a == b for a, b in zip(tokens, got, strict=False) if a not in {stop, 3}]
    assert all(same)


def test_a_vocabulary_of_stop_tokens_ends() -> None:
    """Where everything is masked, nothing can be."""
    driver = drive(vocab_size=2)
    driver.add("a", 9, params={"_all_stop_token_ids": [0, 1], "min_tokens": 5})
    driver.run()

    assert len(driver.tokens("a")) == 9


def test_end_of_text_is_off_unless_asked_for() -> None:
    """Lengths are exact; with the option it stops, and has no stop reason."""
    tokens = stream(50, vocab_size=100)
    eos = tokens[30]
    params = {"_eos_token_id": eos, "_all_stop_token_ids": [eos]}
    for stop_at_eos, count, reason in (
        (False, 50, LENGTH),
        (True, tokens.index(eos) + 1, STOP),
    ):
        driver = drive(vocab_size=100, stop_at_eos=stop_at_eos)
        driver.add("a", 50, params=params)
        driver.run()

        last = driver.outputs("a")[-1]
        assert tokens[:count] == driver.tokens("a")
        assert (reason, None) == (last.finish_reason, last.stop_reason)


# Other kinds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        ([None, 8, None, None, "embed"], (8,)),
        ([None, None, None, None, "embed"], (64,)),
        ([None, 5, None, None, "token_embed"], (3, 5)),
    ],
)
def test_a_pooling_request_gets_a_vector(params: list[Any], shape: tuple[int, ...]) -> None:
    """Always the same one, of length one, in one output that also tells of the prefill."""
    vectors = []
    for _ in range(2):
        driver = drive(supported_tasks=("embed", "token_embed"))
        driver.add("a", sampling_params=None, pooling_params=params)
        driver.run()
        (output,) = driver.outputs("a")
        assert output.pooling_output is not None
        assert output.prefill_stats is not None
        assert (output.finish_reason, output.new_token_ids) == (STOP, [])
        vectors.append(output.pooling_output.numpy())

    one, other = vectors
    assert shape == one.shape
    assert np.float32 == one.dtype
    assert np.array_equal(one, other)
    assert np.allclose(np.linalg.norm(one, axis=-1), 1)


def test_the_size_of_vectors_can_be_set() -> None:
    """The option of the configuration."""
    driver = drive(embedding_size=7, supported_tasks=("embed",))
    driver.add("a", sampling_params=None, pooling_params=[None, None, None, None, "embed"])
    driver.run()

    (output,) = driver.outputs("a")
    assert output.pooling_output is not None
    assert output.pooling_output.shape == (7,)


def test_trace_headers_come_back() -> None:
    """On every output."""
    driver = drive()
    driver.add("a", trace_headers={"traceparent": "00-1"})
    driver.run()

    assert [o.trace_headers for o in driver.outputs("a")] == [{"traceparent": "00-1"}] * 4


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 990, 1100, 65_535, 65_536, 1_000_000])
def test_ids_of_any_length(size: int) -> None:
    """They come back as they went."""
    driver = drive()
    for request_id in ("i" * size, "é\0🙂../" + "i" * size):
        driver.add(request_id, 3)
        driver.run()

        assert len(driver.tokens(request_id)) == 3
        assert driver.finish_reason(request_id) is LENGTH


# Sessions ---------------------------------------------------------------------------------------


def test_a_session_ends_each_chunk_and_goes_on() -> None:
    """Its tokens go on where they ended; the ADD that closes it is not answered."""
    driver = drive()
    driver.add("a", 3, resumable=True)
    driver.add("b", 2)
    driver.run()
    driver.add("a", 4, resumable=True)
    driver.add("a", 2, resumable=True)  # waits for the one before
    driver.run()

    assert [o.finish_reason for o in driver.outputs("a") if o.finish_reason] == [LENGTH] * 3
    assert stream(9) == driver.tokens("a")

    driver.add("a", 5)
    driver.run()
    assert len(driver.tokens("a")) == 9
    driver.add("a", 1)
    driver.run()
    assert stream(1)[0] == driver.tokens("a")[-1]


def test_a_session_that_is_closed_while_a_chunk_runs() -> None:
    """The chunk is the last."""
    driver = drive(has_coordinator=True)
    driver.add("a", 5, resumable=True)
    driver.step()
    driver.add("a", 1)
    driver.run()

    assert len(driver.tokens("a")) == 5
    driver.add("a", 5)
    driver.run()
    assert len(driver.tokens("a")) == 10


def test_an_abort_ends_a_session() -> None:
    """Whether or not a chunk runs."""
    driver = drive(has_coordinator=True)
    for running in (0, 1):
        driver.add("a", 5, resumable=True)
        driver.step(2) if running else driver.run()
        driver.abort("a")
        driver.run()
        assert driver.batches()[-1].finished_requests == ["a"]
        count = len(driver.tokens("a"))
        driver.add("a", 1)
        driver.run()
        assert stream(1) == driver.tokens("a")[count:]


def test_a_refused_chunk_ends_its_session() -> None:
    """What follows is a new request."""
    driver = drive()
    driver.add("a", 3, resumable=True)
    driver.run()
    driver.add("a", None, resumable=True)
    driver.add("a", 2)
    driver.run()

    reasons = [o.finish_reason for o in driver.outputs("a") if o.finish_reason is not None]
    assert reasons == [LENGTH, ERROR, LENGTH]
    assert stream(2) == driver.tokens("a")[3:]


def test_a_session_of_chunks_that_end_at_once() -> None:
    """However many have piled up, the first after them that takes a step waits for it."""
    driver = drive()
    driver.add("a", 2, resumable=True)
    driver.step()
    for _ in range(2_000):
        driver.add("a", 0, resumable=True)
    driver.add("a", 3, resumable=True)
    driver.add("a", 0, resumable=True)
    driver.step()

    assert [o.finish_reason for o in driver.outputs("a") if o.finish_reason] == [LENGTH] * 2_001
    driver.run()
    assert sum(output.finish_reason is LENGTH for output in driver.outputs("a")) == 2_003
    assert stream(5) == driver.tokens("a")


def test_what_follows_the_end_of_a_session_is_new() -> None:
    """Also if both came while a chunk was running."""
    driver = drive()
    driver.add("a", 2, resumable=True)
    driver.step()
    driver.add("a", 9)
    driver.add("a", 3)
    driver.add("a", 3)  # a duplicate of that
    driver.run()

    assert stream(2) + stream(3) == driver.tokens("a")


# Statistics -------------------------------------------------------------------------------------


def test_statistics_come_when_counts_change(driver: Driver) -> None:
    """And only then; they are true after the step."""
    driver.add("a", 4, prompt_token_ids=[1] * 10)
    driver.step()
    driver.add("b", 2, prompt_token_ids=[1] * 7)
    driver.run()

    told = [batch.scheduler_stats for batch in driver.batches()]
    running = [stats and stats.num_running_reqs for stats in told]
    assert running == [1, 2, 1, 0]
    queries = [
        (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries)
        for stats in told
        if stats
    ]
    assert queries == [(1, 10), (1, 7), (0, 0), (0, 0)]


def test_a_steady_batch_has_no_statistics(driver: Driver) -> None:
    """They would say the same again."""
    driver.add("a", 6)
    driver.run()

    told = [batch.scheduler_stats is not None for batch in driver.batches()]
    assert told == [True, False, False, False, False, True]


def test_the_coordinator_is_told_of_counts() -> None:
    """In messages of their own: at most one in 20 ms, but at once when nothing runs."""
    driver = drive(has_coordinator=True)
    now = driver.now
    sent = []
    for i in range(10):
        driver.engine.handle(pack_add(raw_request(f"r{i}", 100)), now)
        now += 0.009
        sent += [m for m in driver.engine.step(now) if m[0] == COORDINATOR]
    assert len(sent) == 4
    driver.keep(sent)
    driver.now = now
    driver.run()

    told = [o for o in driver.told_coordinator() if isinstance(o, RequestBatchOutputs)]
    counts = [o.scheduler_stats.num_running_reqs for o in told if o.scheduler_stats]
    assert [*counts[:4], counts[-1]] == [1, 4, 7, 10, 0]
    assert all(o.outputs == [] and o.finished_requests is None for o in told)


def test_the_journal_notes_requests_when_asked() -> None:
    """A line for each start and each end."""
    driver = drive(log_requests=True, output_token_chunk_size=2)
    driver.add("a", 5)
    driver.add("b", 500)
    driver.step(4)
    driver.abort("b")
    driver.run()

    entries = driver.engine.events.pop_entries()
    assert [type(e).__name__ for e in entries] == ["RequestStarted"] * 2 + ["RequestFinished"] * 2
    assert "request_id='a', prompt_len=3, max_tokens=5, chunk_size=2" in str(entries[0])
    assert "request_id='a', prompt_len=3, output_tokens=5" in str(entries[2])
    assert "request_id='b', prompt_len=3, output_tokens=8" in str(entries[3])
    assert driver.engine.events.pop_entries() == []
    summary = driver.engine.summary
    assert (
        summary.requests,
        summary.tokens,
        summary.finished,
        summary.aborted,
        summary.errors,
    ) == (2, 13, 1, 1, 0)


@pytest.mark.parametrize(("task", "rows"), [("classify", 1), ("token_classify", 3)])
@pytest.mark.parametrize("num_labels", [1, 4])
def test_labels_get_probabilities(task: str, rows: int, num_labels: int) -> None:
    """Several sum to one, a single one is between 0 and 1 and differs from request to request."""
    driver = drive(num_labels=num_labels, supported_tasks=(task,))
    for i in range(5):
        params = [None, None, None, None, task]
        driver.add(f"r{i}", sampling_params=None, pooling_params=params)
    driver.run()

    found = []
    for i in range(5):
        (output,) = driver.outputs(f"r{i}")
        assert output.pooling_output is not None
        values = output.pooling_output.numpy()
        assert values.shape == ((rows, num_labels) if rows > 1 else (num_labels,))
        assert ((values > 0) & (values < 1)).all()
        if num_labels > 1:
            assert np.allclose(values.sum(axis=-1), 1)
        found.append(float(values.reshape(-1)[0]))
    assert len(set(found)) == 5


def test_without_activation_there_are_logits_and_vectors_of_any_length() -> None:
    """As the request asks."""
    driver = drive(num_labels=50, supported_tasks=("classify", "embed"))
    for task in ("classify", "embed"):
        params = [False, None, None, None, task]
        driver.add(task, sampling_params=None, pooling_params=params)
    driver.run()

    for task in ("classify", "embed"):
        (output,) = driver.outputs(task)
        assert output.pooling_output is not None
        values = output.pooling_output.numpy()
        assert values.min() < 0
        assert not np.isclose(np.linalg.norm(values), 1)


# Replaying a trace ------------------------------------------------------------------------------


def test_a_trace_is_replayed(driver: Driver) -> None:
    """Token by token up to its end, whatever stop tokens there are."""
    trace = [7, 3, 7, 31_999, 0]
    params = {"trace_decode_token_ids": trace, "stop_token_ids": [3]}
    driver.add("a", 5, params=params)
    driver.add("b", 3, params=params)
    driver.run()

    assert driver.tokens("a") == trace
    assert driver.tokens("b") == trace[:3]
    assert driver.finish_reason("a") is LENGTH


def test_a_trace_goes_on_after_a_preemption(driver: Driver) -> None:
    """With the token that comes next."""
    trace = [*range(100, 110)]
    driver.add("a", 10, params={"trace_decode_token_ids": trace})
    driver.step(4)
    driver.call("reset_prefix_cache", True)
    driver.run()

    assert driver.tokens("a") == trace


def test_a_trace_beyond_the_vocabulary_is_refused(driver: Driver) -> None:
    """Where a real engine would replay what it cannot embed."""
    driver.add("a", 1, params={"trace_decode_token_ids": [32_000]})

    assert "beyond the vocabulary" in error_of(driver, "a")
