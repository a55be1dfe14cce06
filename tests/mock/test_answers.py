"""What requests are answered with: lengths, echoes, prompts, files; and that all paths agree."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.mock.driver import Driver, drive
from tests.mock.test_paths import comparable
from tests.slices import finish

from trio_vllm import ConfigurationError
from trio_vllm.mock import MockEngineConfig
from trio_vllm.mock.answer_file import read_answer_file
from trio_vllm.mock.ends import first_repetition
from trio_vllm.mock.spread import Spread
from trio_vllm.protocol import FinishReason, RepetitionDetectionParams

EOS = 151_645
"""Beyond the vocabulary of the mock, as that of a real model may be."""
LARGE = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
SCHEDULES: list[dict[str, Any]] = [{}, LARGE, {"inter_token_latency": 0.001}]
"""None; by step; by request."""


def run(driver: Driver, request_id: str = "a", max_tokens: int = 100, **fields: Any) -> list[int]:
    """Add a request and run it to its end; its tokens."""
    driver.add(request_id, max_tokens, **fields)
    driver.run()
    return driver.tokens(request_id)


# Lengths ----------------------------------------------------------------------------------------


def lengths(count: int = 500, **config: Any) -> list[int]:
    driver = drive(**config)
    for i in range(count):
        driver.add(f"r{i}", 1000, params={"_eos_token_id": 7})
    driver.run()
    return [len(driver.tokens(f"r{i}")) for i in range(count)]


@pytest.mark.parametrize("schedule", [{}, {"max_num_seqs": 4096}])
def test_lengths_are_distributed_as_asked(schedule: dict[str, Any]) -> None:
    """Mean and deviation to a few standard errors; cut off at 70 %."""
    found = np.array(lengths(output_tokens_mean=50, output_tokens_std_dev=10, **schedule))

    assert abs(found.mean() - 50) < 3 * 10 / np.sqrt(found.size)
    assert abs(found.std() - 10) < 1
    assert 15 <= found.min() < 30
    assert 70 < found.max() <= 85


def test_long_and_short_ones_are_cut_off() -> None:
    """At 70 % from the mean."""
    spread = Spread(1000, 1000)
    found = [spread.draw(7, position) for position in range(100)]

    assert min(found) == 300
    assert max(found) == 1700


def test_lengths_depend_on_seed_and_request_alone() -> None:
    """The same with and without a schedule, others with another seed."""
    asked = {"output_tokens_mean": 20, "output_tokens_std_dev": 5}
    assert lengths(50, **asked) == lengths(50, **asked, **LARGE)
    assert lengths(50, **asked) != lengths(50, **asked, seed=1)
    assert lengths(50, output_tokens_mean=20) == [20] * 50


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("eos", [7, EOS])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_the_end_of_a_text_is_its_token(
    schedule: dict[str, Any], eos: int, chunk_size: int
) -> None:
    """With nothing in front of it changed."""
    if schedule:
        chunk_size = 1
    config = {"output_token_chunk_size": chunk_size, **schedule}
    driver = drive(output_tokens_mean=10, **config)
    tokens = run(driver, params={"_eos_token_id": eos})

    assert tokens == [*run(drive(**config))[:9], eos]
    assert driver.finish_reason("a") is FinishReason.STOP
    assert driver.outputs("a")[-1].stop_reason is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_length_is_not_above_what_the_request_says(schedule: dict[str, Any]) -> None:
    """``max_tokens`` and stop tokens end it earlier, ``min_tokens`` and no end of text do so later."""
    driver = drive(output_tokens_mean=10, **schedule)
    eos = {"_eos_token_id": 7}
    assert len(run(driver, "limit", 9, params=eos)) == 9
    assert driver.finish_reason("limit") is FinishReason.LENGTH
    assert len(run(driver, "min", params={**eos, "min_tokens": 30})) == 31
    assert driver.finish_reason("min") is FinishReason.STOP
    assert len(run(driver, "ignored")) == 100
    stop = run(drive(), "stop")[4]
    assert len(run(driver, "stop", params={**eos, "stop_token_ids": [stop]})) == 5
    assert driver.outputs("stop")[-1].stop_reason == stop


def test_a_length_is_the_chunks_own_in_a_session() -> None:
    """Each chunk of streaming input ends by itself."""
    driver = drive(output_tokens_mean=10, output_tokens_std_dev=3)
    counts = []
    for _ in range(4):
        before = len(driver.tokens("a"))
        run(driver, params={"_eos_token_id": 7}, resumable=True)
        counts.append(len(driver.tokens("a")) - before)

    assert len(set(counts)) > 1
    assert 3 <= min(counts) <= max(counts) <= 17


@pytest.mark.parametrize(
    "options",
    [
        {"output_tokens_mean": -1},
        {"output_tokens_mean": 0.5},
        {"output_tokens_mean": float("nan")},
        {"output_tokens_mean": 10, "output_tokens_std_dev": 4},
        {"output_tokens_std_dev": 4},
        {"output_tokens_mean": 10, "output": "echo"},
    ],
)
def test_lengths_without_sense_are_refused(options: dict[str, Any]) -> None:
    """With the name of the option."""
    with pytest.raises(ConfigurationError, match="output_tokens_"):
        MockEngineConfig(**options)


# Paths ------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.sampled_from([None, 7, 70_000]),
        st.integers(0, 20),
        st.lists(st.integers(0, 31), max_size=2),
        st.integers(0, 6),
    ),
    max_size=12,
)


@given(
    requests=REQUESTS,
    output=st.sampled_from(["random", "prompt"]),
    chunk_size=st.sampled_from([1, 1, 3]),
    schedule=st.booleans(),
)
@examples(60)
def test_all_paths_agree(
    requests: list[tuple[Any, ...]], output: str, chunk_size: int, *, schedule: bool
) -> None:
    """The fast one and the plain one, message by message."""
    config: dict[str, Any] = {"schedule": schedule, "output": output, "vocab_size": 32}
    config |= {"output_tokens_mean": 20, "output_tokens_std_dev": 6}
    config["output_token_chunk_size"] = 1 if schedule else chunk_size
    drivers = [drive(fast_path=fast_path, **config) for fast_path in (True, False)]
    for driver in drivers:
        for number, (max_tokens, eos, min_tokens, stops, steps) in enumerate(requests):
            params = {"_eos_token_id": eos, "min_tokens": min_tokens, "stop_token_ids": stops}
            driver.add(f"r{number}", max_tokens, params=params)
            driver.step(steps)
        driver.run()

    assert comparable(drivers[0]) == comparable(drivers[1])


# Prompts ----------------------------------------------------------------------------------------


def answer(request_id: str, engine_index: int = 0, **fields: Any) -> list[int]:
    """The tokens of a request to a new engine."""
    return run(drive(engine_index, output="prompt"), request_id, 8, **fields)


def test_tokens_depend_on_prompt_and_seed() -> None:
    """Not on the request id or the engine."""
    seeded: dict[str, Any] = {"params": {"seed": 5}}
    assert answer("a", **seeded) == answer("b", 3, **seeded)
    different = [
        answer("a", **seeded),
        answer("a", params={"seed": 6}),
        answer("a", prompt_token_ids=[1, 2], **seeded),
        answer("a"),
        answer("b"),
    ]
    assert len(set(map(tuple, different))) == 5


def test_greedy_tokens_depend_on_the_prompt_alone() -> None:
    """A sampling seed has no effect on them."""
    greedy = {"temperature": 0.0}
    assert answer("a", params=greedy) == answer("b", 3, params={**greedy, "seed": 5})
    assert answer("a", params=greedy) != answer("a", params=greedy, prompt_token_ids=[1, 2])


def test_without_it_tokens_depend_on_the_request() -> None:
    """And not on the prompt."""
    greedy = {"temperature": 0.0}
    assert run(drive(), "a", params=greedy) != run(drive(), "b", params=greedy)
    assert run(drive(), "a", prompt_token_ids=[1]) == run(drive(), "a", prompt_token_ids=[2])


# Echoes -----------------------------------------------------------------------------------------

PROMPT = [5, 31_999, 2**31 - 1, 7, 5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_echo_is_the_prompt(schedule: dict[str, Any]) -> None:
    """All of it, in order, and then the end of text, if the request has a token for it."""
    driver = drive(output="echo", **schedule)
    assert run(driver, "a", prompt_token_ids=PROMPT) == PROMPT
    assert driver.finish_reason("a") is FinishReason.STOP
    eos = {"_eos_token_id": EOS}
    assert run(driver, "b", prompt_token_ids=PROMPT, params=eos) == [*PROMPT, EOS]
    assert driver.finish_reason("b") is FinishReason.STOP


def test_an_echo_keeps_to_the_parameters() -> None:
    """Limit, least length, stop tokens."""
    driver = drive(output="echo")
    assert run(driver, "limit", 3, prompt_token_ids=PROMPT) == PROMPT[:3]
    assert driver.finish_reason("limit") is FinishReason.LENGTH
    stop = {"stop_token_ids": [7]}
    assert run(driver, "stop", prompt_token_ids=PROMPT, params=stop) == PROMPT[:4]
    assert driver.outputs("stop")[-1].stop_reason == 7
    least = {"min_tokens": 7}
    assert run(driver, "min", prompt_token_ids=PROMPT, params=least) == [*PROMPT, *PROMPT[:3]]


@pytest.mark.parametrize("schedule", SCHEDULES[:2])
def test_an_echo_goes_on_after_a_preemption(schedule: dict[str, Any]) -> None:
    """With the token that comes next."""
    driver = drive(output="echo", **schedule)
    driver.add("a", 100, prompt_token_ids=[*range(40)])
    driver.step(10)
    driver.call("reset_prefix_cache", True)
    driver.run()

    assert driver.tokens("a") == [*range(40)]


def test_log_probabilities_are_about_what_is_echoed() -> None:
    """Chosen token, rank and log probability belong together, also beyond the vocabulary."""
    driver = drive(output="echo", vocab_size=100)
    run(driver, prompt_token_ids=PROMPT, params={"logprobs": 100})

    for token, output in zip(PROMPT, driver.outputs("a"), strict=True):
        logprobs = output.new_logprobs
        assert logprobs is not None
        (ids,), (values,), (rank,) = logprobs.token_ids, logprobs.logprobs, logprobs.ranks
        assert token == ids[0]
        assert ids[rank] == token  # the first column is the chosen one, the others follow by rank
        assert values[rank] == values[0]
        assert len(set(ids[1:].tolist())) == 100


# Repetitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("prompt", "params", "count"),
    [
        ([1, 2, 3, 2, 3, 2, 3, 9], (2, 1, 3), 7),
        ([1, 2, 3, 2, 3, 2, 3, 9], (2, 1, 4), None),
        ([1, 2, 3, 2, 3, 2, 3, 9], (1, 1, 2), None),
        ([4, 4, 4, 4, 4], (9, 2, 2), 4),
    ],
)
def test_repetitions_end_a_request(
    schedule: dict[str, Any],
    prompt: list[int],
    params: tuple[int, int, int],
    count: int | None,
) -> None:
    """As soon as a pattern stands there often enough."""
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    driver = drive(output="echo", **schedule)
    detection = {"repetition_detection": dict(zip(names, params, strict=True))}
    assert run(driver, prompt_token_ids=prompt, params=detection) == prompt[:count]
    last = driver.outputs("a")[-1]
    if count is None:
        assert last.finish_reason is FinishReason.STOP
    else:
        assert last.finish_reason is FinishReason.REPETITION
        assert last.stop_reason == "repetition_detected"


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the last tokens are a repetition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[-size:] * params.min_count:
            return True
    return False


@given(
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
    sizes=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    min_count=st.integers(2, 4),
    min_tokens=st.integers(0, 10),
    scans=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_the_first_repetition_is_found(
    tokens: list[int],
    sizes: tuple[int, int],
    min_count: int,
    min_tokens: int,
    scans: tuple[int, int],
) -> None:
    """As by looking at the end after each token, however many are looked at at once."""
    params = RepetitionDetectionParams(
        max_pattern_size=max(sizes), min_pattern_size=min(sizes), min_count=min_count
    )

    request = SimpleNamespace(
        emitted=100,
        end=100 + len(tokens),
        tokens=lambda _source, first, count: tokens[first - 100 : first - 100 + count],
    )
    expected = next(
        (
            count
            for count in range(1, len(tokens))
            if count >= min_tokens and repeats(tokens[:count], params)
        ),
        None,
    )
    search = first_repetition(
        request,
        None,  # type: ignore[arg-type]
        params,
        min_tokens,
        first_scan=scans[0],
        scan=scans[1],
    )
    assert finish(search)[0] == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("params", "slices"),
    [
        ({"stop_token_ids": [5]}, 20),
        ({"repetition_detection": {"max_pattern_size": 4, "min_count": 9}}, 20),
        ({"repetition_detection": {"max_pattern_size": 9000, "min_count": 2}}, 60),
    ],
)
def test_a_late_end_is_searched_for_in_slices(
    schedule: dict[str, Any], params: dict[str, Any], slices: int
) -> None:
    """The request starts when it is found, and what comes behind it waits."""
    driver = drive(vocab_size=2**31, max_model_len=1_000_000, **schedule)
    driver.add("a", 400_000, params=params)
    call = driver.post("is_sleeping")

    turns = 0
    while driver.answer(call) is None:
        assert sum(driver.engine.counts) == 0
        driver.step()
        turns += 1

    assert turns > slices
    assert sum(driver.engine.counts) == 1


# Files ------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of answers."""
    return tmp_path / "answers.jsonl"


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return str(path)


def test_lines_without_more_are_for_one_request_after_the_other(path: Path) -> None:
    """Those that come later get drawn tokens."""
    driver = drive(output=write(path, {"tokens": [1, 2]}, {"tokens": [3]}))
    assert [run(driver, request_id) for request_id in "abc"] == [[1, 2], [3], run(drive(), "c")]


def test_lines_are_found_by_id_prompt_and_number(path: Path) -> None:
    """In this order; of prompts the longest."""
    output = write(
        path,
        {"index": 4, "tokens": [40]},
        {"prompt": [1], "tokens": [10]},
        {"prompt": [1, 2], "tokens": [20]},
        {"id": "cmpl-x", "tokens": [30]},
    )
    driver = drive(output=output)
    found = [
        run(driver, request_id, prompt_token_ids=prompt)[0]
        for request_id, prompt in [
            ("a", [1, 3]),
            ("b", [1, 2, 3]),
            ("cmpl-x-0-12345678", [1, 2]),
            ("cmpl-x", [2]),
            ("cmpl-xy", [2]),
        ]
    ]
    assert found == [10, 20, 30, 30, 40]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "error", "abort"])
def test_lines_say_why_a_request_ends(path: Path, reason: str, schedule: dict[str, Any]) -> None:
    """After the tokens given, or as many drawn ones."""
    output = write(
        path,
        {"tokens": [1, 2], "finish_reason": reason, "stop_reason": "why"},
        {"length": 5, "finish_reason": reason, "stop_reason": 77},
    )
    driver = drive(output=output, **schedule)
    assert run(driver, "a") == [1, 2]
    assert run(driver, "b") == run(drive(), "b")[:5]
    last = [driver.outputs(request_id)[-1] for request_id in "ab"]
    assert [str(output.finish_reason) for output in last] == [reason] * 2
    assert [output.stop_reason for output in last] == ["why", 77]


def test_the_end_of_text_follows_given_tokens(path: Path) -> None:
    """As frontends expect it, who drop it; a length includes it."""
    driver = drive(output=write(path, {"tokens": [1, 2]}, {"length": 3}, {"tokens": [1]}))
    eos = {"_eos_token_id": EOS}
    assert run(driver, "a", params=eos) == [1, 2, EOS]
    assert run(driver, "b", params=eos) == [*run(drive(), "b")[:2], EOS]
    assert run(driver, "c", 1, params=eos) == [1]
    assert driver.finish_reason("c") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[1]", "JSON object"),
        ("{", "line 2"),
        ('{"tokens": []}', "tokens must be"),
        ('{"tokens": [1, true]}', "tokens must be"),
        ('{"tokens": [2147483648]}', "tokens must be"),
        ('{"tokens": [1], "length": 1}', "takes one of tokens, text, length"),
        ("{}", "takes one of tokens"),
        ('{"text": 7}', "text must be"),
        ('{"length": 0}', "length must be"),
        ('{"length": 1, "index": -1}', "index must be"),
        ('{"length": 1, "index": 0, "id": "a"}', "exclude each other"),
        ('{"length": 1, "id": ""}', "id must be"),
        ('{"length": 1, "finish_reason": "tired"}', "finish_reason must be one of stop"),
        ('{"length": 1, "stop_reason": 1.5}', "stop_reason must be"),
        ('{"length": 1, "lenght": 1}', "unknown key 'lenght'"),
    ],
)
def test_a_line_that_does_not_parse_is_named(path: Path, line: str, fault: str) -> None:
    """With its number and what is wrong."""
    path.write_text(f'{{"length": 1}}\n{line}\n')
    with pytest.raises(ConfigurationError) as caught:
        MockEngineConfig(output=str(path))
    assert f"{path}, line 2: " in str(caught.value)
    assert fault in str(caught.value)


def test_a_text_takes_a_tokenizer(path: Path) -> None:
    """Which the line cannot know, but the options together."""
    with pytest.raises(ConfigurationError, match="takes tokenizer"):
        MockEngineConfig(output=write(path, {"length": 1}, {"text": "hello"}))


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    """As is one with nothing in it."""
    with pytest.raises(ConfigurationError, match="random, prompt, echo or a file"):
        MockEngineConfig(output=str(path))
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="no line"):
        MockEngineConfig(output=str(path))


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    """Each engine has the same lines, and does not parse them anew at each frontend."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"tokens": [1]}\n')
    first, again = read_answer_file(path), read_answer_file(path)
    path.write_text('{"tokens": [1, 2]}\n')
    changed = read_answer_file(path)

    assert again is first
    assert [line.tokens for line in (*first, *changed)] == [[1], [1, 2]]
