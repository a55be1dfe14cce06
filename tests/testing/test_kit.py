"""The testing kit: scripted answers, records, virtual time, sockets, the frontend double."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from trio_vllm import (
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    HandshakeOwner,
    SamplingParams,
    open_llm,
    spawn_engine,
)
from trio_vllm.mock import MockEngineConfig
from trio_vllm.protocol import is_vocabulary_question
from trio_vllm.testing import NEVER, Answer, mock_engine, mock_llm, open_frontend


def prompt(*token_ids: int, max_tokens: int = 8) -> GenerateRequest:
    """A request."""
    return GenerateRequest(
        prompt_token_ids=token_ids, sampling_params=SamplingParams(max_tokens=max_tokens)
    )


async def test_answers_by_prompt() -> None:
    """Tokens and their end; other prompts get random tokens."""
    answers: dict[tuple[int, ...], Answer | list[int]] = {
        (1,): [7, 8],
        (2,): Answer([9], FinishReason.STOP, stop_reason=5),
    }
    async with mock_llm(answers=answers) as mock:
        one = await mock.llm.generate(prompt(1))
        two = await mock.llm.generate(prompt(2))
        other = await mock.llm.generate(prompt(3))

    assert (one.token_ids, one.finish_reason) == ([7, 8], FinishReason.STOP)
    assert (two.token_ids, two.stop_reason) == ([9], 5)
    assert (len(other.token_ids), other.finish_reason) == (8, FinishReason.LENGTH)


async def test_max_tokens_cut_an_answer() -> None:
    async with mock_llm(answers={(1,): [7, 8, 9]}) as mock:
        output = await mock.llm.generate(prompt(1, max_tokens=2))

    assert (output.token_ids, output.finish_reason) == ([7, 8], FinishReason.LENGTH)


async def test_answers_by_function_and_errors() -> None:
    def answer(request: EngineCoreRequest) -> Answer | None:
        return Answer(error="out of memory") if request.priority else None

    async with mock_llm(answers=answer) as mock:
        refused = GenerateRequest(
            prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1), priority=1
        )
        output = await mock.llm.generate(refused)

    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert output.error.message == "out of memory"


async def test_an_answer_that_never_comes(autojump_clock: MockClock) -> None:
    """A limit of the program's strikes, and the engine sees the abort."""
    async with mock_llm(answers={(1,): NEVER}) as mock:
        with trio.move_on_after(3600) as scope:
            await mock.llm.generate(prompt(1))
        await trio.testing.wait_all_tasks_blocked()
        (request,) = mock.engine.requests

        assert scope.cancelled_caught
        assert mock.engine.aborted_ids == [request.request_id]


async def test_what_engines_received() -> None:
    async with mock_llm(engine_count=2, randomize_request_ids=False) as mock:
        for index in (0, 1, 1):
            request = attrs.evolve(prompt(index, 5), data_parallel_rank=index)
            await mock.llm.generate(request)
        await mock.llm.client.reset_prefix_cache()

    assert [engine.prompts for engine in mock.engines] == [[[0, 5]], [[1, 5], [1, 5]]]
    assert [call for call, _ in mock.engines[1].calls] == ["reset_prefix_cache"]


async def test_the_question_for_the_vocabulary_is_no_request(tmp_path: Path) -> None:
    """The client asks it by itself: no line of a file and no scripted answer is for it."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"tokens": [5, 6]}\n{"tokens": [7]}\n{"prompt": [1], "length": 9}\n')
    params = SamplingParams(max_tokens=8, eos_token_id=1000)
    scripted: list[EngineCoreRequest] = []
    async with mock_llm(MockEngineConfig(output=str(path)), answers=scripted.append) as mock:
        request = GenerateRequest(prompt_token_ids=[2], sampling_params=params)
        outputs = [await mock.llm.generate(request) for _ in range(2)]

    assert [output.token_ids for output in outputs] == [[5, 6, 1000], [7, 1000]]
    assert mock.engine.prompts == [[2], [2]]
    assert len(scripted) == 2
    asked = [message for message in mock.engine.messages if isinstance(message, EngineCoreRequest)]
    assert [is_vocabulary_question(message) for message in asked] == [True, False, False]


async def test_virtual_time(autojump_clock: MockClock) -> None:
    """Engines that take a minute for a token take none of ours."""
    async with mock_llm(MockEngineConfig(step_interval=60.0)) as mock:
        begin = trio.current_time()
        await mock.llm.generate(prompt(1, max_tokens=61))

        assert trio.current_time() - begin == pytest.approx(3600)


async def test_an_engine_that_is_killed(autojump_clock: MockClock) -> None:
    async with mock_llm(MockEngineConfig(step_interval=1.0), engine_count=2) as mock:
        request = attrs.evolve(prompt(1), data_parallel_rank=1)
        async with mock.llm.stream(request) as deltas:
            await anext(deltas)
            mock.kill(1)
            begin = trio.current_time()
            with pytest.raises(EngineDeadError):
                async for _ in deltas:
                    pass
            assert trio.current_time() - begin == pytest.approx(
                0.2
            )  # as docs/howto/testing.md says

        assert mock.llm.client.engine_indices == [0]
        assert len((await mock.llm.generate(prompt(1))).token_ids) == 8


async def test_lockstep_engines(autojump_clock: MockClock) -> None:
    async with mock_llm(MockEngineConfig(lockstep=True), engine_count=2) as mock:
        for _ in range(3):
            assert len((await mock.llm.generate(prompt(1))).token_ids) == 8


async def test_engines_in_a_thread() -> None:
    """Behind a real socket, for one frontend after the other."""
    with mock_engine(engine_count=2, answers={(1,): [7, 8]}) as engines:
        mode = HandshakeOwner(handshake_address=engines.handshake_address, engine_count=2)
        async with open_llm(mode) as llm:
            assert (await llm.generate(prompt(1))).token_ids == [7, 8]

    assert sum(len(engine.requests) for engine in engines.engines) == 1


def test_engines_that_nobody_comes_for() -> None:
    """They end with the block all the same."""
    with mock_engine() as engines:
        pass

    assert engines.engine.messages == []


async def test_the_frontend_double() -> None:
    """It sends a request twice, which no frontend does, and an abort; it sees all that comes."""
    with mock_engine() as engines:
        async with open_frontend(
            HandshakeOwner(handshake_address=engines.handshake_address)
        ) as frontend:
            request = EngineCoreRequest(
                request_id="r",
                prompt_token_ids=[1],
                sampling_params=SamplingParams(max_tokens=3),
                arrival_time=0.0,
            )
            await frontend.send(request)
            outputs = await frontend.collect("r")
            answer = await frontend.call("is_sleeping")
            await frontend.abort(["r"])

            assert sum(len(output.new_token_ids) for output in outputs) == 3
            assert answer.result is False
            assert frontend.ready_responses[0].max_model_len == 1_048_576


async def test_the_frontend_double_drives_a_command() -> None:
    command = [sys.executable, "-m", "trio_vllm", "mock-engine", "--handshake-address", "{address}"]
    async with spawn_engine(command) as mode, open_frontend(mode) as frontend:
        assert (await frontend.call("is_sleeping")).result is False


TESTS = """
import pytest
from trio_vllm import GenerateRequest, HandshakeOwner, SamplingParams, open_llm
from trio_vllm.mock import MockEngineConfig

REQUEST = GenerateRequest(prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=4))
CONFIG = MockEngineConfig(vllm_version="0.32.1")

@pytest.mark.mock_llm(engine_count=3, answers={(1,): [5]})
async def test_memory(mock_llm, autojump_clock):
    assert len(mock_llm.engines) == 3
    assert (await mock_llm.llm.generate(REQUEST)).token_ids == [5]

async def test_sockets(mock_engine):
    async with open_llm(HandshakeOwner(mock_engine.handshake_address)) as llm:
        await llm.generate(REQUEST)
    assert mock_engine.engine.prompts == [[1]]

def test_plain(mock_engine):
    assert mock_engine.engine.requests == []

@pytest.mark.mock_llm(CONFIG)
async def test_config_in_memory(mock_llm):
    assert mock_llm.llm.client.vllm_version == "0.32.1"

@pytest.mark.mock_engine(CONFIG, engine_count=2)
async def test_config_over_sockets(mock_engine):
    mode = HandshakeOwner(handshake_address=mock_engine.handshake_address, engine_count=2)
    async with open_llm(mode) as llm:
        assert llm.client.vllm_version == "0.32.1"

@pytest.mark.mock_llm(CONFIG, 2)
async def test_too_many(mock_llm):
    pass

def test_not_async(mock_llm):
    pass
"""

PAGE = (Path(__file__).parents[2] / "docs/howto/testing.md").read_text(encoding="utf-8")

EXAMPLES = {
    f"test_example_{number}.py": code
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    if re.search(r"^(async )?def test_", code, re.MULTILINE)
}
"""The tests that the page shows, each a file of its own."""

NEEDS_MARK = "mark the test with @pytest.mark.trio, or set trio_mode = true"

# A run of pytest costs more than all the tests in it, so each serves for what it can.


def is_plugin_installed() -> bool:
    """Whether pytest finds it by itself, as it does in an installed package."""
    return any(point.name == "trio_vllm.testing.plugin" for point in entry_points(group="pytest11"))


def run_pytest(folder: Path, tests: dict[str, str], settings: str, *options: str) -> list[str]:
    """What pytest says of files of tests that use the plugin: a line for each test at the end."""
    for name, code in tests.items():
        (folder / name).write_text(code, encoding="utf-8")
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}")
    # Plugins that have no part in it take longer to load than the tests to run.
    others = ("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:cacheprovider")
    plugins = others if is_plugin_installed() else ("-p", "trio_vllm.testing.plugin", *others)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", *plugins, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def outcomes(printed: list[str], outcome: str) -> dict[str, str]:
    """The tests with this outcome, and why if they have not passed."""
    lines = [line.split("::", 1)[1] for line in printed if re.match(rf"{outcome} \S+::", line)]
    return {name: reason for name, _, reason in (line.partition(" - ") for line in lines)}


def test_in_trio_mode(tmp_path: Path) -> None:
    """The fixtures, their marks, and those of the page's tests which pytest-trio need not be told of."""
    settings = "trio_mode = true\naddopts = --strict-markers\n"
    printed = run_pytest(tmp_path, {"test_it.py": TESTS, **EXAMPLES}, settings)

    own = {"test_memory", "test_sockets", "test_plain"}
    configured = {"test_config_in_memory", "test_config_over_sockets"}
    assert outcomes(printed, "PASSED").keys() == own | configured | names_of_examples()
    failed = outcomes(printed, "(?:FAILED|ERROR)")
    assert failed.keys() == {"test_too_many", "test_not_async"}
    assert NEEDS_MARK in failed["test_not_async"]
    refusal = "mock_llm() takes from 0 to 1 positional arguments but 2 were given"
    assert refusal in failed["test_too_many"]


def test_the_marks_are_told(tmp_path: Path) -> None:
    printed = "\n".join(run_pytest(tmp_path, {}, "", "--markers"))

    for name in ("mock_llm", "mock_engine"):
        assert f"@pytest.mark.{name}(config, *, engine_count=1, answers=None" in printed


def names_of_examples() -> set[str]:
    """The tests that the page shows."""
    return set(re.findall(r"(?m)^(?:async )?def (test_\w+)", "".join(EXAMPLES.values())))


def test_there_are_examples() -> None:
    assert (len(EXAMPLES), len(names_of_examples())) == (3, 3)


def test_examples_of_the_page_run(tmp_path: Path) -> None:
    """In a folder with no configuration; what lacks pytest-trio's mark is told which it needs."""
    (first, *_) = EXAMPLES.values()
    unmarked = {"test_unmarked.py": first.replace("@pytest.mark.trio\n", "")}
    assert unmarked["test_unmarked.py"] != first

    printed = run_pytest(tmp_path, EXAMPLES | unmarked, "")

    assert outcomes(printed, "PASSED").keys() == names_of_examples()
    (reason,) = outcomes(printed, "(?:FAILED|ERROR)").values()
    assert NEEDS_MARK in reason


def test_examples_of_the_page_without_pytest_trio(tmp_path: Path) -> None:
    """They say what to install."""
    printed = run_pytest(tmp_path, EXAMPLES, "", "-p", "no:trio")

    needs = "Failed: the fixture mock_llm needs pytest-trio: pip install pytest-trio"
    reasons = outcomes(printed, "ERROR")
    assert reasons.keys() == names_of_examples()
    assert [reason for reason in reasons.values() if needs not in reason] == []


def test_the_mark_takes_only_options_that_there_are() -> None:
    with pytest.raises(TypeError):
        mock_llm(engines=3)  # type: ignore[call-arg]


def test_a_record_of_no_engine_is_not_one() -> None:
    """`engine` is for one engine; of two it must be said which."""
    with mock_engine(engine_count=2) as engines, pytest.raises(ValueError):
        engines.engine  # noqa: B018
