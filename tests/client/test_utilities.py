"""The typed utility methods: what goes over the wire, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from tests.client.scripted import NEVER, Answer, Failure, scripted_engines
from tests.recorded import recording
from trio.testing import assert_checkpoints

from trio_vllm.client import EngineCoreClient
from trio_vllm.client.utility_calls import KvCacheGroup
from trio_vllm.client.utility_methods import PauseMode
from trio_vllm.errors import (
    InconsistentUtilityResultsError,
    UtilityCallFailedError,
    UtilityRefusedError,
    UtilityResultError,
    UtilityTimeoutError,
)
from trio_vllm.protocol import LoRARequest

Call = Callable[[EngineCoreClient], Awaitable[Any]]

ADAPTER = LoRARequest(lora_name="ad-one", lora_int_id=1, lora_path="lora-adapter")
GROUP = {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}
SUMS = {"layers.0.weight": "abc"}


def different(*results: object) -> Callable[[int], object]:
    """One result for each engine."""
    return lambda engine_index: results[engine_index]


METHODS: list[tuple[Call, str, list[Any], Answer, Any]] = [
    # call, method, its arguments on the wire, the answers of two engines, what becomes of them
    (lambda c: c.get_supported_tasks(), "get_supported_tasks", [], ["generate"], ["generate"]),
    (
        lambda c: c.get_kv_cache_group_metadata(),
        "get_kv_cache_group_metadata",
        [],
        [{**GROUP, "unknown": 1}, {**GROUP, "group_idx": 1, "sliding_window": 128}],
        [
            KvCacheGroup(group_idx=0, kind="full_attention", block_size=16),
            KvCacheGroup(group_idx=1, kind="full_attention", block_size=16, sliding_window=128),
        ],
    ),
    (lambda c: c.reset_prefix_cache(), "reset_prefix_cache", [False, False], True, True),
    (
        lambda c: c.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
        "reset_prefix_cache",
        [True, True],
        different(True, False),
        False,
    ),
    (lambda c: c.reset_mm_cache(), "reset_mm_cache", [], None, None),
    (lambda c: c.reset_encoder_cache(), "reset_encoder_cache", [], None, None),
    (lambda c: c.pause_generation(), "pause_generation", ["abort", True], None, None),
    (
        lambda c: c.pause_generation(PauseMode.KEEP, clear_cache=False),
        "pause_generation",
        ["keep", False],
        None,
        None,
    ),
    (lambda c: c.resume_scheduler(), "resume_scheduler", [], None, None),
    (lambda c: c.is_scheduler_paused(), "is_scheduler_paused", [], True, True),
    (lambda c: c.sleep(), "sleep", [1, "abort"], None, None),
    (lambda c: c.sleep(2, PauseMode.WAIT), "sleep", [2, "wait"], None, None),
    (lambda c: c.wake_up(), "wake_up", [None], True, True),
    (lambda c: c.wake_up(("weights",)), "wake_up", [["weights"]], different(False, True), False),
    (lambda c: c.is_sleeping(), "is_sleeping", [], False, False),
    (lambda c: c.release_kv_cache_memory(), "release_kv_cache_memory", [], None, None),
    (
        lambda c: c.add_lora(ADAPTER),
        "add_lora",
        [["ad-one", 1, "lora-adapter", None, False, False]],
        True,
        True,
    ),
    (lambda c: c.remove_lora(1), "remove_lora", [1], different(True, False), False),
    (lambda c: c.pin_lora(1), "pin_lora", [1], different(True, False), False),
    (lambda c: c.list_loras(), "list_loras", [], [2, 1], {1, 2}),
    (lambda c: c.start_profile(), "profile", [True, None, None, None], None, None),
    (
        lambda c: c.start_profile("run", delay_iterations=1, max_iterations=2),
        "profile",
        [True, "run", 1, 2],
        None,
        None,
    ),
    (
        lambda c: c.start_profile(profiler_kwargs={"stacks": True}),
        "profile",
        [True, None, None, None, {"stacks": True}],
        None,
        None,
    ),
    (lambda c: c.stop_profile(), "profile", [False, None], None, None),
    (lambda c: c.stop_profile("run"), "profile", [False, "run"], None, None),
    (lambda c: c.execute_dummy_batch(), "execute_dummy_batch", [], None, None),
    (lambda c: c.get_weight_version(), "get_weight_version", [], "v7", "v7"),
    (lambda c: c.set_weight_version("v8"), "set_weight_version", ["v8"], None, None),
    (
        lambda c: c.init_weight_transfer_engine({"port": 5}),
        "collective_rpc",
        ["init_weight_transfer_engine", None, [], {"init_info": {"port": 5}}],
        [None],
        None,
    ),
    (
        lambda c: c.start_weight_update(),
        "collective_rpc",
        ["start_weight_update", None, [], None],
        [None],
        None,
    ),
    (
        lambda c: c.start_draft_weight_update(),
        "collective_rpc",
        ["start_draft_weight_update", None, [], None],
        [None],
        None,
    ),
    (
        lambda c: c.update_weights({"names": ["a"]}),
        "collective_rpc",
        ["update_weights", None, [], {"update_info": {"names": ["a"]}}],
        [None],
        None,
    ),
    (
        lambda c: c.update_weights([{"names": ["a"]}, {"names": ["b"]}]),
        "collective_rpc",
        ["update_weights", None, [], {"update_info": [{"names": ["a"]}, {"names": ["b"]}]}],
        [None],
        None,
    ),
    (
        lambda c: c.finish_weight_update(),
        "collective_rpc",
        ["finish_weight_update", None, [], None],
        [None],
        None,
    ),
    (
        lambda c: c.shutdown_weight_transfer_engine(),
        "collective_rpc",
        ["shutdown_weight_transfer_engine", None, [], None],
        [None],
        None,
    ),
    (
        lambda c: c.compute_weight_checksums(),
        "compute_weight_checksums",
        [],
        different([SUMS], [SUMS, {}]),
        [SUMS, SUMS, {}],
    ),
    (
        lambda c: c.save_sharded_state("folder"),
        "save_sharded_state",
        ["folder", None, None],
        None,
        None,
    ),
    (
        lambda c: c.save_sharded_state("folder", pattern="{rank}", max_size=5),
        "save_sharded_state",
        ["folder", "{rank}", 5],
        None,
        None,
    ),
    (
        lambda c: c.collective_rpc("rank", (1, "a"), {"b": 2}, worker_timeout=5.0),
        "collective_rpc",
        ["rank", 5.0, [1, "a"], {"b": 2}],
        different([0, 1], [2, 3]),
        [0, 1, 2, 3],
    ),
    (
        lambda c: c.call_utility_consensus("get_weight_version"),
        "get_weight_version",
        [],
        "v7",
        "v7",
    ),
    (lambda c: c.call_utility("anything", 1, "a"), "anything", [1, "a"], 5, {0: 5, 1: 5}),
]
IDS = [f"{method}-{number}" for number, (_, method, *_) in enumerate(METHODS)]


@pytest.mark.parametrize(("call", "method", "args", "answer", "expected"), METHODS, ids=IDS)
async def test_every_method(
    autojump_clock: trio.testing.MockClock,
    call: Call,
    method: str,
    args: list[Any],
    answer: Answer,
    expected: object,
) -> None:
    """Both engines are told the same, at once; their answers become one result."""
    async with scripted_engines({method: answer}, ["0.33.0", "0.33.0"]) as (client, engines):
        with assert_checkpoints():
            result = await call(client)

    assert engines.calls == {0: [(method, args)], 1: [(method, args)]}
    assert result == expected


@pytest.mark.parametrize(("call", "method", "args", "answer", "expected"), METHODS, ids=IDS)
async def test_every_method_fails_with_the_engine(
    autojump_clock: trio.testing.MockClock,
    call: Call,
    method: str,
    args: list[Any],
    answer: Answer,
    expected: object,
) -> None:
    """If one engine fails, the error says which, why, and who succeeded; all were asked."""
    one = answer(0) if callable(answer) else answer
    answers = {method: different(one, Failure("no memory"))}
    async with scripted_engines(answers, ["0.33.0", "0.33.0"]) as (client, engines):
        with pytest.raises(UtilityCallFailedError) as caught:
            await call(client)

    assert [name for name, _ in engines.calls[0]] == [method]
    assert caught.value.method == method
    assert caught.value.failures == {1: f"Call to {method} method failed: no memory"}
    assert caught.value.succeeded == [0]


async def test_every_method_has_a_limit(autojump_clock: trio.testing.MockClock) -> None:
    """The caller's seconds end the wait; who has not answered is named."""

    async with scripted_engines({}, ["0.33.0", "0.33.0"]) as (client, engines):
        engines.answers = {"is_sleeping": lambda index: Failure("x") if index else NEVER}
        begin = trio.current_time()
        with pytest.raises(UtilityTimeoutError) as caught:
            await client.is_sleeping(timeout=3)

    assert trio.current_time() == begin + 3
    assert caught.value.missing_engines == [0]


WRONG: list[tuple[Call, str, object, str]] = [
    (lambda c: c.is_sleeping(), "is_sleeping", 1, "1, not a boolean"),
    (lambda c: c.is_scheduler_paused(), "is_scheduler_paused", None, "None, not a boolean"),
    (lambda c: c.wake_up(), "wake_up", None, "None, not a boolean"),
    (lambda c: c.add_lora(ADAPTER), "add_lora", "yes", "'yes', not a boolean"),
    (lambda c: c.get_weight_version(), "get_weight_version", None, "None, not a string"),
    (lambda c: c.list_loras(), "list_loras", [True], "[True], not a list of integers"),
    (lambda c: c.get_supported_tasks(), "get_supported_tasks", "x", "'x', not a list of strings"),
    (lambda c: c.collective_rpc("m"), "collective_rpc", 5, "5, not a list with an item per worker"),
    (
        lambda c: c.compute_weight_checksums(),
        "compute_weight_checksums",
        [{"a": 1}],
        "[{'a': 1}], not a list of maps from names to checksums",
    ),
    (
        lambda c: c.get_kv_cache_group_metadata(),
        "get_kv_cache_group_metadata",
        [{"group_idx": 0}],
        "[{'group_idx': 0}], not a list of KV-cache groups",
    ),
]


@pytest.mark.parametrize(
    ("call", "method", "result", "text"), WRONG, ids=[method for _, method, *_ in WRONG]
)
async def test_result_of_wrong_type(
    autojump_clock: trio.testing.MockClock, call: Call, method: str, result: object, text: str
) -> None:
    """It is the fault of one engine, for this call only."""
    right = next(answer for _, name, _, answer, _ in METHODS if name == method)
    one = right(0) if callable(right) else right
    answers = {method: different(one, result), "reset_mm_cache": None}
    async with scripted_engines(answers, ["0.33.0", "0.33.0"]) as (client, _):
        with pytest.raises(UtilityResultError) as caught:
            await call(client)
        await client.reset_mm_cache()

    assert (method, 1, result) == (
        caught.value.method,
        caught.value.engine_index,
        caught.value.result,
    )
    assert str(caught.value) == f"utility call '{method}': engine 1 answered {text}"


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda c: c.is_sleeping(), "is_sleeping"),
        (lambda c: c.is_scheduler_paused(), "is_scheduler_paused"),
        (lambda c: c.call_utility_consensus("is_running"), "is_running"),
    ],
    ids=["is_sleeping", "is_scheduler_paused", "any"],
)
async def test_different_results(
    autojump_clock: trio.testing.MockClock, call: Call, method: str
) -> None:
    answers = {method: different(True, False, True)}
    async with scripted_engines(answers, ["0.33.0"] * 3) as (client, _):
        with pytest.raises(InconsistentUtilityResultsError) as caught:
            await call(client)

    assert caught.value.results == {0: True, 1: False, 2: True}
    assert "engine 0: True; engine 1: False; engine 2: True" in str(caught.value)


# Versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.9.2", "0.32.0.post1"])
async def test_pause_of_an_old_engine(autojump_clock: trio.testing.MockClock, version: str) -> None:
    async with scripted_engines({"pause_scheduler": None}, [version]) as (client, engines):
        await client.pause_generation(PauseMode.WAIT, clear_cache=False)

    assert engines.calls[0] == [("pause_scheduler", ["wait", False])]


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0rc1", "0.34.0.dev3+gabc", "my own", ""])
async def test_pause_falls_back_if_the_engine_cannot(
    autojump_clock: trio.testing.MockClock, version: str
) -> None:
    """Development versions may lack what their number promises."""
    async with scripted_engines({"pause_scheduler": None}, [version, version]) as (client, engines):
        await client.pause_generation()

    for calls in engines.calls.values():
        assert [name for name, _ in calls] == ["pause_generation", "pause_scheduler"]


async def test_pause_that_fails_otherwise(autojump_clock: trio.testing.MockClock) -> None:
    """Another failure, or a success of one engine, is no reason to try the other method."""
    for answer in (Failure("no memory"), different(None, Failure("no attribute"))):
        answers = {"pause_generation": answer, "pause_scheduler": None}
        async with scripted_engines(answers, ["0.33.0", "0.33.0"]) as (client, engines):
            with pytest.raises(UtilityCallFailedError, match="pause_generation"):
                await client.pause_generation()

        assert [len(calls) for calls in engines.calls.values()] == [1, 1]


async def test_both_pauses_share_one_limit(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted_engines({"pause_scheduler": lambda _: NEVER}) as (client, _):
        begin = trio.current_time()
        with pytest.raises(UtilityTimeoutError, match="pause_scheduler"):
            await client.pause_generation(timeout=3)

    assert trio.current_time() == begin + 3


async def test_wrong_pause_mode(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted_engines({}) as (client, engines):
        with pytest.raises(ValueError, match="hard"):
            await client.pause_generation("hard")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="hard"):
            await client.sleep(1, "hard")  # type: ignore[arg-type]

    assert engines.calls == {0: []}


async def test_profiler_options_need_a_new_engine(autojump_clock: trio.testing.MockClock) -> None:
    """A 0.32 engine would answer with a failure that has no text."""
    async with scripted_engines({"profile": None}, ["0.33.0", "0.32.0"]) as (client, engines):
        with pytest.raises(UtilityRefusedError, match="profiler_kwargs"):
            await client.start_profile(profiler_kwargs={})
        await client.start_profile()

    assert engines.calls[1] == [("profile", [True, None, None, None])]


# Profiling --------------------------------------------------------------------------------------


async def test_second_profile_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    """Nothing is sent for it; after a stop another start is allowed."""
    async with scripted_engines({"profile": None}) as (client, engines):
        await client.start_profile()
        with pytest.raises(UtilityRefusedError, match="runs already"):
            await client.start_profile()
        await client.stop_profile()
        await client.start_profile()

    assert [args[0] for _, args in engines.calls[0]] == [True, False, True]


async def test_second_profile_at_the_same_time(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted_engines({"profile": None}) as (client, engines):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.start_profile)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(UtilityRefusedError):
                await client.start_profile()

    assert len(engines.calls[0]) == 1


async def test_profile_that_did_not_start(autojump_clock: trio.testing.MockClock) -> None:
    """If no engine started it may be tried again, if one did it must be stopped."""
    answers: dict[str, Answer] = {"profile": Failure("Profiling is not enabled.")}
    async with scripted_engines(answers, ["0.33.0", "0.33.0"]) as (client, engines):
        for _ in range(2):
            with pytest.raises(UtilityCallFailedError, match="not enabled"):
                await client.start_profile()
        engines.answers = {"profile": different(None, Failure("no"))}
        with pytest.raises(UtilityCallFailedError):
            await client.start_profile()
        with pytest.raises(UtilityRefusedError):
            await client.start_profile()
        with pytest.raises(UtilityCallFailedError):
            await client.stop_profile()
        engines.answers = {"profile": None}
        await client.start_profile()


async def test_profile_that_was_not_sent(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted_engines({"profile": None}) as (client, engines):
        with pytest.raises(TypeError):
            await client.start_profile(profiler_kwargs={"a": object()})
        await client.start_profile()

    assert len(engines.calls[0]) == 1


# What is not sent -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda c: c.call_utility("handle_fault_tolerance", {}), "goes deaf"),
        (lambda c: c.call_utility("_send_engine_dead"), "own machinery"),
        (lambda c: c.call_utility("shutdown"), "own machinery"),
        (lambda c: c.call_utility_consensus("step"), "own machinery"),
        (lambda c: c.collective_rpc("get_kv_cache_spec"), "go mute"),
        (lambda c: c.call_utility("collective_rpc", "get_model"), "go mute"),
    ],
    ids=["sentinel", "private", "shutdown", "step", "kv_cache_spec", "model"],
)
async def test_deadly_call_is_refused(
    autojump_clock: trio.testing.MockClock, call: Call, reason: str
) -> None:
    async with scripted_engines({}) as (client, engines):
        with pytest.raises(UtilityRefusedError, match=reason):
            await call(client)

    assert engines.calls == {0: []}


async def test_argument_without_wire_form(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted_engines({}) as (client, engines):
        with pytest.raises(TypeError, match=r"'set_weight_version'.*args\[0\]"):
            await client.set_weight_version(object())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'collective_rpc'.*args\[2\]\[0\]"):
            await client.collective_rpc("m", [{1, 2}])

    assert engines.calls == {0: []}


async def test_adapter_as_a_real_engine_took_it(autojump_clock: trio.testing.MockClock) -> None:
    """The recorded call has three elements; ours has the same, and the defaults written out."""
    (recorded,) = (
        message.decoded[3]
        for message in recording("lora_lifecycle").messages
        if message.channel == "input" and "add_lora" in message.decoded
    )
    async with scripted_engines({"add_lora": True}, ["0.32.0"]) as (client, engines):
        await client.add_lora(ADAPTER)

    ((_, args),) = engines.calls[0]
    assert recorded[0] == args[0][:3]
