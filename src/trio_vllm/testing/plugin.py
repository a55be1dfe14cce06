"""`mock_engine` and `mock_llm` are the fixtures of the pytest plugin, with marks of the same names.

``mock_engine`` needs pytest alone, ``mock_llm`` is for tests that pytest-trio runs. The arguments of
a mark ``@pytest.mark.mock_llm(engine_count=20)`` are those of the function.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from trio_vllm.testing import MockEngines, MockLlm
from trio_vllm.testing import mock_engine as run_mock_engine
from trio_vllm.testing import mock_llm as run_mock_llm


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest know the marks."""
    config.addinivalue_line("markers", "mock_engine(**options): how the fixture runs engines")
    config.addinivalue_line("markers", "mock_llm(**options): how the fixture runs engines")


def _options(request: pytest.FixtureRequest, name: str) -> dict[str, Any]:
    mark = request.node.get_closest_marker(name)
    return {} if mark is None else dict(mark.kwargs)


@pytest.fixture
def mock_engine(request: pytest.FixtureRequest) -> Iterator[MockEngines]:
    """Mock engines behind real sockets, at ``mock_engine.handshake_address``."""
    with run_mock_engine(**_options(request, "mock_engine")) as engines:
        yield engines


if find_spec("pytest_trio") is not None:
    import pytest_trio

    @pytest_trio.trio_fixture  # type: ignore[untyped-decorator]
    async def mock_llm(request: pytest.FixtureRequest) -> AsyncIterator[MockLlm]:  # noqa: ASYNC900
        """An `Llm`, as ``mock_llm.llm``, and mock engines in memory."""
        async with run_mock_llm(**_options(request, "mock_llm")) as mock:
            yield mock  # noqa: ASYNC119
