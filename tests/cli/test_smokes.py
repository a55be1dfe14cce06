"""What each smoke asks, tells and demands; every option makes a difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from configparser import ConfigParser

import pytest
from tests.cli.conftest import RunSmoke
from tests.cli.fake_engine import FakeEngine, logprobs, token_by_token

from trio_vllm import EngineCoreOutput, EngineCoreRequest, FinishReason
from trio_vllm.cli.llm_smoke import main
from trio_vllm.protocol import RequestErrorInfo

COMMON = ["handshake_address", "engine_count", "input_address", "output_address"]
COMMON += ["engine_identities", "vllm_version", "dtype", "max_model_len", "num_gpu_blocks"]
COMMON += ["block_size"]


async def test_generate_tells_what_the_example_tells(run_smoke: RunSmoke, address: str) -> None:
    """The fields of vLLM's external_engine_smoke, in its order; several outputs are one answer."""
    engine = FakeEngine()

    outcome = await run_smoke("generate", engines=[engine])

    fields = [*COMMON, "request_id", "prompt_token_ids", "token_ids", "finish_reason"]
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert fields == list(outcome.findings)
    assert "model" not in outcome.findings
    assert (outcome.findings["vllm_version"], outcome.findings["dtype"]) == ("0.33.0", "float32")
    assert outcome.findings["handshake_address"] == address
    assert outcome.findings["engine_count"] == "1"
    assert outcome.findings["input_address"].startswith("tcp://127.0.0.1:")
    assert outcome.findings["output_address"].startswith("tcp://127.0.0.1:")
    assert outcome.findings["engine_identities"] == "[[0, 0]]"
    assert outcome.findings["prompt_token_ids"] == "[20841, 448, 6896, 25, 23811]"
    assert outcome.findings["token_ids"] == "[1, 2, 3, 4, 5]"
    assert outcome.findings["finish_reason"] == "length"
    (request,) = engine.requests
    assert request.external_req_id == outcome.findings["request_id"]


async def test_generate_samples_as_the_example_does(run_smoke: RunSmoke) -> None:
    """Temperature 1, all tokens, watermarking allowed, and nothing ends it but its length."""
    engine = FakeEngine()

    await run_smoke("generate", engines=[engine])

    params = engine.requests[0].sampling_params
    assert params is not None
    assert (
        params.temperature,
        params.top_p,
        params.top_k,
        params.watermarking,
    ) == (1.0, 1.0, 0, True)
    assert not params.stop_token_ids
    assert params.eos_token_id is None


async def test_max_tokens(run_smoke: RunSmoke) -> None:
    """So many tokens are asked for and printed."""
    outcome = await run_smoke("generate", "--max-tokens", "3")

    assert outcome.findings["token_ids"] == "[1, 2, 3]"


async def test_model_is_a_label(run_smoke: RunSmoke) -> None:
    """It is printed and nothing else."""
    outcome = await run_smoke("generate", "--model", "my model")

    assert outcome.findings["model"] == "my model"


async def test_engine_count(run_smoke: RunSmoke) -> None:
    """So many engines are waited for."""
    outcome = await run_smoke(
        "generate", "--engine-count", "2", engines=[FakeEngine(0), FakeEngine(1)]
    )

    assert outcome.exit_code == 0
    assert outcome.findings["engine_count"] == "2"
    assert outcome.findings["engine_identities"] == "[[0, 0], [1, 0]]"


async def test_host(run_smoke: RunSmoke) -> None:
    """The engines are told addresses of this interface."""
    outcome = await run_smoke("generate", "--host", "127.0.0.2")

    assert outcome.exit_code == 0
    assert outcome.findings["input_address"].startswith("tcp://127.0.0.2:")
    assert outcome.findings["output_address"].startswith("tcp://127.0.0.2:")


async def test_ready_timeout(run_smoke: RunSmoke) -> None:
    """An engine that does not come is named, with the phase and the time; nothing is printed."""
    outcome = await run_smoke("generate", "--ready-timeout-secs", "0.05", engines=[])

    assert (outcome.exit_code, outcome.out) == (1, "")
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith(
        "llm-smoke: startup failed while waiting for HELLO from engine 0 (gave up after 0.05 s);"
        " no engine has connected to "
    )


@pytest.mark.parametrize("smoke", ["generate", "logprobs"])
async def test_output_timeout(run_smoke: RunSmoke, smoke: str) -> None:
    """An output that does not come is reported, with what was waited for."""
    engine = FakeEngine(is_mute=True)

    outcome = await run_smoke(smoke, "--output-timeout-secs", "0.05", engines=[engine])

    request_id = outcome.findings["request_id"]
    assert outcome.exit_code == 1
    assert outcome.err == (
        f"llm-smoke: the final output of request {request_id} did not come within 0.05 s\n"
    )


async def test_output_timeout_of_a_call(run_smoke: RunSmoke) -> None:
    """An answer that does not come is reported, with the method."""

    engine = FakeEngine(is_mute=True)

    outcome = await run_smoke("utility", "--output-timeout-secs", "0.05", engines=[engine])

    assert outcome.exit_code == 1
    assert "llm-smoke: utility call 'is_sleeping' (call id 2)" in outcome.err
    assert "engine 0 after 0.05 s" in outcome.err


async def test_json(run_smoke: RunSmoke) -> None:
    """One object instead of lines, with all that was found."""
    outcome = await run_smoke("generate", "--json-full")

    (line,) = outcome.out.splitlines()
    report = json.loads(line)
    assert report["smoke"] == "generate"
    assert report["passed"] is True
    assert report["token_ids"] == [1, 2, 3, 4, 5]
    assert report["engine_identities"] == [[0, 0]]
    assert report["seconds"] > 0
    assert "failure" not in report


async def test_json_of_a_failure(run_smoke: RunSmoke) -> None:
    """The object tells the reason too."""
    outcome = await run_smoke("generate", "--json", "--ready-timeout-secs", "0.05", engines=[])

    report = json.loads(outcome.out)
    assert outcome.exit_code == 1
    assert report["passed"] is False
    assert "waiting for HELLO" in report["failure"]
    assert outcome.err == f"llm-smoke: {report['failure']}\n"


async def test_json_knows_no_infinity(run_smoke: RunSmoke) -> None:
    """What JSON cannot express is text."""

    def complete(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        for output in token_by_token(request):
            assert output.new_logprobs is not None
            output.new_logprobs.logprobs[0, 0] = float("-inf")
            yield output

    outcome = await run_smoke("logprobs", "--json-full", engines=[FakeEngine(complete=complete)])

    assert json.loads(outcome.out)["new_logprobs"] == {
        "rows": 1,
        "columns": 3,
        "token_ids": [3],
        "logprobs": ["-inf"],
        "ranks": [1],
    }


async def test_seconds_include_the_startup(run_smoke: RunSmoke) -> None:
    """A smoke without an engine took as long as it waited for one."""
    tokens = ["--json", "--ready-timeout-secs", "0.05"]

    one = await run_smoke("generate", *tokens, engines=[])
    several = await run_smoke("all", *tokens, engines=[])

    assert json.loads(one.out)["seconds"] >= 0.05
    assert json.loads(several.out)["smokes"]["generate"]["seconds"] >= 0.05


async def test_debug(run_smoke: RunSmoke) -> None:
    """A failure shows where it comes from, if asked, and then its reason."""
    tokens = ["generate", "--ready-timeout-secs", "0.05"]

    quiet = await run_smoke(*tokens, engines=[])
    talkative = await run_smoke(*tokens, "--debug", engines=[])

    assert "Traceback" not in quiet.err
    assert talkative.err.startswith("Traceback")
    assert talkative.err.splitlines()[-1] == quiet.err.strip()


async def test_verbose(run_smoke: RunSmoke) -> None:
    """The startup's progress is on standard error, if asked."""
    outcome = await run_smoke("generate", "--verbose")

    assert "INFO waiting for HELLO of engines [0]" in outcome.err.splitlines()
    assert outcome.exit_code == 0


async def test_generate_demands_no_more_than_was_asked_for(run_smoke: RunSmoke) -> None:
    """An engine that goes on after ``max_tokens`` is at fault."""

    def complete(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        yield EngineCoreOutput(request.request_id, [1] * 6, finish_reason=FinishReason.LENGTH)

    outcome = await run_smoke("generate", engines=[FakeEngine(complete=complete)])

    assert outcome.exit_code == 1
    assert "goes on after 5 tokens, which is all that was asked for" in outcome.err


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([([1], FinishReason.LENGTH)], "1 tokens came instead of 5"),
        ([([], FinishReason.STOP)], "0 tokens came instead of 5"),
        ([([1], None), ([], FinishReason.ABORT)], "finish_reason is abort"),
        ([([1], FinishReason.ERROR)], "finish_reason is error, expected was length or stop: "),
    ],
)
async def test_generate_demands_a_whole_completion(
    run_smoke: RunSmoke, outputs: list[tuple[list[int], FinishReason | None]], reason: str
) -> None:
    """All tokens that were asked for, or fewer if something stops it."""

    def complete(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        for token_ids, finish_reason in outputs:
            error = None
            if finish_reason is FinishReason.ERROR:
                error = RequestErrorInfo(code="engine_paused", message="no")
            yield EngineCoreOutput(
                request.request_id, token_ids, finish_reason=finish_reason, error=error
            )

    outcome = await run_smoke("generate", engines=[FakeEngine(complete=complete)])

    assert outcome.exit_code == 1
    assert outcome.err.startswith(f"llm-smoke: {reason}")
    assert len(outcome.err.splitlines()) == 1
    assert "finish_reason" in outcome.findings


async def test_generate_may_stop(run_smoke: RunSmoke) -> None:
    """An engine that ends a text by itself is fine."""

    def complete(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        yield EngineCoreOutput(request.request_id, [1], finish_reason=FinishReason.STOP)

    outcome = await run_smoke("generate", engines=[FakeEngine(complete=complete)])

    assert (outcome.exit_code, outcome.findings["finish_reason"]) == (0, "stop")


async def test_generate_may_reach_the_end_of_the_context(run_smoke: RunSmoke) -> None:
    """Then fewer tokens than asked for are all that there can be."""

    def complete(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        yield EngineCoreOutput(request.request_id, [1] * 507, finish_reason=FinishReason.LENGTH)

    outcome = await run_smoke(
        "generate", "--max-tokens", "600", engines=[FakeEngine(complete=complete)]
    )

    assert (outcome.exit_code, outcome.err) == (0, "")


# utility ------------------------------------------------------------------------------------------


async def test_utility_tells_what_the_example_tells(run_smoke: RunSmoke) -> None:
    """The fields of vLLM's external_engine_utility_call, in its order."""
    engine = FakeEngine()

    outcome = await run_smoke("utility", engines=[engine])

    assert (outcome.exit_code, outcome.err) == (0, "")
    assert [*COMMON, *outcome.out.splitlines()[len(COMMON) :]] == [
        *COMMON,
        "is_sleeping(initial)=false",
        "reset_prefix_cache=true",
        "reset_mm_cache=ok",
        "reset_encoder_cache=ok",
        "sleep=ok level=1 mode=abort",
        "is_sleeping(after_sleep)=true",
        "wake_up=ok",
        "is_sleeping(after_wake)=false",
    ]
    assert engine.calls == {
        "is_sleeping": [],
        "reset_prefix_cache": [False, False],
        "reset_mm_cache": [],
        "reset_encoder_cache": [],
        "sleep": [1, "abort"],
        "wake_up": [None],
    }


async def test_reset_running_requests(run_smoke: RunSmoke) -> None:
    """The first argument of the reset."""
    engine = FakeEngine()

    await run_smoke("utility", "--reset-running-requests", engines=[engine])

    assert engine.calls["reset_prefix_cache"] == [True, False]


async def test_reset_external(run_smoke: RunSmoke) -> None:
    """The second argument of the reset."""
    engine = FakeEngine()

    await run_smoke("utility", "--reset-external", engines=[engine])

    assert engine.calls["reset_prefix_cache"] == [False, True]


async def test_the_reset_may_be_refused(run_smoke: RunSmoke) -> None:
    """An engine that is at work does not reset; that is told, and no failure."""
    engine = FakeEngine(results={"reset_prefix_cache": False})

    outcome = await run_smoke("utility", engines=[engine])

    assert (outcome.exit_code, outcome.findings["reset_prefix_cache"]) == (0, "false")


async def test_sleep_level_and_mode(run_smoke: RunSmoke) -> None:
    """Both reach the engine and are printed."""
    engine = FakeEngine()

    outcome = await run_smoke(
        "utility", "--sleep-level", "2", "--sleep-mode", "keep", engines=[engine]
    )

    assert engine.calls["sleep"] == [2, "keep"]
    assert outcome.findings["sleep"] == "ok level=2 mode=keep"


async def test_skip_sleep_wake(run_smoke: RunSmoke) -> None:
    """The engine is let alone."""
    engine = FakeEngine()

    outcome = await run_smoke("utility", "--skip-sleep-wake", engines=[engine])

    assert (outcome.exit_code, outcome.findings["sleep_wake"]) == (0, "skipped")
    assert "sleep" not in engine.calls
    assert "wake_up" not in engine.calls


async def test_expected_is_sleeping(run_smoke: RunSmoke) -> None:
    """An engine that sleeps at first is right only if it was to be expected, and the reverse."""
    right = await run_smoke(
        "utility", "--expected-is-sleeping", engines=[FakeEngine(is_sleeping=True)]
    )
    too_early = await run_smoke("utility", engines=[FakeEngine(is_sleeping=True)])
    awake = await run_smoke("utility", "--expected-is-sleeping")

    assert (right.exit_code, right.findings["is_sleeping(initial)"]) == (0, "true")
    assert (too_early.exit_code, awake.exit_code) == (1, 1)
    assert too_early.err == "llm-smoke: is_sleeping(initial) is true, expected was false\n"
    assert awake.err == "llm-smoke: is_sleeping(initial) is false, expected was true\n"


async def test_sleep_must_work(run_smoke: RunSmoke) -> None:
    """An engine that is always awake, like vLLM's own mock, does not pass."""
    engine = FakeEngine(results={"is_sleeping": False})

    outcome = await run_smoke("utility", engines=[engine])

    assert outcome.exit_code == 1
    assert outcome.err == "llm-smoke: is_sleeping(after_sleep) is false, expected was true\n"


async def test_waking_up_must_work(run_smoke: RunSmoke) -> None:
    """Nor does one that does not wake up."""

    outcome = await run_smoke("utility", engines=[FakeEngine(wakes_up=False)])

    assert outcome.exit_code == 1
    assert outcome.err == "llm-smoke: is_sleeping(after_wake) is true, expected was false\n"


async def test_a_call_that_fails_is_reported(run_smoke: RunSmoke) -> None:
    """With the engine's own words."""
    engine = FakeEngine(results={"reset_mm_cache": ValueError("Call failed: no\nmemory")})

    outcome = await run_smoke("utility", engines=[engine])

    assert outcome.exit_code == 1
    (line,) = outcome.err.splitlines()
    assert "'reset_mm_cache'" in line
    assert "engine 0: Call failed: no memory" in line


# logprobs -----------------------------------------------------------------------------------------


async def test_logprobs_tells_what_the_example_tells(run_smoke: RunSmoke) -> None:
    """The fields of vLLM's external_engine_logprobs, in its order."""
    engine = FakeEngine()

    outcome = await run_smoke("logprobs", engines=[engine])

    request_id = outcome.findings["request_id"]
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[len(COMMON) :] == [
        f"request_id={request_id}",
        "prompt_len=480",
        "base_prompt_len=5",
        "prompt_repeats=96",
        "requested_logprobs=2",
        "requested_prompt_logprobs=1",
        "token_ids=[1]",
        "finish_reason=length",
        "new_logprobs=1 rows of 3",
        "new_prompt_logprobs_tensors=479 rows of 2",
    ]
    (request,) = engine.requests
    assert (request_id, 0.0) == (request.request_id, request.arrival_time)
    assert list(request.prompt_token_ids or ()) == [20841, 448, 6896, 25, 23811] * 96


async def test_logprobs_of_several_tokens(run_smoke: RunSmoke) -> None:
    """Those of the prompt come with the first output, the others with each: all of them count."""
    outcome = await run_smoke("logprobs", "--max-tokens", "3")

    assert (outcome.exit_code, outcome.err) == (0, "")
    assert outcome.findings["token_ids"] == "[1, 2, 3]"
    assert outcome.findings["new_logprobs"] == "3 rows of 3"
    assert outcome.findings["new_prompt_logprobs_tensors"] == "479 rows of 2"


async def test_numbers_of_logprobs(run_smoke: RunSmoke) -> None:
    """Both numbers reach the engine and are printed."""
    outcome = await run_smoke("logprobs", "--logprobs", "4", "--prompt-logprobs", "-1")

    assert outcome.exit_code == 0
    assert outcome.findings["requested_logprobs"] == "4"
    assert outcome.findings["requested_prompt_logprobs"] == "-1"
    assert outcome.findings["new_logprobs"] == "1 rows of 5"
    assert outcome.findings["new_prompt_logprobs_tensors"] == "479 rows of 7"


async def test_prompt_repeats(run_smoke: RunSmoke) -> None:
    """The prompt is as long as that."""
    outcome = await run_smoke("logprobs", "--prompt-repeats", "2")

    assert outcome.exit_code == 0
    assert outcome.findings["prompt_len"] == "10"
    assert outcome.findings["prompt_repeats"] == "2"
    assert outcome.findings["new_prompt_logprobs_tensors"] == "9 rows of 2"


async def test_a_prompt_that_does_not_fit_is_refused(run_smoke: RunSmoke) -> None:
    """Nothing is sent to the engine, which would die of it."""
    engine = FakeEngine()

    outcome = await run_smoke("logprobs", "--prompt-repeats", "200", engines=[engine])

    assert outcome.exit_code == 1
    assert len(outcome.err.splitlines()) == 1
    assert engine.requests == []


@pytest.mark.parametrize(
    ("rows", "prompt_rows", "finish_reason", "reason"),
    [
        (0, 479, FinishReason.LENGTH, "has 0 rows for 1 tokens"),
        (1, 0, FinishReason.LENGTH, "has 0 rows, but a prompt of 480 tokens has 479"),
        (1, 478, FinishReason.LENGTH, "has 478 rows, but a prompt of 480 tokens has 479"),
        (1, 480, FinishReason.LENGTH, "has 480 rows, but a prompt of 480 tokens has 479"),
        (1, 479, FinishReason.STOP, "finish_reason is stop, expected was length"),
        (1, 479, FinishReason.LENGTH, ""),
    ],
)
async def test_logprobs_demands_all_rows(
    run_smoke: RunSmoke, rows: int, prompt_rows: int, finish_reason: FinishReason, reason: str
) -> None:
    """A row per token, and one per token of the prompt but the first."""

    def complete(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        yield EngineCoreOutput(
            request.request_id,
            [1],
            new_logprobs=logprobs(rows, 2) if rows else None,
            new_prompt_logprobs_tensors=logprobs(prompt_rows, 1) if prompt_rows else None,
            finish_reason=finish_reason,
        )

    outcome = await run_smoke("logprobs", engines=[FakeEngine(complete=complete)])

    assert outcome.exit_code == (1 if reason else 0)
    assert outcome.err.startswith("llm-smoke: ") == bool(reason)
    assert outcome.err.removesuffix("\n").endswith(reason)


# all ----------------------------------------------------------------------------------------------


async def test_all_runs_all_over_one_connection(run_smoke: RunSmoke) -> None:
    """An engine serves one in its life; the last section sums up."""
    engine = FakeEngine()

    outcome = await run_smoke("all", engines=[engine])

    assert (outcome.exit_code, outcome.err) == (0, "")
    assert [request.sampling_params.max_tokens for request in engine.requests] == [5, 1]  # type: ignore[union-attr]
    assert "sleep" in engine.calls
    sections = ConfigParser(interpolation=None, delimiters="=")
    sections.read_string(outcome.out)
    assert sections.sections() == ["generate", "utility", "logprobs", "all"]
    assert sections["generate"]["token_ids"] == "[1, 2, 3, 4, 5]"
    assert sections["utility"]["is_sleeping(after_sleep)"] == "true"
    verdicts = {name: sections["all"][name] for name in sections.sections()[:-1]}
    assert verdicts == {"generate": "passed", "utility": "passed", "logprobs": "passed"}
    assert float(sections["all"]["utility.seconds"]) >= 0


async def test_all_takes_the_options_of_all(run_smoke: RunSmoke) -> None:
    """Each option reaches the smoke it is for."""
    engine = FakeEngine()
    tokens = ["--max-tokens", "2", "--sleep-level", "2", "--prompt-repeats", "3", "--json-full"]

    outcome = await run_smoke("all", *tokens, engines=[engine])

    report = json.loads(outcome.out)
    assert report["passed"] is True
    assert list(report["smokes"]) == ["generate", "utility", "logprobs"]
    assert report["smokes"]["generate"]["token_ids"] == [1, 2]
    assert report["smokes"]["logprobs"]["token_ids"] == [1, 2]
    assert report["smokes"]["logprobs"]["prompt_len"] == 15
    assert engine.calls["sleep"][0] == 2


async def test_all_goes_on_after_a_failure(run_smoke: RunSmoke) -> None:
    """The reason names its smoke, the others run, and the exit code tells."""
    engine = FakeEngine(is_sleeping=True)

    outcome = await run_smoke("all", engines=[engine])

    assert outcome.exit_code == 1
    assert outcome.err == "llm-smoke: utility: is_sleeping(initial) is true, expected was false\n"
    assert outcome.out.count("passed") == 2
    assert outcome.out.count("failed") == 1


async def test_all_without_engines(run_smoke: RunSmoke) -> None:
    """There is one startup; what cannot be run after it is skipped, and the whole has failed."""
    outcome = await run_smoke("all", "--ready-timeout-secs", "0.05", engines=[])

    assert outcome.exit_code == 1
    assert [line.split()[1] for line in outcome.err.splitlines()] == ["generate:"]
    assert outcome.findings["generate"] == "failed"
    assert outcome.findings["utility"] == outcome.findings["logprobs"] == "skipped"
    assert outcome.findings["utility.reason"] == "not run, since there is no engine any more"


@pytest.mark.parametrize("smoke", ["generate", "utility", "logprobs", "all"])
def test_mock(smoke: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each smoke passes against mock engines in this process, on addresses of their own."""
    assert main([smoke, "--mock", "--engine-count", "2"]) == 0
    out, err = capsys.readouterr()
    assert "engine_identities=[[0, 0], [1, 0]]" in out
    assert err == ""


def test_mock_at_an_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be given."""
    assert main(["generate", "--mock", "--handshake-address", address]) == 0
    assert f"handshake_address={address}" in capsys.readouterr().out
