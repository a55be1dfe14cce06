"""What is refused, `raise_for_error`, `from_generation_config`, and the package's silence."""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.llm.world import make_prompt, open_llm_world

from trio_vllm import EncodeRequest, GenerateRequest, PoolingParams, SamplingParams
from trio_vllm.concurrency import Opening
from trio_vllm.errors import (
    InvalidDataParallelRankError,
    InvalidFieldError,
    RequestFailedError,
)
from trio_vllm.testing import Answer, mock_llm

POOLING = EncodeRequest([1], pooling_params=PoolingParams(task="embed"))


async def test_raise_for_error() -> None:
    """An error of the engine's is raised on demand; without one nothing is."""
    async with mock_llm(answers={(1,): Answer(error="no memory")}) as mock:
        bad = await mock.llm.generate(GenerateRequest(request_id="b", prompt_token_ids=[1]))
        good = await mock.llm.generate(GenerateRequest(prompt_token_ids=[2]))

    good.raise_for_error()
    with pytest.raises(RequestFailedError) as caught:
        bad.raise_for_error()
    assert str(caught.value) == "request 'b' failed at the engine: no memory"
    assert (caught.value.code, caught.value.retryable) == ("scripted", False)


@pytest.mark.parametrize(
    ("eos", "first", "others"),
    [(2, 2, None), ([2, 5, 7], 2, [5, 7]), (None, None, None), ([], None, None)],
)
def test_a_generation_config(
    tmp_path: Path, eos: object, first: int | None, others: list[int] | None
) -> None:
    """Defaults and end-of-text ids; what is given wins, what is unknown is left out."""
    config = {"eos_token_id": eos, "top_p": 0.5, "temperature": 0.6, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    params = SamplingParams.from_generation_config(tmp_path, temperature=0.0, max_tokens=9)

    assert (params.eos_token_id, params.stop_token_ids) == (first, others)
    assert (params.top_p, params.temperature, params.max_tokens) == (0.5, 0.0, 9)


def test_what_is_no_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")

    with pytest.raises(ValueError, match="is no JSON object"):
        SamplingParams.from_generation_config(tmp_path)


def test_the_log_is_silent_by_default() -> None:
    """Python itself would print warnings."""
    handlers = logging.getLogger("trio_vllm").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("generate", [1, 2], r"generate takes a GenerateRequest\(\.\.\.\), not a list"),
        ("generate", "hello", r"generate takes a GenerateRequest\(\.\.\.\), not a str"),
        ("generate", POOLING, r"takes a GenerateRequest\(\.\.\.\), not an EncodeRequest"),
        ("encode", make_prompt(), r"encode takes an EncodeRequest\(\.\.\.\), not a GenerateR"),
        ("stream", None, r"stream takes a GenerateRequest\(\.\.\.\), not a NoneType"),
        ("call", make_prompt(), r"call takes an EngineCoreRequest\(\.\.\.\), not GenerateRequest"),
    ],
)
async def test_what_is_no_request(method: str, given: Any, said: str) -> None:
    """Each method says what it takes, before anything is sent."""
    async with open_llm_world() as world:
        owner = world.llm.client if method == "call" else world.llm
        with pytest.raises(TypeError, match=said):
            async with AsyncExitStack() as stack:
                taken = getattr(owner, method)(given)
                await (stack.enter_async_context(taken) if isinstance(taken, Opening) else taken)
        assert world.engine.received() == []


@pytest.mark.parametrize("given", ["3", 3.0, 0, True])
async def test_a_count_is_an_integer(given: Any) -> None:
    """The error says so, and not only how large it must be."""
    async with open_llm_world() as world:
        with pytest.raises(InvalidFieldError, match=f"an integer of at least 1, not {given!r}"):
            await world.llm.generate(make_prompt(max_tokens=given))


async def test_a_pin_to_no_engine_names_the_callers_id() -> None:
    """Not the one that the engine would have seen."""
    async with open_llm_world() as world:
        with pytest.raises(InvalidDataParallelRankError, match="request 'x' is pinned"):
            await world.llm.generate(make_prompt("x", request_data_parallel_rank=7))
