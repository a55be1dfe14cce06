"""`mock_llm` and `mock_engine`: mock engines in the process of a test."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import attrs
import trio

from trio_vllm.client import LoadBalancer, open_client
from trio_vllm.concurrency import explains_misuse, running
from trio_vllm.llm import Llm, Observer
from trio_vllm.mock import (
    Lockstep,
    MockEngineConfig,
    ServeOptions,
    TransferHub,
    serve_in_memory,
    serve_mock_engines,
)
from trio_vllm.testing.script import Answers, EngineRecord, Script
from trio_vllm.transport import InMemory
from trio_vllm.values import define

DEFAULTS = MockEngineConfig()

OUTPUT_HIGH_WATER_MARK = 1000
"""Messages that a client may be behind before the engines wait for it; that of ØMQ by default."""


@define(eq=False)
class MockEngines:
    """Mock engines, and what they have received."""

    scripts: Sequence[Script]
    handshake_address: str
    """Where the frontend is to wait for them; ``memory`` if it is ours."""

    @property
    def engines(self) -> list[EngineRecord]:
        """What each engine has received, by index."""
        return [script.record for script in self.scripts]

    @property
    def engine(self) -> EngineRecord:
        """What the only engine has received."""
        (record,) = self.engines
        return record


@define(eq=False)
class MockLlm(MockEngines):
    """An `Llm`, and the mock engines that serve it."""

    llm: Llm = attrs.field(kw_only=True)
    _members: Sequence[_Member] = attrs.field(kw_only=True)

    def kill(self, engine_index: int) -> None:
        """Let an engine die, as by SIGKILL: its connections break."""
        self._members[engine_index].kill()


@explains_misuse("mock_llm", instead="trio_vllm.testing.mock_engine")
@asynccontextmanager
async def mock_llm(
    config: MockEngineConfig = DEFAULTS,
    *,
    engine_count: int = 1,
    answers: Answers | None = None,
    load_balancer: LoadBalancer | None = None,
    vocab_size: int | None = None,
    stream_interval: int = 1,
    randomize_request_ids: bool = True,
    observers: Sequence[Observer] = (),
    transfers: TransferHub | None = None,
) -> AsyncIterator[MockLlm]:
    """Run mock engines and a client in this process, connected in memory.

    Nothing of it waits for the world outside, and all of it goes by trio's clock. With
    `trio.testing.MockClock` (pytest-trio's ``autojump_clock``) the engines' times pass at once, and
    each run gives the same result, but for random request ids.

    Args:
      config: How the engines behave.
      engine_count: How many there are.
      answers: What they answer to which prompt.
      load_balancer: As for `open_client`.
      vocab_size: As for `open_client`.
      stream_interval: As for `open_llm`.
      randomize_request_ids: As for `open_llm`; without it, tokens are the same in each run.
      observers: As for `open_llm`.
      transfers: For prefill/decode disaggregation, the same for all blocks whose engines fetch KV
        blocks from each other.
    """
    meeting = InMemory(
        engine_count,
        coordinator=config.lockstep,
        output_high_water_mark=OUTPUT_HIGH_WATER_MARK,
    )
    lockstep = Lockstep()
    scripts = [Script(EngineRecord(index), answers) for index in range(engine_count)]
    members = [_Member(config, script, meeting, lockstep, transfers) for script in scripts]
    async with (
        running(*(member.serve for member in members)),
        open_client(meeting, load_balancer=load_balancer, vocab_size=vocab_size) as client,
    ):
        llm = Llm(
            client,
            randomize_request_ids=randomize_request_ids,
            stream_interval=stream_interval,
            observers=observers,
            clock=trio.current_time,
        )
        yield MockLlm(scripts, "memory", llm=llm, members=members)


@define(eq=False)
class _Member:
    """One engine in memory."""

    _config: MockEngineConfig
    _script: Script
    _meeting: InMemory
    _lockstep: Lockstep
    _transfers: TransferHub | None
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    async def serve(self) -> None:
        """Task: serve until killed."""
        with self._scope:
            await serve_in_memory(
                self._config,
                self._meeting,
                self._script.record.engine_index,
                lockstep=self._lockstep,
                tap=self._script.tap,
                transfers=self._transfers,
            )

    def kill(self) -> None:
        """End it without a word."""
        self._scope.cancel(reason="killed by the test")
        self._meeting.leave(self._script.record.engine_index)


# Over sockets -------------------------------------------------------------------------------------


@contextmanager
def mock_engine(
    config: MockEngineConfig = DEFAULTS,
    *,
    engine_count: int = 1,
    handshake_address: str | None = None,
    answers: Answers | None = None,
) -> Iterator[MockEngines]:
    """Run mock engines in a thread while the block runs, for a frontend at a real address.

    For programs that open their connection themselves, whatever they are written with. Engines serve
    one frontend after the other.

    Args:
      config: How the engines behave.
      engine_count: How many there are.
      handshake_address: Where the frontend waits; an ``ipc://`` address of its own if None.
      answers: What they answer to which prompt; a function is called in the engines' thread.

    Raises:
      EngineDeadError: An engine could not go on. It is raised at the end of the block.
    """
    with tempfile.TemporaryDirectory(prefix="mock-") as folder:
        address = handshake_address or f"ipc://{folder}/handshake"
        scripts = [Script(EngineRecord(index), answers) for index in range(engine_count)]
        options = ServeOptions(handshake_address=address, engine_count=engine_count)
        thread = _EngineThread(config, options, scripts)
        thread.start()
        try:
            yield MockEngines(scripts, address)
        finally:
            thread.stop()
        if thread.error is not None:
            raise thread.error


class _EngineThread(threading.Thread):
    """Mock engines in a thread of their own."""

    def __init__(
        self, config: MockEngineConfig, options: ServeOptions, scripts: Sequence[Script]
    ) -> None:
        super().__init__(name="mock-engine", daemon=True)
        self.error: Exception | None = None
        self._serve = partial(
            serve_mock_engines,
            config,
            options,
            tap=lambda engine_index, channels: scripts[engine_index].tap(channels),
        )
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._has_begun = threading.Event()

    def run(self) -> None:
        """Serve until `stop`."""
        try:
            trio.run(self._run)
        except Exception as error:
            self.error = error
        finally:
            self._has_begun.set()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._has_begun.set()
        with self._scope:
            await self._serve()

    def stop(self) -> None:
        """End the engines, and wait for that."""
        self._has_begun.wait()
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self.join()
