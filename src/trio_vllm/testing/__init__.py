"""Mock engines and a frontend double, for the tests of programs that talk to engines. Public.

- `mock_llm`: a client and mock engines in one process, also in virtual time;
- `mock_engine`: mock engines behind real sockets, in a thread;
- `Answer`: what an engine answers to a prompt, instead of random tokens;
- `open_frontend`: a frontend double, for those who write engines.

For pytest there are fixtures and marks of the names of the first two; see `trio_vllm.testing.plugin`.
"""

from __future__ import annotations

from trio_vllm._lazy import install_lazy_importer

TYPE_CHECKING = False  # type checkers know better; importing it from typing would take 10 ms

if TYPE_CHECKING or not install_lazy_importer(__name__):
    from trio_vllm.testing.engines import MockEngines as MockEngines
    from trio_vllm.testing.engines import MockLlm as MockLlm
    from trio_vllm.testing.engines import mock_engine as mock_engine
    from trio_vllm.testing.engines import mock_llm as mock_llm
    from trio_vllm.testing.frontend import Frontend as Frontend
    from trio_vllm.testing.frontend import open_frontend as open_frontend
    from trio_vllm.testing.script import NEVER as NEVER
    from trio_vllm.testing.script import Answer as Answer
    from trio_vllm.testing.script import Answers as Answers
    from trio_vllm.testing.script import EngineRecord as EngineRecord
