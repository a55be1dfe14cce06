"""`raise_for_error`, `from_generation_config`, and the package's silence."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from trio_vllm import GenerateRequest, SamplingParams
from trio_vllm.errors import RequestFailedError
from trio_vllm.testing import Answer, mock_llm


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
