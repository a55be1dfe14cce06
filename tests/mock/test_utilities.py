"""Utility calls: answers, failures in a real engine's words, and the state behind them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.mock.driver import Driver, drive, drive_many
from tests.mock.small_slices import limit_preemptions

from trio_vllm.mock.engine import ABORTS_AT_ONCE, TAKEN_AT_ONCE
from trio_vllm.protocol import EventType, FinishReason

KINDS: list[dict[str, Any]] = [
    {},
    {"schedule": True, "max_num_seqs": 1000},
    {"schedule": True, "max_num_seqs": 1000, "inter_token_latency": 0.001},
]
"""Of schedules: none, by step, by request."""


def test_the_plain_answers() -> None:
    """Methods that change nothing, each with a plausible value."""
    driver = drive(block_size=128, supported_tasks=("generate", "embed"))
    answers: dict[str, Any] = {
        "get_supported_tasks": ["generate", "embed"],
        "is_sleeping": False,
        "is_scheduler_paused": False,
        "get_weight_version": "default",
        "reset_prefix_cache": True,
        "reset_mm_cache": None,
        "reset_encoder_cache": None,
        "wake_up": True,
        "resume_scheduler": None,
        "execute_dummy_batch": None,
        "profile": None,
        "get_kv_cache_group_metadata": [
            {
                "group_idx": 0,
                "kind": "full_attention",
                "block_size": 128,
                "sliding_window": None,
            }
        ],
    }
    for method, expected in answers.items():
        assert driver.call(method) == expected, method
    assert driver.call("profile", True, None, None, None, None) is None
    assert driver.call("save_sharded_state", "path", None, None) is None
    assert driver.call("collective_rpc", "update_weights", None, [], {"update_info": {}}) == [None]


def test_call_ids_come_back_as_they_were() -> None:
    """Over the whole range that upstream uses."""
    driver = drive()
    for call_id in (0, 2**63, 2**64 - 1, -1, -(2**63)):
        driver.call_id = call_id - 1
        assert driver.call("is_sleeping") is False


@pytest.mark.parametrize(
    ("method", "args", "failure"),
    [
        ("nope", [], "'EngineCoreProc' object has no attribute 'nope'"),
        ("_pause_in", ["abort", True], "'EngineCoreProc' object has no attribute '_pause_in'"),
        ("reset_prefix_cache", [1, 2, 3, 4], ""),
        (
            "set_weight_version",
            [],
            "EngineCore.set_weight_version() missing 1 required positional argument:"
            " 'weight_version'",
        ),
        ("set_weight_version", [5], "weight_version must be a string, got 5"),
        ("pause_scheduler", ["bogus", True], "Invalid pause mode: bogus"),
        ("pause_generation", ["bogus"], "Invalid pause mode: bogus"),
        ("add_lora", [["ad", 0, "x"]], "id must be > 0, got 0"),
        ("add_lora", [["ad", 1, ""]], "lora_path cannot be empty"),
        ("add_lora", [7], "Expected `LoRARequest`, got 7"),
        (
            "release_kv_cache_memory",
            [],
            "release_kv_cache_memory() requires a completed pause first",
        ),
        *(
            (
                method,
                args,
                "Worker failed with error 'LoRA is not enabled. Use --enable-lora to enable LoRA.',"
                " please check the stack trace above for the root cause",
            )
            for method, args in (
                ("list_loras", []),
                ("add_lora", [["ad", 1, "lora-adapter"]]),
                ("remove_lora", [1]),
                ("pin_lora", [1]),
            )
        ),
        (
            "collective_rpc",
            ["nope"],
            "Worker failed with error ''Worker' object has no attribute 'nope'',"
            " please check the stack trace above for the root cause",
        ),
    ],
)
def test_failures(method: str, args: list[Any], failure: str) -> None:
    """In the words of a real engine."""
    assert drive().fail(method, *args) == f"Call to {method} method failed: {failure}"


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("sleep", ["deep"]),
        ("wake_up", [5]),
        ("remove_lora", [[1]]),
        ("collective_rpc", [[]]),
        ("pause_scheduler", [[]]),
    ],
)
def test_arguments_of_a_wrong_type_only_fail(method: str, args: list[Any]) -> None:
    """The engine lives on."""
    driver = drive(max_loras=1)
    assert driver.fail(method, *args).startswith(f"Call to {method} method failed: ")
    assert driver.call("is_sleeping") is False


def test_the_weight_version_is_in_every_message() -> None:
    """From the call on, also of a batch that does not change."""
    driver = drive()
    driver.add("a", 9)
    driver.step(3)
    assert driver.call("set_weight_version", "v2") is None
    assert driver.call("get_weight_version") == "v2"
    driver.run()

    assert [batch.weight_version for batch in driver.batches()] == ["default"] * 3 + ["v2"] * 6


def test_checksums_change_with_the_weights() -> None:
    """And are the same for the same ones."""
    driver = drive()
    (before,) = driver.call("compute_weight_checksums")
    assert driver.call("compute_weight_checksums") == [before]
    driver.call("set_weight_version", "v2")
    assert driver.call("compute_weight_checksums") != [before]


# LoRA -------------------------------------------------------------------------------------------


def test_adapters_come_and_go() -> None:
    """Whether a call changed anything is its answer."""
    driver = drive(max_loras=2)
    assert driver.call("add_lora", ["one", 1, "path"]) is True
    assert driver.call("add_lora", ["one", 1, "path"]) is True
    assert driver.call("add_lora", ["two", 2, "path"]) is True
    assert driver.call("list_loras") == [1, 2]
    assert driver.call("remove_lora", 1) is True
    assert driver.call("remove_lora", 1) is False
    for method in ("remove_lora", "pin_lora"):  # of the executor, not of a worker
        text = f"Call to {method} method failed: lora_id must be greater than 0."
        assert driver.fail(method, 0) == text
    assert driver.call("list_loras") == [2]


def test_one_adapter_too_many_evicts_the_least_used_that_is_not_pinned() -> None:
    """Until all are pinned."""
    driver = drive(max_loras=2)
    for adapter_id in (1, 2):
        driver.call("add_lora", ["x", adapter_id, "path"])
    assert driver.call("pin_lora", 1) is True
    driver.call("add_lora", ["x", 3, "path"])
    assert driver.call("list_loras") == [1, 3]
    assert "LoRA 9 is not registered" in driver.fail("pin_lora", 9)
    driver.call("pin_lora", 3)
    assert "All items are pinned" in driver.fail("add_lora", ["x", 4, "path"])
    driver.add("a", lora_request=["x", 5, "path"])
    driver.run()
    assert len(driver.tokens("a")) == 4


def test_a_request_loads_its_adapter() -> None:
    """As in a real engine."""
    driver = drive(max_loras=2)
    driver.add("a", lora_request=["x", 5, "path"])

    assert driver.call("list_loras") == [5]


# Pausing ----------------------------------------------------------------------------------------


@pytest.fixture(params=["pause_scheduler", "pause_generation"])
def pause(request: pytest.FixtureRequest) -> str:
    """Both names of the call."""
    name: str = request.param
    return name


def test_a_pause_that_aborts(pause: str) -> None:
    """Ends are grouped by client, and the answer comes after them."""
    driver = drive(client_count=2)
    for i in range(4):
        driver.add(f"r{i}", 50, client_index=i % 2)
    driver.step(2)
    driver.add("waiting", 50)
    assert driver.call(pause, "abort", True) is None

    assert [to for to, _ in driver.sent[-3:]] == [0, 1, 0]
    assert driver.batches(0)[-1].finished_requests == ["r0", "r2", "waiting"]
    assert driver.batches(1)[-1].finished_requests == ["r1", "r3"]
    for request_id in ("r0", "r1", "r2", "r3", "waiting"):
        assert driver.finish_reason(request_id) is FinishReason.ABORT
    assert driver.call("is_sleeping") is True
    assert driver.call("is_scheduler_paused") is True
    driver.run()
    assert not driver.engine.has_unfinished


@pytest.mark.parametrize("config", KINDS, ids=str)
@pytest.mark.parametrize("how", ["pause", "sleep", "shutdown"])
def test_many_requests_are_aborted_in_slices(how: str, config: dict[str, Any]) -> None:
    """Each slice is a step, in which there are no tokens; the answer comes behind the last one."""
    driver = drive_many(5 * ABORTS_AT_ONCE, **config)
    call_id = 0
    if how == "shutdown":
        driver.keep(driver.engine.shut_down(driver.now, drain=False))
    else:
        call_id = driver.post("sleep" if how == "sleep" else "pause_scheduler")
    unfinished, counts = sum(driver.engine.counts), list[int]()
    while unfinished:
        counts.append(unfinished)
        assert driver.answer(call_id) is None
        assert driver.has_work
        driver.step()
        unfinished = sum(driver.engine.counts)

    assert [(5 - place) * ABORTS_AT_ONCE for place in range(1, 5)] == counts
    assert (driver.answer(call_id) is not None) == (how != "shutdown")
    rows = [output for batch in driver.batches() for output in batch.outputs]
    assert [row.request_id for row in rows] == [f"r{n}" for n in range(5 * ABORTS_AT_ONCE)]
    assert {(len(row.new_token_ids), row.finish_reason) for row in rows} == {
        (0, FinishReason.ABORT)
    }
    driver.run()


def test_what_comes_while_many_are_aborted() -> None:
    """It waits until that is done, and is then taken in its order."""
    driver = drive_many(3 * ABORTS_AT_ONCE)
    pause = driver.post("pause_scheduler")
    last = f"r{3 * ABORTS_AT_ONCE - 1}"
    driver.abort(last)
    driver.add("new", 2)
    second, question = driver.post("pause_scheduler"), driver.post("is_scheduler_paused")
    assert not any(map(driver.answer, (pause, second, question)))
    driver.run()

    assert all(map(driver.answer, (pause, second, question)))
    assert [driver.finish_reason(one) for one in (last, "new")] == [FinishReason.ABORT] * 2
    driver.call("resume_scheduler")
    assert not driver.engine.has_unfinished


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_calls_behind_a_pause_find_it_done(config: dict[str, Any]) -> None:
    """No request holds the cache, an id is free again, and a session is a new one."""
    driver = drive(**config)
    driver.add("session", 1, resumable=True)
    driver.run()
    for number in range(2 * ABORTS_AT_ONCE):
        driver.add(f"r{number}", 500)
    driver.step(2)
    driver.sent.clear()
    driver.post("pause_scheduler")
    reset, resume = driver.post("reset_prefix_cache"), driver.post("resume_scheduler")
    last = f"r{2 * ABORTS_AT_ONCE - 1}"
    driver.add(last, 3)
    driver.add("session", 2, resumable=True)
    assert not driver.answer(resume)
    driver.run()

    answer = driver.answer(reset)
    assert answer is not None
    assert answer.result is True
    for request_id, count in ((last, 3), ("session", 2)):
        rows = [o for b in driver.batches() for o in b.outputs if o.request_id == request_id]
        reasons = [row.finish_reason for row in rows if row.finished]
        assert reasons == [FinishReason.ABORT, FinishReason.LENGTH]
        assert sum(len(row.new_token_ids) for row in rows) == count


def test_much_that_comes_while_many_are_aborted() -> None:
    """It is taken in slices, too, and refused if the engine shuts down meanwhile."""
    driver = drive_many(2 * ABORTS_AT_ONCE)
    driver.post("pause_scheduler")
    questions = [driver.post("is_scheduler_paused") for _ in range(2 * TAKEN_AT_ONCE)]
    driver.step()
    answered = [driver.answer(question) is not None for question in questions]
    assert answered.count(True) == answered.index(False) == TAKEN_AT_ONCE
    driver.add("late", 5)
    driver.keep(driver.engine.shut_down(driver.now, drain=False))
    driver.run()

    answers = [driver.answer(question) for question in questions]
    texts = [None if answer is None else answer.failure_message for answer in answers]
    assert texts == [None] * TAKEN_AT_ONCE + ["Server shutting down"] * TAKEN_AT_ONCE
    assert driver.finish_reason("late") is FinishReason.ABORT


@pytest.mark.parametrize("config", KINDS, ids=str)
@pytest.mark.parametrize("first", ["reset_prefix_cache", "pause_scheduler"])
def test_calls_behind_a_preemption_find_it_done(
    first: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it goes on in slices: no request runs, and none holds the cache."""
    limit_preemptions(monkeypatch, 10)
    driver = drive_many(45, **config)
    driver.call(first, *(["keep"] if first == "pause_scheduler" else [True]))
    assert driver.engine.counts[0] > 0

    assert driver.call("reset_prefix_cache") is True
    assert driver.call("pause_scheduler", "wait") is None
    while driver.engine.counts[0]:
        driver.step()
    assert driver.engine.counts == (0, 45)
    driver.call("resume_scheduler")
    driver.step(2)
    assert driver.engine.counts == (45, 0)


@pytest.mark.parametrize("config", KINDS, ids=str)
@pytest.mark.parametrize("resets", [False, True])
def test_many_requests_are_preempted_in_slices(
    resets: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run again in their order, but for those that are aborted meanwhile."""
    limit_preemptions(monkeypatch, 10)
    driver = drive_many(45, **config)
    driver.call("pause_scheduler", "keep", not resets)
    if resets:
        driver.call("reset_prefix_cache", True)
    counts = list[int]()
    while driver.engine.counts[0]:
        counts.append(driver.engine.counts[0])
        if counts[-1] == 25:
            driver.abort("r2", "r44")
        assert driver.has_work
        driver.step()
    assert 4 <= len(counts) <= 5  # a step may have to end before
    assert driver.engine.counts == (0, 43)

    driver.sent.clear()
    driver.call("resume_scheduler")
    while driver.engine.counts[0] < 43:
        driver.step()
    while len(driver.batches()[-1].outputs) < 43:
        driver.step()
    order = list(dict.fromkeys(o.request_id for b in driver.batches() for o in b.outputs))
    assert order == [f"r{n}" for n in range(44) if n != 2]
    driver.abort(*order)
    driver.run()


def test_a_pause_that_waits(pause: str) -> None:
    """It is answered when what runs has finished; what is new does not start."""
    driver = drive()
    driver.add("a", 5)
    driver.step(2)
    call_id = driver.post(pause, "wait")
    driver.add("b", 2)
    driver.step(2)
    assert driver.answer(call_id) is None
    assert driver.call("is_scheduler_paused") is True
    driver.run()

    assert None is not driver.answer(call_id)
    assert driver.finish_reason("a") is FinishReason.LENGTH
    if pause == "pause_generation":
        (output,) = driver.outputs("b")
        assert output.error is not None
        assert (output.error.code, output.error.retryable) == ("engine_paused", True)
    else:
        assert driver.outputs("b") == []
    driver.call("resume_scheduler")
    driver.run()
    driver.add("c", 2)
    driver.run()
    assert len(driver.tokens("c")) == 2
    assert pause == "pause_generation" or len(driver.tokens("b")) == 2


def test_a_pause_that_waits_for_nothing_is_answered_at_once(pause: str) -> None:
    """Also while something waits, which cannot run."""
    driver = drive()
    assert driver.call(pause, "wait") is None
    driver.call("resume_scheduler")
    driver.add("a", 5)
    assert driver.call(pause, "wait") is None


def test_an_abort_ends_the_wait_of_a_pause() -> None:
    """Nothing runs any more then."""
    driver = drive()
    driver.add("a", 500)
    driver.step()
    call_id = driver.post("pause_scheduler", "wait")
    driver.abort("a")
    driver.run()

    assert None is not driver.answer(call_id)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_pause_that_keeps(pause: str, clear_cache: bool) -> None:
    """Requests go on afterwards with the next token, those that came meanwhile start."""
    driver = drive()
    driver.add("a", 6)
    driver.step(2)
    assert driver.call(pause, "keep", clear_cache) is None
    driver.add("b", 2)
    driver.run()
    driver.step(5)
    assert len(driver.tokens("a")) == 2
    assert driver.outputs("b") == []
    stats = driver.batches()[-1].scheduler_stats
    assert stats is not None
    assert (
        stats.num_running_reqs + (1 if clear_cache else 0),
        stats.num_waiting_reqs - (1 if clear_cache else 0),
    ) == (1, 1)

    driver.call("resume_scheduler")
    driver.run()
    whole = drive()
    whole.add("a", 6)
    whole.run()
    assert whole.tokens("a") == driver.tokens("a")
    assert len(driver.tokens("b")) == 2
    events = driver.outputs("a")[2].events
    kinds = [event.type for event in events or ()]
    assert ([EventType.PREEMPTED, EventType.SCHEDULED] if clear_cache else []) == kinds
    assert driver.outputs("a")[2].prefill_stats is None


def test_resetting_the_prefix_cache() -> None:
    """Running requests are in the way, unless they may be put back into the queue."""
    driver = drive()
    driver.add("a", 6)
    driver.step(2)
    assert driver.call("reset_prefix_cache", False, False) is False
    assert driver.call("reset_prefix_cache", True, False) is True
    driver.run()

    assert len(driver.tokens("a")) == 6
    events = driver.outputs("a")[2].events
    assert events is not None
    assert [event.type for event in events] == [EventType.PREEMPTED, EventType.SCHEDULED]


# Sleeping ---------------------------------------------------------------------------------------


def asleep(driver: Driver) -> tuple[Any, Any]:
    return driver.call("is_sleeping"), driver.call("is_scheduler_paused")


def test_sleeping_and_waking_up() -> None:
    """Levels above 0 give memory up; waking up gets it back and resumes."""
    driver = drive()
    assert driver.call("sleep", 1, "abort") is None
    assert asleep(driver) == (True, True)
    driver.add("a", 2)
    driver.run()
    assert driver.outputs("a") == []
    driver.call("resume_scheduler")
    assert asleep(driver) == (True, False)
    driver.call("sleep", 2, "keep")
    assert driver.call("wake_up", ["weights"]) is False
    assert asleep(driver) == (True, True)
    assert driver.call("wake_up", ["nonsense"]) is False
    assert driver.call("wake_up", ["kv_cache"]) is True
    assert asleep(driver) == (False, False)
    driver.run()
    assert len(driver.tokens("a")) == 2


def test_sleeping_at_level_0_only_pauses() -> None:
    """The tag "scheduling" undoes it."""
    driver = drive()
    driver.add("a", 4)
    driver.step()
    driver.call("sleep", 0, "keep")
    assert asleep(driver) == (True, True)
    assert driver.call("wake_up", ["scheduling"]) is True
    assert asleep(driver) == (False, False)
    driver.run()
    assert len(driver.tokens("a")) == 4
    events = driver.outputs("a")[1].events
    assert events is None


def test_scheduling_does_not_resume_what_sleeps() -> None:
    """Memory comes first."""
    driver = drive()
    driver.call("sleep", 1)
    assert driver.call("wake_up", ["scheduling"]) is False
    assert driver.call("wake_up", ["scheduling", "kv_cache"]) is False
    assert driver.call("wake_up", None) is True


def test_sleeping_after_the_wait() -> None:
    """The answer comes when it sleeps."""
    driver = drive()
    driver.add("a", 4)
    driver.step()
    call_id = driver.post("sleep", 1, "wait")
    assert driver.answer(call_id) is None
    driver.run()
    assert None is not driver.answer(call_id)
    driver.call("resume_scheduler")
    assert asleep(driver) == (True, False)


def test_releasing_kv_cache_memory() -> None:
    """Needs a pause and nobody in it; waking up gets it back."""
    driver = drive()
    driver.call("pause_scheduler")
    assert driver.call("release_kv_cache_memory") is None
    assert "requires all executor memory" in driver.fail("release_kv_cache_memory")
    assert driver.call("wake_up", ["kv_cache"]) is True
    assert asleep(driver) == (False, False)


# Shutting down ----------------------------------------------------------------------------------


def test_shutting_down_at_once() -> None:
    """What runs is aborted, what comes is too, and calls fail."""
    driver = drive()
    driver.add("session", 1, resumable=True)
    driver.run()
    driver.add("a", 50)
    driver.step()
    driver.keep(driver.engine.shut_down(driver.now, drain=False))
    driver.add("b", 50)
    failure = driver.answer(driver.post("is_sleeping"))

    assert driver.finish_reason("a") is FinishReason.ABORT
    assert driver.finish_reason("b") is FinishReason.ABORT
    assert driver.outputs("session")[-1].finish_reason is FinishReason.ABORT
    assert failure is not None
    assert failure.failure_message == "Server shutting down"
    assert not driver.engine.has_unfinished


def test_shutting_down_after_what_runs() -> None:
    """What runs comes to its end."""
    driver = drive()
    driver.add("a", 5)
    driver.step()
    driver.keep(driver.engine.shut_down(driver.now, drain=True))
    driver.add("b", 5)
    driver.run()

    assert driver.finish_reason("a") is FinishReason.LENGTH
    assert driver.finish_reason("b") is FinishReason.ABORT


CLEARING: list[tuple[str, list[Any], bool]] = [
    ("reset_mm_cache", [], True),
    ("reset_encoder_cache", [], True),
    ("collective_rpc", ["reset_mm_cache"], True),
    ("collective_rpc", ["reset_encoder_cache"], True),
    ("collective_rpc", ["check_health"], False),
    ("reset_prefix_cache", [], False),
    ("pause_scheduler", [], True),
    ("pause_scheduler", ["wait", True], True),
    ("pause_scheduler", ["abort", False], False),
    ("pause_generation", ["keep"], True),
    ("pause_generation", ["keep", False], False),
    ("sleep", [], True),
    ("sleep", [0], False),
]
"""Utility calls, and whether workers have no queries of late interaction after them."""


@pytest.mark.parametrize(("method", "args", "clears"), CLEARING)
def test_queries_go_with_the_caches(method: str, args: list[Any], clears: bool) -> None:
    """A document is refused that comes after such a call."""
    driver = drive(supported_tasks=("token_embed",))
    add_scored(driver, "query", "cache_query")
    driver.run()

    driver.call(method, *args)
    driver.call("wake_up")
    add_scored(driver, "document", "score_doc")
    driver.run()

    expected = FinishReason.ERROR if clears else FinishReason.STOP
    assert driver.finish_reason("document") is expected


def test_queries_go_with_released_memory() -> None:
    """Which takes a pause that has left them there."""
    driver = drive(supported_tasks=("token_embed",))
    add_scored(driver, "query", "cache_query")
    driver.run()

    driver.call("pause_scheduler", "abort", False)
    driver.call("release_kv_cache_memory")
    driver.call("wake_up")
    add_scored(driver, "document", "score_doc")
    driver.run()

    assert driver.finish_reason("document") is FinishReason.ERROR


def test_queries_go_when_a_pause_has_waited() -> None:
    """They are there for the documents that came before it."""
    driver = drive(supported_tasks=("generate", "token_embed"))
    add_scored(driver, "query", "cache_query")
    driver.add("a", 3)
    driver.step()

    call_id = driver.post("pause_scheduler", "wait")
    driver.run()
    assert driver.answer(call_id) is not None
    driver.call("resume_scheduler")
    add_scored(driver, "document", "score_doc")
    driver.run()

    assert driver.finish_reason("document") is FinishReason.ERROR


def add_scored(driver: Driver, request_id: str, mode: str) -> None:
    """Add a query of late interaction, or a document for it."""
    late = [mode, "q", 2 if mode == "cache_query" else None]
    params = [None, None, None, None, "token_embed", False, None, late]
    driver.add(request_id, sampling_params=None, pooling_params=params)
