"""`mock_engine` and `mock_llm` are the fixtures of the pytest plugin, with marks of the same names.

``mock_engine`` needs pytest alone, ``mock_llm`` is for tests that pytest-trio runs. The arguments of
a mark ``@pytest.mark.mock_llm(CONFIG, engine_count=20)`` are those of the function.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from trio_vllm.testing import MockEngines, MockLlm
from trio_vllm.testing import mock_engine as run_mock_engine
from trio_vllm.testing import mock_llm as run_mock_llm

NEEDS_PYTEST_TRIO = (
    "the fixture mock_llm needs pytest-trio: pip install pytest-trio, and mark the test with"
    " @pytest.mark.trio. Without it there is the fixture mock_engine."
)

NEEDS_MARK = (
    "the fixture mock_llm is for async tests that pytest-trio runs: mark the test with"
    " @pytest.mark.trio, or set trio_mode = true in the configuration of pytest. For other tests"
    " there is the fixture mock_engine."
)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest know the marks."""
    for name in ("mock_engine", "mock_llm"):
        config.addinivalue_line(
            "markers",
            f"{name}(config, *, engine_count=1, answers=None, ...): how the fixture {name} runs"
            f" engines; the arguments are those of trio_vllm.testing.{name}, and config is a"
            " trio_vllm.mock.MockEngineConfig",
        )


def _arguments(request: pytest.FixtureRequest, name: str) -> tuple[Any, dict[str, Any]]:
    mark = request.node.get_closest_marker(name)
    return ((), {}) if mark is None else (mark.args, dict(mark.kwargs))


@pytest.fixture
def mock_engine(request: pytest.FixtureRequest) -> Iterator[MockEngines]:
    """Mock engines behind real sockets, at ``mock_engine.handshake_address``."""
    args, kwargs = _arguments(request, "mock_engine")
    with run_mock_engine(*args, **kwargs) as engines:
        yield engines


@pytest.fixture
def _pytest_trio_runs_it(request: pytest.FixtureRequest) -> None:
    """Fail a test that pytest-trio does not run, before pytest tries to use ``mock_llm`` in it."""
    if not request.config.pluginmanager.has_plugin("trio"):
        pytest.fail(NEEDS_PYTEST_TRIO, pytrace=False)
    if request.node.get_closest_marker("trio") is None:
        pytest.fail(NEEDS_MARK, pytrace=False)


# A plain fixture: pytest-trio runs those that are async, too, in tests with its mark.
@pytest.fixture
async def mock_llm(  # noqa: ASYNC900
    request: pytest.FixtureRequest, _pytest_trio_runs_it: None
) -> AsyncIterator[MockLlm]:
    """An `Llm`, as ``mock_llm.llm``, and mock engines in memory; for tests that pytest-trio runs."""
    args, kwargs = _arguments(request, "mock_llm")
    async with run_mock_llm(*args, **kwargs) as mock:
        yield mock  # noqa: ASYNC119
